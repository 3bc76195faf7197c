"""Plans of kernels beside torch.compile and its memory budget: time, peak, numbers, and time to compile.

    python -m benchmarks.compiled --markdown docs/results/compiled.md
    python -m benchmarks.compiled --only gpt2 --settings 0.5,0.2

All methods of a model take their steps in turns. Exit status 1: a peak is over what was predicted, or a goal
is missed.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

import irc
from irc.compiler.case import Case
from irc.compiler.request import INDUCTOR, SUMS, Request
from irc.compiler.training import measured_peak_bytes
from irc.ir import FUSED, Kernel, format_bytes, parse_budget
from irc.passes import FuseOperations, PassManager
from irc.torch_support import kernels

from . import models
from .command import chosen, parser_of, run_command, run_tasks
from .harness import Timed, hardware, interleave, step_of
from .pages import to_markdown

__all__ = ["CASES", "Row", "main", "measure"]

Example = tuple[nn.Module, tuple[Tensor, ...]]

_SHARES = (1.0, 0.75, 0.5)
"""The budgets, as parts of the peak of torch.compile."""

_MOST_TIME, _MOST_TILED_TIME, _MOST_COMPILE_RATIO = 1.05, 1.1, 1.5


# ---------------------------------------------------------------------- models


class _Head(nn.Module):
    """Two layers of a perceptron under a projection to 32,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        width, classes = 256, 32000
        self.embedding = nn.Embedding(classes, width)
        self.layers = nn.Sequential(*(self._layer(width) for _ in range(2)))
        self.weight = nn.Parameter(torch.randn(classes, width) * 0.02)

    @staticmethod
    def _layer(width: int) -> nn.Module:
        inner = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        return nn.Sequential(nn.LayerNorm(width), *inner)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        logits = functional.linear(self.layers(self.embedding(words)), self.weight)
        return functional.cross_entropy(logits, labels)


def _head() -> Example:
    return _Head(), (torch.randint(0, 32000, (1024,)), torch.randint(0, 32000, (1024,)))


