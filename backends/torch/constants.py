"""The constants that the plans of one module hold on the device; equal ones are held once."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .compiled_plan import CompiledPlan
from .program import Program

__all__ = ["constants_of", "fits_beside", "sharing", "storage_bytes"]


def constants_of(fittings: Iterable[CompiledPlan], *, are_held: bool = True) -> list[Tensor]:
    """The constants that plans hold, each once.

    Args:
        fittings: The plans.
        are_held: Whether those count that the module holds too: they may change.
    """
    found = {
        id(constant): constant
        for fitting in fittings
        for name, constant in fitting.program.constants.items()
        if are_held or name not in (fitting.places or ())
    }
    return list(found.values())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of some tensors, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def sharing(program: Program, known: Sequence[Tensor], held: Container[str] = ()) -> Program:
    """The program with constants that are there already, where they are equal.

    Args:
        program: A program.
        known: The constants that are there, and do not change.
        held: Names of the constants that the module holds: those are looked up there.
    """

    def same(a: Tensor, b: Tensor) -> bool:
        alike = (a.dtype, a.device, a.shape, a.stride()) == (b.dtype, b.device, b.shape, b.stride())
        return alike and torch.equal(a, b)

    constants = {
        name: constant if name in held else next((o for o in known if same(o, constant)), constant)
        for name, constant in program.constants.items()
    }
    return replace(program, constants=constants)


def fits_beside(fitting: CompiledPlan, others: Iterable[CompiledPlan]) -> bool:
    """Whether a plan's peak still fits beside the constants of others, those that it did not count."""
    if fitting.plan is None:
        return True
    own = {id(constant) for constant in fitting.program.constants.values()}
    beside = storage_bytes(constant for constant in constants_of(others) if id(constant) not in own)
    return fitting.plan.peak_bytes + max(beside - fitting.constants_bytes, 0) <= fitting.plan.budget_bytes
