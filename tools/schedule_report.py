"""Known pipeline schedules on equal stages: what they take, as a table, as JSON, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..ir import UsageError, format_bytes
from ..ir.pipeline.schedule import PipelineSchedule, in_flight_on_devices
from ..ir.pipeline.timing import PipelineTimeline, StageCost, Transfer, simulate_pipeline
from ..passes.pipeline import SCHEDULES, pipeline_schedule

if TYPE_CHECKING:
    from rich.table import Table

    from ..compiler.report.pipeline_picture import DrawnStep

__all__ = ["EqualStages", "Refused", "SimulatedStep", "comparison", "simulate_all", "simulate_known"]


@dataclass(frozen=True, slots=True)
class EqualStages:
    """Devices that all do the same for each micro-batch, whatever the schedule.

    If a schedule has several stages on a device, each takes its part of these numbers.

    Args:
        devices: How many there are.
        micro_batches: How many there are in a step.
        chunks: Stages of each device, if the schedule leaves it open.
        forward_seconds: Of one micro-batch on one device.
        input_gradient_seconds: The same.
        weight_gradient_seconds: The same.
        transfer_seconds: Of activations, or gradients, from one device to the next.
        held_bytes: What a micro-batch holds on a device until its last work there; None to count them.
    """

    devices: int
    micro_batches: int
    chunks: int | None = None
    forward_seconds: float = 1.0
    input_gradient_seconds: float = 1.0
    weight_gradient_seconds: float = 1.0
    transfer_seconds: float = 0.0
    held_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step of a known schedule.

    Args:
        stages: For what.
        schedule: The order.
        timeline: When everything happens.
    """

    stages: EqualStages
    schedule: PipelineSchedule
    timeline: PipelineTimeline

    @property
    def chunks(self) -> int:
        """The number of stages of each device."""
        return self.schedule.stages // self.schedule.devices

    @property
    def memory_unit(self) -> tuple[float, str]:
        """By what the bytes of the timeline are divided, and what that gives."""
        if self.stages.held_bytes is None:
            return self.chunks, "micro-batches"
        from ..ir.units import memory_unit

        divisor, unit, _ = memory_unit(self.stages.held_bytes)
        return divisor, unit

    def peak(self, device: int) -> str:
        """The most that a device holds, for a table."""
        nbytes = self.timeline.peak_bytes[device]
        return f"{nbytes / self.chunks:g}" if self.stages.held_bytes is None else format_bytes(nbytes)

    def table(self) -> Table:
        """The table of what each device does and holds."""
        from rich import box
        from rich.table import Table

        timeline, each = self.timeline, in_flight_on_devices(self.schedule)
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for name in ("device", "stages", "busy", "idle", "in flight", "until weights", "peak"):
            table.add_column(name, justify="right")
        for device in range(self.schedule.devices):
            table.add_row(
                str(device),
                " ".join(map(str, self.schedule.stages_on(device))),
                f"{timeline.busy_seconds[device]:.6g} s",
                f"{timeline.bubble_fractions[device]:.1%}",
                f"{each[device].until_input / self.chunks:g}",
                f"{each[device].until_weight / self.chunks:g}",
                self.peak(device),
            )
        return table

    @property
    def title(self) -> str:
        """One line: which schedule, for what, how long and how much of it is bubble."""
        return (
            f"{self.schedule.name}: {self.schedule.stages} stages on {self.schedule.devices} devices, "
            f"{self.schedule.micro_batches} micro-batches, {self.timeline.step_seconds:.6g} s, "
            f"bubble {self.timeline.bubble_fraction:.1%}"
        )

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON."""
        timeline, each = self.timeline, in_flight_on_devices(self.schedule)
        lines = str(self.schedule).splitlines()[1:]
        return {
            "schedule": self.schedule.name,
            "micro_batches": self.schedule.micro_batches,
            "device_of": list(self.schedule.device_of),
            "step_seconds": timeline.step_seconds,
            "bubble_fraction": timeline.bubble_fraction,
            "devices": [
                {
                    "actions": lines[device].split()[2:],
                    "busy_seconds": timeline.busy_seconds[device],
                    "bubble_fraction": timeline.bubble_fractions[device],
                    "stages_in_flight": each[device].until_input,
                    "stages_in_flight_until_weights": each[device].until_weight,
                    "peak_bytes": None if self.stages.held_bytes is None else timeline.peak_bytes[device],
                }
                for device in range(self.schedule.devices)
            ],
        }

    def drawn(self) -> DrawnStep:
        """The part of it that the picture shows."""
        from ..compiler.report.pipeline_picture import DrawnStep

        return DrawnStep(self.title, self.schedule, self.timeline, *self.memory_unit)


@dataclass(frozen=True, slots=True)
class Refused:
    """A schedule that does not take these numbers."""

    name: str
    reason: str


def simulate_known(name: str, stages: EqualStages) -> SimulatedStep:
    """A step of a known schedule on equal stages.

    Raises:
        UsageError: IRC466 for a negative time; IRC467 to IRC469 as of `pipeline_schedule`.
    """
    chunks = stages.chunks if name not in SCHEDULES or SCHEDULES[name].chunks is None else None
    schedule = pipeline_schedule(name, stages.devices, stages.micro_batches, chunks)
    parts = schedule.stages // schedule.devices
    held_bytes = 1 if stages.held_bytes is None else math.ceil(stages.held_bytes / parts)
    cost = StageCost(
        stages.forward_seconds / parts,
        stages.input_gradient_seconds / parts,
        stages.weight_gradient_seconds / parts,
        held_bytes=held_bytes,
        held_after_input_bytes=held_bytes,
    )
    ways = [(s, s + 1) for s in range(schedule.stages - 1)]
    transfers = [Transfer(a, b, 0, stages.transfer_seconds) for way in ways for a, b in (way, way[::-1])]
    timeline = simulate_pipeline(schedule, [cost] * schedule.stages, transfers)
    return SimulatedStep(stages, schedule, timeline)


def simulate_all(stages: EqualStages) -> list[SimulatedStep | Refused]:
    """A step of each known schedule; those that do not take the numbers say why."""
    found: list[SimulatedStep | Refused] = []
    for name in SCHEDULES:
        try:
            found.append(simulate_known(name, stages))
        except UsageError as error:
            if error.code != "IRC468":
                raise
            found.append(Refused(name, f"{error.message}; {error.help}"))
    return found


def comparison(steps: Sequence[SimulatedStep | Refused], stages: EqualStages) -> Table:
    """Schedules side by side, one in each row."""
    from rich import box
    from rich.table import Table

    title = f"{stages.devices} devices, {stages.micro_batches} micro-batches"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("schedule")
    for name in ("stages", "step", "bubble"):
        table.add_column(name, justify="right")
    counted = "micro-batches" if stages.held_bytes is None else "bytes"
    table.add_column(f"most {counted} held on devices 0 to {stages.devices - 1}")
    for step in steps:
        if isinstance(step, Refused):
            table.add_row(step.name, "", "", "", step.reason)
            continue
        table.add_row(
            step.schedule.name,
            str(step.schedule.stages),
            f"{step.timeline.step_seconds:.6g} s",
            f"{step.timeline.bubble_fraction:.1%}",
            ", ".join(step.peak(device) for device in range(stages.devices)),
        )
    return table
