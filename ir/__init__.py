"""The intermediate representation: types, graph, schedule, liveness, verifier, text form and errors."""

from .errors import (
    BudgetError,
    IrcError,
    Location,
    TimeLimitError,
    UnsupportedError,
    UsageError,
    VerificationError,
)
from .graph import (
    Argument,
    Graph,
    Input,
    InputRole,
    Node,
    Output,
    OutputRole,
    Region,
    Symbol,
    Trait,
    values_in,
)
from .liveness import Timeline, liveness
from .plan import Decision, Plan
from .schedule import Compute, Free, Instruction, Loss, Schedule, with_frees
from .signature import Delivery, Origin, Signature, Slot
from .text import (
    parse_graph,
    parse_program,
    print_graph,
    print_program,
    print_schedule,
    same_graph,
    same_schedule,
)
from .types import DType, Storage, TensorType, Value, allocation_bytes
from .units import format_bytes, parse_budget
from .verify import verify_graph, verify_schedule

__all__ = [
    "Argument",
    "BudgetError",
    "Compute",
    "DType",
    "Decision",
    "Delivery",
    "Free",
    "Graph",
    "Input",
    "InputRole",
    "Instruction",
    "IrcError",
    "Location",
    "Loss",
    "Node",
    "Origin",
    "Output",
    "OutputRole",
    "Plan",
    "Region",
    "Schedule",
    "Signature",
    "Slot",
    "Storage",
    "Symbol",
    "TensorType",
    "TimeLimitError",
    "Timeline",
    "Trait",
    "UnsupportedError",
    "UsageError",
    "Value",
    "VerificationError",
    "allocation_bytes",
    "format_bytes",
    "liveness",
    "parse_budget",
    "parse_graph",
    "parse_program",
    "print_graph",
    "print_program",
    "print_schedule",
    "same_graph",
    "same_schedule",
    "values_in",
    "verify_graph",
    "verify_schedule",
    "with_frees",
]
