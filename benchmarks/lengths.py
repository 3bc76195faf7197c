"""Calls of many lengths within one budget: planning, steps, peaks and numbers, beside eager.

    python -m benchmarks.lengths
    python -m benchmarks.lengths --only gpt2 --markdown docs/results/lengths.md

Each model is fitted to 60% of what its longest call takes, for a range of lengths, with an empty cache of
costs. It takes a step of each of many lengths beside eager. Exit status 1: a step is over the budget, numbers
differ, or a goal is missed.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import irc
from irc.backends.torch.plan_cache import PlanCache
from irc.compiler.training import compare_step, measured_peak_bytes

from .command import parser_of, run_command, run_rows, write_page
from .harness import hardware
from .pages import to_markdown

__all__ = ["CASES", "Case", "Row", "main", "measure"]

_WORDS, _WIDTH, _DEPTH, _HEADS = 1000, 128, 6, 4
_BUDGET = "60%"
_MOST_PLANNING_SECONDS, _MOST_LOOKUP_SECONDS, _MOST_EXCESS = 30.0, 0.05, 1.2
_EXACT = 12
"""The number of lengths that are also planned by themselves."""


@dataclass(frozen=True)
class Case:
    """A model, and the lengths of its calls.

    Args:
        make: Makes the model, which takes token numbers and returns its loss.
        first: The smallest length.
        last: The largest.
        count: The number of lengths that are drawn.
        rows: The rows of a call.
    """

    make: Callable[[], nn.Module]
    first: int
    last: int
    count: int
    rows: int = 1


class _Loss(nn.Module):
    """The loss of a model of Hugging Face for token numbers, which are its labels, perhaps with a mask."""

    def __init__(self, model: nn.Module, *, has_mask: bool = True) -> None:
        super().__init__()
        self.model, self.has_mask = model, has_mask

    def forward(self, words: Tensor) -> Tensor:
        given = {"attention_mask": torch.ones_like(words)} if self.has_mask else {}
        return self.model(input_ids=words, labels=words, **given).loss


def _gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=_WORDS,
        n_positions=2048,
        n_embd=_WIDTH,
        n_layer=_DEPTH,
        n_head=_HEADS,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _Loss(transformers.GPT2LMHeadModel(config))


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": _WORDS,
        "hidden_size": _WIDTH,
        "intermediate_size": 4 * _WIDTH,
        "num_hidden_layers": _DEPTH,
        "num_attention_heads": _HEADS,
    }


def _llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        **_sizes(), num_key_value_heads=2, max_position_embeddings=2048, use_cache=False
    )
    return _Loss(transformers.LlamaForCausalLM(config))


def _bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(**_sizes(), max_position_embeddings=512)
    return _Loss(transformers.BertForMaskedLM(config))


def _t5() -> nn.Module:
    import transformers

    config: Any = transformers.T5Config(
        vocab_size=_WORDS,
        d_model=_WIDTH,
        d_kv=_WIDTH // _HEADS,
        d_ff=4 * _WIDTH,
        num_layers=3,
        num_heads=_HEADS,
        use_cache=False,
    )
    config.decoder_start_token_id = 0
    return _Loss(transformers.T5ForConditionalGeneration(config), has_mask=False)


CASES: dict[str, Case] = {
    "gpt2 x6": Case(_gpt2, 64, 2048, 200),
    "llama x6": Case(_llama, 64, 1024, 60, rows=2),
    "bert x6": Case(_bert, 16, 512, 60, rows=4),
    "t5 x3": Case(_t5, 16, 512, 60, rows=2),
}


@dataclass(frozen=True)
class Row:
    """One model with many lengths.

    Args:
        name: Its name.
        lengths: Its smallest and largest length, and how many were drawn.
        planning_seconds: The processor's seconds of planning, all in all.
        plans: The number of plans.
        lookup_seconds: The most that a step of a new length took to find its plan.
        budget_bytes: The budget.
        most_bytes: The largest measured peak.
        over: The number of steps over the budget or over the predicted peak.
        equal: The number of lengths whose loss, gradients and random numbers are eager's.
        overhead: The mean planned overhead of the lengths.
        exact_overhead: The mean overhead of plans made for some lengths by themselves, and of these here.
        time_ratio: The seconds of all steps over those of eager.
        failures: What does not hold.
    """

    name: str
    lengths: tuple[int, int, int]
    planning_seconds: float
    plans: int
    lookup_seconds: float
    budget_bytes: int
    most_bytes: int
    over: int
    equal: int
    overhead: float
    exact_overhead: tuple[float, float]
    time_ratio: float
    failures: tuple[str, ...]

    @property
    def has_failed(self) -> bool:
        """Whether a promise was broken or a goal missed."""
        return bool(self.failures)

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        first, last, count = self.lengths
        exact, ours = self.exact_overhead
        return (
            self.name,
            f"{count} of {first} to {last}",
            f"{self.planning_seconds:.1f}",
            str(self.plans),
            f"{1000 * self.lookup_seconds:.1f}",
            f"{self.budget_bytes:,}",
            f"{self.most_bytes / self.budget_bytes:.4f}",
            str(self.over),
            f"{self.equal} of {count}",
            f"{self.overhead:.2%}",
            f"{ours:.2%} / {exact:.2%}",
            f"{self.time_ratio:.3f}",
            "; ".join(self.failures) or "ok",
        )


_HEADER = (
    "model",
    "lengths",
    "planning, CPU s",
    "plans",
    "new length, ms at most",
    "budget, B",
    "largest peak/budget",
    "over",
    "bit-equal",
    "mean overhead",
    "at some lengths: these / plans of their own",
    "time/eager",
    "outcome",
)


def measure(name: str, case: Case) -> Row:
    """Fits a model for a range of lengths, and takes a step of each length that is drawn."""
    torch.manual_seed(0)
    model = case.make().train()
    draw = random.Random(0)
    lengths = [case.last, case.first, *(draw.randint(case.first, case.last) for _ in range(case.count - 2))]

    def call(length: int) -> tuple[Tensor]:
        return (torch.randint(0, _WORDS, (case.rows, length)),)

    started = time.process_time()
    dynamic = {"words": {1: (case.first, case.last)}}
    fitted: Any = irc.optimize(copy.deepcopy(model), call(case.last), _BUDGET, dynamic=dynamic)
    planning_seconds = time.process_time() - started
    plans = len(fitted.irc_plans)
    budget_bytes = fitted.plan.budget_bytes
    lookups: list[float] = []
    find = PlanCache.find

    def timed(*given: Any) -> Any:
        began = time.perf_counter()
        try:
            return find(*given)
        finally:
            lookups.append(time.perf_counter() - began)

    peaks: list[int] = []
    overheads: list[float] = []
    seconds: list[list[float]] = [[], []]
    over = equal = 0
    kept_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for length in lengths:
        (words,) = call(length)
        with patch.object(PlanCache, "find", timed):
            seconds[0].append(_step_seconds(fitted, words))
        seconds[1].append(_step_seconds(model, words))
        plan: irc.Plan = fitted.irc_plans[0].plan
        overheads.append(plan.overhead)
        numbers = compare_step(model, fitted, (words,))
        equal += numbers.bit_equal and numbers.same_gradients and numbers.same_generator
        peaks.append(measured_peak_bytes(fitted, (words,), kept_bytes + words.nbytes))
        over += not peaks[-1] <= plan.peak_bytes <= budget_bytes
    made_later = len(fitted.irc_plans) - plans
    exact, ours = _exact(
        model, call, sorted(lengths), budget_bytes, dict(zip(lengths, overheads, strict=True))
    )
    failures = [
        text
        for text, fails in (
            (f"{over} over the budget", over),
            (f"numbers of {len(lengths) - equal} differ", equal < len(lengths)),
            (f"{made_later} plans made later", made_later),
            (f"planning takes over {_MOST_PLANNING_SECONDS:g} s", planning_seconds > _MOST_PLANNING_SECONDS),
            ("a new length takes over 50 ms", max(lookups) > _MOST_LOOKUP_SECONDS),
            ("overhead over 1.2 times that of own plans", ours > _MOST_EXCESS * exact + 1e-4),
        )
        if fails
    ]
    return Row(
        name,
        (case.first, case.last, case.count),
        planning_seconds,
        plans,
        max(lookups),
        budget_bytes,
        max(peaks),
        over,
        equal,
        statistics.fmean(overheads),
        (exact, ours),
        sum(seconds[0]) / sum(seconds[1]),
        tuple(failures),
    )


def _step_seconds(module: nn.Module, words: Tensor) -> float:
    """The processor's seconds of a step."""
    started = time.process_time()
    module(words).backward()
    seconds = time.process_time() - started
    module.zero_grad()
    return seconds


