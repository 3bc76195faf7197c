"""The traits of traced operations: what is a view, what draws, what looks at running statistics."""

# The operator library has no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import fx

from ...ir import Node, Trait, UnsupportedError, Value, nondeterminism

__all__ = ["draws", "ignores_statistics", "operands_of", "traits_of"]

_SEEDED = torch.Tag.nondeterministic_seeded


def draws(node: fx.Node) -> bool:
    """Whether a traced operation moves a random generator."""
    is_random = isinstance(node.target, torch._ops.OpOverload) and _SEEDED in node.target.tags
    return is_random and not _draws_nothing(str(node.target), node.args)


def traits_of(node: Node, traced: fx.Node) -> frozenset[Trait]:
    """Returns the traits of a translated operation.

    Raises:
        UnsupportedError: IRC335 if it writes into its operand.
    """
    target = traced.target
    assert isinstance(target, torch._ops.OpOverload)
    operand_storages = {value.storage for value in node.operands}
    if target._schema.is_mutable:
        raise UnsupportedError("IRC335", f"{target} writes into its operand", at=node.at)
    if node.values and all(value.storage in operand_storages for value in node.values):
        return frozenset({Trait.VIEW})
    if _SEEDED in target.tags and not _draws_nothing(node.op, node.arguments):
        return frozenset({Trait.RANDOM})
    return frozenset() if nondeterminism(node) is None else frozenset({Trait.NONDETERMINISTIC})


def _draws_nothing(op: str, arguments: Iterable[object]) -> bool:
    """Whether an operation that is tagged as random draws nothing after all (attention without dropout)."""
    if "scaled_dot_product" not in op:
        return False
    dropout = [argument for argument in arguments if isinstance(argument, float)]
    return all(rate == 0.0 for rate in dropout[:1])


_BATCH_NORM = {
    "aten._native_batch_norm_legit_functional.default": (3, 4),
    "aten._batch_norm_with_update_functional.default": (4, 5),
}
"""Operations of BatchNorm, with the places of the new statistics among their results."""
_BATCH_NORM_BACKWARD = ("aten.native_batch_norm_backward.default", "aten.batch_norm_backward.default")
_STATISTICS = (3, 4)
_TRAINING = {"forward": 5, "backward": 7}


def ignores_statistics(node: Node, read: Set[Value]) -> bool:
    """Whether a node reads running statistics only to update them (BatchNorm in training)."""
    if node.op not in _BATCH_NORM or node.arguments[_TRAINING["forward"]] is False:
        return False
    return read.isdisjoint(node.results[index] for index in _BATCH_NORM[node.op])


def operands_of(node: fx.Node) -> tuple[Any, ...]:
    """The operands of a node; BatchNorm's backward in training does not look at the running statistics."""
    if str(node.target) in _BATCH_NORM_BACKWARD and node.args[_TRAINING["backward"]] is True:
        return tuple(None if i in _STATISTICS else argument for i, argument in enumerate(node.args))
    return node.args
