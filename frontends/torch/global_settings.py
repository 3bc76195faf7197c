"""Watches a forward for changes of torch's global settings, under which a planned step would not run."""

# Some settings of torch have no public way to read or to set them.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device, deterministic

from ...ir import Location, UnsupportedError
from ...torch_support.pytree import tensors_of
from .source_lines import user_line

__all__ = ["GlobalSettings"]

_deterministic: Any = deterministic


@dataclass(frozen=True, slots=True)
class _Setting:
    """A global setting of torch.

    Args:
        words: Its name.
        value: Returns its value.
        set: Sets it.
        is_at_run: Whether operations look at it when they run; if not, the trace has taken it into account.
    """

    words: str
    value: Callable[[], Any]
    set: Callable[[Any], object]
    is_at_run: bool = False


def _set_fill(value: bool) -> None:
    _deterministic.fill_uninitialized_memory = value


def _flags() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return cudnn.enabled, cudnn.benchmark, cudnn.deterministic


_DTYPE = _Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype)
_SETTINGS = (
    _DTYPE,
    _Setting("default device", lambda: _device.CURRENT_DEVICE, torch.set_default_device),
    _Setting(
        "deterministic algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch._C._get_deterministic_algorithms_warn_only(),
        ),
        lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
        is_at_run=True,
    ),
    _Setting(
        "fill of new memory", lambda: _deterministic.fill_uninitialized_memory, _set_fill, is_at_run=True
    ),
    _Setting(
        "precision of float32 products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        is_at_run=True,
    ),
    _Setting("oneDNN", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, is_at_run=True),
    _Setting(
        "cuDNN",
        _flags,
        lambda flags: torch.backends.cudnn.set_flags(*flags),
        is_at_run=torch.cuda.is_available(),
    ),
    _Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
    _Setting("gradients", torch.is_grad_enabled, torch._C._set_grad_enabled),
    _Setting("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _Setting("repeated warnings", torch.is_warn_always_enabled, torch.set_warn_always),
    *(
        _Setting(
            f"{kind} attention",
            vars(torch._C)[f"_get_{kind}_sdp_enabled"],
            vars(torch._C)[f"_set_sdp_use_{kind}"],
        )
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    ),
)
_AT_RUN = tuple(each for each in _SETTINGS if each.is_at_run)


class GlobalSettings(TorchFunctionMode):
    """Refuses that a forward leaves torch with another setting, or computes under another one.

    What the trace takes into account may differ for some lines: the device and the class of what factories
    make, which attention runs, and whether gradients flow.

    Raises:
        UnsupportedError: IRC338.
    """

    def __enter__(self) -> GlobalSettings:
        self._before = [each.value() for each in _SETTINGS]
        self._at_run = [each.value() for each in _AT_RUN]
        self._dtype = _DTYPE.value()
        super().__enter__()
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        super().__exit__(kind, value, traceback)
        now = [each.value() for each in _SETTINGS]
        changed = [
            (each, before, after)
            for each, before, after in zip(_SETTINGS, self._before, now, strict=True)
            if before != after
        ]
        for each, before, _ in changed:
            each.set(before)
        if changed and kind is None:
            setting, before, after = changed[0]
            raise UnsupportedError(
                "IRC338",
                f"the forward leaves torch with another setting: {setting.words} is {after} afterwards, and "
                f"was {before}; a planned step would not set it",
                help="take that out of the forward, and set it once, before irc.optimize",
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if [each.value() for each in _AT_RUN] != self._at_run:
            settings = zip(_AT_RUN, self._at_run, strict=True)
            raise _refusal(next(each.words for each, before in settings if each.value() != before))
        if torch.get_default_dtype() is not self._dtype and _follows_default(args, kwargs, result):
            raise _refusal(_DTYPE.words)
        return result


def _follows_default(args: Any, kwargs: Any, result: Any) -> bool:
    """Whether a result has torch's default dtype because the tensors that it is made of are whole numbers."""
    operands = tensors_of((args, kwargs))
    results = tensors_of(result)
    return bool(operands) and any(map(_is_real, results)) and not any(map(_is_real, operands))


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _refusal(words: str) -> UnsupportedError:
    line = user_line(sys._getframe(2))
    return UnsupportedError(
        "IRC338",
        f"the forward computes under another setting of torch than it is called with ({words}), which a "
        "planned step does not change",
        at=None if line is None else Location(source=line),
        help="name the dtype of what is made: torch.arange(8, dtype=torch.float64)"
        if words == _DTYPE.words
        else "take that out of the forward, and set it once, before irc.optimize",
    )
