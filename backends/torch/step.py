"""Runs a whole training step as one autograd node."""

# The autograd engine has no public way to its state.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...ir import BackwardError, Gradients, Input, TierError, UnsupportedError
from ...torch_support.autocast import autocast_state, would_cast
from ...torch_support.layouts import in_layout
from .deliver import Watched, refuse_hooks_on_results
from .hooks import refuse_missing_for_hooks, refuse_missing_gradients, refuse_saved_tensor_hooks
from .live_forwards import LiveForwards
from .noticed_roundings import notice_layouts, notice_other_terms, notice_terms_after
from .offload import Session, State, Tiers
from .optimizer_in_backward import OptimizersInBackward, check_backward, check_parameters, exclusive
from .program import Program
from .refuse_transforms import refuse_batches, refuse_second_derivatives, refuse_transforms

__all__ = ["arriving", "run_step"]

_log = logging.getLogger("irc")


def run_step(
    program: Program,
    inputs: list[Tensor],
    in_backward: OptimizersInBackward | None = None,
    live_forwards: LiveForwards | None = None,
    unused: frozenset[int] = frozenset(),
    reaching_hooks: Sequence[frozenset[int]] = (),
    tiers: Tiers | None = None,
    reason: str = "",
) -> tuple[Tensor, ...]:
    """Runs forward; the outputs carry one autograd node that runs backward.

    Args:
        program: The program to run.
        inputs: The static inputs, in order.
        in_backward: Takes the gradients that are released within backward; None if none is released.
        live_forwards: Counts the calls whose backward has not run; None if the caller counts them.
        unused: The forward outputs whose gradients were planned away, as the loss does not use them.
        reaching_hooks: For each gradient that a hook within the forward sees, the outputs that it comes from.
        tiers: The tiers that the program copies to; None if it copies nothing.
        reason: The call that the plan was made for, in words.

    Raises:
        TierError: As `Tiers.session` and the copies themselves; backward too.
        UnsupportedError: IRC509 when somebody waits for a gradient that is released; IRC533 within a function
            transform; IRC535 under hooks on saved tensors.

    Backward raises a BackwardError, which is a RuntimeError, in cases that autograd may accept: IRC524 when a
    recomputation reads an input that was written since, IRC525 when backward runs again for other outputs,
    IRC526 when a hook of a result would see less of a gradient than in eager, IRC528 when backward runs under
    autocast that would change eager's.
    """
    refuse_transforms(inputs)
    refuse_saved_tensor_hooks()
    if in_backward is not None:
        check_parameters(program, inputs.__getitem__, in_backward)
    differentiable = (inputs[index] for index in program.differentiable)
    session = _session(tiers or Tiers(), program, inputs, in_backward) if program.copies else None
    known = live_forwards, reason, unused, reaching_hooks, session
    return _Step.apply(program, inputs, in_backward, *known, *differentiable)


def _session(
    tiers: Tiers, program: Program, inputs: list[Tensor], in_backward: OptimizersInBackward | None
) -> Session:
    """Opens the session that carries out the copies of a step; moves offloaded tensors to their tiers."""
    optimizers = in_backward.optimizers if in_backward is not None else {}
    with exclusive(in_backward):
        offloaded_parameters = tiers.residents(program.copies, inputs.__getitem__, optimizers)
    return tiers.session(program.copies, offloaded_parameters)


_engine: Any = vars(torch._C)["_autograd"]
_keeps_graph: Callable[[], bool] = _engine._get_current_graph_task_keep_graph


class _Step(torch.autograd.Function):
    """One autograd node for a whole training step."""

    @staticmethod
    def forward(
        ctx: Any,
        program: Program,
        inputs: list[Tensor],
        in_backward: OptimizersInBackward | None,
        live_forwards: LiveForwards | None,
        reason: str,
        unused: frozenset[int],
        reaching_hooks: Sequence[frozenset[int]],
        copies: Session | None,
        *differentiable: Tensor,
    ) -> tuple[Tensor, ...]:
        if live_forwards is not None:
            live_forwards.enter(ctx, program, reason)
        with exclusive(in_backward):
            with torch._C._DisableAutocast(), _given_up_on_error(copies):
                outputs, saved = program.forward(inputs, *_last(copies))
            # forward may have written them: backward reads what it left
            versions = [(k, inputs[k]._version) for k in program.read_by_backward]
            released = [(at.index, inputs[at.index]._version) for at in program.released.values()]
            if in_backward is not None:
                in_backward.pending.add(ctx)
        # autograd does not let the caller write into a view that this function made
        outputs = [output.detach() if output._is_view() else output for output in outputs]
        ctx.program, ctx.inputs, ctx.saved, ctx.in_backward = program, inputs, saved, in_backward
        ctx.live_forwards, ctx.unused, ctx.copies = live_forwards, unused, copies
        ctx.reaching_hooks = reaching_hooks
        ctx.versions, ctx.released, ctx.went = versions, released, frozenset[int]()
        ctx.watched = list[Watched]()
        ctx.saved_versions = [_version(value) for value in saved]
        ctx.set_materialize_grads(False)
        planned = enumerate(zip(outputs, program.tangents, strict=True))
        ctx.mark_non_differentiable(*(o for k, (o, t) in planned if t is None and k not in unused))
        return tuple(outputs)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Any, ...]:
        refuse_second_derivatives()
        refuse_batches(gradients)
        given = frozenset(k for k, gradient in enumerate(gradients) if gradient is not None)
        if ctx.saved is None:
            _refuse_second_backward(ctx.program, ctx.went, given)
        ctx.went |= given
        parameters: list[Tensor] = ctx.inputs
        program: Program = ctx.program
        with exclusive(ctx.in_backward):
            results = _run_backward(ctx, gradients, given)
        picked = [_pick(program, results, k, parameters[k], given) for k in program.differentiable]
        notice_other_terms(program, parameters, picked)
        notice_terms_after(program, parameters)
        return (*[None] * 8, *picked)


