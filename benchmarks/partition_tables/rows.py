"""What each method finds for each published graph."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from irc.ir import TimeLimitError, UsageError
from irc.passes.pipeline.balance import block_partition, pipedream, uniform

from .contiguous import best_along, best_contiguous
from .non_contiguous import best_non_contiguous
from .partition_problem import Partition, PartitionProblem, evaluate
from .plain import plain_max_load
from .readers import Profile, read_graph, read_piper, read_profile

__all__ = ["DEVICES", "Known", "Limits", "Row", "known", "tasks"]

DEVICES = (2, 4, 8)
"""Among how many devices the profiles are divided."""

_MS = 1e3
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Row:
    """What one method finds.

    Args:
        method: Its name.
        max_load_ms: Of the slowest device; None where nothing was found in time.
        bound_ms: No partition of the kind has less; 0 where nothing was proved.
        plan_seconds: How long it took.
        is_proved: Whether none of the kind is better.
    """

    method: str
    max_load_ms: float | None
    bound_ms: float
    plan_seconds: float
    is_proved: bool


@dataclass(frozen=True, slots=True)
class Known:
    """Published figures of an instance, found by others on another machine.

    Args:
        instance: Its name.
        dp_ms: By the authors' dynamic programme; None where that did not end.
        dp_seconds: How long it took.
        pipedream_ms: By PipeDream's way of contraction and its dynamic programme.
        expert_ms: By hand; None where there is none.
        contiguous: By CP-SAT, contiguous and without hosts; empty where it was not tried.
        any_order: By CP-SAT, in any order and without hosts.
    """

    instance: str
    dp_ms: float | None
    dp_seconds: float
    pipedream_ms: float
    expert_ms: float | None
    contiguous: str
    any_order: str


@dataclass(frozen=True, slots=True)
class Limits:
    """How long each search may take.

    Args:
        seconds: Each planner's search.
        plain_seconds: The plain dynamic programme; 0 leaves it out.
        workers: Threads of the constraint programme.
    """

    seconds: float
    plain_seconds: float
    workers: int


@cache
def known() -> Mapping[str, Known]:
    """The published figures, by instance."""
    with open(Path(__file__).parent / "known.csv", newline="") as file:
        rows = [
            Known(
                row["instance"],
                None if row["dp_maxload"].startswith("timeout") else float(row["dp_maxload"]),
                float(row["dp_s"]),
                float(row["pipedream_maxload"]),
                float(row["expert_maxload"]) if row["expert_maxload"] else None,
                row["cpsat_contig_noCPU"],
                row["cpsat_noncontig_noCPU"],
            )
            for row in csv.DictReader(file)
        ]
    return {row.instance: row for row in rows}


def tasks(
    folder: Path, names: Sequence[str] | None, limits: Limits, bandwidth_gbps: float
) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """What there is to do, under a key each.

    Args:
        folder: With `dnn-partitioning`, `pipedream` and `piper`; what is missing is left out.
        names: Instances, networks of profiles or graphs of Piper; all if None.
        limits: Of time.
        bandwidth_gbps: Between devices, in gigabytes a second, for the second table of profiles.

    Raises:
        UsageError: IRC476 when the folder has none of them.
    """
    found: list[tuple[str, str, Callable[[], list[Row]]]] = []
    for name in known():
        path = folder / "dnn-partitioning" / "throughput-inputs" / f"{name}.json"
        if path.exists():
            found.append((name, name, partial(_instance, path, limits)))
    for path in sorted((folder / "pipedream").glob("*.txt")):
        profile = read_profile(path)
        for devices in DEVICES:
            for gbps in (math.inf, bandwidth_gbps):
                problem = profile.problem(devices, gbps * _GB)
                key = f"{profile.name} on {devices} at {gbps:g} GB/s"
                found.append((profile.name, key, partial(_profile, profile, problem, limits)))
    for path in sorted((folder / "piper").glob("*.json")):
        found.append((f"piper/{path.stem}", f"piper/{path.stem}", partial(_piper, path, limits)))
    chosen = [(key, task) for name, key, task in found if names is None or name in names]
    if not chosen:
        raise UsageError(
            "IRC476",
            f"{folder} has none of the published graphs that were asked for",
            help="name a folder with dnn-partitioning/throughput-inputs, pipedream or piper in it by --data",
        )
    yield from chosen


def _instance(path: Path, limits: Limits) -> list[Row]:
    """An instance of dnn-partitioning: with its hosts and without, in stages and in any order."""
    whole, alone = (read_graph(path, has_hosts=has_hosts) for has_hosts in (True, False))
    stages = best_contiguous(alone, seconds=limits.seconds)
    rows = [_row("contiguous", best_contiguous(whole, seconds=limits.seconds))]
    if limits.plain_seconds > 0:
        rows.append(_plain(whole, limits.plain_seconds))
    rows.append(_row("contiguous, no host", stages))
    found = best_non_contiguous(
        alone, seconds=limits.seconds, start=stages.assignment, workers=limits.workers
    )
    rows.append(_row("any order, no host", found))
    return rows


def _row(method: str, found: Partition) -> Row:
    return Row(
        method,
        found.max_load_seconds * _MS,
        found.bound_seconds * _MS,
        found.plan_seconds,
        found.is_proved,
    )


def _plain(problem: PartitionProblem, seconds: float) -> Row:
    started = time.monotonic()
    try:
        load_ms = plain_max_load(problem, seconds=seconds) * _MS
    except TimeLimitError:
        return Row("plain", None, 0.0, time.monotonic() - started, False)
    return Row("plain", load_ms, load_ms, time.monotonic() - started, True)


def _profile(profile: Profile, problem: PartitionProblem, limits: Limits) -> list[Row]:
    """A profile: cut as others do, the best along the same order, and the best of all."""
    seconds = [layer.seconds for layer in profile.layers]
    sizes = [layer.activation_bytes + 2 * layer.parameter_bytes for layer in profile.layers]
    transfers = [node.transfer_seconds / 2 for node in problem.nodes]
    stages = len(problem.devices)
    cuts: dict[str, Callable[[], tuple[int, ...]]] = {
        "uniform": lambda: uniform(len(seconds), stages),
        "torchgpipe by time": lambda: block_partition(seconds, stages),
        "torchgpipe by size": lambda: block_partition(sizes, stages),
        "PipeDream": lambda: pipedream(seconds, transfers, stages),
    }
    rows = [_cut(problem, method, cut) for method, cut in cuts.items()]
    rows.append(_row("same order", best_along(problem, range(len(seconds)))))
    rows.append(_row("contiguous", best_contiguous(problem, seconds=limits.seconds, workers=limits.workers)))
    return rows


def _cut(problem: PartitionProblem, method: str, cut: Callable[[], tuple[int, ...]]) -> Row:
    started = time.monotonic()
    ends = cut()
    took = time.monotonic() - started
    assignment = [sum(layer >= end for end in ends) for layer in range(len(problem.nodes))]
    return Row(method, evaluate(problem, assignment).max_load_seconds * _MS, 0.0, took, False)


def _piper(path: Path, limits: Limits) -> list[Row]:
    problem = read_piper(path)
    stages = best_contiguous(problem, seconds=limits.seconds, workers=limits.workers)
    found = best_non_contiguous(
        problem, seconds=limits.seconds, start=stages.assignment, workers=limits.workers
    )
    return [_row("contiguous", stages), _row("any order", found)]
