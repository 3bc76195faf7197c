"""Rows 6 and 7: results that share memory, and weights that are one tensor under two names."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from irc.passes.costs.allocations import peak_bytes

from .cases import check_script, check_step, fitted, trains_own
from .comparison import Difference
from .models import Arguments, Calls
from .registry import check, every, having, the
from .steps import OPTIMIZERS, one_step, train, trains
from .trial import Side, Trial


def _relations(side: Side, result: Any) -> Any:
    """Which results, arguments and parameters are one tensor or share memory, and what each result is."""
    named: dict[str, Tensor] = {f"input {k}": t for k, t in enumerate(side.arguments.tensors)}
    named |= dict(side.module.named_parameters()) | dict(side.module.named_buffers())
    found: list[Any] = []
    leaves = pytree.tree_leaves(result)
    results = {f"result {k}": leaf for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    named = results | named
    for (a, one), (b, other) in itertools.combinations(named.items(), 2):
        if one is other:
            found.append(f"{a} is {b}")
        elif one.numel() and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():
            found.append(f"{a} shares memory with {b}, {one.storage_offset() - other.storage_offset()} apart")
    described = [
        (name, tuple(t.shape), t.stride(), t.requires_grad, t.is_leaf, t.grad_fn is None)
        for name, t in results.items()
    ]
    return found, described


@check_script(6, every())
def results_alias_what_they_alias(side: Side) -> Any:
    """Results share memory with arguments, parameters and each other exactly where eager's do."""
    return _relations(side, side())


@check(6, the("aliases"))
def aliases_train(trial: Trial) -> None:
    """A loss over results that are views of each other: gradients are eager's."""
    trains(trial, trial.pair())


