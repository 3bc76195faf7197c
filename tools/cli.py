"""The command line: `irc optimize`, `pareto`, `inspect`, `run`, `export`, `machine` and `schedule`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..ir import IrcError, UsageError, parse_budget
from .pipeline import add_pipeline, is_pipeline, optimize_pipeline, run_written

if TYPE_CHECKING:
    from rich.status import Status
    from torch import nn

    from ..compiler.model_source import Loaded, Source
    from ..compiler.optimizers import DescribedOptimizer
    from ..passes import Pass, Program
    from .model_report import Inspection
    from .onnx_report import FileReport

__all__ = ["main"]

_EXITS = """exit status: 0 done; 1 internal or verification failure; 2 the command is wrong; 3 the model
does not fit (the smallest feasible budget is printed); 4 an operation is not supported; 5 the time limit
ended before any plan was found"""


_PIPED_COLUMNS = 160
"""How wide tables are where they do not go to a terminal."""


class _Parser(argparse.ArgumentParser):
    """Reports its errors in the form of all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError("IRC400", message, help=f"see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler would write to the terminal
    try:
        options = _parser().parse_args(argv)
        return options.command(options)
    except IrcError as error:
        _report(error)
        return error.exit_status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt as interrupt:
        print("error[IRC001]: interrupted", file=sys.stderr)
        _report_notes(interrupt)
        return 1
    except Exception as error:
        if os.environ.get("IRC_TRACEBACK"):
            raise
        text = " ".join(str(error).split())
        print(
            f"error[IRC000]: internal error: {type(error).__name__}: {text}\n"
            "  help: this is a defect of irc; set IRC_TRACEBACK=1 to see where",
            file=sys.stderr,
        )
        return 1


def _report(error: IrcError) -> None:
    print(error, file=sys.stderr)
    _report_notes(error)


def _report_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        print(f"  note: {note}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    from .. import __version__

    parser = _Parser(prog="irc", description="A compiler for training memory.", epilog=_EXITS)
    parser.add_argument("--version", action="version", version=f"irc {__version__}")
    commands = parser.add_subparsers(dest="subcommand", required=True, parser_class=_Parser)

    optimize = commands.add_parser("optimize", help="plan a training step within a budget", epilog=_EXITS)
    _add_model(optimize)
    optimize.add_argument("--budget", metavar="BYTES", help="bytes, 4GiB, 4GB, or 60%% of the baseline peak")
    optimize.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="write plan, program and weights here"
    )
    optimize.add_argument(
        "--strategy",
        default="auto",
        help="auto, ilp, eviction, min-cut, per-block, sqrt-n, every-<k>, keep-none, keep-all; "
        "with --swap also lms, ome, pofo, swap, recompute",
    )
    optimize.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="for the search (60)"
    )
    _add_swap(optimize, ", also as params,optimizer for what may live there between steps")
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
    optimize.add_argument(
        "--passes", metavar="TEXT", help="the pipeline as text, instead of the options above"
    )
    optimize.add_argument("--print-passes", action="store_true", help="print the pipeline as text and stop")
    optimize.add_argument(
        "--explain", action="store_true", help="print each storage that is not kept, and why"
    )
    add_pipeline(optimize)
    optimize.set_defaults(command=_optimize)

    pareto = commands.add_parser(
        "pareto", help="the memory/time front: the least overhead at each budget", epilog=_EXITS
    )
    _add_model(pareto)
    spread = pareto.add_mutually_exclusive_group()
    spread.add_argument(
        "--points",
        type=int,
        default=20,
        metavar="N",
        help="budgets, evenly spread from the smallest feasible one to the baseline's peak (20)",
    )
    spread.add_argument("--budgets", metavar="A,B", help="these budgets instead, as 90%%,80%%,4GiB")
    pareto.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="write points (at once), table and pictures here"
    )
    pareto.add_argument("--restart", action="store_true", help="delete the points that DIR has already")
    pareto.add_argument(
        "--strategy",
        default="auto",
        help="auto, ilp, eviction, min-cut, per-block, sqrt-n, every-<k>, keep-none, keep-all; "
        "with --swap also lms, ome, pofo, swap, recompute",
    )
    pareto.add_argument(
        "--time-limit", type=float, default=20.0, metavar="SECONDS", help="for the search at each budget (20)"
    )
    _add_swap(pareto)
    pareto.set_defaults(command=_pareto)

    inspect = commands.add_parser("inspect", help="tensors, sizes, baseline peak, smallest feasible budget")
    _add_model(inspect)
    inspect.add_argument("--top", type=int, default=15, metavar="N", help="how many storages to list (15)")
    inspect.set_defaults(command=_inspect)

    run = commands.add_parser("run", help="train a few steps of what optimize wrote", epilog=_EXITS)
    run.add_argument("folder", type=Path, metavar="DIR")
    run.add_argument("--steps", type=int, default=3, metavar="N", help="training steps (3)")
    run.add_argument("--check", action="store_true", help="compare each step with the original model")
    run.add_argument(
        "--weights", type=Path, metavar="FILE", help="begin a pipeline with these weights, of whatever cut"
    )
    run.add_argument(
        "--save-weights", type=Path, metavar="FILE", help="write the trained weights here, as .safetensors"
    )
    _add_verbosity(run)
    run.set_defaults(command=_run)

    export = commands.add_parser(
        "export", help="write trained weights back into the ONNX file that they came from", epilog=_EXITS
    )
    export.add_argument("folder", type=Path, metavar="DIR", help="what irc optimize wrote for an ONNX file")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the new ONNX file")
    export.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="a state_dict as .safetensors, or saved by torch.save; without it DIR's own weights",
    )
    _add_verbosity(export)
    export.set_defaults(command=_export)

    machine = commands.add_parser(
        "machine",
        help="measure this machine, for plans that swap and for plans made elsewhere",
        epilog=_EXITS,
    )
    machine.add_argument("--device", default="", help="cpu, cuda or cuda:1; a GPU where there is one")
    machine.add_argument(
        "--scratch",
        default="",
        metavar="DIR",
        help="the folder whose disk is measured (the system's for temporary files)",
    )
    machine.add_argument("--quick", action="store_true", help="measure for a few seconds, less exactly")
    machine.add_argument("--name", default="", metavar="NAME", help="what to call it (this-machine)")
    machine.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the description here, for --profile FILE, and not among the measurements of this machine",
    )
    _add_verbosity(machine)
    machine.set_defaults(command=_machine)
    _add_schedule(commands.add_parser("schedule", help="simulate pipeline schedules", epilog=_EXITS))
    return parser


