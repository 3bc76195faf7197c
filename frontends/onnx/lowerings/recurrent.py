"""Recurrent layers over time: LSTM, GRU and RNN.

ONNX stacks the gates of one direction in another order than torch, and keeps both directions in one tensor.
The weights stay as they are named in the file; they are cut and reordered on the way into torch's layer, so
that gradients arrive at them in their own layout. What torch's layers do not know runs step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .recurrent_cells import Activations, activations_of, gru_cell, lstm_cell, rnn_cell, scan
from .table import Call, Result, lowering

# torch's gate k is ONNX's gate _ORDER[k].
_LSTM_ORDER = (0, 2, 3, 1)  # ONNX i o f c, torch i f g o
_GRU_ORDER = (1, 0, 2)  # ONNX z r h, torch r z n

_States: TypeAlias = "tuple[Tensor, ...]"
_Direction: TypeAlias = "Callable[[int], tuple[Tensor, _States]]"


@dataclass(frozen=True, slots=True)
class _Layer:
    """The operands of a recurrent node, with time first.

    Args:
        x: Input.
        w: Weights of the input, for each direction.
        r: Weights of the state, for each direction.
        bias: Biases of both, for each direction.
        states: Initial states, for each direction.
        reverse: For each direction, whether it runs backwards.
        batch_first: Whether the node keeps the batch before time.
        activations: For each direction.
        lengths: The length of each sample; `None` if all are as long as the input.
        steps: The steps of time, as a column; `None` like the lengths.
        valid: True for the samples that still run, in each step; `None` if all do.
    """

    x: Tensor
    w: Tensor
    r: Tensor
    bias: Tensor | None
    states: _States
    reverse: tuple[bool, ...]
    batch_first: bool
    activations: list[Activations]
    lengths: Tensor | None
    steps: Tensor | None
    valid: Tensor | None

    def turned(self, x: Tensor, d: int) -> Tensor:
        """A sequence from its end to its start, if the direction runs backwards."""
        if not self.reverse[d]:
            return x
        if self.lengths is None or self.steps is None or self.valid is None:
            return x.flip(0)
        places = torch.where(self.valid, self.lengths - 1 - self.steps, self.steps)
        return x.gather(0, places.unsqueeze(-1).expand(x.shape))

    def projected(self, d: int, bias: Tensor | None) -> Tensor:
        """The input's part of all gates of a direction, in its order."""
        return F.linear(self.turned(self.x, d), self.w[d], bias)

    def both_biases(self, d: int) -> Tensor | None:
        """The sum of a direction's biases."""
        if self.bias is None:
            return None
        first, second = self.bias[d].chunk(2, 0)
        return first + second

    def result(self, ys: Sequence[Tensor], states: Sequence[_States]) -> Result:
        """All outputs in the node's layout, from those of each direction."""
        y = torch.stack([self.turned(y, d) for d, y in enumerate(ys)], 1)
        ends = tuple(torch.stack(s) for s in zip(*states, strict=True))
        if self.valid is not None:  # a sample without any step ends in zeros, as in onnxruntime
            none = ~self.valid[0].unsqueeze(-1)
            ends = tuple(s.masked_fill(none, 0.0) for s in ends)
        return self.laid_out(y, ends)

    def laid_out(self, y: Tensor, states: _States) -> Result:
        """Time, direction, batch, hidden and direction, batch, hidden in the node's layout."""
        if not self.batch_first:
            return y, *states
        return y.permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in states)


