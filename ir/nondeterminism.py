"""Operations that may give other numbers when they run again on the same operands: one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .graph import Node, values_in
from .types import DType

__all__ = ["NONDETERMINISTIC", "Rule", "nondeterminism"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Operations whose numbers depend on more than their operands.

    Args:
        operations: Names without the overload.
        reason: The cause that decides the numbers.
        on_cpu: Whether the CPU's kernels are concerned too; those of accelerators always are.
        is_equal: Whether the numbers are equal after all, for a node on an accelerator (False) or the CPU.
    """

    operations: tuple[str, ...]
    reason: str
    on_cpu: bool = False
    is_equal: Callable[[Node, bool], bool] = lambda node, on_cpu: False


def _is_exact(node: Node, on_cpu: bool) -> bool:
    """Sums of whole numbers are the same in any order."""
    return not any(value.type.dtype.is_float for value in node.values)


def _writes_once(node: Node) -> bool:
    """Whether all indices are masks: each element is written at most once."""
    indices = list(values_in(node.arguments[1]))
    return bool(indices) and all(value.type.dtype is DType.BOOL for value in indices)


def _accumulates(node: Node) -> bool:
    given = node.arguments[3] if len(node.arguments) > 3 else dict(node.keywords).get("accumulate")
    return given is True


def _adds_in_order(node: Node, on_cpu: bool) -> bool:
    """On the CPU only float32 is added by several threads at once; the other types are added in order."""
    in_order = on_cpu and all(value.type.dtype is not DType.FLOAT32 for value in node.values)
    return not _accumulates(node) or _writes_once(node) or _is_exact(node, on_cpu) or in_order


def _replaces_once(node: Node, on_cpu: bool) -> bool:
    return _accumulates(node) or _writes_once(node)


def _takes_extremes(node: Node, on_cpu: bool) -> bool:
    """The largest and the smallest are the same in any order."""
    return "amax" in node.arguments or "amin" in node.arguments or _is_exact(node, on_cpu)


def _has_no_indices(node: Node, on_cpu: bool) -> bool:
    return len(node.values) == 1


def _is_stable(node: Node, on_cpu: bool) -> bool:
    return dict(node.keywords).get("stable") is True


def _writes_constant(node: Node, on_cpu: bool) -> bool:
    return node.op in ("aten.scatter.value", "aten.scatter_.value")


_PUTS = ("aten.index_put", "aten._unsafe_index_put", "aten._index_put_impl", "aten.put")

NONDETERMINISTIC = (
    Rule(_PUTS, "adds in the order of the threads", on_cpu=True, is_equal=_adds_in_order),
    Rule(_PUTS, "an index that is there twice takes either value", on_cpu=True, is_equal=_replaces_once),
    Rule(
        ("aten.index_copy", "aten.max_unpool2d", "aten.max_unpool3d"),
        "an index that is there twice takes either value",
        on_cpu=True,
    ),
    Rule(
        ("aten.scatter",),
        "an index that is there twice takes either value",
        is_equal=_writes_constant,
    ),
    Rule(
        (
            "aten.bincount",
            "aten.histc",
            "aten.index_add",
            "aten.nll_loss2d_forward",
            "aten.scatter_add",
        ),
        "adds in the order of the threads",
        is_equal=_is_exact,
    ),
    Rule(
        ("aten.index_reduce", "aten.scatter_reduce"),
        "reduces in the order of the threads",
        is_equal=_takes_extremes,
    ),
    Rule(
        ("aten.cumprod", "aten.cumsum", "aten.logcumsumexp"),
        "a parallel scan joins its parts in the order of the threads",
        is_equal=_is_exact,
    ),
    Rule(
        ("aten.kthvalue", "aten.median", "aten.mode", "aten.nanmedian", "aten.topk"),
        "of equal elements it takes either",
        is_equal=_has_no_indices,
    ),
    Rule(("aten.argsort", "aten.sort"), "equal elements come in any order", is_equal=_is_stable),
    Rule(("aten._cudnn_ctc_loss",), "adds in the order of the threads"),
)
"""The table. On the CPU it names the kernels that share one result among threads without an order: they are
deterministic with one thread alone, and how many there will be is not known when a plan is made. All others
of the CPU give each element to one thread. The kernels of accelerators add by atomics, and order equal
elements as their threads come. Operations of other libraries than torch's own count as nondeterministic,
but for those of `_KNOWN`.

Source:
    The documentation of `torch.use_deterministic_algorithms` and `torch.topk`; aten/src/ATen/native/cpu/
    IndexKernel.cpp and ScatterGatherKernel.cpp of PyTorch.
"""

_LIBRARIES = ("aten", "prims", "irc")
_KNOWN = (
    "bitsandbytes.dequantize_4bit",
    "bitsandbytes.dequantize_blockwise",
    "bitsandbytes.gemm_4bit",
    "bitsandbytes.int8_scaled_mm",
    "bitsandbytes.int8_vectorwise_quant",
)
"""Operations of other libraries whose numbers depend on their operands alone.

Source:
    csrc/gemm_4bit*.cu and csrc/kernels.cu of bitsandbytes 0.50: atomics are in optimizers alone.
"""


def nondeterminism(node: Node) -> str | None:
    """Why running a node again on the same operands may give other numbers; None if it does not.

    Settings that make torch's kernels deterministic are left aside: they may change within a step.

    Args:
        node: Any node; what it draws from the generator is left aside (see `Trait.RANDOM`).
    """
    library, _, _ = node.op.partition(".")
    name = node.op.rpartition(".")[0]
    if library == "aten":
        name = name.removesuffix("_")  # the kernel is the same if it writes in place
    if name in _KNOWN:
        return None
    if library not in _LIBRARIES:
        return f"an operation of {library}, of which nothing is known"
    devices = {value.type.device.partition(":")[0] for value in (*node.operands, *node.values)}
    on_cpu = devices <= {"cpu"}
    for rule in NONDETERMINISTIC:
        if name in rule.operations and (rule.on_cpu or not on_cpu) and not rule.is_equal(node, on_cpu):
            return rule.reason
    return None
