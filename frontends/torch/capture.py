"""Captures an `nn.Module` as a functional joint forward and backward graph, through AOTAutograd."""

# AOTAutograd and the autograd engine have no public door.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import logging
import random
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd.schemas import JointWithDescriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from ...ir import (
    Delivery,
    Graph,
    IrcError,
    Origin,
    OutputRole,
    Signature,
    Slot,
    UnsupportedError,
    UsageError,
)
from .loss import Loss, loss_bytes
from .placing import place_wishes
from .provenance import raised_at, recording
from .recurrent import StepwiseRNN
from .scopes import Scopes
from .translate import translate

__all__ = ["Captured", "capture"]


@dataclass(frozen=True)
class Captured:
    """A module turned into a training graph.

    Args:
        graph: One training step.
        signature: How the module's arguments and result map to the graph's inputs and outputs.
        constants: Tensors that the module's code creates from nothing, by `Input.target`.
    """

    graph: Graph
    signature: Signature
    constants: Mapping[str, Tensor]


class _Flat(nn.Module):
    """Calls a module with its tensor leaves alone, and returns the tensor leaves of its result."""

    def __init__(self, module: nn.Module, tree: pytree.TreeSpec, leaves: list[Any]) -> None:
        super().__init__()
        self.module = module
        self.tree = tree
        self.leaves = leaves
        self.result_leaves: list[Any] = []
        self.result_tree: pytree.TreeSpec | None = None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        result = self.module.forward(*args, **kwargs)  # the module's own hooks run around the planned forward
        self.result_leaves, self.result_tree = pytree.tree_flatten(result)
        return tuple(leaf for leaf in self.result_leaves if isinstance(leaf, Tensor))


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
) -> Captured:
    """The training graph of one call `module(*args, **kwargs)`, followed by a loss and its backward.

    The module is traced once, on tensors without data: nothing is computed, no buffer changes and no
    random number is drawn. Python control flow is followed as these arguments take it.

    Args:
        module: The model, in the modes (train, eval) that it will be trained in.
        args: Example arguments; tensors may be nested in lists, tuples and dicts.
        kwargs: Example keyword arguments.
        loss: What the caller will do with the result, a function from it to a scalar; its memory is
            counted. Without it, twice the outputs' bytes are counted, unless the only output is a scalar.

    Raises:
        UnsupportedError: IRC332 to IRC339 and IRC554, when something in the module has no place in the graph.
        UsageError: IRC340, when nothing in the result depends on anything that asks for a gradient.
    """
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    flat = _Flat(module, tree, leaves)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    with contextlib.ExitStack() as stack:
        joint, scopes = _trace(stack, flat, module, tensors)
        translation = translate(joint)
    graph = place_wishes(translation.graph, translation.notes, scopes.asked)
    if not any(o.value is not None and o.role is OutputRole.GRADIENT for o in graph.outputs):
        raise _nothing_to_train()
    deliveries = iter(translation.deliveries)
    result = [
        next(deliveries) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in flat.result_leaves
    ]
    most, held = loss_bytes(loss, flat.result_leaves, flat.result_tree)
    aliased = _aliased_bytes(graph, translation.deliveries)
    most, held = most + 2 * aliased, held + aliased
    graph = replace(graph, loss_bytes=most, loss_held_bytes=held)
    slots = map(Slot, range(len(tensors)))
    signature = Signature(
        in_tree=tree,
        out_tree=flat.result_tree,
        leaves=tuple(next(slots) if isinstance(leaf, Tensor) else leaf for leaf in leaves),
        deliveries=tuple(result),
        modes=tuple((name, child.training) for name, child in module.named_modules()),
        autocast=tuple(
            (device, str(torch.get_autocast_dtype(device)).removeprefix("torch."))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ),
    )
    return Captured(graph, signature, translation.constants)


def _aliased_bytes(graph: Graph, deliveries: Sequence[Delivery]) -> int:
    """What the gradients of outputs that are views of others take before they become one gradient."""
    outputs = [o.value for o in graph.outputs if o.role is OutputRole.OUTPUT]
    bases = [outputs[d.index] for d in deliveries if d.origin is Origin.OUTPUT]
    return sum(base.storage.nbytes for base in bases if base is not None)


def _constant(leaf: Any) -> Delivery:
    return Delivery(Origin.CONSTANT, constant=leaf)


