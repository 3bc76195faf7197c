"""A plan: what was asked, what was chosen, what it costs, and the proof of how good it is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .annotation import Annotation, Policy, named_annotations
from .decisions import ACTIONS, Decision, lines_by, storage_lines
from .errors import UsageError
from .files import check_fields, read_json, write_whole
from .graph import Gradients
from .memory_timeline import StepMemory
from .printable import printable
from .reordered import Reordered, Rounding, reordered_lines
from .units import format_bytes

__all__ = ["AnnotationEffect", "Decision", "Plan", "TierUse"]

_FORMAT = "irc-plan-2"
_READABLE = "irc-plan-1", _FORMAT
"""The first one has the texts of roundings alone."""

_RELEASED = {
    Gradients.RETURNED: None,
    Gradients.ACCUMULATED: "accumulated into .grad as they are made",
    Gradients.APPLIED: "applied by the optimizer within backward, and freed at once",
}
_RESERVED = {
    Gradients.RETURNED: None,
    Gradients.ACCUMULATED: "gradients from step to step",
    Gradients.APPLIED: "optimizer state",
}


@dataclass(frozen=True, slots=True)
class TierUse:
    """Counts what a step copies to one tier and back.

    Args:
        tier: Its name.
        capacity_bytes: The most that it may hold.
        held_bytes: The most that it holds.
        out_bytes: Copied out in a step.
        in_bytes: Copied back in a step.
        out_seconds: Predicted time of the copies out; they run beside the computations.
        in_seconds: The same for those back.
    """

    tier: str
    capacity_bytes: int
    held_bytes: int
    out_bytes: int
    in_bytes: int
    out_seconds: float
    in_seconds: float


@dataclass(frozen=True, slots=True)
class AnnotationEffect:
    """Says what an annotation of the user did to the schedule.

    Args:
        by: The annotation, such as `irc.keep(layer3)`.
        policy: The demand: the name of one of `Policy`.
        effect: The effect in words, also when there is none.
    """

    by: str
    policy: str
    effect: str

    @property
    def is_hint(self) -> bool:
        """Whether the schedule may go against it."""
        return Annotation(Policy(self.policy), self.by).is_hint


@dataclass(frozen=True)
class Plan:
    """A schedule's certificate. All bytes are on one footing: static bytes included, one device.

    Args:
        budget_bytes: The budget that was asked for.
        peak_bytes: Predicted peak of a training step under the plan.
        baseline_peak_bytes: The same of the model as it is written, run by eager. It is what percentages are
            of.
        static_bytes: Parameters, buffers and constants, the inputs of each forward in flight, and the
            reserved bytes.
        minimum_budget_bytes: The smallest budget that a schedule was found for.
        floor_bytes: No schedule with this order of backward fits into less.
        step_seconds: Predicted time of the baseline's step; None if no operation was timed, as nothing is
            computed twice.
        overhead: Predicted extra time, as a fraction of the baseline's.
        lower_bound_overhead: No schedule within the budget, with this order of backward, costs less.
        proven_optimal: Whether the gap is closed (to 1e-4 of the step's time).
        strategy: The strategy that found the schedule.
        costs: The source of seconds, if there are any, and of workspaces.
        decisions: One for each forward storage.
        seconds_to_plan: The time that planning took.
        gradients: The fate of the gradients of parameters: the name of one of `Gradients`.
        reserved_bytes: The bytes that this takes from step to step: `.grad` if they are accumulated, the
            optimizers' state if they are applied.
        annotations: The effect of each annotation of the user. Overhead, bound, smallest budget and floor are
            those of schedules that honour them.
        forwards_in_flight: The most forwards that have run while their backward has not: all n run, then
            their backwards, one by one in any order or all in one. All bytes are for so many, budget and
            baseline too. A backward that retains its graph counts as one more.
        peak_with_gradients_bytes: Predicted peak if the `.grad` of all trained parameters is there from
            the start, so that the gradients are added to it when backward ends; forwards and backwards may
            then follow each other in any order. None if some are sparse, which grow with each backward, or
            if the plan was written by an earlier version.
        peak_without_unused_bytes: Predicted peak if the caller drops the outputs that the loss does not use
            before backward; all other peaks, and the budget, are of a caller who holds them. None if the plan
            was written by an earlier version.
        baseline_source: How the baseline is known: `followed` is eager's step as it is written, followed on
            tensors without data; `modelled` is the graph as it was captured, with everything kept. "" if the
            plan was written by an earlier version.
        baseline_without_unused_bytes: The baseline of a caller who drops those outputs before backward. None
            if the plan was written by an earlier version.
        baseline_above_eager_bytes: The part of the baseline that eager does not take: a plan holds the
            gradients of all outputs until backward ends, and a baseline is no budget that no plan can have.
        loss: The loss that the plan assumes, in words.
        roundings: The reasons why numbers may differ from the model's own by rounding, each with its tensors;
            all others are the same to the bit, but for those in `reordered`.
        reordered: The tensors that sums in another order reach, with a bound of the difference.
        compiler: The compiler of kernels that was asked for, or "".
        kernels: The number of its kernels.
        fused_operations: The number of operations that these run; equal ones share a kernel.
        tiers: The copies to each tier that is used.
        exposed_seconds: Predicted time of a step in which copies are waited for; part of the overhead.
        offloaded_bytes: Parameters and optimizer state that live in a tier between steps; not part of
            the static bytes.
        memory: The memory of the step and of the original's, tensor by tensor, which `timeline` returns; None
            if it is not known. It is not part of the JSON form.
    """

    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    static_bytes: int
    minimum_budget_bytes: int
    floor_bytes: int
    step_seconds: float | None
    overhead: float
    lower_bound_overhead: float
    proven_optimal: bool
    strategy: str
    costs: str
    decisions: tuple[Decision, ...] = ()
    seconds_to_plan: float = 0.0
    gradients: str = Gradients.RETURNED.value
    reserved_bytes: int = 0
    annotations: tuple[AnnotationEffect, ...] = ()
    forwards_in_flight: int = 1
    peak_with_gradients_bytes: int | None = None
    peak_without_unused_bytes: int | None = None
    baseline_source: str = ""
    baseline_without_unused_bytes: int | None = None
    baseline_above_eager_bytes: int = 0
    loss: str = ""
    roundings: tuple[Rounding, ...] = ()
    reordered: tuple[Reordered, ...] = ()
    compiler: str = ""
    kernels: int = 0
    fused_operations: int = 0
    tiers: tuple[TierUse, ...] = ()
    exposed_seconds: float = 0.0
    offloaded_bytes: int = 0
    memory: StepMemory | None = field(default=None, compare=False, repr=False)

    def timeline(self) -> StepMemory:
        """Returns the memory of the step and of the original's, tensor by tensor.

        Raises:
            UsageError: IRC595 if this plan does not know it: it came from a file, or from a range of lengths.
        """
        if self.memory is None:
            raise UsageError(
                "IRC595",
                "this plan does not know the memory of its step",
                help="take the plan of irc.optimize without dynamic=; irc report DIR and irc explain DIR "
                "read timeline.json of a written folder",
            )
        return self.memory

    def may_differ(self, name: str) -> bool:
        """Whether `roundings` or `reordered` name a tensor.

        Args:
            name: A parameter (for its gradient) or a buffer by its dotted name, `input 0` (for its gradient),
                or `output 0`.
        """
        is_reordered = any(each.name == name for each in self.reordered)
        return is_reordered or any(each.tensors is None or name in each.tensors for each in self.roundings)

    @property
    def gap(self) -> float:
        """The most by which the plan's time exceeds the optimum, as a fraction of the optimum."""
        return max(self.overhead - self.lower_bound_overhead, 0.0) / (1 + self.lower_bound_overhead)

    def summary(self) -> str:
        """The plan in a few lines."""
        return "\n".join(f"{name:>16}  {printable(text, 1000)}" for name, text in self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """The lines of the summary: what each is about, and the text."""
        proof = "proved optimal" if self.proven_optimal else f"at most {self.gap:.2%} from optimal"
        saved = self.peak_bytes / max(self.baseline_peak_bytes, 1)
        return [
            ("budget", f"{format_bytes(self.budget_bytes)} ({self.budget_bytes:,} bytes)"),
            (
                "predicted peak",
                f"{format_bytes(self.peak_bytes)} ({self.peak_bytes:,} bytes, {saved:.1%} of baseline)",
            ),
            ("baseline peak", f"{format_bytes(self.baseline_peak_bytes)}{self._more_baseline}"),
            ("static", f"{format_bytes(self.static_bytes)} (parameters, buffers, {self._more_static})"),
            ("in flight", self._in_flight),
            *([("loss", self.loss)] if self.loss else []),
            *(
                ("rounding", f"may differ from eager: {text}")
                for text in (*map(str, self.roundings), *reordered_lines(self.reordered))
            ),
            *self._gradient_rows(),
            *self._unused_rows(),
            (
                "overhead",
                f"{self.overhead:.2%} of the step's time, bound {self.lower_bound_overhead:.2%}: {proof}",
            ),
            *(("copies", text) for text in self._copies),
            (
                "smallest budget",
                f"{format_bytes(self.minimum_budget_bytes)} ({self.minimum_budget_bytes:,} bytes)",
            ),
            *(("annotations", text) for text in self._annotations_in_force),
            *([("kernels", self._kernels)] if self.compiler else []),
            ("strategy", f"{self.strategy}, {self._costs}, planned in {self.seconds_to_plan:.1f} s"),
        ]

    @property
    def _more_baseline(self) -> str:
        """Says in what the baseline is not eager's step."""
        if self.baseline_above_eager_bytes:
            return (
                f", {self.baseline_above_eager_bytes:,} bytes more than eager's step: a plan holds the "
                "gradients of outputs until backward ends"
            )
        if self.baseline_source == "modelled":
            return ", modelled: the graph as it was captured, with everything kept"
        return ""

    @property
    def _more_static(self) -> str:
        """Inputs, and what is reserved."""
        inputs = "inputs" if self.forwards_in_flight == 1 else f"inputs of {self.forwards_in_flight} forwards"
        what = _RESERVED[Gradients(self.gradients)]
        if self.offloaded_bytes:
            beside = f"{inputs}, and {what}" if what else inputs
            return f"{beside}, without the {format_bytes(self.offloaded_bytes)} below"
        return f"{inputs}, and {format_bytes(self.reserved_bytes)} of {what}" if what else inputs

    @property
    def _costs(self) -> str:
        if self.costs.startswith("analytic"):
            return f"costs {self.costs} (bounds, not measured)"
        untimed = " (workspaces; nothing is computed twice, so that no time matters)"
        return f"costs {self.costs}{untimed if self.step_seconds is None else ''}"

    @property
    def _kernels(self) -> str:
        if not self.kernels:
            return (
                f"none of {self.compiler}: operations are faster by themselves, or no plan with kernels fits"
            )
        return f"{self.kernels} of {self.compiler}, for {self.fused_operations} fused operations"

    @property
    def _in_flight(self) -> str:
        if self.forwards_in_flight == 1:
            return "1 forward: its backward comes before the next forward"
        return f"{self.forwards_in_flight} forwards, then their backwards in any order"

    def _gradient_rows(self) -> Iterator[tuple[str, str]]:
        """Describes how gradients are released, or the memory of a step that finds `.grad` set."""
        released, there_bytes = _RELEASED[Gradients(self.gradients)], self.peak_with_gradients_bytes
        if released is not None:
            yield "gradients", released
        elif there_bytes is not None:
            fits = there_bytes <= self.budget_bytes
            advice = "" if fits else "; to accumulate within the budget, plan with accumulate_gradients=True"
            peak = f"{format_bytes(there_bytes)} ({there_bytes:,} bytes)"
            yield "with gradients", f"{peak} of a step that finds .grad there and adds to it{advice}"

    def _unused_rows(self) -> Iterator[tuple[str, str]]:
        """Describes the memory of a step whose caller drops outputs, if that is less."""
        dropped_bytes = self.peak_without_unused_bytes
        if dropped_bytes is not None and dropped_bytes < self.peak_bytes:
            baseline_bytes = self.baseline_without_unused_bytes
            of = (
                f", {dropped_bytes / baseline_bytes:.1%} of {format_bytes(baseline_bytes)}"
                if baseline_bytes
                else ""
            )
            peak = f"{format_bytes(dropped_bytes)} ({dropped_bytes:,} bytes{of})"
            yield "outputs", f"held until backward ends; {peak} if those beside the loss are dropped before"

    @property
    def _copies(self) -> Iterator[str]:
        """Describes in one line what is copied to each tier."""
        planned_seconds = (self.step_seconds or 0.0) * (1 + self.overhead)
        if self.offloaded_bytes:
            amount = format_bytes(self.offloaded_bytes)
            yield f"{amount} of parameters and optimizer state live in a tier between steps"
        for use in self.tiers:
            busy = (
                f"{seconds / planned_seconds:.0%} {way}" if planned_seconds else way
                for seconds, way in ((use.out_seconds, "out"), (use.in_seconds, "in"))
            )
            yield (
                f"{format_bytes(use.out_bytes)} to {use.tier} and {format_bytes(use.in_bytes)} back, at most "
                f"{format_bytes(use.held_bytes)} there; channels busy {' and '.join(busy)}"
            )
        if self.tiers:
            yield (
                f"waited for {self.exposed_seconds * 1e3:.3g} ms of {planned_seconds * 1e3:.3g} ms, "
                "the rest is beside computations"
            )

    @property
    def _annotations_in_force(self) -> list[str]:
        """The annotations that the schedule must honour, in one line; none if there are none."""
        who = named_annotations(annotation.by for annotation in self.annotations if not annotation.is_hint)
        return [f"{who}; bound and smallest budget are of schedules that honour them"] if who else []

    def explain(self, by: str = "storage", top: int | None = None) -> str:
        """Says what becomes of the storages that forward makes.

        Args:
            by: `storage` lists those that are not kept or that an annotation keeps, largest first, with
                reasons; `module` sums all of them up in a tree of modules, equal layers together; `line` by
                the lines of the user's code.
            top: The most rows; None for all.

        Raises:
            UsageError: IRC400 for another word.
        """
        if by not in ("storage", "module", "line"):
            raise UsageError(
                "IRC400", f"a plan is not explained by {by!r}", help="choose storage, module or line"
            )
        lines = storage_lines(self.decisions, top) if by == "storage" else lines_by(by, self.decisions, top)
        return "\n".join(
            [*lines, *(printable(f"{note.by}: {note.effect}", 1000) for note in self.annotations)]
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-ready data, with the derived gap."""
        known = asdict(replace(self, memory=None))
        del known["memory"]
        return {"format": _FORMAT, **known, "gap": self.gap}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """The plan of `to_json`; what else the data holds is left aside, what may be missing has its default.

        Raises:
            UsageError: IRC402 when the data is not a plan.
        """
        try:
            if data["format"] not in _READABLE:
                raise KeyError(data["format"])
            given = (f.name for f in _written() if f.name in data or f.default is MISSING)
            known = {name: data[name] for name in given}
            known["decisions"] = tuple(Decision(**row) for row in known["decisions"])
            known["annotations"] = tuple(AnnotationEffect(**row) for row in known.get("annotations", ()))
            known["roundings"] = tuple(map(Rounding.from_json, known.get("roundings", ())))
            known["reordered"] = tuple(map(Reordered.from_json, known.get("reordered", ())))
            known["tiers"] = tuple(TierUse(**row) for row in known.get("tiers", ()))
            plan = Plan(**known)
            for record in (plan, *plan.decisions, *plan.annotations, *plan.tiers):
                columns = _written() if isinstance(record, Plan) else fields(record)
                check_fields(record, columns, words=_WORDS, signed=_SIGNED)
            return plan
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                "IRC402", f"this is not a plan of irc: {error}", help=f"expected format {_FORMAT}"
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file is there as a whole or not at all.

        Raises:
            UsageError: IRC402 when it cannot be written.
        """
        write_whole(Path(path), json.dumps(self.to_json(), indent=1), "IRC402")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads what `save` wrote.

        Raises:
            UsageError: IRC402 when the file is missing or holds no plan.
        """
        try:
            data = read_json(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise UsageError(
                "IRC402", f"{path} cannot be read as a plan: {error}", help="give a plan.json of irc"
            ) from error
        if not isinstance(data, dict):
            raise UsageError("IRC402", f"{path} holds no plan", help="give a plan.json of irc")
        return Plan.from_json(data)


def _written() -> Iterator[Field[Any]]:
    """The fields of a plan that its JSON form has."""
    return (each for each in fields(Plan) if each.name != "memory")


# These compare times.
_SIGNED = ("overhead", "lower_bound_overhead")


_WORDS: dict[str, tuple[str, ...]] = {
    "action": ACTIONS,
    "baseline_source": ("", "followed", "modelled"),
    "gradients": tuple(each.value for each in Gradients),
    "policy": tuple(each.value for each in Policy),
}
"""The fields that hold one of some words."""
