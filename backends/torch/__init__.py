"""Schedules out as executable torch modules."""

from .emit import emit_source
from .module import Program, compile_program, fit
from .standalone import StandaloneModule

__all__ = ["Program", "StandaloneModule", "compile_program", "emit_source", "fit"]
