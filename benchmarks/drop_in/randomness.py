"""Rows 2 and 3: what draws from a generator, and what depends on the order of equal or colliding values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from .cases import check_script, check_step, fitted, trains_own
from .comparison import Difference, check_same, state_of
from .models import Arguments, Calls
from .registry import check, every, having
from .steps import one_step, train, trains
from .trial import Side, Trial

_DROPPING = having("dropout")


# ---------------------------------------------------------------------- row 2


@check_step(2, every(), pair=fitted)
def three_steps(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """Losses, gradients, parameters and the generator's state are the original's after each step."""
    return one_step(side, optimizer), torch.get_rng_state()


@check(2, _DROPPING)
def two_runs_from_one_seed(trial: Trial) -> None:
    """Two runs of the fitted module from one seed are identical."""
    first, second = trial.pair(), trial.pair()
    left: list[dict[str, Any]] = []
    for pair in (first, second):
        torch.manual_seed(11)
        train("SGD")(pair.ours)
        left.append(dict(state_of(pair.ours.module)))
    check_same(left[1], left[0], "the second run")


@check_script(2, _DROPPING)
def a_forward_alone_draws_once(side: Side) -> Any:
    """A forward without backward takes as many random numbers as in eager."""
    with torch.no_grad():
        side()
    return side.loss().detach(), torch.rand(2), train("SGD", 2)(side)


@check_step(2, _DROPPING)
def the_script_draws_between_forward_and_backward(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """Numbers drawn between forward and backward and after it are those that eager would give."""
    optimizer.zero_grad()
    loss = side.loss()
    between = torch.rand(3)
    loss.backward()
    after = torch.rand(3)
    optimizer.step()
    return between, after


@check_step(2, _DROPPING)
def the_script_seeds_between_forward_and_backward(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """A seed set between forward and backward changes no mask of the forward, and stays set."""
    optimizer.zero_grad()
    loss = side.loss()
    torch.manual_seed(3)
    loss.backward()
    optimizer.step()
    return torch.rand(3)


@check(2, _DROPPING)
def within_a_forked_generator(trial: Trial) -> None:
    """Within torch.random.fork_rng() nothing of the outer generator moves."""
    trains(trial, trial.pair(), around=torch.random.fork_rng)


@check(2, _DROPPING, refusable=True)
def another_rate_of_dropout(trial: Trial) -> None:
    """A dropout rate that the script changes between steps is honoured, or refused."""
    dropouts = [child for child in trial.subject.make().modules() if isinstance(child, nn.Dropout)]

    def script(side: Side) -> Any:
        before = train("SGD", 1)(side)
        for child in side.module.modules():
            if isinstance(child, nn.Dropout):
                child.p = 0.6
            if isinstance(child, nn.GRU):
                child.dropout = 0.6
        return before, train("SGD", 2)(side)

    assert dropouts or trial.subject.name == "recurrent"
    trial.same(trial.pair(), script)


def _linear(
    function: Callable[[Any, Tensor], Tensor], more: dict[str, nn.Module] | None = None
) -> tuple[nn.Module, Arguments]:
    """A function of a linear layer's result, between activations that are worth recomputing."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.lin(x))
        h = function(m, h)
        return torch.sigmoid(m.out(torch.sin(h) * h.exp()))

    parts: dict[str, nn.Module] = {"lin": nn.Linear(4, 16), "out": nn.Linear(16, 4)}
    parts |= more or {}
    return Calls(forward, **parts), Arguments((torch.randn(12, 4),))


_DRAWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "rand_like": lambda m, h: h * torch.rand_like(h),
    "randn_like": lambda m, h: h + 0.1 * torch.randn_like(h),
    "rand of a shape": lambda m, h: h * torch.rand(16) + torch.randn(12, 1),
    "randint and randperm": lambda m, h: h[torch.randperm(12)] * torch.randint(1, 3, (12, 1)),
    "rrelu": lambda m, h: functional.rrelu(h, training=m.training),
    "dropout": lambda m, h: functional.dropout(h, 0.4, m.training),
    "dropout in place": lambda m, h: functional.dropout(h * 2, 0.4, m.training, inplace=True),
    "alpha_dropout": lambda m, h: functional.alpha_dropout(h, 0.4, m.training),
    "feature dropout": lambda m, h: functional.dropout1d(h.view(12, 4, 4), 0.4, m.training).flatten(1),
    "feature_alpha_dropout": lambda m, h: functional.feature_alpha_dropout(h, 0.4, m.training),
    "bernoulli": lambda m, h: h * torch.bernoulli(torch.sigmoid(h.detach())),
    "normal_ and uniform_": lambda m, h: h + torch.empty_like(h).normal_() * torch.empty_like(h).uniform_(),
    "multinomial": lambda m, h: h + h.gather(1, torch.multinomial(h.detach().softmax(1), 1)),
    "gumbel_softmax": lambda m, h: functional.gumbel_softmax(h, hard=True) + h,
    "exponential_ and geometric_": lambda m, h: h * torch.empty_like(h).exponential_().clamp(max=2),
    "reparametrised normal": lambda m, h: torch.distributions.Normal(
        h, h.exp(), validate_args=False
    ).rsample(),
    "dropout2d": lambda m, h: functional.dropout2d(h.view(12, 4, 2, 2), 0.4, m.training).flatten(1),
    "dropout3d": lambda m, h: functional.dropout3d(h.view(12, 2, 2, 2, 2), 0.4, m.training).flatten(1),
    "randint_like": lambda m, h: h * torch.randint_like(h, 1, 4),
    "bernoulli_ of a rate": lambda m, h: h * torch.empty_like(h).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda m, h: h * torch.empty_like(h).bernoulli_(h.detach().sigmoid()),
    "multinomial with replacement": lambda m, h: h.gather(
        1, torch.multinomial(h.detach().softmax(1), 16, replacement=True)
    ),
    "normal of two tensors": lambda m, h: h * torch.normal(h.detach(), h.detach().exp()),
    "normal of a tensor and a number": lambda m, h: h * torch.normal(h.detach(), 2.0),
    "normal of a number and a tensor": lambda m, h: h * torch.normal(1.0, h.detach().exp()),
    "normal of a size": lambda m, h: h * torch.normal(1.0, 2.0, (12, 16)),
    "poisson": lambda m, h: h * torch.poisson(h.detach().exp()),
    "binomial": lambda m, h: h * torch.binomial(torch.full_like(h, 5), h.detach().sigmoid()),
    "geometric_": lambda m, h: h * torch.empty_like(h).geometric_(0.4),
    "cauchy_": lambda m, h: h * torch.empty_like(h).cauchy_().tanh(),
    "log_normal_": lambda m, h: h * torch.empty_like(h).log_normal_(0, 0.3),
    "random_": lambda m, h: h * torch.empty_like(h).random_(1, 4),
    "fractional_max_pool": lambda m, h: (
        functional.fractional_max_pool2d(h.view(12, 1, 4, 4), 2, output_size=(2, 2)).flatten(1).repeat(1, 4)
    ),
    "reparametrised gamma": lambda m, h: torch.distributions.Gamma(
        h.exp() + 1, h.exp(), validate_args=False
    ).rsample(),
    "reparametrised beta": lambda m, h: torch.distributions.Beta(
        h.exp() + 1, h.exp() + 1, validate_args=False
    ).rsample(),
    "reparametrised Dirichlet": lambda m, h: torch.distributions.Dirichlet(
        h.exp() + 1, validate_args=False
    ).rsample(),
    "stochastic depth": lambda m, h: h + h.sin() * (torch.rand(12, 1) < 0.5) / 0.5,
    "multi_head_attention with dropout": lambda m, h: m.attention(h[None], h[None], h[None])[0][0],
    "an LSTM with dropout between layers": lambda m, h: m.lstm(h[None])[0][0],
    "a GRU with dropout between layers": lambda m, h: m.gru(h[None])[0][0],
    "attention with dropout": lambda m, h: functional.scaled_dot_product_attention(
        h.view(1, 12, 16), h.view(1, 12, 16), h.view(1, 12, 16), dropout_p=0.3
    ).flatten(0, 1),
}
_PARTS: dict[str, Callable[[], dict[str, nn.Module]]] = {
    "multi_head_attention with dropout": lambda: {
        "attention": nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True)
    },
    "an LSTM with dropout between layers": lambda: {
        "lstm": nn.LSTM(16, 16, 2, dropout=0.3, batch_first=True)
    },
    "a GRU with dropout between layers": lambda: {"gru": nn.GRU(16, 16, 2, dropout=0.3, batch_first=True)},
}
"""The layers that a function needs."""
for _name, _draw in _DRAWS.items():
    trains_own(
        2,
        f"draws with {_name}",
        lambda name=_name, draw=_draw: _linear(draw, _PARTS[name]() if name in _PARTS else None),
        "Gradients and the generator's state are eager's.",
        step=lambda side, optimizer: (one_step(side, optimizer), torch.get_rng_state()),
        refusable=_name in ("exponential_ and geometric_", "random_"),
        tolerance=1e-5 if "LSTM" in _name else None,  # the time steps below the kernels' smallest budget
    )


trains_own(
    2,
    "a distribution that validates its arguments",
    lambda: _linear(lambda m, h: torch.distributions.Normal(h, h.exp()).rsample()),
    "torch's own validation reads values: as in eager, or refused.",
    refusable=True,
)


@check(2)
def a_generator_of_the_model_s_own(trial: Trial) -> None:
    """A model that draws from a torch.Generator of its own goes on drawing."""
    module, arguments = _linear(lambda m, h: h * torch.rand(16, generator=m.generator))
    vars(module)["generator"] = torch.Generator().manual_seed(4)

    def script(side: Side) -> Any:
        side.module.generator.manual_seed(6)
        return train("SGD")(side), side.module.generator.get_state()

    trial.same(trial.fit(module, arguments), script)


