"""Trains a written folder and holds it to its plan: memory to the budget, numbers to the original's."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..ir import InputRole, Trait, UsageError, format_bytes, printable
from ..torch_support.pytree import flatten
from .artifact import Written
from .compare import Numbers, names_in_plan
from .model_source import Loaded, load
from .training import Comparison, Step, compare, measured_peak_bytes, optimizer_of_all, train

__all__ = ["Report", "check_folder"]


@dataclass(frozen=True)
class Report:
    """The measurements of a run.

    Args:
        budget_bytes: What was asked for.
        predicted_bytes: The plan's peak.
        measured_bytes: The step's peak from allocator events, static bytes included.
        predicted_overhead: The plan's extra time.
        steps: The fitted module's steps.
        comparison: The original beside it, if it was asked for.
        original_bytes: The original's measured peak.
        failures: What does not hold; empty when all is well.
        state: The trained parameters and buffers.
        optimizer: What takes the steps within backward, or "" for plain SGD after it.
    """

    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    predicted_overhead: float
    steps: tuple[Step, ...]
    comparison: Comparison | None
    original_bytes: int | None
    failures: tuple[str, ...]
    state: dict[str, Tensor]
    optimizer: str = ""

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        data: dict[str, Any] = {
            "format": "irc-run-1",
            "budget_bytes": self.budget_bytes,
            "predicted_bytes": self.predicted_bytes,
            "measured_bytes": self.measured_bytes,
            "predicted_overhead": self.predicted_overhead,
            "losses": [_finite(step.loss) for step in self.steps],
            "seconds": [step.seconds for step in self.steps],
            "failures": list(self.failures),
            "optimizer": self.optimizer or None,
        }
        if self.comparison is not None:
            data |= {
                "original_bytes": self.original_bytes,
                "original_losses": [_finite(step.loss) for step in self.comparison.original],
                "time_ratio": self.comparison.time_ratio,
                "loss_difference": _finite(self.comparison.loss_difference),
                "gradient_difference": _finite(self.comparison.gradient_difference),
                "gradient_scale": self.comparison.gradient_scale,
                "output_difference": _finite(self.comparison.output_difference),
                "buffer_difference": _finite(self.comparison.buffer_difference),
                "bit_equal": self.comparison.is_equal,
            }
            if self.comparison.parameters is not None:
                data["parameter_difference"] = _finite(self.comparison.parameters.largest)
                data["parameter_scale"] = self.comparison.parameters.scale
        return data

    def text(self, every: int = 1) -> str:
        """The report for a person.

        Args:
            every: Which steps are shown: each of so many, and the last.
        """
        lines = [f"optimizer: {self.optimizer}, within backward"] if self.optimizer else []
        lines += [
            f"step {index + 1}: loss {step.loss:.6g}, {step.seconds:.3f} s" + self._original(index)
            for index, step in enumerate(self.steps)
            if (index + 1) % every == 0 or index == len(self.steps) - 1
        ]
        lines += [
            f"peak: measured {self.measured_bytes:,} <= predicted {self.predicted_bytes:,} <= budget "
            f"{self.budget_bytes:,} bytes"
            if not self._over
            else f"peak: measured {self.measured_bytes:,}, predicted {self.predicted_bytes:,}, budget "
            f"{self.budget_bytes:,} bytes",
            f"      ({format_bytes(self.measured_bytes)} of {format_bytes(self.budget_bytes)}; predicted is "
            f"{self.predicted_bytes / self.measured_bytes - 1:+.3%} off)",
        ]
        if self.comparison is not None and self.original_bytes is not None:
            seen = self.comparison
            rounded = "equal up to rounding" if not self.failures else "not bit-equal"
            equal = "bit-equal" if seen.is_equal else rounded
            lines += [
                f"original: peak {self.original_bytes:,} bytes; this run takes "
                f"{self.measured_bytes / self.original_bytes:.1%} of it",
                f"time: {seen.time_ratio:.3f} x the original's (predicted {1 + self.predicted_overhead:.3f})",
                f"numbers: {_trained(seen)}, output difference {seen.output_difference:.3g}, loss difference "
                f"{seen.loss_difference:.3g}, buffer difference {seen.buffer_difference:.3g}: {equal}",
            ]
        return "\n".join(lines)

    def save_weights(self, path: Path) -> None:
        """Writes the trained parameters and buffers as safetensors; the file appears when it is whole.

        The model's own `load_state_dict` takes them.

        Raises:
            UsageError: IRC434 when it cannot be written.
        """
        draft = path.with_name(f".{path.name}.part")
        try:
            save_file({name: tensor.detach().clone() for name, tensor in self.state.items()}, draft)
            mask = os.umask(0)
            os.umask(mask)
            draft.chmod(0o666 & ~mask)  # it is private otherwise
            os.replace(draft, path)
        except (OSError, SafetensorError) as error:
            draft.unlink(missing_ok=True)
            raise UsageError(
                "IRC434", f"{path} cannot be written: {error}", help="choose another file"
            ) from error

    @property
    def _over(self) -> bool:
        return not self.measured_bytes <= self.predicted_bytes <= self.budget_bytes

    def _original(self, index: int) -> str:
        if self.comparison is None:
            return ""
        step = self.comparison.original[index]
        return f"  (original: loss {step.loss:.6g}, {step.seconds:.3f} s)"


def check_folder(written: Written, steps: int, *, with_original: bool) -> Report:
    """Trains a folder's program, beside the original if asked for.

    Args:
        written: The folder, read.
        steps: How many: of the folder's optimizer, or of plain SGD if it has none.
        with_original: Load the original, give it the folder's weights and compare every step. It has the same
            optimizer in an ordinary loop: one for all parameters, after backward.

    Raises:
        UsageError: IRC432 when the original is not what the folder was made from.
    """
    measured = _measured_alone(written) if written.plan.offloaded_bytes else None
    fitted = written.module()
    own = fitted.state_dict(keep_vars=True)
    state = {name: tensor for name, tensor in own.items() if name not in written.not_saved}
    static_bytes = written.plan.static_bytes
    forwards = written.plan.forwards_in_flight
    comparison = None
    original_bytes = None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if with_original:
            original = _original(written)
            arguments = _given_as(original.args, written)
            factory = written.optimizer
            comparison = compare(
                original.module,
                fitted,
                written.examples,
                steps,
                original_inputs=arguments,
                optimizer=factory,
            )
            taken = comparison.fitted
            original_bytes = measured_peak_bytes(
                original.module,
                arguments,
                static_bytes + written.plan.offloaded_bytes,
                forwards=forwards,
                optimizer=None if factory is None else optimizer_of_all(factory, original.module),
            )
        else:
            taken = tuple(train(fitted, written.examples, steps))
        if measured is None:
            measured = measured_peak_bytes(fitted, written.examples, static_bytes, forwards=forwards)
    plan = written.plan
    failures: list[str] = []
    if measured > plan.peak_bytes:
        failures.append(f"the measured peak of {measured} bytes is over the predicted {plan.peak_bytes}")
    if measured > plan.budget_bytes:
        failures.append(f"the measured peak of {measured} bytes is over the budget of {plan.budget_bytes}")
    held = _state_bytes(fitted.irc_optimizers.values())
    if held > plan.reserved_bytes and fitted.irc_optimizers:
        failures.append(
            f"the state of {written.optimizer} takes {held} bytes, the plan counts {plan.reserved_bytes}"
        )
    if comparison is not None:
        failures += _outside_their_class(written, comparison.numbers[0])
        if not comparison.agrees and not (plan.reordered and _is_coarse(written.state.values())):
            failures.append(_disagreement(comparison))
    return Report(
        plan.budget_bytes,
        plan.peak_bytes,
        measured,
        plan.overhead,
        taken,
        comparison,
        original_bytes,
        tuple(failures),
        state,
        "" if written.optimizer is None else str(written.optimizer),
    )


def _outside_their_class(written: Written, first: Numbers) -> Iterator[str]:
    """Yields what is off in the first step though the plan keeps its bits, or further than the plan says.

    A plan bounds a sum by the sum of its terms' magnitudes, of which a tensor's largest element is the part
    that is known here.
    """
    known = {each.name: each.bound for each in written.plan.reordered}
    graph = written.schedule.graph
    is_kept = not any(Trait.NONDETERMINISTIC in node.traits for node in graph.nodes)
    statics = [entry for entry in graph.inputs if entry.role is not InputRole.TANGENT]
    in_plan = names_in_plan(written.deliveries, statics)
    off = {in_plan.get(name, name): by for name, by in first.off.items()}
    changed = [name for name in off if not written.plan.may_differ(name)]
    if changed and is_kept:
        named = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
        yield f"the plan keeps the bits of the original, and those of {printable(named, 1000)} differ"
    for name, by in off.items():
        bound = known.get(name)
        if bound is not None and by > bound:
            most = f"and its sum by {bound:.3g} of its terms at most"
            yield f"{printable(name)} is off by {by:.3g} of its largest element, {most}"


def _is_coarse(tensors: Iterable[Tensor]) -> bool:
    """Whether some numbers have so few bits that sums in another order are further off than what passes."""
    return any(tensor.is_floating_point() and tensor.itemsize < torch.float32.itemsize for tensor in tensors)


def _measured_alone(written: Written) -> int:
    """The peak of a module that is given up afterwards: nothing of it is kept, to be put back, in memory.

    It is for a model that would not fit there.
    """
    return measured_peak_bytes(
        written.module(), written.examples, written.plan.static_bytes, is_given_up=True
    )


def _state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Returns the bytes of the optimizers' state, on the device and in tiers."""
    tensors = (
        value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()
    )
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def _trained(seen: Comparison) -> str:
    """Returns the differences of the steps: by gradients, or by the parameters if an optimizer takes them."""
    if seen.parameters is None:
        return (
            f"largest gradient difference {seen.gradient_difference:.3g} (largest gradient "
            f"{seen.gradient_scale:.3g})"
        )
    found = seen.parameters
    return f"largest parameter difference {found.largest:.3g} (largest parameter {found.scale:.3g})"


