"""The tables as Markdown: what was found beside what is published, and what balancers of others do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..pages import to_markdown
from .rows import DEVICES, Known, Row, known

__all__ = ["to_section"]

Incumbent = Mapping[str, Sequence[Row]]


def to_section(found: Incumbent, bandwidth_gbps: float) -> str:
    """All tables of what was found so far; tables without a row are left out.

    Args:
        found: The rows by key, as of `tasks`.
        bandwidth_gbps: Between the devices of the second table of profiles.
    """
    instances = [each for each in known().values() if each.instance in found]
    parts: list[str] = []
    if instances:
        parts += [_with_hosts(instances, found), _without_hosts(instances, found)]
    parts += [part for gbps in (math.inf, bandwidth_gbps) for part in _profiles(found, gbps)]
    piper = [key for key in found if key.startswith("piper/")]
    if piper:
        parts.append(_piper(piper, found))
    return "\n\n".join(parts)


def _of(found: Incumbent, key: str) -> dict[str, Row]:
    return {row.method: row for row in found[key]}


def _with_hosts(instances: Sequence[Known], found: Incumbent) -> str:
    header = (
        "instance",
        "max-load, ms",
        "",
        "s",
        "plain DP, ms",
        "s",
        "published DP, ms",
        "published s",
        "PipeDream, published",
        "expert, published",
    )
    rows: list[list[str]] = []
    ours = plain = published = 0.0
    unfinished = 0
    for each in instances:
        by = _of(found, each.instance)
        row, other = by["contiguous"], by.get("plain")
        mine = [_ms(row.max_load_ms), _proof(row), f"{row.plan_seconds:.2f}"]
        beside = [_ms(other.max_load_ms), f"{other.plan_seconds:.0f}"] if other else ["", ""]
        theirs = [_ms(each.dp_ms), f"{each.dp_seconds:.2f}", _ms(each.pipedream_ms), _ms(each.expert_ms)]
        rows.append([each.instance, *mine, *beside, *theirs])
        if each.dp_ms is not None:
            ours += row.plan_seconds
            published += each.dp_seconds
            plain += other.plan_seconds if other else 0.0
            unfinished += other is not None and other.max_load_ms is None
    lines = [
        "## Contiguous, on accelerators and hosts",
        to_markdown(header, rows),
        f"The {sum(each.dp_ms is not None for each in instances)} instances that the authors' programme "
        f"finished took {ours:.1f} s here. That programme, in C++, took {published:.0f} s, in another "
        "run than this one.",
    ]
    if plain:
        still = f", {unfinished} of them without coming to an end" if unfinished else ""
        lines.append(f"Its method as it stands, in numpy and in this run, took {plain:.0f} s{still}.")
    return "\n\n".join(lines)


def _without_hosts(instances: Sequence[Known], found: Incumbent) -> str:
    header = (
        "instance",
        "contiguous, ms",
        "",
        "s",
        "published CP-SAT",
        "any order, ms",
        "bound",
        "s",
        "published CP-SAT, any order",
    )
    rows: list[list[str]] = []
    for each in instances:
        by = _of(found, each.instance)
        stages, any_order = by["contiguous, no host"], by["any order, no host"]
        rows.append(
            [
                each.instance,
                _ms(stages.max_load_ms),
                _proof(stages),
                f"{stages.plan_seconds:.2f}",
                each.contiguous,
                _ms(any_order.max_load_ms),
                _proof(any_order),
                f"{any_order.plan_seconds:.1f}",
                each.any_order,
            ]
        )
    return f"## On accelerators alone\n\n{to_markdown(header, rows)}"


_OTHERS = ("uniform", "torchgpipe by size", "torchgpipe by time", "PipeDream")


def _profiles(found: Incumbent, gbps: float) -> Iterator[str]:
    """The profiles at one bandwidth, with how far the others are off in the mean and at worst."""
    at = f" at {gbps:g} GB/s"
    keys = [key for key in found if key.endswith(at)]
    if not keys:
        return
    header = (
        "network",
        "devices",
        *(f"{name}, off by" for name in _OTHERS),
        "same order",
        "best, ms",
        "",
        "s",
    )
    rows: list[list[str]] = []
    off: dict[str, list[float]] = {name: [] for name in _OTHERS}
    names = list(dict.fromkeys(key.split(" on ")[0] for key in keys))
    for name in names:
        for devices in DEVICES:
            by = _of(found, key) if (key := f"{name} on {devices}{at}") in found else None
            if by is None:
                continue
            same, best = by["same order"], by["contiguous"]
            least = same.max_load_ms or math.nan
            for other in _OTHERS:
                off[other].append((by[other].max_load_ms or math.nan) / least - 1)
            percent = [f"{100 * off[other][-1]:.1f}%" for other in _OTHERS]
            ours = [_ms(same.max_load_ms), _ms(best.max_load_ms), _proof(best), f"{best.plan_seconds:.2f}"]
            rows.append([name, str(devices), *percent, *ours])
    title = "without transfers" if gbps == math.inf else f"with transfers at {gbps:g} GB/s"
    summary = "; ".join(
        f"{other} {100 * sum(each) / len(each):.1f}% and {100 * max(each):.1f}%"
        for other, each in off.items()
    )
    yield f"## PipeDream's profiles, {title}"
    yield to_markdown(header, rows)
    yield f"Off the best of the same order, in the mean and at worst: {summary}."


def _piper(keys: Sequence[str], found: Incumbent) -> str:
    header = ("graph", "contiguous, ms", "", "s", "any order, ms", "", "s")
    rows: list[list[str]] = []
    for key in keys:
        by = _of(found, key)
        cells = [
            [_ms(row.max_load_ms), _proof(row), f"{row.plan_seconds:.2f}"]
            for row in (by["contiguous"], by["any order"])
        ]
        rows.append([key, *cells[0], *cells[1]])
    return f"## Piper's graphs\n\n{to_markdown(header, rows)}"


def _ms(load_ms: float | None) -> str:
    return "" if load_ms is None else f"{load_ms:.4f}"


def _proof(row: Row) -> str:
    return "proved" if row.is_proved else f"bound {row.bound_ms:.4f}"
