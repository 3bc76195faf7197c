"""Divides published graphs among devices, and writes the tables beside the published figures."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from irc.ir import UsageError

from ..command import parser_of, run_command, run_tasks
from .page import to_section
from .rows import Limits, Row, tasks

__all__ = ["main"]

_SECTION = "partition-tables"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 2 for a wrong command.

    Args:
        argv: The arguments; those of the process if None.
    """
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "partition_tables",
        "Divides the graphs of dnn-partitioning, PipeDream and Piper among devices.",
        journal=None,
        markdown=None,
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="with dnn-partitioning, pipedream and piper"
    )
    parser.add_argument("--graphs", metavar="A,B", help="only these, such as LayerGraphs/gnmt_training,vgg16")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="for each search (60)")
    parser.add_argument(
        "--plain-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="also run the published dynamic programme, as it stands in Python, for at most so long (0)",
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="threads of CP-SAT (1)")
    parser.add_argument(
        "--bandwidth-gbps", type=float, default=16.0, metavar="B", help="between devices of profiles (16)"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    for name, least in (("seconds", 0.0), ("plain_seconds", 0.0), ("workers", 1), ("bandwidth_gbps", 1e-6)):
        value = getattr(options, name)
        if not least <= value < math.inf:
            raise UsageError(
                "IRC400",
                f"--{name.replace('_', '-')} is {value:g}",
                help=f"give a number from {least:g} on",
            )
    limits = Limits(options.seconds, options.plain_seconds, options.workers)
    names = options.graphs and [name.strip() for name in options.graphs.split(",")]
    gbps: float = options.bandwidth_gbps
    run_tasks(
        options,
        "irc-partition-tables-1",
        {**asdict(limits), "bandwidth_gbps": gbps},
        Row,
        lambda _: tasks(options.data, names, limits, gbps),
        lambda found: to_section(found, gbps),
        _SECTION,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
