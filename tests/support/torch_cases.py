"""Torch models of every kind that a step can have, schedules for them, and what a step leaves behind."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from irc.backends.torch import bind_program, compile_program
from irc.frontends.torch import Captured, capture
from irc.ir import Graph, Node, Region, Schedule, Storage, verify_graph, verify_schedule, with_frees

__all__ = [
    "CASES",
    "Case",
    "Model",
    "assert_same",
    "captured_case",
    "fitted",
    "fitted_from",
    "image",
    "keep_all",
    "net",
    "outcome",
    "recompute_some",
    "slow_among",
    "views",
]


class Model(nn.Module):
    """A module whose forward is a function of itself and the arguments."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


# ---------------------------------------------------------------------- schedules


def keep_all(graph: Graph) -> Schedule:
    forward, backward = (
        [n for n in graph.operations if n.region is r] for r in (Region.FORWARD, Region.BACKWARD)
    )
    return with_frees(graph, forward, backward)


def recompute_some(graph: Graph, seed: int) -> Schedule:
    """Drops a random part of what forward makes, and runs its nodes again where backward needs them.

    Now and then what was computed again is dropped again, so that some nodes run three times and more.
    """
    draw = random.Random(seed)
    rate = draw.choice((0.2, 0.5, 0.8, 1.0))
    forward = [n for n in graph.operations if n.region is Region.FORWARD]
    droppable = {
        n for n in forward if n.is_recomputable and not set(graph.allocates(n)) & graph.output_storages
    }
    dropped = {s for n in forward if n in droppable and draw.random() < rate for s in graph.allocates(n)}
    missing = set(dropped)
    order: list[Node] = []

    def provide(storages: Sequence[Storage]) -> None:
        for storage in storages:
            if storage in missing:
                node = graph.producers[storage]
                provide(graph.reads(node))
                order.append(node)
                missing.difference_update(graph.allocates(node))

    for node in graph.operations:
        if node.region is Region.BACKWARD:
            provide(graph.reads(node))
            order.append(node)
            if draw.random() < 0.2:
                missing |= dropped
    return with_frees(graph, forward, order)


def fitted(
    module: nn.Module, *args: Any, schedule: Callable[[Graph], Schedule] = keep_all, **kwargs: Any
) -> nn.Module:
    return fitted_from(capture(module, args, kwargs), module, schedule)


def fitted_from(captured: Captured, module: nn.Module, schedule: Callable[[Graph], Schedule]) -> nn.Module:
    verify_graph(captured.graph)
    chosen = schedule(captured.graph)
    verify_schedule(chosen, {})
    return bind_program(
        module, compile_program(chosen, captured.constants, captured.generators), captured.signature
    )


# ---------------------------------------------------------------------- same numbers


@dataclass
class Case:
    """A model and a call of it, made anew on each use."""

    module: Callable[[], nn.Module]
    arguments: Callable[[], tuple[Any, ...]] = lambda: (torch.randn(3, 4),)
    keywords: Callable[[], dict[str, Any]] = field(default=lambda: {})


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(36, 5),
    )


def image() -> tuple[Tensor]:
    return (torch.randn(4, 3, 14, 14),)


def _tied() -> nn.Module:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 4)
            self.head = nn.Linear(4, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embedding(tokens)))

    return Tied()


