"""PyTorch's own ways to save memory, each applied to a copy of a model, for others to be held against.

Checkpointing by blocks needs blocks: the members of the outermost `Sequential` and `ModuleList` of a model
that have submodules themselves. Plain layers of a `Sequential` between them, as the stem of a ResNet or all
of a VGG, are a block too, cut after each pooling.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

__all__ = ["FAMILIES", "Method", "NotApplicableError", "compiler", "methods", "segment_counts"]

FAMILIES = ("sequential", "blocks", "selective", "budget", "save_on_cpu")
"""checkpoint_sequential, checkpoint per block, selective checkpoint per block, activation_memory_budget, and
copies of what backward needs to the host's memory, which save nothing on a CPU."""

_Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a step, by position and by name."""

_RECOMPILATIONS = 1000
_POOLING = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)

_aten = torch.ops.aten
_HEAVY = (
    _aten.mm,
    _aten.addmm,
    _aten.bmm,
    _aten.baddbmm,
    _aten.convolution,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_attention_math,
)


class NotApplicableError(Exception):
    """A method cannot be applied to this model; the text says why."""


@dataclass(frozen=True, slots=True)
class Method:
    """One of PyTorch's methods at one setting.

    Args:
        name: For tables.
        apply: Changes a module, of which nothing has run yet, into one that saves memory. It raises
            `NotApplicableError` where the method asks for a structure that the module does not have.
    """

    name: str
    apply: Callable[[nn.Module], None]


def methods(
    module: nn.Module,
    args: Sequence[Any],
    families: Sequence[str],
    settings: Sequence[float],
    keywords: Mapping[str, Any] | None = None,
) -> list[Method]:
    """The methods to measure for a model.

    Args:
        module: The model; it is not changed.
        args: Arguments of a step.
        families: Some of `FAMILIES`.
        settings: Values of `activation_memory_budget`.
        keywords: Keyword arguments of a step.
    """
    call = tuple(args), dict(keywords or {})
    found: list[Method] = []
    if "sequential" in families:
        longest = max((len(_units(members)) for members in _lists(module)), default=0)
        for count in segment_counts(longest) or [2]:
            apply = functools.partial(_checkpoint_sequentially, call=call, segments=count)
            found.append(Method(f"checkpoint_sequential {count}", apply))
    if "blocks" in families:
        found.append(Method("checkpoint per block", _checkpoint_blocks))
    if "selective" in families:
        selective = functools.partial(
            _checkpoint_blocks, use_reentrant=False, context_fn=_heavy_results_saved
        )
        found.append(Method("selective checkpoint per block", selective))
    if "budget" in families:
        found += [
            Method(f"activation_memory_budget {setting:g}", functools.partial(_compile, setting=setting))
            for setting in settings
        ]
    if "save_on_cpu" in families:
        found.append(Method("save_on_cpu", _save_on_cpu))
    return found


def _save_on_cpu(module: nn.Module) -> None:
    """Keeps what backward needs in the host's memory, which is pinned if there is a GPU."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    module.forward = run


# ---------------------------------------------------------------------- blocks


