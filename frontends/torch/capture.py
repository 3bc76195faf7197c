"""Captures an `nn.Module` as a functional graph of forward and backward, by AOTAutograd."""

# AOTAutograd and the autograd engine do not have a public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.schemas import JointWithDescriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...ir import (
    THROUGH_DYNAMO,
    Branch,
    Delivery,
    EagerMemory,
    Graph,
    Input,
    InputRole,
    IrcError,
    Origin,
    OutputRole,
    Rounding,
    Sharing,
    Signature,
    Slot,
    UnsupportedError,
    UsageError,
    allocation_bytes,
    first_line,
    print_graph,
)
from ...torch_support.autocast import autocast_state
from ...torch_support.code_names import CodeNames
from ...torch_support.pytree import flatten_arguments
from .annotation_scopes import Scopes
from .branches import Branches
from .counters import CounterReadError
from .eager_run import eager_memory
from .fixups.autocast_cache import share_casts, sums_within_forward
from .fixups.batch_norm import batch_norm_of_eager
from .fixups.casts_within import casts_within
from .fixups.composite_ops import composite_operations
from .fixups.fake_kernels import fake_kernels_of_eager
from .fixups.meta_kernels import composites_on_meta
from .fixups.module_hooks import module_hooks
from .fixups.packed_weights import PackedParts
from .fixups.recurrent import RecurrentLayers
from .fixups.refused_operations import DENSE_ALONE, refused_operations
from .fixups.scripted_parts import scripted_parts
from .fixups.tangent_layouts import tangent_layouts
from .fixups.tensor_hooks import tensor_hooks
from .fixups.zero_checks import gradients_by_zeros
from .flat_module import FlatModule, LossFails
from .gradients_apart import noting_seeing_nodes
from .in_place import noting_writes
from .length_conditions import Axes, SymbolicLength
from .loss import Loss, described_loss, loss_bytes, own_loss
from .loss_run import Measure
from .place_annotations import place_annotations, read_in_reentrant_checkpoints, written_in_checkpoints
from .provenance import raised_at, raised_code, recording
from .results import refuse_hidden_tensors
from .roundings import roundings
from .tensor_attributes import TensorReads
from .tracer import (
    DECOMPOSITIONS,
    TRACE_MODES,
    TRACE_MODES_OF_EXAMPLE,
    TraceMode,
    checks_stay,
    quiet_tracer,
    unread_draws_stay,
)
from .translate import Translation, translate, unknown_object

__all__ = ["Captured", "capture", "lengths_alike"]