def _add_schedule(schedule: argparse.ArgumentParser) -> None:
    schedule.add_argument(
        "--schedule",
        default="all",
        metavar="NAME",
        help="gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipev; without it all of them side by side",
    )
    schedule.add_argument("--stages", type=int, required=True, metavar="N", help="devices in the pipeline")
    schedule.add_argument(
        "--micro-batches", type=int, required=True, metavar="N", help="micro-batches in a step"
    )
    schedule.add_argument(
        "--chunks", type=int, metavar="N", help="stages of each device under interleaved (2)"
    )
    for part in ("forward", "input-gradient", "weight-gradient"):
        schedule.add_argument(
            f"--{part}", type=float, default=1.0, metavar="SECONDS", help="of a micro-batch on a device (1)"
        )
    schedule.add_argument(
        "--transfer", type=float, default=0.0, metavar="SECONDS", help="from a device to the next (0)"
    )
    schedule.add_argument(
        "--held", metavar="BYTES", help="what a micro-batch holds on a device; without it they are counted"
    )
    schedule.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a Chrome trace there, for Perfetto"
    )
    schedule.add_argument("--picture", type=Path, metavar="FILE", help="draw it there (.svg, .png, .pdf)")
    _add_verbosity(schedule)
    schedule.set_defaults(command=_schedule)