def _checkpoint_blocks(module: nn.Module, **options: Any) -> None:
    """Puts `torch.utils.checkpoint` around each block.

    Args:
        module: Changed in place.
        options: Of `torch.utils.checkpoint.checkpoint`; `use_reentrant=False` unless they say otherwise.

    Raises:
        NotApplicableError: There are no blocks.
    """
    groups = list(_blocks(module))
    if not groups:
        raise NotApplicableError("the model has no blocks: no Sequential or ModuleList")
    members = [member for group in groups for member in group]
    if len(set(members)) < len(members):
        raise NotApplicableError("a module of the model is in two blocks")

    def run(functions: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
        given = {"use_reentrant": False, **options}
        return checkpoint(_chained(functions), *args, **given, **kwargs)

    for group in groups:
        _fuse(group, run)


def _heavy_results_saved() -> Any:
    """Contexts that keep the results of products, convolutions and attention, and recompute the rest.

    An in-place operation on such a result, as a ReLU on a convolution's, changes what was kept. torch
    refuses it without `allow_cache_entry_mutation`; with it the numbers are right where the operation may
    run twice on its own result.
    """
    return create_selective_checkpoint_contexts(_policy, allow_cache_entry_mutation=True)


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    heavy = getattr(op, "overloadpacket", None) in _HEAVY
    return CheckpointPolicy.MUST_SAVE if heavy else CheckpointPolicy.PREFER_RECOMPUTE


def _blocks(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Modules that are called one after the other and make a block together."""
    if isinstance(module, nn.Sequential):
        yield from _runs(module)
        return
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList):
            if _has_children(child):
                yield [child]
        else:
            yield from _blocks(child)


def _runs(sequential: nn.Sequential) -> list[list[nn.Module]]:
    """Its blocks: members with submodules, and the runs of plain layers between them.

    A layer that works in place stays with the block before it, whose result it overwrites.
    """
    groups: list[list[nn.Module]] = []
    in_run = False
    for member in sequential:
        if groups and (_is_in_place(member) or (in_run and not _has_children(member))):
            groups[-1].append(member)
        else:
            groups.append([member])
            in_run = not _has_children(member)
        in_run = in_run and not isinstance(member, _POOLING)
    return groups


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _is_in_place(module: nn.Module) -> bool:
    return bool(getattr(module, "inplace", False))


def _lists(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The members of each outermost list."""
    if isinstance(module, nn.Sequential | nn.ModuleList):
        yield list(module.children())
    else:
        for child in module.children():
            yield from _lists(child)


# ---------------------------------------------------------------------- segments


def segment_counts(length: int) -> list[int]:
    """How many segments to try for a chain: 2, the square root of its length, twice that, and half of it."""
    root = round(math.sqrt(length))
    return sorted({count for count in (2, root, 2 * root, length // 2) if 2 <= count <= length})


def _units(members: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """What segments are made of: a layer that works in place stays with the one before it.

    A segment that began with it would overwrite its own input, which the segment before has saved.
    """
    units: list[list[nn.Module]] = []
    for member in members:
        if units and _is_in_place(member):
            units[-1].append(member)
        else:
            units.append([member])
    return units


def _checkpoint_sequentially(module: nn.Module, *, call: _Call, segments: int) -> None:
    """Runs each outermost list that is a chain by `checkpoint_sequential`.

    Args:
        module: Changed in place; it runs forward once, to see which of its lists are chains.
        call: Arguments of a step.
        segments: Into how many the chain is cut; as torch has it, the last of them is not checkpointed.

    Raises:
        NotApplicableError: No list is a chain of as many units.
    """
    lists = [members for members in _lists(module) if len(_units(members)) >= segments]
    found = _chains(module, lists, call)
    chains = [members for members, is_chain in zip(lists, found, strict=True) if is_chain]
    if not chains:
        raise NotApplicableError(f"no Sequential or ModuleList is a chain of {segments} members or more")
    for members in chains:
        sizes = [len(unit) for unit in _units(members)]
        _fuse(members, functools.partial(_run_segments, sizes, segments))


def _run_segments(
    sizes: Sequence[int],
    segments: int,
    functions: Sequence[Callable[..., Any]],
    x: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`checkpoint_sequential` over units of `sizes` functions, each of which is given the same arguments."""
    rest = iter(_bound(function, args, kwargs) for function in functions)
    units = [_chained(list(itertools.islice(rest, size))) for size in sizes]
    return checkpoint_sequential(units, segments, x, use_reentrant=False)


def _bound(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda x: function(x, *args, **kwargs)


def _chains(module: nn.Module, lists: Sequence[Sequence[nn.Module]], call: _Call) -> list[bool]:
    """For each list, whether each member is called once, in order, with the result of the one before.

    What else the members are given must be the same for all of them. Buffers are as before afterwards.
    """
    calls: dict[nn.Module, list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]] = {}

    def note(called: nn.Module, given: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        first = given[0] if given else None
        calls.setdefault(called, []).append((first, given[1:], named, result))

    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    hooks = [child.register_forward_hook(note, with_kwargs=True) for members in lists for child in members]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            module(*call[0], **call[1])
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return [_is_chain([calls.get(child, []) for child in members]) for members in lists]


def _is_chain(calls: Sequence[Sequence[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]]) -> bool:
    if any(len(call) != 1 or not isinstance(call[0][0], Tensor) for call in calls):
        return False
    once = [call[0] for call in calls]
    return all(
        x is result and _same(rest, others) and _same(tuple(named.values()), tuple(other_named.values()))
        for (_, others, other_named, result), (x, rest, named, _) in itertools.pairwise(once)
    )


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _fuse(members: Sequence[nn.Module], run: Callable[..., Any]) -> None:
    """Lets the first of a chain of modules run all of them; the others hand on what they are given.

    Names and structure stay, whoever calls the modules.

    Args:
        members: Modules that are called one after the other, each with the result of the one before.
        run: Called with their forward functions and the arguments of the first.
    """
    functions = [member.forward for member in members]
    for member in members[1:]:
        member.forward = _hand_on
    members[0].forward = functools.partial(run, functions)


def _hand_on(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _chained(functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """The functions one after the other, all but the first with one argument."""

    def run(*args: Any, **kwargs: Any) -> Any:
        x = functions[0](*args, **kwargs)
        for function in functions[1:]:
            x = function(x)
        return x

    return run


# ---------------------------------------------------------------------- activation_memory_budget


@contextmanager
def compiler() -> Generator[None]:
    """Inside, many modules can be compiled and stay so; afterwards torch's compiler forgets them all."""
    from torch._dynamo import config

    torch.compiler.reset()
    try:
        limits = config.patch(
            recompile_limit=_RECOMPILATIONS, accumulated_recompile_limit=_RECOMPILATIONS * 4
        )
        with limits, torch.compiler.set_stance("default"):
            yield
    finally:
        torch.compiler.reset()


def _compile(module: nn.Module, *, setting: float) -> None:
    """Compiles a module on its first step, by AOTAutograd's partitioner, without a code generator.

    A graph that cannot be compiled as a whole is an error, not a silent step back to eager.

    Args:
        module: Changed in place.
        setting: `activation_memory_budget`: 1 saves what the minimum cut keeps, 0 recomputes all. The
            knapsack is solved by dynamic programming over flops, as torch does by default.
    """
    # These load the whole of torch's compiler; only this method needs it.
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(*args: Any, **kwargs: Any) -> Any:
        with config.patch(
            activation_memory_budget=setting,
            activation_memory_budget_runtime_estimator="flops",
            activation_memory_budget_solver="dp",
        ):
            return min_cut_rematerialization_partition(*args, **kwargs)

    backend: Any = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )

    def uncached(graph: Any, examples: Any) -> Any:
        """AOTAutograd's cache knows nothing of the setting."""
        with config.patch(enable_autograd_cache=False):
            return backend(graph, examples)

    forward = module.forward

    def called(*args: Any, **kwargs: Any) -> Any:
        """A frame that Dynamo compiles: it leaves the forward of torch's own modules to Python."""
        return forward(*args, **kwargs)

    module.forward = torch.compile(called, backend=uncached, dynamic=False, fullgraph=True)
