"""The tables as Markdown: published and planned side by side, and what was to be reached."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from irc.passes import Machine

from ..pages import to_markdown
from .planned import Outcome, Point
from .published import Resnet, Searched, ladder
from .tables import RESNET_STRATEGIES

__all__ = ["ladder_section", "resnet_section", "searched_section"]

Found = Mapping[str, Sequence[Outcome]]

_THIRD = 1 / 3


def searched_section(machines: Sequence[Machine], rows: Sequence[Searched], found: Found) -> str:
    """The table of optimal gradient checkpoint search for each machine."""
    parts = [_missing([f"{m.name} {row.model}" for m in machines for row in rows], found)]
    for machine in machines:
        known = [row for row in rows if f"{machine.name} {row.model}" in found]
        if not known:
            continue
        outcomes = [(row, found[f"{machine.name} {row.model}"]) for row in known]
        theirs = [(row, both[0]) for row, both in outcomes]
        header = (
            *("network", "batch", "operations", "step MiB, theirs", "here", "s, theirs", "here"),
            *(
                "cut, theirs",
                "ogc here",
                "added, theirs",
                "ogc here",
                "irc at their cut",
                "bound",
                "a third?",
            ),
            *("of everything", "irc's cut in their time", "deepest cut", "ogc planned in s", "irc"),
        )
        lines = [_searched(row, *both) for row, both in outcomes]
        goal = _goal("their cut", [(row.overhead, outcome) for row, outcome in theirs])
        parts += [f"## {machine.name}", _rates(machine), _agreement(theirs), goal, to_markdown(header, lines)]
    return "\n\n".join(part for part in parts if part)


def _agreement(outcomes: Sequence[tuple[Searched, Outcome]]) -> str:
    """The networks whose original peak and whose cut by `ogc` are near the published ones, counted."""
    peaks = [abs(_above(outcome) / row.regular_bytes - 1) for row, outcome in outcomes]
    cuts = [abs(outcome.cut(outcome.point("ogc").peak_bytes) - row.cut) for row, outcome in outcomes]
    return (
        f"Peaks of the original are within 4% of the published ones on {sum(p <= 0.04 for p in peaks)} of "
        f"{len(peaks)} networks, within 12% on {sum(p <= 0.12 for p in peaks)}; cuts by ogc are within 3 "
        f"points on {sum(c <= 0.03 for c in cuts)}, within 8 on {sum(c <= 0.08 for c in cuts)}."
    )


def _above(outcome: Outcome) -> int:
    """The original's peak above parameters and what is there before the step."""
    return outcome.baseline_bytes - outcome.parameter_bytes


def _searched(row: Searched, theirs: Outcome, whole: Outcome) -> list[str]:
    ogc, point = theirs.point("ogc"), theirs.point("their cut")
    within, deepest, everything = (
        theirs.point("their time"),
        theirs.point("deepest"),
        whole.point("their cut"),
    )
    return [
        row.model,
        str(row.batch),
        str(theirs.operations),
        f"{row.regular_bytes / 2**20:,.0f}",
        f"{_above(theirs) / 2**20:,.0f}",
        f"{row.seconds:.3f}",
        f"{theirs.step_seconds:.3f}",
        _percent(row.cut, 0),
        _percent(theirs.cut(ogc.peak_bytes), 0),
        _percent(row.overhead, 0),
        _added(ogc),
        _added(point),
        _percent(point.bound),
        _verdict(row.overhead, point, theirs),
        _added(everything),
        _percent(theirs.cut(within.peak_bytes), 0),
        _percent(theirs.cut(deepest.peak_bytes), 0),
        f"{ogc.plan_seconds:.1f}",
        f"{point.plan_seconds:.1f}",
    ]


def _verdict(overhead: float, point: Point, outcome: Outcome) -> str:
    """Whether a plan adds at most a third of a published overhead, and if not, whether any plan can."""
    if point.overhead is not None and point.overhead <= _THIRD * overhead:
        return "met"
    if point.budget_bytes < outcome.floor_bytes or point.bound > _THIRD * overhead:
        return "impossible"
    return "**not met**"


def _goal(question: str, outcomes: Sequence[tuple[float, Outcome]]) -> str:
    """The rows that reach a third of the published overhead, counted, and the mean."""
    points = [(overhead, outcome.point(question)) for overhead, outcome in outcomes]
    verdicts = [_verdict(overhead, outcome.point(question), outcome) for overhead, outcome in outcomes]
    fits = [(overhead, p.overhead) for overhead, p in points if p.overhead is not None]
    text = "At most a third of the published time, at the published memory: "
    text += f"{verdicts.count('met')} of {len(points)}"
    if verdicts.count("impossible"):
        count = verdicts.count("impossible")
        verb = "is" if count == 1 else "are"
        text += f"; {count} {verb} proved impossible for the graph that irc plans on this machine"
    if fits:
        theirs, ours = (statistics.fmean(values) for values in zip(*fits, strict=True))
        bounds = statistics.fmean(point.bound for _, point in points if point.overhead is not None)
        text += f". Mean of what is added where it fits: {_percent(ours)}, of the bounds {_percent(bounds)}; "
        text += f"published {_percent(theirs)}"
    return f"{text}."


