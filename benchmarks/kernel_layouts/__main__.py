"""Finds the laws of this version of torch, and says what was reached."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

import torch

import irc.frontends.torch.fixups.kernel_layouts as product
from benchmarks.pages import replace_section, to_markdown
from irc.frontends.torch.fixups.fake_kernels import fake_kernels_of_eager

from .calls import derivatives, operation_of, sampled_calls
from .laws import Examined, examined_apart

_DEFAULT = "docs/results/kernel_layouts.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the laws and the page, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernel_layouts", description=(__doc__ or "").splitlines()[0]
    )
    version = ".".join(torch.__version__.split(".")[:2])
    folder = Path(product.__file__).parent
    parser.add_argument("--json", type=Path, default=folder / f"{version}.json")
    parser.add_argument("--markdown", type=Path, default=Path(_DEFAULT))
    given = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    names = derivatives()
    operations = {name: str(operation) for name in names if (operation := operation_of(name)) is not None}
    journal = given.json.with_suffix(".partial")
    examined = _examined({*operations.values()}, journal)
    laws = {
        name: [product.ASKED if law is None else law for law in each.laws]
        for name, each in sorted(examined.items())
        if each.laws and any(law != "" for law in each.laws)
    }
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in laws.items())
    given.json.write_text(f"{{\n{rows}\n}}\n")
    missing = [name for name in names if name not in operations or not examined[operations[name]].calls]
    crashed = [name for name, each in sorted(examined.items()) if each.calls and each.laws is None]
    called = sum(each.calls > 0 for each in examined.values())
    compared = f"{sum(bool(each.laws) for each in examined.values())} of the {called} operations called"
    page = _page(version, len(names), compared, missing, crashed, laws)
    given.markdown.write_text(replace_section(given.markdown, "kernel layouts", page))
    journal.unlink()
    return 0


def _examined(operations: set[str], journal: Path) -> dict[str, Examined]:
    """Examines these operations and those that samples call; goes on where a run that was ended stopped."""
    lines = journal.read_text().splitlines() if journal.exists() else ()
    examined = {operation: Examined(*rest) for operation, *rest in map(json.loads, lines)}
    calls = sampled_calls()
    with fake_kernels_of_eager({}):  # each process has then what that imports
        pass
    for operation in sorted({*calls, *operations} - examined.keys()):
        examined[operation] = examined_apart(operation, calls.get(operation, ()))
        with journal.open("a") as file:
            print(json.dumps([operation, *astuple(examined[operation])]), file=file)
    return examined


def _page(
    version: str,
    count: int,
    compared: str,
    missing: list[str],
    crashed: list[str],
    laws: dict[str, list[str]],
) -> str:
    reached = count - len(missing)
    rows = [[f"`{name}`", ", ".join(law or "torch's rule" for law in row)] for name, row in laws.items()]
    return "\n\n".join(
        [
            f"With torch {version} on a CPU, {reached} of the {count} entries of the wheel's "
            f"`derivatives.yaml` were reached ({reached / count:.1%}), by torch's own samples of its "
            "operations, by calls for the purpose, and by arguments that fit a schema. Not reached: "
            + _listed(missing)
            + ".",
            f"The layouts of {compared} were compared; the others return no tensors with strides, or "
            "torch has no rule for them. Not examined, as they end the process: "
            + (_listed(crashed) or "none")
            + ".",
            to_markdown(["operation", "layout of its results"], rows),
        ]
    )


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.exit(main())
