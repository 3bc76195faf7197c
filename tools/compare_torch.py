"""Compares irc with PyTorch's own ways to save memory, each time at the peak that PyTorch reached.

    python -m irc.tools.compare_torch --models resnet50 --settings 0.8,0.6,0.5,0.4 --json torch.json

A point is one PyTorch method: checkpointing per block, or `torch.compile` with an
`activation_memory_budget`. irc plans for the peak that was measured for it, and the original, PyTorch's
module and irc's take turns in one process. Peaks are the allocator's own, so no dispatch mode is active
(under one, compiled code falls back to eager without a word). Exit status 1: irc's numbers differ from the
original's, its measured peak is over the budget, or a point could not be planned.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..ir import BudgetError, IrcError, Plan, UsageError
from .loading import Loaded
from .measure_plans import (
    TOLERANCE,
    Bench,
    Numbers,
    Settings,
    TimeRatio,
    load_named,
    step_of,
    threads,
    to_markdown,
    write_outputs,
)

__all__ = ["Point", "block_checkpointed", "compare_model", "compiled_with_budget", "main"]

_SETTINGS = "0.8,0.6,0.5,0.4"


# ---------------------------------------------------------------------- PyTorch's methods


def compiled_with_budget(module: nn.Module, setting: float) -> nn.Module:
    """A copy that compiles itself on its first step, by AOTAutograd's partitioner, without a code generator.

    Args:
        module: What to compile.
        setting: `activation_memory_budget`: 1 saves what eager would, 0 recomputes all.
    """
    # These load the whole of torch's compiler; only this method needs it.
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(*args: Any, **kwargs: Any) -> Any:
        with config.patch(
            activation_memory_budget=setting,
            activation_memory_budget_runtime_estimator="flops",
            activation_memory_budget_solver="dp",
        ):
            return min_cut_rematerialization_partition(*args, **kwargs)

    torch.compiler.reset()
    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    copied = copy.deepcopy(module)
    copied.compile(backend=_uncached(backend), dynamic=False, fullgraph=True)
    return copied


def _uncached(backend: Any) -> Any:
    """`backend` without AOTAutograd's cache, which knows nothing of the setting above."""
    from torch._functorch import config

    def compile_graph(graph: Any, examples: Any) -> Any:
        with config.patch(enable_autograd_cache=False):
            return backend(graph, examples)

    return compile_graph


def block_checkpointed(module: nn.Module) -> nn.Module | None:
    """A copy with `torch.utils.checkpoint` around each block, or None where there are no blocks.

    A block is a member of a Sequential or ModuleList that has submodules itself; the outermost count.
    """
    from torch.utils.checkpoint import checkpoint

    copied = copy.deepcopy(module)
    blocks = list(_blocks(copied))
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return copied if blocks else None


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    listed = isinstance(module, nn.Sequential | nn.ModuleList)
    for child in module.children():
        if listed and any(True for _ in child.children()):
            yield child
        else:
            yield from _blocks(child)


# ---------------------------------------------------------------------- one point


