"""Checks the parameters and the states of optimizers that live in a tier between steps."""

from __future__ import annotations

from ..graph import Argument, Gradients, Graph, Input, InputRole, Trait
from ..types import Storage
from .faults import fail

__all__ = ["check_offloaded"]


def check_offloaded(graph: Graph) -> None:
    """Checks that the caller is not handed an offloaded tensor, and that only an optimizer writes it."""
    delivered = {o.value.storage for o in graph.outputs if o.value is not None}
    written = {n.operands[0].storage for n in graph.nodes if Trait.EFFECT in n.traits and n.releases is None}
    entries: dict[Storage, list[Input]] = {}
    for entry in graph.inputs:
        entries.setdefault(entry.value.storage, []).append(entry)
    state_bytes = _state_bytes(graph)
    seen: set[Storage] = set()
    for offloaded in graph.offloaded_parameters:
        named = entries.get(offloaded.storage, [])
        what = f"{offloaded.name} is offloaded to {offloaded.tier}"
        if offloaded.storage in seen:
            fail("IRC140", f"{offloaded.name} is offloaded twice")
        seen.add(offloaded.storage)
        if not offloaded.value.type.is_dense or offloaded.value.type.nbytes > offloaded.storage.nbytes:
            fail("IRC140", f"{what}, and is not one block of memory")
        if offloaded.is_state:
            if named or state_bytes.get(offloaded.parameter) != offloaded.storage.nbytes:
                fail("IRC140", f"{what}, and no optimizer has so much of it")
        elif offloaded.value not in [e.value for e in named if e.target == offloaded.parameter]:
            fail("IRC140", f"{what}, and the graph has no such parameter")
        elif any(e.role is not InputRole.PARAMETER or e.value.type != offloaded.value.type for e in named):
            fail("IRC140", f"{what}, and shares its memory with something else")
        elif offloaded.storage in delivered or offloaded.storage in written:
            fail("IRC140", f"{what}, and is delivered to the caller or written")


def _state_bytes(graph: Graph) -> dict[str, Argument]:
    """Returns the bytes of state that can move, for each parameter that an optimizer updates in backward."""
    steps = {n.operands[0]: dict(n.keywords) for n in graph.nodes if n.releases is Gradients.APPLIED}
    first = {entry.target: entry.value for entry in graph.inputs if entry.role is InputRole.PARAMETER}
    return {target: steps[value].get("moving_bytes") for target, value in first.items() if value in steps}
