"""Holds the module that a file becomes to the model that it was exported from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from irc.compiler.onnx_export.differences import furthest
from irc.frontends.onnx import OnnxModule, from_onnx
from irc.ir import IrcError

from .elements import Elements
from .subjects import Subject

__all__ = ["GRADIENTS", "OUTPUTS", "Original", "Row", "round_trip"]

OUTPUTS = 1e-4
"""Outputs may differ by this share of the largest element."""
GRADIENTS = 1e-3
"""Gradients may differ by this share of the parameter's largest one."""
_FLOOR = 1e-3
"""A parameter's largest gradient counts as this share of the model's largest at least."""
_Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Row:
    """One file.

    Args:
        model: Name of the model.
        way: How it was exported.
        parameters: Of irc's module: tensors, and the numbers in them.
        original: Of the original, the same.
        named: The original's parameters that the file has under their own name, with their values; irc has
            them all, or the row fails.
        moved: The original's parameters whose values the file has elsewhere: transposed, packed, copied.
        folded: The original's parameters whose values the file has not: the exporter computed with them.
        made: Parameters of irc's module that the exporter computed.
        ties: Tied parameters that the file and irc have once, and how many there are.
        statistics: Float buffers of the original that the file has, and irc as buffers.
        keys: The original's state keys: in irc's module, in the file, in all.
        opset: The operator set of the file.
        outputs: Largest difference, as a share of the largest element.
        gradients: Largest difference, as a share of the parameter's largest.
        compared: Numbers of the original whose gradients were compared, as a share.
        export_failure: Why torch wrote no file.
        failures: What does not hold.
    """

    model: str
    way: str
    parameters: tuple[int, int] = (0, 0)
    original: tuple[int, int] = (0, 0)
    named: int = 0
    moved: int = 0
    folded: int = 0
    made: int = 0
    ties: tuple[int, int] = (0, 0)
    statistics: int = 0
    keys: tuple[int, int, int] = (0, 0, 0)
    opset: int = 0
    outputs: float = 0.0
    gradients: float = 0.0
    compared: float = 0.0
    export_failure: str | None = None
    failures: tuple[str, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether something does not hold."""
        return bool(self.failures)

    def cells(self) -> tuple[str, ...]:
        """The row for a table."""
        if self.export_failure is not None:
            return (self.model, self.way.split()[0], *["-"] * 8, f"torch: {self.export_failure}")
        tensors, numbers = self.parameters
        return (
            self.model,
            self.way.split()[0],
            str(self.opset),
            f"{tensors} ({numbers:,})",
            f"{self.named} of {self.original[0]}",
            f"{self.ties[0]} of {self.ties[1]}" if self.ties[1] else "-",
            str(self.statistics) if self.statistics else "-",
            f"{self.keys[0]} of {self.keys[2]}",
            f"{self.outputs:.1e}",
            f"{self.gradients:.1e}"
            + ("" if self.compared == 1 else f" ({math.floor(1000 * self.compared) / 10:g}%)"),
            f"FAIL: {'; '.join(self.failures)}" if self.failures else self._result(),
        )

    def _result(self) -> str:
        """Describes how the file's weights differ from the original's; irc imports what the file has."""
        if self.parameters == self.original and self.named == self.original[0]:
            return "same"
        parts = [f"file has {self.parameters[0]} of {self.original[0]}"]
        if self.moved:
            parts.append(f"{self.moved} transposed, packed or copied")
        if self.folded:
            parts.append(f"{self.folded} computed with" + (f", into {self.made}" if self.made else ""))
        if self.ties[0] < self.ties[1]:
            parts.append(f"{self.ties[1] - self.ties[0]} tied written twice")
        return ": ".join((parts[0], "; ".join(parts[1:]))) if parts[1:] else parts[0]


@dataclass
class Original:
    """The model, what it computes, and its gradients; made once for all its files.

    Args:
        subject: The model and its inputs.
    """

    subject: Subject
    outputs: list[Tensor] = field(init=False)
    gradients: dict[str, Tensor] = field(init=False)
    elements: Elements = field(init=False)
    groups: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        module = self.subject.module
        self.outputs, self.gradients = _run(module, (), self.subject.inputs)
        self.elements = Elements({name: p.detach().numpy() for name, p in module.named_parameters()})
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self.groups = {group[0]: group for group in names.values()}

    @property
    def count(self) -> tuple[int, int]:
        """Tensors, and the numbers in them."""
        return _count(self.subject.module.parameters())


def _run(
    module: nn.Module, args: Sequence[Tensor], keywords: Mapping[str, Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The float outputs, and the gradients of a sum of them weighted by fixed random numbers."""
    module.zero_grad()
    generator = torch.Generator().manual_seed(1)
    leaves = pytree.tree_leaves(module(*args, **keywords))
    outputs = [y for y in leaves if isinstance(y, Tensor) and y.is_floating_point()]
    loss = sum((y * torch.randn(y.shape, generator=generator)).sum() for y in outputs)
    assert isinstance(loss, Tensor)
    loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return [y.detach() for y in outputs], gradients


def _count(parameters: Iterable[Tensor]) -> tuple[int, int]:
    numbers = [p.numel() for p in parameters]
    return len(numbers), sum(numbers)


def stored_floats(path: Path) -> dict[str, _Array]:
    """The float tensors that a file holds, by name, without irc's reader."""
    graph = onnx.load(str(path)).graph
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            found[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return {name: array for name, array in found.items() if array.dtype == np.float32}


@dataclass(frozen=True)
class _Match:
    """Where a file has the original's parameters.

    Args:
        kept: The name in the file, by the parameter's first name, where shape and values are the same.
        again: How often the file has such a parameter under another of its names.
        holders: Other tensors of the file whose numbers are the original's.
        elsewhere: Parameters whose numbers are in those.
    """

    kept: Mapping[str, str]
    again: Mapping[str, int]
    holders: frozenset[str]
    elsewhere: frozenset[str]


def _match(original: Original, file: Mapping[str, _Array]) -> _Match:
    values = {name: p.detach().numpy() for name, p in original.subject.module.named_parameters()}
    named = {
        name: [alias for alias in group if alias in file and _same(file[alias], values[name])]
        for name, group in original.groups.items()
    }
    taken = {alias for aliases in named.values() for alias in aliases}
    others = {name: array for name, array in file.items() if name not in taken and array.size > 1}
    holders = {name for name, array in others.items() if original.elements.holds(array)}
    elsewhere = original.elements.present([others[name] for name in sorted(holders)])
    return _Match(
        {name: aliases[0] for name, aliases in named.items() if aliases},
        {name: len(aliases) - 1 for name, aliases in named.items() if len(aliases) > 1},
        frozenset(holders),
        frozenset(elsewhere),
    )


def round_trip(original: Original, path: Path, row: Row) -> Row:
    """The row of a file, filled in.

    Args:
        original: What was exported.
        path: The file.
        row: Its names.
    """
    try:
        module = from_onnx(path).eval()
    except IrcError as error:
        return replace(row, failures=(f"{error.code} {error.message.splitlines()[0]}",))
    row = replace(row, opset=_opset(path))
    file = stored_floats(path)
    match = _match(original, file)
    row = _counted(row, original, file, match, module)
    failures = _broken(row, original, file, match, module)
    inputs = [original.subject.inputs[name] for name, _, _ in module.input_specs]
    outputs, gradients = _run(module, inputs, {})
    row = replace(row, outputs=furthest(original.outputs, outputs))
    if not row.outputs <= OUTPUTS:
        failures.append(f"outputs differ by {row.outputs:.1e}")
    missing = [name for name, _ in module.named_parameters() if name not in gradients]
    if missing:
        failures.append(f"{len(missing)} parameters without gradient: {missing[0]}")
    elif set(match.kept.values()) <= gradients.keys():
        row, worst = _compared(row, original, match, module, gradients)
        if not row.gradients <= GRADIENTS:
            failures.append(f"the gradient of {worst} differs by {row.gradients:.1e}")
    return replace(row, failures=tuple(failures))


def _opset(path: Path) -> int:
    imports = onnx.load(str(path), load_external_data=False).opset_import
    return next(entry.version for entry in imports if entry.domain == "")


def _same(a: _Array, b: _Array) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def _counted(
    row: Row, original: Original, file: Mapping[str, _Array], match: _Match, module: OnnxModule
) -> Row:
    own = dict(module.named_parameters())
    keys = original.subject.module.state_dict().keys()
    moved = match.elsewhere - match.kept.keys()
    ties = [name for name, group in original.groups.items() if len(group) > 1]
    return replace(
        row,
        parameters=_count(own.values()),
        original=original.count,
        named=len(match.kept),
        moved=len(moved),
        folded=len(original.groups) - len(match.kept) - len(moved),
        made=len(own.keys() - set(match.kept.values()) - match.holders),
        ties=(sum(_is_whole(n, original, match) for n in ties), len(ties)),
        statistics=len(_statistics(original, file)),
        keys=(len(keys & module.state_dict().keys()), len(keys & file.keys()), len(keys)),
    )


def _is_whole(name: str, original: Original, match: _Match) -> bool:
    """Whether the file has a tied parameter once."""
    return name in match.kept and name not in match.again and name not in match.elsewhere


def _statistics(original: Original, file: Mapping[str, _Array]) -> set[str]:
    return {n for n, b in original.subject.module.named_buffers() if n in file and b.is_floating_point()}


def _broken(
    row: Row, original: Original, file: Mapping[str, _Array], match: _Match, module: OnnxModule
) -> list[str]:
    """What irc's weights have not in common with the file's, and where the file has all, the original's."""
    own, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    found: list[str] = []
    for name, tensor in [*own.items(), *module.state_dict().items()]:
        if module.onnx_names[name] != name:
            found.append(f"{module.onnx_names[name]} is not under its name")
        elif name not in file or not _same(file[name], tensor.detach().numpy()):
            found.append(f"{name} has not the file's values")
    lost = sorted((set(match.kept.values()) | match.holders) - own.keys())
    if lost:
        found.append(f"{len(lost)} weights of the file are no parameters: {lost[0]}")
    if row.made and not row.folded:
        found.append(f"{row.made} parameters that the model has not")
    if not (row.moved or row.folded or match.holders or match.again) and row.parameters != row.original:
        found.append(f"{row.parameters[0]} parameters, not {row.original[0]}")
    for name, group in original.groups.items():
        if _is_whole(name, original, match) and sum(alias in own for alias in group) != 1:
            found.append(f"{name} is not once in the module")
    wrong = sorted(n for n in _statistics(original, file) if n in own or n not in buffers)
    if wrong:
        found.append(f"{len(wrong)} buffers of the file are none: {wrong[0]}")
    if row.keys[0] != row.keys[1]:
        found.append(f"{row.keys[0]} state keys, and the file has {row.keys[1]}")
    return found


def _compared(
    row: Row, original: Original, match: _Match, module: OnnxModule, found: Mapping[str, Tensor]
) -> tuple[Row, str]:
    """The largest difference of gradients, element by element, and the parameter that has it.

    Where the file has a number more than once, the gradients of all its copies are added up.
    """
    elements, own = original.elements, dict(module.named_parameters())
    sums, known = np.zeros(elements.size), np.zeros(elements.size, bool)
    for name, alias in match.kept.items():
        sums[elements.spans[name]] = found[alias].numpy().reshape(-1)
        known[elements.spans[name]] = True
    for name in sorted((match.holders - set(match.kept.values())) & own.keys()):
        at, sure = elements.places(own[name].detach().numpy())
        np.add.at(sums, at[sure], found[name].numpy().reshape(-1)[sure])
        known[at[sure]] = True
    for name in match.elsewhere & match.kept.keys():
        known[elements.spans[name]] &= elements.unique[elements.spans[name]]
    most = max(float(g.abs().max()) for g in original.gradients.values())
    worst, name_of_worst = 0.0, ""
    for name, span in elements.spans.items():
        expected = original.gradients[name].numpy().reshape(-1)
        scale = max(float(np.abs(expected).max()), _FLOOR * most)
        off = float(np.abs(sums[span] - expected).max(initial=0, where=known[span])) / scale
        if not off <= worst:
            worst, name_of_worst = off, name
    return replace(row, gradients=worst, compared=float(known.mean())), name_of_worst
