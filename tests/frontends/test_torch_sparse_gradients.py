"""Embeddings with `sparse=True`: their gradients are eager's sparse tensors, in eager's memory."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import irc
from irc.compiler.artifact import read_folder, write_folder
from irc.compiler.model_source import load, training_loss
from irc.compiler.optimize import optimize_module
from irc.compiler.request import Request
from irc.compiler.source import Source
from irc.ir import UnsupportedError, UsageError
from irc.torch_support.allocated import allocated_bytes, dense_parts

ROWS, WIDTH = 300, 16


class Tables(nn.Module):
    """Two tables, whose rows stand in one tensor as recommenders have them: the ids of one have an offset."""

    def __init__(self, *, sparse: bool = True, width: int = WIDTH) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.items = nn.Embedding(ROWS, width, sparse=sparse)
        self.offsets = nn.Buffer(torch.tensor([0, 100]))
        self.head = nn.Sequential(nn.Linear(WIDTH + width, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        many = self.users(users + self.offsets).mean(1)
        return self.head(torch.cat([many, self.items(items)], 1))


class Words(nn.Module):
    """A table whose ids are an argument."""

    def __init__(self, *, sparse: bool = True, padding_idx: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx, sparse=sparse)
        self.head = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids))


class Checkpointed(Words):
    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda each: self.head(self.words(each + 1)), ids, use_reentrant=False)  # pyright: ignore
        return result


class Twice(Words):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids) + self.words(ids + 1))


class Bags(nn.Module):
    def __init__(self, mode: str, *, sparse: bool = True) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode=mode, sparse=sparse)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return self.head(self.bags(ids, offsets, weights).relu())


class Gathered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(32, 200)), nn.Linear(2, 1)

    def forward(self, columns: Tensor) -> Tensor:
        return self.head(torch.gather(self.table, 1, columns, sparse_grad=True))


torch.manual_seed(0)
PAIRS, IDS, FLAT = torch.randint(0, 200, (32, 2)), torch.randint(0, 200, (32,)), torch.randint(0, 200, (80,))
STARTS = torch.tensor([0, 5, 5, 40, 79])
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "computed": (Tables, (PAIRS, IDS)),
    "one column": (lambda: Tables(width=1), (PAIRS, IDS)),
    "argument": (Words, (PAIRS,)),
    "int32": (Words, (PAIRS.int(),)),
    "gathered": (Gathered, (PAIRS,)),
    "checkpoint": (Checkpointed, (PAIRS,)),
    "sums": (lambda: Bags("sum"), (FLAT, STARTS)),
    "means": (lambda: Bags("mean"), (FLAT, STARTS)),
    "rows": (lambda: Bags("mean"), (PAIRS,)),
    "weights": (lambda: Bags("sum"), (FLAT, STARTS, torch.rand(80))),
    "bfloat16": (lambda: Bags("sum").bfloat16(), (FLAT, STARTS, torch.rand(80).bfloat16())),
}


def total(result: Tensor) -> Tensor:
    return result.square().sum()


def gradients_of(module: nn.Module) -> list[Any]:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    flags = [gradient.is_coalesced() if gradient.is_sparse else None for gradient in gradients]
    parts = [part.clone() for gradient in gradients for part in dense_parts(gradient)]
    return [*flags, *(g.shape for g in gradients), *parts]


def trained(
    module: nn.Module, args: tuple[Any, ...], kind: Any, backwards: int = 1, *, to_none: bool = True
) -> list[Any]:
    """Returns all gradients and all parameters after each of three steps."""
    tables = [p for n, p in module.named_parameters() if not n.startswith("head")]
    others = [p for n, p in module.named_parameters() if n.startswith("head")]
    optimizers = [kind(tables, lr=0.1), torch.optim.SGD(others, lr=0.1)]
    seen: list[Any] = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        for _ in range(backwards):
            total(module(*args)).backward()
        seen += gradients_of(module)
        for optimizer in optimizers:
            optimizer.step()
        seen += [p.detach().clone() for p in module.parameters()]
    return seen


def same(a: list[Any], b: list[Any]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own optimizers
@pytest.mark.parametrize("case", CASES)
def test_steps_have_the_gradients_and_weights_of_eager(case: str) -> None:
    make, args = CASES[case]
    module = make()
    fitted = irc.optimize(copy.deepcopy(module), args, "100%", loss=total, costs="analytic")
    for kind in (torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad):
        for backwards, to_none in ((1, True), (2, True), (1, False)):
            ours, theirs = (
                trained(copy.deepcopy(each), args, kind, backwards, to_none=to_none)
                for each in (fitted, module)
            )
            assert same(ours, theirs), (kind, backwards, to_none)
    assert not fitted.plan.roundings


@pytest.mark.parametrize("case", ["computed", "argument", "sums"])
def test_a_step_takes_what_is_predicted_and_leaves_what_eager_leaves(case: str) -> None:
    make, args = CASES[case]
    module = make()
    fitted = irc.optimize(copy.deepcopy(module), args, "100%", loss=torch.sum)
    for budget in (fitted.plan.baseline_peak_bytes, fitted.plan.minimum_budget_bytes):
        fitted = irc.optimize(copy.deepcopy(module), args, budget, loss=torch.sum)
        plan = fitted.plan
        assert irc.measured_peak_bytes(fitted, args, loss=torch.sum) == plan.peak_bytes
        assert plan.baseline_source == "followed" and plan.peak_with_gradients_bytes is None
    eager_bytes = irc.measured_peak_bytes(copy.deepcopy(module), args, loss=torch.sum)
    assert plan.baseline_peak_bytes - plan.baseline_above_eager_bytes <= eager_bytes
    assert plan.peak_bytes <= plan.baseline_peak_bytes
    left: list[int] = []
    for each in (fitted, module):
        torch.sum(each(*args)).backward()
        parts = [part for p in each.parameters() if p.grad is not None for part in dense_parts(p.grad)]
        left.append(sum({p.untyped_storage().data_ptr(): allocated_bytes(p) for p in parts}.values()))
    assert left[0] == left[1] < ROWS * WIDTH * 4  # no table's gradient is dense


def test_a_gradient_that_grows_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    fitted = irc.optimize(Words(), (PAIRS,), "100%", loss=total, costs="analytic")
    for to_none in (True, False, False):
        fitted.zero_grad(set_to_none=to_none)
        total(fitted(PAIRS)).backward()
    assert "IRC567" not in caplog.text
    for _ in range(3):
        total(fitted(PAIRS)).backward()
    assert caplog.text.count("IRC567: the sparse .grad of words.weight grows with each backward") == 1


def test_the_weight_may_be_an_argument() -> None:
    class Looks(nn.Module):
        def forward(self, ids: Tensor, weight: Tensor) -> Tensor:
            return nn.functional.embedding(ids, weight, sparse=True) * 2

    weight = torch.randn(ROWS, 8, requires_grad=True)
    fitted = irc.optimize(Looks(), (IDS, weight), "100%", loss=total, costs="analytic")
    seen: list[Tensor] = []
    for module in (fitted, Looks()):
        weight.grad = None
        total(module(IDS, weight)).backward()
        assert weight.grad is not None and weight.grad.is_sparse
        seen += dense_parts(weight.grad)
    assert same(seen[:2], seen[2:])


def test_the_caller_keeps_ids_as_they_are_until_backward() -> None:
    fitted = irc.optimize(Words(), (PAIRS,), "100%", loss=total, costs="analytic")
    ids = PAIRS.clone()
    result = fitted(ids)
    ids.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: input 0"):
        result.sum().backward()


def test_lengths_and_autocast_train() -> None:
    module = Words()
    fitted = irc.optimize(
        copy.deepcopy(module), (PAIRS.T,), "100%", loss=total, costs="analytic", dynamic={"ids": {1: (8, 40)}}
    )
    for length in (9, 32):
        args = (torch.randint(0, ROWS, (2, length)),)
        ours, theirs = (trained(copy.deepcopy(each), args, torch.optim.SGD) for each in (fitted, module))
        assert same(ours, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        fitted = irc.optimize(copy.deepcopy(module), (PAIRS,), "100%", loss=total, costs="analytic")
    seen: list[list[Any]] = []
    for each in (fitted, module):
        with torch.autocast("cpu", torch.bfloat16):
            loss = total(each(PAIRS))
        loss.backward()
        seen.append(gradients_of(each))
    assert same(*seen)


# ---------------------------------------------------------------------- written plans

FILE = """
import torch
from torch import nn

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(50, 8, sparse=True), nn.Embedding(30, 4, sparse=True)
        self.head = nn.Linear(12, 3)

    def forward(self, i, j):
        return self.head(torch.cat([self.a(i), self.b(j)], 1))

