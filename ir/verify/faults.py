"""Raises faults, and names in them what a graph and a schedule consist of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from ..errors import VerificationError
from ..graph import Node, Output, OutputRole
from ..types import Storage

__all__ = ["by_name", "describe", "fail", "show"]


def fail(code: str, message: str, node: Node | None = None) -> NoReturn:
    """Raises a fault, located at the place that `node` came from."""
    raise VerificationError(code, message, at=node.at if node is not None else None)


def by_name(storages: Iterable[Storage]) -> list[Storage]:
    """Sorts storages, so that the fault that is reported does not depend on the order of a set."""
    return sorted(storages, key=lambda storage: storage.name)


def show(storage: Storage) -> str:
    """Names a storage and its size."""
    return f"storage {storage.name} ({storage.nbytes} B)"


def describe(output: Output) -> str:
    """Names an output or a gradient."""
    part = f"{output.part} of the " if output.part else ""
    kind = "gradient of" if output.role is OutputRole.GRADIENT else "output"
    return f"{part}{kind} {output.target}"
