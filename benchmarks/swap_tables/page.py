"""The tables as Markdown: published and simulated side by side, and what was to be reached."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from irc.passes import Machine

from ..pages import to_markdown
from .published import Case, Published, largest_batches
from .simulated import Entry

__all__ = ["Fitted", "to_section"]

_PUBLISHED = {"original": "original", "recompute": "recompute", "lms": "swap", "ome": "ome"}
_TITLES = {
    "original": "original",
    "recompute": "recompute only",
    "lms": "LMS",
    "swap": "swap only",
    "ome": "OME",
    "pofo": "POFO",
    "joint": "joint",
}


@dataclass(frozen=True)
class Fitted:
    """A machine, and the one number that was fitted on it.

    Args:
        machine: As it is described.
        fit: The case whose original was to take so many seconds; None where nothing was fitted.
    """

    machine: Machine
    fit: tuple[Case, float] | None


Incumbent = Mapping[str, Sequence[Entry]]


def to_section(machines: Sequence[Fitted], cases: Sequence[Case], found: Incumbent) -> str:
    """All tables, with what is missing named."""
    parts: list[str] = []
    missing = [
        f"{each.machine.name} {case.name}"
        for each in machines
        for case in cases
        if f"{each.machine.name} {case.name}" not in found
    ]
    if missing:
        parts.append(f"Not planned yet: {', '.join(missing)}.")
    parts += [_marks(machines, cases, found), _batches(machines, found)]
    parts += [_table(each, cases, found) for each in machines]
    return "\n\n".join(part for part in parts if part)


# ---------------------------------------------------------------------- what was to be reached


def _marks(machines: Sequence[Fitted], cases: Sequence[Case], found: Incumbent) -> str:
    header = ["network", "batch", "OME published", "half of it"]
    header += [f"joint, {each.machine.name}" for each in machines]
    rows: list[list[str]] = []
    for case in cases:
        published = case.slow_down("ome")
        if published is None:
            continue
        mark = max(published / 2, 0.0)
        row = [case.model, str(case.batch), _percent(published), _percent(mark)]
        for each in machines:
            overhead = _overhead(found.get(f"{each.machine.name} {case.name}", ()), "joint")
            met = "" if overhead is None else ", met" if overhead <= mark else ", **not met**"
            row.append("-" if overhead is None else _percent(overhead) + met)
        rows.append(row)
    if not rows:
        return ""
    return "\n\n".join(
        (
            "## Joint against half of OME's slow-down",
            "Both at OME's published memory on the device, as slow-down over the same machine's original. "
            "Where OME was published as faster than the original, the mark is 0. Batch 128 has no mark: its "
            "originals did not fit and have no published time.",
            to_markdown(header, rows),
        )
    )


def _overhead(entries: Sequence[Entry], strategy: str, budget_bytes: int | None = None) -> float | None:
    original = next((e.seconds for e in entries if e.strategy == "original"), None)
    for entry in entries:
        if entry.strategy == strategy and budget_bytes in (None, entry.budget_bytes) and original:
            return None if entry.seconds is None else entry.seconds / original - 1
    return None


def _batches(machines: Sequence[Fitted], found: Incumbent) -> str:
    known = largest_batches()
    first = found.get(f"{machines[0].machine.name} resnet50 original")
    if first is None:
        return ""
    largest = int(first[0].note)
    theirs = known["original"]
    ratio = known["ome"].batch / theirs.batch
    rows = [["original", "published", str(theirs.batch), "1.00", _mb(theirs.device_bytes), ""]]
    for title, strategy in (("LMS", "swap"), ("recompute only", "recompute"), ("OME", "ome")):
        row = known[strategy]
        slow = (row.seconds / row.batch) / (theirs.seconds / theirs.batch) - 1
        times = f"{row.batch / theirs.batch:.2f}"
        rows.append([title, "published", str(row.batch), times, _mb(row.device_bytes), _percent(slow)])
    rows.append(["original", "simulated", str(largest), "1.00", _mb(first[0].peak_bytes), ""])
    for each in machines:
        for batch, entries in _batches_of(each, found):
            joint = next(e for e in entries if e.strategy == "joint")
            overhead = _overhead(entries, "joint")
            slow = "does not fit" if overhead is None else _percent(overhead)
            title, times = f"joint, {each.machine.name}", f"{batch / largest:.2f}"
            rows.append([title, "simulated", str(batch), times, _mb(joint.peak_bytes), slow])
    mark = (
        f"To be reached: {known['ome'].batch} of {theirs.batch}, or {ratio:.2f} times the largest batch of "
        f"the original, within {_mb(theirs.device_bytes)} MB; the original's is {largest} here. "
        "Slow-downs are by image, over the original at the same batch (published: at its own largest batch)."
    )
    header = ("plan", "", "batch", "over the original's", "peak, MB", "slow-down")
    return "\n\n".join(("## ResNet-50's largest batch", mark, to_markdown(header, rows)))


def _batches_of(each: Fitted, found: Incumbent) -> Iterator[tuple[int, Sequence[Entry]]]:
    for key, entries in found.items():
        name, _, rest = key.partition(" resnet50 batch ")
        if name == each.machine.name and rest:
            yield int(rest), entries


# ---------------------------------------------------------------------- all rows


def _table(each: Fitted, cases: Sequence[Case], found: Incumbent) -> str:
    machine = each.machine
    host = machine.tier("host")
    assert host is not None
    rates = (
        f"{host.out_bytes_per_second / 1e9:.3g} GB/s out and {host.in_bytes_per_second / 1e9:.3g} GB/s back"
    )
    lines = (
        f"{machine.flops / 1e12:.3g} TFLOP/s, {machine.bandwidth_bytes / 1e9:.4g} GB/s of memory, "
        f"{machine.launch_seconds * 1e6:.3g} us to launch an operation; {rates}."
    )
    if each.fit is not None:
        case, seconds = each.fit
        lines += (
            f" The operations a second are fitted so that the original of {case.model} at batch {case.batch} "
            f"takes the published {seconds} s: one number on one row, all others are predictions."
        )
    rows = [
        row
        for case in cases
        if f"{machine.name} {case.name}" in found
        for row in _rows(case, found[f"{machine.name} {case.name}"])
    ]
    header = (
        "network",
        "batch",
        "plan",
        "published MB",
        "host MB",
        "s",
        "slow-down",
        "budget MB",
        "peak MB",
        "host MB",
        "s",
        "slow-down",
        "bound",
    )
    if not rows:
        return ""
    return "\n\n".join((f"## {machine.name}", lines, to_markdown(header, rows)))


def _rows(case: Case, entries: Sequence[Entry]) -> Iterator[list[str]]:
    original = entries[0].seconds
    assert original is not None
    shown: set[str] = set()
    for entry in entries:
        published = _published(case, entry)
        theirs = ["", "", "", ""]
        if published is not None and entry.strategy not in shown:
            shown.add(entry.strategy)
            slow = case.slow_down(_PUBLISHED[entry.strategy])
            theirs = [
                _mb(published.device_bytes),
                _mb(published.host_bytes),
                f"{published.seconds:.3f}",
                "" if slow is None or entry.strategy == "original" else _percent(slow),
            ]
        title = _TITLES[entry.strategy]
        if entry.strategy == "lms" and not entry.budget_bytes:
            title = f"{title}, {re.sub('^all swapped, ', '', entry.note)}"
        if entry.strategy == "joint" and entry.budget_bytes != case.published["ome"].device_bytes:
            title = f"{title}, same part"
        ours = [_mb(entry.budget_bytes) if entry.budget_bytes else "", _mb(entry.peak_bytes)]
        if entry.seconds is None:
            ours += ["", "", "does not fit", ""]
        else:
            slow = "" if entry.strategy == "original" else _percent(entry.seconds / original - 1)
            bound = _percent(entry.bound_seconds / original - 1) if entry.strategy == "joint" else ""
            ours += [_mb(entry.host_bytes), f"{entry.seconds:.3f}", slow, bound]
        yield [case.model, str(case.batch), title, *theirs, *ours]


def _published(case: Case, entry: Entry) -> Published | None:
    """The published row that an entry stands beside: that of its memory, or of the original."""
    row = case.published.get(_PUBLISHED.get(entry.strategy, ""))
    if row is None or (entry.strategy != "original" and entry.budget_bytes != row.device_bytes):
        return None
    return row


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f}"


def _percent(part: float) -> str:
    return f"{100 * part:.1f}%" if abs(part) >= 0.0005 else "0.0%"
