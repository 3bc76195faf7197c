"""The request of a pipeline: devices, micro-batches, schedule, and what stages compute again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...ir import UsageError, format_bytes, parse_budget
from ...ir.pipeline.schedule import PipelineSchedule
from ...passes import PlanMemory
from ...passes.costs.optimizer_costs import OptimizerFactory
from ...passes.pipeline import PARTITIONS, SCHEDULES, pipeline_schedule
from ...passes.remat.choice import GAP
from ..request import MEASURED, Request
from ..tiers import offer

__all__ = ["AUTO", "CHECKPOINT_MODES", "DeviceRequest", "PipelineRequest"]

AUTO = "auto"
"""Leaves a number or the schedule to be chosen."""

CHECKPOINT_MODES = {
    "always": ("keep-none", "keep-none"),
    "except_last": ("keep-none", "keep-all"),
    "never": ("keep-all", "keep-all"),
}
"""The strategies of all micro-batches but the last, and of the last, by the names of torchgpipe."""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A device that a pipeline may use.

    Args:
        budget_bytes: What its memory is for.
        speed: How fast it is, beside the device that costs are measured on.
        name: As torch names it, such as `cuda:0`; empty if that is left open.
    """

    budget_bytes: int
    speed: float = 1.0
    name: str = ""

    def __str__(self) -> str:
        name = f"{self.name}=" if self.name else ""
        return f"{name}{format_bytes(self.budget_bytes)}{'' if self.speed == 1 else f'@{self.speed:g}'}"

    @staticmethod
    def parse(text: int | str, share_bytes: int = 0) -> DeviceRequest:
        """A device as `[NAME=]BYTES[@SPEED]`, such as `cuda:0=16GiB`, `8GiB@0.5`, `4GiB` or `90%`.

        Args:
            text: The device.
            share_bytes: The bytes that `%` refers to, see `PipelineRequest.of_shares`.

        Raises:
            UsageError: IRC401 for what is not a number of bytes; IRC482 for a speed that is not above 0, or
                a name that torch does not know.
        """
        if not isinstance(text, str):
            return DeviceRequest(parse_budget(text, 0))
        name, equals, rest = text.rpartition("=")
        amount, at, speed_text = rest.partition("@")
        if equals:
            _check_name(name.strip())
        budget_bytes = parse_budget(amount, share_bytes)
        try:
            speed = float(speed_text) if at else 1.0
        except ValueError:
            speed = math.nan
        if not 0 < speed < math.inf:
            raise UsageError(
                "IRC482",
                f"the speed of a device is {speed_text!r}",
                help="give a number above 0, as 8GiB@0.5 for half of the speed that costs are measured at",
            )
        return DeviceRequest(budget_bytes, speed, name.strip())


def _check_name(name: str) -> None:
    try:
        found = torch.device(name)
    except RuntimeError:
        found = torch.device("meta")
    if found.type == "meta" or str(found) != name:  # of a number above 127 torch makes another one
        raise UsageError("IRC482", f"there is no device {name!r}", help="name it as torch does: cuda:0=16GiB")