class _Llama(nn.Module):
    """Blocks of a Llama; the loss is a mean of squares."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=1000,
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=depth,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        )
        self.model = transformers.LlamaModel(config)

    def forward(self, words: Tensor) -> Tensor:
        return self.model(input_ids=words).last_hidden_state.square().mean()


def _llama(depth: int = 4) -> Example:
    return _Llama(depth), (torch.randint(0, 1000, (4, 256)),)


CASES: dict[str, Callable[[], Example]] = {
    "toy head": _head,
    "gpt2 x6": partial(models.MODELS["gpt2"]),
    "llama x4": _llama,
    "unet": partial(models.MODELS["unet"]),
    "resnet50": partial(models.MODELS["resnet50"]),
    "densenet121": partial(models.MODELS["densenet121"]),
}
_SETTINGS = {"densenet121": 1}
"""The most settings of `activation_memory_budget` for a model that torch takes ten minutes to compile."""

_IMPOSSIBLE = "less than parameters and gradients take"
_TILED = {"toy head": "160MiB"}
"""The budget of a model whose head is in tiles."""


# ---------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Row:
    """One method on one model.

    Args:
        model: The model.
        method: The method.
        budget_bytes: The budget; None if it has none.
        peak_bytes: The measured peak, parameters included; None if there is no plan.
        predicted_bytes: The predicted peak; None if nothing predicts one.
        best: Seconds of its quickest step over those of torch.compile's.
        low: The smallest ratio of a round.
        high: The largest.
        error: How far all gradients together are off eager's, as a share of their norm; None if its random
            numbers are others.
        seconds_to_compile: Seconds of the clock until the second step can run.
        failure: The goal that it misses; "" if there is none.
        note: Of a row without a failure.
    """

    model: str
    method: str
    budget_bytes: int | None
    peak_bytes: int | None
    predicted_bytes: int | None = None
    best: float | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    seconds_to_compile: float = 0.0
    failure: str = ""
    note: str = "ok"

    @property
    def has_failed(self) -> bool:
        """Whether a goal is missed or a promise broken."""
        return bool(self.failure)

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        there = self.best is not None
        return (
            self.model,
            self.method,
            _bytes(self.budget_bytes),
            _bytes(self.peak_bytes),
            "-" if self.predicted_bytes is None else f"{self.predicted_bytes - (self.peak_bytes or 0):+d} B",
            f"{self.best:.3f} ({self.low:.3f} to {self.high:.3f})" if there else "-",
            "other draws"
            if there and self.error is None
            else "-"
            if self.error is None
            else f"{self.error:.1e}",
            f"{self.seconds_to_compile:.1f}",
            self.failure or self.note,
        )


def _bytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


_HEADER = (
    "model",
    "method",
    "budget",
    "measured peak",
    "predicted less measured",
    "time/torch.compile",
    "gradients off by",
    "s to compile",
    "outcome",
)


def _with_empty_caches(name: str, settings: Sequence[float], repeats: int) -> list[Row]:
    from torch._inductor.utils import fresh_cache

    kernels.forget()
    torch.compiler.reset()  # models of one class share Dynamo's limit of compilations
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, IRC_CACHE_DIR=folder), fresh_cache():
        return measure(name, settings, repeats)


def measure(name: str, settings: Sequence[float], repeats: int) -> list[Row]:
    """Takes steps of a model by all methods in turns.

    Args:
        name: Of a case.
        settings: Values of `activation_memory_budget`.
        repeats: Timed steps of each method.
    """
    torch.manual_seed(0)
    model, args = CASES[name]()
    model.train()
    held_bytes = sum(t.nbytes for t in {*model.parameters(), *model.buffers(), *args})
    reference = _gradients(model, args)
    rows = [Row(name, "eager", None, measured_peak_bytes(model, args, held_bytes))]
    again = _gradients(model, args)
    rows[0] = replace(rows[0], error=_distance(again[0], reference[0]))
    modules: list[nn.Module] = [model]

    def add(row: Row, module: nn.Module, started: float) -> None:
        for _ in range(2):
            step_of(module, args)()
        seconds = time.perf_counter() - started
        module.zero_grad(set_to_none=True)
        peak_bytes = measured_peak_bytes(module, args, held_bytes)
        found, draws = _gradients(module, args)
        error = _distance(found, reference[0]) if torch.equal(draws, reference[1]) else None
        rows.append(replace(row, peak_bytes=peak_bytes, error=error, seconds_to_compile=seconds))
        modules.append(module)

    for setting in (1.0, *settings):
        method = "torch.compile" if setting == 1.0 else f"activation_memory_budget {setting:g}"
        started = time.perf_counter()
        add(Row(name, method, None, None), _compiled(copy.deepcopy(model), setting), started)
    compiled_bytes = rows[1].peak_bytes
    assert compiled_bytes is not None
    exact = SUMS if name in _TILED else True
    kind = ", tiles" if name in _TILED else ""
    budgets = [(f"irc {share:.0%}{kind}", int(share * compiled_bytes)) for share in _SHARES]
    if name in _TILED:
        budgets.append((f"irc {_TILED[name]}{kind}", parse_budget(_TILED[name])))
    needed_bytes = held_bytes + sum(each.nbytes for each in reference[0])
    for method, budget_bytes in budgets:
        started = time.perf_counter()
        row = Row(name, method, budget_bytes, None)
        try:
            fitted: Any = irc.optimize(
                copy.deepcopy(model), args, budget_bytes, compiler=INDUCTOR, exact=exact
            )
        except irc.BudgetError as error:
            least = f"no plan: {format_bytes(error.minimum_bytes)} at least"
            row = replace(row, seconds_to_compile=time.perf_counter() - started)
            is_less = budget_bytes < needed_bytes
            rows.append(replace(row, note=_IMPOSSIBLE) if is_less else replace(row, failure=least))
            continue
        add(replace(row, predicted_bytes=fitted.plan.peak_bytes), fitted, started)
    steps = [step_of(module, args) for module in modules]
    timed = interleave(steps[1], [steps[0], *steps[2:]], repeats)
    measured = [row for row in rows if row.peak_bytes is not None]
    others = iter(timed)
    ratios = {id(row): None if row.method == "torch.compile" else next(others) for row in measured}
    timed_rows = [_timed(row, ratios.get(id(row))) for row in rows]
    return [replace(row, failure=row.failure or _failure(row, timed_rows)) for row in timed_rows]


def _compiled(module: nn.Module, setting: float) -> nn.Module:
    """A module that torch compiles at a setting of `activation_memory_budget`; 1 is the default."""
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, inputs: Any) -> Any:  # of its own: Dynamo takes over what an equal one compiled
        with config.patch(activation_memory_budget=setting):
            return compile_fx(graph, inputs)

    dynamo_config.fail_on_recompile_limit_hit = True  # and not take a step in eager without a word
    return cast(nn.Module, torch.compile(module, dynamic=False, backend=backend))


def _timed(row: Row, timed: Timed | None) -> Row:
    if row.peak_bytes is None:
        return row
    if timed is None:
        return replace(row, best=1.0, low=1.0, high=1.0)
    ratio = timed.wall
    return replace(row, best=ratio.best, low=ratio.low, high=ratio.high)


def _failure(row: Row, rows: Iterable[Row]) -> str:
    """The goal that a row of irc misses."""
    if row.predicted_bytes is None or row.peak_bytes is None or row.budget_bytes is None or row.best is None:
        return ""
    if not row.peak_bytes <= row.predicted_bytes <= row.budget_bytes:
        return "over the prediction or the budget"
    if row.method == f"irc {_TILED.get(row.model)}, tiles":
        return f"time over {_MOST_TILED_TIME:g}" if row.best > _MOST_TILED_TIME else ""
    if row.method.startswith("irc 100%"):
        return f"time over {_MOST_TIME:g}" if row.best > _MOST_TIME else ""
    reached = [
        other.best
        for other in rows
        if other.method.startswith("activation")
        and other.peak_bytes is not None
        and other.peak_bytes <= row.budget_bytes
        and other.best is not None
    ]
    return "slower than activation_memory_budget" if min(reached, default=row.best) < row.best else ""


def _gradients(module: nn.Module, args: Sequence[Any]) -> tuple[list[Tensor], Tensor]:
    """The gradients of a step from a seed, and the generator's state afterwards; buffers stay as they are."""
    buffers = [buffer.clone() for buffer in module.buffers()]
    module.zero_grad(set_to_none=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module(*args).backward()
        state = torch.get_rng_state()
    found = [p.grad.detach().clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return found, state


def _distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, wanted, strict=True))
    return (off / sum(float(b.double().square().sum()) for b in wanted)) ** 0.5