@check(2, refusable=True)
def numpy_within_the_forward(trial: Trial) -> None:
    """A model that draws from NumPy's generator in each forward goes on drawing, or is refused."""
    module, arguments = _linear(lambda m, h: h * float(np.random.rand()))

    def script(side: Side) -> Any:
        np.random.seed(2)
        return train("SGD")(side), float(np.random.rand())

    trial.same(trial.fit(module, arguments), script)


@check(2, refusable=True)
def python_s_random_within_the_forward(trial: Trial) -> None:
    """A model that draws from Python's generator (stochastic depth) goes on drawing, or is refused."""
    module, arguments = _linear(lambda m, h: h if random.random() < 0.5 else h * 2)

    def script(side: Side) -> Any:
        random.seed(2)
        return train("SGD")(side), random.random()

    trial.same(trial.fit(module, arguments), script)


# ---------------------------------------------------------------------- row 3

_SENSITIVE = (
    "aten.topk",
    "aten.sort",
    "aten.kthvalue",
    "aten.mode",
    "aten.index_put",
    "aten._index_put",
    "aten.scatter_add",
    "aten.index_add",
    "aten.scatter_reduce",
)


@check(3, having("routing"))
def order_sensitive_operations_run_once(trial: Trial) -> None:
    """No operation whose result depends on the order of ties or of colliding writes is computed twice."""
    plan = trial.pair().ours.module.plan
    again = [d.operation for d in plan.decisions if d.runs_again and d.operation.startswith(_SENSITIVE)]
    if again:
        raise Difference(f"the plan runs {', '.join(sorted(set(again)))} again ({len(again)} in all)")


@check(3, having("routing"))
def routing_with_ties(trial: Trial) -> None:
    """Where the router's scores tie, tokens go where eager sends them, and gradients are eager's."""
    module: Any = trial.subject.make()
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[:, 0] = 1.0
    trains(trial, trial.fit(module, trial.subject.arguments()))


def _coarse(h: Tensor) -> Tensor:
    """Many equal values, with eager's gradient."""
    return h + ((h * 2).round() / 2 - h).detach()


_ROWS = torch.tensor([0, 2, 2, 5, 5, 5, 7, 0, 1, 11, 11, 3])
_ORDERED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "topk": lambda m, h: _coarse(h).topk(5, dim=0).values.sum(0) + h,
    "indices of topk": lambda m, h: h.gather(0, _coarse(h).topk(12, dim=0).indices),
    "sort": lambda m, h: _coarse(h).sort(0).values * h.gather(0, _coarse(h).sort(0).indices),
    "stable sort": lambda m, h: h.gather(0, _coarse(h).sort(dim=0, stable=True).indices),
    "argmax and max": lambda m, h: h + _coarse(h).max(0).values + h.gather(0, _coarse(h).argmax(0)[None]),
    "amax": lambda m, h: h * _coarse(h).amax(0) + _coarse(h).median(0).values,
    "kthvalue and mode": lambda m, h: h + _coarse(h).kthvalue(3, 0).values + _coarse(h).mode(0).values,
    "index_put accumulate": lambda m, h: torch.zeros(12, 16).index_put((_ROWS,), h, accumulate=True),
    "index_put with collisions": lambda m, h: torch.zeros(12, 16).index_put((_ROWS,), h),
    "index_add": lambda m, h: torch.zeros(12, 16).index_add(0, _ROWS, h),
    "scatter_add": lambda m, h: torch.zeros(12, 16).scatter_add(0, _ROWS[:, None].expand(12, 16), h),
    "scatter_reduce": lambda m, h: torch.ones(12, 16).scatter_reduce(
        0, _ROWS[:, None].expand(12, 16), h, "prod"
    ),
    "rows taken more than once": lambda m, h: h[_ROWS] * h.index_select(0, _ROWS),
    "cumsum and cumprod": lambda m, h: h.cumsum(0) * (1 + 0.1 * h).cumprod(0),
    "max_pool with ties": lambda m, h: functional.max_pool1d(_coarse(h)[None], 2).repeat(1, 1, 2)[0],
    "embedding_bag": lambda m, h: functional.embedding_bag(_ROWS.view(6, 2), h, mode="sum").repeat(2, 1),
    "interpolate and grid_sample": lambda m, h: functional.interpolate(
        h[None, None], scale_factor=2.0, mode="bilinear"
    )[0, 0, ::2, ::2],
}
for _name, _function in _ORDERED.items():
    trains_own(3, f"computes {_name}", lambda function=_function: _linear(function))


def _data_dependent(name: str, function: Callable[[Any, Tensor], Tensor]) -> None:
    trains_own(
        3,
        f"computes {name}",
        lambda: _linear(function),
        "A shape that depends on data is planned for, or refused by name.",
        refusable=True,
    )


_data_dependent("unique", lambda m, h: h * torch.unique(_coarse(h.detach())).sum())
_data_dependent("a boolean mask", lambda m, h: h + h[h > 0].sum())
_data_dependent("nonzero", lambda m, h: h + h.flatten()[(h > 0).flatten().nonzero()].mean())
_data_dependent("a number from a tensor", lambda m, h: h * float(h.detach().abs().max()))
_data_dependent("a branch on data", lambda m, h: h * 2 if bool(h.sum() > 0) else h)
