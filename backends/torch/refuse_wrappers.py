"""Refuses modules and tensors that do more than the planned forward (wrappers, shards), or have no data."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ...ir import UnsupportedError, UsageError
from ...torch_support.packed_weights import PACKING_LIBRARIES, packed_weights
from ...torch_support.without_data import lacks_data

__all__ = [
    "refuse_cached_parametrizations",
    "refuse_shards",
    "refuse_subclass",
    "refuse_subclasses",
    "refuse_unplannable",
    "refuse_without_data",
    "refuse_wrapped_parts",
    "wrapper_of",
]

_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
    "DataParallel": "DataParallel",
    "OptimizedModule": "torch.compile",
    "ScriptModule": "torch.jit",
}
_SCRIPTED = _WRAPPERS["ScriptModule"]
"""Parts of this one are traced (`frontends/torch/fixups/scripted_parts.py`)."""


@functools.lru_cache(maxsize=1024)
def wrapper_of(kind: type[nn.Module]) -> str | None:
    """Returns the name, in the user's terms, of the part of torch that made a class that wraps modules."""
    of_torch = (each.__name__ for each in kind.__mro__ if each.__module__.startswith("torch."))
    return next((_WRAPPERS[name] for name in of_torch if name in _WRAPPERS), None)


def refuse_unplannable(root: nn.Module, arguments: Iterable[Any]) -> None:
    """Refuses to plan a module that torch wraps, or whose tensors do more than hold numbers.

    Args:
        root: The module, before it is captured.
        arguments: The leaves of its example arguments.

    Raises:
        UnsupportedError: IRC534 for a wrapper; IRC531 and IRC557 as in `refuse_subclasses`; IRC538 within
            `parametrize.cached()`.
    """
    refuse_cached_parametrizations(root)
    wrapper = wrapper_of(type(root))
    if wrapper is not None:
        raise UnsupportedError(
            "IRC534",
            f"the model is of class {type(root).__name__}, made by {wrapper}: a plan would bypass it",
            help=_help_for(wrapper),
        )
    refuse_subclasses(root, arguments)


def refuse_shards(kind: type[nn.Module]) -> None:
    """Refuses a class of modules whose parameters torch moves between devices itself.

    Args:
        kind: The class of a module whose parameters are offloaded.

    Raises:
        UnsupportedError: IRC534.
    """
    wrapper = wrapper_of(kind)
    if wrapper in ("fully_shard", "FullyShardedDataParallel"):
        raise UnsupportedError(
            "IRC534",
            f"the model is of class {kind.__name__}, made by {wrapper}, and its parameters are offloaded to "
            "a tier: both would move them",
            help="plan without params and optimizer in swap=, or without " + wrapper,
        )


def _help_for(wrapper: str) -> str:
    if wrapper == "DataParallel":
        return "call irc.optimize with the plain module, and DistributedDataParallel with the fitted one"
    return f"call irc.optimize with the plain module, and {wrapper} with the fitted one"


def refuse_cached_parametrizations(root: nn.Module) -> None:
    """Refuses a step of a parametrized module within `torch.nn.utils.parametrize.cached()`.

    Within it, eager computes each parametrized tensor once for all forwards; a planned step computes its own.

    Raises:
        UnsupportedError: IRC538.
    """
    if not parametrize._cache_enabled:
        return
    for name, child in root.named_modules():
        if parametrize.is_parametrized(child):
            raise UnsupportedError(
                "IRC538",
                f"{f'submodule {name!r}' if name else 'the module'} is parametrized, and the call is within "
                "torch.nn.utils.parametrize.cached(): a planned step would compute its tensors again",
                help="call the fitted module outside of parametrize.cached(), or open it within the forward",
            )


def refuse_subclasses(root: nn.Module, arguments: Iterable[Any]) -> None:
    """Refuses to plan tensors that do more than hold numbers, unless they are frozen packed weights.

    Args:
        root: The module whose parameters and buffers are checked.
        arguments: The leaves of the arguments.

    Raises:
        UnsupportedError: IRC531 for a tensor of another class, such as a sharded one; IRC557 as in
            `refuse_subclass`.
    """
    packed = {id(weight.parameter) for _, weight in packed_weights(root)}
    for name, parameter in root.named_parameters():
        if id(parameter) not in packed:
            refuse_subclass(parameter, "parameter", name)
    for name, buffer in root.named_buffers():
        refuse_subclass(buffer, "buffer", name)
    for index, tensor in enumerate(leaf for leaf in arguments if isinstance(leaf, Tensor)):
        refuse_subclass(tensor, "input", str(index))