# ---------------------------------------------------------------------- equal layers


def _depths() -> Iterator[Row]:
    """The kernels of a GPT-2 of 6 blocks and of 24, each compiled with nothing in any cache."""
    from torch._inductor.utils import fresh_cache

    seconds: dict[int, float] = {}
    for depth in (6, 24):
        model, args = models.MODELS["gpt2"](depth=depth)
        request = Request.of("100%", compiler=INDUCTOR)
        prepared = Case.of(model.train(), args, {}, request).prepared
        graph = PassManager([FuseOperations(measure=False)]).run(prepared).graph
        fused = [Kernel.of(node) for node in graph.operations if node.op == FUSED]
        kernels.forget()
        with fresh_cache():
            started = time.perf_counter()
            kernels.compile_kernels(fused)
            seconds[depth] = time.perf_counter() - started
        kernels.forget()
        ratio = seconds[depth] / seconds[6]
        failure = f"over {_MOST_COMPILE_RATIO:g} times" if ratio > _MOST_COMPILE_RATIO else ""
        method = f"{len(set(fused))} kernels of {len(fused)} fused operations, {ratio:.2f} times x6"
        yield Row(f"gpt2 x{depth}", method, None, None, seconds_to_compile=seconds[depth], failure=failure)


# ---------------------------------------------------------------------- page


def _page(found: Mapping[str, list[Row]]) -> str:
    rows = [row for each in found.values() for row in each]
    failed = sum(row.has_failed for row in rows)
    return "\n".join(
        [
            "# Plans of kernels beside torch.compile",
            "",
            f'`python -m benchmarks.compiled --only "{",".join(found)}" --markdown docs/results/compiled.md`',
            "",
            f"torch {torch.__version__}, {hardware()}, {torch.get_num_threads()} threads. Budgets of irc are "
            "parts of the measured peak of `torch.compile`, parameters included; peaks are events of the "
            "allocator. All methods of a model take steps in turns; times are those of the quickest step "
            "over the quickest of `torch.compile` (in brackets the range of ratios within a round). "
            "Gradients are compared with eager's: the norm of the difference over the norm; a method whose "
            "generator ends elsewhere draws other numbers. `activation_memory_budget` uses Inductor too. "
            "Seconds to compile are those of the clock for planning and the first two steps; caches of each "
            "model are empty before its first method.",
            "",
            to_markdown(_HEADER, [row.cells() for row in rows]),
            "",
            f"{len(rows) - failed} of {len(rows)} rows meet the goals.",
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit status."""
    parser = parser_of(
        "compiled",
        "Compares plans of kernels with torch.compile.",
        only=None,
        repeats=8,
        threads=2,
        journal=None,
        markdown=None,
    )
    parser.add_argument(
        "--settings", default="0.5,0.8,0.2", metavar="A,B", help="of activation_memory_budget (0.5,0.8,0.2)"
    )
    return run_command(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    names = chosen(options.only, [*CASES, "depths"], "a case")
    settings = [float(each) for each in options.settings.split(",") if each]

    def tasks(_: Mapping[str, list[Row]]) -> Iterator[tuple[str, Callable[[], Sequence[Row]]]]:
        for name in names:
            if name == "depths":
                yield name, lambda: list(_depths())
            else:
                some = settings[: _SETTINGS.get(name, len(settings))]
                yield name, partial(_with_empty_caches, name, some, options.repeats)

    found = run_tasks(options, "irc-compiled-1", {"repeats": options.repeats}, Row, tasks, _page)
    print(_page(found))
    return int(any(row.has_failed for rows in found.values() for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