class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, i):
        return self.head(self.a(i)), i * 100

def both():
    return Both(), (torch.randint(1, 20, (6,)), torch.randint(1, 20, (6,)))

def one():
    return One(), (torch.randint(1, 20, (6,)),)
"""


def folder_of(path: Path, name: str) -> tuple[Path, Source]:
    (path / "models.py").write_text(FILE)
    source = Source(f"{path / 'models.py'}:{name}")
    torch.manual_seed(0)
    loaded = load(source)
    request = Request.of("100%", time_limit=1, loss=training_loss, costs="analytic")
    optimized = optimize_module(loaded.module, loaded.args, request)
    write_folder(path / "out", optimized, source, tuple(loaded.args))
    return path / "out", source


def test_written_and_pickled_plans_train(tmp_path: Path) -> None:
    folder, source = folder_of(tmp_path, "both")
    torch.manual_seed(0)
    loaded = load(source)
    module, args = loaded.module, tuple(loaded.args)
    fitted = irc.optimize(copy.deepcopy(module), args, "100%", costs="analytic")
    seen: list[list[Any]] = []
    for each in (module, read_folder(folder).module(), pickle.loads(pickle.dumps(fitted))):
        for _ in range(2):  # the second is added to the first
            total(each(*args)).backward()
        seen.append(gradients_of(each))
    assert same(seen[0], seen[1]) and same(seen[0], seen[2])


def test_a_file_with_indices_beyond_a_table_is_refused_before_anybody_writes_there(tmp_path: Path) -> None:
    folder, source = folder_of(tmp_path, "one")
    text = (folder / "program.irc").read_text()
    (beyond,) = re.findall(r"aten\.mul\.Tensor\(.*\) -> (%\w+): int64\S+ (@\w+)", text)
    there = rf"view.default({beyond[0]}, (1, -1)) -> \1 {beyond[1]} traits"
    there = rf"view.default({beyond[0]}, (1, -1)) -> \1 {beyond[1]} traits"
    edited = re.sub(r"view\.default\(%\w+, \(1, -1\)\) -> (.*) @\w+ traits", there, text)
    assert edited != text
    (folder / "program.irc").write_text(edited)
    module = read_folder(folder).module()
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        module(*load(source).args)[0].sum().backward()


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "options", "code", "match"),
    [
        (Twice, {}, "IRC334", "makes a torch.sparse_coo tensor"),
        (lambda **k: Words(padding_idx=0, **k), {}, "IRC334", "an embedding with padding_idx makes"),
        (Words, {"accumulate_gradients": True}, "IRC413", "gradient of parameter:words.weight is sparse"),
        (Words, {"optimizer_in_backward": torch.optim.SGD}, "IRC413", "gradient of parameter:words.weight"),
        (Words, {"forwards_in_flight": 2}, "IRC565", "2 forwards cannot be in flight"),
    ],
)
def test_what_is_refused_trains_with_dense_gradients(
    make: Callable[..., nn.Module], options: dict[str, Any], code: str, match: str
) -> None:
    with pytest.raises((UnsupportedError, UsageError), match=match) as caught:
        irc.optimize(make(), (PAIRS,), "100%", loss=total, costs="analytic", **options)
    assert caught.value.code == code and "sparse=False" in str(caught.value.help)
    fitted = irc.optimize(make(sparse=False), (PAIRS,), "100%", loss=total, costs="analytic", **options)
    total(fitted(PAIRS)).backward()


def _without_grad(table: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return table(ids)


@pytest.mark.parametrize("look", [_without_grad, lambda table, ids: table(ids).detach()])
def test_a_table_with_padding_that_no_gradient_reaches_trains(look: Callable[..., Tensor]) -> None:
    class Reads(Words):
        def forward(self, ids: Tensor) -> Tensor:
            return self.head(look(self.words, ids))

    module = Reads(padding_idx=0)
    fitted = irc.optimize(copy.deepcopy(module), (PAIRS,), "100%", loss=total, costs="analytic")
    assert same(*(trained(each, (PAIRS,), torch.optim.SGD) for each in (fitted, module)))


def test_the_stages_of_a_pipeline_refuse_sparse_gradients() -> None:
    with pytest.raises(UnsupportedError, match=r"IRC413.*\n.*stages of a pipeline") as caught:
        irc.pipeline(Words(), (PAIRS,), 1 << 20, stages=2, micro_batches=2, costs="analytic")
    assert caught.value.code == "IRC413"