def _nothing_to_train() -> UsageError:
    return UsageError(
        "IRC340",
        "no output of the module depends on a parameter or an input that requires a gradient",
        help="call requires_grad_() on what is to be trained, and return a float tensor that depends on it",
    )


def _trace(
    stack: contextlib.ExitStack, flat: _Flat, module: nn.Module, tensors: tuple[Tensor, ...]
) -> tuple[JointWithDescriptors, Scopes]:
    """The joint graph of AOTAutograd and what wishes are about, or the reason why there is none."""
    stack.enter_context(torch.random.fork_rng(devices=[]))
    stack.enter_context(torch.enable_grad())
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    stack.enter_context(tracing(TracingContext(fake_mode)))
    scopes = stack.enter_context(recording(module))
    stack.enter_context(StepwiseRNN())
    stack.enter_context(_restored(module))
    stack.enter_context(_quiet_tracer())
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    try:
        return aot_export_joint_with_descriptors(stack, flat, tensors), scopes
    except IrcError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise UnsupportedError(
            "IRC332",
            f"the model's shapes or control flow depend on the values of its tensors ({_first_line(error)})",
            at=raised_at(error),
            help="replace the data-dependent branch, or move it out of the module",
        ) from error
    except AssertionError as error:
        if "entirely functional graph" in str(error):
            raise _writes_constant() from error
        raise _untraceable(error) from error
    except RuntimeError as error:
        if "does not require grad" in str(error) or "requires_grad" in str(error):
            raise _nothing_to_train() from error
        raise _untraceable(error) from error
    except Exception as error:
        raise _untraceable(error) from error


@contextlib.contextmanager
def _quiet_tracer() -> Generator[None]:
    """What the tracer logs about a model's error stands in the error that follows."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _restored(module: nn.Module) -> Generator[None]:
    """Afterwards, every attribute of the module and its submodules is what it was before.

    Raises:
        UnsupportedError: IRC338 when the forward assigns what it computes to an attribute. A hook before the
            forward may (pruning, weight norm): it computes the attribute from parameters in each call.
    """
    before = [(name, child, dict(vars(child))) for name, child in module.named_modules()]
    tensors = [(held, dict(held)) for _, child, _ in before for held in (child._parameters, child._buffers)]
    drawn = random.getstate()
    assigned: list[str] = []
    counted: list[str] = []
    try:
        yield
        for name, child, attributes in before:
            changed = (k for k, v in vars(child).items() if attributes.get(k, _ABSENT) is not v)
            own_cache = type(child).__module__.startswith("torch.")  # such as the flat weights of an LSTM
            if not child._forward_pre_hooks and not own_cache:
                for key in changed:
                    found = assigned if _is_traced(vars(child)[key]) else counted
                    if found is assigned or isinstance(vars(child)[key], (int, float, str)):
                        found.append(f"{name}.{key}".lstrip("."))
        if random.getstate() != drawn:
            counted.append("random (Python's generator)")
    finally:
        random.setstate(drawn)
        for _, child, attributes in before:
            vars(child).clear()
            vars(child).update(attributes)
        for held, contents in tensors:
            held.clear()
            held.update(contents)
    if assigned:
        raise UnsupportedError(
            "IRC338",
            f"the forward assigns a tensor to the attribute {assigned[0]} ({len(assigned)} such attributes)",
            help="return the tensor, or register a buffer and write into it with copy_()",
        )
    if counted:
        raise UnsupportedError(
            "IRC338",
            f"the forward changes Python state: {counted[0]} ({len(counted)} such); a plan would freeze it",
            help="keep it outside of the module, or in a buffer",
        )


_ABSENT = object()


def _is_traced(attribute: object) -> bool:
    """Whether an attribute holds a tensor that exists only while a module is traced."""
    return any(isinstance(leaf, (FakeTensor, FunctionalTensor)) for leaf in pytree.tree_leaves(attribute))


def _writes_constant() -> UnsupportedError:
    return UnsupportedError(
        "IRC336",
        "the module writes into a tensor that is no parameter, buffer or input of it",
        help="register the tensor as a buffer",
    )


def _untraceable(error: Exception) -> UnsupportedError:
    return UnsupportedError(
        "IRC333",
        f"the module cannot be traced: {type(error).__name__}: {_first_line(error)}",
        at=raised_at(error),
        help="check that module(*args) runs with these example arguments; then simplify what is named here",
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
