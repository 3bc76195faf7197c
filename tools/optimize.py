"""`irc optimize`: plans a model within a budget, or cuts it into a pipeline."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ..ir import UsageError, printable
from .options import (
    EXITS,
    Commands,
    add_compiler,
    add_exact,
    add_gap,
    add_model,
    add_swap,
    budget_of,
    exact_of,
    mark,
    model_name,
    optimizer_of,
    source_of,
)
from .pipeline import add_pipeline, is_pipeline, optimize_pipeline
from .progress import Progress
from .report import REPORTS

if TYPE_CHECKING:
    from ..compiler.optimize import Optimized
    from ..compiler.request import Request

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds `irc optimize` to the command line."""
    optimize = commands.add_parser("optimize", help="plan a training step within a budget", epilog=EXITS)
    add_model(optimize)
    optimize.add_argument(
        "--budget",
        metavar="BYTES",
        help="bytes, 4GiB, 4GB, or 60%% of the baseline peak; with --stages, of a device's equal share in it",
    )
    optimize.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="write plan, program and weights here"
    )
    optimize.add_argument(
        "--strategy",
        default="auto",
        help="auto, ilp, eviction, or a published method (irc compare tries all, and names them); "
        "with --swap also lms, ome, pofo, swap, recompute",
    )
    optimize.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="for the search (60)"
    )
    add_gap(optimize)
    add_swap(optimize, ", also as params,optimizer for what may live there between steps")
    optimize.add_argument(
        "--optimizer",
        metavar="NAME[:KEY=VALUE,...]",
        help="take the steps of this optimizer within backward, as adamw:lr=1e-3,betas=0.9/0.999",
    )
    optimize.add_argument(
        "--forwards-in-flight",
        type=int,
        default=1,
        metavar="N",
        help="plan for N forwards before their backwards (1)",
    )
    add_exact(optimize)
    add_compiler(optimize)
    optimize.add_argument(
        "--passes", metavar="TEXT", help="the pipeline as text, instead of the options above"
    )
    optimize.add_argument("--print-passes", action="store_true", help="print the pipeline as text and stop")
    optimize.add_argument(
        "--explain", action="store_true", help="print each storage that is not kept, and why"
    )
    optimize.add_argument(
        "--report",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help=f"show the memory of original and plan in {REPORTS}; may be repeated",
    )
    add_pipeline(optimize)
    optimize.set_defaults(command=_optimize)


def _optimize(options: argparse.Namespace) -> int:
    if is_pipeline(options):
        return optimize_pipeline(options)
    source = None if options.print_passes else source_of(options)
    progress = Progress(options)
    request = _request(options, progress)
    if source is None:
        from ..passes import PassManager

        print(PassManager(request.passes()))
        return 0
    if options.report:
        from ..compiler.report import check_report

        for path in options.report:
            check_report(path, "--report")
    if options.output is not None:
        from ..compiler.artifact import check_target

        check_target(options.output)
    with progress.phase(f"loading {options.model}"):
        from torch import Tensor

        from ..compiler.model_source import load
        from ..compiler.optimize import optimize_module
        from ..torch_support.pytree import flatten

        loaded = load(source)
        mark(loaded.module, options)
    with progress.phase("capturing, measuring and planning"):
        optimized = optimize_module(loaded.module, loaded.args, request)
    if options.output is not None:
        from ..compiler.artifact import write_folder

        with progress.phase(f"writing {options.output}"):
            examples = tuple(leaf for leaf in flatten(loaded.args)[0] if isinstance(leaf, Tensor))
            write_folder(options.output, optimized, source, examples, optimizer_of(options))
    if options.report:
        _write_reports(options, optimized, request, progress)
    if options.json:
        print(json.dumps(optimized.plan.to_json(), indent=1))
    elif not options.quiet:
        print(optimized.plan.summary())
        if options.explain or options.verbose:
            print(optimized.plan.explain())
        if options.output is not None:
            trust = " --trust" if source.is_factory else ""
            command = f"irc run {options.output} --check{trust}"
            print(printable(f"{'written':>16}  {options.output} (train it with: {command})", 2000))
        for path in options.report:
            print(f"{'written':>16}  {printable(str(path), 1000)}")
    return 0


def _write_reports(
    options: argparse.Namespace, optimized: Optimized, request: Request, progress: Progress
) -> None:
    """Writes what --report asks for; pages show other budgets too."""
    from ..compiler.report import front_of, write_report

    plan, front = optimized.plan, None
    if any(path.suffix == ".html" for path in options.report):
        with progress.phase("planning other budgets"):
            front = front_of(optimized.program, plan, request.plan)
    for path in options.report:
        write_report(path, model_name(options.model), plan, plan.timeline(), front)


def _request(options: argparse.Namespace, progress: Progress) -> Request:
    """The request that the options are, or the text of --passes."""
    if options.passes is not None:
        _refuse_beside_passes(options)
    elif options.budget is None:
        raise UsageError("IRC400", "the budget is missing", help="give --budget 4GiB, or --budget 60%")
    from ..compiler.model_source import training_loss
    from ..compiler.request import Request
    from ..passes import parse_passes

    if options.passes is not None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            passes = parse_passes(options.passes)
        for warning in caught:
            print(f"warning: {warning.message}", file=sys.stderr)
        return Request.of_passes(passes, loss=training_loss, observers=[progress])
    return Request.of(
        budget_of(options.budget),
        strategy=options.strategy,
        time_limit=options.time_limit,
        gap=options.gap,
        costs=options.costs,
        swap=options.swap or None,
        optimizer=optimizer_of(options),
        forwards_in_flight=options.forwards_in_flight,
        exact=exact_of(options),
        compiler=options.compiler,
        loss=training_loss,
        observers=[progress],
    )


def _refuse_beside_passes(options: argparse.Namespace) -> None:
    """Refuses options that --passes says in its own way.

    Raises:
        UsageError: IRC400.
    """
    machine = None if options.costs in ("measured", "thorough", "analytic") else options.costs
    others = (
        ("--budget", options.budget is not None, "write plan-memory{budget=...}"),
        (
            "--forwards-in-flight",
            options.forwards_in_flight != 1,
            "write hold-forwards{count=...} before plan-memory{...}",
        ),
        (
            "--swap",
            bool(options.swap),
            "write offer-tiers{swap=host:64GiB} before plan-memory{budget=...}",
        ),
        ("--optimizer", options.optimizer is not None, "leave --passes out, and give --budget and --swap"),
        ("--exact", options.exact is not None, "write tile-rows{tiles=...} before cost{...}"),
        ("--compiler", options.compiler is not None, "write fuse-operations before cost{...}"),
        ("--costs MACHINE", machine is not None, f"write cost{{profile={machine}}}"),
    )
    for flag, is_given, help in others:
        if is_given:
            raise UsageError("IRC400", f"--passes and {flag} exclude each other", help=help)
