"""The module that an ONNX graph becomes: its weights under their names, and its nodes in order."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from ...ir.errors import UnsupportedError
from .binding import InputSpec, bound, check_run, describe
from .bounds import too_large
from .lowerings.table import Value
from .program import Frame, Operand, Program, Shapes, run
from .specializations import Specializations
from .tensors import Static

__all__ = ["OnnxModule", "Stored", "example_inputs"]


class _Scope(nn.Module):
    """A container that only holds names: `layer1` and `0` of `layer1.0.weight`."""


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str, str]:
    """The owner, attribute and state key for a name; creates the scopes on the way.

    The key equals the name, unless a part of it is empty or already means something else there: then
    underscores are added to that part until it is free.
    """
    owner, keys = root, list[str]()
    *scopes, leaf = name.split(".")
    for part in scopes:
        part = part or "_"
        while not isinstance(getattr(owner, part, None), _Scope) and hasattr(owner, part):
            part += "_"
        if not hasattr(owner, part):
            owner.add_module(part, _Scope())
        owner = owner.get_submodule(part)
        keys.append(part)
    leaf = leaf or "_"
    while hasattr(owner, leaf):
        leaf += "_"
    return owner, leaf, ".".join([*keys, leaf])


class Stored(NamedTuple):
    """A weight or constant of the file that the module reads, for people to look at.

    Args:
        name: Its ONNX name.
        role: `parameter`, `buffer` or `constant`.
        shape: Its shape.
        dtype: Its element type.
        why: The rule that gave it the role.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    why: str


class OnnxModule(nn.Module):
    """An ONNX graph as a trainable module.

    `forward` takes the inputs in the graph's order and returns its output, or a tuple of them. Parameters and
    buffers have the names they have in the file, as far as torch can hold them (see `onnx_names`).

    Attributes:
        input_specs: Name, shape and element type of each input.
        output_names: Names of the outputs.
        onnx_names: The ONNX name of each parameter and buffer.
        stored: The role of each weight and constant of the file.
        path: The file; `None` for a model that came from memory.
        bound_at_import: The inputs whose values were bound at import, with the values.
        roles: The roles of weights and constants that the user gave at import.
        current_node: While running, the name of the ONNX node that runs; else `None`.
    """

    input_specs: list[InputSpec]
    output_names: list[str]
    onnx_names: dict[str, str]
    stored: list[Stored]
    path: str | None
    bound_at_import: dict[str, Static]
    roles: dict[str, str]
    current_node: str | None

    def __init__(
        self,
        *,
        input_specs: Sequence[InputSpec],
        declared: Sequence[InputSpec],
        weights: Mapping[str, Tensor | nn.Parameter],
        stored: Sequence[Stored],
        not_saved: Container[str],
        specializations: Specializations,
        constants: Mapping[int, Tensor],
        bound_at_import: Mapping[str, Static] | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.path = None
        self.bound_at_import = dict(bound_at_import or {})
        self.roles = dict(roles or {})
        self.input_specs = list(input_specs)
        self.output_names = list(specializations.first.outputs)
        self.onnx_names = {}
        self.stored = list(stored)
        self.current_node = None
        self._declared = list(declared)
        self._specializations = specializations
        self._constants = _Scope()
        for index, tensor in constants.items():
            self._constants.register_buffer(f"c{index}", tensor, persistent=False)
        for name, tensor in weights.items():
            owner, leaf, key = _place(self, name)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor, persistent=name not in not_saved)
            self.onnx_names[key] = name

    @property
    def onnx_node_names(self) -> tuple[str, ...]:
        """The names of the nodes, in the order that they run in."""
        return tuple(step.name for step in self._specializations.first.steps)

    def _tensors(self, program: Program) -> dict[Operand, Value]:
        """The weights and constants as they are now, so that swapped-in ones are seen."""
        found: dict[Operand, Value] = {Operand("constant", i): t for i, t in program.tensors.items()}
        keys = {name: key for key, name in self.onnx_names.items()}
        for index, name in enumerate(program.weights):
            owner, _, leaf = keys[name].rpartition(".")
            found[Operand("weight", index)] = getattr(self.get_submodule(owner), leaf)
        if program is self._specializations.first:
            for name, tensor in self._constants.named_buffers(remove_duplicate=False):
                found[Operand("constant", int(name[1:]))] = tensor
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._specializations.change(fn)
        return super()._apply(fn, recurse)  # pyright: ignore[reportPrivateUsage]

    def forward(self, *inputs: Value) -> Value | tuple[Value, ...]:
        """The outputs for these inputs, given in the order of `input_specs`.

        A list of tensors comes and goes as a list, strings as numpy's arrays of objects, and an optional
        value that is absent as `None`.
        """
        if len(inputs) != len(self.input_specs):
            names = ", ".join(name for name, _, _ in self.input_specs)
            raise TypeError(f"expected {len(self.input_specs)} inputs ({names}), got {len(inputs)}")
        self._check_kinds(inputs)
        shapes = self._shapes(inputs)
        check_run(self._declared, shapes)
        program = self._specializations.fitting(shapes, is_traced=any(map(is_fake, inputs)))
        placed = self._specializations.placement.placed
        frame = Frame(self._tensors(program), program.statics, self.training, self._enter, placed)
        frame.fill(range(len(inputs)), inputs)
        del inputs
        try:
            run(program.steps, frame)
        finally:
            self.current_node = None
        outputs = tuple(frame.output(output) for output in program.outputs.values())
        return outputs[0] if len(outputs) == 1 else outputs

    def _check_kinds(self, inputs: Sequence[Value]) -> None:
        for (name, shape, _), value in zip(self.input_specs, inputs, strict=True):
            if shape is not None and not isinstance(value, Tensor):
                raise TypeError(f"the input {name!r} is a tensor, and a {type(value).__name__} was given")

    def _shapes(self, inputs: Sequence[Value]) -> Shapes:
        """The shapes of the inputs that are always tensors."""
        return tuple(
            tuple(value.shape) if shape is not None and isinstance(value, Tensor) else None
            for (_, shape, _), value in zip(self.input_specs, inputs, strict=True)
        )

    def shapes_for(self, sizes: Mapping[str, int]) -> Shapes:
        """The shapes of the outputs for these sizes of the open axes; `None` if data decide.

        A module that was pickled has no graph to tell them from for other sizes than those of its import.

        Args:
            sizes: By symbol.

        Raises:
            UnsupportedError: As `from_onnx`, for these sizes.
            UsageError: As `from_onnx`.
        """
        return self._specializations.output_shapes(
            tuple(shape for _, shape, _ in bound(self.input_specs, sizes))
        )

    def _enter(self, node_name: str) -> None:
        self.current_node = node_name

    def extra_repr(self) -> str:
        """Inputs and outputs, for printing."""
        inputs = ", ".join(
            f"{name}{'' if shape is None else describe(shape)}" for name, shape, _ in self.input_specs
        )
        return f"{inputs} -> {', '.join(self.output_names)}; {len(self._specializations.first.steps)} nodes"


