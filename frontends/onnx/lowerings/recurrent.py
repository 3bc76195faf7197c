"""Recurrent layers over time: LSTM, GRU and RNN.

ONNX stacks the gates of one direction in another order than torch, and keeps both directions in one tensor.
The weights stay as they are named in the file; they are cut and reordered on the way into torch's layer, so
that gradients arrive at them in their own layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .table import Call, Result, lowering

# torch's gate k is ONNX's gate _ORDER[k].
_LSTM_ORDER = (0, 2, 3, 1)  # ONNX i o f c, torch i f g o
_GRU_ORDER = (1, 0, 2)  # ONNX z r h, torch r z n


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """The operands of a recurrent node, checked, with time first."""

    x: Tensor
    weights: list[list[Tensor]]  # of each direction: input, hidden and, if any, their two biases
    hidden: Tensor
    reverse: bool
    both: bool
    batch_first: bool

    def forwards(self) -> Tensor:
        """The input in the order in which a single direction reads it."""
        return self.x.flip(0) if self.reverse else self.x

    def outputs(self, y: Tensor) -> Tensor:
        """The output in ONNX's layout: time, direction, batch, hidden."""
        y = y.flip(0) if self.reverse else y
        directions = 2 if self.both else 1
        y = y.reshape(*y.shape[:2], directions, -1).permute(0, 2, 1, 3)
        return y.permute(2, 0, 1, 3) if self.batch_first else y

    def last(self, state: Tensor) -> Tensor:
        """A final state in ONNX's layout."""
        return state.transpose(0, 1) if self.batch_first else state


def _state(c: Call, index: int, directions: int, x: Tensor, size: int, batch_first: bool) -> Tensor:
    state = c.optional(index)
    if state is None:
        return x.new_zeros(directions, x.shape[1], size)
    return state.transpose(0, 1) if batch_first else state


def _reordered(matrix: Tensor, order: Sequence[int]) -> Tensor:
    if len(order) == 1:
        return matrix
    gates = matrix.chunk(len(order), 0)
    return torch.cat([gates[k] for k in order], 0)


def _recurrence(c: Call, order: Sequence[int], activations: Sequence[str]) -> _Recurrence:
    direction = c.str_("direction", "forward")
    directions = 2 if direction == "bidirectional" else 1
    batch_first = bool(c.int_("layout", 0))
    x, w, r = c[0], c[1], c[2]
    x = x.transpose(0, 1) if batch_first else x
    given = c.strs_("activations")
    if given is not None and [a.lower() for a in given] != [a.lower() for a in activations] * directions:
        c.refuse(f"with activations {', '.join(given)}")
    for name in ("clip", "activation_alpha", "activation_beta"):
        if c.given(name):
            c.refuse(f"with {name}")
    if c.has(4):
        lengths = c.integers(4, "list of sequence lengths")
        if any(n != x.shape[0] for n in lengths):
            c.refuse(f"with sequence lengths {lengths} that differ from {x.shape[0]}")
    bias = c.optional(3)
    weights: list[list[Tensor]] = []
    for d in range(directions):
        parts = [_reordered(w[d], order), _reordered(r[d], order)]
        if bias is not None:
            parts += [_reordered(half, order) for half in bias[d].chunk(2, 0)]
        weights.append(parts)
    hidden = _state(c, 5, directions, x, r.shape[-1], batch_first)
    return _Recurrence(x, weights, hidden, direction == "reverse", directions == 2, batch_first)


def _flat(run: _Recurrence) -> list[Tensor]:
    return [part for parts in run.weights for part in parts]


@lowering("LSTM")
def lstm(c: Call) -> Result:
    """An LSTM as torch has it; no peepholes, no coupled gates."""
    if c.has(7):
        static = c.static(7)
        if static is None or static.array.any():
            c.refuse("with peepholes")
    if c.int_("input_forget", 0):
        c.refuse("with input_forget=1")
    run = _recurrence(c, _LSTM_ORDER, ("Sigmoid", "Tanh", "Tanh"))
    cell = _state(c, 6, run.hidden.shape[0], run.x, run.hidden.shape[-1], run.batch_first)
    y, h, s = torch._VF.lstm(  # pyright: ignore
        run.forwards(),
        (run.hidden, cell),
        _flat(run),
        len(run.weights[0]) == 4,
        1,
        0.0,
        False,
        run.both,
        False,
    )
    return run.outputs(y), run.last(h), run.last(s)


@lowering("RNN")
def rnn(c: Call) -> Result:
    """The plain recurrent layer, with tanh or relu."""
    given = c.strs_("activations") or ["Tanh"]
    kind = given[0].lower()
    if kind not in ("tanh", "relu"):
        c.refuse(f"with activations {', '.join(given)}")
    run = _recurrence(c, (0,), (kind,))
    layer = torch._VF.rnn_tanh if kind == "tanh" else torch._VF.rnn_relu  # pyright: ignore
    y, h = layer(
        run.forwards(), run.hidden, _flat(run), len(run.weights[0]) == 4, 1, 0.0, False, run.both, False
    )
    return run.outputs(y), run.last(h)


@lowering("GRU")
def gru(c: Call) -> Result:
    """As torch where the reset gate follows the matrix product; a loop over time where it precedes it."""
    run = _recurrence(c, _GRU_ORDER, ("Sigmoid", "Tanh"))
    if c.int_("linear_before_reset", 0):
        y, h = torch._VF.gru(  # pyright: ignore
            run.forwards(), run.hidden, _flat(run), len(run.weights[0]) == 4, 1, 0.0, False, run.both, False
        )
        return run.outputs(y), run.last(h)
    ys: list[Tensor] = []
    hs: list[Tensor] = []
    for d, parts in enumerate(run.weights):
        backwards = run.reverse or d == 1
        y, h = _gru_reset_first(run.x.flip(0) if backwards else run.x, run.hidden[d], parts)
        ys.append(y.flip(0) if backwards else y)
        hs.append(h)
    y = torch.stack(ys, 1)
    return y.permute(2, 0, 1, 3) if run.batch_first else y, run.last(torch.stack(hs))


def _gru_reset_first(x: Tensor, h: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    w, r = parts[0], parts[1]
    bias = parts[2] + parts[3] if len(parts) == 4 else None
    size = h.shape[-1]
    projected = torch.nn.functional.linear(x, w, bias)
    steps: list[Tensor] = []
    for now in projected.unbind(0):
        reset, update = torch.sigmoid(now[:, : 2 * size] + h @ r[: 2 * size].t()).chunk(2, -1)
        new = torch.tanh(now[:, 2 * size :] + (reset * h) @ r[2 * size :].t())
        h = (1 - update) * new + update * h
        steps.append(h)
    return torch.stack(steps), h
