"""`irc explain`: what becomes of each tensor under a plan, and why."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..ir import Decision, MemoryTimeline, Plan, UsageError, format_bytes, printable
from ..ir.files import require_files
from .options import Commands, add_model, budget_of, mark, source_of
from .progress import Progress

if TYPE_CHECKING:
    from ..passes import Program

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds `irc explain` to the command line."""
    explain = commands.add_parser("explain", help="say what becomes of each tensor, and why")
    add_model(explain, "a folder of irc optimize -o; or file.onnx, package.module:factory or file.py:factory")
    explain.add_argument(
        "--budget", default="100%", metavar="BYTES", help="plan a model within this (100%% of its own peak)"
    )
    explain.add_argument(
        "--by",
        choices=("module", "storage", "line"),
        help="sum up by module (equal layers together) or by line of your code, or list storages (module)",
    )
    explain.add_argument("--top", type=int, metavar="N", help="the most rows")
    asked = explain.add_mutually_exclusive_group()
    asked.add_argument(
        "--why", metavar="NAME", help="why storages are kept or not whose name, operation or place has NAME"
    )
    asked.add_argument(
        "--gradient", metavar="PARAMETER", help="where the gradient of a parameter comes from, and when"
    )
    asked.add_argument(
        "--peak", action="store_true", help="the tensors that are there at the peak, and when it is"
    )
    asked.add_argument("--floor", action="store_true", help="what no schedule can do without")
    explain.set_defaults(command=_explain)


def _explain(options: argparse.Namespace) -> int:
    if options.top is not None and options.top < 1:
        raise UsageError("IRC400", f"--top {options.top} is not positive", help="give 1 or more")
    if options.by is not None and (options.json or options.why is not None):
        raise UsageError("IRC400", "--by sums up, and --json and --why list storages", help="leave it out")
    if options.json and (options.gradient is not None or options.floor or options.peak):
        asked = "--floor" if options.floor else "--peak" if options.peak else "--gradient"
        raise UsageError(
            "IRC400",
            f"{asked} is a sentence for a person, and --json asks for data",
            help="leave one of them out; gradients are in timeline.json of a written folder",
        )
    plan, program = _planned(options, Progress(options))
    found = [] if options.why is None else _found(plan, options.why)
    if options.json:
        rows = sorted(plan.decisions, key=lambda row: -row.nbytes) if options.why is None else found
        data = {"format": "irc-decisions-1", "decisions": [asdict(row) for row in rows[: options.top]]}
        print(json.dumps(data, indent=1))
    elif options.why is not None:
        print("\n".join(_why(found[: options.top])))
    elif options.gradient is not None:
        print(_gradient(plan, options.gradient))
    elif options.peak:
        print("\n".join(_peak(plan.timeline().planned, options.top or _SHOWN)))
    elif options.floor:
        print(_floor(program))
    else:
        print(plan.explain(options.by or "module", options.top))
    return 0


def _planned(options: argparse.Namespace, progress: Progress) -> tuple[Plan, Program]:
    """The plan of a folder, or of a model within a budget; and the program that it is of."""
    if os.path.isdir(options.model):
        require_files(Path(options.model), "plan.json")
        from ..compiler.report import read_memory

        plan, _, program = read_memory(Path(options.model))
        return plan, program
    budget, source = budget_of(options.budget), source_of(options)
    with progress.phase(f"loading {options.model}"):
        from ..compiler.model_source import load, training_loss
        from ..compiler.optimize import optimize_module
        from ..compiler.request import Request

        loaded = load(source)
        mark(loaded.module, options)
    request = Request.of(budget, costs=options.costs, loss=training_loss, observers=[progress])
    with progress.phase("capturing, measuring and planning"):
        optimized = optimize_module(loaded.module, loaded.args, request)
    return optimized.plan, optimized.program


