"""Runs four training scripts as they are, with irc, and with torch's methods, and writes a page.

    python -m benchmarks.user_scripts --markdown docs/results/user_scripts.md

A row is a process of its own, in which the original and the changed script take their steps in turns, from
one state of the random numbers. `peak` is what the allocator hands out in forward and backward above what the
script holds between its steps, the most of the steps measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from irc.compiler.comparison.torch_methods import NotApplicableError, methods
from irc.ir import IrcError, first_line
from irc.passes.costs.profiling import allocation_levels

from ..command import chosen, parser_of, run_command, run_row_alone, write_json, write_page
from ..harness import hardware
from ..pages import to_markdown

__all__ = ["Row", "main", "measure", "ways"]

SCRIPTS = ("gpt2_lora", "convnext_bf16", "diffusion_unet", "packed_tagger")
_BUDGETS = ("100%", "60%", "40%")
_WARM, _STEPS = 8, 24
"""The steps in which all batches come twice and plans are made, and all steps, whose losses are compared.

After the first ones the peak is taken of every other step, and the rest are timed.
"""


@dataclass(frozen=True)
class Row:
    """One way of running a script.

    Args:
        script: Its name.
        way: The change that is made to it.
        lines: The lines that it adds.
        first_seconds: CPU seconds of the change and the first forward and backward.
        peak_bytes: The most that forward and backward take above what is there between steps.
        original_bytes: The same of the script as it is.
        step_ratio: The median CPU seconds of a step over those of the script as it is.
        is_equal: Whether all losses were the same, bit for bit.
        planned_bytes: The peak that irc promised, with what is there before the step; None for others.
        refused: The reason why it does not run; empty if it does.
    """

    script: str
    way: str
    lines: int = 0
    first_seconds: float = 0.0
    peak_bytes: int = 0
    original_bytes: int = 0
    step_ratio: float = 0.0
    is_equal: bool = False
    planned_bytes: int | None = None
    refused: str = ""
    notes: list[str] = field(default_factory=list[str])

    def cells(self) -> list[str]:
        """The row of the table."""
        if self.refused:
            return [self.way, str(self.lines), *["-"] * 5, self.refused]
        return [
            self.way,
            str(self.lines),
            f"{self.first_seconds:.1f}",
            f"{self.peak_bytes / 2**20:.1f}",
            f"{self.peak_bytes / self.original_bytes:.0%}",
            f"{self.step_ratio:.2f}",
            "equal" if self.is_equal else "differ",
            "; ".join(self.notes),
        ]


_HEADER = (
    "way",
    "lines added",
    "to the first step, CPU s",
    "peak, MiB",
    "of the original's",
    "step, x",
    "losses",
    "remarks",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 if irc broke a promise, 2 if the command is wrong."""
    parser = parser_of(
        "user_scripts",
        "Runs training scripts as they are, with irc, and with torch's methods.",
        json=None,
        markdown=None,
    )
    parser.add_argument("--scripts", metavar="A,B", help=f"some of {', '.join(SCRIPTS)}")
    parser.add_argument("--row", nargs=2, metavar=("SCRIPT", "WAY"), help=argparse.SUPPRESS)
    return run_command(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    if options.row is not None:
        print(json.dumps(asdict(measure(*options.row))))
        return 0
    rows: list[Row] = []
    for script in chosen(options.scripts, SCRIPTS, "script"):
        for way in ways(_module(script)):
            rows.append(Row(**run_row_alone(options, "user_scripts", (script, way))))
            print(script, *rows[-1].cells(), sep="  ", file=sys.stderr, flush=True)
    write_json(options.json, rows)
    text = page(rows)
    write_page(options.markdown, text)
    print(text)
    return int(any(row.way.startswith("irc") and not row.refused and not row.is_equal for row in rows))


def _module(script: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{script}")


# ---------------------------------------------------------------------- ways


def ways(script: ModuleType) -> dict[str, tuple[int, Callable[[Any], Any]]]:
    """Returns the ways of running a script, each with the lines that it adds."""
    found: dict[str, tuple[int, Callable[[Any], Any]]] = {}
    for name, change in vars(script).items():
        if name in ("by_dynamo", "gradient_checkpointing"):
            label = "irc.backend" if name == "by_dynamo" else "gradient_checkpointing_enable"
            found[label] = _lines(change), change
    for method in methods(script.model(), script.example(), ("blocks", "budget"), (0.5, 0.2)):
        found[method.name] = 2, partial(_changed, method.apply)
    for budget in _BUDGETS:
        change = partial(script.planned, budget=budget)
        found[f"irc.optimize {budget}"] = _lines(script.planned), change
    return found


def _lines(change: Callable[..., Any]) -> int:
    """Returns the lines of a function's body without its docstring."""
    lines = [line for line in inspect.getsource(change).splitlines() if line.strip()]
    return sum(not line.lstrip().startswith(('"""', "def ")) for line in lines)


def _changed(apply: Callable[[nn.Module], None], model: nn.Module) -> nn.Module:
    apply(model)
    return model


# ---------------------------------------------------------------------- measuring


def measure(script: str, way: str) -> Row:
    """Runs a script in one way beside the script as it is."""
    torch.set_num_threads(1)
    module = _module(script)
    lines, change = ways(module)[way]
    with_original = _Run(module, lambda model: model)
    notes: list[str] = []
    try:
        changed = _Run(module, change)
        pairs = [(with_original.step(), changed.step()) for _ in range(_STEPS)]
    except (IrcError, NotApplicableError) as error:
        return Row(script, way, lines, refused=f"refused: {first_line(error)[:160]}")
    except Exception as error:
        return Row(script, way, lines, refused=f"fails: {type(error).__name__}: {first_line(error)[:160]}")
    plan = getattr(changed.model, "irc_plan", None)
    if plan is not None and len(changed.model.irc_plans) > 1:
        notes.append(f"{len(changed.model.irc_plans)} plans")
    return Row(
        script,
        way,
        lines,
        changed.first_seconds,
        max(changed.peaks),
        max(with_original.peaks),
        statistics.median(changed.seconds[_WARM:]) / statistics.median(with_original.seconds[_WARM:]),
        all(torch.equal(a, b) for a, b in pairs),
        None if plan is None else plan.peak_bytes,
        notes=notes,
    )


class _Run:
    """A script that runs in one way, with random numbers of its own.

    Attributes:
        first_seconds: CPU seconds of the change and the first forward and backward.
        seconds: CPU seconds of each forward and backward.
        peaks: Bytes that each took above those before it.
    """

    def __init__(self, script: ModuleType, change: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        original = script.model()
        started = time.process_time()
        self.model = change(original)
        self.first_seconds = time.process_time() - started
        torch.manual_seed(1)
        self._state = torch.get_rng_state()
        self._steps: Iterator[Tensor | None] = script.steps(self.model)
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self._taken = 0

    def step(self) -> Tensor:
        """Takes one step; returns its loss."""
        torch.set_rng_state(self._state)
        next(self._steps)
        losses: list[Tensor] = []

        def forward_and_backward() -> None:
            started = time.process_time()
            loss = next(self._steps)
            assert loss is not None
            self.seconds.append(time.process_time() - started)
            losses.append(loss)

        self._taken += 1
        if self._taken % 2 or self._taken <= _WARM:
            forward_and_backward()
            self.first_seconds += self.seconds[0] if self._taken == 1 else 0.0
        else:
            gc.collect()
            self.peaks += [level.peak_bytes for level in allocation_levels([forward_and_backward], "cpu")]
            self.seconds.pop()  # it has the profiler's in it
        self._state = torch.get_rng_state()
        return losses[0]


# ---------------------------------------------------------------------- the page


def page(rows: Sequence[Row]) -> str:
    """Writes the page of all rows."""
    parts = [
        "# Scripts as people write them",
        "Written by `python -m benchmarks.user_scripts --markdown docs/results/user_scripts.md`: "
        f"{hardware()}. Four scripts (`benchmarks/user_scripts/`) run as they are and with the lines that "
        "each way adds. The original and the changed script take steps in turns in one process. *Peak*: "
        "what forward and backward take above what the script holds between steps (parameters, gradients, "
        "the optimizer's state, averages), by the allocator's events. *Step*: CPU seconds of forward and "
        "backward over the original's, one thread, the median of eight. *Losses*: of all steps, bit for bit. "
        "Budgets of irc are of the baseline's peak, parameters included; those of `activation_memory_budget` "
        "are of activations.",
    ]
    for script in dict.fromkeys(row.script for row in rows):
        own = [row for row in rows if row.script == script]
        original = next((row.original_bytes for row in own if row.original_bytes), 0)
        parts.append(f"## {_module(script).TITLE}")
        parts.append(f"The original takes {original / 2**20:.1f} MiB.")
        parts.append(to_markdown(_HEADER, [row.cells() for row in own]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
