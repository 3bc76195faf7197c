"""Plans of LSTM layers: the kernels that eager runs, or their time steps if no schedule of these fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..ir import BudgetError, Graph, TimeLimitError
from ..torch_support.recurrent_kernels import LSTM_KERNEL

__all__ = ["has_kernels", "kernels_or_time_steps", "seconds_to_capture"]

_Planned = TypeVar("_Planned")

_LEAST_SECONDS_TO_CAPTURE = 60.0
"""The least time that capture has: a shorter time limit is for the search alone."""


def has_kernels(graph: Graph) -> bool:
    """Whether a graph runs LSTM layers by kernels, which can be captured as their time steps instead."""
    return any(node.op == LSTM_KERNEL for node in graph.operations)


def seconds_to_capture(time_limit: float) -> float:
    """The time that tracing the time steps of recurrent layers may take, given the limit of a search."""
    return max(time_limit, _LEAST_SECONDS_TO_CAPTURE)


def kernels_or_time_steps(
    graph: Graph, kernels: Callable[[], _Planned], time_steps: Callable[[], _Planned]
) -> _Planned:
    """Plans the kernels of a graph, or, if these do not fit, the time steps of its LSTM layers.

    Args:
        graph: The graph as eager runs it.
        kernels: Plans it.
        time_steps: Captures its layers as their time steps and plans those; the certificate compares the plan
            with the kernels if the program names them (`Program.kernels`).

    Raises:
        BudgetError: If neither fits, that of the two with the smaller smallest budget.
    """
    try:
        return kernels()
    except BudgetError as error:
        if not has_kernels(graph):
            raise
        refused = error
    try:
        return time_steps()
    except BudgetError as error:
        raise min(refused, error, key=lambda each: each.minimum_bytes) from None
    except TimeLimitError as late:
        raise BudgetError(
            refused.code,
            f"{refused.message}; with the time steps of its LSTM layers it may fit into less, but "
            f"{late.message}",
            minimum_bytes=refused.minimum_bytes,
            at=refused.at,
            help=f"{refused.help}; or raise the time limit",
        ) from late