@dataclass(frozen=True)
class Point:
    """One PyTorch method on one model, and irc at the same peak.

    Bytes are of one step, parameters, buffers and inputs included; the ratios of peaks are without these,
    which no method changes.

    Args:
        model: Its name.
        method: What PyTorch did.
        refusal: Why there is no comparison.
        static_bytes: Parameters, buffers and inputs.
        original_bytes: Measured peak of the original.
        torch_bytes: Measured peak of PyTorch's method, and irc's budget.
        irc_bytes: Measured peak of irc's module.
        predicted_bytes: Its predicted peak.
        torch_time: Time of PyTorch's method over the original's.
        irc_time: irc's time over the original's.
        predicted_time: irc's predicted time over the original's.
        bound: Lower bound of irc's overhead at this budget.
        proved: Whether irc's plan is proved optimal.
        torch_numbers: PyTorch's numbers against the original's.
        irc_numbers: irc's numbers against the original's.
        failures: What does not hold for irc.
    """

    model: str
    method: str
    refusal: str | None = None
    static_bytes: int = 0
    original_bytes: int = 0
    torch_bytes: int = 0
    irc_bytes: int = 0
    predicted_bytes: int = 0
    torch_time: TimeRatio | None = None
    irc_time: TimeRatio | None = None
    predicted_time: float | None = None
    bound: float | None = None
    proved: bool | None = None
    torch_numbers: Numbers | None = None
    irc_numbers: Numbers | None = None
    failures: tuple[str, ...] = ()

    @property
    def overhead_ratio(self) -> float | None:
        """Irc's measured overhead over PyTorch's; None where PyTorch has none to speak of."""
        if self.torch_time is None or self.irc_time is None or self.torch_time.best < 1.005:
            return None
        return max(self.irc_time.best - 1, 0.0) / (self.torch_time.best - 1)

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        if self.torch_time is None:
            return (self.model, self.method, *["-"] * 8, f"refused: {self.refusal}")
        torch_side = (self._peak(self.torch_bytes), str(self.torch_time), str(self.torch_numbers))
        if self.irc_time is None:
            return (self.model, self.method, *torch_side, *["-"] * 5, f"refused: {self.refusal}")
        ratio = self.overhead_ratio
        return (
            self.model,
            self.method,
            *torch_side,
            self._peak(self.irc_bytes),
            str(self.irc_time),
            f"{self.predicted_time:.4f}",
            f"{1 + (self.bound or 0):.4f}" + (" (proved)" if self.proved else ""),
            str(self.irc_numbers),
            "; ".join("FAILED: " + f for f in self.failures)
            or ("-" if ratio is None else f"{ratio:.2f} of PyTorch's overhead"),
        )

    def _peak(self, nbytes: int) -> str:
        share = (nbytes - self.static_bytes) / (self.original_bytes - self.static_bytes)
        return f"{share:.3f} ({(nbytes - self.static_bytes) / 2**20:.1f})"


_HEADER = (
    "model",
    "PyTorch's method",
    "its peak/eager (MiB)",
    "its time/eager (rounds)",
    "its numbers",
    "irc peak/eager (MiB)",
    "irc time/eager (rounds)",
    "irc predicted",
    "irc bound",
    "irc numbers",
    "irc against it",
)


def compare_model(
    name: str, loaded: Loaded, budgets: Sequence[float], settings: Settings, *, blocks: bool = True
) -> Iterator[Point]:
    """One point for each PyTorch method, as it is measured.

    Args:
        name: For the table.
        loaded: The model and the arguments of a step.
        budgets: Values of `activation_memory_budget`.
        settings: How to measure.
        blocks: Whether to checkpoint per block, too.
    """
    bench = Bench(loaded.module, loaded.args, settings)
    if blocks and (checkpointed := block_checkpointed(loaded.module)) is not None:
        yield _compare(name, "checkpoint per block", checkpointed, bench)
    for budget in budgets:
        compiled = compiled_with_budget(loaded.module, budget)
        yield _compare(name, f"activation_memory_budget {budget:g}", compiled, bench)


