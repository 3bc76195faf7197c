"""`irc optimize --stages` and `irc run` of what it wrote."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..ir import UsageError, printable
from .options import exact_of, mark, model_name, optimizer_of, source_of
from .progress import Progress

if TYPE_CHECKING:
    from torch import nn

__all__ = ["add_pipeline", "is_pipeline", "optimize_pipeline", "run_written"]


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """The options of `irc optimize` for pipelines."""
    group = parser.add_argument_group("pipelines")
    group.add_argument(
        "--stages",
        type=_number_or_auto,
        metavar="K",
        help="cut the model for K devices, or auto for as many of them as are best",
    )
    group.add_argument(
        "--device",
        action="append",
        metavar="[NAME=]BYTES[@SPEED]",
        help="a device, once for each: cuda:0=16GiB, 8GiB@0.5 (half as fast as costs are measured)",
    )
    group.add_argument(
        "--micro-batches",
        type=_number_or_auto,
        metavar="M",
        help="parts that a batch goes through in, or auto",
    )
    group.add_argument(
        "--schedule",
        help="gpipe, 1f1b, interleaved, zb-h1, zbv or dualpipev (1f1b), or auto, as with --stages auto",
    )
    group.add_argument("--chunks", type=int, metavar="V", help="stages of each device, for interleaved (2)")
    group.add_argument(
        "--checkpoint", metavar="MODE", help="always, except_last or never, instead of a plan for each stage"
    )
    group.add_argument(
        "--partition",
        default=_DEFAULTS["partition"],
        metavar="NAME",
        help="best, or for comparison uniform, time or size (torchgpipe's balance), pipedream",
    )
    group.add_argument(
        "--link", default=_DEFAULTS["link"], metavar="BYTES", help="a second between two devices (10GB)"
    )


def _number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


_ALONE = ("passes", "explain", "print_passes")
"""Options that pipelines do not have."""

_DEFAULTS = {
    "micro_batches": None,
    "schedule": None,
    "chunks": None,
    "checkpoint": None,
    "partition": "best",
    "link": "10GB",
}
"""Options that only pipelines have, as they are if they are not given."""


def is_pipeline(options: argparse.Namespace) -> bool:
    """Whether `irc optimize` was asked for a pipeline.

    Raises:
        UsageError: IRC400 for options of pipelines if it was not.
    """
    if options.stages is not None or options.device is not None:
        return True
    for name, default in _DEFAULTS.items():
        if getattr(options, name) != default:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                "IRC400", f"{flag} without --stages or --device", help=f"give --stages 4, or leave {flag} out"
            )
    return False


def optimize_pipeline(options: argparse.Namespace) -> int:
    """Plans a pipeline, and writes it if the user asks for that."""
    source, progress = source_of(options), Progress(options)
    from ..compiler.pipeline.request import AUTO, PipelineRequest

    for name in _ALONE:
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                "IRC400", f"--stages and {flag} exclude each other", help=f"leave {flag} or --stages out"
            )
    if options.forwards_in_flight != 1:
        raise UsageError(
            "IRC400",
            "--stages and --forwards-in-flight exclude each other",
            help="the schedule of the pipeline says how many forwards are in flight",
        )
    every = options.stages == AUTO
    if options.micro_batches is None and not every:
        raise UsageError("IRC400", "--stages without --micro-batches", help="give --micro-batches 8, or auto")
    budgets = _budgets(options)
    request = PipelineRequest(
        len(budgets) if options.stages is None else options.stages,
        AUTO if options.micro_batches is None else options.micro_batches,
        budgets,
        options.schedule or (AUTO if every else "1f1b"),
        options.chunks,
        options.strategy,
        options.time_limit,
        options.costs,
        options.checkpoint,
        optimizer_of(options),
        options.link,
        options.partition,
        options.swap,
        options.gap,
        exact_of(options),
    )
    request.check()
    if options.output is not None:
        from ..compiler.artifact import check_target

        check_target(options.output)
    for path in options.report:
        from ..compiler.report import check_report

        check_report(path, "--report")
    with progress.phase(f"loading {options.model}"):
        from functools import lru_cache

        from torch import Tensor

        from ..compiler.model_source import load_for_micro_batches
        from ..compiler.pipeline.api import compile_pipeline
        from ..compiler.pipeline.auto import considered_lines
        from ..torch_support.pytree import flatten

        @lru_cache(maxsize=1)  # weights are in memory once
        def load(count: int) -> tuple[nn.Module, tuple[Any, ...]]:
            loaded = load_for_micro_batches(source, count)
            mark(loaded.module, options)
            return loaded.module, loaded.args

        load(1 if request.micro_batches == AUTO else request.count_of_micro_batches)
    with progress.phase("capturing, measuring and planning"):
        pipeline = compile_pipeline(load, request)
    if options.output is not None:
        from ..compiler.pipeline.artifact import write_pipeline

        with progress.phase(f"writing {options.output}"):
            leaves = flatten(load(pipeline.plan.micro_batches)[1])[0]
            examples = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            write_pipeline(options.output, pipeline, source, examples)
    for path in options.report:
        from ..compiler.report import write_pipeline_report

        write_pipeline_report(path, model_name(options.model), pipeline.plan)
    if options.json:
        considered = [asdict(one) for one in pipeline.considered]
        more = {"considered": considered} if considered else {}
        print(json.dumps(pipeline.plan.to_json() | more, indent=1))
    elif not options.quiet:
        for line in considered_lines(pipeline.considered):
            print(f"{'considered':>16}  {line}")
        print(pipeline.plan.summary())
        if options.output is not None:
            trust = " --trust" if source.is_factory else ""
            command = f"irc run {options.output} --check{trust}"
            ranks = f"torchrun --nproc_per_node={pipeline.plan.devices} -m"
            print(printable(f"{'written':>16}  {options.output} (train it with: {ranks} {command})", 2000))
    return 0


def _budgets(options: argparse.Namespace) -> list[str]:
    """Each device that was asked for, as a text."""
    if (options.budget is None) == (options.device is None):
        raise UsageError(
            "IRC400",
            "the budget is missing" if options.budget is None else "--budget and --device exclude each other",
            help="give --budget 4GiB, for each of --stages devices, or --device 4GiB once for each",
        )
    if options.device is not None:
        return options.device
    budgets: list[str] = options.budget.split(",")
    is_one = len(budgets) == 1 and isinstance(options.stages, int)
    return budgets * max(options.stages, 1) if is_one else budgets


def run_written(options: argparse.Namespace) -> int:
    """Trains some steps of a written pipeline; the first rank prints the report."""
    from ..compiler.pipeline.artifact import written_source
    from ..compiler.pipeline.run import in_group, run_pipeline

    original = None
    if options.check:
        original = written_source(options.folder).trusted(options.original, is_trusted=options.trust)
    with in_group() as rank:
        report = run_pipeline(
            options.folder,
            options.steps,
            with_original=options.check,
            original=original,
            weights=options.weights,
            save_weights=options.save_weights,
            is_trusted=options.trust,
        )
    if not rank:
        if options.json:
            print(json.dumps(report.to_json(), indent=1))
        elif not options.quiet:
            print(report.text())
        for failure in report.failures:
            print(f"error[IRC130]: {failure}", file=sys.stderr)
    return 1 if report.failures else 0
