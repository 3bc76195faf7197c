"""Recurrent layers step by step, for those without an equal layer in torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Call

__all__ = ["Activations", "activations_of", "gru_cell", "lstm_cell", "rnn_cell", "scan"]

_Function: TypeAlias = "Callable[[Tensor], Tensor]"
_Cell: TypeAlias = "Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]]"

_PLAIN: dict[str, _Function] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "tanh": torch.tanh,
}
_WITH_ALPHA: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "affine": lambda x, a, b: a * x + b,
    "elu": lambda x, a, b: F.elu(x, a),
    "hardsigmoid": lambda x, a, b: (a * x + b).clamp(0.0, 1.0),
    "leakyrelu": lambda x, a, b: F.leaky_relu(x, a),
    "scaledtanh": lambda x, a, b: a * torch.tanh(b * x),
    "thresholdedrelu": lambda x, a, b: torch.where(x >= a, x, torch.zeros_like(x)),
}
_WITH_BETA = ("affine", "hardsigmoid", "scaledtanh")
# Without those on whose defaults runtimes disagree.
_ALPHA = {"elu": 1.0, "hardsigmoid": 0.2, "leakyrelu": 0.01}
_BETA = {"hardsigmoid": 0.5}


@dataclass(frozen=True, slots=True)
class Activations:
    """The activations of one direction.

    Args:
        names: Their names, in lower case.
        functions: The functions; their operands are cut off first if the node says so.
    """

    names: tuple[str, ...]
    functions: tuple[_Function, ...]


def activations_of(c: Call, defaults: Sequence[str], directions: int) -> list[Activations]:
    """The activations of each direction; each takes its `alpha` and `beta` from the node's lists in turn.

    `clip` bounds the operands of the gates' activations. The third one of an LSTM reads the cell and does not
    belong to a gate: the standard's text could mean it too, but onnxruntime does not bound it.
    """
    names = [name.lower() for name in c.strs_("activations") or list(defaults) * directions]
    if len(names) != len(defaults) * directions:
        c.refuse(f"with activations {', '.join(names)} for {directions} direction(s)")
    unknown = [name for name in names if name not in _PLAIN and name not in _WITH_ALPHA]
    if unknown:
        c.refuse(f"with activations {', '.join(unknown)}")
    alphas = _factors(c, "activation_alpha", names, _WITH_ALPHA, _ALPHA)
    betas = _factors(c, "activation_beta", names, _WITH_BETA, _BETA)
    clip = c.float_("clip", 0.0) if c.given("clip") else None
    size = len(defaults)
    functions = [
        _function(name, alpha, beta, clip if i % size < 2 else None)
        for i, (name, alpha, beta) in enumerate(zip(names, alphas, betas, strict=True))
    ]
    return [
        Activations(tuple(names[i : i + size]), tuple(functions[i : i + size]))
        for i in range(0, len(names), size)
    ]


def _factors(
    c: Call,
    attribute: str,
    names: Sequence[str],
    users: Collection[str],
    own: dict[str, float],
) -> list[float]:
    given = c.attribute(attribute)
    count = sum(name in users for name in names)
    if count and isinstance(given, tuple) and given:
        if len(given) != count:
            c.refuse(f"with {len(given)} values of {attribute} for {count} activations that take one")
        values = iter(float(v) for v in given)
        return [next(values) if name in users else 0.0 for name in names]
    lacking = [name for name in names if name in users and name not in own]
    if lacking:
        c.refuse(f"with activations {', '.join(lacking)} without {attribute}")
    return [own.get(name, 0.0) for name in names]


def _function(name: str, alpha: float, beta: float, clip: float | None) -> _Function:
    def run(x: Tensor) -> Tensor:
        x = x if clip is None else x.clamp(-clip, clip)
        return _PLAIN[name](x) if name in _PLAIN else _WITH_ALPHA[name](x, alpha, beta)

    return run


def scan(
    projected: Tensor, states: Sequence[Tensor], cell: _Cell, valid: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a cell over time.

    Args:
        projected: The operand that it reads in each step; time first.
        states: Its states before the first step; the first of them is its output.
        cell: From what it reads and its states to its next states.
        valid: True for samples that still run, in each step; the states of others stay, their output is zero.
            Without it all run.
    """
    outputs: list[Tensor] = []
    now = tuple(states)
    for t, read in enumerate(projected.unbind(0)):
        then = cell(read, now)
        if valid is None:
            outputs.append(then[0])
            now = then
        else:
            runs = valid[t].unsqueeze(-1)
            outputs.append(then[0].masked_fill(~runs, 0.0))
            now = tuple(torch.where(runs, new, old) for new, old in zip(then, now, strict=True))
    return torch.stack(outputs), now


def lstm_cell(r: Tensor, peepholes: Tensor | None, functions: Sequence[_Function], coupled: bool) -> _Cell:
    """An LSTM; gates are in the order input, output, forget, cell."""
    f, g, h = functions
    p = None if peepholes is None else peepholes.chunk(3)

    def run(read: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        hidden, cell = states
        i, o, forget, new = (read + hidden @ r.t()).chunk(4, -1)
        i = f(i if p is None else i + p[0] * cell)
        forget = 1 - i if coupled else f(forget if p is None else forget + p[2] * cell)
        cell = forget * cell + i * g(new)
        o = f(o if p is None else o + p[1] * cell)
        return o * h(cell), cell

    return run


def gru_cell(r: Tensor, bias: Tensor | None, functions: Sequence[_Function], reset_last: bool) -> _Cell:
    """A GRU; gates are in the order update, reset, hidden.

    Args:
        r: Weights of the state.
        bias: The number that is added to the state's product with them for the hidden gate.
        functions: Activations.
        reset_last: Whether the state is reset after its product with the weights.
    """
    f, g = functions
    size = r.shape[-1]

    def run(read: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (hidden,) = states
        update, reset = f(read[:, : 2 * size] + hidden @ r[: 2 * size].t()).chunk(2, -1)
        if reset_last:
            new = reset * F.linear(hidden, r[2 * size :], bias)
        else:
            new = F.linear(reset * hidden, r[2 * size :], bias)
        new = g(read[:, 2 * size :] + new)
        return ((1 - update) * new + update * hidden,)

    return run


def rnn_cell(r: Tensor, functions: Sequence[_Function]) -> _Cell:
    """The plain cell."""

    def run(read: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (functions[0](read + states[0] @ r.t()),)

    return run