@dataclass(frozen=True)
class Captured:
    """A module turned into a training graph.

    Args:
        graph: One training step.
        signature: The mapping of the module's arguments and result to the graph's inputs and outputs.
        constants: Tensors that the module's code creates from nothing, by `Input.target`.
        loss: The loss that is assumed, in words.
        roundings: The numbers that may differ from eager's by rounding.
        eager: The memory of the step as it is written; None if it is not known.
        mode: The mode in which the module was traced.
        generators: The user's generators that it draws from, by their names in the graph.
        code_names: The attributes of classes, and the globals, that its code names.
        tensor_reads: The attributes of arguments, parameters and buffers that its code reads.
    """

    graph: Graph
    signature: Signature
    constants: Mapping[str, Tensor]
    loss: str = ""
    roundings: tuple[Rounding, ...] = ()
    eager: EagerMemory | None = None
    mode: TraceMode = TRACE_MODES[0]
    generators: Mapping[str, torch.Generator] = field(default_factory=dict[str, torch.Generator])
    code_names: CodeNames = ()
    tensor_reads: TensorReads = ()


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    specialize_branches: bool = False,
    stepwise: bool = False,
    time_limit: float = math.inf,
    with_eager: bool = False,
    measure: Measure | None = None,
) -> Captured:
    """Captures the training graph of one call `module(*args, **kwargs)`, a loss and its backward.

    The module is traced on tensors without data, and again in another mode if the first one yields no graph.
    Nothing is computed, no buffer changes and no random number is drawn;
    a loss alone is computed, if it is measured.
    Python control flow is followed as these arguments take it.

    Args:
        module: The model, in the modes (train, eval) that it will be trained in.
        args: Example arguments; tensors may be nested in lists, tuples and dicts.
        kwargs: Example keyword arguments; they are taken in the order of their names.
        loss: The caller's function from the result to a scalar. Its memory is counted, and outputs that it
            does not use have no gradient in the graph. Without it, the loss is the `.loss` of a result of
            Hugging Face's, or `loss_bytes` estimates the memory.
        specialize_branches: Whether to assume that Python code that looks at the values of tensors sees in
            each step what it sees in a run on the example arguments. That run is made, and the signature
            says what was seen.
        stepwise: Whether an LSTM is traced as its time steps where eager runs one kernel. Its numbers then
            differ from eager's by rounding.
        time_limit: Seconds. Recurrent layers whose time steps take longer to trace are refused.
        with_eager: Whether to find the memory of the step as it is written, by one more run.
        measure: Measures runs of the loss; without it, its memory is modelled.

    Raises:
        TimeLimitError: IRC205 for a recurrent layer of too many time steps.
        UnsupportedError: IRC332 to IRC339, IRC342, IRC343, IRC348, IRC352, IRC353, IRC505, IRC534, IRC536,
            IRC554 and IRC556, when the graph cannot express something in the module.
        UsageError: IRC340, when nothing in the result depends on anything that requires a gradient; IRC349,
            when the forward itself raises.
    """
    leaves, tree = flatten_arguments((tuple(args), dict(sorted((kwargs or {}).items()))))
    refuse_hidden_tensors(leaves)
    packed = PackedParts(module)
    with packed.as_buffers(), module_hooks(module), scripted_parts(module) as scripted:
        flat = FlatModule(module, tree, leaves, loss, packed, stepwise=stepwise, time_limit=time_limit)
        flat.scripted = scripted
        modes = TRACE_MODES + (TRACE_MODES_OF_EXAMPLE if specialize_branches else ())
        return _captured(flat, modes, measure, with_eager=with_eager)


def lengths_alike(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    axes: Axes,
    lengths: tuple[int, int],
    mode: TraceMode,
    *,
    loss: Loss | None = None,
    time_limit: float = math.inf,
) -> int:
    """The smallest length from which on a call is the graph of the example but for sizes.

    These are polynomials of the length.

    The module is traced with the length as a symbol; what Python and torch decide by it are its conditions.

    Args:
        module: The model, as `capture` was given it.
        args: Example arguments of the largest length.
        kwargs: Example keyword arguments.
        axes: The dimensions of tensors that have the length.
        lengths: The smallest and the largest length that are asked for.
        mode: The mode in which `capture` traced the example.
        loss: As `capture` was given it.
        time_limit: As of `capture`.

    Raises:
        UnsupportedError: IRC351 if it cannot be told; as `capture`.
    """
    leaves, tree = flatten_arguments((tuple(args), dict(sorted(kwargs.items()))))
    packed = PackedParts(module)
    with packed.as_buffers(), module_hooks(module), scripted_parts(module), mode.announced():
        flat = FlatModule(module, tree, leaves, loss, packed, stepwise=False, time_limit=time_limit)
        flat.mode = mode
        try:
            return _lengths_alike(flat, axes, *lengths)
        except LossFails:
            flat.ask_loss_alone()
            return _lengths_alike(flat, axes, *lengths)


def _lengths_alike(flat: FlatModule, axes: Axes, first: int, last: int) -> int:
    flat.lengths = symbolic = SymbolicLength(axes, first, last)
    with contextlib.ExitStack() as stack:
        joint, _ = _trace(stack, flat, symbolic.tensors(flat.tensors), symbolic.mode)
        return symbolic.holding(joint.graph_module)


