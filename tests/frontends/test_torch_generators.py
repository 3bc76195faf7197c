"""Generators of torch's that a forward draws from, and those that it must not seed."""

# torch's own generator of the CPU has no other name that stays.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.torch_cases import Model, assert_same, keep_all, outcome
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import irc
from irc.backends.torch import bind_program, compile_program
from irc.frontends.torch import capture
from irc.ir import (
    GENERATOR_STATE,
    Compute,
    Graph,
    Schedule,
    UnsupportedError,
    VerificationError,
    parse_graph,
    parse_program,
    print_graph,
    print_program,
    verify_graph,
)
from irc.passes import Cost, PassManager, PlanMemory, Program, ReplayDraws

Draw = Callable[[Any, Tensor], Tensor]

DRAWS: dict[str, Draw] = {
    "rand": lambda m, h: torch.rand(h.shape, generator=m.g),
    "randn": lambda m, h: torch.randn(h.shape, generator=m.g),
    "randint": lambda m, h: torch.randint(1, 4, h.shape, generator=m.g),
    "randperm": lambda m, h: torch.randperm(h.numel(), generator=m.g).view(h.shape),
    "bernoulli": lambda m, h: torch.bernoulli(h.sigmoid(), generator=m.g),
    "poisson": lambda m, h: torch.poisson(h.abs(), m.g),
    "multinomial": lambda m, h: torch.multinomial(h.abs() + 0.1, 16, True, generator=m.g),
    "normal": lambda m, h: torch.normal(h, h.abs(), generator=m.g),
    "normal_": lambda m, h: torch.empty_like(h).normal_(generator=m.g),
    "the device's own": lambda m, h: torch.rand(h.shape, generator=torch.default_generator),
    "both": lambda m, h: torch.rand(h.shape, generator=m.g) * torch.rand(h.shape),
}


def drawing(draw: Draw) -> Any:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = (layer(x) * draw(m, x.detach()).to(x.dtype)).tanh()
        return x

    torch.manual_seed(0)
    module: Any = Model(forward, layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(2)))
    module.g = torch.Generator().manual_seed(4)
    return module


def keep_none(graph: Graph) -> Schedule:
    program = ReplayDraws().run(Program(graph))
    program = PassManager([Cost(profile="cpu"), PlanMemory(2**30, "keep-none")]).run(Program(program.graph))
    assert program.schedule is not None
    runs = Counter(i.node for i in program.schedule.instructions if isinstance(i, Compute))
    again = [node for node in runs if node.generator_state is not None and node.op != GENERATOR_STATE]
    assert again and all(runs[node] > 1 for node in again)
    return program.schedule


def _of_seeded(draw: Draw) -> Draw:
    """The same draw from a generator that the forward makes."""
    return lambda m, h: draw(SimpleNamespace(g=torch.Generator().manual_seed(9)), h)


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_from_a_generator_run_again(name: str, *, is_made: bool) -> None:
    module, x = drawing(_of_seeded(DRAWS[name]) if is_made else DRAWS[name]), torch.randn(128, 16)
    original = copy.deepcopy(module)
    before = module.g.get_state()
    captured = capture(module, (x,))
    schedule = keep_none(captured.graph)
    program = compile_program(schedule, captured.constants, captured.generators)
    ours: Any = bind_program(module, program, captured.signature)
    assert torch.equal(before, module.g.get_state())
    text = print_program(schedule)
    assert print_program(parse_program(text)) == text
    for seed in (6, 7):
        for each in (ours, original):
            each.g.manual_seed(seed)
        assert_same(outcome(ours, (x,), {}), outcome(original, (x,), {}))
        assert torch.equal(ours.g.get_state(), original.g.get_state())


def _trained(module: Any, *args: Any) -> list[Tensor]:
    module.zero_grad()
    result = module(*args)
    result.square().sum().backward()
    drawn_from = [*(a for a in args if isinstance(a, torch.Generator)), module.g]
    found = [result.detach(), *(p.grad for p in module.parameters()), *(g.get_state() for g in drawn_from)]
    return [tensor.clone() for tensor in found if tensor is not None]


