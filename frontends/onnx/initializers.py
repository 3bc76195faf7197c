"""Holds the initializers and constants of a graph, each with its role in the module."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from ...ir.errors import UsageError
from .roles import SPEC, Role, role_of
from .tensors import FLOATS, torch_dtype

__all__ = ["Initializer", "Initializers"]


@dataclass(frozen=True, slots=True)
class Initializer:
    """A tensor that the file itself holds.

    Args:
        value: The graph value.
        tensor: Its elements, or a single one if it is repeated.
        shape: Its shape.
        role: Its role in the module.
        why: The rule that decided it.
        persistent: Whether a buffer is part of the state.
    """

    value: ir.Value
    tensor: ir.TensorProtocol
    shape: tuple[int, ...]
    role: Role
    why: str
    persistent: bool = True

    @property
    def name(self) -> str:
        """Its ONNX name; empty when it has none."""
        return self.value.name or ""


@dataclass
class Initializers:
    """The initializers of a model, with the roles that the user gives some of them.

    Args:
        given: Roles by ONNX name or by a shell pattern of names; the first that fits counts.
    """

    given: Mapping[str, str | Role] = field(default_factory=dict[str, "str | Role"])
    _fitting: set[str] = field(default_factory=set[str])
    _known: dict[ir.Value, Initializer] = field(default_factory=dict["ir.Value", "Initializer"])

    def __post_init__(self) -> None:
        for pattern, role in self.given.items():
            if role not in [r.value for r in Role] and not isinstance(role, Role):
                raise UsageError(
                    "IRC319",
                    f"{role!r} is not a role for {pattern!r}",
                    help=f"the roles are {', '.join(r.value for r in Role)}",
                )

    def of(self, value: ir.Value) -> Initializer | None:
        """Returns the initializer that a value is, or `None` if it is computed."""
        node = value.producer()
        if node is None:
            if not value.is_initializer() or value.const_value is None:
                return None
            return self._initializer(
                value, value.const_value, tuple(value.const_value.shape.numpy()), named=True
            )
        if node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "Constant":
            tensor = _constant(node)
            return (
                None
                if tensor is None
                else self._initializer(value, tensor, tuple(tensor.shape.numpy()), named=False)
            )
        if node.op_type == "ConstantOfShape" and node.inputs[0] is not None:
            return self._repeated(value, node, node.inputs[0])
        return None

    def unpacked(self, value: ir.Value, tensor: ir.TensorProtocol) -> Initializer | None:
        """Returns the float weight that a dequantised constant is, or `None`."""
        initializer = self._initializer(value, tensor, tuple(tensor.shape.numpy()), named=True)
        return None if initializer.role is Role.CONSTANT else initializer

    def _initializer(
        self, value: ir.Value, tensor: ir.TensorProtocol, shape: tuple[int, ...], named: bool
    ) -> Initializer:
        if value not in self._known:
            role, why = self._given(value, tensor) or role_of(value, tensor, shape, named)
            persistent = value.metadata_props.get(SPEC + "persistent") != "False"
            self._known[value] = Initializer(value, tensor, shape, role, why, persistent)
        return self._known[value]

    def let_go(self, initializer: Initializer) -> None:
        """Releases the elements of a weight of which torch has a tensor: they would be in memory twice."""
        self._put(
            initializer,
            ir.LazyTensor(
                _gone,
                initializer.tensor.dtype,
                ir.Shape(initializer.tensor.shape.numpy()),
                name=initializer.name,
            ),
        )

    def hold(self, initializer: Initializer, tensor: ir.TensorProtocol) -> None:
        """Reads a constant from `tensor` from now on, and not from its file."""
        if isinstance(initializer.tensor, ir.ExternalTensor):
            self._put(initializer, tensor)

    def _put(self, initializer: Initializer, tensor: ir.TensorProtocol) -> None:
        if isinstance(initializer.tensor, ir.ExternalTensor):
            initializer.tensor.release()
        node = initializer.value.producer()
        if node is None:
            initializer.value.const_value = tensor
        elif node.op_type == "Constant":
            node.attributes["value"] = ir.AttrTensor("value", tensor)
        self._known[initializer.value] = replace(initializer, tensor=tensor)

    def _given(self, value: ir.Value, tensor: ir.TensorProtocol) -> tuple[Role, str] | None:
        name = value.name or ""
        for pattern, text in self.given.items():
            if fnmatch.fnmatchcase(name, pattern):
                role = Role(text)
                if role is Role.PARAMETER and torch_dtype(tensor.dtype) not in FLOATS:
                    raise UsageError(
                        "IRC319",
                        f"{name!r} is of type {tensor.dtype.name.lower()}, which cannot be trained",
                        help="give it the role buffer or constant, or leave it out",
                    )
                self._fitting.add(pattern)
                return role, f"given as {pattern}={role.value}"
        return None

    def check_given(self) -> None:
        """Refuses patterns that fit no initializer.

        Raises:
            UsageError: IRC319.
        """
        idle = [pattern for pattern in self.given if pattern not in self._fitting]
        if idle:
            raise UsageError(
                "IRC319",
                f"no weight or constant that the model reads is named {idle[0]!r}",
                help="`irc inspect` lists their names",
            )

    def _repeated(self, value: ir.Value, node: ir.Node, sizes: ir.Value) -> Initializer | None:
        """Returns a `ConstantOfShape` of a shape in the file if it is a weight; others fold as any node."""
        source = self.of(sizes)
        if source is None:
            return None
        shape = tuple(int(n) for n in np.asarray(source.tensor.numpy()).reshape(-1))
        if any(n < 0 for n in shape):
            return None
        attribute = node.attributes.get("value")
        tensor = ir.tensor(np.zeros(1, np.float32)) if attribute is None else attribute.as_tensor()
        initializer = self._initializer(value, tensor, shape, named=False)
        return None if initializer.role is Role.CONSTANT else initializer


def _gone() -> ir.TensorProtocol:
    raise AssertionError("the elements of a weight are read after the import")


def _constant(node: ir.Node) -> ir.TensorProtocol | None:
    for name, attribute in node.attributes.items():
        if name == "value":
            return attribute.as_tensor()
        if name == "value_float":
            return ir.tensor(np.float32(attribute.as_float()))
        if name == "value_int":
            return ir.tensor(np.int64(attribute.as_int()))
        if name == "value_floats":
            return ir.tensor(np.array(attribute.as_floats(), np.float32))
        if name == "value_ints":
            return ir.tensor(np.array(attribute.as_ints(), np.int64))
    return None
