"""Sorts the outputs of a traced joint graph, and says how the module's result is delivered from them."""

# AOTAutograd has no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTOutput,
    BufferAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.schemas import JointWithDescriptors, OutputType

from ...ir import Delivery, InputRole, Origin, UnsupportedError, Value

__all__ = ["ROLES", "TracedResults", "input_target"]

ROLES = {
    ParamAOTInput: InputRole.PARAMETER,
    BufferAOTInput: InputRole.BUFFER,
    PlainAOTInput: InputRole.INPUT,
    TangentAOTInput: InputRole.TANGENT,
}
"""The roles of the inputs of a traced graph, by the class of their descriptor."""
_PREFIX = "module."


def input_target(described: Any) -> str:
    """Returns the target of an input by its descriptor: its name in the module, or its place."""
    if isinstance(described, TangentAOTInput):
        return repr(described.output)
    if isinstance(described, PlainAOTInput):
        return str(described.idx)
    return str(described.target).removeprefix(_PREFIX)


@dataclass(frozen=True)
class TracedResults:
    """The outputs of a traced joint graph, by kind; each with its descriptor."""

    mutations: list[tuple[fx.Node, Any]]
    plain: list[tuple[fx.Node, Any]]
    bases: list[tuple[fx.Node, Any]]
    gradients: list[tuple[fx.Node | None, Any]]

    @staticmethod
    def of(output: fx.Node) -> TracedResults:
        """Sorts what the last node of a joint graph takes."""
        by_kind = TracedResults([], [], [], [])
        results: Any = output.args[0]
        for node, described in zip(results, output.meta["desc"], strict=True):
            match described:
                case InputMutationAOTOutput():
                    by_kind.mutations.append((node, described.mutated_input))
                case PlainAOTOutput():
                    by_kind.plain.append((node, described))
                case IntermediateBaseAOTOutput():
                    by_kind.bases.append((node, described))
                case GradAOTOutput():
                    by_kind.gradients.append((node, described))
                case None | ForwardTokenAOTOutput() | BackwardTokenAOTOutput():
                    pass
                case _:
                    raise UnsupportedError(
                        "IRC334", f"the traced module has an output of an unknown kind: {described!r}"
                    )
        return by_kind

    def forward(self) -> list[tuple[fx.Node, Any]]:
        """Returns what is computed in forward."""
        return [*self.mutations, *self.plain, *self.bases]

    def delivered(self, joint: JointWithDescriptors) -> list[tuple[fx.Node, Any]]:
        """Returns the outputs of the forward itself: those that alias nothing, and the bases of views."""
        computed = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
        info = joint._aot_state.fw_metadata.output_info
        kept = [pair for pair, alias in zip(self.plain, info, strict=True) if alias.output_type in computed]
        return [*kept, *self.bases]

    def deliveries(
        self, joint: JointWithDescriptors, statics: Sequence[Value], values: Mapping[fx.Node, Value]
    ) -> tuple[Delivery, ...]:
        """Returns the deliveries of the flat result: AOTAutograd says which outputs alias what.

        Args:
            joint: The joint graph.
            statics: Its static inputs.
            values: The values of its nodes.
        """
        info = joint._aot_state.fw_metadata.output_info
        delivered = [described for _, described in self.delivered(joint)]
        deliveries: list[Delivery] = []
        for (node, described), alias in zip(self.plain, info, strict=True):
            tensor = node.meta["val"]
            view = (tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
            index: Any = alias.base_idx
            match alias.output_type:
                case OutputType.is_input:
                    deliveries.append(Delivery(Origin.INPUT, index))
                case OutputType.alias_of_input:
                    _check_view(tensor, statics[index])
                    deliveries.append(Delivery(Origin.INPUT, index, view))
                case (
                    OutputType.alias_of_intermediate_base_is_user_output
                    | OutputType.alias_of_intermediate
                    | OutputType.alias_of_intermediate_save_as_output
                ):
                    base_node, base = self._base_of(alias, info)
                    _check_view(tensor, values[base_node])
                    deliveries.append(Delivery(Origin.OUTPUT, delivered.index(base), view))
                case _:
                    deliveries.append(Delivery(Origin.COMPUTED, delivered.index(described)))
        return tuple(deliveries)

    def _base_of(self, alias: Any, info: Sequence[Any]) -> tuple[fx.Node, Any]:
        """The output of the graph that a result is a view of: another result, which may be a view itself."""
        while alias.output_type is OutputType.alias_of_intermediate_base_is_user_output:
            place = alias.base_idx
            alias = info[place]
            if alias.base_idx is None:
                return self.plain[place]
        return self.bases[alias.base_idx]


def _check_view(tensor: Tensor, base: Value) -> None:
    """Refuses a result that is a view of `base` by more than shape, strides and offset."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    if is_lazy or str(tensor.dtype) != f"torch.{base.type.dtype.value}":
        what = (
            "lazily conjugated or negated" if is_lazy else f"{base.type.dtype.value} seen as {tensor.dtype}"
        )
        raise UnsupportedError(
            "IRC348",
            f"a result of shape {list(tensor.shape)} is a view of an input or of another result, {what}",
            help="return resolve_conj(), resolve_neg() or clone() of it",
        )
