"""`irc.backend(outside="measured")`: what Dynamo leaves to Python counts, and refused models train."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import random
from collections.abc import Callable, Generator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import irc
from irc.compiler.dynamo.backend import Backend
from irc.compiler.dynamo.outside_meter import Outside, OutsideMeter, Stretch
from irc.passes.costs.allocations import peak_bytes

# Dynamo looks at `.grad` of what a graph break hands on, and warns of what it leaves to Python.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*Dynamo"),
]
WIDTH, BATCH = 16, 32
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _fresh() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    gc.collect()  # ends recordings


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Net(nn.Module):
    """Three blocks; what is between them is the subclasses'."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = layers(), layers(), layers()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


def compiled(model: nn.Module, budget: int | str = "1GiB") -> tuple[Any, Backend]:
    backend = irc.backend(budget, outside="measured", costs="analytic")
    return torch.compile(model, backend=backend), backend


def step(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    model(x).sum().backward()


class Greedy(Net):
    """Its middle runs in eager, and takes some memory for a moment."""

    @torch.compiler.disable
    def between(self, x: Tensor) -> Tensor:
        torch.empty(MIB, dtype=torch.uint8)
        return x.sin()

    def forward(self, x: Tensor) -> Tensor:
        between: Any = self.between
        return self.c(between(self.a(x)))


def test_what_runs_outside_of_graphs_is_measured_in_the_first_steps_and_comes_off_the_budget() -> None:
    model, x = Greedy(), torch.randn(BATCH, WIDTH)
    run, backend = compiled(model)
    assert backend.outside_bytes is None
    for _ in range(3):
        step(run, x)
        model.zero_grad()
    assert backend.outside_bytes is not None and 0.9 * MIB < backend.outside_bytes <= MIB
    static = sum(t.nbytes for t in (*model.parameters(), x))
    step(run, x)
    model.zero_grad()
    assert "outside of graphs" in backend.summary()
    measured = peak_bytes(lambda: step(run, x)) + static
    assert MIB < measured <= backend.latest_peak_bytes < 1.1 * MIB


def test_a_budget_without_room_for_what_is_outside_is_refused_once_that_is_measured() -> None:
    model, x = Greedy(), torch.randn(BATCH, WIDTH)
    run, _ = compiled(model, MIB // 2)
    step(run, x)
    model.zero_grad()
    with pytest.raises(irc.BudgetError, match="IRC540") as raised:
        step(run, x)
    assert raised.value.minimum_bytes is not None and raised.value.minimum_bytes > MIB
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    model.zero_grad()
    budget = MIB * 5 // 4
    run, backend = compiled(model, budget)
    for _ in range(4):
        step(run, x)
        model.zero_grad()
    assert MIB < backend.latest_peak_bytes <= budget


class Halves(torch.autograd.Function):
    """Two residual halves of which backward computes the inputs again, as in RevNet."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, blocks: list[tuple[nn.Module, nn.Module]]) -> Any:
        with torch.no_grad():
            for f, g in blocks:
                x = x + f(y)
                y = y + g(x)
        ctx.blocks, ctx.out = blocks, (x.detach(), y.detach())
        return x, y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, y = ctx.out
        to_x, to_y = gradients
        for f, g in reversed(ctx.blocks):
            y, to_x = undone(g, x, y, to_x, to_y)
            x, to_y = undone(f, y, x, to_y, to_x)
        return to_x, to_y, None


def undone(block: nn.Module, read: Tensor, written: Tensor, to_read: Tensor, to_written: Tensor) -> Any:
    """What was there before a block was added to it, and the gradient of what the block read."""
    with torch.enable_grad():
        leaf = read.detach().requires_grad_()
        change = block(leaf)
        change.backward(to_written)
    assert leaf.grad is not None
    return written - change.detach(), to_read + leaf.grad


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 128), nn.Linear(128, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2, 1)
        function: Any = Halves.apply
        a, b = function(a, b, list(zip(self.blocks[::2], self.blocks[1::2], strict=True)))
        return self.last(torch.cat([a, b], 1))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo itself
def test_a_backward_outside_of_graphs_counts_while_it_runs_and_not_beside_the_graphs() -> None:
    model, x = Reversible(), torch.randn(8 * BATCH, WIDTH)
    static = sum(t.nbytes for t in (*model.parameters(), x))
    eager_bytes = peak_bytes(lambda: step(model, x)) + static
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with pytest.raises(irc.UnsupportedError):
        irc.optimize(model, (x,), eager_bytes, costs="analytic")
    assert all(parameter.grad is None for parameter in model.parameters())  # nor traced ones
    run, backend = compiled(model, eager_bytes)
    for _ in range(3):
        step(run, x)
        assert all(
            torch.equal(parameter.grad, gradient)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True)
            if parameter.grad is not None and gradient is not None
        )
        model.zero_grad()
    measured = peak_bytes(lambda: step(run, x)) + static
    assert measured <= backend.latest_peak_bytes == backend.peak_bytes <= eager_bytes
    assert backend.outside_bytes is not None and backend.outside_bytes > eager_bytes // 3


def test_what_the_loop_takes_between_two_steps_counts_as_it_is() -> None:
    model, x = Net(), torch.randn(BATCH, WIDTH)
    run, backend = compiled(model)
    for _ in range(4):
        step(run, x)
        model.zero_grad()
        torch.empty(MIB, dtype=torch.uint8)
    assert backend.outside_bytes == 0
    assert MIB < backend.latest_peak_bytes < 1.2 * MIB
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    run, _ = compiled(model, MIB // 2)
    step(run, x)
    torch.empty(MIB, dtype=torch.uint8)
    with pytest.raises(irc.BudgetError, match=r"IRC540.*between the last backward") as raised:
        step(run, x)
    assert raised.value.minimum_bytes is not None and raised.value.minimum_bytes > MIB


def test_the_state_that_an_optimizer_makes_in_its_first_step_does_not_count() -> None:
    model, x = Net(), torch.randn(BATCH, WIDTH)
    run, backend = compiled(model)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        step(run, x)
        optimizer.step()
        optimizer.zero_grad()
    state = sum(t.nbytes for values in optimizer.state.values() for t in values.values())
    assert backend.outside_bytes is not None and backend.outside_bytes < state / 4


def test_a_graph_that_no_plan_can_hold_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Writes(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            print(end="")
            x[:, 0] = 0  # a result of the graph before
            return self.c(x)

    model, x = Writes(), torch.randn(BATCH, WIDTH)
    twin = copy.deepcopy(model)
    run, backend = compiled(model)
    for _ in range(3):
        step(run, x)
    for _ in range(3):
        step(twin, x)
    assert "runs as it is, since no plan can hold it: IRC336" in caplog.text
    assert_same(model, twin)
    assert len(backend.plans) == 1


def test_a_constant_of_a_graph_comes_behind_the_gradients_of_its_results() -> None:
    class Constant(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([torch.tensor([]), self.a(x)])
            print(end="")
            return self.c(x)

    model, x = Constant(), torch.randn(BATCH, WIDTH)
    twin = copy.deepcopy(model)
    run, _ = compiled(model)
    step(run, x)
    step(twin, x)
    assert_same(model, twin)


def test_a_session_of_the_users_profiler_is_not_ended() -> None:
    model, x = Greedy(), torch.randn(BATCH, WIDTH)
    run, backend = compiled(model)
    with torch.profiler.profile(profile_memory=True) as session:
        step(run, x)
        step(run, x)
    names = [event.name for event in session.events() or ()]
    assert names.count("aten::sin") == 2 and backend.outside_bytes is None
    step(run, x)
    with torch.profiler.profile(profile_memory=True) as session:  # the step is recorded already
        step(run, x)
    assert [event.name for event in session.events() or ()].count("aten::sin") == 1
    for _ in range(3):
        step(run, x)
    assert backend.outside_bytes is not None and backend.outside_bytes > MIB // 2


def test_a_recording_ends_with_the_meter_that_began_it() -> None:
    is_enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # pyright: ignore
    meter = OutsideMeter()
    meter.begin("cpu", 10)
    assert meter.is_recording and is_enabled()
    del meter
    assert not is_enabled()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_recording_ends_before_a_fork_whose_child_could_not_end_it() -> None:
    meter = OutsideMeter()
    meter.begin("cpu", 0)
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    assert child.exitcode == 0 and not meter.is_recording
    meter.begin("cpu", 0)
    assert meter.is_recording  # the next step is measured


def test_a_tensor_as_large_as_a_mark_spoils_one_recording_alone() -> None:
    class Collides(Greedy):
        @torch.compiler.disable
        def between(self, x: Tensor) -> Tensor:
            torch.empty(1_000_033, dtype=torch.uint8)
            return x.sin()

    run, backend = compiled(Collides())
    for _ in range(4):
        step(run, torch.randn(BATCH, WIDTH))
    assert backend.outside_bytes is not None and backend.outside_bytes > 990_000


def test_a_meter_compares_each_stretch_with_what_was_predicted() -> None:
    meter, held = OutsideMeter(), list[Tensor]()

    def take(nbytes: int) -> None:
        held.append(torch.empty(nbytes, dtype=torch.uint8))

    while gc.collect():  # earlier tests' garbage, and its finalizers', would end while the meter counts
        pass
    meter.begin("cpu", 1000)
    meter.mark(Stretch.FORWARD, 1500)
    take(700)  # 200 more than predicted
    with meter.paused():
        take(5000)
    meter.mark(Stretch.WAITING)
    meter.settle(1900)
    take(300)  # 100 more than predicted
    held.clear()
    meter.mark(Stretch.WAITING)
    take(50)
    assert meter.end(alive_bytes=1030, gone_bytes=10) and meter.is_settled
    assert meter.outside == Outside(210, 10, 10, 110, between_bytes=1050)  # 10 that nobody knows of
    meter.expect_change()
    meter.begin("cpu", 1000)
    meter.mark(Stretch.BACKWARD, 0)
    meter.mark(Stretch.WAITING)
    assert meter.end(1000, 0) and not meter.is_settled  # a graph was new: the next step is measured too
    assert meter.outside == Outside(210, 10, 1000, 110, between_bytes=1050)
    assert meter.outside.beside_bytes == 1000


def test_a_recording_that_no_step_adds_to_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = OutsideMeter()
    meter.begin("cpu", 0)
    gc.collect()
    assert meter.is_recording
    monkeypatch.setattr("irc.compiler.dynamo.outside_meter._IDLE_SECONDS", -1)
    gc.collect()
    assert not meter.is_recording and not meter.is_settled


class Holds(Net):
    """Code before the first graph makes what code behind the last one reads."""

    held: Tensor | None = None

    @torch.compiler.disable
    def before(self) -> None:
        self.held = torch.ones(MIB, dtype=torch.uint8)

    @torch.compiler.disable
    def behind(self, x: Tensor) -> Tensor:
        assert self.held is not None
        x, self.held = x * self.held[0], None
        return x

    def forward(self, x: Tensor) -> Tensor:
        before: Any = self.before
        behind: Any = self.behind
        before()
        return behind(self.c(self.a(x)))


def test_what_is_held_from_before_the_first_graph_counts() -> None:
    model, x = Holds(), torch.randn(BATCH, WIDTH)
    run, backend = compiled(model)
    for _ in range(4):
        step(run, x)
        model.zero_grad()
    static = sum(t.nbytes for t in (*model.parameters(), x))
    measured = peak_bytes(lambda: step(run, x)) + static
    assert MIB < measured <= backend.latest_peak_bytes


def test_a_large_first_batch_is_not_forgotten_for_small_ones() -> None:
    class Copies(Net):
        @torch.compiler.disable
        def between(self, x: Tensor) -> Tensor:
            x.detach().repeat(1, 64)
            return x.sin()

        def forward(self, x: Tensor) -> Tensor:
            between: Any = self.between
            return self.c(between(self.a(x)))

    model, large, small = Copies(), torch.randn(8 * BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    run, backend = compiled(model)
    for x in (large, small, small, small):
        step(run, x)
        model.zero_grad()
    static = sum(t.nbytes for t in (*model.parameters(), large, small))
    measured = peak_bytes(lambda: step(run, large)) + static
    assert measured <= backend.latest_peak_bytes


# ---------------------------------------------------------------------- what irc.optimize refuses


class ForwardHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_forward_hook(self.note)

    def note(self, _: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(output.detach().sum().item())


class BackwardHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_full_backward_hook(self.note)

    def note(self, _: nn.Module, inputs: Any, outputs: Any) -> None:
        self.seen.append(outputs[0].sum().item())


class Item(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.sum().item() > 0:
            x = self.b(x)
        return self.c(x)


class Nonzero(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        return self.c(x.index_add(0, rows, self.b(x[rows])))


class MaskedSelect(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(x).masked_select(x > 0).sum() + self.b(x).sum()


class ToList(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(torch.cat([self.b(x[k : k + 1]) for k in x[:, 0].topk(2).indices.tolist()]))


class Packed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([8, 5, 3, 2])
        words = self.a(x).view(4, 8, WIDTH)
        packed = nn.utils.rnn.pack_padded_sequence(words, lengths, batch_first=True)
        return self.c(nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])


class PythonsRandom(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if random.random() < 0.5:
            x = self.b(x)
        return self.c(x)


class Average(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(self.a(x)))


class Last(Net):
    """Reads what the last call left."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = x if self.last is None else x + self.last
        self.last = x.detach()
        return self.c(y)


class Seeds(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        torch.manual_seed(3)
        return self.c(nn.functional.dropout(x, 0.3))


class OwnGenerator(Net):
    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator()
        generator.set_state(torch.Generator().manual_seed(1).get_state())
        return self.c(self.a(x) + torch.rand(BATCH, WIDTH, generator=generator))


class Opaque(Net):
    """A trace cannot see into tensors of oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x).to_mkldnn().to_dense())


def assert_same(model: nn.Module, twin: nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None and other.grad is not None:
            assert torch.equal(parameter.grad.to_dense(), other.grad.to_dense()), name
    for (name, buffer), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(buffer, other), name


REFUSED: dict[type[Net], str] = {
    ForwardHook: "IRC332",
    BackwardHook: "IRC332",
    Item: "IRC332",
    Nonzero: "IRC332",
    MaskedSelect: "IRC332",
    ToList: "IRC332",
    Packed: "IRC332",
    PythonsRandom: "IRC338",
    Average: "IRC332",
    Last: "IRC338",
    Seeds: "IRC338",
    OwnGenerator: "IRC338",
    Opaque: "IRC333",
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "code"), REFUSED.items())
def test_what_is_refused_trains_as_the_refusal_says(kind: type[Net], code: str) -> None:
    model, x = kind(), torch.randn(BATCH, WIDTH)
    twin = kind()
    twin.load_state_dict(model.state_dict())
    with pytest.raises(irc.UnsupportedError, match=code) as raised:
        irc.optimize(kind(), (x,), "1GiB", costs="analytic")
    assert raised.value.help is not None
    assert 'torch.compile(model, backend=irc.backend(budget, outside="measured"))' in raised.value.help
    run, backend = compiled(model)
    static = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    for seed in range(12):  # more often than Dynamo compiles a frame
        states: list[Tensor] = []
        for one in (twin, run):
            torch.manual_seed(seed)
            random.seed(seed)
            one.zero_grad()
            if one is run and backend.outside_bytes is not None:
                assert peak_bytes(lambda: step(run, x)) + static <= backend.latest_peak_bytes
            else:
                step(one, x)
            states.append(torch.get_rng_state())
        assert torch.equal(*states)
        assert_same(model, twin)
        assert model.seen == twin.seen
    assert backend.plans and backend.outside_bytes is not None


class Appends(Net):
    """Changes what Dynamo compiles for in each step."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(0.0)
        return self.c(self.a(x))


@pytest.mark.parametrize("outside", ["measured", None])
def test_a_frame_that_dynamo_gives_up_compiling_is_refused(outside: str | None) -> None:
    model, x = Appends(), torch.randn(BATCH, WIDTH)
    backend = irc.backend("1GiB", outside=outside, costs="analytic")
    run: Any = torch.compile(model, backend=backend)
    with torch._dynamo.config.patch(recompile_limit=2):  # pyright: ignore
        for _ in range(2):
            step(run, x)
        with pytest.raises(irc.UnsupportedError, match="IRC545"):
            step(run, x)


@pytest.mark.parametrize("outside", ["measured", None])
def test_a_size_that_dynamo_gave_up_in_an_evaluation_is_refused_in_training(outside: str | None) -> None:
    model, sizes = Net(), [torch.randn(n, WIDTH) for n in (2, 3, 4)]
    backend = irc.backend("1GiB", outside=outside, costs="analytic")
    run: Any = torch.compile(model, backend=backend, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):  # pyright: ignore
        for x in sizes[:2]:
            step(run, x)
        with torch.no_grad():
            run(sizes[2])
        step(run, sizes[0])
        step(run, sizes[1])
        for _ in range(2):  # caught or not, it never trains without a budget
            with pytest.raises(irc.UnsupportedError, match=r"IRC545.*compiles a frame 2 times") as raised:
                step(run, sizes[2])
            assert raised.value.help is not None and "recompile_limit above 2" in raised.value.help
            del raised
        step(run, sizes[0])
    del run, backend
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    gc.collect()
    step(model, sizes[2])  # in eager, which is free to


class Exits(Net):
    """A loop that Dynamo leaves to Python, and so all that the loop calls."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            x = layer(x)
            if x.abs().max() > 0.9:
                break
        return x


def test_parts_of_a_model_without_a_graph_are_compiled_in_its_place(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Exits(), torch.randn(BATCH, WIDTH)
    twin = copy.deepcopy(model)
    run, backend = compiled(model)
    with caplog.at_level("WARNING", logger="irc"):
        step(run, x)
    assert "model.layers[k] = torch.compile(model.layers[k], backend=backend)" in caplog.text
    assert not backend.plans
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    model.zero_grad()
    backend = irc.backend("1GiB", outside="measured", costs="analytic")
    for name, part in list(model.named_children()):
        setattr(model, name, torch.compile(part, backend=backend))
    for _ in range(6):  # the recording of the first backend ends meanwhile
        for one in (model, twin):
            one.zero_grad()
            step(one, x)
    assert_same(model, twin)
    assert backend.plans and backend.outside_bytes is not None


# ---------------------------------------------------------------------- nothing is planned


class Masked(Net):
    """One graph, whose sizes depend on data."""

    def forward(self, x: Tensor) -> Tensor:
        inside = x[:, 0] < 0.5
        out = torch.zeros_like(x)
        out[inside] = super().forward(x[inside])
        return out


class Sparse(Net):
    """One graph, in whose backward two sparse tensors are added."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, 0] > 0).long()
        return super().forward(self.words(ids) + self.words(ids + 1))


class Diagonal(Net):
    """Torch's tracer takes no write into a diagonal of a view."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).clone()
        y[:2, :2].fill_diagonal_(0)
        return self.c(y)


class RandomInLoop(Net):
    """A loop that Dynamo leaves to Python, and so all that the loop calls."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            if random.random() < 0.7:
                x = layer(x)
        return self.a(x)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Masked, "IRC332"),
        (Sparse, "IRC334"),
        (Diagonal, "IRC333"),
        (RandomInLoop, "IRC338"),
        (Exits, "IRC332"),
    ],
)
def test_a_step_of_which_nothing_is_planned_runs_as_eager_does_and_is_measured(
    kind: type[Net], code: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = kind(), torch.randn(BATCH, WIDTH)
    twin = copy.deepcopy(model)
    with pytest.raises(irc.UnsupportedError, match=code) as raised:
        irc.optimize(kind(), (x,), "1GiB", costs="analytic")
    assert raised.value.help is not None
    assert 'torch.compile(model, backend=irc.backend(budget, outside="measured"))' in raised.value.help
    run, backend = compiled(model)
    with caplog.at_level("WARNING", logger="irc"):
        for seed in range(4):
            for one in (twin, run):
                random.seed(seed)
                one.zero_grad()
                step(one, x)
            assert_same(model, twin)
    assert caplog.text.count("no graph is planned of the step") == 1
    assert not backend.plans and backend.outside_bytes is not None


def test_a_step_of_which_nothing_is_planned_is_refused_over_the_budget() -> None:
    x = torch.randn(BATCH, WIDTH)
    for spare_bytes in (0, -1):
        model = Masked()
        model.zero_grad()
        static = sum(t.nbytes for t in (*model.parameters(), x))
        budget = peak_bytes(lambda model=model: step(model, x)) + static + spare_bytes
        model.zero_grad()
        backend = irc.backend(budget, outside="measured", costs="analytic")
        run: Any = torch.compile(model, backend=backend)
        for _ in range(2):
            step(run, x)
            model.zero_grad()
        if spare_bytes == 0:
            step(run, x)
            assert backend.peak_bytes == budget and "as in eager" in backend.summary()
            continue
        for _ in range(2):
            with pytest.raises(irc.BudgetError, match=r"IRC540.*no graph is planned") as raised:
                step(run, x)
            assert raised.value.minimum_bytes == budget + 1


@pytest.mark.parametrize(("kind", "code"), [(Masked, "IRC332"), (Sparse, "IRC334")])
def test_a_refusal_of_the_backend_advises_its_own_option(kind: type[Net], code: str) -> None:
    x = torch.randn(BATCH, WIDTH)
    run: Any = torch.compile(kind(), backend=irc.backend("1GiB", costs="analytic"))
    with pytest.raises(irc.UnsupportedError, match=code) as raised:
        step(run, x)
    assert raised.value.help is not None and "torch.compile" not in raised.value.help
    assert 'give irc.backend outside="measured"' in raised.value.help
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    run, _ = compiled(kind())
    step(run, x)


class Numpys(Net):
    """Draws by numpy within the forward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * torch.from_numpy(numpy.random.rand(WIDTH).astype("float32")))


def test_numpy_draws_its_own_numbers_within_a_compiled_forward() -> None:
    model, x = Numpys(), torch.randn(BATCH, WIDTH)
    twin = copy.deepcopy(model)
    run, backend = compiled(model)
    for one in (twin, run):
        torch.manual_seed(0)
        numpy.random.seed(0)
        for _ in range(2):
            step(one, x)
    assert_same(model, twin)
    assert len(backend.plans) == 2
    assert not torch._dynamo.config.use_numpy_random_stream  # pyright: ignore


def test_numpys_numbers_in_a_graph_are_refused_and_the_cure_works() -> None:
    model, x = Numpys(), torch.randn(BATCH, WIDTH)
    options: Any = {"budget": "1GiB", "outside": "measured", "costs": "analytic"}
    run: Any = torch.compile(model, backend="irc", options=options)
    with pytest.raises(irc.UnsupportedError, match=r"IRC338.*numpy\.random") as raised:
        run(x)
    assert raised.value.help is not None and "use_numpy_random_stream = True" in raised.value.help
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    twin = copy.deepcopy(model)
    with torch._dynamo.config.patch(use_numpy_random_stream=True):  # pyright: ignore
        for one in (twin, run):
            numpy.random.seed(0)
            step(one, x)
    assert_same(model, twin)


class Clipping(Net):
    """Looks at its data: one branch is rare, and one batch is not valid."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 100:
            raise ValueError("too large")
        if x.abs().max() > 10:
            x = x.clamp(-2, 2)
        return self.c(self.b(self.a(x)))


def test_where_a_branch_is_refused_by_either_name_the_cure_trains_all_batches() -> None:
    model, x = Clipping(), torch.randn(BATCH, WIDTH)
    with pytest.raises(irc.UnsupportedError, match="IRC332") as refused:
        irc.optimize(model, (x,), "1GiB", costs="analytic")
    fitted = irc.optimize(model, (x,), "1GiB", costs="analytic", specialize_branches=True)
    with pytest.raises(irc.IrcError, match="IRC347") as branched:
        fitted(20 * x)
    cure = 'train with torch.compile(model, backend=irc.backend(budget, outside="measured"))'
    assert cure in (refused.value.help or "") and cure in (branched.value.help or "")
    assert "specialize_branches" not in (branched.value.help or "")
    original = copy.deepcopy(model)
    ours, _ = compiled(model)
    for batch in (x, 20 * x, x):
        step(ours, batch)
        step(original, batch)
        for p, q in zip(model.parameters(), original.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="too large"):
        ours(1000 * x)