def example_inputs(
    module: nn.Module, seed: int = 0, sizes: Mapping[str, int] | None = None
) -> tuple[Tensor, ...]:
    """Inputs of the right shapes and types, the same for the same seed.

    Floats are normal; integers are 0 or 1, which any table of two rows can look up; booleans are either.

    Args:
        module: The result of `from_onnx`.
        seed: Seed of the generator.
        sizes: The sizes of open axes, by symbol.

    Raises:
        UsageError: IRC317 when an axis of an input has no size.
        UnsupportedError: IRC304 when an input is a list of tensors, or may be absent, IRC307 when it is
            larger than memory.
    """
    assert isinstance(module, OnnxModule)
    generator = torch.Generator().manual_seed(seed)
    inputs: list[Tensor] = []
    for name, shape, dtype in bound(module.input_specs, sizes):
        if shape is None or dtype is None:
            raise UnsupportedError(
                "IRC304",
                f"the input {name!r} is of strings or a list, or may be absent: no example is drawn for it",
                help="give the inputs yourself",
            )
        size = math.prod(shape) * dtype.itemsize
        if size > _memory():
            raise too_large(
                f"an example of the input {name!r} of shape {list(shape)} takes {size:,} B, and this machine"
                f" has {_memory():,} B",
                help="give it another shape where the file leaves it open, or give the inputs yourself",
            )
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            inputs.append(torch.randn(shape, generator=generator, dtype=wide).to(dtype))
        else:
            inputs.append(torch.randint(0, 2, shape, generator=generator).to(dtype))
    return tuple(inputs)


def _memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
