"""Runs cases one by one in a forked worker, so that a hang or a segfault costs one case."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from onnx import ModelProto

from .cases import Case
from .comparison import difference
from .importers import Importer, Unsupported
from .results import Outcome, Result

__all__ = ["run_case", "run_cases", "select"]

_LONGEST = 300
"""Characters that are kept of a message."""

# What the importers and torch say when they decline: words of refusal, within one phrase.
_REFUSAL = re.compile(
    r"\b(not|isn't|never)\b.{0,12}\b(support|implement|register)|\bun(support|implement)"
    r"|\b(no|unknown) (converter|implementation|op\b|operator)|\bsupport for this is limited",
    re.IGNORECASE,
)


def select(cases: Iterable[Case], pattern: str | None) -> list[Case]:
    """The cases whose names match a regular expression; all of them where it is None."""
    return [case for case in cases if pattern is None or re.search(pattern, case.name)]


def run_case(importer: Importer, case: Case) -> tuple[Outcome, str]:
    """How a case ends in this very process, and what was said or differs."""
    model = ModelProto()
    model.CopyFrom(case.model)  # an importer may change what it is given
    try:
        run = importer.load(model)
        for inputs, expected in case.read():
            told = difference(expected, list(run(*inputs)), case.rtol, case.atol)
            if told is not None:
                return Outcome.WRONG, told
    except Exception as error:
        return (Outcome.UNSUPPORTED if _refuses(importer, error) else Outcome.ERROR), _told(error)
    return Outcome.PASS, ""


def _refuses(importer: Importer, error: Exception) -> bool:
    if isinstance(error, Unsupported):
        return True
    if importer.is_strict:
        return False
    text = f"{type(error).__name__}: {str(error)[:600]}"
    return isinstance(error, NotImplementedError) or _REFUSAL.search(text) is not None


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, Unsupported):
        return text[:_LONGEST]
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}"[:_LONGEST] + at


def run_cases(importer: Importer, cases: Sequence[Case], limit: float) -> Iterator[Result]:
    """What becomes of each case, in turn.

    Args:
        importer: Runs them.
        cases: To run.
        limit: Seconds for one case, import and run together.
    """
    worker: _Worker | None = None
    try:
        for index, case in enumerate(cases):
            worker = worker or _Worker(importer, cases)
            started = time.perf_counter()
            outcome, why = worker.run(index, limit)
            seconds = round(time.perf_counter() - started, 3)
            if outcome in (Outcome.TIMEOUT, Outcome.CRASH):
                worker.end()
                worker = None
            yield Result(
                case.name,
                case.group,
                outcome,
                why,
                seconds,
                case.operators,
                case.opset,
                case.subsets,
                case.is_random,
            )
    finally:
        if worker is not None:
            worker.end()


class _Worker:
    """A forked process that runs the cases it is told to."""

    def __init__(self, importer: Importer, cases: Sequence[Case]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        arguments = (importer, cases, theirs, self._pipe)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of threads that the fork does not take along; the worker starts its own.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def run(self, index: int, limit: float) -> tuple[Outcome, str]:
        try:
            self._pipe.send(index)
            if not self._pipe.poll(limit):
                return Outcome.TIMEOUT, f"not done after {limit:g} s"
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            return Outcome.CRASH, f"the process ended with {_ending(self._process.exitcode)}"

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _ending(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"status {code}"


def _serve(
    importer: Importer, cases: Sequence[Case], pipe: Connection[Any, Any], other: Connection[Any, Any]
) -> None:
    other.close()  # so that the pipe ends when the process at its other end does
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # importers write to both
    os.dup2(quiet, 2)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    while True:
        try:
            index: int = pipe.recv()
        except EOFError:
            return
        pipe.send(run_case(importer, cases[index]))