def _exact(
    model: nn.Module,
    call: Callable[[int], tuple[Tensor]],
    lengths: Sequence[int],
    budget_bytes: int,
    overheads: dict[int, float],
) -> tuple[float, float]:
    """The mean overhead of plans for some lengths, spread evenly over those drawn, and of those that ran."""
    some = lengths[:: max(len(lengths) // _EXACT, 1)]
    own = [irc.optimize(copy.deepcopy(model), call(each), budget_bytes).plan.overhead for each in some]
    return statistics.fmean(own), statistics.fmean(overheads[each] for each in some)


def _page(rows: Sequence[Row]) -> str:
    failed = sum(row.has_failed for row in rows)
    return "\n".join(
        [
            "# Calls of many lengths",
            "",
            "`python -m benchmarks.lengths --markdown docs/results/lengths.md`",
            "",
            f"{hardware()}, one thread. Models of transformers of width {_WIDTH}, fitted to {_BUDGET} of "
            "what the longest call takes, with `dynamic={...}` for the range of lengths and an empty cache "
            "of costs. Each of the lengths then takes a step beside eager: its measured peak is compared "
            "with the prediction of its plan and with the budget, its loss, gradients and random numbers "
            "with eager's. Milliseconds are those of finding the plan for a step, which a new length takes "
            f"beyond the step itself. Some lengths, spread over those drawn (about {_EXACT}), are also "
            "planned by themselves within the same bytes. Times are the processor's, of all steps in turns "
            "with eager.",
            "",
            f"{len(rows) - failed} of {len(rows)} models keep all promises and meet all goals.",
            "",
            to_markdown(_HEADER, [row.cells() for row in rows]),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes what was asked for, and returns the exit status."""
    parser = parser_of(
        "lengths", "Calls of many lengths within one budget.", only=None, threads=1, markdown=None
    )
    return run_command(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    def rows() -> Iterator[Row]:
        for name, case in CASES.items():
            if options.only is None or options.only in name:
                with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, IRC_CACHE_DIR=folder):
                    yield measure(name, case)

    _, text, status = run_rows(rows(), _page)
    write_page(options.markdown, text)
    return status


if __name__ == "__main__":
    sys.exit(main())