def _captured(
    flat: FlatModule,
    modes: Sequence[TraceMode],
    measure: Measure | None,
    *,
    with_eager: bool,
) -> Captured:
    """Captures the call of a flat module."""
    translation = _traced(flat, modes)
    graph = translation.graph
    if not any(o.value is not None and o.role is OutputRole.GRADIENT for o in graph.outputs):
        raise _nothing_to_train(flat)
    count = len(set(flat.places))
    distinct, read = translation.deliveries[:count], translation.deliveries[count:]
    shared = flat.with_sharing(distinct)
    deliveries = iter(shared)
    result = [
        next(deliveries) if isinstance(leaf, Tensor) else Delivery(Origin.CONSTANT, constant=leaf)
        for leaf in flat.delivered
    ]
    of_loss = [*flat.result_leaves, *(flat.assigned_for_loss() if flat.losses == (None,) else ())]
    most, held, saved = loss_bytes(flat.losses[0], of_loss, flat.result_tree, measure)
    unused = flat.unused_places()
    trained = {flat.places[k]: d for k, d in enumerate(shared) if k not in unused}
    aliased = _aliased_bytes(graph, trained.values())
    beside = _leaf_gradient_bytes(graph, shared, flat) + (_SCALED_BYTES if flat.losses[0] is own_loss else 0)
    most, held = most + 2 * aliased + beside, held + aliased + beside
    graph = replace(graph, loss_bytes=most, loss_held_bytes=held, loss_saved_bytes=saved)
    slots, generators = map(Slot, range(len(flat.tensors))), flat.state.generators
    without_use = (shared[k] for k in unused)
    statics = list(_static_tensors(flat, graph))
    signature = Signature(
        in_tree=flat.tree,
        out_tree=flat.delivered_tree,
        leaves=tuple(
            next(slots) if isinstance(leaf, Tensor) else generators.planned(leaf) for leaf in flat.leaves
        ),
        deliveries=tuple(result),
        modes=tuple((name, child.training) for name, child in flat.module.named_modules()),
        autocast=autocast_state(),
        unused=frozenset(d.index for d in without_use if d.origin in (Origin.COMPUTED, Origin.OUTPUT)),
        reaching_hooks=tuple(
            frozenset(shared[k].index for k in places if shared[k].origin is not Origin.INPUT)
            for places in flat.reaching_hooks
        ),
        branches=tuple(
            Branch(delivery, reading.read, reading.value, reading.where)
            for delivery, reading in zip(read, flat.branches.readings if flat.branches else (), strict=True)
        ),
        assignments=flat.assignments,
        switched=frozenset(
            index
            for index, (entry, tensor) in enumerate(statics)
            if tensor is not None and tensor.requires_grad is not entry.requires_grad
        ),
        same=tuple(_same(flat.tensors, statics)),
    )
    eager = _eager_memory(flat, graph) if with_eager else None
    why_compiled = flat.first_failure if flat.mode.compiling else None
    reentrant = read_in_reentrant_checkpoints(graph, translation.notes)
    written = written_in_checkpoints(graph, translation.notes)
    rounded = roundings(
        graph,
        trained.values(),
        flat.layers,
        flat.parts,
        flat.apart,
        flat.derivatives,
        reentrant,
        written,
        scripted=flat.scripted,
        as_compiled=why_compiled,
    )
    results = [output.value for output in graph.outputs if output.role is OutputRole.OUTPUT]
    is_scalar = len(results) == 1 and results[0] is not None and not results[0].type.shape
    loss_in_words = described_loss(flat.losses[0], is_scalar=is_scalar)
    return Captured(
        graph,
        signature,
        translation.constants,
        loss_in_words,
        tuple(rounded),
        eager,
        flat.mode,
        {name: generators.originals[name] for name in graph.generators},
        flat.state.code_names(),
        flat.attributes.reads,
    )


def _static_tensors(flat: FlatModule, graph: Graph) -> Iterator[tuple[Input, Tensor | None]]:
    """Yields the static inputs with the tensors that they are in the call; None for constants."""
    state = {
        InputRole.PARAMETER: dict(flat.module.named_parameters(remove_duplicate=False)),
        InputRole.BUFFER: dict(flat.module.named_buffers(remove_duplicate=False)),
        InputRole.INPUT: {str(index): tensor for index, tensor in enumerate(flat.tensors)},
    }
    for entry in graph.inputs:
        if entry.role is not InputRole.TANGENT:
            yield entry, state.get(entry.role, {}).get(entry.target)