def refuse_without_data(root: nn.Module, tensors: Iterable[Tensor]) -> None:
    """Refuses a step of a model that was planned without weights, as long as they are not there.

    Args:
        root: The module.
        tensors: The inputs of the step.

    Raises:
        UsageError: IRC527.
    """
    named = (*root.named_parameters(), *root.named_buffers())
    lacking = [name for name, tensor in named if lacks_data(tensor)]
    if not lacking and not any(map(lacks_data, tensors)):
        return
    what = f"{len(lacking)} of {len(named)} tensors have no data, first {lacking[0]}" if lacking else ""
    raise UsageError(
        "IRC527",
        f"the model was planned without weights: {what or 'an input has no data'}",
        help="load them: model.to_empty(device=...), then model.load_state_dict(...) or assign=True; or save "
        "the plan (model.plan.to_json()) and plan the model again where its weights are",
    )


def refuse_wrapped_parts(root: nn.Module, names: Sequence[str], submodules: Sequence[nn.Module]) -> None:
    """Refuses a step whose submodules are wrapped, and a replica of `DataParallel`.

    Raises:
        UnsupportedError: IRC534.
    """
    if "_is_replica" in root.__dict__:
        raise UnsupportedError(
            "IRC534",
            "this is a replica of a fitted module, made by DataParallel; its plan is for one device",
            help="use DistributedDataParallel, with one process for each device",
        )
    for name, child in zip(names, submodules, strict=True):
        if (wrapper := wrapper_of(type(child))) is not None and wrapper != _SCRIPTED:
            raise UnsupportedError(
                "IRC534",
                f"submodule {name!r} is wrapped by {wrapper}, and a planned step does not call submodules",
                help=f"call {wrapper} with the whole fitted module, and not with a part of it",
            )


def refuse_subclass(tensor: Tensor, role: str, target: str) -> None:
    """Refuses a tensor whose class takes over the operations: a planned step would run plain ones.

    Args:
        tensor: An input of the step.
        role: The role of the tensor, such as `parameter`.
        target: The name of the tensor, or the index of the input.

    Raises:
        UnsupportedError: IRC531; IRC557 for a tensor that autograd does not take either.
    """
    kind = type(tensor)
    if kind in (Tensor, nn.Parameter) and tensor.is_inference():
        raise UnsupportedError(
            "IRC557",
            f"{role} {target} was made under torch.inference_mode(), and autograd cannot train with it",
            help="make it outside of inference_mode() (under no_grad(), if need be), or clone() it there",
        )
    is_plain = kind in (Tensor, nn.Parameter) or issubclass(kind, _TRACERS)
    is_of_packing_library = kind.__module__.partition(".")[0] in PACKING_LIBRARIES
    has_torchs_own = _function(kind) in _PLAIN and _dispatch(kind) is _dispatch(Tensor)
    if is_plain or (has_torchs_own and not is_of_packing_library):
        return
    what, cure = "", "convert it to a torch.Tensor"
    if kind.__name__ == "DTensor":
        what = ", sharded over devices"
        cure = "call irc.optimize before fully_shard, and fully_shard with the whole fitted module"
    elif is_lazy(tensor):
        what = ", which the first forward makes"
        cure = "call the module once on the example before irc.optimize"
    elif is_of_packing_library:
        what = ", which is no frozen, packed weight of a linear layer in the order for training"
        cure = (
            "freeze it, and pack it before irc.optimize, as moving a model to its device does; where an "
            "evaluation on a processor orders it anew, evaluate a copy"
        )
    raise UnsupportedError(
        "IRC531",
        f"{role} {target} is a {kind.__name__}{what}; a plan is for plain tensors",
        help=cure,
    )


def _function(kind: type[Tensor]) -> object:
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)


def _dispatch(kind: type[Tensor]) -> object:
    return getattr(kind, "__torch_dispatch__", None)


_TRACERS = (FakeTensor, FunctionalTensor)
_PLAIN = tuple(map(_function, (Tensor, nn.Parameter)))
