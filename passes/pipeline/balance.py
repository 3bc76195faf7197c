"""Cuts a sequence of layers into stages as others do, for comparison; returns the ends of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from ...ir import UsageError

__all__ = ["block_partition", "loads", "pipedream", "uniform"]


def uniform(layers: int, stages: int) -> tuple[int, ...]:
    """Gives each stage as many layers, the longer stages first.

    Raises:
        UsageError: IRC474 when there are fewer layers than stages.
    """
    _check(layers, stages)
    each, longer = divmod(layers, stages)
    return tuple(accumulate(each + (stage < longer) for stage in range(stages)))


def block_partition(sizes: Sequence[float], stages: int) -> tuple[int, ...]:
    """Balances sizes as torchgpipe does: times (`balance_by_time`) or bytes (`balance_by_size`).

    Sizes count from their minimum on. While the largest stage exceeds the smallest by more than the range of
    sizes, the smallest takes a layer from its neighbour on the side of the largest. The result is not an
    optimum.

    Args:
        sizes: One number for each layer.
        stages: The number of stages, each with at least one layer at the beginning.

    Raises:
        UsageError: IRC474 when there are fewer layers than stages.

    Source:
        Bárány and Grolmusz, "Block partitions of sequences" (2015). As in torchgpipe, it begins with stages
        of `len(sizes) // stages` layers and the rest in the last. As in the paper, and not in torchgpipe,
        which may then not come to an end, it takes the closest of equal smallest stages, and no sum is
        rounded.
    """
    _check(len(sizes), stages)
    exact = [Fraction(size) for size in sizes]
    least = min(exact)
    span = max(exact) - least
    sums = [Fraction(0), *accumulate(size - least for size in exact)]
    ends = [0, *(len(sizes) // stages * stage for stage in range(1, stages)), len(sizes)]

    def size(stage: int) -> Fraction:
        return sums[ends[stage + 1]] - sums[ends[stage]]

    largest: int | None = None
    while True:
        if largest is None:
            largest = max(range(stages), key=lambda stage: (size(stage), stage))
        smallest = min(range(stages), key=lambda stage, of=largest: (size(stage), abs(stage - of)))
        if size(largest) <= size(smallest) + span:
            return tuple(ends[1:])
        if largest < smallest:
            giver = smallest - 1
            ends[smallest] -= 1
        else:
            giver = smallest + 1
            ends[giver] += 1
        if giver == largest:
            largest = None


def pipedream(seconds: Sequence[float], transfer_seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Cuts by PipeDream's dynamic programme, without replicated stages.

    It makes the slowest stage or transfer as fast as possible. A transfer, there and back, runs beside the
    computations, like a stage of its own. Without transfers it is the best cut of the sequence.

    Args:
        seconds: The time of forward and backward of each layer.
        transfer_seconds: The time to transfer the output of each layer; its gradient takes as long.
        stages: The number of stages.

    Raises:
        UsageError: IRC474 when there are fewer layers than stages.

    Source:
        Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training" (2019), section
        3.1, with one worker for each stage.
    """
    _check(len(seconds), stages)
    sums = [0.0, *accumulate(seconds)]
    slowest = sums[:]
    cuts: list[list[int]] = []
    for stage in range(1, stages):
        made = [(0.0, 0)] * len(sums)
        for end in range(stage + 1, len(sums)):
            made[end] = min(
                (max(slowest[cut], 2 * transfer_seconds[cut - 1], sums[end] - sums[cut]), cut)
                for cut in range(stage, end)
            )
        slowest = [load for load, _ in made]
        cuts.append([cut for _, cut in made])
    ends = [len(seconds)]
    for of_end in reversed(cuts):
        ends.append(of_end[ends[-1]])
    return tuple(reversed(ends))


def loads(sizes: Sequence[float], ends: Sequence[int]) -> list[float]:
    """The sum of the sizes of each stage."""
    return [sum(sizes[start:end]) for start, end in pairwise([0, *ends])]


def _check(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise UsageError(
            "IRC474",
            f"{layers} layers cannot be cut into {stages} stages",
            help=f"ask for between 1 and {layers} stages",
        )
