"""Shares the constants that the plans of one module hold on the device: equal ones are held once."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from ...torch_support.allocated import allocated_bytes
from ...torch_support.bits import same_bits
from .compiled_plan import CompiledPlan
from .program import Program

__all__ = ["constants_of", "fits_beside", "sharing", "storage_bytes"]


def constants_of(plans: Iterable[CompiledPlan], *, are_held: bool = True) -> list[Tensor]:
    """Returns the constants that plans hold, each once.

    Args:
        plans: The plans.
        are_held: Whether to include the constants that the module holds too: they may change.
    """
    found = {
        id(constant): constant
        for compiled in plans
        for name, constant in compiled.program.constants.items()
        if are_held or name not in (compiled.attribute_paths or ())
    }
    return list(found.values())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the storages of some tensors, each counted once."""
    storages = {t.untyped_storage().data_ptr(): allocated_bytes(t) for t in tensors}
    return sum(storages.values())


def sharing(program: Program, known: Sequence[Tensor], held: Container[str]) -> Program:
    """Replaces the constants of a program by equal ones that other plans hold.

    Args:
        program: A program.
        known: The constants of other plans, which do not change.
        held: The names of the constants that the module holds: those are looked up there.
    """

    def same(a: Tensor, b: Tensor) -> bool:
        return (a.device, a.layout, a.stride()) == (b.device, b.layout, b.stride()) and same_bits(a, b)

    constants = {
        name: constant if name in held else next((o for o in known if same(o, constant)), constant)
        for name, constant in program.constants.items()
    }
    return replace(program, constants=constants)


def fits_beside(compiled: CompiledPlan, others: Iterable[CompiledPlan]) -> bool:
    """Whether a plan fits into its budget beside those constants of other plans that it did not count."""
    if compiled.plan is None:
        return True
    own = {id(constant) for constant in compiled.program.constants.values()}
    reserved = storage_bytes(constant for constant in constants_of(others) if id(constant) not in own)
    uncounted = max(reserved - compiled.constants_bytes, 0)
    return compiled.plan.peak_bytes + uncounted <= compiled.plan.budget_bytes