def _run_backward(
    ctx: Any, gradients: tuple[Tensor | None, ...], given: frozenset[int]
) -> list[Tensor | None]:
    program: Program = ctx.program
    inputs: list[Tensor] = ctx.inputs
    in_backward: OptimizersInBackward | None = ctx.in_backward
    _check_backward(ctx, program, inputs, given)
    if in_backward is not None:
        check_backward(ctx, program, inputs, keeps_graph=_keeps_graph())
        in_backward.pending.discard(ctx)
    saved, copies = _take_saved(ctx, program)
    tangents = [
        arriving(gradient, tangent)
        for gradient, tangent in zip(gradients, program.tangents, strict=True)
        if tangent is not None
    ]
    notice_layouts(program, gradients)
    more: list[Any] = [sum(1 << index for index in given)] if program.is_partial else []
    if in_backward is not None:
        written = frozenset(k for k, version in ctx.released if inputs[k]._version != version)
        more.append(in_backward.sink(program, inputs, given, written))
    more.extend(_last(copies))
    with torch._C._DisableAutocast(), contextlib.closing(copies) if copies else contextlib.nullcontext():
        try:
            return program.backward(inputs, saved, tangents, *more)
        except TierError as error:
            if program.kind is Gradients.APPLIED:
                error.add_note("optimizers within backward may have taken this step for some parameters")
            raise


def _check_backward(ctx: Any, program: Program, inputs: list[Tensor], given: frozenset[int]) -> None:
    """Refuses a backward whose gradients would not be those of eager."""
    _check_unused(program, ctx.unused, given)
    _check_unchanged(program, inputs, ctx.versions)
    _check_outputs_unchanged(ctx.saved, ctx.saved_versions)
    refuse_missing_gradients(ctx, program, inputs, given)
    refuse_missing_for_hooks(ctx.reaching_hooks, given)
    refuse_hooks_on_results(ctx.watched, program.feeds, given)
    _check_autocast(program)


def _check_autocast(program: Program) -> None:
    """Refuses a backward under autocast if eager's would compute in another precision there."""
    autocast = autocast_state()
    cast = next((node for node in program.autocast_sees if autocast and would_cast(node, autocast)), None)
    if cast is not None:
        states = " and ".join(f"to {dtype} on {device}" for device, dtype, _ in autocast)
        raise BackwardError(
            "IRC528",
            f"backward() is called under torch.autocast {states}, which casts in eager's backward too, first "
            f"for {cast.op}; a plan's backward is the one that is called outside of autocast",
            at=cast.at,
            help="end the autocast before loss.backward(), as torch recommends, or call it within "
            f"torch.autocast({autocast[0][0]!r}, enabled=False)",
        )


def _take_saved(ctx: Any, program: Program) -> tuple[list[Any], Session | None]:
    """Takes the saved values and the copies from a node, which keeps its own if the graph is retained."""
    saved: list[Any] = ctx.saved
    copies: Session | None = ctx.copies
    live_forwards: LiveForwards | None = ctx.live_forwards
    is_retained = _keeps_graph()
    if live_forwards is not None:
        live_forwards.begin_backward(ctx, program, is_retained=is_retained)
    if is_retained:
        again = [_copied(each) if k in program.overwritten else each for k, each in enumerate(saved)]
        return again, copies.retained() if copies is not None else None
    ctx.saved = ctx.inputs = ctx.copies = None
    ctx.watched = list[Watched]()
    return saved, copies


def _copied(tensor: Tensor) -> Tensor:
    """Copies a tensor with all of its storage, of which it may be a part."""
    storage = tensor.untyped_storage().clone()
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _last(copies: Session | None) -> tuple[Session, ...]:
    """Returns the last argument of the emitted functions, which exists only if the program copies."""
    return () if copies is None else (copies,)


