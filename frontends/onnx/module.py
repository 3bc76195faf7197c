"""The module that an ONNX graph becomes: its weights under their names, and its nodes in order."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .binding import InputSpec
from .lowerings.table import Call, Lowering, NodeInfo
from .tensors import Static

__all__ = ["OnnxModule", "Operand", "Step", "example_inputs"]


@dataclass(frozen=True, slots=True)
class Operand:
    """Where a step reads a value: a slot that an earlier step filled, a weight, a constant, or nowhere."""

    kind: Literal["slot", "weight", "constant", "absent"]
    index: int = 0


@dataclass(frozen=True)
class Step:
    """One node to run.

    Args:
        node: What is fixed about it.
        lowering: What it means in torch.
        operands: Where its operands come from.
        results: The slot of each result; `None` where nothing reads it.
        literals: Constants that the lowering worked out at import, in order.
        frees: Slots that nothing reads after this step.
    """

    node: NodeInfo
    lowering: Lowering
    operands: tuple[Operand, ...]
    results: tuple[int | None, ...]
    literals: tuple[int, ...]
    frees: tuple[int, ...] = ()


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


class OnnxModule(nn.Module):
    """An ONNX graph as a trainable module.

    `forward` takes the inputs in the graph's order and returns its output, or a tuple of them. Parameters and
    buffers have the names they have in the file, as far as torch can hold them (see `onnx_names`).

    Attributes:
        input_specs: Name, shape and element type of each input.
        output_names: Names of the outputs.
        onnx_names: The ONNX name of each parameter and buffer.
        current_node: While running, the name of the ONNX node that runs; else `None`.
    """

    input_specs: list[InputSpec]
    output_names: list[str]
    onnx_names: dict[str, str]
    current_node: str | None

    def __init__(
        self,
        *,
        input_specs: Sequence[InputSpec],
        weights: Mapping[str, Tensor | nn.Parameter],
        not_saved: Container[str],
        constants: Sequence[Static],
        as_tensors: Mapping[int, Tensor],
        steps: Sequence[Step],
        outputs: Mapping[str, Operand],
    ) -> None:
        super().__init__()
        self.input_specs = list(input_specs)
        self.output_names = list(outputs)
        self.onnx_names = {}
        self.current_node = None
        self._outputs = tuple(outputs.values())
        self._statics = tuple(constants)
        self._steps = tuple(steps)
        self._weight_keys: list[str] = []
        self._constants = _Scope()
        for index, tensor in as_tensors.items():
            self._constants.register_buffer(f"c{index}", tensor, persistent=False)
        for name, tensor in weights.items():
            owner, leaf, key = _place(self, name)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor, persistent=name not in not_saved)
            self.onnx_names[key] = name
            self._weight_keys.append(key)

    @property
    def onnx_node_names(self) -> tuple[str, ...]:
        """The names of the nodes, in the order that they run in."""
        return tuple(step.node.name for step in self._steps)

    def _tensors(self, steps: Sequence[Step]) -> dict[Operand, Tensor]:
        """The weights and constants as they are now, so that swapped-in ones are seen."""
        found: dict[Operand, Tensor] = {}
        for index, key in enumerate(self._weight_keys):
            owner, _, leaf = key.rpartition(".")
            found[Operand("weight", index)] = getattr(self.get_submodule(owner), leaf)
        for name, tensor in self._constants.named_buffers():
            found[Operand("constant", int(name[1:]))] = tensor
        return found

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The outputs for these inputs, given in the order of `input_specs`."""
        if len(inputs) != len(self.input_specs):
            names = ", ".join(name for name, _, _ in self.input_specs)
            raise TypeError(f"expected {len(self.input_specs)} inputs ({names}), got {len(inputs)}")
        values = self._tensors(self._steps)
        values.update((Operand("slot", i), tensor) for i, tensor in enumerate(inputs))
        del inputs
        try:
            for step in self._steps:
                self.current_node = step.node.name
                self._run(step, values)
        finally:
            self.current_node = None
        outputs = tuple(values[operand] for operand in self._outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _run(self, step: Step, values: dict[Operand, Tensor]) -> None:
        literals: Iterator[int] = iter(step.literals)
        call = Call(
            step.node,
            [values.get(operand) for operand in step.operands],
            [self._statics[o.index] if o.kind == "constant" else None for o in step.operands],
            [o.kind == "weight" for o in step.operands],
            self.training,
            lambda _: values[Operand("constant", next(literals))],
        )
        result = step.lowering(call)
        results = result if isinstance(result, tuple | list) else (result,)
        for slot, tensor in zip(step.results, results, strict=False):
            if slot is not None:
                assert tensor is not None
                values[Operand("slot", slot)] = tensor
        for slot in step.frees:
            values.pop(Operand("slot", slot), None)

    def extra_repr(self) -> str:
        """Inputs and outputs, for printing."""
        inputs = ", ".join(f"{name}{list(shape)}" for name, shape, _ in self.input_specs)
        return f"{inputs} -> {', '.join(self.output_names)}; {len(self._steps)} nodes"


def example_inputs(module: nn.Module, seed: int = 0) -> tuple[Tensor, ...]:
    """Inputs of the right shapes and types, the same for the same seed.

    Floats are normal; integers are 0 or 1, which any table of two rows can look up; booleans are either.

    Args:
        module: What `from_onnx` returned.
        seed: Seed of the generator.
    """
    assert isinstance(module, OnnxModule)
    generator = torch.Generator().manual_seed(seed)
    inputs: list[Tensor] = []
    for _, shape, dtype in module.input_specs:
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            inputs.append(torch.randn(shape, generator=generator, dtype=wide).to(dtype))
        else:
            inputs.append(torch.randint(0, 2, shape, generator=generator).to(dtype))
    return tuple(inputs)
