"""Schedules out as executable torch modules."""

from .emit import emit_source
from .module import Program, compile_program, fit

__all__ = ["Program", "compile_program", "emit_source", "fit"]
