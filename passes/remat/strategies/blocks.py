"""Checkpoints at the borders of the model's blocks, which the paths of its modules tell."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ....ir import Location, Node
from ..cut_network import Kept
from ..problem import CheckpointProblem, Solution
from .segments import keeping

__all__ = ["block_borders", "per_block"]


def per_block(problem: CheckpointProblem) -> Iterator[Solution]:
    """Keeps what crosses the borders of the model's blocks and computes the inside of a block again.

    `torch.utils.checkpoint` around each block does the same, but here operations run again one by one, when
    their results are read. What runs outside of all blocks is kept.

    Yields:
        One schedule for each level of blocks, outermost first; see `block_borders`.
    """
    yield from (keeping(problem, borders) for borders in block_borders(problem))


def block_borders(problem: CheckpointProblem) -> Iterator[Kept]:
    """The storages that cross the borders of the model's blocks, or are made outside of all blocks.

    A block is a member of something that repeats: in the path `encoder.layers.3.mlp.experts.0` the
    components with a digit are `3` and `0`, so that there are two levels of blocks, `encoder.layers.3`
    and `encoder.layers.3.mlp.experts.0`.

    Yields:
        One set for each level, outermost first; none if no operation has such a path.
    """
    paths = _block_paths(problem)
    seen: set[Kept] = set()
    for level in range(max(map(len, paths.values()), default=0)):
        block = {node: path[: level + 1] for node, path in paths.items()}
        borders = frozenset(
            storage
            for storage, node in problem.producer.items()
            if not block[node] or any(block[user] != block[node] for user in problem.users.get(storage, ()))
        )
        if borders not in seen:
            seen.add(borders)
            yield borders


def _block_paths(problem: CheckpointProblem) -> dict[Node, tuple[str, ...]]:
    """The blocks of each forward operation, outermost first; without a location, its predecessor's."""
    found: dict[Node, tuple[str, ...]] = {}
    path: tuple[str, ...] = ()
    for node in problem.forward:
        if node.at is not None:
            path = _blocks_at(node.at)
        found[node] = path
    return found


def _blocks_at(location: Location) -> tuple[str, ...]:
    """The prefixes of a location's path that end in a component with a digit.

    A path is the module's, or the part before the last slash in the name of an ONNX node.
    """
    path = location.module or (location.onnx_node or "").rpartition("/")[0]
    ends = (match.end() for match in re.finditer(r"[^./]+", path) if re.search(r"\d", match.group()))
    return tuple(path[:end] for end in ends)