def _same(
    tensors: Sequence[Tensor], statics: Sequence[tuple[Input, Tensor | None]]
) -> Iterator[tuple[int, int]]:
    """Yields the arguments that are no inputs of the graph, each with the input that is the same tensor."""
    taken = {int(entry.target) for entry, _ in statics if entry.role is InputRole.INPUT}
    for argument in sorted(set(range(len(tensors))) - taken):
        yield from ((argument, k) for k, (_, tensor) in enumerate(statics) if tensor is tensors[argument])


def _eager_memory(flat: FlatModule, graph: Graph) -> EagerMemory | None:
    if flat.branches is not None:
        flat.branches.is_noting = False
    with flat.state.kept():
        return eager_memory(
            flat.run,
            flat,
            flat.tensors,
            flat.losses[0],
            unused=flat.unused_places(),
            static_bytes=graph.static_bytes,
            loss_bytes=(graph.loss_bytes, graph.loss_held_bytes),
            around=flat.packed.standing_in,
        )


def _aliased_bytes(graph: Graph, deliveries: Iterable[Delivery]) -> int:
    """Returns the bytes of the gradients of outputs that are views of others, before they are added up."""
    outputs = [o.value for o in graph.outputs if o.role is OutputRole.OUTPUT]
    bases = [outputs[d.index] for d in deliveries if d.origin is Origin.OUTPUT and d.sharing is Sharing.VIEW]
    return sum(base.storage.nbytes for base in bases if base is not None)


_SCALED_BYTES = 2 * 8
"""A loss that a result has may be scaled, as it is where gradients of batches add up: it and its gradient."""


def _leaf_gradient_bytes(graph: Graph, found: Iterable[Delivery], flat: FlatModule) -> int:
    """Returns the bytes of the gradients that leaves among the results get from the loss itself.

    These are parameters, arguments, and views made under `no_grad`: the graph has no gradient of them.
    """
    statics = [entry.value.storage for entry in graph.inputs if entry.role is not InputRole.TANGENT]
    leaves = (leaf for leaf in flat.delivered if isinstance(leaf, Tensor))
    unused = flat.unused_places()
    nbytes: dict[object, int] = {}
    for place, (delivery, leaf) in enumerate(zip(found, leaves, strict=True)):
        if not leaf.requires_grad or place in unused:
            continue
        if delivery.origin is Origin.INPUT:
            base = statics[delivery.index]
            nbytes[base] = base.nbytes
        elif delivery.sharing is Sharing.NO_GRAD:
            nbytes[flat.places[place]] = allocation_bytes(leaf.nbytes, str(leaf.device))
    return sum(nbytes.values())


def _nothing_to_train(flat: FlatModule) -> UsageError:
    if not any(tensor.requires_grad for tensor in (*flat.parameters(), *flat.tensors)):
        return UsageError(
            "IRC340",
            "no parameter and no input of the module requires a gradient",
            help="call requires_grad_() on what is to be trained",
        )
    if flat.without_gradients:
        return UsageError(
            "IRC340",
            f"checkpoint(use_reentrant=True){flat.without_gradients[0]} is given no tensor that requires a "
            "gradient, so that torch makes none for the parameters within, and no output depends on another",
            help="pass use_reentrant=False to torch's checkpoint, or leave the checkpoint to irc",
        )
    return UsageError(
        "IRC340",
        "no output of the module depends on a parameter or an input that requires a gradient",
        help="return a float tensor that depends on one, computed without detach() and torch.no_grad()",
    )


_UNWRITTEN = re.compile(r"argument of type: <class '(?:\w+\.)*(\w+)'>")
"""The error of torch's tracer, before torch 2.13, for an object that it cannot write down, as a generator."""

_OTHER_MODE_MAY_SUCCEED = ("IRC332", "IRC333", "IRC335")
"""Codes of failures that another mode may avoid: data that decides, an exception, an unknown operation."""


