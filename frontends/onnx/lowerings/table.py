"""The one table of lowerings, and what a lowering is given."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ....ir.errors import Location, UnsupportedError, UsageError
from ....ir.plugins import load_plugin, plugins
from ..bounds import MOST_LISTED, too_large
from ..tensors import Static

__all__ = [
    "Attribute",
    "Call",
    "Lowering",
    "NodeInfo",
    "NotConstant",
    "Result",
    "Value",
    "find",
    "lowering",
    "newest_opset",
    "operators",
    "settle",
]

Attribute: TypeAlias = "int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | Tensor"
Text: TypeAlias = "npt.NDArray[np.object_]"
Value: TypeAlias = "Tensor | list[Tensor] | Text | None"
Result: TypeAlias = "Tensor | list[Tensor] | tuple[Value, ...]"
Scalar: TypeAlias = "int | float | bool"

# Attributes that no lowering needs: they repeat what shapes say, or they are about execution, or they matter
# only beside another attribute, which is read with it.
_HARMLESS = frozenset(
    {
        "consumed_inputs",
        "cubic_coeff_a",
        "extrapolation_value",
        "fmod",
        "hidden_size",
        "is_test",
        "kernel_shape",
        "nearest_mode",
        "output_shape",
        "pads",
        "round_mode",
        "saturate",
        "seed",
        "sorted",
        "spatial",
        "stash_type",
        "storage_order",
        "training_mode",
        "value",
    }
)


# Their axes are not those of their first operand, or mean nothing if the scale is one number.
_OTHER_AXES = ("DequantizeLinear", "QuantizeLinear", "Unsqueeze")
# They name a place among the axes, of which there is one more than axes.
_PLACES = ("ConcatFromSequence", "OneHot")
# It takes the place after the last axis too, and counts back from the last axis.
_PLACE_AFTER = ("Flatten",)


def settle(inputs: Sequence[str] = ()) -> str:
    """The help of errors about values that are known only at run time.

    Args:
        inputs: The inputs that decide them, if they are known.
    """
    if not inputs:
        return (
            "if an input decides it, bind that input at import: --constant NAME=VALUE, or"
            " from_onnx(path, constants={name: tensor})"
        )
    options = " ".join(f"--constant {shlex.quote(name)}=VALUE" for name in inputs)
    values = ", ".join(f"{name!r}: VALUE" for name in inputs)
    return f"bind it at import: {options}, or from_onnx(path, constants={{{values}}})"


class NotConstant(UnsupportedError):
    """A lowering needs the elements of an operand while only its type is known."""


_MOST_SETTINGS = 1 << 20
"""Elements of an operand that is read number by number, such as a shape or a list of axes."""


newest_opset = 28
"""The newest version of the default operator set whose changes this table has been read against."""


@dataclass(frozen=True)
class NodeInfo:
    """Holds what is fixed about a node when the graph is imported.

    Args:
        name: The node's name, or its first output's when it has none.
        op: Operator type.
        domain: Operator domain; empty for the default one.
        version: Operator set version that the model imports for this domain.
        attributes: The attributes that are given, as plain data.
        wanted: For each output, whether anything reads it.
    """

    name: str
    op: str
    domain: str
    version: int
    attributes: Mapping[str, Attribute]
    wanted: tuple[bool, ...]

    @property
    def title(self) -> str:
        """Operator with domain and version, such as `ai.onnx::Conv (opset 17)`."""
        return f"{self.domain or 'ai.onnx'}::{self.op} (opset {self.version})"


@dataclass
class Call:
    """One execution of one node: its attributes and the values of its operands.

    Indexing gives the operand as a tensor. Constants can also be read as plain numbers, which is what
    shapes, axes and bounds are for: these reads never depend on traced data.

    Args:
        node: The node.
        tensors: Operands as tensors or lists of them; `None` if an optional one is absent.
        statics: The same operands as plain data, if they are constants.
        weights: The operands that are parameters or buffers.
        training: Whether the module is in train mode.
        make_literal: Turns what follows from shapes alone into a tensor that lives with the module.
        runs: Whether operands hold their elements, so that an operand that is not a constant can be read too.
    """

    node: NodeInfo
    tensors: Sequence[Value]
    statics: Sequence[Static | None]
    weights: Sequence[bool]
    training: bool
    make_literal: Callable[[Callable[[], Tensor]], Tensor]
    runs: bool = False
    touched: set[int] = field(default_factory=set[int])
    read: set[str] = field(default_factory=set[str])

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> Tensor:
        tensor = self.optional(index)
        if tensor is None:
            self.refuse(f"without its operand {index}")
        return tensor

    def refuse(self, what: str) -> NoReturn:
        """Decline this node by name.

        Raises:
            UnsupportedError: IRC302, always.
        """
        raise self._refusal(UnsupportedError, what)

    def _refusal(self, kind: type[UnsupportedError], what: str) -> UnsupportedError:
        late = kind is NotConstant
        return kind(
            "IRC302",
            f"{self.node.title} {what} is not supported" + (" in a plan" if late else ""),
            at=Location(onnx_node=self.node.name),
            help=settle() if late else "export the model without this option, or replace the node",
        )

    # Operands

    def has(self, index: int) -> bool:
        """Whether the operand is given."""
        return index < len(self.tensors) and (
            self.tensors[index] is not None or self.statics[index] is not None
        )

    def optional(self, index: int) -> Tensor | None:
        """The operand as a tensor, or `None` when it is absent."""
        if not self.has(index):
            return None
        self.touched.add(index)
        tensor = self.tensors[index]
        assert tensor is not None, f"{self.node.title}: operand {index} was not read as a tensor at import"
        if not isinstance(tensor, Tensor):
            kind = "a list of tensors" if isinstance(tensor, list) else "strings"
            self.refuse(f"of {kind} as operand {index}")
        return tensor

    def text(self, index: int) -> Text:
        """The operand as an array of strings."""
        value = self.tensors[index] if index < len(self.tensors) else None
        if not isinstance(value, np.ndarray):
            self.refuse(f"without strings as operand {index}")
        return value

    def list_(self, index: int) -> list[Tensor]:
        """The operand as a list of tensors."""
        value = self.tensors[index] if index < len(self.tensors) else None
        if not isinstance(value, list):
            self.refuse(f"without a list of tensors as operand {index}")
        return value

    def all(self) -> list[Tensor]:
        """Every operand as a tensor; a list that stands alone stands for its elements."""
        if len(self.tensors) == 1 and isinstance(self.tensors[0], list):
            return list(self.tensors[0])
        return [self[i] for i in range(len(self.tensors)) if self.has(i)]

    def static(self, index: int) -> Static | None:
        """The operand as plain data, or `None` when it is absent or not a constant."""
        return self.statics[index] if index < len(self.statics) else None

    def constant(self, index: int, what: str) -> Static:
        """The operand as plain data, which a run reads even if it depends on the inputs.

        Raises:
            NotConstant: IRC302: its elements are not known, at import or under a tracer.
        """
        static = self.static(index)
        if static is not None:
            return static
        tensor = self.tensors[index] if index < len(self.tensors) else None
        # A tracer's tensors are of classes of their own, and hold no elements.
        if not self.runs or type(tensor) not in (Tensor, nn.Parameter):
            raise self._refusal(NotConstant, f"with a {what} that is not a constant")
        return Static.of(self[index])

    def integers(self, index: int, what: str) -> list[int]:
        """A constant operand as a flat list of integers."""
        array = self.constant(index, what).array
        if array.size > _MOST_SETTINGS:
            self.refuse(f"with a {what} of {array.size:,} elements")
        values = [int(v) for v in array.reshape(-1).tolist()]
        if what in ("axis", "list of axes"):
            self._check_axes(values)
        return values

    def integer(self, index: int, what: str) -> int:
        """A constant operand of one element as an integer."""
        values = self.integers(index, what)
        if len(values) != 1:
            self.refuse(f"with a {what} of {len(values)} elements")
        return values[0]

    def number(self, index: int, what: str) -> Scalar:
        """A constant operand of one element as a Python number."""
        array = self.constant(index, what).array
        if array.size != 1:
            self.refuse(f"with a {what} of {array.size} elements")
        return array.reshape(()).item()

    def scalar_or_tensor(self, index: int, like: Tensor) -> Tensor | Scalar:
        """The operand as a Python number if that computes the same as the tensor, else as a tensor.

        That is so for a constant of one element whose rank and type cannot change those of `like`.
        """
        static = self.static(index)
        if (
            static is not None
            and static.array.size == 1
            and static.array.ndim <= like.ndim
            and static.dtype is like.dtype
            and like.dtype is not torch.bool
        ):
            return static.array.reshape(()).item()
        return self[index]

    def is_weight(self, index: int) -> bool:
        """Whether the operand is a parameter or a buffer itself."""
        return index < len(self.weights) and self.weights[index]

    def positions(self, count: int) -> npt.NDArray[np.int64]:
        """The numbers from 0 on, of which an axis of the result has `count`.

        Raises:
            UnsupportedError: IRC307 when they are too many to work out one by one.
        """
        if count < 0:
            raise ValueError(f"an axis cannot have {count:,} elements")
        self.check_listed(count)
        return np.arange(count)

    def check_listed(self, *sizes: int) -> None:
        """Declines to let numpy, whose results nothing bounds, work out an array of these sizes.

        Raises:
            UnsupportedError: IRC307 when it has too many elements.
        """
        if math.prod(sizes) > MOST_LISTED:
            shape = " x ".join(f"{size:,}" for size in sizes)
            what = "an axis" if len(sizes) == 1 else "a table"
            raise too_large(
                f"{self.node.title} makes {what} of {shape} elements, and at most {MOST_LISTED:,} can be"
                " placed one by one",
                self.node.name,
            )

    def literal(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that follows from shapes and attributes alone; made at import and kept with the module."""
        return self.make_literal(make)

    def wants(self, index: int) -> bool:
        """Whether anything reads this output."""
        return index < len(self.node.wanted) and self.node.wanted[index]

    # Attributes

    def given(self, name: str) -> bool:
        """Whether the attribute is present."""
        return name in self.node.attributes

    def attribute(self, name: str) -> Attribute | None:
        """An attribute as it is, or `None` when it is absent."""
        self.read.add(name)
        return self.node.attributes.get(name)

    def refuse_unread(self) -> None:
        """Decline a node that gives an attribute which its lowering did not ask for.

        Raises:
            UnsupportedError: IRC302.
        """
        for name in sorted(self.node.attributes.keys() - self.read - _HARMLESS):
            self.refuse(f"with {name}={self.node.attributes[name]}")

    def _mistyped(self, name: str, wanted: str) -> UsageError:
        return UsageError(
            "IRC305",
            f"{self.node.title} has the attribute {name}={str(self.node.attributes[name])[:80]}; it"
            f" takes {wanted}",
            at=Location(onnx_node=self.node.name),
            help="mend the file: the operator's page at onnx.ai/onnx/operators says what it takes",
        )

    def _check_axes(self, axes: Sequence[int]) -> None:
        """Refuse axes that the first operand has not, before a lowering counts them round."""
        first = self.tensors[0] if self.tensors else None
        first = first[0] if isinstance(first, list) and first else first
        if not isinstance(first, Tensor) or self.node.domain or self.node.op in _OTHER_AXES:
            return
        rank = max(first.ndim, 1) + (self.node.op in _PLACES)
        for axis in axes:
            if not -rank <= axis < rank + (self.node.op in _PLACE_AFTER):
                raise self._contradiction(f"names axis {axis} of an operand of {first.ndim} axes")

    def _contradiction(self, what: str) -> UsageError:
        return UsageError(
            "IRC305",
            f"{self.node.title} {what}",
            at=Location(onnx_node=self.node.name),
            help="check the shapes given for the inputs against those the model was exported with",
        )

    def require(self, holds: bool, what: str) -> None:
        """Refuse a node whose attributes and operands contradict each other.

        Args:
            holds: Whether they agree.
            what: The contradiction, as a predicate of the node.

        Raises:
            UsageError: IRC305.
        """
        if not holds:
            raise self._contradiction(what)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """An integer attribute that is zero or one."""
        value = self.int_(name, int(default))
        if value not in (0, 1):
            raise self._mistyped(name, "0 or 1")
        return bool(value)

    def int_(self, name: str, default: int) -> int:
        """An integer attribute."""
        given = self.attribute(name)
        value = default if given is None else given
        if not isinstance(value, int):
            raise self._mistyped(name, "an integer")
        if name == "axis" and given is not None:
            self._check_axes([value])
        return value

    def float_(self, name: str, default: float) -> float:
        """A float attribute."""
        given = self.attribute(name)
        value = default if given is None else given
        if not isinstance(value, float | int):
            raise self._mistyped(name, "a number")
        return float(value)

    def str_(self, name: str, default: str) -> str:
        """A string attribute."""
        given = self.attribute(name)
        value = default if given is None else given
        if not isinstance(value, str):
            raise self._mistyped(name, "a string")
        return value

    def ints_(self, name: str) -> list[int] | None:
        """A list of integers, or `None` when the attribute is absent."""
        value = self.attribute(name)
        if value is None:
            return None
        if not isinstance(value, tuple) or not all(isinstance(v, int) for v in value):
            raise self._mistyped(name, "a list of integers")
        if name == "axes":
            self._check_axes([int(v) for v in value])
        return [int(v) for v in value]

    def strs_(self, name: str) -> list[str] | None:
        """A list of strings, or `None` when the attribute is absent."""
        value = self.attribute(name)
        if value is None:
            return None
        if not isinstance(value, tuple) or not all(isinstance(v, str) for v in value):
            raise self._mistyped(name, "a list of strings")
        return [str(v) for v in value]

    def axes(self, index: int = 1) -> list[int] | None:
        """The axes, from the attribute (older versions) or from the operand (newer ones)."""
        if self.given("axes"):
            return self.ints_("axes")
        return self.integers(index, "list of axes") if self.has(index) else None


