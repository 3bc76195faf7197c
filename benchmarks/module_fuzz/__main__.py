"""Runs the programs of some seeds beside eager, and counts what became of them."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from irc import __version__
from irc.ir import UsageError

from ..command import parser_of, run_command
from ..journal import Journal
from ..pages import to_markdown
from .compare import BAD, Outcome, Verdict, examine
from .programs import draw, from_json, sources
from .running import outcomes

__all__ = ["main"]

_FORM = "irc-module-fuzz-2"
_NEW = 500


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 if a program shows a fault."""
    parser = parser_of(
        "module_fuzz",
        "Trains random modules beside eager: numbers, generators, measured peaks.",
        threads=1,
        journal=None,
    )
    parser.add_argument("--seeds", metavar="A:B", help=f"from A to B - 1; {_NEW} new ones without it")
    parser.add_argument("--program", metavar="JSON", help="examine this one program (of a journal) alone")
    parser.add_argument("--shrink", type=int, default=2, metavar="N", help="so many of each cause (2)")
    return run_command(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    if options.program is not None:
        program = from_json(json.loads(options.program))
        print(program, *sources(program), examine(program), sep="\n")
        return 0
    journal = Journal.open(options.journal, {"irc": __version__}, _FORM, Outcome)
    left = [seed for seed in _seeds(options.seeds) if str(seed) not in journal.found]
    for outcome in outcomes(left, options.shrink):
        journal.append(str(outcome.seed), [outcome])
        if outcome.verdict in BAD:
            _print_fault(outcome)
    rows = [outcome for entries in journal.found.values() for outcome in entries]
    print(page(rows))
    return int(any(row.verdict in BAD for row in rows))


def _seeds(text: str | None) -> range:
    if text is None:
        first = int(time.time()) % 10**8 * 1000
        print(f"seeds {first}:{first + _NEW}", file=sys.stderr)
        return range(first, first + _NEW)
    first, colon, last = text.partition(":")
    if not first.isdigit() or (colon and not last.isdigit()):
        raise UsageError("IRC400", f"--seeds is {text!r}", help="give the first and the last seed, as 0:100")
    return range(int(first), int(last) if colon else int(first) + 1)


def _print_fault(outcome: Outcome) -> None:
    assert outcome.program is not None
    program = from_json(outcome.program)
    drawn, shrunk = f"drawn:  {draw(outcome.seed)}", f"shrunk: {program}"
    code = f"--program '{json.dumps(outcome.program)}'"
    print(outcome, *sources(program), drawn, shrunk, code, sep="\n       ", flush=True)


def page(rows: Sequence[Outcome]) -> str:
    """The counts: verdicts, refusals by kind and by code, and roundings by name."""
    counts = Counter(row.verdict for row in rows)
    tried = [row for row in rows if row.verdict is not Verdict.EAGER]
    refused = [row for row in tried if row.verdict is Verdict.REFUSED]
    seconds = sum(row.seconds for row in rows) / max(len(rows), 1)
    return "\n\n".join(
        (
            ", ".join(f"{counts[v]} {v}" for v in Verdict) + f"; {seconds:.2f} s of the processor each",
            f"refused: {len(refused)} of {len(tried)} that eager runs, "
            f"{len(refused) / max(len(tried), 1):.1%}",
            to_markdown(["kind", "modules", "refused", "faults"], _by_kind(tried)),
            to_markdown(["refusal", "modules"], _counted(Counter(row.cause for row in refused))),
            to_markdown(
                ["fault", "modules"],
                _counted(Counter(f"{r.verdict} {r.cause}" for r in rows if r.verdict in BAD)),
            ),
            to_markdown(
                ["budget raised", "modules"],
                _counted(Counter(code for row in rows for code in row.budget_codes)),
            ),
            _never_differed(tried),
            to_markdown(["rounding", "modules that name it", "that differ"], _by_rounding(tried)),
        )
    )


def _counted(counts: Mapping[str, int]) -> list[list[str]]:
    return [[name, str(number)] for name, number in Counter(counts).most_common()]


def _by_kind(rows: Sequence[Outcome]) -> list[list[str]]:
    modules, refused, faults = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        for kind in set(row.kinds):
            modules[kind] += 1
            refused[kind] += row.verdict is Verdict.REFUSED
            faults[kind] += row.verdict in BAD
    names = sorted(modules, key=lambda kind: (-refused[kind] / modules[kind], kind))
    return [
        [kind, str(modules[kind]), f"{refused[kind] / modules[kind]:.0%}", str(faults[kind])]
        for kind in names
    ]


def _by_rounding(rows: Sequence[Outcome]) -> list[list[str]]:
    named = Counter(name for row in rows for name in {_general(text) for text in row.roundings})
    differ = Counter(name for row in rows for name in {_general(text) for text in row.differing})
    return [[name, str(number), str(differ[name])] for name, number in named.most_common()]


def _never_differed(rows: Sequence[Outcome]) -> str:
    names = _by_rounding(rows)
    return f"names of roundings that never differed: {sum(row[2] == '0' for row in names)} of {len(names)}"


def _general(text: str) -> str:
    """The name of a rounding without what it says of one model: names, numbers, and lines of files."""
    text = re.sub(r"\(?[^\s(]+:\d+ in [^\s,)]+[,)]*", "", text)
    text = re.sub(r"\b(parameter|buffer|input|output) [^\s,]+", r"\1", text)
    words = [
        word
        for word in text.split()
        if "/" not in word and "." not in word.strip(".:,") and not any(map(str.isdigit, word))
    ]
    return " ".join(words)


if __name__ == "__main__":
    raise SystemExit(main())