def _traced(flat: FlatModule, modes: Sequence[TraceMode]) -> Translation:
    """Traces the module's training graph in the first of `modes` that succeeds.

    If none does, the error of the first mode is raised: the others run code that training does not run. With
    the example's branches it is the error of the last mode, in which the module runs as it is.
    """
    errors: list[UnsupportedError] = []
    for mode in modes:
        with mode.announced():
            try:
                return _traced_in(flat, mode)
            except UnsupportedError as error:
                if error.code not in _OTHER_MODE_MAY_SUCCEED:
                    raise
                errors.append(error)
                flat.first_failure = errors[0]
    if errors[0].code == "IRC333":
        _refuse_failing(flat)
    raise errors[-1 if modes[-1].specialize_branches else 0]


def _traced_in(flat: FlatModule, mode: TraceMode) -> Translation:
    """Traces the module's training graph in one mode."""
    _refuse_opaque((*flat.parameters(), *flat.buffers(), *flat.tensors))
    flat.mode = mode
    flat.parts.clear()
    flat.branches = Branches(flat.module) if mode.specialize_branches else None
    if flat.branches is not None:
        try:
            flat.branches.record(flat.call, flat.tensors)
        except IrcError:
            raise
        except Exception as error:
            raise _untraceable(error) from error
    try:
        return _translated(flat)
    except LossFails:
        flat.ask_loss_alone()
        return _translated(flat)


def _translated(flat: FlatModule) -> Translation:
    """Traces the module's training graph; once more without knowing the numbers that its forward counts."""
    try:
        return _translated_once(flat)
    except UnsupportedError:
        if not flat.state.may_count():
            raise
        with contextlib.suppress(Exception):
            return _translated_with_counters(flat)
        raise


def _translated_with_counters(flat: FlatModule) -> Translation:
    """Traces with and without knowing the numbers that the forward counts: it must make no difference.

    Raises:
        CounterReadError: It makes a difference: code can look at the class of an object unseen.
    """
    flat.state.counters_are_unknown = False
    known = _translated_once(flat)
    flat.state.counters_are_unknown = True
    unknown = _translated_once(flat)
    if print_graph(unknown.graph) != print_graph(known.graph) or unknown.deliveries != known.deliveries:
        raise CounterReadError
    return unknown


def _translated_once(flat: FlatModule) -> Translation:
    with contextlib.ExitStack() as stack:
        joint, scopes = _trace(stack, flat, flat.tensors)
        share_casts(joint.graph_module.graph)
        flat.derivatives = sums_within_forward(joint.graph_module.graph)
        translation = translate(joint, flat.state.generators)
        flat.without_gradients = scopes.without_gradients
    graph = flat.packed.named(place_annotations(translation.graph, translation.notes, scopes.asked))
    return replace(translation, graph=graph)


