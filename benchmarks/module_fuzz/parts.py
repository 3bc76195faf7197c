"""What the blocks of `blocks.txt` are made of: functions, layers and autograd functions."""

# pyright: reportUnusedImport=false

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

__all__: list[str] = []

assert random and np and F and checkpoint and checkpoint_sequential  # the table uses them

LENGTH = 6
WIDTH = 8


def weight(*shape: int) -> nn.Parameter:
    """A parameter of such a size that products keep their scale."""
    return nn.Parameter(torch.randn(shape) / math.sqrt(WIDTH))


def swapped(x: Tensor) -> Tensor:
    """Channels before positions."""
    return x.transpose(1, 2)


def heads(x: Tensor) -> Tensor:
    """The channels of two heads."""
    return x.unflatten(2, (2, 4)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """The inverse of `heads`."""
    return x.transpose(1, 2).flatten(2)


def positive(x: Tensor) -> Tensor:
    """A positive definite matrix of each row."""
    return swapped(x).float() @ x.float() / LENGTH + 2 * torch.eye(WIDTH)


def scan(cell: nn.Module, x: Tensor, *, has_cell: bool = False) -> Tensor:
    """A recurrent cell over all positions."""
    state = torch.zeros_like(x[:, 0])
    memory = state
    results: list[Tensor] = []
    for step in x.unbind(1):
        if has_cell:
            state, memory = cell(step, (state, memory))
        else:
            state = cell(step, state)
        results.append(state)
    return torch.stack(results, 1)


def states(x: Tensor, gate: Tensor) -> list[Tensor]:
    """A gated recurrence, written out."""
    states = [x[:, 0]]
    for step in range(1, x.shape[1]):
        states.append(gate[:, step] * states[-1] + (1 - gate[:, step]) * x[:, step])
    return states


def filled(rows: int, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function in chunks of positions, whose results are written into one buffer."""
    buffer = torch.zeros_like(x) if rows > 1 else torch.empty_like(x)
    for start in range(0, LENGTH, rows):
        buffer[:, start : start + rows] = function(x[:, start : start + rows])
    return buffer


def weighed(x: Tensor, loss: Tensor) -> Tensor:
    """A tensor whose scale a loss decides."""
    return x * (1 + 0.1 * loss.to(x.dtype))


def routed(experts: Iterable[nn.Module], gate: nn.Module, x: Tensor) -> Tensor:
    """A mixture of experts that computes each row by one of them."""
    rows, gates = x.flatten(0, 1), gate(x).flatten(0, 1).softmax(-1)
    result, chosen = torch.zeros_like(rows), gates.argmax(-1)
    for index, expert in enumerate(experts):
        places = torch.where(chosen == index)[0]
        result.index_add_(0, places, expert(rows[places]) * gates[places, index, None])
    return result.view_as(x)


def in_double(x: Tensor) -> Tensor:
    """Something in another default type."""
    torch.set_default_dtype(torch.float64)
    try:
        return x + torch.ones(WIDTH).mean().to(x.dtype)
    finally:
        torch.set_default_dtype(torch.float32)


def repeated(layer: nn.Module, x: Tensor, times: int) -> Tensor:
    """A loop over one layer."""
    for _ in range(times):
        x = x + layer(x).tanh() / times
    return x


def hooked(y: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    """A tensor with a hook."""
    if y.requires_grad:
        y.register_hook(hook)
    return y


def cast(layer: Callable[[Tensor], Tensor], x: Tensor, enabled: bool, dtype: torch.dtype) -> Tensor:
    """A region with autocast on or off."""
    with torch.autocast("cpu", dtype, enabled=enabled):
        y = layer(x).relu()
        y = (y @ y.transpose(1, 2)).softmax(-1) @ y
    return y.to(x.dtype)


def without(context: Callable[[], Any], layer: nn.Module, x: Tensor) -> Tensor:
    """A part without gradients."""
    with context():
        y = layer(x)
    return x + y.detach() if y.requires_grad else x + y


def packed(layer: nn.Module, x: Tensor) -> Tensor:
    """A part whose saved tensors pass through hooks."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return layer(x)


def shared_layer() -> nn.Module:
    """Two modules with one layer."""
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer))