def test_an_argument_may_be_another_generator_in_each_step() -> None:
    def forward(m: Any, x: Tensor, noise: torch.Generator) -> Tensor:
        return m.lin(x) * torch.rand(8, generator=noise) * torch.rand(8, generator=m.g)

    module: Any = Model(forward, lin=nn.Linear(4, 8))
    module.g = torch.Generator()
    original, x = copy.deepcopy(module), torch.randn(5, 4)
    ours: Any = irc.optimize(module, (x, torch.Generator()), "100%")
    for seed in range(3):
        found: list[list[Tensor]] = []
        for each in (ours, original):
            noise = torch.Generator().manual_seed(seed)
            each.zero_grad()
            result = each(x, noise)
            result.sum().backward()
            found.append([result.detach(), each.lin.weight.grad, noise.get_state(), each.g.get_state()])
        for mine, theirs in zip(*found, strict=True):
            assert torch.equal(mine, theirs)


def test_copies_draw_from_their_own_generators() -> None:
    module, x = drawing(DRAWS["rand"]), torch.randn(64, 16)
    ours: Any = irc.optimize(module, (x,), "100%")
    before = ours.g.get_state()
    other = copy.deepcopy(ours)
    found = _trained(other, x)
    assert torch.equal(before, ours.g.get_state())
    for mine, theirs in zip(_trained(ours, x), found, strict=True):
        assert torch.equal(mine, theirs)


def _trains_as_eager(module: nn.Module, *calls: tuple[Any, ...]) -> None:
    original = copy.deepcopy(module)
    ours: Any = irc.optimize(module, calls[0], "100%", costs="analytic")
    for seed, args in enumerate(calls):
        ends: list[dict[str, Any]] = []
        for each in (ours, original):
            each.zero_grad()
            torch.manual_seed(seed)
            result = each(*args)
            drawn_between = torch.rand(2)
            result.square().sum().backward()
            ends.append({"result": result.detach(), "between": drawn_between, "state": torch.get_rng_state()})
            ends[-1].update((name, parameter.grad) for name, parameter in each.named_parameters())
        assert_same(*ends)