def _add_swap(command: argparse.ArgumentParser, more: str = "") -> None:
    command.add_argument(
        "--swap",
        action="append",
        default=[],
        metavar="TIER",
        help=f"copy to host:64GiB or disk:/scratch:200GiB what the step does not need; may be repeated{more}",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="file.onnx, package.module:factory or file.py:factory")
    parser.add_argument("--batch", type=int, metavar="N", help="batch size of an ONNX model")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=SHAPE",
        help="shape of an ONNX input, as 8x3x224x224",
    )
    parser.add_argument(
        "--constant",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of an ONNX input that is settled at import, as shape=[3,4]",
    )
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="NAME=ROLE",
        help="what an ONNX weight or constant becomes: parameter, buffer or constant; NAME may be a pattern",
    )
    parser.add_argument(
        "--draw-weights",
        type=int,
        metavar="SEED",
        help="draw the weight matrices anew (He et al. 2015), for files whose weights are placeholders",
    )
    parser.add_argument(
        "--profile",
        nargs="?",
        type=_profile,
        const=True,
        metavar="MACHINE",
        help="measure operations thoroughly; without the option briefly. With the name of a described "
        "machine, or the path of a file of irc machine: plan for that one, by a roofline model",
    )
    parser.add_argument(
        "--no-profile",
        dest="profile",
        action="store_const",
        const=False,
        help="measure nothing; plan by a roofline model of a modest CPU",
    )
    for annotation, help in (
        ("keep", "never compute the results of this submodule, or of these ONNX nodes, twice"),
        ("recompute", "do not keep the intermediate results of this submodule, or of these ONNX nodes"),
    ):
        parser.add_argument(f"--{annotation}", action="append", default=[], metavar="PATH", help=help)
    _add_verbosity(parser)


def _profile(text: str) -> str:
    """The name or the path of a machine, checked."""
    from ..passes import machine_named

    try:
        machine_named(text)
    except UsageError as error:
        if error.code in ("IRC410", "IRC414"):  # perhaps it is the model
            raise UsageError(
                error.code, error.message, help=f"{error.help}; to measure operations, put --profile last"
            ) from error
        raise
    return text


def _add_verbosity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    volume = parser.add_mutually_exclusive_group()
    volume.add_argument("-v", "--verbose", action="store_true", help="say what each pass took")
    volume.add_argument("-q", "--quiet", action="store_true", help="print errors alone")


# ---------------------------------------------------------------------- progress


class _Progress:
    """Says on the terminal what is going on; silent when piped or quiet."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.verbose = bool(options.verbose)
        self.shown = sys.stderr.isatty() and not options.quiet and not options.json
        self.status: Status | None = None

    @contextmanager
    def phase(self, what: str) -> Generator[None]:
        """Shows `what` while it goes on."""
        started = time.perf_counter()
        if self.shown:
            from rich.console import Console

            with Console(stderr=True).status(what) as self.status:
                yield
            self.status = None
        else:
            yield
        self._took(what, started)

    def before(self, step: Pass, program: Program) -> None:
        """Shows which pass runs."""
        if self.status is not None:
            self.status.update(f"{step.name}: {len(program.graph.operations)} operations")

    def after(self, step: Pass, program: Program, seconds: float) -> None:
        """Says how long a pass took."""
        self._took(f"pass {step.name}", time.perf_counter() - seconds)

    def _took(self, what: str, started: float) -> None:
        if self.verbose:
            print(f"{what}: {time.perf_counter() - started:.1f} s", file=sys.stderr)


# ---------------------------------------------------------------------- commands


def _source(options: argparse.Namespace) -> Source:
    from ..compiler.model_source import Source, parse_constant, parse_input, parse_role

    if options.batch is not None and options.batch <= 0:
        raise UsageError("IRC400", f"--batch {options.batch} is not positive", help="give 1 or more")
    inputs = dict(parse_input(text) for text in options.input) or None
    constants = dict(parse_constant(text) for text in options.constant) or None
    roles = dict(parse_role(text) for text in options.role) or None
    return Source(options.model, options.batch, inputs, options.draw_weights, constants, roles)


def _mark(module: nn.Module, options: argparse.Namespace) -> None:
    """Annotations for what --keep and --recompute name."""
    from ..frontends.torch.annotations import mark
    from ..ir import Policy

    for policy, paths in ((Policy.KEEP, options.keep), (Policy.RECOMPUTE, options.recompute)):
        for path in paths:
            if not path or (policy is Policy.RECOMPUTE and path in options.keep):
                raise UsageError(
                    "IRC400",
                    f"--keep and --recompute both name {path!r}" if path else "an empty path is no submodule",
                    help="give --keep or --recompute the path of a submodule, as layer3",
                )
            mark(module, policy, path)


def _model_name(model: str) -> str:
    """The factory's name, or that of the file."""
    return model.rpartition(":")[2] if ":" in os.path.basename(model) else Path(model).stem