def tied_weights() -> nn.Module:
    """Two layers with one weight."""
    one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    other.weight = one.weight
    return nn.Sequential(one, nn.ReLU(), other)


class Recurrent(nn.Module):
    """A recurrent layer, without its states."""

    def __init__(self, layer: Any, batch_first: bool, bidirectional: bool = False, **options: Any) -> None:
        super().__init__()
        width = WIDTH // 2 if bidirectional else WIDTH
        self.layer = layer(WIDTH, width, batch_first=batch_first, bidirectional=bidirectional, **options)

    def forward(self, x: Tensor) -> Tensor:
        """The results of all positions."""
        return self.layer(x)[0]


class Buffers(nn.Module):
    """Writes buffers in one of some ways."""

    count: Tensor
    mean: Tensor
    memory: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("memory", torch.zeros(4, WIDTH), persistent=way != "queue")

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean((0, 1)).to(self.mean.dtype)
        match self.way:
            case "average":
                self.mean.mul_(0.9).add_(mean, alpha=0.1)
            case "no_grad":
                with torch.no_grad():
                    self.mean.lerp_(mean, 0.1)
            case "assigned":
                self.mean = 0.9 * self.mean + 0.1 * mean
            case "data":
                self.mean.data = 0.5 * self.mean.data + mean
            case "queue":
                self.memory = torch.cat([self.memory[1:], mean[None]])
            case "slot":
                self.memory[self.count % 4] = mean
                self.count += 1
            case "row":
                self.memory[0].copy_(mean)
            case "copied":
                self.mean.copy_(mean)
            case _:
                self.count.add_(1)
        return x - self.mean + self.memory.mean(0) + self.count * 0.01


class Counter(nn.Module):
    """Counts its calls in Python, and computes by it in one of some ways."""

    total = 0

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.calls, self.cache, self.last = way, 0, dict[str, Any](), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        match self.way:
            case "number":
                self.calls += 1
                return x * (1 + 0.1 * self.calls)
            case "branch":
                self.calls += 1
                return x.tanh() if self.calls % 2 else x.sin()
            case "list":
                self.last.append(x.shape[0])
                return x / len(self.last)
            case "cached":
                if "scale" not in self.cache:
                    self.cache["scale"] = torch.arange(WIDTH) / WIDTH
                return x * self.cache["scale"]
            case "kept":
                self.cache["last"] = x.detach().mean()
                return x
            case "kept_result":
                y = x * 2
                self.cache["last"] = y
                return y
            case _:
                return x * 2 if self.training else x


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        return -g[0]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, power: float) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.power = power
        return x * scale * power

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        x, scale = ctx.saved_tensors
        return g[0] * scale * ctx.power, (g[0] * x).sum() if ctx.needs_input_grad[1] else None, None


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(x: Any) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        return g[0] * (ctx.saved_tensors[0].abs() < 2)


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        places = x.argmax(-1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(y := x.tanh())
        return y, places

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *g: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        return g[0] * (1 - y * y)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        return g[0] * 2


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).relu()

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = (x @ weight).relu()
        return torch.autograd.grad(y, (x, weight), g)


class HookedLayer(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.l: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        match way:
            case "forward":
                self.l[0].register_forward_hook(lambda module, args, y: y * 2)
            case "pre":
                self.l[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
            case "kwargs":
                self.l.register_forward_hook(lambda module, args, kwargs, y: y + 0.5, with_kwargs=True)
            case "backward":
                self.l[1].register_full_backward_hook(lambda module, g, h: (g[0] * 0.5,))
            case "backward_pre":
                self.l[1].register_full_backward_pre_hook(lambda module, g: (g[0] * 2,))
            case "parameter":
                self.l[0].weight.register_hook(lambda g: g * 0.5)
            case _:
                self.l[0].weight.register_post_accumulate_grad_hook(lambda p: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x)
