"""The certificate of a planned pipeline."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ..files import check_fields
from ..printable import printable
from ..reordered import Reordered, Rounding, reordered_lines
from ..units import format_bytes
from .timing import PipelineTimeline

__all__ = ["PipelinePlan", "StageSummary"]

_FORMAT = "irc-pipeline-2"


@dataclass(frozen=True, slots=True)
class StageSummary:
    """Describes the work of one stage for a micro-batch.

    Args:
        stage: Its place.
        device: The device that it runs on.
        first: The origin of its first operation, in words.
        operations: The number of operations of the model that it runs forward.
        parameter_bytes: The bytes of its parameters.
        forward_seconds: Predicted time of its forward.
        backward_seconds: Predicted time of its backward, with what it computes again.
        copied_bytes: The bytes that it copies out to tiers.
        again_seconds: Predicted time of what it computes again.
        held_bytes: The bytes that a micro-batch holds there between forward and backward.
        forward_bytes: The bytes that it sends to the next stage.
        backward_bytes: The bytes that it sends to the stage before.
        in_flight: The most micro-batches that it holds at once.
    """

    stage: int
    device: int
    first: str
    operations: int
    parameter_bytes: int
    forward_seconds: float
    backward_seconds: float
    copied_bytes: int
    again_seconds: float
    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    in_flight: int


@dataclass(frozen=True)
class PipelinePlan:
    """Describes a pipeline: the request, the choice, its cost, and the proof of how good it is.

    Args:
        schedule: The name of the order of work.
        micro_batches: The micro-batches of a step.
        budget_bytes: The budget of each device.
        speeds: The speed of each device, relative to the one that costs are for.
        device_names: The name of each device; an empty text if it has none.
        optimizer: The optimizer whose state and steps are counted; None if there is none.
        peak_bytes: Predicted peak of each device.
        step_seconds: Predicted time of a step.
        bound_seconds: No partition takes less on these devices.
        single_seconds: Time of the operations of a step on one device, each once for each micro-batch.
        bubble: The part of the devices' time in which they do not compute.
        stages: The summary of each stage.
        cuts: The positions of the model's forward operations before which it is cut.
        costs: The source of seconds and workspaces.
        planning_seconds: The time that planning took.
        roundings: The reasons why numbers may differ from the model's own by rounding, as in `Plan`.
        reordered: The tensors that sums in another order reach, with a bound of the difference.
        timeline: The simulated step; None if an earlier version wrote the plan.
    """

    schedule: str
    micro_batches: int
    budget_bytes: tuple[int, ...]
    speeds: tuple[float, ...]
    device_names: tuple[str, ...]
    optimizer: str | None
    peak_bytes: tuple[int, ...]
    step_seconds: float
    bound_seconds: float
    single_seconds: float
    bubble: float
    stages: tuple[StageSummary, ...]
    cuts: tuple[int, ...]
    costs: str
    planning_seconds: float
    roundings: tuple[Rounding, ...] = ()
    reordered: tuple[Reordered, ...] = ()
    timeline: PipelineTimeline | None = field(default=None, compare=False, repr=False)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.budget_bytes)

    @property
    def gap(self) -> float:
        """The most by which a step is longer than the bound, as a fraction of the bound."""
        return self.step_seconds / self.bound_seconds - 1 if self.bound_seconds else 0.0

    @property
    def speedup(self) -> float:
        """The speed-up of a step over one device with enough memory, which computes nothing twice."""
        return self.single_seconds / self.step_seconds if self.step_seconds else 1.0

    def to_json(self) -> dict[str, Any]:
        """Writes the plan as JSON, which `from_json` reads."""
        known = asdict(replace(self, timeline=None))
        known["timeline"] = None if self.timeline is None else self.timeline.to_json()
        return {"format": _FORMAT, **known, "gap": self.gap, "speedup": self.speedup}

    @staticmethod
    def from_json(data: dict[str, Any]) -> PipelinePlan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: It is of another format, a number is negative or not finite, or tables of devices have
                other lengths.
            TypeError: A value has another type.
            LookupError: Something is missing.
        """
        if data["format"] != _FORMAT:
            raise ValueError(f"format is {data['format']!r}, not {_FORMAT!r}")
        _check_numbers(data)
        plan = PipelinePlan(
            schedule=str(data["schedule"]),
            micro_batches=int(data["micro_batches"]),
            budget_bytes=tuple(map(int, data["budget_bytes"])),
            speeds=tuple(map(float, data["speeds"])),
            device_names=tuple(map(str, data["device_names"])),
            optimizer=None if data["optimizer"] is None else str(data["optimizer"]),
            peak_bytes=tuple(map(int, data["peak_bytes"])),
            step_seconds=float(data["step_seconds"]),
            bound_seconds=float(data["bound_seconds"]),
            single_seconds=float(data["single_seconds"]),
            bubble=float(data["bubble"]),
            stages=tuple(StageSummary(**row) for row in data["stages"]),
            cuts=tuple(map(int, data["cuts"])),
            costs=str(data["costs"]),
            planning_seconds=float(data["planning_seconds"]),
            roundings=tuple(map(Rounding.from_json, data.get("roundings", ()))),
            reordered=tuple(Reordered.from_json(row) for row in data.get("reordered", ())),
            timeline=None if data.get("timeline") is None else PipelineTimeline.from_json(data["timeline"]),
        )
        for stage in plan.stages:
            check_fields(stage, fields(stage))
        _check_devices(plan)
        _check_timeline(plan)
        return plan

    def summary(self) -> str:
        """Describes the plan in text: the step, then a line for each stage and each device."""
        lines = [
            f"{'schedule':>16}  {self.schedule}: {len(self.stages)} stages on {self.devices} devices, "
            f"{self.micro_batches} micro-batches",
            f"{'step':>16}  {self.step_seconds:.4g} s predicted, bound {self.bound_seconds:.4g} s: at most "
            f"{self.gap:.2%} from optimal",
            f"{'speed':>16}  {self.speedup:.2f} x one device, which would take {self.single_seconds:.4g} s; "
            f"devices wait {self.bubble:.1%} of the time",
        ]
        for device, (peak, budget) in enumerate(zip(self.peak_bytes, self.budget_bytes, strict=True)):
            name, speed = self.device_names[device], self.speeds[device]
            lines.append(
                f"{f'device {device}':>16}  {f'{name}, ' if name else ''}peak {format_bytes(peak)} "
                f"({peak:,} bytes) of a budget of {format_bytes(budget)}"
                f"{'' if speed == 1 else f', at {speed:g} of the speed'}"
            )
        lines += [
            f"{'rounding':>16}  may differ from eager: {printable(text, 1000)}"
            for text in (*map(str, self.roundings), *reordered_lines(self.reordered))
        ]
        if self.optimizer is not None:
            lines.append(f"{'optimizer':>16}  {self.optimizer}, with its state and steps counted")
        for stage in self.stages:
            copied = f"; copies {format_bytes(stage.copied_bytes)} out" if stage.copied_bytes else ""
            again = f", {stage.again_seconds:.3g} s of it again" if stage.again_seconds else ""
            lines.append(
                f"{f'stage {stage.stage}':>16}  device {stage.device}, {stage.operations} operations from "
                f"{stage.first}"
            )
            times = f"forward {stage.forward_seconds:.3g} s, backward {stage.backward_seconds:.3g} s{again}"
            lines.append(
                f"{'':>16}  {times}; parameters {format_bytes(stage.parameter_bytes)}; holds "
                f"{stage.in_flight} x {format_bytes(stage.held_bytes)}{copied}"
            )
        lines.append(f"{'costs':>16}  {self.costs}, planned in {self.planning_seconds:.1f} s")
        return "\n".join(lines)