def _pipeline(options: argparse.Namespace) -> list[Pass]:
    from ..compiler.optimize import choice_passes, cost_passes, hold_passes, release_passes
    from ..passes import parse_passes

    if options.passes is not None:
        if options.budget is not None:
            raise UsageError(
                "IRC400",
                "--passes and --budget exclude each other",
                help="write select-checkpoints{budget=...}",
            )
        if options.forwards_in_flight != 1:
            raise UsageError(
                "IRC400",
                "--passes and --forwards-in-flight exclude each other",
                help="write hold-forwards{count=...} before select-checkpoints{...}",
            )
        if options.swap:
            raise UsageError(
                "IRC400",
                "--passes and --swap exclude each other",
                help="write offer-tiers{swap=host:64GiB} before plan-memory{budget=...}",
            )
        if options.optimizer is not None:
            raise UsageError(
                "IRC400",
                "--passes and --optimizer exclude each other",
                help="leave --passes out, and give --budget and --swap",
            )
        if isinstance(options.profile, str):
            raise UsageError(
                "IRC400",
                "--passes and --profile MACHINE exclude each other",
                help=f"write cost{{profile={options.profile}}}",
            )
        return list(parse_passes(options.passes))
    if options.budget is None:
        raise UsageError("IRC400", "the budget is missing", help="give --budget 4GiB, or --budget 60%")
    budget = _budget(options.budget)
    swap = options.swap or None
    optimizer = _optimizer(options)
    *before, cost = cost_passes(options.profile)
    return [
        *hold_passes(options.forwards_in_flight, optimizer),
        *before,
        *release_passes(accumulate=False, optimizer=optimizer),
        cost,
        *choice_passes(swap, options.profile, budget, options.strategy, options.time_limit),
    ]


def _optimizer(options: argparse.Namespace) -> DescribedOptimizer | None:
    """What --optimizer names."""
    if options.optimizer is None:
        return None
    from ..compiler.optimizers import parse_optimizer

    return parse_optimizer(options.optimizer)


def _budget(text: str) -> int | str:
    """A budget as the passes take it, checked."""
    try:
        budget = int(text) if text.isascii() and text.isdecimal() else text
        parse_budget(budget)
    except (ValueError, OverflowError):  # thousands of digits
        raise UsageError("IRC401", "the budget is out of all proportion", help="give --budget 4GiB") from None
    return budget


def _optimize(options: argparse.Namespace) -> int:
    if is_pipeline(options):
        return optimize_pipeline(options, _source(options), _Progress(options), _mark)
    from ..compiler.optimize import check_passes

    pipeline = _pipeline(options)
    check_passes(pipeline)
    if options.print_passes:
        from ..passes import PassManager

        print(PassManager(pipeline))
        return 0
    source = _source(options)
    if options.output is not None:
        from ..compiler.artifact import check_target

        check_target(options.output)
    progress = _Progress(options)
    with progress.phase(f"loading {options.model}"):
        from torch import Tensor

        from ..compiler.model_source import load, training_loss
        from ..compiler.optimize import optimize_module
        from ..torch_support.pytree import flatten

        loaded = load(source)
        _mark(loaded.module, options)
    with progress.phase("capturing, measuring and planning"):
        optimized = optimize_module(
            loaded.module, loaded.args, pipeline, loss=training_loss, observers=[progress]
        )
    if options.output is not None:
        from ..compiler.artifact import write_folder

        with progress.phase(f"writing {options.output}"):
            examples = tuple(leaf for leaf in flatten(loaded.args)[0] if isinstance(leaf, Tensor))
            write_folder(options.output, optimized, source, examples, _optimizer(options))
    if options.json:
        print(json.dumps(optimized.plan.to_json(), indent=1))
    elif not options.quiet:
        print(optimized.plan.summary())
        if options.explain or options.verbose:
            print(optimized.plan.explain())
        if options.output is not None:
            print(f"{'written':>16}  {options.output} (train it with: irc run {options.output} --check)")
    return 0


