"""The main job: a module and a budget in, a module that trains within the budget out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from ..backends.torch import (
    PlanCacheState,
    TierConfig,
    bind,
    check_tier_configs,
    refuse_hooks,
    refuse_unplannable,
    unfitted,
)
from ..frontends.torch import Captured, Loss
from ..ir import Plan, UsageError
from ..passes import Program
from ..passes.costs.optimizer_costs import OptimizerFactory
from ..passes.progress import Listener, Progress, listening
from ..torch_support.pytree import flatten
from .compile import compile_call
from .compiled_call import CompiledCall
from .lengths.compile import compile_lengths
from .request import MEASURED, Dynamic, Request, renamed, renamed_costs
from .tiers import device_of

__all__ = ["Optimized", "optimize", "optimize_module"]


@dataclass(frozen=True)
class Optimized:
    """The results of optimizing a module.

    Args:
        module: The module that trains within the budget.
        captured: The original as a graph.
        program: The graph with costs, schedule and plan.
        tier_configs: The configurations of the tiers that the module may copy to.
    """

    module: nn.Module
    captured: Captured
    program: Program
    tier_configs: tuple[TierConfig, ...] = ()

    @property
    def plan(self) -> Plan:
        """The certificate."""
        assert self.program.plan is not None
        return self.program.plan


def optimize(
    model: nn.Module,
    example_args: tuple[Any, ...] | Tensor,
    budget: int | str,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    strategy: str = "auto",
    time_limit: float = 60.0,
    gap: float = 0.005,
    costs: str = MEASURED,
    loss: Loss | None = None,
    accumulate_gradients: bool = False,
    optimizer_in_backward: OptimizerFactory | None = None,
    specialize_branches: bool = False,
    forwards_in_flight: int = 1,
    swap: str | Sequence[str] | None = None,
    plans: int = 8,
    dynamic: Dynamic = None,
    exact: bool | str = True,
    compiler: str | None = None,
    progress: bool | Callable[[Progress], None] = False,
    same_branches: bool | None = None,
    profile: bool | str | None = None,
) -> Any:
    """A module that trains as `model` does, within `budget` bytes on the device.

    It shares the model's parameters, buffers and submodules, and is a subclass of the model's class.
    With gradients enabled its forward and backward run a fixed schedule whose peak was predicted; `.plan`
    tells what was chosen. In eval(), unless the model is in eval() now, or under no_grad it runs the
    original forward.

    A call unlike the example (other shapes or constants, `requires_grad`, train/eval modes or settings of
    submodules, autocast) is planned when it comes, within the bytes of the first budget; that takes as long
    as the first plan, and a line is logged to the logger `irc`. Such plans hold no parameter and are kept:
    `.irc_plans`. `.plan` and `.irc_plan` stay those of the example.

    Args:
        model: An `nn.Module` (an `fx.GraphModule` is one), on its device, in train() mode for training.
        example_args: Arguments of one training step; shapes and types are part of the plan.
        budget: Bytes, `"4GiB"`, `"4GB"`, or `"60%"` of the baseline peak. It covers parameters,
            buffers, inputs, gradients, activations and workspaces.
        example_kwargs: Keyword arguments of one training step.
        strategy: `auto`, `ilp`, `eviction`, `min-cut`, `per-block`, `sqrt-n`, `every-<k>`, `keep-none` or
            `keep-all`; with `swap` also `lms`, `ome`, `pofo`, `swap` or `recompute`.
        time_limit: Seconds of the processor for the search of a schedule; the best one so far counts.
        gap: The search stops at a schedule that is proved this close to the best, as a fraction of the
            step's time; 0 searches for the best.
        costs: The source of each operation's seconds and workspace. `"measured"` runs each operation a few
            times on the device of the model, `"thorough"` more often (both are cached on disk); `"analytic"`
            takes the roofline of a modest CPU. Any other text is the name of a described machine, such as
            `"gtx1080"`, or the path of a file that `irc machine -o` wrote. A model on the device `meta`,
            where nothing can be measured, is planned for the modest CPU unless another machine is named.
        loss: What the training loop computes from the model's result, if that takes memory of its
            own; a function from the result to a scalar. A loss inside the model needs no mention.
        accumulate_gradients: Add each parameter's gradient to its `.grad` as soon as it is known. The plan
            counts the `.grad` of every trained parameter as there before and after the step, so that a step
            never holds two sets of gradients.
        optimizer_in_backward: Makes the optimizer of a list of parameters, such as
            `lambda params: torch.optim.AdamW(params, lr=1e-3)`. It is called with one parameter at a time
            (and with made-up ones, to measure its state and its steps). Each optimizer takes its step within
            backward, as soon as nothing reads its parameter any more, and the gradient is freed: `.grad` is
            None afterwards. The optimizers' state is part of the budget. They are `.irc_optimizers`, by the
            names of the parameters: set learning rates and save their state there. What needs all gradients
            at once (clipping by their norm, a gradient scaler) is refused. A parameter that requires a
            gradient only later gets its optimizer then.
        specialize_branches: For a model whose Python code looks at the values of its tensors (a check, an
            assert, a branch) and sees the same in every step: it runs once on the example arguments, without
            gradients, and planned as it goes there. Each step checks what it sees and raises IRC347 if it
            is something else; what the forward writes into buffers is written by then.
        forwards_in_flight: How many forwards run before their backwards, as when a model is called twice for
            one loss. The budget covers them: their inputs, and what each of them saves until its backward.
            All run forward, and then backward, one by one in any order or in one `backward()`; the second of
            them finds gradients, a second set unless they are accumulated as they come. More forwards than
            planned, or a backward that retains its graph (one more), give the right numbers and are logged,
            each number once, to the logger `irc`: the budget may not hold.
        swap: Where tensors may go while a step does not need them: `"host:64GiB"` (pinned memory, for a model
            on a GPU), `"disk:/scratch:200GiB"`, or a list of both, the faster first. The budget stays that of
            the device. Bandwidths are those that `irc machine` measured, or measured now; if `costs`
            names a machine, that machine's. With `"params"`, `"optimizer"` or `"params,optimizer"` among
            them, parameters, and the state of the optimizers in backward, live in the first of these tiers
            between steps as far as the budget asks for it (a model on the CPU, with a disk). A parameter is
            still a tensor then, to be read, written and saved between steps: a mapping of its place there.
        plans: How many plans are kept; the least recently used one is given up. 1 refuses other calls than
            the example.
        dynamic: `"batch"` says that the example has the largest batch: calls that differ from it in the first
            dimension of their tensors alone take over its schedule without a search, if their operations
            are the same and it fits. Others, larger ones among them, are planned as usual.
            `{"input_ids": {1: (64, 2048)}}` names arguments (or their positions), dimensions, and their
            smallest and largest size: calls of all these lengths are planned now, within a budget that is
            for the longest, and tensors that have the example's size in the same dimension move along.
            `"sequence"` is the second dimension, up to the example's length, and further when longer calls
            come. A length that decides more than sizes is planned when it comes; a line is logged then.
        exact: True gives the original's numbers to the bit. `"sums"` lets sums be taken in another order: a
            loss head (projection to classes, log-softmax, cross entropy), or a wide layer, may run in tiles
            of rows, so that only one tile's logits are there at a time. The losses of rows are summed as
            before; `.plan.reordered` names what may differ by rounding, with bounds of sums.
        compiler: `"inductor"` fuses operations between products, convolutions and attention into kernels of
            torch's Inductor, each compiled once for all equal layers, and plans these: peaks are those of
            the kernels. Numbers are off by rounding as under `torch.compile`, random numbers are eager's.
            Operations that are faster by themselves stay as they are. Compiling takes some seconds for each
            distinct kernel, and is cached by torch; after five minutes no other kernel is begun, those that
            move most bytes being first.
        progress: True prints how the first plan is made to stderr; a function is called with each
            `irc.Progress`: the phase, and in a search the best overhead so far, its bound and the time left.
            The logger `irc.progress` has the same lines at INFO, and `irc` one for each later plan.
        same_branches: The old name of `specialize_branches`, until the next version.
        profile: The old name of `costs`, until the next version: None, True and False are `measured`,
            `thorough` and `analytic`.

    Returns:
        The module, with the attribute `plan` (`irc.Plan`).

    Raises:
        BudgetError: It cannot fit; `minimum_bytes` is the smallest budget that a schedule was found for.
        UnsupportedError: The model or the optimizer uses what irc does not support; nothing has run.
        UsageError: The budget or another argument is malformed.

    Calling the module raises BudgetError, IRC520, when a call unlike the example cannot fit: nothing of the
    step has run then, and of its operations only those within the budget by themselves, to be measured.
    """
    request = Request.of(
        budget,
        strategy=strategy,
        time_limit=time_limit,
        gap=gap,
        costs=renamed_costs(costs, profile),
        swap=swap,
        accumulate_gradients=accumulate_gradients,
        optimizer=optimizer_in_backward,
        forwards_in_flight=forwards_in_flight,
        loss=loss,
        specialize_branches=renamed(
            "specialize_branches", specialize_branches, "same_branches", same_branches
        ),
        plans=plans,
        dynamic=dynamic,
        exact=exact,
        compiler=compiler,
    )
    given = cast(object, example_args)
    if not isinstance(given, Tensor | tuple | list):
        raise UsageError(
            "IRC406",
            f"the example arguments are a {type(given).__name__}",
            help="give a tensor, or a tuple of the arguments of one step",
        )
    arguments = (given,) if isinstance(given, Tensor) else tuple(example_args)
    with listening(_listener(progress)):
        return optimize_module(model, arguments, request, example_kwargs).module


def _listener(progress: object) -> Listener:
    """The function that is told of progress.

    Raises:
        UsageError: IRC406 for what is neither a bool nor a function.
    """
    if isinstance(progress, bool):
        return partial(print, file=sys.stderr) if progress else _unheard
    if not callable(progress):
        raise UsageError("IRC406", f"progress is a {type(progress).__name__}, not a bool or a function")
    return cast(Listener, progress)


def _unheard(_: Progress) -> None:
    pass


def optimize_module(
    model: nn.Module, args: tuple[Any, ...], request: Request, kwargs: Mapping[str, Any] | None = None
) -> Optimized:
    """Fits a module to a request: an empty cache of plans is bound to it, and misses the example first.

    Args:
        model: The module.
        args: Example arguments.
        request: What is asked of its plans.
        kwargs: Example keyword arguments.

    Raises:
        UsageError: IRC406 if `model` is not a module, or `kwargs` not a mapping.
    """
    if not isinstance(cast(object, model), nn.Module):
        raise UsageError("IRC406", f"the model is a {type(model).__name__}, not a torch.nn.Module")
    if kwargs is not None and not isinstance(cast(object, kwargs), Mapping):
        raise UsageError("IRC406", f"example_kwargs is a {type(kwargs).__name__}, not a dict")
    leaves = flatten((args, kwargs))[0]
    refuse_unplannable(model, leaves)
    model = unfitted(model)
    refuse_hooks(model)
    device = device_of(model, leaves)
    if request.compiler is not None and device.type == "meta":
        raise UsageError(
            "IRC406",
            "a model on the device meta has no kernels: nothing can be measured there",
            help="leave compiler out, or give a model with data",
        )
    tier_configs = request.tier_configs(device)
    have_offloaded = bool(request.plan.which)
    check_tier_configs(tier_configs, {str(device)}, have_offloaded=have_offloaded)
    plans_eval = not model.training
    compiler = compile_call if request.lengths is None else compile_lengths
    cache = PlanCacheState(compiler, request.on(device), request.plans, plans_eval, tiers=tier_configs)
    fitted, plans = bind(model, cache)
    made = plans.warm(fitted, args, dict(kwargs or {}))
    assert isinstance(made, CompiledCall)
    return Optimized(fitted, made.captured, made.program, tier_configs)
