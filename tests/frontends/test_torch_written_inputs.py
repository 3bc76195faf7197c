"""A forward that writes into what has a gradient, where autograd does not see it: in place, as eager does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_files import planned_folder
from support.torch_cases import Model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import irc
from irc.compiler.artifact import read_folder
from irc.frontends.torch import capture
from irc.ir import Region, Trait

TOKENS = torch.tensor([[1, 2, 2], [5, 9, 0]])


def unseen(write: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    def written(weight: Tensor) -> None:
        with torch.no_grad():
            write(weight)

    return written


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "clamp_": unseen(lambda w: w.clamp_(-0.2, 0.2)),
    "two": unseen(lambda w: w.mul_(0.5).add_(0.01)),
    "copy_": unseen(lambda w: w.copy_(w / w.norm())),
    "quantized": unseen(lambda w: w.copy_((w * 8).round() / 8)),
    "normal_": unseen(lambda w: w.normal_()),
    "itself": unseen(lambda w: w.mul_(w)),
    "transposed": unseen(lambda w: w.t().mul_(0.5)),
    "row": unseen(lambda w: w[0].zero_()),
    "out": unseen(lambda w: torch.clamp(w, -0.2, 0.2, out=w)),
    "data": lambda w: w.data.clamp_(-0.2, 0.2),
    "data twice": lambda w: (w.data.mul_(0.9), w.data.add_(0.01)),
    "data assigned": lambda w: setattr(w, "data", w.data.__imul__(0.9)),
    "data restored": lambda w: (old := w.data.clone(), w.data.copy_(old * 2), w.data.copy_(old)),
    "detached": lambda w: w.detach().mul_(0.9),
    "data and more": lambda w: (w.data.mul_(0.9), WRITES["clamp_"](w)),
}


class Written(nn.Module):
    """Reads a weight before and after it is written."""

    def __init__(self, write: Callable[[Tensor], Any], before: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6) / 4)
        self.write, self.before = write, before

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        y = self.before(x, self.weight)
        self.write(self.weight)
        return (x @ self.weight).tanh() + y


class Normed(nn.Module):
    def __init__(self, *, is_tied: bool = False, is_frozen: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6, max_norm=1.0), nn.Linear(6, 10, bias=False)
        self.table.weight.requires_grad_(not is_frozen)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).tanh())


def bag(m: Any, tokens: Tensor) -> Tensor:
    return m.table(tokens)


def twice(m: Any, tokens: Tensor) -> Tensor:
    return m.table(tokens) + m.table(tokens.flip(0)) * m.table.weight.sum()


EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "plain": Normed,
    "tied": lambda: Normed(is_tied=True),
    "frozen": lambda: Normed(is_frozen=True),
    "bag": lambda: Model(bag, table=nn.EmbeddingBag(10, 6, max_norm=1.0)),
    "twice": lambda: Model(twice, table=nn.Embedding(10, 6, max_norm=1.0, padding_idx=0)),
}


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = make()
    return module, copy.deepcopy(module)


def fit(module: nn.Module, *args: Tensor, **options: Any) -> Any:
    return irc.optimize(module, args, "100%", costs="analytic", time_limit=1, **options)


def numbers(module: nn.Module) -> list[Tensor]:
    gradients = (p.grad for p in module.parameters() if p.grad is not None)
    return [tensor.clone() for tensor in (*module.parameters(), *gradients)]


def trained(module: nn.Module, run: Any, calls: list[Tensor]) -> list[Tensor]:
    """Returns the numbers after each of three steps, and after a forward without gradients."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    results: list[Tensor] = []
    for x in calls:
        result = run(x)
        results += [result.detach().clone(), *numbers(module)]
        result.square().sum().backward()
        results += numbers(module)
        optimizer.step()
        optimizer.zero_grad()
    run.eval()
    with torch.no_grad():
        return [*results, run(calls[0]).clone(), *numbers(module)]