def _layer(c: Call, activations: Sequence[str], states: int, gates: int) -> _Layer:
    direction = c.str_("direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional"):
        c.refuse(f"with direction={direction}")
    reverse = (False, True) if direction == "bidirectional" else (direction == "reverse",)
    batch_first = c.flag("layout")
    c.int_("output_sequence", 0)  # of the first version; what is read says as much
    x, w, r = c[0], c[1], c[2]
    _check_shapes(c, len(reverse), gates, range(5, 5 + states), batch_first=batch_first)
    x = x.transpose(0, 1) if batch_first else x
    begins: list[Tensor] = []
    for index in range(5, 5 + states):
        state = c.optional(index)
        if state is None:
            state = x.new_zeros(len(reverse), x.shape[1], r.shape[-1])
        elif batch_first:
            state = state.transpose(0, 1)
        begins.append(state)
    lengths, steps, valid = c.optional(4), None, None
    static = c.static(4)
    if static is not None and (static.array == x.shape[0]).all():
        lengths = None
    if lengths is not None:
        steps = c.literal(lambda: torch.arange(x.shape[0]).unsqueeze(1))
        valid = steps < lengths
    functions = activations_of(c, activations, len(reverse))
    bias, first = c.optional(3), tuple(begins)
    return _Layer(x, w, r, bias, first, reverse, batch_first, functions, lengths, steps, valid)


def _check_shapes(c: Call, directions: int, gates: int, states: range, *, batch_first: bool) -> None:
    """Refuses operands that do not fit each other: torch's layers read beyond their ends."""
    if c[0].dim() != 3 or c[2].dim() != 3:
        c.refuse(f"of shapes {list(c[0].shape)} and {list(c[2].shape)}; X and R have three dimensions")
    batch, size, hidden = c[0].shape[0 if batch_first else 1], c[0].shape[2], c[2].shape[2]
    state = (batch, directions, hidden) if batch_first else (directions, batch, hidden)
    wanted = {
        1: ("W", (directions, gates * hidden, size)),
        2: ("R", (directions, gates * hidden, hidden)),
        3: ("B", (directions, 2 * gates * hidden)),
        4: ("sequence_lens", (batch,)),
        **{index: (name, state) for index, name in zip(states, ("initial_h", "initial_c"), strict=False)},
        7: ("P", (directions, 3 * hidden)),
    }
    for index, (name, shape) in wanted.items():
        operand = c.optional(index) if index < 7 or len(states) == 2 else None
        if operand is not None and tuple(operand.shape) != shape:
            c.refuse(f"of X {list(c[0].shape)} and {name} {list(operand.shape)}; {name} takes {list(shape)}")
    named = c.int_("hidden_size", hidden)
    c.require(named == hidden, f"has hidden_size={named}, and R of shape {list(c[2].shape)}")
    if not hidden:
        c.refuse("with a state of no elements")


def _reordered(matrix: Tensor, order: Sequence[int]) -> Tensor:
    if len(order) == 1:
        return matrix
    gates = matrix.chunk(len(order), 0)
    return torch.cat([gates[k] for k in order], 0)


def _weights(layer: _Layer, d: int, order: Sequence[int]) -> list[Tensor]:
    """The weights of one direction as torch's layers take them."""
    parts = [_reordered(layer.w[d], order), _reordered(layer.r[d], order)]
    if layer.bias is not None:
        parts += [_reordered(half, order) for half in layer.bias[d].chunk(2, 0)]
    return parts


def _fused(layer: _Layer, torchs: Callable[..., Any], order: Sequence[int]) -> Result:
    """By a layer of torch, which knows no lengths: its steps beyond them are cut off."""
    weights = [_weights(layer, d, order) for d in range(len(layer.reverse))]
    if layer.valid is not None and layer.lengths is not None:
        ys: list[Tensor] = []
        ends: list[_States] = []
        for d, parts in enumerate(weights):
            y = _run(torchs, layer, layer.turned(layer.x, d), parts, slice(d, d + 1))[0]
            last = (layer.lengths - 1).clamp(min=0).to(torch.int64).reshape(1, -1, 1)
            end = y.gather(0, last.expand(1, *y.shape[1:])).squeeze(0)
            ends.append((end,))
            ys.append(y.masked_fill(~layer.valid.unsqueeze(-1), 0.0))
        return layer.result(ys, ends)
    alone = len(weights) == 1
    x = layer.turned(layer.x, 0) if alone else layer.x
    y, *states = _run(torchs, layer, x, [p for parts in weights for p in parts], slice(None))
    y = layer.turned(y, 0) if alone else y
    return layer.laid_out(y.unflatten(-1, (len(weights), -1)).transpose(1, 2), tuple(states))


