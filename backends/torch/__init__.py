"""Schedules out as executable torch modules."""

from .call import refuse_hooks
from .emit import emit_source
from .module import fit
from .program import Program, compile_program
from .standalone import StandaloneModule

__all__ = ["Program", "StandaloneModule", "compile_program", "emit_source", "fit", "refuse_hooks"]
