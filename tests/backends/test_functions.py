"""Tests of the functions that stand for operations: each runs its operation, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from irc.torch_support import operations

_A, _B, _ROW = torch.rand(3, 4), torch.rand(3, 4), torch.rand(4)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "aten._log_softmax.default": (_A, 1, False),
    "aten._softmax.default": (_A, 1, False),
    "aten.addmm.default": (_ROW, _A, torch.rand(4, 4)),
    "aten.bmm.default": (torch.rand(2, 3, 4), torch.rand(2, 4, 3)),
    "aten.cat.default": ([_A, _B], 1),
    "aten.embedding.default": (_A, torch.tensor([0, 2]), -1, False, False),
    "aten.expand.default": (_ROW, [3, 4]),
    "aten.mm.default": (_A, torch.rand(4, 3)),
    "aten.narrow.default": (_A, 1, 0, 2),
    "aten.native_layer_norm.default": (_A, [4], _ROW, _ROW, 1e-5),
    "aten.permute.default": (_A, [1, 0]),
    "aten.select.int": (_A, 0, 1),
    "aten.squeeze.dim": (_A[:1], 0),
    "aten.stack.default": ([_A, _B], 1),
    "aten.sum.dim_IntList": (_A, [0], True),
    "aten.transpose.int": (_A, 0, 1),
    "aten.unsqueeze.default": (_A, 0),
    "aten.view.default": (_A, [4, 3]),
    "aten.where.self": (_A > 0.5, _A, _B),
    **{f"aten.{name}.default": (_A, _B) for name in ("maximum", "minimum")},
    **{f"aten.{name}.Tensor": (_A, _B) for name in ("add", "sub", "mul", "div")},
}
"""Arguments of the operations that take more than one tensor."""


class _Called(TorchDispatchMode):
    """Notes the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", vars(operations)["_FUNCTIONS"])
def test_a_function_runs_its_operation(op: str) -> None:
    with torch.no_grad(), _Called() as called:
        operations.function_of(op)(*_ARGUMENTS.get(op, (_A,)))
    assert called.names in ([op], ["aten.slice.Tensor"]), "narrow is a slice"