def assert_same(mine: list[Tensor], its: list[Tensor]) -> None:
    assert len(mine) == len(its)
    assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_embeddings_with_a_largest_norm_train_as_eager(kind: str) -> None:
    module, twin = pair(EMBEDDINGS[kind])
    before = numbers(module)
    fitted, calls = fit(module, TOKENS), [TOKENS, TOKENS.flip(1), TOKENS]
    assert_same(numbers(module), before)
    assert_same(trained(module, fitted, calls), trained(twin, twin, calls))


@pytest.mark.parametrize("kind", WRITES)
def test_writes_that_autograd_does_not_see_train_as_eager(kind: str) -> None:
    module, twin = pair(lambda: Written(WRITES[kind], lambda x, w: x * w.sum()))
    calls = [torch.randn(4, 6) for _ in range(3)]
    weight, other = (each.get_parameter("weight") for each in (module, twin))
    fitted, place, before = fit(module, calls[0]), weight.data_ptr(), weight._version - other._version
    assert_same(trained(module, fitted, calls), trained(twin, twin, calls))
    assert module.get_parameter("weight") is weight and weight.data_ptr() == place
    assert weight._version - other._version == before or not kind.startswith("data")


def test_an_argument_that_has_a_gradient_is_written() -> None:
    write = WRITES["clamp_"]
    module, twin = pair(lambda: Model(lambda m, x: (write(x), m.lin(x))[1], lin=nn.Linear(6, 6)))
    results: list[list[Tensor]] = []
    for model, run in ((module, fit(module, torch.randn(4, 6, requires_grad=True) * 1)), (twin, twin)):
        leaf = torch.ones(4, 6, requires_grad=True)
        x = leaf * 3
        run(x).square().sum().backward()
        assert leaf.grad is not None
        results.append([x.detach(), leaf.grad, *numbers(model)])
    assert_same(*results)


def test_a_table_is_written_in_its_place() -> None:
    table = nn.Embedding(1000, 8, max_norm=1.0)
    graph = capture(Model(bag, table=table), (TOKENS,)).graph
    forward = (node for node in graph.operations if node.region is Region.FORWARD)
    assert all(s.nbytes < table.weight.nbytes for node in forward for s in graph.allocates(node))
    fitted = fit(Model(bag, table=table), TOKENS)
    before = table.weight.detach().clone()
    assert irc.measured_peak_bytes(fitted, (TOKENS,)) <= fitted.plan.peak_bytes
    assert torch.equal(table.weight, before)


# ---------------------------------------------------------------------- other orders of forward and backward


def forwards_first(run: Any, module: nn.Module, calls: list[Tensor]) -> list[Tensor]:
    losses = [run(x).square().sum() for x in calls]
    for loss in losses:
        loss.backward()
    return numbers(module)


def evaluation_between(run: Any, module: nn.Module, calls: list[Tensor]) -> list[Tensor]:
    loss = run(calls[0]).square().sum()
    with torch.no_grad():
        run(calls[1])
    loss.backward()
    return numbers(module)


def step_between(run: Any, module: nn.Module, calls: list[Tensor]) -> list[Tensor]:
    loss = run(calls[0]).square().sum()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9)
    loss.backward()
    return numbers(module)


@pytest.mark.parametrize("order", [forwards_first, evaluation_between, step_between])
@pytest.mark.parametrize("kind", ["bag", "tied", "clamp_", "data", "data restored"])
def test_another_write_before_backward_is_what_it_is_in_eager(kind: str, order: Callable[..., Any]) -> None:
    """Eager's numbers, or the error that autograd raises."""
    is_table = kind in EMBEDDINGS
    module, twin = pair(EMBEDDINGS[kind] if is_table else lambda: Written(WRITES[kind], lambda x, w: x))
    calls = [TOKENS, TOKENS.flip(1)] if is_table else [torch.randn(4, 6) for _ in range(2)]
    fitted = fit(module, calls[0], forwards_in_flight=2)
    try:
        expected = order(twin, twin, calls)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            order(fitted, module, calls)
    else:
        assert_same(order(fitted, module, calls), expected)


