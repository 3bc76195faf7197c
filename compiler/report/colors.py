"""The colours of kinds of memory, in pages and pictures."""

from __future__ import annotations

from ...ir import Kind

__all__ = ["COLORS"]

COLORS = {
    Kind.PARAMETERS: "#5f7189",
    Kind.BUFFERS: "#8696a8",
    Kind.CONSTANTS: "#a3aebb",
    Kind.INPUTS: "#7aa9bd",
    Kind.OPTIMIZER: "#7a6f9f",
    Kind.GRADIENTS: "#a76cc4",
    Kind.SAVED: "#4aa564",
    Kind.OUTPUTS: "#3a97a8",
    Kind.RECOMPUTED: "#f0933c",
    Kind.FETCHED: "#6b7ae0",
    Kind.FORWARD: "#a5c6dd",
    Kind.BACKWARD: "#d492b7",
    Kind.WORKSPACE: "#e0626f",
    Kind.OTHER: "#d8bb40",
}
