"""The recomputation benchmark as Markdown: PyTorch's methods beside irc, then every point of each model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .bench_points import IRC, TORCH, ModelResult, Point
from .harness import TimeRatio
from .pages import to_markdown

__all__ = ["render"]

_NOTHING = 0.005
"""Overheads of less than this are none to speak of, and no ratio of overheads is formed."""


def render(about: dict[str, Any], results: Sequence[ModelResult], picture: str | None) -> str:
    """The section that the benchmark generates.

    Args:
        about: How it was measured: `command`, `began`, and `measured` with `hardware`, `versions`, `options`.
        results: The models.
        picture: Where the picture is, as a link from the page.
    """
    wall = about["measured"]["options"]["threads"] > 1
    parts = [f"`{about['command']}`", _conditions(about), "### irc at no more memory", _heads(results, wall)]
    if picture is not None:
        parts.append(f"![Time over peak memory, both over eager's, for each model]({picture})")
    for result in results:
        parts += [f"### {result.model}", _facts(result), _table(result, wall)]
    return "\n\n".join(parts)


def _conditions(about: dict[str, Any]) -> str:
    measured = about["measured"]
    options = measured["options"]
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    threads = "1 thread" if options["threads"] == 1 else f"{options['threads']} threads"
    return (
        f"Begun {about['began'].replace('T', ' ').replace('+00:00', '')} UTC on {measured['hardware']}; "
        f"{versions}; {threads}, {options['repeats']} rounds, {options['time_limit']:g} s for the search "
        "of each plan."
    )


# ---------------------------------------------------------------------- PyTorch's points and irc's


def _heads(results: Sequence[ModelResult], wall: bool) -> str:
    """PyTorch's points, each beside the plan of irc that needs no more memory, and how many irc wins."""
    header = (
        "model",
        "PyTorch's method",
        "peak",
        f"{_clock(wall)} time",
        "numbers",
        "irc peak",
        f"irc {_clock(wall)} time",
        "irc predicted",
        "bound",
        "irc's overhead / PyTorch's",
    )
    pairs = [(result, point, _rival(result, point)) for result in results for point in result.of(TORCH)]
    rows = [_head(result, point, rival, wall) for result, point, rival in pairs]
    return f"{to_markdown(header, rows)}\n\n{_score(pairs, wall)}"


def _rival(result: ModelResult, point: Point) -> Point | None:
    return None if point.peak_bytes is None else result.within(point.peak_bytes)


def _head(result: ModelResult, point: Point, rival: Point | None, wall: bool) -> tuple[str, ...]:
    if point.peak_bytes is None:
        return (result.model, point.name, *["-"] * 7, f"refused: {point.refusal}")
    theirs = (f"{result.share(point.peak_bytes):.3f}", _ratio(point, wall), _numbers(point))
    if rival is None or rival.plan is None or rival.peak_bytes is None:
        return (result.model, point.name, *theirs, *["-"] * 4, "irc has no plan within this peak")
    quotient = _quotient(point, rival, wall)
    return (
        result.model,
        point.name,
        *theirs,
        f"{result.share(rival.peak_bytes):.3f}",
        _ratio(rival, wall),
        f"{rival.plan.time:.4f}",
        _bound(rival),
        "-" if quotient is None else f"{quotient:.2f}",
    )


def _score(pairs: Iterable[tuple[ModelResult, Point, Point | None]], wall: bool) -> str:
    met = [(point, rival) for _, point, rival in pairs if point.peak_bytes is not None]
    paired = [(point, rival) for point, rival in met if rival is not None]
    faster = sum(_median(rival, wall) < _median(point, wall) for point, rival in paired)
    quotients = [q for point, rival in paired if (q := _quotient(point, rival, wall)) is not None]
    half = sum(quotient <= 0.5 for quotient in quotients)
    wrong = sum(point.numbers is not None and not point.numbers.agrees for point, _ in met)
    return (
        f"irc is within PyTorch's peak at {len(paired)} of {len(met)} points and takes less time at {faster} "
        f"of these; its overhead is at most half of PyTorch's at {half} of the {len(quotients)} points where "
        f"PyTorch's is {_NOTHING:.1%} or more. PyTorch's numbers are not eager's at {wrong} of {len(met)}."
    )


