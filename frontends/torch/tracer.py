"""Sets torch's tracer while a module is captured."""

# The tracer does not have a public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._higher_order_ops import effects

from ...torch_support.this_thread import replaced_here
from ..quiet import quiet_tracer
from .fixups.sparse_bags import BAG_BACKWARD, bag_backward
from .node_traits import draws

__all__ = [
    "DECOMPOSITIONS",
    "TRACE_MODES",
    "TRACE_MODES_OF_EXAMPLE",
    "TraceMode",
    "checks_stay",
    "quiet_tracer",
    "unread_draws_stay",
]


@dataclass(frozen=True, slots=True)
class TraceMode:
    """Describes a mode in which a module is traced.

    Args:
        compiling: The answer of `torch.compiler.is_compiling()` to the model's code.
        exporting: The answer of `torch.compiler.is_exporting()`.
        specialize_branches: Whether Python code sees the values of a run on the example arguments.
    """

    compiling: bool = False
    exporting: bool = False
    specialize_branches: bool = False

    def announced(self) -> contextlib.AbstractContextManager[Any]:
        """Lets torch give these answers meanwhile."""
        return patch.multiple(
            torch.compiler, _is_compiling_flag=self.compiling, _is_exporting_flag=self.exporting
        )


TRACE_MODES = (TraceMode(), TraceMode(compiling=True, exporting=True), TraceMode(compiling=True))
"""The modes in which a module is traced, in this order until one succeeds.

The first runs the module as it is. Libraries look at data to save work (a mask that masks nothing is left
out), unless they are told that they are traced; then they take the branch that holds for all data. If they
are told that the module is exported, they use plain operations. If they are told only that it is compiled,
some use another algorithm (a scan in another order), whose numbers differ from eager's by rounding.
"""
TRACE_MODES_OF_EXAMPLE = (
    TraceMode(compiling=True, specialize_branches=True),
    TraceMode(specialize_branches=True),
)
"""The modes that are tried after these if the branches may be those of the example."""


DECOMPOSITIONS: dict[Any, Any] = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
    BAG_BACKWARD: bag_backward,
}
"""The operations that are traced as others than torch's tracer would choose.

Views that are a flag of the tensor, which a type does not tell, are made, as their readers would.
"""


def unread_draws_stay() -> contextlib.AbstractContextManager[Any]:
    """Keeps the tracer from dropping draws that nothing reads: they move the generator."""
    eliminate = fx.Graph.eliminate_dead_code

    def keeping(graph: fx.Graph, is_impure_node: Callable[[fx.Node], bool] | None = None) -> bool:
        def stays(node: fx.Node) -> bool:
            return draws(node) or (node.is_impure() if is_impure_node is None else is_impure_node(node))

        return eliminate(graph, stays)

    return replaced_here(fx.Graph, "eliminate_dead_code", keeping)


_CHECK = "aten::_linalg_check_errors"


@contextlib.contextmanager
def checks_stay() -> Generator[None]:
    """Meanwhile, the tracer does not drop the check of linear algebra, which returns nothing.

    torch 2.13 registers the effect itself, for good; before, tracers drop the check.
    """
    if effects._get_effect(_CHECK) is not None:
        yield
        return
    registered = effects._register_effectful_op(_CHECK, effects._EffectType.ORDERED)
    try:
        yield
    finally:
        registered.destroy()
