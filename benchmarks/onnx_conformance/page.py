"""The reports of several importers as one Markdown page, and one of them for the terminal."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from ..pages import to_markdown
from .cases import GROUPS, SUBSETS
from .results import Outcome, Report, Result, count

__all__ = ["failing", "refusals", "summary", "to_page"]

_LISTED = (Outcome.WRONG, Outcome.ERROR, Outcome.TIMEOUT, Outcome.CRASH)
_TITLES = {**{name: f"node: {name}" for name in SUBSETS}, "all": "all"}
_NODE = re.compile(r"(?P<domain>[\w.]+)::(?P<name>\w+) \(opset (?P<opset>\d+)\)")
_QUOTED = re.compile(r"'[^']*'")


def summary(report: Report) -> str:
    """One line for each group and subset, one column for each outcome, as Markdown."""
    rows = [
        [_TITLES.get(name, name), _number(len(results)), *_counted(results)]
        for name in (*GROUPS, *SUBSETS, "all")
        if (results := report.of(name))
    ]
    return to_markdown(["cases", "total", *_OUTCOMES], rows)


_OUTCOMES = ("pass", "unsupported", "wrong", "random", "error", "timeout", "crash")


def _counted(results: Sequence[Result]) -> list[str]:
    found = count(results)
    wrong = sum(result.is_wrong for result in results)
    cells = {outcome.value: found[outcome] for outcome in Outcome}
    cells |= {"wrong": wrong, "random": found[Outcome.WRONG] - wrong}
    return [_number(cells[name]) for name in _OUTCOMES]


def _number(value: int) -> str:
    return f"{value:,}"


def refusals(results: Iterable[Result]) -> dict[str, Counter[str]]:
    """How often which operator is refused for which reason; the most frequent operators first."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        if result.outcome is Outcome.UNSUPPORTED:
            found[operator(result)][_reason(result)] += 1
    return dict(sorted(found.items(), key=lambda item: (-item[1].total(), item[0])))


def operator(result: Result) -> str:
    """The operator that a result is about: the one that is named, else those of the model."""
    named = _NODE.search(result.why)
    if named is not None:
        domain = "" if named["domain"] == "ai.onnx" else f"{named['domain']}::"
        return domain + named["name"]
    return ", ".join(result.operators[:3]) + (", ..." if len(result.operators) > 3 else "")


def _reason(result: Result) -> str:
    code, colon, text = result.why.partition(": ")
    if not colon:
        return result.why
    if code == "IRC301":
        version = _NODE.search(text)
        return f"no lowering for opset {version['opset']} ({code})" if version else f"{text} ({code})"
    text = _QUOTED.sub("'...'", _NODE.sub("", text)).strip().removesuffix(" is not supported")
    return f"{text} ({code})"


def failing(results: Iterable[Result]) -> str:
    """The cases that neither pass nor are refused, one on each line, as plain text."""
    listed = [r for r in results if r.outcome in _LISTED and not _is_drawn(r)]
    ordered = sorted(listed, key=lambda r: (_LISTED.index(r.outcome), operator(r), r.name))
    return "\n".join(f"{r.outcome.value:<8} {r.name} ({operator(r)}): {r.why}" for r in ordered)


def _is_drawn(result: Result) -> bool:
    """Whether a difference from what is expected says nothing."""
    return result.outcome is Outcome.WRONG and result.is_random


def total(results: Iterable[Result], outcome: Outcome) -> int:
    """How many cases ended so."""
    return count(results)[outcome]


def to_page(reports: Sequence[Report]) -> str:
    """The page.

    Args:
        reports: Of the importers; the first is the one that is told of in detail.
    """
    own = reports[0]
    parts = [
        "# ONNX conformance",
        _INTRODUCTION.rstrip(),
        "## Side by side",
        _SIDE_BY_SIDE.rstrip(),
        _side_by_side(reports),
        "How all cases end:",
        _outcomes(reports),
        *_without_torchvision(reports),
        _versions(reports),
        f"## What {own.importer} refuses",
        _refused(own.results),
        f"## Where {own.importer} is wrong, fails or does not end",
        _listed(own.results),
        "## Random outcomes",
        _random(reports),
    ]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """\
Written by `python -m benchmarks.onnx_conformance --peers all --envs DIR --markdown FILE`. The suite is that
of the `onnx` wheel: models of one operator (`node`), models that torch once exported, and light variants of
nine image classifiers, most of whose weights are computed by nodes (`real`). A case passes when every output
is the expected one in number, kind, shape, element type and value, within the suite's own tolerances.
*Unsupported*: the importer says that it does not do this. *Wrong*: it runs, says nothing, and an output
differs. *Error*, *timeout*, *crash*: it raises anything else, is not done within the time limit, or its
process dies. irc must refuse by an error of its own; of others, each error that speaks of what is not
supported or not implemented counts as a refusal.
"""