@pytest.mark.parametrize(("kind", "is_pinned"), [("plain", True), ("tied", False)])
def test_what_no_version_guards_runs_once(kind: str, is_pinned: bool) -> None:
    graph = capture(EMBEDDINGS[kind](), (TOKENS,)).graph
    rows = next(node for node in graph.nodes if node.op == "aten.embedding.default")
    assert (Trait.PINNED in rows.traits) is is_pinned


# ---------------------------------------------------------------------- other roads


@pytest.mark.parametrize("road", ["backend", "lengths", "pickled", "gradients added"])
def test_other_roads_write_as_eager(road: str) -> None:
    module, twin = pair(EMBEDDINGS["tied"])
    if road == "backend":
        torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
        fitted: Any = torch.compile(module, backend=irc.backend(1 << 30, costs="analytic"))
    elif road == "lengths":
        fitted = fit(module, TOKENS, dynamic={0: {1: (2, 4)}})
    elif road == "pickled":
        fitted = module = pickle.loads(pickle.dumps(fit(module, TOKENS)))
    else:
        fitted = fit(module, TOKENS, accumulate_gradients=True)
    assert_same(
        trained(module, fitted, [TOKENS, TOKENS.flip(1)]), trained(twin, twin, [TOKENS, TOKENS.flip(1)])
    )


def test_versions_do_not_count_writes_into_data_in_a_graph_of_dynamo() -> None:
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    module, twin = pair(lambda: Written(WRITES["data twice"], lambda x, w: x))
    calls = [torch.randn(4, 6) for _ in range(2)]
    fitted: Any = torch.compile(module, backend=irc.backend(1 << 30, costs="analytic"))
    assert_same(evaluation_between(fitted, module, calls), evaluation_between(twin, twin, calls))


MODEL = """
import torch
from torch import nn


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 6, max_norm=1.0), nn.Linear(6, 4)), torch.arange(6).view(2, 3)
"""


def test_a_written_folder_writes_as_eager(tmp_path: Path) -> None:
    models = tmp_path / "normed.py"
    models.write_text(MODEL)
    folder = read_folder(planned_folder(models, "normed", "--budget", "100%", "--time-limit", "1"))
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Embedding(10, 6, max_norm=1.0), nn.Linear(6, 4))
    tokens, module = torch.arange(6).view(2, 3), folder.module()
    for run in (module, twin):
        result: Any = run(tokens)
        (result[0] if isinstance(result, list) else result).square().sum().backward()
    order = [name for name, _ in twin.named_parameters()]
    for values in (lambda p: p, lambda p: p.grad):
        mine = {name: values(parameter) for name, parameter in module.named_parameters()}
        assert_same([mine[name] for name in order], [values(p) for p in twin.parameters()])


# ---------------------------------------------------------------------- refusals


def test_numbers_that_backward_needs_are_read_from_a_copy() -> None:
    write = unseen(lambda w: w.mul_(0.9))
    with pytest.raises(irc.UnsupportedError, match=r"IRC337.*backward reads") as caught:
        fit(Written(write, lambda x, w: x @ w), torch.randn(4, 6))
    assert "a copy (clone())" in str(caught.value.help)
    module, twin = pair(lambda: Written(write, lambda x, w: x @ w.clone()))
    x = torch.randn(4, 6)
    assert_same(trained(module, fit(module, x), [x]), trained(twin, twin, [x]))


def test_parts_of_data_are_written_without_gradients() -> None:
    def write(weight: Tensor) -> None:
        weight.data[0] = 0

    x = torch.randn(4, 6)
    with pytest.raises(irc.UnsupportedError, match=r"IRC336.*parameter weight") as caught:
        fit(Written(write, lambda x, w: x), x)
    assert "under torch.no_grad()" in str(caught.value.help)
    module, twin = pair(lambda: Written(unseen(write), lambda x, w: x))
    assert_same(trained(module, fit(module, x), [x]), trained(twin, twin, [x]))