Lowering: TypeAlias = "Callable[[Call], Result]"
_TABLE: dict[tuple[str, str], dict[int, Lowering]] = {}


def lowering(*ops: str, since: int = 1, domain: str = "") -> Callable[[Lowering], Lowering]:
    """Enter a function in the table as the meaning of `ops` from version `since` on.

    The function comes back as it is, so that it can be pickled by name.
    """

    def enter(function: Lowering) -> Lowering:
        for op in ops:
            versions = _TABLE.setdefault((domain, op), {})
            assert since not in versions, f"{op}-{since} entered twice"
            versions[since] = function
        return function

    return enter


def find(domain: str, op: str, version: int) -> Lowering | None:
    """The lowering of an operator at an operator set version, or `None` when it is not covered."""
    if (domain, op) not in _TABLE:
        for name in plugins("irc.onnx_lowerings"):
            load_plugin("irc.onnx_lowerings", name)  # its functions enter themselves
    versions = _TABLE.get((domain, op), {})
    known = [since for since in versions if since <= version]
    return versions[max(known)] if known else None


def operators() -> dict[str, tuple[int, ...]]:
    """Every covered operator, with the versions at which its lowering changes."""
    return {f"{d}::{op}" if d else op: tuple(sorted(v)) for (d, op), v in sorted(_TABLE.items())}
