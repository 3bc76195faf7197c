"""Plans at the size that people train: Llama shapes of up to 405 billion parameters, without weights.

    python -m benchmarks.large_models
    python -m benchmarks.large_models --only 8b --markdown docs/results/large_models.md

Each row captures a step and plans it within a budget for a described H100. Beside it stands what torch's own
joint export of the step takes (`aot_export_module(trace_joint=True)`). Each runs in a process of its own, on
one thread; times are seconds of the processor. Exit status 1: a row misses its goal.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensor

from irc.compiler.case import Case
from irc.compiler.estimate.estimate import items_of
from irc.compiler.estimate.hf_config import step_of_config
from irc.compiler.estimate.lora import Lora
from irc.compiler.frozen_heap import frozen_heap
from irc.compiler.request import SUMS, Request
from irc.ir import BudgetError, format_bytes

from .command import chosen, parser_of, run_command, run_row_alone, run_tasks
from .harness import hardware
from .pages import to_markdown

__all__ = ["CASES", "Row", "Setting", "main"]

_MACHINE = "h100"
_FORM = "irc-bench-large-models-1"
_TIME_LIMIT = 60.0


@dataclass(frozen=True)
class Setting:
    """A shape with its step and its budgets.

    Args:
        layers: The number of layers.
        width: The size of a hidden state.
        inner: The size within a layer's perceptron.
        heads: The number of heads of attention.
        words: The size of the vocabulary.
        batch: The rows of a batch.
        sequence: The tokens of a row.
        dtype: The type of weights.
        lora: The adapters; None trains all.
        exact: As in `irc.optimize`.
        budgets: The budgets of the plans.
        most_seconds: The goal for the search.
        most_gap: The goal for the distance from the bound.
        most_overheads: The goals for the time that the plans add, budget by budget, as far as there are some.
        is_below_export: Whether capture and passes together are to take less than torch's own export.
    """

    layers: int
    width: int
    inner: int
    heads: int
    words: int = 128_256
    batch: int = 1
    sequence: int = 2048
    dtype: str = "bfloat16"
    lora: Lora | None = None
    exact: bool | str = True
    budgets: tuple[str, ...] = ("60%",)
    most_seconds: float = 300.0
    most_gap: float = 0.01
    most_overheads: tuple[float, ...] = ()
    is_below_export: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The model as a configuration of Hugging Face."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": min(self.heads, 8),
            "vocab_size": self.words,
            "max_position_embeddings": 131_072,
        }


def _small(layers: int, *budgets: str) -> Setting:
    return Setting(
        *(layers, 128, 352, 4, 1000, 8, 128, "float32"), budgets=budgets, most_seconds=5.0, most_gap=0.005
    )


_8B, _70B, _405B = (32, 4096, 14336, 32), (80, 8192, 28672, 64), (126, 16384, 53248, 128)

CASES: dict[str, Setting] = {
    "small-32": _small(32, "60%", "25%"),
    "small-80": _small(80, "60%", "25%"),
    "small-128": _small(128, "60%", "25%"),
    "8b-lora": Setting(
        *_8B,
        lora=Lora(16),
        budgets=("24GiB", "21GiB"),
        most_seconds=10.0,
        most_gap=0.005,
        is_below_export=True,
    ),
    "8b-lora-tight": Setting(
        *_8B, lora=Lora(16), budgets=("19.5GiB",), most_seconds=60.0, is_below_export=True
    ),
    "8b-lora-sums": Setting(
        *_8B,
        lora=Lora(16),
        exact=SUMS,
        budgets=("19.5GiB", "16GiB"),
        most_seconds=60.0,
        most_overheads=(0.17,),
    ),
    "8b-lora-long": Setting(
        *_8B, sequence=131_072, lora=Lora(16), exact=SUMS, budgets=("74.5GiB",), most_seconds=60.0
    ),
    "8b-qlora": Setting(*_8B, lora=Lora(16, in_four_bits=True), budgets=("12GiB",), most_seconds=60.0),
    "8b": Setting(*_8B, batch=8, budgets=("80%",)),
    "70b-lora": Setting(*_70B, lora=Lora(16), budgets=("95%", "90%")),
    "70b": Setting(*_70B, batch=8, budgets=("80%",)),
    "405b-lora": Setting(*_405B, lora=Lora(16), budgets=("97%",)),
    "405b": Setting(*_405B, batch=8, budgets=("80%",)),
}


@dataclass(frozen=True)
class Row:
    """One plan.

    Args:
        case: The name of the case.
        budget: The budget.
        parameters: The number of elements of parameters.
        operations: The number of operations of the step.
        export_seconds: The time of torch's own joint export; 0 if it was not asked for.
        capture_seconds: The time of irc's capture.
        plan_seconds: The time of all passes.
        search_seconds: The part of it that the search took.
        baseline_bytes: The peak of the step as it is written.
        minimum_bytes: The smallest budget that is known.
        peak_bytes: The peak of the plan; 0 if none fits.
        overhead: The time that it adds.
        bound: The time that every schedule adds.
        tokens_per_second: The speed by the roofline.
        resident_bytes: The most memory of the process.
    """

    case: str
    budget: str
    parameters: int
    operations: int
    export_seconds: float
    capture_seconds: float
    plan_seconds: float
    search_seconds: float
    baseline_bytes: int
    minimum_bytes: int
    peak_bytes: int
    overhead: float
    bound: float
    tokens_per_second: float
    resident_bytes: int

    @property
    def has_failed(self) -> bool:
        """Whether a goal is missed."""
        case = CASES[self.case]
        in_all_seconds = self.capture_seconds + self.plan_seconds
        return (
            not self.peak_bytes
            or (case.is_below_export and bool(self.export_seconds) and in_all_seconds > self.export_seconds)
            or self.search_seconds > case.most_seconds
            or self.overhead - self.bound > case.most_gap
            or self.overhead > self._most_overhead()
        )

    def _most_overhead(self) -> float:
        case = CASES[self.case]
        return dict(zip(case.budgets, case.most_overheads, strict=False)).get(self.budget, math.inf)

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        case = CASES[self.case]
        plan = (
            ("none fits", "")
            if not self.peak_bytes
            else (f"+{self.overhead:.2%}", f"{self.overhead - self.bound:.2%}")
        )
        return (
            self.case,
            f"{self.parameters / 1e9:.3g} billion",
            str(self.operations),
            f"{self.budget} of {format_bytes(self.baseline_bytes)}",
            format_bytes(self.minimum_bytes),
            *plan,
            f"{self.search_seconds:.1f}",
            f"{self.plan_seconds:.1f}",
            f"{self.capture_seconds:.1f}",
            f"{self.export_seconds:.1f}" if self.export_seconds else "",
            format_bytes(self.resident_bytes),
            f"search {case.most_seconds:g} s, gap {case.most_gap:.1%}"
            + (f", time +{self._most_overhead():.0%}" if self._most_overhead() < math.inf else "")
            + (", in all less than export" if case.is_below_export and self.export_seconds else ""),
            "missed" if self.has_failed else "met",
        )


_HEADER = (
    "step",
    "parameters",
    "operations",
    "budget",
    "smallest",
    "more time",
    "gap",
    "search, s",
    "all passes",
    "capture",
    "torch's export",
    "resident",
    "goal",
    "is",
)


def _row(name: str, budget: str, *, with_export: bool) -> Row:
    """Plans one case at one budget; only the first of a process has all of its costs."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(case.config))
        module, batch = step_of_config(
            path, batch=case.batch, sequence=case.sequence, dtype=case.dtype, lora=case.lora
        )
    export_seconds = _exported(module, batch) if with_export else 0.0
    gc.collect()
    request = Request.of(budget, costs=_MACHINE, time_limit=_TIME_LIMIT, exact=case.exact)
    plan, minimum_bytes = None, 0
    with frozen_heap():  # as `irc.optimize` does
        started = time.thread_time()
        call = Case.of(module, (), batch, request)
        captured_at = time.thread_time()
        try:
            plan = call.plan().program.plan
        except BudgetError as error:
            minimum_bytes = error.minimum_bytes
        ended = time.thread_time()
    items = items_of((), batch)[0]
    step = 0.0 if plan is None else (plan.step_seconds or 0.0) * (1 + plan.overhead)
    return Row(
        name,
        budget,
        sum(parameter.numel() for parameter in module.parameters()),
        len(call.captured.graph.operations),
        export_seconds,
        captured_at - started,
        ended - captured_at,
        0.0 if plan is None else plan.seconds_to_plan,
        0 if plan is None else plan.baseline_peak_bytes,
        minimum_bytes if plan is None else plan.minimum_budget_bytes,
        0 if plan is None else plan.peak_bytes,
        0.0 if plan is None else plan.overhead,
        0.0 if plan is None else plan.lower_bound_overhead,
        items / step if step else 0.0,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    )