@dataclass(frozen=True)
class PipelineRequest:
    """All options of a pipeline, checked.

    Args:
        devices: How many devices it runs on; `auto` for as many of those in `budget` as are best.
        micro_batches: In how many parts a batch goes through it, or `auto`.
        budget: Of each device, as `DeviceRequest.parse` reads it; one for all, or one for each. A percentage
            is of a device's equal share in the baseline: the peak of the whole batch on one device.
        schedule: `gpipe`, `1f1b`, `interleaved`, `zb-h1`, `zbv` or `dualpipev`, or `auto`.
        chunks: Stages of each device, for `interleaved`.
        strategy: What stages compute again, as in `irc.optimize`.
        time_limit: Seconds for planning.
        costs: As in `irc.optimize`.
        checkpoint: Instead of a strategy, of `CHECKPOINT_MODES`; None for irc's own plan of each stage.
        optimizer: Makes the optimizer of a list of parameters, whose state and steps the budget covers too.
        link: Bytes that go from one device to another in a second, in each direction.
        swap: Tiers that stages may copy to, as in `irc.optimize`, for each device.
        partition: Where the model is cut: `best`, or for comparison `uniform`, `time`, `size` or `pipedream`.
        gap: The distance from the best at which the plan of a stage is good enough, as in `irc.optimize`.
        exact: As there.
    """

    devices: int | str
    micro_batches: int | str
    budget: int | str | Sequence[int | str]
    schedule: str = "1f1b"
    chunks: int | None = None
    strategy: str = "auto"
    time_limit: float = 60.0
    costs: str = MEASURED
    checkpoint: str | None = None
    optimizer: OptimizerFactory | None = None
    link: int | str = "10GB"
    partition: str = "best"
    swap: str | Sequence[str] = ()
    gap: float = GAP
    exact: bool | str = True

    def check(self) -> None:
        """Refuses what can be refused before the model is looked at.

        Raises:
            UsageError: IRC401 or IRC482 for devices or the link, IRC403 for strategy, time limit or gap,
                IRC467 or IRC468 for a schedule, IRC469 for what is not a number, IRC495 for a mode of
                checkpointing, IRC499 for an unknown partition; as `offer` for tiers.
        """
        numbers: tuple[tuple[str, object], ...] = (
            ("stages", self.devices),
            ("micro-batches", self.micro_batches),
            ("chunks", AUTO if self.chunks is None else self.chunks),
        )
        for what, given in numbers:
            is_number = isinstance(given, int) and not isinstance(given, bool) and given > 0
            if not is_number and given != AUTO:
                raise UsageError(
                    "IRC469", f"{what} are {given!r}", help=f"give a number from 1 on, or {AUTO}"
                )
        if not self.is_open:
            self.order()
        elif self.schedule not in (AUTO, *SCHEDULES):
            pipeline_schedule(self.schedule, 1, 1)
        if self.devices == AUTO and isinstance(self.budget, int | str):
            raise UsageError(
                "IRC482",
                "stages auto uses as many of the given devices as are best, and one budget gives none",
                help="give --device for each of them, or a list of budgets",
            )
        self.requested_devices()
        PlanMemory(1, self.strategy, self.time_limit, gap=self.gap).check()
        self.strategies()
        if self.partition not in PARTITIONS:
            raise UsageError(
                "IRC499",
                f"there is no way {self.partition!r} to cut a model",
                help=f"choose one of {', '.join(PARTITIONS)}",
            )
        self.link_bytes_per_second()
        self.of_a_stage()

    @property
    def is_open(self) -> bool:
        """Whether something is left to be chosen."""
        return AUTO in (self.devices, self.micro_batches, self.schedule)

    @property
    def count_of_devices(self) -> int:
        """The number of devices to choose from."""
        if isinstance(self.devices, int):
            return self.devices
        return 1 if isinstance(self.budget, int | str) else len(self.budget)

    @property
    def count_of_micro_batches(self) -> int:
        """The number of micro-batches, if it is not open."""
        assert isinstance(self.micro_batches, int), "the number of micro-batches is open"
        return self.micro_batches

    def order(self) -> PipelineSchedule:
        """The order of work, if nothing is open.

        Raises:
            UsageError: IRC467 or IRC468.
        """
        return pipeline_schedule(
            self.schedule, self.count_of_devices, self.count_of_micro_batches, self.chunks
        )

    def strategies(self) -> tuple[str, str] | None:
        """The strategies of a mode of checkpointing: of all micro-batches but the last, and of the last.

        Raises:
            UsageError: IRC495 for an unknown mode, or one beside a strategy.
        """
        if self.checkpoint is None:
            return None
        if self.checkpoint not in CHECKPOINT_MODES:
            raise UsageError(
                "IRC495",
                f"there is no mode {self.checkpoint!r} of checkpointing",
                help=f"choose one of {', '.join(CHECKPOINT_MODES)}, or none for irc's own plan of each stage",
            )
        if self.strategy != "auto":
            raise UsageError(
                "IRC495",
                f"checkpointing {self.checkpoint} and strategy {self.strategy} exclude each other",
                help="leave one of them out",
            )
        return CHECKPOINT_MODES[self.checkpoint]

    def requested_devices(self) -> tuple[DeviceRequest, ...]:
        """Each device.

        Raises:
            UsageError: IRC401 for what is not a number of bytes; IRC482 for another number of budgets than
                devices, and as `DeviceRequest.parse`.
        """
        given = self.budget
        count = self.count_of_devices
        texts = [given] * count if isinstance(given, int | str) else list(given)
        if len(texts) != count or not texts:
            raise UsageError(
                "IRC482",
                f"{len(texts)} budgets for {count} devices",
                help="give one --budget for all devices, or --device for each of them",
            )
        found = tuple(map(DeviceRequest.parse, texts))
        names = [device.name for device in found if device.name]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(
                "IRC482",
                f"device {twice[0]} is there twice",
                help="give each device once, with all it has",
            )
        return found

    @property
    def has_percentages(self) -> bool:
        """Whether a budget is a part of a device's share in the baseline."""
        given = [self.budget] if isinstance(self.budget, int | str) else self.budget
        return any(isinstance(text, str) and "%" in text for text in given)

    def of_shares(self, baseline_bytes: int) -> PipelineRequest:
        """The request with budgets in bytes.

        Args:
            baseline_bytes: The peak of a step of the whole batch on one device, which keeps all.
        """
        share_bytes = baseline_bytes // self.count_of_devices
        texts = [self.budget] * self.count_of_devices if isinstance(self.budget, int | str) else self.budget
        devices = [DeviceRequest.parse(text, share_bytes) for text in texts]
        names = (f"{device.name}=" if device.name else "" for device in devices)
        budgets = [f"{name}{d.budget_bytes}@{d.speed!r}" for name, d in zip(names, devices, strict=True)]
        return replace(self, budget=budgets)

    def of_a_stage(self) -> Request:
        """The request of a stage; the pipeline's planner gives each stage its part of a device's budget.

        Raises:
            UsageError: As `Request.of`; IRC447 if parameters or optimizer state shall live in a tier.
        """
        if self.swap:
            offer(self.swap, self.costs)
        return Request.of(1, costs=self.costs, swap=self.swap or None, exact=self.exact)

    def link_bytes_per_second(self) -> int:
        """Bytes that go from one device to another in a second.

        Raises:
            UsageError: IRC401 for what is not a number of bytes, IRC482 for a part of something.
        """
        if isinstance(self.link, str) and self.link.strip().endswith("%"):
            raise UsageError("IRC482", f"the link takes {self.link} a second", help="give bytes, as 10GB")
        return parse_budget(self.link, 0)
