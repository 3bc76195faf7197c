"""Runs the suite against irc, and against other importers if asked, and writes what it found."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from irc import __version__
from irc.ir import UsageError

from ..command import chosen, parser_of, run_command, write_json, write_page
from .cases import GROUPS
from .environments import REQUIREMENTS, run_peer
from .importers import PEERS, Importer, find
from .measure import line, measure
from .page import failing, summary, to_page
from .results import Outcome, Report, Result

__all__ = ["main"]

_OWN = "irc"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 for a wrong answer, a hang or a crash, 2 for a wrong command."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "onnx_conformance",
        "Runs the ONNX backend suite of the onnx wheel against irc's importer, and others.",
        json=None,
        markdown=None,
    )
    parser.epilog = "exit status: 0 no wrong answer; 1 one, a crash or a timeout; 2 the command is wrong"
    parser.add_argument(
        "--importer",
        default=_OWN,
        metavar="NAME",
        help=f"{_OWN} (default), {', '.join(PEERS)}, or package.module:function, as installed here",
    )
    parser.add_argument("--group", action="append", choices=GROUPS, help="may be repeated; all groups")
    parser.add_argument("-k", dest="pattern", metavar="REGEX", help="only cases whose names match")
    parser.add_argument("--limit", type=float, default=30.0, metavar="S", help="seconds for each case (30)")
    parser.add_argument("--peers", metavar="A,B", help="beside it: all, or some of the names above")
    parser.add_argument("--envs", type=Path, metavar="DIR", help="the peers' environments are made here")
    parser.add_argument(
        "--read",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="files of --json; their importers are not run again",
    )
    parser.add_argument("-v", dest="is_told", action="store_true", help="print each case")
    return parser


def _run(options: argparse.Namespace) -> int:
    peers = _peers(options)
    _check(options)
    stored = {report.importer: report for path in options.read or () for report in read_reports(path)}
    reports: list[Report] = []
    for name in dict.fromkeys((options.importer, *peers)):
        report = stored.pop(name, None)
        if report is None or report.failure:
            report = _made(name, options)
        reports.append(report)
        print(_told(report), flush=True)
    reports += stored.values()
    write_json(options.json, [report.to_json() for report in reports])
    write_page(options.markdown, to_page(reports).removesuffix("\n"))
    own = reports[0].results
    return 1 if any(r.is_wrong or r.outcome in (Outcome.TIMEOUT, Outcome.CRASH) for r in own) else 0


def _peers(options: argparse.Namespace) -> list[str]:
    if options.peers is None:
        return []
    names = chosen(None if options.peers == "all" else options.peers, REQUIREMENTS, "peer")
    if options.envs is None:
        raise UsageError(
            "IRC400",
            "--peers has no folder for environments",
            help="add --envs DIR; a new folder will do",
        )
    return names


def _check(options: argparse.Namespace) -> None:
    if not options.limit > 0:
        raise UsageError("IRC400", f"--limit is {options.limit:g} s", help="give more than 0 seconds")
    try:
        re.compile(options.pattern or "")
    except re.error as error:
        raise UsageError(
            "IRC400", f"-k {options.pattern!r} is no regular expression: {error}", help="see Python's `re`"
        ) from error


def _made(name: str, options: argparse.Namespace) -> Report:
    groups: Sequence[str] = options.group or GROUPS
    if name != options.importer:
        return run_peer(name, options.envs, groups, options.pattern, options.limit, options.is_told)

    def tell(result: Result) -> None:
        if options.is_told:
            print(line(result), flush=True)

    packages = ["onnx-ir"] if name == _OWN else [name.partition(":")[0].partition(".")[0]]
    report = measure(_importer(name), packages, groups, options.pattern, options.limit, tell)
    if not report.results:
        raise UsageError("IRC400", "no case fits these options", help="leave out -k, or see -v for the names")
    return replace(report, versions={_OWN: __version__, **report.versions}) if name == _OWN else report


def _importer(name: str) -> Importer:
    """The importer of this name.

    Raises:
        UsageError: IRC437 when it cannot be found or imported.
    """
    if name == _OWN:
        from .own import IRC

        return IRC
    try:
        return find(name)
    except (ImportError, AttributeError, KeyError) as error:
        raise UsageError(
            "IRC437",
            f"there is no importer {name!r} here: {error}",
            help=f"name {_OWN}, one of {', '.join(PEERS)} that is installed, or package.module:function",
        ) from error


def read_reports(path: Path) -> list[Report]:
    """The reports in a file that `--json` wrote.

    Raises:
        UsageError: IRC438 when it holds none.
    """
    try:
        return [Report.from_json(data) for data in json.loads(path.read_text())]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "IRC438", f"{path} holds no reports: {error!r}", help="name a file that --json wrote"
        ) from error


def _told(report: Report) -> str:
    """A report for the terminal."""
    about = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    head = f"{report.importer} ({about}; {report.seconds:.0f} s)"
    if report.failure:
        return f"{head}: {report.failure}\n"
    return "\n\n".join(part for part in (head, summary(report), failing(report.results)) if part) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
