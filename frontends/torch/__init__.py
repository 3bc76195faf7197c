"""torch modules in: captured as one training graph."""

from .assignments import refuse_assignments
from .capture import Captured, capture, lengths_alike
from .dynamo import (
    CapturedGraph,
    call_arguments,
    capture_graph,
    compile_options,
    compiled_frame,
    draws_from_numpy,
    graph_name,
    is_given_up,
    lifted_names,
    numbers_among,
    refuse_uncompiled_module,
)
from .forward_bytes import forward_bytes
from .length_conditions import Axes
from .loss import Loss
from .settled import settled
from .tensor_writes import DataAssignedError

__all__ = [
    "Axes",
    "Captured",
    "CapturedGraph",
    "DataAssignedError",
    "Loss",
    "call_arguments",
    "capture",
    "capture_graph",
    "compile_options",
    "compiled_frame",
    "draws_from_numpy",
    "forward_bytes",
    "graph_name",
    "is_given_up",
    "lengths_alike",
    "lifted_names",
    "numbers_among",
    "refuse_assignments",
    "refuse_uncompiled_module",
    "settled",
]