def _check_devices(plan: PipelinePlan) -> None:
    """Refuses, by ValueError, tables that are not of the same devices."""
    tables = (plan.budget_bytes, plan.speeds, plan.device_names, plan.peak_bytes)
    if not plan.peak_bytes or len({*map(len, tables)}) > 1:
        raise ValueError("budget_bytes, speeds, device_names and peak_bytes have other lengths")


def _check_timeline(plan: PipelinePlan) -> None:
    """Refuses, by ValueError, a step of other devices or stages than the plan's."""
    timeline = plan.timeline
    if timeline is None:
        return
    devices = range(plan.devices)
    places = {stage.stage: stage.device for stage in plan.stages}
    each_has_its_own = all(
        places.get(timed.action.stage) == device
        for device, line in enumerate(timeline.lines)
        for timed in line
    )
    linked = all(
        sent.source_device in devices and sent.target_device in devices for sent in timeline.transfers
    )
    if not len(timeline.lines) == len(timeline.memory) == plan.devices or not (each_has_its_own and linked):
        raise ValueError("the simulated step is not of the plan's devices and stages")
    if not all(timeline.memory):
        raise ValueError("the simulated step of a device has no memory")


# These are derived, and compare times.
_SIGNED = ("bubble", "gap", "speedup")


def _check_numbers(given: Any, name: str = "plan") -> None:
    """Refuses, by ValueError, what no amount and no time is."""
    if isinstance(given, dict):
        for key, value in given.items():
            _check_numbers(value, str(key))
    elif isinstance(given, list | tuple):
        for value in given:
            _check_numbers(value, name)
    elif isinstance(given, int | float):
        least = -math.inf if name in _SIGNED else 0
        if not least <= given < 1 << 63:
            raise ValueError(f"{name} is {given!r}; it is a number from {least} on, below 2**63")