def _seeded_again(m: Any, x: Tensor) -> Tensor:
    g, other = torch.Generator(), torch.Generator("cpu").manual_seed(-3)
    y = m.lin(x) * torch.rand(4, generator=g)
    g.manual_seed(7)
    y = y * torch.rand(4, generator=g) * torch.rand(4, generator=other) * torch.rand(4, generator=g)
    g.manual_seed(7)
    same_seed = torch.Generator().manual_seed(g.initial_seed())
    y = y * torch.rand(4, generator=g) + torch.rand(4, generator=same_seed) + torch.rand(4)
    assert isinstance(g, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
    assert issubclass(type(g), torch.Generator) and not isinstance(3, torch.Generator)
    return y * torch.rand(4, generator=other)


def _checkpointed(m: Any, x: Tensor) -> Tensor:
    def function(x: Tensor) -> Tensor:
        g = torch.Generator().manual_seed(9)
        return (m.lin(x) * torch.rand(4, generator=g)).sin() * torch.rand(4, generator=g)

    return checkpoint(function, x, use_reentrant=False)  # pyright: ignore


def _thread(m: Any, x: Tensor) -> Tensor:
    kinds: list[type] = []
    thread = threading.Thread(target=lambda: kinds.append(type(torch.Generator().manual_seed(3))))
    thread.start()
    thread.join()
    return m.lin(x) * (kinds == [torch._C.Generator])


SEEDED: dict[str, Callable[..., Tensor]] = {
    "seeded again": _seeded_again,
    "in a checkpoint": _checkpointed,
    "in another thread": _thread,
    "under vmap": lambda m, x: torch.vmap(
        lambda row: m.lin(row) * torch.rand(4, generator=torch.Generator()), randomness="different"
    )(x),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_generator_that_the_forward_seeds_draws_the_same_in_each_step(name: str) -> None:
    x = torch.randn(3, 4)
    _trains_as_eager(Model(SEEDED[name], lin=nn.Linear(4, 4)), (x,), (x + 1,), (x,))
    assert torch.Generator is torch._C.Generator


def test_a_seed_that_is_an_argument_asks_for_a_plan() -> None:
    def forward(m: Any, x: Tensor, seed: int) -> Tensor:
        return m.lin(x) * torch.rand(4, generator=torch.Generator().manual_seed(seed))

    x = torch.randn(3, 4)
    _trains_as_eager(Model(forward, lin=nn.Linear(4, 4)), (x, 3), (x, 4), (x, 3))


class _DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, generator: torch.Generator | None, draw: Callable[..., Tensor]
    ) -> Tensor:
        ctx.generator, ctx.draw = generator, draw
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        torch.rand(3)
        return gradient * ctx.draw(gradient.shape, ctx.generator), None, None


class _SavesADraw(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.rand(x.shape))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * ctx.saved_tensors[0]


def test_draws_that_backward_alone_reads_move_the_generator_where_eager_does() -> None:
    """Draws of the forward for backward are not made there, and draws of backward for nobody are."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = _SavesADraw.apply(m.lin(x)) * torch.rand(64)  # pyright: ignore
        y = _DrawsInBackward.apply(y.sin(), None, lambda shape, g: torch.rand(shape))  # pyright: ignore
        return _SavesADraw.apply(y.sin())  # pyright: ignore

    x = torch.randn(64, 64)
    _trains_as_eager(Model(forward, lin=nn.Linear(64, 64)), (x,), (x + 1,))


def _drawn_from_made(change: Callable[[torch.Generator], Any]) -> Callable[[Any, Tensor], Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        g = torch.Generator()
        return m.lin(x) * torch.rand(4, generator=change(g) or g)

    return forward


def _in_backward(draw: Callable[..., Tensor], *, is_made: bool = False) -> Callable[[Any, Tensor], Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        generator = torch.Generator() if is_made else m.g
        return _DrawsInBackward.apply(m.lin(x), generator, draw)  # pyright: ignore

    return forward


def _from_outside(m: Any, x: Tensor) -> Tensor:
    g = torch.Generator()
    return checkpoint(lambda x: m.lin(x) * torch.rand(4, generator=g), x, use_reentrant=False)  # pyright: ignore


def _assigned(m: Any, x: Tensor) -> Tensor:
    m.last = torch.Generator().manual_seed(3)
    return m.lin(x) * torch.rand(4, generator=m.last)


def _made_once(m: Any, x: Tensor) -> Tensor:
    m.first = getattr(m, "first", None) or torch.Generator().manual_seed(3)
    return m.lin(x) * torch.rand(4, generator=m.first)


UNKNOWN: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "seed": ("IRC338", "the forward seeds a generator that it makes", _drawn_from_made(lambda g: g.seed())),
    "set_state": (
        "IRC338",
        "the forward seeds a generator that it makes",
        _drawn_from_made(lambda g: g.set_state(torch.zeros(5056, dtype=torch.uint8))),
    ),
    "clone_state": ("IRC338", "reads the state", _drawn_from_made(lambda g: g.clone_state())),
    "get_state": ("IRC338", "reads the state", _drawn_from_made(lambda g: bool(g.get_state().sum()))),
    "a copy": ("IRC334", "no attribute leads to", _drawn_from_made(lambda g: _PLAIN())),
    "copied": ("IRC338", "reads the state", _drawn_from_made(copy.copy)),
    "its own is copied": (
        "IRC338",
        "reads the state or the seed of the generator g",
        lambda m, x: m.lin(x) * torch.rand(4, generator=copy.deepcopy(m.g)),
    ),
    "a clock": (
        "IRC338",
        "with another number in each run",
        _drawn_from_made(lambda g: g.manual_seed(time.perf_counter_ns())),
    ),
    "torch's seed": (
        "IRC338",
        "reads the state",
        _drawn_from_made(lambda g: g.manual_seed(torch.initial_seed())),
    ),
    "torch's state": ("IRC338", "reads the state", lambda m, x: m.lin(x) + torch.get_rng_state()[:4]),
    "its own seed": ("IRC338", "reads the state", lambda m, x: m.lin(x) + torch.Generator.initial_seed(m.g)),
    "its own state": ("IRC338", "reads the state", lambda m, x: m.lin(x) + m.g.get_state()[:4]),
    "assigned": ("IRC338", "changes Python state: last", _assigned),
    "made once": ("IRC338", "changes Python state: first", _made_once),
    "returned": ("IRC342", "returns a torch.Generator", lambda m, x: (m.lin(x), torch.Generator())),
    "its own is returned": ("IRC342", "returns a torch.Generator", lambda m, x: (m.lin(x), m.g)),
    "a checkpoint": ("IRC339", "draws from a generator that it makes", _from_outside),
    "its own in a checkpoint": (
        "IRC339",
        "draws from the generator g",
        lambda m, x: checkpoint(lambda x: m.lin(x) * torch.rand(4, generator=m.g), x, use_reentrant=False),
    ),
    "made in backward": (
        "IRC334",
        "not in the forward",
        _in_backward(lambda shape, g: torch.rand(shape, generator=torch.Generator())),
    ),
    "drawn from in backward": (
        "IRC334",
        "not in the forward",
        _in_backward(lambda shape, g: torch.rand(shape, generator=g), is_made=True),
    ),
    "seeded in backward": (
        "IRC338",
        "the forward seeds torch's generator of cpu",
        _in_backward(lambda shape, g: torch.manual_seed(3) and torch.rand(shape)),
    ),
}
_PLAIN = torch.Generator


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_generator_whose_state_a_plan_does_not_know_is_refused(name: str) -> None:
    code, message, forward = UNKNOWN[name]
    module: Any = Model(forward, lin=nn.Linear(4, 4))
    module.g = torch.Generator()
    with pytest.raises(UnsupportedError, match=message) as caught:
        capture(module, (torch.randn(3, 4),))
    assert caught.value.code == code and caught.value.help is not None


def test_a_generator_that_a_cache_keeps_draws_as_any_other_after_a_refusal() -> None:
    @functools.cache
    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    module = Model(lambda m, x: m.lin(x) * torch.rand(4, generator=generator()), lin=nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match="no attribute leads to"):
        capture(module, (torch.randn(3, 4),))
    plain = torch.Generator().manual_seed(3)
    assert torch.equal(torch.rand(4, generator=generator()), torch.rand(4, generator=plain))
    assert torch.equal(generator().get_state(), plain.get_state())
    assert generator().manual_seed(5).initial_seed() == 5
    assert torch.equal(torch.rand(4, generator=generator()), torch.rand(4, generator=plain.manual_seed(5)))


def test_the_cures_for_generators_train() -> None:
    """A generator that the first call alone makes, one in an attribute, and one that a checkpoint seeds."""
    x = torch.randn(3, 4)
    module: Any = Model(_made_once, lin=nn.Linear(4, 4))
    module(x)
    _trains_as_eager(module, (x,), (x,), (x,))
    module = Model(_in_backward(lambda shape, g: torch.rand(shape, generator=g)), lin=nn.Linear(4, 4))
    module.g = torch.Generator()
    _trains_as_eager(module, (x,), (x,), (x,))


@pytest.mark.parametrize(
    "name", ["0:x@cpu", "0:7@cuda:0", f"0:{2**64}@cpu", "7@cpu", "0:7@cpu:256", "0:7@cpu:01"]
)
def test_a_written_generator_that_is_none_is_refused(name: str) -> None:
    graph = capture(drawing(_of_seeded(DRAWS["rand"])), (torch.randn(4, 16),)).graph
    assert not graph.generators and {each.kind for each in graph.generator_symbols} == {"seeded"}
    text = print_graph(graph).replace(graph.generator_symbols[0].name, name)
    with pytest.raises(VerificationError) as caught:
        verify_graph(parse_graph(text))
    assert caught.value.code == "IRC142"


def _forked(m: Any, h: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return torch.rand(h.shape)


def _then_drawn(act: Callable[[Any], object]) -> Draw:
    def draw(m: Any, h: Tensor) -> Tensor:
        act(m)
        return torch.rand(h.shape)

    return draw


_TORCHS_STATE = torch.get_rng_state()
SEEDS: dict[str, Draw] = {
    "manual_seed": _then_drawn(lambda m: torch.manual_seed(3)),
    "seed": _then_drawn(lambda m: torch.seed()),
    "set_rng_state": _then_drawn(lambda m: torch.set_rng_state(_TORCHS_STATE)),
    "the generator itself": _then_drawn(lambda m: torch.default_generator.manual_seed(3)),
    "fork_rng": _forked,
    "a generator of its own": _then_drawn(lambda m: m.g.manual_seed(4)),
    "by the class's name": _then_drawn(lambda m: torch.Generator.manual_seed(m.g, 4)),
    "torch's by the class's name": _then_drawn(
        lambda m: torch.Generator.manual_seed(torch.default_generator, 4)
    ),
}


@pytest.mark.parametrize("name", SEEDS)
def test_seeding_is_refused_with_the_line(name: str) -> None:
    module, x = drawing(SEEDS[name]), torch.randn(4, 16)
    before = torch.get_rng_state(), module.g.get_state()
    with pytest.raises(UnsupportedError, match="the forward seeds") as caught:
        capture(module, (x,))
    assert caught.value.code == "IRC338" and "test_torch_generators.py" in str(caught.value)
    assert torch.equal(before[0], torch.get_rng_state()) and torch.equal(before[1], module.g.get_state())
    assert torch.default_generator is torch.random.default_generator is torch._C.default_generator


def test_the_cures_for_seeding_give_the_numbers_of_eager() -> None:
    module, x = drawing(SEEDS["manual_seed"]), torch.randn(4, 16)
    expected = module(x)
    compiled = torch.compile(copy.deepcopy(module), backend=irc.backend(10**7))
    assert torch.equal(expected, compiled(x))
    around = irc.optimize(drawing(lambda m, h: torch.rand(h.shape)), (x,), "100%")
    torch.manual_seed(5)
    now = torch.get_rng_state()
    with torch.random.fork_rng():
        first = around(x)
    assert torch.equal(now, torch.get_rng_state())
    assert torch.equal(first, around(x))


def test_another_thread_may_seed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    def draw(m: Any, h: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: torch.manual_seed(11))
        thread.start()
        thread.join()
        return torch.rand(h.shape)

    capture(drawing(draw), (torch.randn(4, 16),))
    assert not raised


def test_a_run_on_the_example_leaves_the_generator() -> None:
    def draw(m: Any, h: Tensor) -> Tensor:
        return torch.rand(h.shape, generator=m.g) * (2 if bool(torch.rand(1, generator=m.g) > 2) else 1)

    module = drawing(draw)
    before = module.g.get_state()
    capture(module, (torch.randn(4, 16),), specialize_branches=True)
    assert torch.equal(before, module.g.get_state())


def test_who_does_not_give_the_generators_is_refused() -> None:
    module, x = drawing(DRAWS["rand"]), torch.randn(4, 16)
    captured = capture(module, (x,))
    assert captured.graph.generators == ("0@cpu",)
    with pytest.raises(UnsupportedError, match=r"a torch\.Generator of its own") as caught:
        compile_program(keep_all(captured.graph), captured.constants)
    assert caught.value.code == "IRC334"


def test_generators_that_were_one_and_are_several_are_planned_anew() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)
            self.a = self.b = torch.Generator()

        def forward(self, x: Tensor, c: torch.Generator, d: torch.Generator) -> Tensor:
            y = self.lin(x)
            for generator in (self.a, c, self.b, d):
                y = (y * torch.rand(x.shape, generator=generator)).sin()
            return y

    def seeded(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    x, shared = torch.randn(8, 16), torch.Generator()
    original = Drawing()
    fitted = irc.optimize(copy.deepcopy(original), (x, shared, shared), "100%", costs="analytic")
    for module in (original, fitted):
        module.a, module.b = seeded(1), seeded(2)
    for seeds in ((3, 3), (3, 4)):
        first = [fitted(x, *map(seeded, seeds)), original(x, *map(seeded, seeds))]
        assert torch.equal(*first)
    tied = [module(x, module.a, module.b) for module in (fitted, original)]
    assert torch.equal(*tied)


@pytest.mark.parametrize("seed", ["torch.manual_seed", "torch._C.default_generator.manual_seed"])
def test_a_refusal_that_the_forward_catches_is_raised_all_the_same(seed: str) -> None:
    class Seeding(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with contextlib.suppress(Exception):
                operator.attrgetter(seed.removeprefix("torch."))(torch)(3)
            return super().forward(input)

    with pytest.raises(irc.UnsupportedError) as raised:
        irc.optimize(Seeding(4, 4), torch.randn(2, 4), "100%", costs="analytic")
    assert raised.value.code == "IRC338"