@pytest.mark.parametrize("is_within", [False, True])
def test_a_cast_that_autocast_keeps_is_refused(is_within: bool) -> None:
    """In eager the second product within, or the second forward around, reads the cast of the old weight."""
    write = unseen(lambda w: w.mul_(0.9))
    options: dict[str, bool] = {}

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, **options) if is_within else nullcontext():
            y = nn.functional.linear(x, m.linear.weight) if is_within else x
            write(m.linear.weight)
            return nn.functional.linear(y, m.linear.weight).float()

    def run(step: Callable[[], Any]) -> Any:
        with nullcontext() if is_within else torch.autocast("cpu", torch.bfloat16, **options):
            return step()

    x = torch.randn(4, 6)
    module, twin = pair(lambda: Model(forward, linear=nn.Linear(6, 6)))
    with pytest.raises(irc.UnsupportedError, match=r"IRC336.*parameter linear.weight") as caught:
        run(lambda: fit(copy.deepcopy(module), x))
    assert "cache_enabled=False" in str(caught.value.help)
    options["cache_enabled"] = False
    fitted = run(lambda: fit(module, x))
    for each in (fitted, twin):
        result = run(lambda each=each: each(x))
        result.square().sum().backward()
    assert_same(numbers(module), numbers(twin))


def test_a_checkpoint_that_writes_what_it_reads_is_refused() -> None:
    def forward(m: Any, tokens: Tensor) -> Any:
        return checkpoint(m.table, tokens, use_reentrant=False)

    with pytest.raises(irc.UnsupportedError, match=r"IRC339.*writes parameter table.weight") as caught:
        fit(Model(forward, table=nn.Embedding(10, 6, max_norm=1.0)), TOKENS)
    assert "without the checkpoint" in str(caught.value.help)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["clamp_", "data", "row", "buffer"])
def test_a_checkpoint_before_a_write_over_what_it_reads_is_refused(kind: str, is_reentrant: bool) -> None:
    """Its backward in eager reads the new numbers; without the checkpoint the plan trains as eager."""
    calls = [torch.randn(4, 6) for _ in range(2)]
    write = WRITES["row" if kind == "buffer" else kind]
    options: dict[str, Any] = {"use_reentrant": is_reentrant}

    def part(m: Any, x: Tensor) -> Tensor:
        return (x + m.weight.sum(0)).tanh().exp()

    def forward(m: Any, x: Tensor) -> Any:
        x = m.linear(x)
        y = checkpoint(part, m, x, **options) if options else part(m, x)
        write(m.weight)
        return y

    def made() -> nn.Module:
        module = Model(forward, linear=nn.Linear(6, 6), weight=nn.Parameter(torch.randn(6, 6)))
        if kind == "buffer":
            del module.weight
            module.register_buffer("weight", torch.randn(6, 6))
        return module

    module, twin = pair(made)
    with pytest.raises(irc.UnsupportedError, match=r"IRC339.*writes over afterwards") as caught:
        fit(copy.deepcopy(module), calls[0])
    assert "without the checkpoint" in str(caught.value.help)
    options.clear()
    assert_same(trained(module, fit(module, calls[0]), calls), trained(twin, twin, calls))


def written_view(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    y.view(-1)[::2].mul_(2)
    return checkpoint(lambda y: (y * 2).tanh().exp(), y, use_reentrant=False)  # pyright: ignore


def checked(m: Any, x: Tensor) -> Tensor:
    x = m.norm(m.linear(x))
    return torch.linalg.inv(x.t() @ x + torch.eye(6)) @ x.t()


@pytest.mark.parametrize("forward", [written_view, checked])
def test_writes_before_a_checkpoint_and_those_of_norms_beside_checks_are_no_such_writes(forward: Any) -> None:
    module, twin = pair(lambda: Model(forward, linear=nn.Linear(6, 6), norm=nn.BatchNorm1d(6)))
    x = torch.randn(8, 6, requires_grad=True)
    ours = fit(module, x)
    results = [each(x) for each in (ours, twin)]
    for result in results:
        result.square().sum().backward()
    gradients = [[p.grad for p in each.parameters() if p.grad is not None] for each in (ours, twin)]
    assert torch.equal(*results) and all(map(torch.equal, *gradients))