def _run(
    torchs: Callable[..., Any], layer: _Layer, x: Tensor, weights: list[Tensor], which: slice
) -> tuple[Tensor, ...]:
    states = tuple(s[which] for s in layer.states)
    biased, both = layer.bias is not None, states[0].shape[0] == 2
    begin = states[0] if len(states) == 1 else states
    return torchs(x, begin, weights, biased, 1, 0.0, False, both, False)


def _stepwise(layer: _Layer, direction: _Direction) -> Result:
    ys: list[Tensor] = []
    ends: list[_States] = []
    for d in range(len(layer.reverse)):
        y, states = direction(d)
        ys.append(y)
        ends.append(states)
    return layer.result(ys, ends)


def _plain(c: Call, layer: _Layer, *names: str) -> bool:
    """Whether all directions have these activations, as they are."""
    return not c.given("clip") and all(a.names == names for a in layer.activations)


@lowering("LSTM")
def lstm(c: Call) -> Result:
    """Runs torch's LSTM if it can; peepholes, coupled gates and clipped activations run step by step."""
    layer = _layer(c, ("Sigmoid", "Tanh", "Tanh"), 2, len(_LSTM_ORDER))
    coupled, static = c.flag("input_forget"), c.static(7)
    peeps = c.has(7) and (static is None or bool(static.array.any()))
    peepholes = c[7] if peeps else None
    plain = _plain(c, layer, "sigmoid", "tanh", "tanh") and not coupled and peepholes is None
    if plain and (layer.valid is None or not c.wants(2)):
        return _fused(layer, torch._VF.lstm, _LSTM_ORDER)  # pyright: ignore

    def direction(d: int) -> tuple[Tensor, _States]:
        p = None if peepholes is None else peepholes[d]
        cell = lstm_cell(layer.r[d], p, layer.activations[d].functions, coupled)
        begin = tuple(s[d] for s in layer.states)
        return scan(layer.projected(d, layer.both_biases(d)), begin, cell, layer.valid)

    return _stepwise(layer, direction)


@lowering("RNN")
def rnn(c: Call) -> Result:
    """The plain recurrent layer, with any activation."""
    layer = _layer(c, ("Tanh",), 1, 1)
    if _plain(c, layer, "tanh"):
        return _fused(layer, torch._VF.rnn_tanh, (0,))  # pyright: ignore
    if _plain(c, layer, "relu"):
        return _fused(layer, torch._VF.rnn_relu, (0,))  # pyright: ignore

    def direction(d: int) -> tuple[Tensor, _States]:
        cell = rnn_cell(layer.r[d], layer.activations[d].functions)
        return scan(layer.projected(d, layer.both_biases(d)), (layer.states[0][d],), cell, layer.valid)

    return _stepwise(layer, direction)


@lowering("GRU")
def gru(c: Call) -> Result:
    """Runs torch's GRU if the reset gate follows the matrix product; otherwise step by step."""
    layer = _layer(c, ("Sigmoid", "Tanh"), 1, len(_GRU_ORDER))
    reset_last = c.flag("linear_before_reset")
    if reset_last and _plain(c, layer, "sigmoid", "tanh"):
        return _fused(layer, torch._VF.gru, _GRU_ORDER)  # pyright: ignore

    def direction(d: int) -> tuple[Tensor, _States]:
        both, hidden = layer.both_biases(d), None
        if reset_last and layer.bias is not None and both is not None:
            # The hidden gate's second bias is reset too.
            size = layer.r.shape[-1]
            first, second = layer.bias[d].chunk(2, 0)
            both, hidden = torch.cat([both[: 2 * size], first[2 * size :]]), second[2 * size :]
        cell = gru_cell(layer.r[d], hidden, layer.activations[d].functions, reset_last)
        return scan(layer.projected(d, both), (layer.states[0][d],), cell, layer.valid)

    return _stepwise(layer, direction)
