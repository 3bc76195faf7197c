"""Schedules out as executable torch modules."""

from .emit import emit_source
from .fitting import Beside, Fitting, Replan, Replanned, pack_signature, unpack_signature
from .hooks import refuse_hooks
from .module import fit, fit_planned
from .original import Original, unfitted
from .plans import PlannedCall
from .program import Program, compile_program
from .standalone import StandaloneModule
from .tracing import planning, tracing
from .wrappers import refuse_unplannable

__all__ = [
    "Beside",
    "Fitting",
    "Original",
    "PlannedCall",
    "Program",
    "Replan",
    "Replanned",
    "StandaloneModule",
    "compile_program",
    "emit_source",
    "fit",
    "fit_planned",
    "pack_signature",
    "planning",
    "refuse_hooks",
    "refuse_unplannable",
    "tracing",
    "unfitted",
    "unpack_signature",
]
