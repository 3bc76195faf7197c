"""Finds the laws of this version of torch, and says what was reached."""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path

import torch

import irc.frontends.torch.fixups.kernel_layouts as product
from benchmarks.pages import replace_section, to_markdown

from .calls import derivatives, operation_of, sampled_calls, schema_calls
from .laws import laws_apart

_DEFAULT = "docs/results/kernel_layouts.md"


def main() -> None:
    """Writes the laws and the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_layouts")
    version = ".".join(torch.__version__.split(".")[:2])
    folder = Path(product.__file__).parent
    parser.add_argument("--json", type=Path, default=folder / f"{version}.json")
    parser.add_argument("--markdown", type=Path, default=Path(_DEFAULT))
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    names = derivatives()
    calls = sampled_calls()
    for name in names:
        own = schema_calls(name) if str(operation_of(name)) not in calls else []
        if own:
            calls[str(own[0].func)] = own
    laws: dict[str, list[str]] = {}
    for name, own in sorted(calls.items()):
        if own[0].func._schema.is_mutable:  # a graph holds what it computes, and not the write
            continue
        found = laws_apart(own) or []
        if any(law != "" for law in found):
            laws[name] = [product.ASKED if law is None else law for law in found]
    given.json.write_text(json.dumps({"laws": laws}, indent=1) + "\n")
    missing = [name for name in names if str(operation_of(name)) not in calls]
    page = _page(version, len(names), missing, laws)
    given.markdown.write_text(replace_section(given.markdown, "kernel layouts", page))


def _page(version: str, count: int, missing: list[str], laws: dict[str, list[str]]) -> str:
    reached = count - len(missing)
    rows = [[f"`{name}`", ", ".join(law or "torch's rule" for law in row)] for name, row in laws.items()]
    return "\n\n".join(
        [
            f"With torch {version} on a CPU, {reached} of the {count} entries of the wheel's "
            f"`derivatives.yaml` were reached ({reached / count:.1%}), by torch's own samples of its "
            "operations, by calls for the purpose, and by arguments that fit a schema. Not reached: "
            + ", ".join(f"`{name}`" for name in missing)
            + ".",
            to_markdown(["operation", "layout of its results"], rows),
        ]
    )


if __name__ == "__main__":
    main()