@contextlib.contextmanager
def _given_up_on_error(copies: Session | None) -> Generator[None]:
    try:
        yield
    except BaseException:
        if copies is not None:
            copies.close()
        raise


def _pick(
    program: Program, results: list[Tensor | None], place: int, of: Tensor, given: frozenset[int]
) -> Tensor | None:
    """Returns a gradient; None if it comes only from outputs that the loss does not use, as in eager."""
    index = program.gradients[place]
    if index is None or (program.depends[index] and not program.depends[index] & given):
        return None
    gradient = results[index]
    if index in program.indices and gradient is not None:
        indices = results[program.indices[index]]
        assert indices is not None
        if of.is_leaf and of.grad is not None:
            gradient = _added_to(of.grad, gradient, program, place)
        # a file may hold any indices, and what takes the gradient writes where they say
        return torch.sparse_coo_tensor(indices, gradient, of.shape, check_invariants=not indices.is_cuda)
    # the engine adds gradients in place, except views: their sum would take memory of its own
    return gradient.detach() if gradient is not None and gradient._is_view() else gradient


def _added_to(there: Tensor, values: Tensor, program: Program, place: int) -> Tensor:
    """Returns the values of a sparse gradient as eager adds them to a `.grad`; says once that this grows."""
    if there.is_sparse and there._nnz() and place not in program.growing:
        program.growing.add(place)
        _log.warning(
            "IRC567: the sparse .grad of %s grows with each backward that adds to it: the step may take more "
            "memory than its budget. Clear it after each backward, or give the embedding sparse=False",
            program.statics[place].target,
        )
    if program.gradients[place] not in program.strided:
        return values
    return torch.stack((values, values), -1)[..., 0]


def _check_unused(program: Program, unused: frozenset[int], given: frozenset[int]) -> None:
    for index in unused & given:
        if program.tangents[index] is None:
            raise UnsupportedError(
                "IRC346",
                f"output {index} of the module has a gradient; the plan was made for a loss that does "
                "not use it",
                help="call irc.optimize with loss= the function by which the training loop computes its loss "
                "from the result; without it a Hugging Face model that is given labels is trained by "
                "its result's .loss",
            )


def _refuse_second_backward(program: Program, went: frozenset[int], given: frozenset[int]) -> NoReturn:
    if not any(part & went and part & given for part in program.parts):
        raise BackwardError(
            "IRC525",
            f"backward runs a second time, now from {_outputs(given)} and before from {_outputs(went)}: "
            "a fitted module has one backward for all outputs, which freed the saved values",
            help="add the losses and call backward() once (the gradients are the same), or call the first "
            "one with retain_graph=True",
        )
    raise RuntimeError(
        "Trying to backward through the graph a second time: the saved values were freed as backward "
        "went. Specify retain_graph=True if you need to backward through the graph a second time."
    )


def _outputs(indices: frozenset[int]) -> str:
    return f"output{'s' if len(indices) > 1 else ''} {', '.join(map(str, sorted(indices)))}"


def _check_unchanged(program: Program, inputs: list[Tensor], versions: list[tuple[int, int]]) -> None:
    """Raises autograd's own error if autograd would raise one, before the error for what it would accept."""
    changed = [(index, version) for index, version in versions if inputs[index]._version != version]
    for index, version in sorted(changed, key=lambda pair: pair[0] in program.read_again):
        written = program.statics[index]
        if index in program.read_again:
            raise BackwardError(
                "IRC524",
                f"{written.role.value} {written.target} was written in place between forward and backward, "
                f"and backward computes values again from it (version {inputs[index]._version}, {version} in "
                "forward)",
                help="write after backward, or keep the values that are computed from it: irc.keep(module) "
                "before irc.optimize",
            )
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {written.role.value} {written.target} is at version {inputs[index]._version}; "
            f"expected version {version} instead"
        )


def _version(saved: Tensor | State) -> int:
    """Returns how often a tensor was written; 0 for optimizer state, which only the step can write."""
    return saved._version if isinstance(saved, Tensor) else 0


def _check_outputs_unchanged(saved: list[Tensor], versions: list[int]) -> None:
    """Refuses outputs that were written in place: a saved value that is an output shares its version."""
    for tensor, version in zip(saved, versions, strict=True):
        if _version(tensor) != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: an output of shape {list(tensor.shape)} is at version {tensor._version}; "
                f"expected version {version} instead"
            )


def arriving(gradient: Tensor | None, tangent: Input) -> Tensor:
    """Returns the gradient of an output in the layout that backward was traced with; zeros for None."""
    wanted = tangent.value.type
    if gradient is None:
        dtype: torch.dtype = getattr(torch, wanted.dtype.value)
        return torch.empty_strided(wanted.shape, wanted.strides, dtype=dtype, device=wanted.device).zero_()
    return in_layout(gradient, wanted.strides)
