"""The operations of torch that write the result of another one over memory that is there."""

# Schemas of operations have no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from functools import lru_cache

from .operations import OWN_FUNCTIONS, overload_of

__all__ = ["in_place_form", "out_form"]


@lru_cache(maxsize=1024)
def in_place_form(op: str) -> str | None:
    """Names the operation that writes the result of one over its first operand; None if torch has none."""
    return _written_form(op, "{0}.{1}_.{2}")


@lru_cache(maxsize=1024)
def out_form(op: str) -> str | None:
    """Names the operation that writes the result of one into `out`; None if torch has none."""
    return _written_form(op, "{0}.{1}.out") or _written_form(op, "{0}.{1}.{2}_out")


def _written_form(op: str, pattern: str) -> str | None:
    functional = overload_of(op)
    if op in OWN_FUNCTIONS or functional is None:
        return None
    name = pattern.format(*op.split("."))
    writing = overload_of(name)
    if writing is None or not writing._schema.is_mutable:
        return None
    mine = [(each.name, str(each.type)) for each in functional._schema.arguments]
    its = [(each.name, str(each.type)) for each in writing._schema.arguments]
    writes = [each.alias_info is not None and each.alias_info.is_write for each in writing._schema.arguments]
    is_same = mine == its and writes == [True, *[False] * (len(its) - 1)]
    is_out = mine == its[:-1] and its[-1] == ("out", "Tensor") and writes == [*[False] * len(mine), True]
    return name if is_same or is_out else None
