"""Captures an `nn.Module` as a functional joint forward and backward graph, through AOTAutograd."""

# AOTAutograd and the autograd engine have no public door.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Mapping
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
from torch.overrides import TorchFunctionMode
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
from .provenance import raised_at, recording
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
            counted. Without it only the gradients of the outputs are counted.

    Raises:
        UnsupportedError: IRC302 to IRC308, when something in the module has no place in the graph.
        UsageError: IRC320, when nothing in the result depends on anything that asks for a gradient.
    """
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    flat = _Flat(module, tree, leaves)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    with contextlib.ExitStack() as stack:
        joint = _trace(stack, flat, module, tensors)
        translation = translate(joint)
    graph = translation.graph
    if not any(o.value is not None and o.role is OutputRole.GRADIENT for o in graph.outputs):
        raise _nothing_to_train()
    deliveries = iter(translation.deliveries)
    result = [
        next(deliveries) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in flat.result_leaves
    ]
    if loss is not None:
        graph = replace(graph, loss_bytes=loss_bytes(loss, flat.result_leaves, flat.result_tree))
    slots = map(Slot, range(len(tensors)))
    signature = Signature(
        in_tree=tree,
        out_tree=flat.result_tree,
        leaves=tuple(next(slots) if isinstance(leaf, Tensor) else leaf for leaf in leaves),
        deliveries=tuple(result),
        modes=tuple((name, child.training) for name, child in module.named_modules()),
    )
    return Captured(graph, signature, translation.constants)


def _constant(leaf: Any) -> Delivery:
    return Delivery(Origin.CONSTANT, constant=leaf)


def _nothing_to_train() -> UsageError:
    return UsageError(
        "IRC320",
        "no output of the module depends on a parameter or an input that requires a gradient",
        help="call requires_grad_() on what is to be trained, and return a float tensor that depends on it",
    )


def _trace(
    stack: contextlib.ExitStack, flat: _Flat, module: nn.Module, tensors: tuple[Tensor, ...]
) -> JointWithDescriptors:
    """The joint graph of AOTAutograd, or the reason why there is none."""
    stack.enter_context(torch.random.fork_rng(devices=[]))
    stack.enter_context(torch.enable_grad())
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    stack.enter_context(tracing(TracingContext(fake_mode)))
    stack.enter_context(recording(module))
    stack.enter_context(_StepwiseRNN())
    stack.enter_context(_restored(module))
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    try:
        return aot_export_joint_with_descriptors(stack, flat, tensors)
    except IrcError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise UnsupportedError(
            "IRC302",
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


class _StepwiseRNN(TorchFunctionMode):
    """Traces recurrent layers one by one, and on the CPU as their time steps.

    oneDNN's fused LSTM has no place in a plan: the size of its workspace is not known before it runs,
    and without gradients it makes none. torch's own decomposition of several layers leaves out the
    dropout between them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in ("lstm", "gru", "rnn_tanh", "rnn_relu") or kwargs:
            return func(*args, **(kwargs or {}))
        enabled = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            return _layer_by_layer(func, args)
        finally:
            torch._C._set_mkldnn_enabled(enabled)


def _layer_by_layer(func: Any, args: tuple[Any, ...]) -> Any:
    """What `func` returns for a stack of recurrent layers; it is called once for each.

    Args:
        func: `torch.lstm` or another of its kind.
        args: input, state (a tensor, or for LSTM two), weights, has biases, layers, dropout, train,
            bidirectional, batch first. Packed sequences come with other arguments and are passed on.
    """
    if not isinstance(args[3], bool):
        return func(*args)
    x, state, weights, biases, layers, dropout, train, bidirectional, batch_first = args
    states = [state] if isinstance(state, Tensor) else list(state)
    directions = 2 if bidirectional else 1
    each = len(weights) // layers
    final: list[list[Tensor]] = [[] for _ in states]
    for layer in range(layers):
        if layer and dropout and train:
            x = torch.dropout(x, dropout, True)
        own = [s[directions * layer : directions * (layer + 1)] for s in states]
        own_state = own[0] if isinstance(state, Tensor) else tuple(own)
        own_weights = weights[each * layer : each * (layer + 1)]
        x, *after = func(x, own_state, own_weights, biases, 1, 0.0, train, bidirectional, batch_first)
        for parts, part in zip(final, after, strict=True):
            parts.append(part)
    return (x, *(torch.cat(parts) for parts in final))


@contextlib.contextmanager
def _restored(module: nn.Module) -> Generator[None]:
    """Afterwards, every attribute of the module and its submodules is what it was before.

    Raises:
        UnsupportedError: IRC308 when the forward assigns what it computes to an attribute. A hook before the
            forward may (pruning, weight norm): it computes the attribute from parameters in each call.
    """
    before = [(name, child, dict(vars(child))) for name, child in module.named_modules()]
    assigned: list[str] = []
    try:
        yield
        for name, child, attributes in before:
            changed = (k for k, v in vars(child).items() if attributes.get(k, _ABSENT) is not v)
            own_cache = type(child).__module__.startswith("torch.")  # such as the flat weights of an LSTM
            if not child._forward_pre_hooks and not own_cache:
                assigned += [f"{name}.{k}".lstrip(".") for k in changed if _is_traced(vars(child)[k])]
    finally:
        for _, child, attributes in before:
            vars(child).clear()
            vars(child).update(attributes)
    if assigned:
        raise UnsupportedError(
            "IRC308",
            f"the forward assigns a tensor to the attribute {assigned[0]} ({len(assigned)} such attributes)",
            help="return the tensor, or register a buffer and write into it with copy_()",
        )


_ABSENT = object()


def _is_traced(attribute: object) -> bool:
    """Whether an attribute holds a tensor that exists only while a module is traced."""
    return any(isinstance(leaf, (FakeTensor, FunctionalTensor)) for leaf in pytree.tree_leaves(attribute))


def _writes_constant() -> UnsupportedError:
    return UnsupportedError(
        "IRC306",
        "the module writes into a tensor that is no parameter, buffer or input of it",
        help="register the tensor as a buffer",
    )


def _untraceable(error: Exception) -> UnsupportedError:
    return UnsupportedError(
        "IRC303",
        f"the module cannot be traced: {type(error).__name__}: {_first_line(error)}",
        at=raised_at(error),
        help="check that module(*args) runs with these example arguments; then simplify what is named here",
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
