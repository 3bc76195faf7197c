"""The other importers, each in a virtual environment of its own with pinned versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .importers import PEERS
from .measure import today
from .results import Report

__all__ = ["REQUIREMENTS", "Unavailable", "prepare", "run_peer"]

_SUITE = ("onnx==1.23.2", "numpy==2.4.6", "ml-dtypes==0.6.0", "protobuf==6.33.6", "pillow==13.0.0")
_TORCH = ("torch==2.13.0", "torchvision==0.28.0")

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime==1.31.1", *_SUITE),
    "onnx.reference": _SUITE,
    "onnx2torch": ("onnx2torch==1.5.15", *_TORCH, *_SUITE),
    "onnx2pytorch": ("onnx2pytorch==0.6.0", *_TORCH, *_SUITE),
    "onnx2fx": ("onnx2fx==0.0.1", *_TORCH, *_SUITE),
}
"""What is installed for each peer, from whatever index pip is configured for."""

assert REQUIREMENTS.keys() == PEERS.keys()

_INSTALLED = "installed.txt"


class Unavailable(Exception):
    """A peer cannot be installed or started here; the text says why."""


def prepare(folder: Path, name: str, requirements: Sequence[str]) -> Path:
    """The Python of a virtual environment that holds these packages; it is made where it is missing.

    Args:
        folder: Of all environments.
        name: Of this one.
        requirements: To install. An environment that holds others is made anew.

    Raises:
        Unavailable: pip cannot install them.
    """
    environment = folder / name
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    listed = environment / _INSTALLED
    wanted = "\n".join(requirements) + "\n"
    if not (listed.exists() and listed.read_text() == wanted):
        _call([sys.executable, "-m", "venv", "--clear", str(environment)])
        _call([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])
        listed.write_text(wanted)
    return python


def run_peer(
    name: str, folder: Path, groups: Sequence[str], pattern: str | None, limit: float, is_told: bool = False
) -> Report:
    """What becomes of the cases with a peer; a peer that cannot be installed has a report that says so.

    Args:
        name: Of the peer.
        folder: Of all environments; it may not exist yet.
        groups: Of the suite.
        pattern: Regular expression that names must match.
        limit: Seconds for each case.
        is_told: Whether each case is printed.
    """
    try:
        python = prepare(folder, name, REQUIREMENTS[name])
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary) / "report.json"
            command = [str(python), "-P", str(Path(__file__).with_name("isolated.py")), name]
            command += ["--out", str(out), "--limit", str(limit)]
            command += [f"--group={group}" for group in groups]
            command += [] if pattern is None else ["-k", pattern]
            _call([*command, "-v"] if is_told else command, is_told)
            return Report.from_json(json.loads(out.read_text()))
    except Unavailable as error:
        pinned = dict(requirement.split("==") for requirement in REQUIREMENTS[name])
        return Report(name, pinned, today(), limit, failure=str(error))


def _call(command: Sequence[str], is_told: bool = False) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment.setdefault("OMP_NUM_THREADS", "1")
    done = subprocess.run(
        command,
        stdout=None if is_told else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        what = "cannot be installed" if "pip" in command or "venv" in command else "cannot be run"
        why = said[-1].removeprefix("ERROR: ") if said else f"exit status {done.returncode}"
        raise Unavailable(f"{what}: {why}")
