"""Checkpoints by the kind of operation, by articulation points, or as the user names them."""

from __future__ import annotations

import math

from ....ir import Policy, Storage
from ..chain import articulations
from ..problem import CheckpointProblem, Solution
from .segments import keeping

__all__ = ["collection", "memory", "speed"]

_SLOW = (
    "addbmm",
    "addmm",
    "addmv",
    "baddbmm",
    "bmm",
    "convolution",
    "linear",
    "mm",
    "mv",
)
"""The operations whose results are dear to make again: convolutions and matrix products."""


def speed(problem: CheckpointProblem) -> Solution:
    """Keeps the results of convolutions and of matrix products, attention's included.

    Source:
        Bulatov and Salimans, Fitting larger networks into memory (2018): gradient-checkpointing, its mode
        `speed`.
    """
    return keeping(problem, frozenset(s for s, node in problem.producer.items() if _is_slow(node.op)))


def _is_slow(op: str) -> bool:
    name = op.split(".")[1] if "." in op else op
    return name.lstrip("_").removesuffix("_") in _SLOW or "scaled_dot_product" in name


def memory(problem: CheckpointProblem) -> Solution:
    """Keeps about sqrt(n) of the n articulation points of forward, at even distances.

    An articulation point is a storage that alone is read across a position of forward. Where there is none,
    nothing is kept but what must be.

    Source:
        Bulatov and Salimans (2018), mode `memory`; the number from Chen et al., Training Deep Nets with
        Sublinear Memory Cost (2016). Theirs looks for points along the graph's edges, ours along the order in
        which forward runs.
    """
    points: list[Storage] = list(dict.fromkeys(articulations(problem).values()))
    count = math.isqrt(len(points))
    kept = (points[(index + 1) * len(points) // (count + 1)] for index in range(count))
    return keeping(problem, frozenset(kept))


def collection(problem: CheckpointProblem) -> Solution:
    """Keeps what the user's annotations keep (`irc.keep`), and makes everything else again.

    Source:
        Bulatov and Salimans (2018), mode `collection`.
    """
    named = (
        storage
        for storage, node in problem.producer.items()
        if node.annotation is not None and node.annotation.policy is Policy.KEEP
    )
    return keeping(problem, frozenset(named))
