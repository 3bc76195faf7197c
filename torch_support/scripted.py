"""Modules of torch.jit within a model: what they hold outside of Python, and whether they can be traced."""

# torch.jit has no public way to what a scripted module holds.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ScriptTable", "is_scripted", "rounds_otherwise", "script_settings", "unoptimized", "untraceable"]

_BESIDE_OPERATIONS = ("prim::SetAttr", "prim::CallFunction", "prim::PythonOp")
"""What a graph may hold that no trace sees, or that is not in its inlined form."""
_KERNELS = ("lstm", "gru", "rnn_tanh", "rnn_relu", "quantized")
"""Operations that a plan takes apart where Python calls them."""
_RANDOM = ("dropout", "rand", "bernoulli", "normal", "multinomial", "uniform", "exponential", "rrelu")
_AS_EAGER = frozenset({"aten::linear", "aten::relu"})
"""Operations whose gradients have the bits of eager in what torch.jit differentiates by its own formulas."""


class ScriptTable(Mapping[str, Tensor | None]):
    """The parameters or buffers of a module as a mapping: those of torch.jit have one that is incomplete.

    Args:
        held: The table.
    """

    def __init__(self, held: Any) -> None:
        self._held = held

    def __getitem__(self, name: str) -> Tensor | None:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held.keys())

    def __len__(self) -> int:
        return len(self._held)


def is_scripted(module: nn.Module) -> bool:
    """Whether a module is one of torch.jit."""
    return issubclass(type(module), torch.jit.ScriptModule)


def untraceable(module: nn.Module) -> str:
    """Returns what of a scripted module cannot be traced; "" if all of it can."""
    for part in module.modules():
        registered = {*dict(part.named_parameters()), *dict(part.named_buffers())}
        tensors = (name for name in _attributes(part) if isinstance(_held(part).getattr(name), Tensor))
        if unregistered := next((name for name in tensors if name not in registered), ""):
            return f"its attribute {unregistered} is a tensor, and no buffer"
    kinds = [node.kind() for node in _nodes(module)]
    found = next((kind for kind in kinds if kind in _BESIDE_OPERATIONS), "")
    return found or next((k for k in kinds if any(name in k for name in (*_KERNELS, *_RANDOM))), "")


def rounds_otherwise(module: nn.Module) -> bool:
    """Whether gradients may be computed by formulas of torch.jit's own."""
    kinds = {node.kind() for node in _nodes(module)}
    return any(kind.startswith("aten::") and kind not in _AS_EAGER for kind in kinds)


def script_settings(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Returns what a scripted module holds outside of Python besides tensors, in words: numbers, modes."""
    values = ((name, _held(module).getattr(name)) for name in _attributes(module))
    return tuple((name, repr(value)) for name, value in values if not isinstance(value, Tensor))


def _held(module: nn.Module) -> Any:
    return module._c  # pyright: ignore[reportAttributeAccessIssue]


def _attributes(module: nn.Module) -> list[str]:
    kind: Any = torch._C.ConcreteModuleType.from_jit_type(_held(module)._type())
    return sorted(kind.get_attributes())


@contextlib.contextmanager
def unoptimized() -> Generator[None]:
    """Meanwhile this thread runs scripted code as it is written, operation by operation."""
    before = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(before)


def _nodes(module: nn.Module) -> Iterator[Any]:
    graph: Any = module.inlined_graph
    waiting = list(graph.nodes())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [each for block in node.blocks() for each in block.nodes()]