def _frozen() -> nn.Module:
    module = net()
    module[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    return module


def _frozen_statistics() -> nn.Module:
    module: Any = net()
    module[1].eval()
    return module


def _writes_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    h = h.relu_() * 2.0
    h += x
    h[1, :2] = 0.5
    h[:, 3].mul_(2.0)
    return functional.dropout(h.add_(1.0), 0.5, inplace=True)


def _nested(m: Any, x: Tensor) -> Any:
    h = m.lin(x)
    return {
        "h": h,
        "nothing": None,
        "count": 3,
        "name": "net",
        "more": [(h.sum(), 2.5), True],
        "i": h.argmax(1),
    }


def views(m: Any, x: Tensor) -> Any:
    h = m.lin(x)
    return h, h.view(2, 6), h[1], h.t(), x, x[1:], x.view(-1), m.lin.weight, m.lin.weight.t()


def _view_chain(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x).view(3, 2, 2).transpose(0, 1).reshape(2, 6)
    parts = h.chunk(3, dim=1)
    return torch.cat([parts[2], parts[0].flip(0)], 1).view(-1)[1:].unflatten(0, (7,)).expand(2, 7) * 2.0


def _reused(m: Any, x: Tensor) -> Tensor:
    h = torch.sigmoid(m.lin(x))
    for _ in range(3):
        h = h * torch.tanh(m.lin(h)) + h
    return h.exp().sum() + (h * h).mean()


def _pieces(m: Any, pair: tuple[Tensor, int], *, scale: float, more: dict[str, Tensor]) -> Tensor:
    x, power = pair
    return m.lin(x * scale) ** power + more["bias"] * more["gain"]


def _counts(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    m.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return m.lin(x) * m.average.clone()


_CONSTANT = torch.randn(4, generator=torch.Generator().manual_seed(3))


def _linear(function: Callable[..., Any], **parts: Any) -> Callable[[], nn.Module]:
    return lambda: Model(function, lin=nn.Linear(4, 4), **parts)


def _with_buffers() -> nn.Module:
    model = Model(_counts, lin=nn.Linear(4, 4))
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    model.register_buffer("average", torch.zeros(4), persistent=False)
    return model


def _transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)


CASES: dict[str, Case] = {
    "batch-norm and dropout": Case(net, image),
    "a frozen layer": Case(_frozen, image),
    "frozen statistics": Case(_frozen_statistics, image),
    "channels last": Case(
        lambda: net().to(memory_format=torch.channels_last),  # pyright: ignore[reportCallIssue]
        lambda: (image()[0].to(memory_format=torch.channels_last),),
    ),
    "tied weights": Case(_tied, lambda: (torch.randint(11, (3, 5)),)),
    "in-place writes": Case(_linear(_writes_in_place)),
    "buffers of the model's own": Case(_with_buffers),
    "nested outputs": Case(_linear(_nested)),
    "outputs that are views": Case(_linear(views)),
    "outputs that are views of an input with a gradient": Case(
        _linear(views), lambda: (torch.randn(3, 4, requires_grad=True),)
    ),
    "the same output twice": Case(_linear(lambda m, x: (m.lin(x),) * 2)),
    "chains of views": Case(_linear(_view_chain)),
    "an output that is a view": Case(_linear(lambda m, x: m.lin(x).view(2, 6))),
    "values with many readers": Case(_linear(_reused)),
    "nested inputs and keywords": Case(
        _linear(_pieces),
        lambda: ((torch.randn(3, 4), 2),),
        lambda: {"scale": 0.5, "more": {"gain": torch.rand(4, requires_grad=True), "bias": torch.ones(3, 1)}},
    ),
    "an input with a gradient that is no leaf": Case(
        _linear(lambda m, x: m.lin(x).cos()), lambda: (torch.randn(3, 4, requires_grad=True) * 2,)
    ),
    "a constant from outside": Case(
        _linear(lambda m, x: m.lin(x) * _CONSTANT + torch.tensor([1.0, 2, 3, 4]))
    ),
    "several random draws": Case(
        _linear(lambda m, x: functional.dropout(m.lin(x + torch.randn_like(x)), 0.2) * torch.rand(4))
    ),
    "a parameter that is not used": Case(_linear(lambda m, x: m.lin(x), spare=nn.Linear(2, 2))),
    "an output without a gradient": Case(_linear(lambda m, x: (m.lin(x), m.lin(x).detach() * 2, x + 1))),
    "an input of strange strides": Case(_linear(lambda m, x: m.lin(x)), lambda: (torch.randn(4, 3).t(),)),
    "half and integer types": Case(
        _linear(lambda m, x, i: m.lin(x).to(torch.bfloat16)[i].sum()),
        lambda: (torch.randn(3, 4), torch.tensor([0, 2, 2])),
    ),
    "no elements": Case(_linear(lambda m, x: m.lin(x)), lambda: (torch.randn(0, 4),)),
    "transformer layer": Case(_transformer, lambda: (torch.randn(2, 5, 16),)),
    "LSTM": Case(
        lambda: nn.LSTM(4, 6, num_layers=2, dropout=0.4, bidirectional=True, batch_first=True),
        lambda: (torch.randn(2, 2, 4),),
    ),
    "GRU": Case(lambda: nn.GRU(4, 6, num_layers=2, dropout=0.4), lambda: (torch.randn(3, 2, 4),)),
    "weight norm": Case(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
    "spectral norm": Case(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
}


def slow_among(names: Iterable[str], *slow: str) -> list[Any]:
    """Parameters of a test: names, some of them marked slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


@functools.cache
def captured_case(name: str) -> Captured:
    """The captured step of a case. It holds no tensor of its module, so all modules of the case share it."""
    case = CASES[name]
    return capture(case.module(), case.arguments(), case.keywords())


def outcome(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """One step with a random gradient for each output: everything that it leaves behind."""
    torch.manual_seed(5)
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.retain_grad()
            leaf.grad = None
    result = module(*args, **kwargs)
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    trained = [output for output in outputs if output.requires_grad]
    values = [output.detach().clone() for output in outputs]
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(9)
    noise = [torch.empty_like(o).copy_(torch.randn(o.shape, generator=generator)) for o in trained]
    torch.autograd.backward(trained, noise, inputs=None, retain_graph=_is_no_leaf(args))
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    found: dict[str, Any] = {f"parameter {n}": p.grad for n, p in module.named_parameters()}
    found |= {f"buffer {n}": b.clone() for n, b in module.named_buffers()}
    found |= {f"input {i}": t.grad for i, t in enumerate(inputs) if t.requires_grad}
    found |= {f"value of input {i}": t.detach().clone() for i, t in enumerate(inputs)}
    found |= {f"output {i}": v for i, v in enumerate(values)}
    found |= {f"output {i} requires grad": o.requires_grad for i, o in enumerate(outputs)}
    found |= {f"output {i} strides": o.stride() for i, o in enumerate(outputs)}
    found |= {"others": [leaf for leaf in pytree.tree_leaves(result) if not isinstance(leaf, Tensor)]}
    found |= {"nesting": pytree.tree_structure(result), "generator": state}
    found |= {"generator after backward": torch.get_rng_state()}
    return found


def _is_no_leaf(args: Any) -> bool:
    return any(isinstance(leaf, Tensor) and not leaf.is_leaf for leaf in pytree.tree_leaves(args))


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for what, wanted in theirs.items():
        if isinstance(wanted, Tensor):
            assert isinstance(ours[what], Tensor), what
            assert ours[what].dtype == wanted.dtype and torch.equal(ours[what], wanted), what
        else:
            assert ours[what] == wanted, what