def _trace(
    stack: contextlib.ExitStack,
    flat: FlatModule,
    tensors: tuple[Tensor, ...],
    fake_mode: FakeTensorMode | None = None,
) -> tuple[JointWithDescriptors, Scopes]:
    """Returns the joint graph of AOTAutograd, and the scopes of annotations; raises why there is none."""
    stack.enter_context(torch.random.fork_rng(devices=[]))
    stack.enter_context(flat.state.generators.standing_in())  # in backward, too
    stack.enter_context(torch.enable_grad())
    fake_mode = fake_mode or FakeTensorMode(allow_non_fake_inputs=True)
    stack.enter_context(tracing(TracingContext(fake_mode)))
    scopes = stack.enter_context(recording(flat.module))
    layers = RecurrentLayers(has_kernels=not flat.stepwise, time_limit=flat.time_limit)
    flat.layers = stack.enter_context(layers).rounding
    flat.hooked = stack.enter_context(tensor_hooks())
    flat.seeing = stack.enter_context(noting_seeing_nodes())
    stack.enter_context(fake_kernels_of_eager())
    stack.enter_context(composite_operations())
    stack.enter_context(casts_within())
    stack.enter_context(refused_operations())
    stack.enter_context(gradients_by_zeros())
    stack.enter_context(tangent_layouts(flat.layouts))
    stack.enter_context(composites_on_meta((*flat.parameters(), *flat.buffers(), *tensors)))
    stack.enter_context(batch_norm_of_eager())
    stack.enter_context(flat.state.restored())
    stack.enter_context(quiet_tracer())
    stack.enter_context(unread_draws_stay())
    stack.enter_context(checks_stay())
    # eager's backward runs where the loop calls it: outside of the forward's autocast
    stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
    stack.enter_context(noting_writes())
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    try:
        return aot_export_joint_with_descriptors(stack, flat, tensors, decompositions=DECOMPOSITIONS), scopes
    except IrcError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise _depends_on_data(error, is_specialized=flat.branches is not None) from error
    except AssertionError as error:
        if "entirely functional graph" in str(error):
            raise _writes_constant() from error
        raise _untraceable(error) from error
    except NotImplementedError as error:
        unwritten = _UNWRITTEN.fullmatch(str(error))
        if unwritten is None:
            raise _untraceable(error) from error
        raise unknown_object(f"an object of type {unwritten[1]}", raised_at(error)) from error
    except Exception as error:
        raise (_overwritten(error) if _OVERWRITTEN in str(error) else _untraceable(error)) from error


_OVERWRITTEN = "modified by an inplace operation"


def _overwritten(error: Exception) -> UnsupportedError:
    return UnsupportedError(
        "IRC337",
        f"the forward writes over numbers that backward reads, which eager's backward refuses too: "
        f"{first_line(error)}",
        help="read from a copy (clone()) of what is written",
    )


def _writes_constant() -> UnsupportedError:
    return UnsupportedError(
        "IRC336",
        "the module writes into a tensor that is not a parameter, buffer or input of it",
        help="register the tensor as a buffer",
    )


def _depends_on_data(error: Exception, *, is_specialized: bool) -> UnsupportedError:
    code = raised_code(error)
    specialize = "; if it takes the same branch in every step, as a check does, pass specialize_branches=True"
    return UnsupportedError(
        "IRC332",
        f"the model's shapes or control flow depend on the values of its tensors ({first_line(error)})"
        + (f" in `{code}`" if code else ""),
        at=raised_at(error),
        help="set the option that leads there (as layerdrop=0), replace the branch, or move it out of the "
        f"module{'' if is_specialized else specialize}; or {THROUGH_DYNAMO}, which leaves it to Python",
    )


def _refuse_opaque(tensors: Iterable[Tensor]) -> None:
    """Refuses tensors of oneDNN, which a trace takes for dense ones.

    Raises:
        UnsupportedError: IRC334.
    """
    opaque = next((tensor for tensor in tensors if tensor.is_mkldnn), None)
    if opaque is not None:
        raise UnsupportedError("IRC334", f"an operand is a {opaque.layout} tensor", help=DENSE_ALONE)


def _refuse_failing(flat: FlatModule) -> None:
    """Runs the forward as it is written, on copies of the example, if it could not be traced.

    Raises:
        UsageError: IRC349 if that fails too: the model or its example is at fault.
    """
    flat.branches = None
    try:
        with flat.packed.as_they_are():
            Branches(flat.module).record(flat.call, flat.tensors, with_gradients=True)
    except (IrcError, MemoryError, torch.OutOfMemoryError):
        return
    except Exception as error:
        code = raised_code(error)
        raise UsageError(
            "IRC349",
            f"the model's forward raises on the example arguments: {type(error).__name__}: "
            f"{first_line(error)}" + (f" in `{code}`" if code else ""),
            at=raised_at(error),
            help="correct the model, or give example arguments on which module(*args) runs",
        ) from error


def _untraceable(error: Exception) -> UnsupportedError:
    return UnsupportedError(
        "IRC333",
        f"the module cannot be traced: {type(error).__name__}: {first_line(error)}",
        at=raised_at(error),
        help=f"use other operations in place of it, or move it out of the module; or {THROUGH_DYNAMO}",
    )
