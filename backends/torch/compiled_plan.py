"""The plan of one call as it runs, and the compiler as plan caches see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ...ir import Plan, Signature, UnsupportedError
from ...ir.lengths import specialize
from ...ir.scalars import Operand
from ...torch_support.attribute_reads import Names
from ...torch_support.packed_weights import packed_weights
from ...torch_support.pytree import flatten
from .attribute_paths import AttributePath, find_all_paths, find_attribute_paths
from .guards.dynamo_call import TraceAnswers
from .guards.free_numbers import NO_NUMBERS, FreeNumbers
from .guards.module_state import Attributes, CodeReads, State, differing_modules
from .length_range import LengthRange
from .program import Program

__all__ = [
    "Compilation",
    "Compile",
    "CompiledPlan",
    "ReservedMemory",
    "VariedCall",
    "VariedNumbers",
    "pack_signature",
    "unpack_signature",
]


@dataclass(frozen=True)
class CompiledPlan:
    """The result of planning a call. It holds no tensor of the module, and copies of the module share it.

    Args:
        program: The compiled schedule.
        signature: Its calling convention.
        plan: Its certificate.
        reserved: The memory that released gradients take from step to step, by the name of the parameter:
            bytes of `.grad`, or of the optimizer's state.
        forward: What `forward_key` says of the forward that it was planned for.
        reads: The attributes of the root that the forward reads.
        state: The modes and settings of the submodules that it was planned for; none stands for those that
            the module has when the plan is bound to it.
        names: The attributes that capture read of each module; if it is empty, all settings count.
        code_reads: The attributes of classes, and the globals, that the forward's code names.
        tensor_reads: The attributes of arguments, parameters and buffers that the forward reads: the index
            among the static inputs, the name, and the stand-in of what is held there.
        constants_bytes: The bytes of other plans' constants that its peak counts.
        reason: The call that it was made for, in words.
        attribute_paths: The paths in the module of tensors that are constants of the program, and of its
            generators, by their names; None if they are not known yet. They are looked up in each call.
        generator_paths: All places in the module of the generators, by their names there.
        answers: The answers that capture gave to the model's code; None if they are not known.
        free: The numbers among the leaves of the arguments that decide nothing: any number of the same type
            is the planned one. The program takes their expressions after its generators.
        packed_forms: The forms of the packed weights that it was planned for, by their names in the module.
        lengths: The lengths that it is for; None if it is for the shapes of one call. The program takes the
            length last.
    """

    program: Program
    signature: Signature
    plan: Plan | None = None
    reserved: Mapping[str, int] = field(default_factory=dict[str, int])
    forward: object = None
    reads: Attributes = ()
    state: State = ()
    names: Names = ()
    code_reads: CodeReads = ()
    tensor_reads: tuple[tuple[int, str, object], ...] = ()
    constants_bytes: int = 0
    reason: str = "the example arguments"
    attribute_paths: Mapping[str, AttributePath] | None = None
    generator_paths: tuple[tuple[str, AttributePath], ...] = ()
    answers: TraceAnswers | None = None
    free: FreeNumbers = NO_NUMBERS
    packed_forms: Mapping[str, object] = field(default_factory=dict[str, object])
    lengths: LengthRange | None = None

    @property
    def noticing_plan(self) -> Plan | None:
        """The plan with the roundings that steps showed."""
        noticed = tuple(self.program.noticed_roundings)
        if self.plan is None or not noticed:
            return self.plan
        return replace(self.plan, roundings=(*self.plan.roundings, *noticed))

    def at(self, length: int) -> CompiledPlan:
        """Returns a plan for lengths with the types that its tensors have at one of them."""
        assert self.lengths is not None
        statics, tangents, deliveries = specialize(
            (self.lengths.statics, self.lengths.tangents, self.lengths.deliveries), length
        )
        program = replace(self.program, statics=statics, tangents=tangents)
        return replace(self, program=program, signature=replace(self.signature, deliveries=deliveries))

    def with_attribute_paths(self, module: nn.Module) -> CompiledPlan:
        """Returns a plan that knows which constants of the program the module holds, and its packed weights.

        Args:
            module: The module that was planned.

        Raises:
            UnsupportedError: IRC338 if backward reads a buffer that the forward writes.
        """
        if self.attribute_paths is not None:
            return self
        constants, generators = self.program.constants, self.program.generators
        found = find_attribute_paths(module, constants.values())
        self._refuse_written(found.values())
        places = find_all_paths(module, generators.values())
        return replace(
            self,
            attribute_paths={k: found[id(t)] for k, t in constants.items() if id(t) in found},
            packed_forms={path: weight.form() for path, weight in packed_weights(module)},
            generator_paths=tuple((k, path) for k, g in generators.items() for path in places.get(id(g), ())),
        )

    def _refuse_written(self, paths: Iterable[AttributePath]) -> None:
        """Refuses constants that the forward writes as buffers: backward would read them at another time."""
        written = {self.program.statics[index].target for index in self.program.written}
        for name, steps in paths:
            target = f"{name}.{steps[-1]}".lstrip(".")
            if steps[0] == "_buffers" and target in written:
                raise UnsupportedError(
                    "IRC338",
                    f"a hook or a function reads the buffer {target} in backward, and the forward writes it",
                    help="let the forward keep a copy of what backward reads, in another buffer",
                )

    def is_for(self, state: State) -> bool:
        """Whether the submodules are in the state that it was planned for, as far as that counts."""
        return next(differing_modules(state, self.state, self.names), None) is None

    def __reduce__(self) -> tuple[Any, ...]:
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        return _compiled_plan, ({**known, "signature": pack_signature(self.signature)},)


def _compiled_plan(known: dict[str, Any]) -> CompiledPlan:
    known["signature"] = unpack_signature(known["signature"])
    return CompiledPlan(**known)


def pack_signature(signature: Signature) -> tuple[Signature, Any, Any]:
    """Returns a signature for a pickle: torch writes the trees in it in a form that it deprecates."""
    nested = (_nested(tree) for tree in (signature.in_tree, signature.out_tree))
    return replace(signature, in_tree=None, out_tree=None), *nested


def unpack_signature(packed: tuple[Signature, Any, Any]) -> Signature:
    """Returns the signature that `pack_signature` was given."""
    signature, *nested = packed
    in_tree, out_tree = (flatten(each)[1] for each in nested)
    return replace(signature, in_tree=in_tree, out_tree=out_tree)


def _nested(tree: Any) -> Any:
    """Returns arguments that nest as a tree does; dataclasses are opened for tensors."""
    return pytree.tree_unflatten([torch.empty(0)] * tree.num_leaves, tree)


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """Memory that a fitted module holds besides the plan that is to be made, and that its peak has to count.

    Args:
        reserved: Bytes of `.grad` or of the optimizer's state, by the name of the parameter, for all whose
            gradients any plan releases.
        constants_bytes: The constants of the other plans.
    """

    reserved: Mapping[str, int]
    constants_bytes: int


@dataclass(frozen=True)
class VariedNumbers:
    """The leaves of a call with other numbers that decide nothing, which show their places in its graph.

    Args:
        leaves: All leaves.
        expressions: The scalar operands that are computed from the numbers.
        uses: The number of operations of forward that take each expression.
        values: What each expression is in the call itself.
        others: What it is with these leaves.
    """

    leaves: tuple[Any, ...]
    expressions: tuple[Operand, ...]
    uses: tuple[int, ...]
    values: tuple[Any, ...]
    others: tuple[Any, ...]


@dataclass(frozen=True)
class VariedCall:
    """A call again with other numbers that decide nothing.

    Args:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        answers: The answers of a capture for which the numbers decide nothing.
        numbers: The numbers.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answers: TraceAnswers
    numbers: VariedNumbers


@dataclass(frozen=True)
class Compilation:
    """The result of compiling a call.

    Args:
        compiled: The plan of the call.
        others: The plans of calls of other lengths, if it is for a range of them.
        optimizers: The optimizers of parameters that had none before, by name.
        request: The request with which later calls are compiled.
    """

    compiled: CompiledPlan
    optimizers: Mapping[str, Optimizer]
    request: Any
    others: tuple[CompiledPlan, ...] = field(default=(), kw_only=True)


Compile = Callable[
    [nn.Module, tuple[Any, ...], dict[str, Any], Any, ReservedMemory, VariedCall | None], Compilation
]
"""Compiles a call (module, positional and keyword arguments) as a request asks, beside what is reserved.

With the call again with other numbers, the program takes these numbers as inputs, if it can."""
