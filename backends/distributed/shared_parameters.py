"""Adds up, once a step, the gradients of parameters that stages on several ranks have."""

# A timeout is changed only by a private function.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Generator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout, default_pg_timeout

from ...ir import InputRole, UnsupportedError
from ...ir.pipeline.schedule import PipelineSchedule
from ..torch.program import Program
from .lost_ranks import reaching

__all__ = ["SharedParameters", "new_group"]

_MEETING = datetime.timedelta(seconds=6)


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Makes a group of some ranks of the world, on all ranks; returns None on those that are not in it.

    The ranks of gloo meet in a store, in which a rank that is gone is waited for until the group's timeout.
    So all ranks are there right before, and the timeout is short until they have met.

    Raises:
        IrcError: IRC493.
    """
    is_gloo = dist.get_backend() == "gloo"
    with reaching(when="at the start"):
        if is_gloo:
            dist.barrier()
        made = dist.new_group(list(ranks), timeout=_MEETING if is_gloo else None)
    if not isinstance(made, dist.ProcessGroup):
        return None
    if is_gloo:
        _set_pg_timeout(default_pg_timeout, made)
    return made


class SharedParameters:
    """Adds up the gradients of shared parameters across ranks, which begin with the values of the first rank.

    Every rank makes the groups of all ranks, in the same order.

    Args:
        schedule: The rank of each stage.
        programs: The programs of all stages.
        parameters: The parameters of this rank, by name.
        group: The ranks of the pipeline; None for all.

    Raises:
        UnsupportedError: IRC492 if the pipeline has a part of the world's ranks, and a parameter is only on
            some of these.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        programs: Sequence[Program],
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup | None,
    ) -> None:
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        rank = dist.get_rank(group)
        self.shared: list[tuple[nn.Parameter, dist.ProcessGroup | None]] = []
        for name, ranks in _ranks_of(schedule, programs).items():
            if len(ranks) < 2:
                continue
            if ranks not in groups:
                groups[ranks] = _group_of(name, ranks, group)
            if rank in ranks:
                parameter = parameters[name]
                with reaching(when="at the start"):
                    dist.broadcast(parameter.detach(), group=groups[ranks], group_src=0)
                self.shared.append((parameter, groups[ranks]))

    @contextlib.contextmanager
    def added_up(self) -> Generator[None]:
        """Adds the sums over all ranks of a step's gradients to the gradients that were there before.

        The earlier gradients are the same on all ranks: each rank puts its part of them into the sum.
        """
        for parameter, group in self.shared:
            if parameter.grad is not None:
                parameter.grad.div_(dist.get_world_size(group))
        yield
        for parameter, group in self.shared:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            with reaching():
                dist.all_reduce(gradient, group=group)
            parameter.grad = gradient


def _group_of(name: str, ranks: Sequence[int], group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the group of the ranks of a pipeline that have a parameter.

    Raises:
        UnsupportedError: IRC492.
    """
    if len(ranks) == dist.get_world_size(group):
        return group
    if group is None:
        return new_group(ranks)
    raise UnsupportedError(
        "IRC492",
        f"parameter {name} is shared by some ranks of a pipeline that does not have all ranks of the world",
        help="run each pipeline in a world of its own, or cut it into two stages",
    )


def _ranks_of(schedule: PipelineSchedule, programs: Sequence[Program]) -> dict[str, tuple[int, ...]]:
    """Returns the ranks of each parameter that gets a gradient on any rank, by its name."""
    released = {name for program in programs for name in program.released}
    ranks: dict[str, set[int]] = {}
    for stage, program in enumerate(programs):
        for entry in program.statics:
            if entry.role is InputRole.PARAMETER and entry.target in released:
                ranks.setdefault(entry.target, set()).add(schedule.device_of[stage])
    return {name: tuple(sorted(found)) for name, found in ranks.items()}