def _found(plan: Plan, name: str) -> list[Decision]:
    """The decisions on the storages that a name is in, the largest first."""
    found = [d for d in plan.decisions if name in d.storage or name in d.operation or name in d.location]
    if not found:
        raise UsageError(
            "IRC400",
            f"no storage of forward, no operation and no place has {name!r} in its name",
            help="irc explain DIR --by storage lists some; a module's path or file.py:LINE will do",
        )
    return sorted(found, key=lambda decision: -decision.nbytes)


def _why(decisions: Sequence[Decision]) -> list[str]:
    """The reasons for storages."""
    return [
        printable(
            f"{d.storage} ({format_bytes(d.nbytes)}, {d.operation}, {d.location}): {d.action}; {d.reason}",
            1000,
        )
        for d in decisions
    ]


def _gradient(plan: Plan, parameter: str) -> str:
    """The step of backward that makes the gradient of a parameter."""
    timeline = plan.timeline().planned
    name = f"gradient of {parameter}"
    found = next((each for each in timeline.residents if each.name == name and each.maker >= 0), None)
    if found is None:
        prefix = "gradient of "
        known = [r.name.removeprefix(prefix) for r in timeline.residents if r.name.startswith(prefix)]
        raise UsageError(
            "IRC400",
            f"no gradient of {parameter!r} is made by this step",
            help=f"its gradients are those of {', '.join(map(printable, known[:5]))}...",
        )
    step = timeline.steps[found.maker]
    last = "the step ends" if found.last == len(timeline.steps) - 1 else f"step {found.last}"
    place = ", ".join(filter(None, (step.source, step.module and f"module {step.module}")))
    return printable(
        f"{name}: {format_bytes(found.nbytes)}, made by {step.name} ({step.op}; {place}) in step "
        f"{found.maker} of {len(timeline.steps)}, {step.phase}; it is there until {last}",
        1000,
    )


_SHOWN = 12
"""The number of tensors at the peak that are listed by name."""


def _peak(timeline: MemoryTimeline, top: int) -> list[str]:
    """Lists what is on the device in the step that takes most."""
    index = timeline.peak_step
    step = timeline.steps[index]
    place = f" ({', '.join(filter(None, (step.source, step.module and f'module {step.module}')))})"
    there = sorted(timeline.at(index), key=lambda each: -each.nbytes)
    lines = [
        f"{format_bytes(timeline.peak_bytes)} in step {index} of {len(timeline.steps)}, {step.phase}, while "
        f"{step.name} runs{place if place != ' ()' else ''}:",
        *(f"{format_bytes(each.nbytes):>12}  {each.kind:<12} {each.name}" for each in there[:top]),
    ]
    others = there[top:]
    if others:
        lines.append(
            f"{format_bytes(sum(each.nbytes for each in others)):>12}  in {len(others)} more tensors"
        )
    for nbytes, what in ((step.workspace_bytes, "workspace"), (step.other_bytes, "loss and other forwards")):
        if nbytes:
            lines.append(f"{format_bytes(nbytes):>12}  {what}")
    return [printable(line, 1000) for line in lines]


def _floor(program: Program) -> str:
    """Lists the bytes that are alive at the moment below which no schedule goes."""
    from ..compiler.request import Request
    from ..compiler.tiles import tiles_advice
    from ..passes import Floor, Planner

    problem = Planner(program).problem
    floor = Floor.of(problem)
    when = "at the loss" if floor.node is None else f"while {floor.node.name} runs"
    place = "" if floor.node is None or floor.node.at is None else f" ({floor.node.at})"
    lines = [f"{format_bytes(problem.floor_bytes)} {printable(when + place, 1000)}, whatever is kept:"]
    lines += [f"{format_bytes(nbytes):>12}  {printable(name, 1000)}" for name, nbytes in floor.groups]
    advice = filter(None, (*floor.lower, tiles_advice(program.graph, Request.of("100%"))))
    return "\n".join([*lines, *(f"to lower it: {text}" for text in advice)])