_SIDE_BY_SIDE = """\
Cases that pass, and beside them the wrong answers. Of the group `node`, *original* leaves out the function
bodies that the suite has expanded a second time; *torch-types* are the cases of the default domain whose
tensors have element types that torch computes in; *core* are the original ones among these from opset 13 on,
with a float among inputs and outputs: what matters most for training.
"""

_COLUMNS = ("core", "torch-types", "original", *GROUPS, "all")


def _side_by_side(reports: Sequence[Report]) -> str:
    header = ["importer"]
    rows = [[report.importer] for report in reports]
    for name in _columns(reports):
        header += [name, "wrong"]
        for report, row in zip(reports, rows, strict=True):
            results = report.of(name)
            passed = f"{_number(total(results, Outcome.PASS))}/{_number(len(results))}"
            wrong = _number(sum(result.is_wrong for result in results))
            row += [passed, wrong] if results else ["-", "-"]
    return to_markdown(header, rows + _any_of(reports))


_TO_TORCH = ("onnx2torch", "onnx2pytorch", "onnx2fx")


def _any_of(reports: Sequence[Report]) -> list[list[str]]:
    """A row of what at least one of the other importers to torch passes."""
    others = [report for report in reports if report.importer in _TO_TORCH and report.results]
    if len(others) < 2:
        return []
    row = [f"any of {', '.join(report.importer for report in others)}"]
    for name in _columns(reports):
        results = [(r.group, r.name, r.outcome) for report in others for r in report.of(name)]
        cases = {(group, case) for group, case, _ in results}
        passed = {(group, case) for group, case, outcome in results if outcome is Outcome.PASS}
        row += [f"{_number(len(passed))}/{_number(len(cases))}", ""]
    return [row]


def _columns(reports: Sequence[Report]) -> list[str]:
    """The groups and subsets that any importer has run."""
    return [name for name in _COLUMNS if any(report.of(name) for report in reports)]


def _outcomes(reports: Sequence[Report]) -> str:
    rows = [
        [report.importer, _number(len(report.results)), *_counted(report.results), f"{report.seconds:.0f}"]
        if not report.failure
        else [report.importer, report.failure, *["-"] * (len(_OUTCOMES) + 1)]
        for report in reports
    ]
    return to_markdown(["importer", "cases", *_OUTCOMES, "seconds"], rows)


def _without_torchvision(reports: Sequence[Report]) -> list[str]:
    """A note on importers that could not use torchvision's operators."""
    lacking = [
        f"{number} of {report.importer}"
        for report in reports
        if (number := sum(_NO_TORCHVISION.search(result.why) is not None for result in report.results))
    ]
    return [_ABOUT_TORCHVISION.format(lacking=", ".join(lacking)).rstrip()] if lacking else []


_NO_TORCHVISION = re.compile("Couldn't load (custom C[+][+] ops|the image extension)")
_ABOUT_TORCHVISION = """\
Some importers leave regions of images, and reading images, to torchvision's operators. Where its wheel is
for another build of torch (for CUDA, beside torch for the CPU), it lacks them, and such cases fail for that
reason:
{lacking}.
"""


def _versions(reports: Sequence[Report]) -> str:
    rows = [
        [
            report.importer,
            ", ".join(f"{name} {version}" for name, version in report.versions.items()),
            report.date,
            f"{report.limit:g} s",
        ]
        for report in reports
    ]
    return to_markdown(["importer", "versions", "date", "time limit"], rows)


def _refused(results: Sequence[Result]) -> str:
    rows = [
        [name, reason, _number(number)]
        for name, reasons in refusals(results).items()
        for reason, number in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    ]
    return to_markdown(["operator", "reason", "cases"], rows) if rows else "Nothing."


def _listed(results: Sequence[Result]) -> str:
    rows = [
        [result.outcome.value, result.name, operator(result), result.why]
        for outcome in _LISTED
        for result in results
        if result.outcome is outcome and not _is_drawn(result)
    ]
    return to_markdown(["outcome", "case", "operator", "what"], rows) if rows else "Nowhere."


def _random(reports: Sequence[Report]) -> str:
    """The cases whose outputs are drawn, with what each importer does."""
    outcomes = [{(r.group, r.name): r for r in report.results if r.is_random} for report in reports]
    keys = list(dict.fromkeys(key for found in outcomes for key in found))
    if not keys:
        return "None of these cases."
    rows = [
        [name, *(found[group, name].outcome.value if (group, name) in found else "-" for found in outcomes)]
        for group, name in keys
    ]
    return f"{_ABOUT_RANDOM}\n" + to_markdown(["case", *(report.importer for report in reports)], rows)


_ABOUT_RANDOM = """\
The outputs of these are drawn, from a generator that the standard leaves open. Another implementation cannot
have the expected numbers, so *wrong* says nothing here; it is counted as *random* above.
"""
