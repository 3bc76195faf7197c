"""Lists of tensors and optional values whose items only a run tells."""

from __future__ import annotations

import torch

from .table import Call, Result, lowering


@lowering("SequenceConstruct", since=11)
def sequence_construct(c: Call) -> Result:
    """A list of the operands."""
    return [c[i] for i in range(len(c))]


@lowering("SequenceEmpty", since=11)
def sequence_empty(c: Call) -> Result:
    """A list of nothing."""
    c.int_("dtype", 1)
    return []


def _position(c: Call, index: int, length: int, end: int) -> int:
    """A position in a list, counted from its end if negative."""
    at = c.integer(index, "position")
    if not -length <= at < length + end:
        raise IndexError(f"position {at} in a list of {length}")
    return at + length if at < 0 else at


@lowering("SequenceInsert", since=11)
def sequence_insert(c: Call) -> Result:
    """The list with one more tensor, before the position or at the end."""
    items = list(c.list_(0))
    items.insert(_position(c, 2, len(items), 1) if c.has(2) else len(items), c[1])
    return items


@lowering("SequenceErase", since=11)
def sequence_erase(c: Call) -> Result:
    """The list without the tensor at the position, which is the last one by default."""
    items = list(c.list_(0))
    del items[_position(c, 1, len(items), 0) if c.has(1) else -1]
    return items


@lowering("SequenceAt", since=11)
def sequence_at(c: Call) -> Result:
    """One tensor of the list."""
    items = c.list_(0)
    return items[_position(c, 1, len(items), 0)]


@lowering("SequenceLength", since=11)
def sequence_length(c: Call) -> Result:
    """Returns the number of tensors in the sequence."""
    length = len(c.list_(0))
    return c.literal(lambda: torch.tensor(length))


@lowering("Optional", since=15)
def optional(c: Call) -> Result:
    """The value that may be there."""
    c.attribute("type")
    return (c.tensors[0] if len(c) else None,)


@lowering("OptionalHasElement", since=15)
def optional_has_element(c: Call) -> Result:
    """Whether the value is there."""
    there = len(c) > 0 and c.tensors[0] is not None
    return c.literal(lambda: torch.tensor(there))


@lowering("OptionalGetElement", since=15)
def optional_get_element(c: Call) -> Result:
    """The value, which must be there."""
    value = c.tensors[0]
    if value is None:
        c.refuse("of a value that is absent")
    return (value,)