class _Functional(nn.Module):
    """A step whose batch is positional, as torch's export asks for."""

    def __init__(self, step: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.step, self.names = step, tuple(names)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (self.step(**dict(zip(self.names, tensors, strict=True))),)


def _exported(module: nn.Module, batch: Mapping[str, Tensor]) -> float:
    """The seconds of torch's own export of the joint graph."""
    mode = cast(FakeTensor, next(iter(batch.values()))).fake_mode
    # as under torch.compile: else transformers looks at the values of a mask, and the export fails
    with mode, patch.object(torch.compiler, "_is_compiling_flag", True):
        started = time.thread_time()
        aot_export_module(
            _Functional(module, list(batch)), tuple(batch.values()), trace_joint=True, output_loss_index=0
        )
        return time.thread_time() - started


# ---------------------------------------------------------------------- the page


def _page(found: Mapping[str, Sequence[Row]]) -> str:
    rows = [row for results in found.values() for row in results]
    search = {row.case: row.search_seconds for row in rows if row.budget == "60%"}
    lines = [
        "# Plans at the size that people train",
        "",
        "`python -m benchmarks.large_models --markdown docs/results/large_models.md`",
        "",
        f"{hardware()}. Steps of Llama shapes on tensors without data, planned for a described H100. "
        "Each row has a process of its own, on one thread; times are seconds of the processor. `small`: "
        "8 rows of 128 tokens in float32, the others one row of 2,048 in bfloat16, or eight where all "
        "of 8 billion or more are trained. LoRA: adapters of rank 16 beside all linear layers but the "
        "last; `qlora` has those in 4 bits, which its parameters do not count. `sums` and `long` (one row "
        "of 131,072 tokens in 80 GB): loss heads and wide layers may be in tiles (`exact=sums`); the search "
        "is that of the plan that is taken, and all passes are "
        "those of all attempts. The search names the smallest budget too: 3 s of it, or more.",
        "",
        to_markdown(_HEADER, [row.cells() for row in rows]),
        "",
    ]
    if {"small-32", "small-80"} <= search.keys():
        ratio = search["small-80"] / search["small-32"]
        lines += [f"At 60%, 80 layers take {ratio:.2f} times the search of 32.", ""]
    return "\n".join(lines).rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, writes what was asked for, and returns the exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "large_models",
        "Plans of models of up to 405 billion parameters.",
        only=None,
        threads=1,
        journal=None,
        markdown=None,
        row=None,
    )
    parser.add_argument("--without-export", action="store_true", help="leave out torch's own export")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.row is not None:
        name, budget, with_export = options.row
        print(json.dumps(asdict(_row(name, budget, with_export=with_export == "export"))))
        return 0
    names = chosen(options.only, CASES, "case")

    def tasks(known: object) -> Iterator[tuple[str, Any]]:
        for name in names:
            for index, budget in enumerate(CASES[name].budgets):
                kind = "plan" if index or options.without_export else "export"
                row = (name, budget, kind)
                yield f"{name} {budget}", lambda row=row: [Row(**run_row_alone(options, "large_models", row))]

    found = run_tasks(options, _FORM, {"hardware": hardware()}, Row, tasks, _page)
    print(_page(found))
    return int(any(row.has_failed for rows in found.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
