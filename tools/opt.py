"""`irc opt`: runs passes on a graph in its text form, for those who write passes."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ir import Graph, IrcError, Schedule, UsageError, VerificationError, print_graph, printable
from ..ir.files import write_whole
from ..ir.text import parse_file, print_file, print_program
from .options import Commands

if TYPE_CHECKING:
    from ..passes import Pass, Program

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds `irc opt` to the command line."""
    opt = commands.add_parser("opt", help="run passes on a graph in its text form (FILE.irc), and print it")
    opt.add_argument("file", metavar="FILE", help="FILE.irc: a graph, perhaps with a schedule; - for stdin")
    opt.add_argument(
        "--passes",
        default="",
        metavar="TEXT",
        help="a pipeline, as NAME{OPTION=VALUE,...},NAME; irc passes lists them",
    )
    opt.add_argument(
        "--print-after-all", action="store_true", help="print the program after each pass, to stderr"
    )
    opt.add_argument(
        "--print-after",
        action="append",
        default=[],
        metavar="NAME",
        help="print the program after passes of this name, to stderr; may be repeated",
    )
    opt.add_argument("--timing", action="store_true", help="say what each pass took, to stderr")
    opt.add_argument(
        "--verify-each",
        action="store_true",
        help="after each pass, verify all again, and that the text reads back as the same graph",
    )
    opt.add_argument(
        "--reproducer",
        type=Path,
        metavar="FILE",
        help="where a pass fails, write the program before it here, with the command that fails",
    )
    opt.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the result here, not to stdout")
    opt.set_defaults(command=_opt)


@dataclass
class _Watch:
    """Prints and times what passes return, and keeps what the last one was given.

    Args:
        options: Of the command line.
        done: The passes that have run.
        given: The program that the pass which runs was given.
    """

    options: argparse.Namespace
    done: int = 0
    given: Program | None = None
    seconds: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])

    def before(self, step: Pass, program: Program) -> None:
        """Keeps what a pass is given."""
        self.given = program

    def after(self, step: Pass, program: Program, seconds: float) -> None:
        """Prints the program, if that is asked for."""
        self.done += 1
        self.seconds.append((step.name, seconds))
        if self.options.verify_each:
            _verify(program)
        if self.options.print_after_all or step.name in self.options.print_after:
            print(f"# after {step.name}\n{_text(program)}", file=sys.stderr, end="")


def _opt(options: argparse.Namespace) -> int:
    from ..passes import PassManager, Program, parse_passes

    steps = parse_passes(options.passes) if options.passes else ()
    unknown = set(options.print_after) - {step.name for step in steps}
    if unknown:
        raise UsageError(
            "IRC400", f"--print-after {min(unknown)} names no pass of the pipeline", help="see --passes"
        )
    read = _read(options.file)
    program = Program(read) if isinstance(read, Graph) else Program(read.graph)
    if steps:  # passes run operations to measure and compare them
        from ..compiler.operation_allowlist import check_operations

        check_operations(program.graph)
    watch = _Watch(options)
    started = time.perf_counter()
    try:
        program = PassManager(steps, [watch]).run(program)
    except Exception as error:
        if watch.given is not None and options.reproducer is not None:
            _reproduce(options.reproducer, steps[watch.done :], watch.given, error)
        raise
    if options.timing:
        for name, seconds in watch.seconds:
            print(f"{seconds:10.4f} s  {name}", file=sys.stderr)
        print(f"{time.perf_counter() - started:10.4f} s  in all, with verification", file=sys.stderr)
    if isinstance(read, Schedule) and program.schedule is None and program.graph is read.graph:
        text = print_file(print_program(read))
    else:
        text = print_file(_text(program))
    if options.output is not None:
        write_whole(options.output, text)
    else:
        print(text, end="")
    return 0


def _read(file: str) -> Graph | Schedule:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            "IRC400",
            f"{file} cannot be read: {error}",
            help="give a file of the text form, such as the program.irc of a folder of irc optimize -o",
        ) from error
    return parse_file(text)


def _text(program: Program) -> str:
    return print_graph(program.graph) if program.schedule is None else print_program(program.schedule)


def _verify(program: Program) -> None:
    """Verifies graph and schedule, and that the text form loses nothing.

    Raises:
        VerificationError: IRC103 if the text reads back as something else; as `verify_graph`.
    """
    from ..ir import verify_graph, verify_schedule

    verify_graph(program.graph)
    if program.schedule is not None and program.costs is not None:
        verify_schedule(program.schedule, program.costs.workspace_bytes, tiers=program.tiers)
    text = _text(program)
    again = parse_file(text)
    if text != (print_graph(again) if isinstance(again, Graph) else print_program(again)):
        raise VerificationError("IRC103", "the text form of the program reads back as another one")


def _reproduce(path: Path, steps: Any, program: Program, error: Exception) -> None:
    """Writes what a pass was given, with the command that makes it fail again."""
    from ..passes import PassManager

    kind = error.code if isinstance(error, IrcError) else type(error).__name__
    plain = replace(program, costs=None, schedule=None, plan=None)
    again = printable(
        f"irc opt {shlex.quote(str(path))} --passes {shlex.quote(str(PassManager(steps)))}", 4000
    )
    head = f"# {kind} in {steps[0].name}\n# {again}\n"
    write_whole(path, head + print_file(_text(plain)))
    print(f"written: {printable(str(path))}, which fails again by: {again}", file=sys.stderr)