def _disagreement(comparison: Comparison) -> str:
    if not comparison.same_gradients:
        return "not the same parameters have gradients as in the original"
    if not comparison.same_generator:
        return "the random generator is in another state than after the original's step"
    parameters = comparison.parameters
    trained = (
        ""
        if parameters is None
        else f"parameters by {parameters.largest:.3g} (largest {parameters.scale:.3g}), "
    )
    return (
        f"the numbers differ from the original's: losses by {comparison.loss_difference:.3g}, outputs by "
        f"{comparison.output_difference:.3g}, {trained}gradients by {comparison.gradient_difference:.3g} "
        f"(largest {comparison.gradient_scale:.3g}), buffers by {comparison.buffer_difference:.3g}"
    )


def _finite(number: float) -> float | None:
    """JSON has neither infinity nor not-a-number."""
    return number if math.isfinite(number) else None


def _original(written: Written) -> Loaded:
    """The model that the folder was made from, with the folder's weights."""
    loaded = load(written.source)
    module = loaded.module
    state: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    state |= dict(module.named_buffers(remove_duplicate=False))
    for name, tensor in written.state.items():
        if name not in state or state[name].shape != tensor.shape:
            raise _changed(written, f"has no {name} of the written shape {list(tensor.shape)}")
    with torch.no_grad():
        for name, tensor in written.state.items():
            state[name].copy_(tensor)
    return loaded


def _given_as(args: tuple[Any, ...], written: Written) -> tuple[Any, ...]:
    """The written inputs, nested among constants as the original takes them; the tensors are copies."""
    leaves, tree = flatten(args)
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]
    if shapes != [example.shape for example in written.examples]:
        raise _changed(written, "takes other inputs than the written ones")
    examples = (
        example.detach().clone().requires_grad_(example.requires_grad) for example in written.examples
    )
    return pytree.tree_unflatten(
        [next(examples) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree
    )


def _changed(written: Written, how: str) -> UsageError:
    return UsageError(
        "IRC432",
        f"{written.source.model} {how}",
        help="the model has changed since; write the folder again with irc optimize",
    )
