"""`irc doctor`: what is here, and what is missing for which feature."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..ir import EXTRAS, format_bytes, printable
from .options import Commands, add_verbosity

__all__ = ["add"]

_LEAST_FREE_BYTES = 1 << 30
"""Less room than this for measurements or scratch files is worth a word."""

_CORE = ("torch", "ortools", "networkx", "numpy", "rich", "safetensors")
_FEATURES = {"onnx": "ONNX files in and out", "plot": "pictures of plans, fronts and pipelines"}


def add(commands: Commands) -> None:
    """Adds `irc doctor` to the command line."""
    doctor = commands.add_parser(
        "doctor", help="say what is installed, and what is missing for which feature"
    )
    add_verbosity(doctor)
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    rows = list(_rows())
    if options.json:
        keys = ("what", "found", "missing")
        rows_json = [dict(zip(keys, row, strict=True)) for row in rows]
        print(json.dumps({"format": "irc-doctor-1", "rows": rows_json}, indent=1))
    elif not options.quiet:
        for what, found, missing in rows:
            print(printable(f"{what:>12}  {found}{' - ' * bool(missing and found)}{missing}", 1000))
    return 1 if any(what in _CORE and missing for what, _, missing in rows) else 0


def _rows() -> Iterator[tuple[str, str, str]]:
    """Yields what is looked at, what was found, and what is missing."""
    from .. import __version__

    yield "irc", __version__, ""
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}", ""
    for package in _CORE:
        version = _version(package)
        yield package, version, "" if version else f"missing: pip install {package}"
    for extra, packages in EXTRAS.items():
        there = {package: _version(package) for package in packages}
        absent = [package for package, version in there.items() if not version]
        found = ", ".join(f"{package} {version}" for package, version in there.items() if version)
        help = f"missing for {_FEATURES[extra]}: pip install 'irc-compiler[{extra}]'" if absent else ""
        yield f"[{extra}]", found, help
    yield from _devices()
    yield _compiler()
    cache = _cache()
    if cache is not None:
        yield _folder("measurements", cache, "IRC_CACHE_DIR names another folder")
    yield _folder("scratch", Path(tempfile.gettempdir()), "--swap disk:FOLDER:200GiB names another one")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cache() -> Path | None:
    from ..passes.costs.profiling import ProfileStore

    return ProfileStore.default().folder


def _devices() -> Iterator[tuple[str, str, str]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    yield "cpu", f"{cores} cores, {format_bytes(memory)} of memory", ""
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        yield "gpu", "none" if built is None else f"none that this torch ({built}) can use", ""
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{device.name}, {format_bytes(device.total_memory)}", ""


def _compiler() -> tuple[str, str, str]:
    found = next(
        (
            path
            for name in (os.environ.get("CXX", ""), "g++", "clang++")
            if name and (path := shutil.which(name))
        ),
        "",
    )
    return "c++", found, "" if found else "missing for compiler='inductor' on a CPU: install g++"


def _folder(what: str, folder: Path, help: str) -> tuple[str, str, str]:
    """A folder that files go to, with the room in it."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free
    found = f"{folder}, {format_bytes(free)} free"
    if not os.access(there, os.W_OK):
        return what, found, f"cannot be written: {help}"
    return what, found, "" if free >= _LEAST_FREE_BYTES else f"little room: {help}"
