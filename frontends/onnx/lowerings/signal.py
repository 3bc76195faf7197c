"""Fourier transforms, windows, and the matrix to the mel scale."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .casting import element_type
from .table import Call, Result, lowering


def _complex(x: Tensor) -> Tensor:
    """Real or complex numbers of a last axis of one or two parts; torch transforms no floats of 16 bits."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return wide[..., 0] if x.shape[-1] == 1 else torch.complex(wide[..., 0], wide[..., 1])


def _parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_real(x).to(dtype)


def _transformed(x: Tensor, n: int, axis: int, onesided: bool) -> Tensor:
    """The transform, or the first half of it, which for real numbers says all."""
    if onesided and not x.is_complex():
        return torch.fft.rfft(x, n, axis)
    y = torch.fft.fft(x, n, axis)
    return y.narrow(axis, 0, n // 2 + 1) if onesided else y


@lowering("DFT", since=17)
def dft(c: Call) -> Result:
    """The discrete Fourier transform of an axis, cut or padded with zeros to a length, or its inverse.

    The inverse of half a transform is real.
    """
    x, inverse, onesided = c[0], c.flag("inverse"), c.flag("onesided")
    axis = c.int_("axis", 1 if c.node.version < 20 else -2)
    axis = (c.integer(2, "axis") if c.has(2) else axis) % x.ndim
    if axis == x.ndim - 1:
        raise IndexError(f"axis {axis} of shape {list(x.shape)} holds the parts of complex numbers")
    n = x.shape[axis]
    if c.has(1):
        n = c.integer(1, "length")
    elif inverse and onesided:
        n = 2 * (n - 1)
    signal = _complex(x)
    if not inverse:
        return _parts(_transformed(signal, n, axis, onesided), x.dtype)
    if onesided:
        return torch.fft.irfft(signal, n, axis).unsqueeze(-1).to(x.dtype)
    return _parts(torch.fft.ifft(signal, n, axis), x.dtype)


@lowering("STFT", since=17)
def stft(c: Call) -> Result:
    """The transform of each frame of a signal, weighted by a window."""
    x = c[0] if c[0].ndim == 3 else c[0].unsqueeze(-1)
    step, window = c.integer(1, "step"), c.optional(2)
    n = x.shape[1] if window is None else window.shape[0]
    n = c.integer(3, "length") if c.has(3) else n
    frames = _complex(x).unfold(1, n, step)
    if window is not None:
        frames = frames * window.to(frames.real.dtype)
    return _parts(_transformed(frames, n, 2, c.flag("onesided", default=True)), x.dtype)


_Waves = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
_WINDOWS: dict[str, _Waves] = {
    "BlackmanWindow": lambda turns: 0.42 - 0.5 * np.cos(turns) + 0.08 * np.cos(2 * turns),
    "HammingWindow": lambda turns: 25 / 46 - 21 / 46 * np.cos(turns),
    "HannWindow": lambda turns: 0.5 - 0.5 * np.cos(turns),
}


@lowering(*_WINDOWS, since=17)
def window(c: Call) -> Result:
    """A sum of cosines over one period, or with `periodic=0` over one that the last element closes."""
    size, dtype = c.integer(0, "size"), element_type(c, c.int_("output_datatype", 1))
    period = size if c.flag("periodic", default=True) else size - 1
    if period < 1:
        c.refuse(f"of {size} elements" + ("" if size < 1 else " that are not periodic"))
    waves = _WINDOWS[c.node.op]
    turns = 2 * np.pi * c.positions(size) / period
    return c.literal(lambda: torch.from_numpy(waves(turns)).to(dtype))


@lowering("MelWeightMatrix", since=17)
def mel_weight_matrix(c: Call) -> Result:
    """Triangles over the bins of a spectrum, evenly spaced on the mel scale."""
    mels, n, rate = (c.integer(i, name) for i, name in enumerate(("number of bins", "length", "sample rate")))
    low, high = (float(c.number(i, "edge")) for i in (3, 4))
    dtype = element_type(c, c.int_("output_datatype", 1))
    c.check_listed(n // 2 + 1, mels)
    return c.literal(lambda: torch.from_numpy(_triangles(mels, n, rate, low, high)).to(dtype))


def _triangles(mels: int, n: int, rate: int, low: float, high: float) -> npt.NDArray[np.float64]:
    ends = 2595 * np.log10(1 + np.array([low, high]) / 700)
    marks = ends[0] + np.arange(mels + 2) * (ends[1] - ends[0]) / (mels + 2)
    hertz = 700 * (10 ** (marks / 2595) - 1)
    points = ((n + 1) * hertz // rate).astype(np.int64)
    first, middle, last = points[:-2], points[1:-1], points[2:]
    bins = np.arange(n // 2 + 1)[:, None]
    rise = (bins - first) / np.maximum(middle - first, 1)
    fall = (last - bins) / np.maximum(last - middle, 1)
    rising = (bins >= first) & (bins < middle)
    falling = (bins >= middle) & (bins < last)
    return np.where(rising, rise, np.where(falling, fall, 0.0)) + ((bins == middle) & (last <= middle))