def _compare(name: str, method: str, other: nn.Module, bench: Bench) -> Point:
    try:
        step_of(other, bench.args)()
    except Exception as error:  # whatever PyTorch's method stumbles over is a result
        return Point(name, method, refusal=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    torch_numbers = bench.numbers(other)
    torch_bytes = bench.measured_bytes(other)
    fitted: nn.Module | None = None
    plan: Plan | None = None
    refusal: str | None = None
    failures: tuple[str, ...] = ()
    try:
        fitted, plan = bench.fit(torch_bytes)
    except BudgetError as error:
        refusal = f"irc needs {(error.minimum_bytes - bench.static_bytes) / 2**20:.1f} MiB"
        failures = ("irc does not reach this peak",)
    except IrcError as error:
        refusal = f"{error.code} {error.message}"
        failures = (refusal,)
    if fitted is None or plan is None:
        of_original, of_torch = bench.seconds(other)
        return Point(
            name,
            method,
            refusal,
            bench.static_bytes,
            bench.original_bytes,
            torch_bytes,
            torch_time=TimeRatio.of(of_torch, of_original),
            torch_numbers=torch_numbers,
            failures=failures,
        )
    numbers = bench.numbers(fitted)
    irc_bytes = bench.measured_bytes(fitted)
    of_original, of_torch, of_irc = bench.seconds(other, fitted)
    if irc_bytes > torch_bytes:
        failures += (f"measured {irc_bytes} > budget {torch_bytes} bytes",)
    if not numbers.agrees:
        failures += (f"numbers differ: {numbers}",)
    return Point(
        model=name,
        method=method,
        static_bytes=bench.static_bytes,
        original_bytes=bench.original_bytes,
        torch_bytes=torch_bytes,
        irc_bytes=irc_bytes,
        predicted_bytes=plan.peak_bytes,
        torch_time=TimeRatio.of(of_torch, of_original),
        irc_time=TimeRatio.of(of_irc, of_original),
        predicted_time=1 + plan.overhead,
        bound=plan.lower_bound_overhead,
        proved=plan.proven_optimal,
        torch_numbers=torch_numbers,
        irc_numbers=numbers,
        failures=failures,
    )


# ---------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler would write to the terminal
    options = _parser().parse_args(argv)
    settings = Settings(options.time_limit, options.repeats, profile=options.profile)
    points: list[Point] = []
    try:
        budgets = _numbers(options.settings)
        with threads(options.threads):
            for name in options.models.split(","):
                loaded = load_named(name)
                short = name.rpartition(":")[2]
                for point in compare_model(short, loaded, budgets, settings, blocks=options.blocks):
                    points.append(point)
                    print("  ".join(point.cells()), file=sys.stderr, flush=True)
    except IrcError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    ratios = [ratio for point in points if (ratio := point.overhead_ratio) is not None]
    half = sum(ratio <= 0.5 for ratio in ratios)
    text = "\n".join(
        [
            to_markdown(_HEADER, [point.cells() for point in points]),
            "",
            f"torch {torch.__version__}, {options.threads} threads, best of {options.repeats} interleaved "
            f"steps, {options.time_limit:g} s for each search. Peaks are the allocator's above parameters, "
            f"buffers and inputs; irc's budget is the measured peak of PyTorch's method. irc's numbers fail "
            f"where they differ by more than {TOLERANCE:g} of the largest of their kind. irc's overhead is "
            f"at most half of PyTorch's at {half} of {len(ratios)} points.",
        ]
    )
    about = {"threads": options.threads, "repeats": options.repeats, "time_limit": options.time_limit}
    write_outputs(options, text, points, about)
    return 1 if any(point.failures for point in points) else 0


def _numbers(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",") if part]
    except ValueError:
        found = [-1.0]
    if not all(0 <= number <= 1 for number in found):
        raise UsageError("IRC400", f"--settings {text!r}", help=f"give numbers from 0 to 1, as {_SETTINGS}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m irc.tools.compare_torch", description="Compares irc with PyTorch."
    )
    parser.add_argument(
        "--models", default="resnet50", metavar="A,B", help="names or package.module:factory (resnet50)"
    )
    parser.add_argument(
        "--settings",
        default=_SETTINGS,
        metavar="A,B",
        help=f"values of activation_memory_budget ({_SETTINGS})",
    )
    parser.add_argument(
        "--blocks", action=argparse.BooleanOptionalAction, default=True, help="checkpoint per block, too"
    )
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="for each search (60)"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed steps of each module (5)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="that compute (1)")
    parser.add_argument(
        "--profile", action=argparse.BooleanOptionalAction, default=True, help="measure operations"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the points there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
