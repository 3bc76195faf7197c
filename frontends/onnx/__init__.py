"""ONNX files as trainable modules.

    module = from_onnx("model.onnx", batch=32)
    loss = module(*example_inputs(module)).sum()

The graph is read with `onnx_ir`, and each node becomes torch operators by one table, versioned by operator
set. What depends on constants and shapes alone is worked out at import; `roles` says which constants are
trained.

torch's exporter folds and shares weights unless told not to: equal tensors become one, transposed ones new
ones, and BatchNorm disappears into convolutions. For training, export with `optimize=False` (or with
`dynamo=False, training=TrainingMode.TRAINING, do_constant_folding=False`): then each weight keeps its name.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...ir import require

if TYPE_CHECKING:
    from .binding import Constant
    from .importer import from_model
    from .lowerings import operators
    from .module import OnnxModule, example_inputs
    from .symbolic import output_shapes, some_sizes

__all__ = [
    "OnnxModule",
    "example_inputs",
    "from_model",
    "from_onnx",
    "operators",
    "output_shapes",
    "some_sizes",
]

_HOMES = {
    "OnnxModule": ".module",
    "example_inputs": ".module",
    "from_model": ".importer",
    "operators": ".lowerings",
    "output_shapes": ".symbolic",
    "some_sizes": ".symbolic",
}


def __getattr__(name: str) -> Any:
    """Imports the module of a name when it is first used: `from_onnx` exists without the extra `onnx`."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("onnx", "an ONNX model")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)


def from_onnx(
    path: str | os.PathLike[str],
    batch: int | None = None,
    inputs: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Constant] | None = None,
    roles: Mapping[str, str] | None = None,
) -> OnnxModule:
    """The model in an ONNX file as a trainable module, in train mode.

    An axis that the file leaves open, and that is not bound here, stays open: the module takes any size
    there, and a plan is made for the sizes of its example inputs. `output_shapes` says how those of the
    outputs follow.

    Args:
        path: The file; weights stored beside it are found.
        batch: Size of the leading axis of every input that leaves it open. A file that fixes the same size in
            all its inputs is changed to this one, and refused if its samples would mix.
        inputs: Whole shapes by input name, for inputs whose axes the file leaves open.
        constants: Inputs whose values are bound now, by name; the module does not take them. If a value
            decides a shape or a branch the module runs without this, but can only be planned with it.
        roles: The roles of weights and constants, if the rules of `roles` are wrong about a file:
            `parameter` (trained), `buffer` (kept in the state, not trained) or `constant`, by ONNX name or by
            a pattern such as `*.position_ids`. The first that fits counts.

    Raises:
        UsageError: IRC305, IRC306, IRC308, IRC310 to IRC319: the file is missing, broken or contradicts
            itself, or a shape contradicts it, or an input has none; IRC448 without the extra `onnx`.
        UnsupportedError: IRC301 to IRC304: an operator, an option, an operator set or a type is not covered;
            IRC307: what follows from the file is too large.
    """
    require("onnx", "reading an ONNX file")
    from .importer import from_model
    from .reader import read
    from .rebatch import check_samples, fixed_batch

    model = read(path)
    fixed = None if inputs or constants else fixed_batch(model.graph, batch)
    module = from_model(model, batch, inputs, constants, roles)
    if fixed is not None and batch is not None:
        check_samples(from_model(read(path)), module, fixed, batch)
    module.path = os.path.abspath(path)
    return module
