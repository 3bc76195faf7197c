"""Refuses attributes that a forward changes as no planned step can, or for which there is no module."""

from __future__ import annotations

from ...ir import THROUGH_DYNAMO, Signature, UnsupportedError

__all__ = ["refuse_assignments", "unkept_attributes"]


def unkept_attributes(paths: list[str]) -> UnsupportedError:
    """The refusal of attributes that a forward leaves with tensors that a plan could not leave there."""
    return UnsupportedError(
        "IRC338",
        f"the forward assigns a tensor to the attribute {paths[0]} ({len(paths)} such attributes), and "
        "reads what the last call left there, or adds to it",
        help="let each forward assign the attribute of a module anew (self.found = [...]) before it is read; "
        "return the tensor; or register a buffer and write into it with copy_(); if it is a cache, call the "
        f"module once before, so that it is full; or {THROUGH_DYNAMO}, which plans recurrent layers with "
        "torch._dynamo.config.allow_rnn = True",
    )


def refuse_assignments(signature: Signature, means: str) -> None:
    """Refuses a forward that changes attributes of its module, where there is no such module in training.

    Numbers and texts that it leaves are the same in each call, and nothing in training reads them.

    Args:
        signature: The calling convention of the forward.
        means: What trains it, in words.

    Raises:
        UnsupportedError: IRC338.
    """
    changed = [each for each in signature.assignments if not each.is_constant]
    for each in changed:
        path = f"{each.module}.{each.name}".strip(".")
        raise UnsupportedError(
            "IRC338",
            f"the forward changes the attribute {path} ({len(changed)} such attributes), which "
            f"{means} does not hold",
            help="return what it assigns, keep counters in buffers, or train by irc.optimize(...)",
        )