@check_step(6, the("aliases"))
def a_write_is_seen_through_an_alias(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """What the script writes into one result is there in the results that alias it, and in the gradients."""
    optimizer.zero_grad()
    result = side()
    result[0].mul_(2.0)
    seen = [leaf.detach().clone() for leaf in result]
    loss = side.lossy(result)
    loss.backward()
    optimizer.step()
    return seen, loss.detach()


@check_step(6, the("aliases"))
def a_result_that_is_a_parameter(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """A returned parameter (and a view of it) is the parameter: a loss on it adds to its gradient."""
    optimizer.zero_grad()
    result = side()
    loss = side.lossy(result) + result[6].square().mean() + result[7].sin().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@check(6, the("aliases"))
def a_storage_is_counted_once(trial: Trial) -> None:
    """The measured peak is at most the predicted one, which is within 5% of it: no alias counts twice."""
    subject = trial.subject
    # gradients of views would be bounded from above until they are one: the loss has none
    pair = trial.fit(subject.make(), subject.arguments(), _of_the_first, costs="measured", loss=_of_the_first)
    side, plan = pair.ours, pair.ours.module.plan

    def step() -> None:
        result = side.unmarked()
        side.lossy(result).backward()

    step()
    side.module.zero_grad()
    measured = peak_bytes(step) + plan.static_bytes
    if not measured <= plan.peak_bytes <= 1.05 * measured:
        raise Difference(f"the predicted peak is {plan.peak_bytes:,} bytes, the measured one {measured:,}")


def _of_the_first(result: Any) -> Tensor:
    return result[0].square().mean()


Made = Callable[[Any, Tensor], Any]


def _results(function: Made, *, grad: bool = False) -> tuple[nn.Module, Arguments]:
    module = Calls(function, lin=nn.Linear(4, 6))
    module.register_buffer("offset", torch.ones(6))
    return module, Arguments((torch.randn(8, 4, requires_grad=grad),))


def _own_relations(name: str, function: Made, *, grad: bool = False) -> None:
    def run(trial: Trial) -> None:
        def script(side: Side) -> Any:
            result = side()
            return _relations(side, result), result, train("SGD")(side)

        module, arguments = _results(function, grad=grad)
        trial.same(trial.fit(module, arguments, _any_loss), script)

    check(6, name=name, promise="Aliases, views, and what a loss over all of it gives are eager's.")(run)


def _any_loss(result: Any) -> Tensor:
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([leaf.square().mean() for leaf in leaves]).sum()


_own_relations("the same result twice", lambda m, x: (h := torch.tanh(m.lin(x)), h))
_own_relations("the input as a result", lambda m, x: (torch.tanh(m.lin(x)), x, x[1:], x.t()))
_own_relations("an input with a gradient as a result", lambda m, x: (m.lin(x).tanh(), x, x[1:]), grad=True)
_own_relations("a buffer as a result", lambda m, x: (torch.tanh(m.lin(x)), m.offset, m.offset[2:]))
_own_relations("a parameter as a result", lambda m, x: (m.lin(x).tanh(), m.lin.weight, m.lin.weight.t()))
_own_relations("chunks of one tensor", lambda m, x: torch.tanh(m.lin(x)).chunk(3, 1))
_own_relations("detached results", lambda m, x: (h := torch.tanh(m.lin(x)), h.detach(), h.detach()[0]))
_own_relations("an expanded result", lambda m, x: torch.tanh(m.lin(x)).mean(0).expand(5, 6))
_own_relations("a complex view", lambda m, x: torch.view_as_complex(torch.tanh(m.lin(x)).view(8, 3, 2)).real)


@check(6, refusable=True)
def one_tensor_for_two_arguments(trial: Trial) -> None:
    """Planned with two tensors and called with one twice, and in another order: equal, or refused."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(m.lin(x)) * m.lin(y * y)

    def script(side: Side) -> Any:
        x, y = side.arguments.args
        seen: list[Any] = []
        for pair in ((x, y), (x, x), (y, x)):
            side.mark()
            x.grad = y.grad = None
            loss = side.module(*pair).square().mean()
            loss.backward()
            seen.append((loss.detach(), x.grad, y.grad))
        return seen

    x, y = (torch.randn(8, 4, requires_grad=True) for _ in range(2))
    trial.same(trial.fit(Calls(forward, lin=nn.Linear(4, 6)), Arguments((x, y))), script)


@check(6, refusable=True)
def arguments_that_are_views_of_one_tensor(trial: Trial) -> None:
    """Two arguments that are views of one tensor, one of them written by the model: equal, or refused."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1.0)
        return torch.tanh(m.lin(x)) + m.lin(y)

    def script(side: Side) -> Any:
        base = torch.arange(32.0).view(8, 4) / 32
        side.mark()
        return side.module(base[:4], base[2:6]).detach(), base

    arguments = Arguments((torch.randn(4, 4), torch.randn(4, 4)))
    trial.same(trial.fit(Calls(forward, lin=nn.Linear(4, 6)), arguments), script)


# ---------------------------------------------------------------------- row 7


@check_step(7, having("ties"), pair=fitted)
def ties_train(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """A tied weight has one gradient, the sum of both uses, and takes one step."""
    seen = one_step(side, optimizer)
    module = side.module
    return seen, module.head.weight is module.embedding.weight, len(list(module.parameters()))


@check(7, having("ties"))
def ties_keep_identity(trial: Trial) -> None:
    """Tied weights are one tensor after planning, a deep copy, a cast, and a load."""

    def script(side: Side) -> Any:
        module = side.module
        seen = [module.head.weight is module.embedding.weight]
        module.load_state_dict({name: value + 0.5 for name, value in module.state_dict().items()})
        seen.append(module.head.weight is module.embedding.weight)
        names = [list(module.state_dict()), [name for name, _ in module.named_parameters()]]
        return seen, names, train("SGD")(side)

    pair = trial.pair()
    trial.same(trial.twin(pair), script)
    trial.same(pair, script)


@check_script(7, having("ties"), refusable=True)
def untied_after_planning(side: Side) -> Any:
    """A tie that the script undoes is undone, or the next step is refused."""
    seen = train("SGD", 1)(side)
    side.module.head.weight = nn.Parameter(side.module.head.weight.detach().clone())
    return seen, train("SGD", 2)(side)


@check(7, refusable=True)
def tied_after_planning(trial: Trial) -> None:
    """Weights that the script ties after planning have one gradient, or the next step is refused."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.a(x)))

    def script(side: Side) -> Any:
        side.module.b.weight = side.module.a.weight
        return train("SGD")(side)

    module = Calls(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    trial.same(trial.fit(module, Arguments((torch.randn(8, 6),))), script)


@check_script(7, having("ties"), refusable=True)
def ties_through_an_assigned_state(side: Side) -> Any:
    """load_state_dict(assign=True) unties in eager (each name gets its own tensor): so here, or refused."""
    state = {name: value.clone() for name, value in side.module.state_dict().items()}
    side.module.load_state_dict(state, assign=True)
    side.mark()
    optimizer = OPTIMIZERS["SGD"](side.module.parameters())
    tied = side.module.head.weight is side.module.embedding.weight
    return tied, [one_step(side, optimizer) for _ in range(3)]


class _Shared(nn.Module):
    """One submodule under two names, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class _TiedTranspose(nn.Module):
    """An autoencoder whose decoder is its encoder's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()) @ self.weight


trains_own(7, "one submodule under two names", lambda: (_Shared(), Arguments((torch.randn(8, 6),))))
trains_own(7, "a weight and its transpose", lambda: (_TiedTranspose(), Arguments((torch.randn(8, 6),))))
