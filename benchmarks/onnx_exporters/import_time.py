"""The CPU time of an import, beside onnx2torch on the same files, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irc.ir import UsageError

__all__ = ["ROUNDS", "Timing", "Worker", "import_times"]

ROUNDS = 3
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Timing:
    """One file.

    Args:
        file: Its name.
        own: CPU seconds of irc, one for each round.
        peer: The same of onnx2torch; empty where it refuses.
        own_trained: Numbers in irc's parameters.
        peer_trained: The same of onnx2torch.
        refusal: Why onnx2torch does not take the file.
        failure: Why irc does not.
    """

    file: str
    own: tuple[float, ...] = ()
    peer: tuple[float, ...] = ()
    own_trained: int = 0
    peer_trained: int = 0
    refusal: str | None = None
    failure: str | None = None

    @property
    def ratio(self) -> float | None:
        """The median of irc over that of onnx2torch; `None` where either refuses."""
        if not self.own or not self.peer:
            return None
        return statistics.median(self.own) / statistics.median(self.peer)


class Worker:
    """A process that imports files, one after the other.

    Args:
        importer: `irc` or `onnx2torch`.
        python: Of the environment that has it.
    """

    def __init__(self, importer: str, python: Path) -> None:
        self._importer, self._python = importer, python
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if importer != "irc":
            environment = {k: v for k, v in environment.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        else:
            environment["PYTHONPATH"] = str(_WORKER.parents[2])
        try:
            self._process = subprocess.Popen(
                [str(python), "-P", str(_WORKER), importer],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        except OSError as error:
            raise self._broken(str(error)) from error
        try:
            self.versions: dict[str, str] = self._answer()
        except UsageError:
            self.close()
            raise

    def __call__(self, path: Path) -> dict[str, Any]:
        """What the worker says of a file: `seconds` and `parameters`, or `refusal`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._broken(f"it ends with status {self._process.wait()}")
        return json.loads(line)

    def _broken(self, why: str) -> UsageError:
        return UsageError(
            "IRC450",
            f"{self._importer} cannot be run by {self._python}: {why}",
            help=f"give the Python of an environment with {self._importer}: `pip install {self._importer}`",
        )

    def close(self) -> None:
        """Ends the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


@contextlib.contextmanager
def _workers(peer: Path) -> Generator[tuple[Worker, Worker]]:
    with (
        contextlib.closing(Worker("irc", Path(sys.executable))) as own,
        contextlib.closing(Worker("onnx2torch", peer)) as other,
    ):
        yield own, other


def import_times(
    files: Mapping[str, Path], peer: Path, rounds: int = ROUNDS
) -> tuple[list[Timing], dict[str, str]]:
    """The times of both for each file, taken in turns, and the versions that ran.

    Each process has imported its libraries and one file before.

    Args:
        files: By the names that the table shows.
        peer: The Python of an environment with onnx2torch.
        rounds: How often each file is imported by each.

    Raises:
        UsageError: IRC450 when that Python does not run onnx2torch.
    """
    with _workers(peer) as (own, other):
        first = next(iter(files.values()))
        own(first)
        other(first)
        found = [_timed(name, path, own, other, rounds) for name, path in files.items()]
        return found, {**other.versions, **own.versions}


def _timed(name: str, path: Path, own: Worker, other: Worker, rounds: int) -> Timing:
    pairs = [(own(path), other(path)) for _ in range(rounds)]
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    return Timing(
        name,
        _seconds(ours),
        _seconds(theirs),
        ours[0].get("parameters", 0),
        theirs[0].get("parameters", 0),
        theirs[0].get("refusal"),
        ours[0].get("refusal"),
    )


def _seconds(answers: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    return tuple(answer["seconds"] for answer in answers if "seconds" in answer)
