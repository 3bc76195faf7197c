"""Gives a file that was exported for one batch size another one, and proves that samples stay apart."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from torch.func import functional_call

from ...ir.errors import UsageError
from .module import OnnxModule, example_inputs

__all__ = ["check_samples", "fixed_batch", "rebatch"]

_HELP = "export the model with a symbolic leading axis, or leave out the batch"


def fixed_batch(graph: ir.Graph, batch: int | None) -> int | None:
    """The batch size that every input has fixed, when `batch` asks for another one; else None."""
    if batch is None or batch < 1:
        return None
    shapes = [v.shape for v in graph.inputs if not v.is_initializer()]
    leading = {shape[0] if shape is not None and len(shape) else None for shape in shapes}
    if len(leading) != 1:
        return None
    (size,) = leading
    return size if isinstance(size, int) and size >= 0 and size != batch else None


def rebatch(graph: ir.Graph, old: int, new: int) -> None:
    """Changes the leading axis of the inputs, and of the constant targets of `Reshape`, from `old` to `new`.

    Args:
        graph: Changed in place; constants are initializers already.
        old: The batch size that the file fixes.
        new: The one that is wanted.
    """
    live: set[ir.Value] = set()
    for value in graph.inputs:
        if not value.is_initializer() and value.shape is not None:
            value.shape = ir.Shape([new, *value.shape[1:]])
            live.add(value)
    for node in graph:
        if any(value in live for value in node.inputs):
            live.update(node.outputs)
            if node.op_type == "Reshape" and node.domain in ("", "ai.onnx") and node.inputs[0] in live:
                _retarget(graph, node, old, new)


def _retarget(graph: ir.Graph, node: ir.Node, old: int, new: int) -> None:
    target = node.inputs[1] if len(node.inputs) > 1 else None
    constant = None if target is None else target.const_value
    if constant is None:
        return
    sizes = constant.numpy().tolist()
    if not sizes or sizes[0] != old:
        return
    name = f"{node.outputs[0].name}_shape_for_batch_{new}"
    value = ir.Value(name=name, const_value=ir.tensor(np.array([new, *sizes[1:]], dtype=np.int64), name=name))
    graph.register_initializer(value)
    node.replace_input_with(1, value)


def check_samples(single: OnnxModule, module: OnnxModule, old: int, new: int) -> None:
    """Checks that each sample of `module` comes out as from `single`, with random weights and inputs.

    Args:
        single: The model at the file's own batch size.
        module: The same model, changed.
        old: Batch size of `single`.
        new: Batch size of `module`.

    Raises:
        UsageError: IRC316 when a batch mixes its samples, or an output does not grow with it.
    """
    state = _drawn(module)
    (large, rows), (small, fewer) = (
        ((module, new), (single, old)) if new >= old else ((single, old), (module, new))
    )
    inputs = example_inputs(large)
    with torch.no_grad(), _evaluating(single), _evaluating(module):
        outputs = _tuple(functional_call(large, state, inputs))
        for start in dict.fromkeys((0, rows - fewer)):
            chosen = tuple(x[start : start + fewer] for x in inputs)
            expected = _tuple(functional_call(small, state, chosen))
            for name, whole, part in zip(module.output_names, outputs, expected, strict=True):
                if part.ndim == 0 or whole.shape[0] * fewer != part.shape[0] * rows:
                    raise _refusal(
                        f"the output {name!r} of shape {list(part.shape)} has no batch axis", old, new
                    )
                first = start * part.shape[0] // fewer
                mine = whole[first : first + part.shape[0]]
                if not torch.allclose(mine.double(), part.double(), rtol=1e-3, atol=1e-5 * _scale(part)):
                    raise _refusal(f"the output {name!r} of a sample depends on the others", old, new)


@contextlib.contextmanager
def _evaluating(module: OnnxModule) -> Generator[None]:
    mode = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(mode)


def _refusal(why: str, old: int, new: int) -> UsageError:
    return UsageError(
        "IRC316", f"the file is for batches of {old} and cannot be changed to {new}: {why}", help=_HELP
    )


def _tuple(result: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _scale(tensor: Tensor) -> float:
    return max(float(tensor.double().abs().max()), 1e-30) if tensor.numel() else 1.0


def _drawn(module: OnnxModule) -> dict[str, Tensor]:
    """Weights drawn at random, so that equal placeholder weights cannot hide a mix-up."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.ndim >= 2:
            spread = math.sqrt(2 / max(parameter[0].numel(), 1))
            state[name] = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * spread
    return state
