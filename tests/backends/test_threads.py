"""Fitted modules in several threads at once, and in loops that worker processes feed."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from support.torch_cases import assert_same, fitted, net, recompute_some
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import irc
from irc.ir import Graph, Schedule

torch.set_num_threads(1)


def recomputing(graph: Graph) -> Schedule:
    return recompute_some(graph, 3)


@pytest.fixture(autouse=True)
def _switching() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def together(*runs: Callable[[], Any]) -> list[Any]:
    """What functions return that run in threads of their own, from one moment on."""
    barrier, found, errors = threading.Barrier(len(runs)), dict[int, Any](), list[BaseException]()

    def body(k: int) -> None:
        try:
            barrier.wait(60)
            found[k] = runs[k]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(k,)) for k in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[k] for k in range(len(runs))]


def layers(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 8))


def train(module: Any, x: Tensor) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    return dict(module.state_dict())


def test_two_modules_in_two_threads_train_as_one_after_the_other() -> None:
    xs = [torch.randn(5, 8), torch.randn(7, 8)]
    wanted = [train(fitted(layers(k), xs[k], schedule=recomputing), xs[k]) for k in range(2)]
    ours = [fitted(layers(k), xs[k], schedule=recomputing) for k in range(2)]
    found = together(*(lambda k=k: train(ours[k], xs[k]) for k in range(2)))
    for mine, its in zip(found, wanted, strict=True):
        assert_same(mine, its)


def whole(seed: int) -> tuple[nn.Module, list[Tensor]]:
    """A model and inputs of small whole numbers: sums of their gradients are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    for parameter in module.parameters():
        parameter.data = torch.randint(-3, 4, parameter.shape, generator=generator).double()
    return module, [torch.randint(-3, 4, (3, 4), generator=generator).double() for _ in range(4)]


@pytest.mark.parametrize("options", [{}, {"accumulate_gradients": True}])
def test_one_module_in_several_threads_adds_up_all_gradients(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, xs = whole(0)
    original = copy.deepcopy(module)
    ours = irc.optimize(module, xs[0], "100%", costs="analytic", time_limit=1, **options)
    for x in xs:
        original(x).sum().backward()
    wanted = [parameter.grad for parameter in original.parameters()]
    turn = threading.Barrier(len(xs))
    found: list[list[Any]] = []
    detach = Tensor.detach

    def slow(tensor: Tensor) -> Tensor:
        """Lets other threads run where a gradient becomes the first one."""
        time.sleep(1e-3)
        return detach(tensor)

    monkeypatch.setattr(Tensor, "detach", slow)

    def steps(x: Tensor) -> None:
        for _ in range(5):
            ours(x).sum().backward()
            if turn.wait(60) == 0:
                found.append([parameter.grad for parameter in ours.parameters()])
                ours.zero_grad()
            turn.wait(60)

    together(*(lambda x=x: steps(x) for x in xs))
    for row in found:
        assert all(torch.equal(a, b) for a, b in zip(row, wanted, strict=True) if b is not None)
    assert len(found) == 5


def test_each_thread_has_the_gradients_of_its_own_step() -> None:
    module, xs = whole(1)
    ours = fitted(module, xs[0], schedule=recomputing)
    parameters = list(ours.parameters())

    def gradients(x: Tensor) -> list[Any]:
        return [torch.autograd.grad(ours(x).square().sum(), parameters) for _ in range(10)]

    for found, x in zip(together(*(lambda x=x: gradients(x) for x in xs)), xs, strict=True):
        wanted = torch.autograd.grad(module(x).square().sum(), parameters)
        assert all(torch.equal(a, b) for row in found for a, b in zip(row, wanted, strict=True))


def test_no_thread_reads_parameters_while_another_updates_them() -> None:
    torch.manual_seed(0)
    updating, reading = threading.Event(), threading.Event()

    class Slow(torch.optim.SGD):
        """Lets another thread run in the middle of its steps."""

        def step(self, closure: Any = None) -> None:
            updating.set()
            reading.wait(0.1)
            super().step(closure)

    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4)
    ours = irc.optimize(
        module, x, "100%", costs="analytic", time_limit=1, optimizer_in_backward=lambda p: Slow(p, lr=0.5)
    )
    before = copy.deepcopy(module)
    updating.clear()  # planning measures steps
    reading.clear()

    def train_once() -> None:
        ours(x).square().sum().backward()

    def look() -> Tensor:
        updating.wait(60)
        found = ours(2 * x).detach()
        reading.set()
        return found

    _, found = together(train_once, look)
    assert torch.equal(found, module(2 * x)) and not torch.equal(found, before(2 * x))


def test_modules_are_planned_in_two_threads_beside_others_that_train() -> None:
    x, image = torch.randn(5, 8), torch.randn(4, 3, 14, 14)
    others = [net(), fitted(net(), image)]
    modules = [layers(0), layers(1)]

    def plan(k: int) -> Any:
        return irc.optimize(modules[k], x, "100%", costs="analytic", time_limit=1)

    def steps(other: nn.Module) -> int:
        seen: list[str] = []
        for _ in range(10):
            y = other(image)
            y.register_hook(lambda _: seen.append("called"))
            y.sum().backward()
        return len(seen)

    *planned, eager, ours = together(
        *(lambda k=k: plan(k) for k in range(2)), *(lambda other=other: steps(other) for other in others)
    )
    assert eager == ours == 10
    for k, module in enumerate(planned):
        assert_same(train(module, x), train(layers(k), x))


class Rows(Dataset[Tensor]):
    """Inputs that a worker computes; with a module, the features that it makes of them."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self.module = module

    def __len__(self) -> int:
        return 15

    def __getitem__(self, index: int) -> Tensor:
        x = torch.full((8,), float(index)).sin()
        if self.module is None:
            return x
        with torch.no_grad():
            return self.module(x[None])[0]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes:UserWarning")
@pytest.mark.parametrize("in_workers", [False, True])
def test_a_loop_that_workers_feed_trains_as_the_original(in_workers: bool) -> None:
    states: list[dict[str, Tensor]] = []
    for is_planned in (False, True):
        module = layers(3)
        features = nn.Sequential(nn.Linear(8, 8), nn.Tanh()) if in_workers else None
        if features is not None:
            features.load_state_dict({"0.weight": torch.eye(8), "0.bias": torch.ones(8)})
        if is_planned:
            module = fitted(module, torch.randn(5, 8), schedule=recomputing)
            features = features and fitted(features, torch.randn(1, 8))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        for _ in range(2):
            for x in DataLoader(Rows(features), batch_size=5, num_workers=2):
                optimizer.zero_grad()
                module(x).square().mean().backward()
                optimizer.step()
        states.append(dict(module.state_dict()))
    assert_same(states[1], states[0])
