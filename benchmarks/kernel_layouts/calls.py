"""Calls of torch's operations: by torch's own samples, and by schema where there is no sample."""

# What torch tests itself with, and its dispatcher, have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import itertools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchgen
import yaml
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .by_hand import run_all

__all__ = ["Call", "derivatives", "operation_of", "sampled_calls", "schema_calls"]

_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
_SAMPLES = 12
"""Samples of one operation and type that are taken."""


@dataclass(frozen=True)
class Call:
    """A call of an operation, with data."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Recorded(TorchDispatchMode):
    """Notes calls of operations; of each some with different shapes, copied before they run."""

    def __init__(self, calls_each: int) -> None:
        super().__init__()
        self.calls_each = calls_each
        self.calls: dict[str, dict[Any, Call]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        calls = self.calls.setdefault(str(func), {})
        key = tuple(map(_described, pytree.tree_leaves((args, kwargs))))
        copied = None
        if key not in calls and len(calls) < self.calls_each:
            copied = pytree.tree_map(_copied, (args, kwargs))
        result = func(*args, **kwargs)
        if copied is not None:
            calls[key] = Call(func, *copied)
        return result


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, (int, float, bool, str)) else str(type(leaf))


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def sampled_calls(calls_each: int = 16) -> dict[str, list[Call]]:
    """The calls that torch's samples of its operations make, forward and backward, by operation."""
    from torch.testing._internal.common_methods_invocations import op_db

    recorded = _Recorded(calls_each)
    for operation in op_db:
        for dtype in [dtype for dtype in _DTYPES if dtype in operation.dtypes][:2]:
            trains = operation.supports_autograd and dtype.is_floating_point
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                samples = operation.sample_inputs("cpu", dtype, requires_grad=trains)
                for sample in itertools.islice(samples, _SAMPLES):
                    for variant in (operation, operation.inplace_variant):
                        with contextlib.suppress(Exception), recorded:
                            _step(variant, sample, trains and variant is operation)
    with recorded, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_all()
    return {name: list(calls.values()) for name, calls in recorded.calls.items()}


def _step(function: Any, sample: Any, trains: bool) -> None:
    if function is None:
        return
    given = sample if trains else sample.transform(_copied)
    results = function(given.input, *given.args, **given.kwargs)
    outputs = [
        leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    leaves = pytree.tree_leaves((given.input, given.args, given.kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if trains and outputs and inputs:
        gradients = [torch.randn_like(output) for output in outputs]
        torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)


def derivatives() -> list[str]:
    """The operations for which torch's wheel has a formula of the gradient, as `add.Tensor`."""
    path = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    return [entry["name"].partition("(")[0] for entry in yaml.safe_load(path.read_text())]


def operation_of(name: str) -> Any:
    """The operation of a name as `add.Tensor`; None if torch.ops has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


_SHAPES = ((2, 3, 4), (3, 4), (2, 3, 4, 4), (2, 2, 3, 4, 4), (4,), ())
_NUMBERS: dict[str, tuple[Any, ...]] = {
    "int": (1, 0, 2),
    "SymInt": (1, 0, 2),
    "float": (0.5,),
    "bool": (False,),
    "number": (2,),
    "Scalar": (2,),
    "str": ("none",),
}


def schema_calls(name: str) -> list[Call]:
    """Calls of an operation with arguments that fit its schema, of those that run.

    Some kernels trust such arguments: they may end the process, or spoil its memory.

    Args:
        name: As `aten.add.Tensor`.
    """
    func = operation_of(name.removeprefix("aten."))
    calls: list[Call] = []
    for shape, choice, dtype in itertools.product(_SHAPES, range(3), (torch.float32, torch.int64)):
        args = [
            _argument(each, shape, choice, dtype)
            for each in func._schema.arguments
            if not each.kwarg_only and not each.has_default_value()
        ]
        copied = pytree.tree_map(_copied, args)
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            func(*args)
            calls.append(Call(func, tuple(copied), {}))
    return calls[:8]


def _argument(argument: Any, shape: tuple[int, ...], choice: int, dtype: torch.dtype) -> Any:
    kind = str(argument.type)
    element = kind.removeprefix("Optional[").removeprefix("List[").rstrip("]")
    if element == "Tensor":
        tensor = torch.rand(shape).mul(3).to(dtype)
        return [tensor, tensor.clone()] if "List" in kind else tensor
    if kind.startswith("Optional["):
        return None
    values = _NUMBERS.get(element, (None,))
    value = values[choice % len(values)]
    return [value] * max(len(shape) - 2, 1) if "List" in kind else value