def _quotient(point: Point, rival: Point, wall: bool) -> float | None:
    """Irc's overhead over PyTorch's; None where PyTorch has none to speak of."""
    overhead = _median(point, wall) - 1
    return max(_median(rival, wall) - 1, 0.0) / overhead if overhead >= _NOTHING else None


# ---------------------------------------------------------------------- one model


def _facts(result: ModelResult) -> str:
    facts = [
        f"{result.parameters:,} trained parameters; {_mib(result.static_bytes)} MiB of parameters, buffers "
        f"and inputs, {_mib(result.eager_bytes)} MiB above them at eager's peak"
    ]
    if result.operations is not None:
        forward, backward = result.operations
        facts.append(
            f"irc's graph has {forward} + {backward} operations, captured in {result.capture_seconds:.1f} s, "
            f"their costs measured or read from the cache in {result.cost_seconds:.1f} s"
        )
    before, after = result.load
    facts.append(f"done {result.measured_at[:16].replace('T', ' ')} UTC, load {before:.1f} to {after:.1f}")
    return "; ".join(facts) + "."


def _table(result: ModelResult, wall: bool) -> str:
    header = (
        "",
        "method",
        "peak MiB",
        "peak",
        "CPU s",
        *(["clock s"] if wall else []),
        "CPU time",
        *(["clock time"] if wall else []),
        "predicted peak",
        "predicted time",
        "bound",
        "gap",
        "plan s",
        "first step s",
        "numbers",
        "result",
    )
    return to_markdown(header, [_cells(result, point, wall) for point in result.points])


def _cells(result: ModelResult, point: Point, wall: bool) -> tuple[str, ...]:
    outcome = "; ".join(f"FAILED: {failure}" for failure in point.failures) or "ok"
    if point.peak_bytes is None or point.times is None:
        outcome = f"refused: {point.refusal}" + (" FAILED" if point.failures else "")
        return (point.system, point.name, *["-"] * (13 if wall else 11), outcome)
    plan = point.plan
    planned = ["-"] * 5
    if plan is not None:
        planned = [
            f"{_mib(plan.peak_bytes)} ({plan.peak_bytes / point.peak_bytes - 1:+.3%})",
            f"{plan.time:.4f}",
            f"{_bound(point)} ({plan.strategy})",
            f"{plan.gap:.2%}",
            f"{plan.seconds:.1f}",
        ]
    return (
        point.system,
        point.name,
        _mib(point.peak_bytes),
        f"{result.share(point.peak_bytes):.3f}",
        f"{point.times.cpu_seconds:.3f}",
        *([f"{point.times.wall_seconds:.3f}"] if wall else []),
        _spread(point.times.cpu),
        *([_spread(point.times.wall)] if wall else []),
        *planned,
        "-" if point.build_seconds is None else f"{point.build_seconds:.1f}",
        _numbers(point),
        outcome,
    )


def _clock(wall: bool) -> str:
    return "clock" if wall else "CPU"


def _median(point: Point, wall: bool) -> float:
    assert point.times is not None
    return (point.times.wall if wall else point.times.cpu).median


def _ratio(point: Point, wall: bool) -> str:
    assert point.times is not None
    return _spread(point.times.wall if wall else point.times.cpu)


def _spread(ratio: TimeRatio) -> str:
    return f"{ratio.median:.3f} [{ratio.lower:.3f}, {ratio.upper:.3f}]"


def _bound(point: Point) -> str:
    assert point.system == IRC and point.plan is not None
    return f"{point.plan.bound:.4f}" + (" proved" if point.plan.proved else "")


def _numbers(point: Point) -> str:
    if point.numbers is None:
        return "-"
    return str(point.numbers) if point.numbers.agrees else f"WRONG: {point.numbers}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"