def _pareto(options: argparse.Namespace) -> int:
    source = _source(options)
    given = [] if options.budgets is None else options.budgets.split(",")
    budgets = tuple(_budget(text) for text in given)
    offered = None
    if options.swap:
        from ..compiler.tiers import offer

        offered = offer(options.swap, options.profile)
    if options.restart and options.output is None:
        raise UsageError("IRC400", "--restart without a folder", help="give -o DIR")
    progress = _Progress(options)
    with progress.phase(f"loading {options.model}"):
        from ..compiler.model_source import load, training_loss
        from ..compiler.optimize import cost_passes
        from ..compiler.pareto.front import FILES
        from ..compiler.pareto.journal import check_folder
        from ..compiler.pareto.sweep import Sweep, trace_front
        from ..frontends.torch import capture
        from ..passes import PassManager, Program
        from ..torch_support.pytree import flatten
        from .pareto_progress import FrontProgress

        sweep = Sweep(options.points, budgets, options.strategy, options.time_limit, offered)
        sweep.check()
        if options.output is not None:
            check_folder(options.output, restart=options.restart)
        loaded = load(source)
        _mark(loaded.module, options)
    with progress.phase("capturing and measuring"):
        sweep = sweep.measured(loaded.module, flatten(loaded.args)[0])
        captured = capture(loaded.module, loaded.args, loss=training_loss)
        program = PassManager(cost_passes(options.profile), [progress]).run(Program(captured.graph))
    with FrontProgress(shown=progress.shown, verbose=progress.verbose) as bar:
        front = trace_front(
            program,
            _model_name(options.model),
            sweep,
            folder=options.output,
            restart=options.restart,
            observer=bar,
        )
    if options.json:
        print(json.dumps(front.to_json(), indent=1))
    elif not options.quiet:
        print(front.table())
        if options.output is not None:
            print(f"written: {', '.join(str(options.output / name) for name in FILES)}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    if options.top < 0:
        raise UsageError("IRC400", f"--top {options.top} is negative", help="give 0 or more")
    source = _source(options)
    progress = _Progress(options)
    with progress.phase(f"loading {options.model}"):
        from ..compiler.model_source import load, load_file, with_example

        module, file = load_file(source), None
        if module is not None:
            from .onnx_report import report_of

            file = report_of(module)
        if module is None or file is None:
            loaded = load(source)
        else:
            loaded = None if file.open_axes or file.undrawn else with_example(module)
    reports: list[Inspection | FileReport] = [] if file is None else [file]
    if loaded is not None:
        _mark(loaded.module, options)
        reports.insert(0, _inspected(loaded, options, progress))
    if options.json:
        print(
            json.dumps(
                {key: value for report in reports for key, value in report.to_json().items()}, indent=1
            )
        )
    elif not options.quiet:
        print("\n".join(report.table() for report in reports))
    return 0


def _inspected(loaded: Loaded, options: argparse.Namespace, progress: _Progress) -> Inspection:
    """What a step of the model needs."""
    with progress.phase("capturing and measuring"):
        from ..compiler.model_source import training_loss
        from ..compiler.optimize import cost_passes
        from ..frontends.torch import capture
        from ..passes import PassManager, Program
        from .model_report import inspect_program

        captured = capture(loaded.module, loaded.args, loss=training_loss)
        program = PassManager(cost_passes(options.profile), [progress]).run(Program(captured.graph))
        return inspect_program(program, options.top)


def _run(options: argparse.Namespace) -> int:
    if options.steps < 1:
        raise UsageError("IRC400", f"--steps {options.steps} is not positive", help="give 1 or more")
    if (options.folder / "pipeline.json").is_file():
        return run_written(options)
    if options.weights is not None:
        raise UsageError(
            "IRC400",
            f"--weights of {options.folder}, which is no pipeline",
            help="optimize the model with these weights in it",
        )
    progress = _Progress(options)
    with progress.phase(f"loading {options.folder}"):
        from ..compiler.artifact import read_folder
        from ..compiler.run import check_folder

        written = read_folder(options.folder)
    with progress.phase("training"):
        report = check_folder(written, options.steps, with_original=options.check)
    if options.json:
        print(json.dumps(report.to_json(), indent=1))
    elif not options.quiet:
        print(report.text())
    for failure in report.failures:
        print(f"error[IRC130]: {failure}", file=sys.stderr)
    if options.save_weights is not None and not report.failures:
        report.save_weights(options.save_weights)
        if not options.quiet and not options.json:
            print(f"written: {options.save_weights}")
    return 1 if report.failures else 0


def _export(options: argparse.Namespace) -> int:
    progress = _Progress(options)
    with progress.phase(f"loading {options.folder}"):
        from ..compiler.onnx_export.export import export_folder

    with progress.phase(f"writing {options.output}"):
        report = export_folder(options.folder, options.weights, options.output)
    if options.json:
        print(json.dumps(report.to_json(), indent=1))
    elif not options.quiet:
        print(report.text())
    return 0


def _machine(options: argparse.Namespace) -> int:
    progress = _Progress(options)
    with progress.phase("loading"):
        from ..compiler.written_files import check_folder
        from ..passes.costs.this_machine import measure_machine, store

    if options.output is not None:
        check_folder(options.output)
    with progress.phase("measuring this machine"):
        measured = measure_machine(options.device, options.scratch, name=options.name, quick=options.quick)
    path = store(measured, options.output)
    if options.json:
        print(json.dumps(measured.to_json(), indent=1))
    elif not options.quiet:
        print(measured.table())
        print(f"{'written':>10}  {path}")
    return 0


def _amount(text: str) -> int:
    """Bytes, as 4GiB."""
    nbytes = parse_budget(_budget(text))
    if not nbytes:
        raise UsageError("IRC400", f"{text} is no number of bytes", help="give bytes, as 100MiB")
    return nbytes


def _schedule(options: argparse.Namespace) -> int:
    from ..compiler.pictures import check_picture
    from ..compiler.written_files import check_folder, write_whole
    from .schedule_report import EqualStages, SimulatedStep, comparison, simulate_all, simulate_known

    for path in (options.trace, options.picture):
        if path is not None:
            check_folder(path)
    if options.picture is not None:
        check_picture(options.picture, "--picture")
    every = options.schedule == "all"
    if every and options.trace is not None:
        raise UsageError("IRC400", "--trace is for one schedule", help="name it: --schedule 1f1b")
    stages = EqualStages(
        options.stages,
        options.micro_batches,
        options.chunks,
        options.forward,
        options.input_gradient,
        options.weight_gradient,
        options.transfer,
        None if options.held is None else _amount(options.held),
    )
    rows = simulate_all(stages) if every else [simulate_known(options.schedule, stages)]
    steps = [row for row in rows if isinstance(row, SimulatedStep)]
    if options.trace is not None:
        from .schedule_trace import trace_events

        write_whole(options.trace, json.dumps(trace_events(steps[0].timeline)))
    if options.picture is not None:
        from .schedule_picture import draw_pipelines

        kind = options.picture.suffix.removeprefix(".")
        write_whole(options.picture, draw_pipelines([step.drawn() for step in steps], kind))
    if options.json:
        found = [step.to_json() for step in steps]
        print(json.dumps(found if every else found[0], indent=1))
    elif not options.quiet:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else _PIPED_COLUMNS, highlight=False)
        console.print(comparison(rows, stages) if every else steps[0].table())
        written = [str(path) for path in (options.trace, options.picture) if path is not None]
        if written:
            print(f"written: {', '.join(written)}")
    return 0
