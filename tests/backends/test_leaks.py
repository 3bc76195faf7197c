"""Nothing is held for longer than in eager: after many steps, after failures, without a backward."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from support.torch_cases import Model, assert_same, fitted, keep_all, recompute_some
from torch import Tensor, nn

import irc
from irc.ir import Graph, Schedule
from irc.passes.costs.allocations import allocation_events

torch.set_num_threads(1)


def recomputing(graph: Graph) -> Schedule:
    return recompute_some(graph, 3)


def _forward(m: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(m.norm(m.first(x)))
    return m.second(m.drop(h * h.exp()))[index], h


def model() -> Any:
    torch.manual_seed(0)
    return Model(
        _forward,
        first=nn.Linear(16, 16),
        norm=nn.BatchNorm1d(16),
        drop=nn.Dropout(0.25),
        second=nn.Linear(16, 16),
    )


def arguments() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1)), torch.arange(0, 32, 2)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _planned(**options: Any) -> Callable[[], Any]:
    return lambda: irc.optimize(model(), arguments(), "100%", costs="analytic", time_limit=1, **options)


KINDS: dict[str, Callable[[], Any]] = {
    "keep all": lambda: fitted(model(), *arguments(), schedule=keep_all),
    "recomputing": lambda: fitted(model(), *arguments(), schedule=recomputing),
    "accumulated": _planned(accumulate_gradients=True),
    "applied": _planned(optimizer_in_backward=sgd),
}


@functools.cache
def _made(kind: str) -> Any:
    return KINDS[kind]()


def make(kind: str) -> Any:
    """A module of this kind, planned once."""
    return copy.deepcopy(_made(kind))


every_kind = pytest.mark.parametrize("kind", KINDS)


@contextlib.contextmanager
def no_collector() -> Generator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left_bytes(run: Callable[[], Any]) -> int:
    """Bytes that are allocated after `run` and were not before, without the garbage collector."""
    with no_collector():
        return sum(allocation_events(run))


def step(trained: Any, optimizer: torch.optim.Optimizer | None) -> None:
    first, second = trained(*arguments())
    (first.square().mean() + second.mean()).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


LOOPS = [(kind, factory) for kind in KINDS for factory in (sgd, torch.optim.AdamW) if kind != "applied"]


@pytest.mark.parametrize(("kind", "factory"), [*LOOPS, ("applied", None)])
def test_after_fifty_steps_the_bytes_are_those_after_two(kind: str, factory: Any) -> None:
    trained = make(kind)
    optimizer = None if factory is None else factory(trained.parameters())
    for _ in range(2):
        step(trained, optimizer)

    def more() -> None:
        for _ in range(48):
            step(trained, optimizer)

    assert left_bytes(more) == 0


@every_kind
def test_a_forward_whose_output_is_dropped_frees_everything_at_once(kind: str) -> None:
    trained = make(kind)
    trained(*arguments())
    held: list[int] = []

    def forwards() -> None:
        for _ in range(3):
            trained(*arguments())
        kept = trained(*arguments())[0].detach()
        held.append(kept.untyped_storage().nbytes())
        del kept

    assert left_bytes(forwards) == 0 and held[0] > 0


@every_kind
def test_an_output_that_is_kept_after_backward_holds_itself_alone(kind: str) -> None:
    trained = make(kind)
    step(trained, None)
    trained.zero_grad()
    losses: list[Tensor] = []

    def steps() -> None:
        for _ in range(10):
            losses.append(trained(*arguments())[0].square().mean())
            losses[-1].backward()
            trained.zero_grad()

    assert left_bytes(steps) == 10 * losses[0].nbytes


def fails(run: Callable[[], Any], kind: type[Exception]) -> None:
    """Runs what fails, and lets go of the traceback, whose frames hold tensors."""
    with contextlib.suppress(kind):
        run()
        raise AssertionError("it did not fail")


def refuse(_: Any) -> None:
    raise ValueError("from a hook")


def _in_forward(trained: Any) -> None:
    x, index = arguments()
    fails(lambda: trained(x, index + 31), IndexError)


def _in_output_hook(trained: Any) -> None:
    first, second = trained(*arguments())
    second.register_hook(refuse)
    fails((first.sum() + second.sum()).backward, ValueError)


def _in_parameter_hook(trained: Any) -> None:
    handle = trained.first.weight.register_hook(refuse)
    first, second = trained(*arguments())
    fails((first.sum() + second.sum()).backward, ValueError)
    handle.remove()


def _in_backward(trained: Any) -> None:
    """An operation of backward fails, with some of the values computed again already."""
    first, second = trained(*arguments())
    namespace = trained.__dict__["_irc"].compiled_plans[0].program.backward.__globals__
    name = next(name for name in namespace if name.startswith("aten_tanh_backward"))
    working = namespace[name]

    def failing(*_: Any) -> None:
        raise ValueError("out of memory, as it were")

    namespace[name] = failing
    try:
        fails((first.sum() + second.sum()).backward, ValueError)
    finally:
        namespace[name] = working


def _in_loss(trained: Any) -> None:
    fails(lambda: trained(*arguments())[0] @ torch.ones(3), RuntimeError)


FAILURES: dict[str, Callable[[Any], None]] = {
    "forward": _in_forward,
    "loss": _in_loss,
    "output hook": _in_output_hook,
    "parameter hook": _in_parameter_hook,
    "backward": _in_backward,
}


@pytest.mark.parametrize("where", FAILURES)
@every_kind
def test_a_failure_frees_what_was_saved_and_the_next_step_is_right(kind: str, where: str) -> None:
    if kind in ("accumulated", "applied") and where == "parameter hook":
        where = "output hook"  # hooks on parameters are refused there
    trained = make(kind)
    for _ in range(2):
        step(trained, None)
    trained.zero_grad()
    start = copy.deepcopy(trained.state_dict())
    momenta = [
        state["momentum_buffer"] for o in trained.irc_optimizers.values() for state in o.state.values()
    ]
    starts = [momentum.clone() for momentum in momenta]

    def right() -> dict[str, Any]:
        trained.load_state_dict(start)
        for momentum, value in zip(momenta, starts, strict=True):
            momentum.copy_(value)
        torch.manual_seed(3)
        step(trained, None)
        gradients = {n: p.grad.clone() for n, p in trained.named_parameters() if p.grad is not None}
        found = {name: value.clone() for name, value in trained.state_dict().items()}
        trained.zero_grad()
        return gradients | {f"after {name}": value for name, value in found.items()}

    def some() -> None:
        FAILURES[where](trained)
        trained.zero_grad()
        right()

    wanted = right()
    assert left_bytes(some) == 0
    assert_same(right(), wanted)


def test_a_fitted_module_that_is_dropped_frees_its_copies() -> None:
    ours = make("recomputing")

    def copies() -> None:
        twin = copy.deepcopy(ours)
        step(twin, None)

    copies()
    assert left_bytes(copies) == 0
