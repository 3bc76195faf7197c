"""What operations return where nothing is computed, for those for which torch has no rule, or a wrong one."""

# The rules for tensors without data have no public door.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses import FakeTensorMode, fake_impls
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["own_rules"]


def _ctc_loss(
    mode: Any, operation: Any, log_probs: Tensor, targets: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Losses [batch], and the table [batch, time, 2 * longest + 1] for the longest label there can be.

    Labels side by side [batch, longest] bound it by their width, labels in a row by their number. The kernel
    makes a table of the size that the labels ask for: this one or a smaller one.
    """
    with mode:
        times, batch = log_probs.shape[0], (log_probs.shape[1] if log_probs.dim() == 3 else 1)
        longest = targets.shape[-1] if targets.dim() else 0
        return log_probs.new_empty(batch), log_probs.new_empty(batch, times, 2 * longest + 1)


def _ctc_loss_backward(
    mode: Any, operation: Any, gradient: Tensor, log_probs: Tensor, *_: Any, **__: Any
) -> Tensor:
    with mode:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


_DROPOUT_BACKWARD = torch.ops.aten.native_dropout_backward.default
_torch_dropout_backward = decomposition_table[_DROPOUT_BACKWARD]


def _dropout_backward(mode: Any, operation: Any, gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The CPU's kernel multiplies: its result has the gradient's layout, where torch's rule makes its own."""
    with mode:
        if gradient.device.type == "cpu":
            return gradient * mask * scale
        return _torch_dropout_backward(gradient, mask, scale)


_RULES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    torch.ops.aten._ctc_loss_backward.default: _ctc_loss_backward,
    _DROPOUT_BACKWARD: _dropout_backward,
}


class _LengthsAsTensors(TorchFunctionMode):
    """Gives the CTC loss its lengths as tensors: torch's tracer fails on lists of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.ctc_loss, torch.ctc_loss):
            lengths = (torch.tensor(n) if isinstance(n, (list, tuple)) else n for n in args[2:4])
            args = (*args[:2], *lengths, *args[4:])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def own_rules() -> Generator[None]:
    """Meanwhile, these rules stand before torch's."""
    _forget()
    rules = fake_impls.op_implementations_dict
    with _without(rules, _RULES), _without(decomposition_table, _RULES), _LengthsAsTensors():
        rules.update(_RULES)
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    """Drops what torch has noted of results under other rules."""
    noted: dict[Any, Any] = FakeTensorMode.cache
    for key in [key for key in noted if key.key[0] in _RULES]:
        del noted[key]


@contextlib.contextmanager
def _without(table: dict[Any, Any], keys: Iterable[Any]) -> Generator[None]:
    """Meanwhile, a table has no entries of these keys from before."""
    before = {key: table.pop(key) for key in keys if key in table}
    try:
        yield
    finally:
        for key in keys:
            table.pop(key, None)
        table.update(before)