def ladder_section(machine: Machine, found: Found) -> str:
    """The ladder of checkpoints."""
    outcomes = found.get(machine.name, ())
    if not outcomes:
        return _missing([machine.name], found)
    none_bytes, rungs = ladder()
    first = outcomes[0]
    rows = [["none", "", f"{none_bytes / 1e6:,.0f}", _mb(first.baseline_bytes), *[""] * 9]]
    for rung, outcome in zip(rungs, outcomes, strict=True):
        own = outcome.point(f"checkpoints-{rung.checkpoints}")
        point, within = outcome.point("their memory"), outcome.point("their time")
        rows.append(
            [
                str(rung.checkpoints),
                _percent(rung.share, 0),
                f"{rung.share * none_bytes / 1e6:,.0f}",
                _mb(own.peak_bytes),
                _percent(rung.overhead, 0),
                _added(own, 0),
                _added(outcome.point("its memory")),
                _mb(point.peak_bytes),
                _added(point),
                _percent(point.bound),
                _verdict(rung.overhead, point, outcome),
                _mb(within.peak_bytes),
                "met" if within.peak_bytes < point.budget_bytes else "**not met**",
            ]
        )
    header = (
        *("checkpoints", "part", "MB, theirs", "strategy here", "added, theirs", "strategy here"),
        *(
            "irc in its MB",
            "irc at their part, MB",
            "added",
            "bound",
            "a third?",
            "irc MB in their time",
            "less?",
        ),
    )
    goal = _goal("their memory", [(r.overhead, o) for r, o in zip(rungs, outcomes, strict=True)])
    return "\n\n".join((f"## {machine.name}", _rates(machine), goal, to_markdown(header, rows)))


def resnet_section(machines: Sequence[Machine], rows: Sequence[Resnet], found: Found) -> str:
    """The recomputation of OME's ResNets for each machine."""
    parts = [_missing([f"{m.name} {row.model}-{row.batch}" for m in machines for row in rows], found)]
    for machine in machines:
        known = [row for row in rows if f"{machine.name} {row.model}-{row.batch}" in found]
        lines = [_resnet(row, found[f"{machine.name} {row.model}-{row.batch}"][0]) for row in known]
        header = (
            *("network", "batch", "MB, theirs", "part", "added, theirs"),
            *(text for strategy in RESNET_STRATEGIES for text in (f"{strategy} MB", "added")),
            *("irc MB", "added", "bound", "a third?", "at the same part", "irc MB in their time", "less?"),
        )
        if lines:
            parts += [f"## {machine.name}", _rates(machine), to_markdown(header, lines)]
    return "\n\n".join(part for part in parts if part)


def _resnet(row: Resnet, outcome: Outcome) -> list[str]:
    point = outcome.point("their memory")
    cells = [row.model, str(row.batch), _mb(row.device_bytes)]
    cells.append("" if row.original_bytes is None else _percent(row.device_bytes / row.original_bytes, 0))
    cells.append("" if row.overhead is None else _percent(row.overhead))
    for strategy in RESNET_STRATEGIES:
        own = outcome.point(strategy)
        cells += [_mb(own.peak_bytes), _added(own)]
    cells += [_mb(point.peak_bytes), _added(point), _percent(point.bound)]
    if row.overhead is None:
        return [*cells, "", "", "", ""]
    cells += [_verdict(max(row.overhead, 0.0), point, outcome), _added(outcome.point("their part"))]
    if row.overhead <= 0:
        return [*cells, "", ""]
    within = outcome.point("their time")
    return [*cells, _mb(within.peak_bytes), "met" if within.peak_bytes < row.device_bytes else "**not met**"]


def _missing(keys: Sequence[str], found: Found) -> str:
    missing = [key for key in keys if key not in found]
    return f"Not planned yet: {', '.join(missing)}." if missing else ""


def _rates(machine: Machine) -> str:
    return (
        f"{machine.flops / 1e12:.3g} TFLOP/s, {machine.bandwidth_bytes / 1e9:.4g} GB/s of memory, "
        f"{machine.launch_seconds * 1e6:.3g} us to launch an operation."
    )


def _added(point: Point, decimals: int = 1) -> str:
    return "does not fit" if point.overhead is None else _percent(point.overhead, decimals)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f}"


def _percent(part: float, decimals: int = 1) -> str:
    return f"{100 * part + 0.0:.{decimals}f}%"
