"""Costs of operations: seconds, and bytes of workspace, analytic or taken from a profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from ...ir import (
    FUSED,
    GENERATOR_STATE,
    KERNELS_FORM,
    Argument,
    DType,
    Graph,
    Node,
    Storage,
    TensorType,
    Trait,
    Value,
    values_in,
)
from .machines import Machine
from .no_workspace import is_elementwise, is_plain_product
from .packed_products import is_packed_product, is_unpacking, packed_product_flops, unpacked_bytes

__all__ = ["Costs", "StepCost", "analytic_costs", "shared_operands", "signature"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and workspace of every operation of a graph.

    Args:
        seconds: The time of one run.
        workspace_bytes: The bytes that the allocator hands out while the operation runs, beyond its results
            and less the operands that these overwrite.
        source: The origin, `analytic:<machine>` or `profile:<device>`.
        has_times: Whether the seconds are of that origin. If not, they stand in for times that do not matter,
            because nothing will be computed twice.
    """

    seconds: Mapping[Node, float]
    workspace_bytes: Mapping[Node, int]
    source: str
    has_times: bool = True

    @property
    def is_analytic(self) -> bool:
        """Whether workspaces are upper bounds, and not measured."""
        return self.source.startswith("analytic")

    def step_seconds(self, graph: Graph) -> float:
        """The time of one training step that runs every operation once."""
        return sum(self.seconds[node] for node in graph.operations)

    @staticmethod
    def united(tables: Sequence[Costs]) -> Costs:
        """The costs of several graphs as one table; they have one origin."""
        return replace(
            tables[0],
            seconds={node: seconds for table in tables for node, seconds in table.seconds.items()},
            workspace_bytes={n: nbytes for table in tables for n, nbytes in table.workspace_bytes.items()},
        )


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of an optimizer for one parameter; as keywords of a node that applies a gradient.

    Args:
        state_bytes: The bytes that it keeps from step to step, on the parameter's device.
        workspace_bytes: The bytes that a step takes from the allocator beyond that while it runs.
        seconds: The time of one step.
        moving_bytes: The part of the state in tensors that are large enough to live in a tier.
    """

    state_bytes: int = 0
    workspace_bytes: int = 0
    seconds: float = 0.0
    moving_bytes: int = 0

    @staticmethod
    def of(node: Node) -> StepCost:
        """The cost that stands at a node; an empty one if a gradient is accumulated."""
        given: dict[str, Any] = dict(node.keywords)
        return StepCost(**given)

    @property
    def keywords(self) -> tuple[tuple[str, Argument], ...]:
        """The cost as keywords of a node."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))


def analytic_costs(graph: Graph, machine: Machine) -> Costs:
    """Models costs from FLOPs, bytes and a machine description, with an upper bound for the workspace.

    An operation moves its operands and results once. FLOPs are those of torch's own formulas
    (`torch.utils.flop_counter`); an operation without a formula there counts one for each element of its
    results. The workspace bound is one reordered copy of each operand and each result, for the operations
    whose kernels are known to reorder (convolutions, attention, matrix products, interpolation), nothing
    for those that go element by element in one type, and the largest tensor for the others. Copies for a
    convolution have their channels rounded up to whole blocks, in each group. A product takes no more
    than the machine says, and rows are read from a table where they lie. A product with a packed matrix
    unpacks it first. The bound is proved for no operation; none of 8,422 distinct operations of 142
    models exceeds it. Exchanges of pipeline stages cost nothing here (see `ir.pipeline.timing`).
    Accumulating a gradient needs no workspace. The step of an optimizer reads and writes its state once,
    and its workspace is the one that its node was given.
    """
    seconds: dict[Node, float] = {}
    workspace: dict[Node, int] = {}
    flops: dict[tuple[object, ...], float] = {}
    for node in graph.operations:
        if Trait.EXCHANGE in node.traits:
            seconds[node], workspace[node] = 0.0, 0
            continue
        moved = sum(value.type.nbytes for value in (*node.operands, *node.values))
        if node.releases is None:
            key = signature(node), *(value.type.shape for value in node.values)
            if key not in flops:
                flops[key] = packed_product_flops(node) if is_packed_product(node) else _flops(node)
            if is_packed_product(node):
                moved += 2 * unpacked_bytes(node)  # they are written, and read
            is_half = any(value.type.dtype in _HALF for value in node.values)
            seconds[node] = machine.seconds(flops[key], moved, is_half=is_half)
            written = node.written_operand
            written_bytes = 0 if written is None else written.storage.nbytes
            workspace[node] = _workspace_bound(node, moved, machine) - written_bytes
        else:
            step = StepCost.of(node)
            written = node.operands[0].type.nbytes
            seconds[node] = machine.seconds(0, moved + written + 2 * step.state_bytes)
            workspace[node] = step.workspace_bytes
    return Costs(seconds, workspace, f"analytic:{machine.name}")


_HALF = frozenset({DType.FLOAT16, DType.BFLOAT16})
_REORDERING = (
    "convolution",
    "mkldnn",
    "scaled_dot_product",
    "mm",
    "lstm",
    "rnn",
    "gru",
    "batch_norm",
    "layer_norm",
    "embedding",
    "upsample",
    "binary_cross_entropy",
)
_LOOKUP = "aten.embedding.default"
_SCRATCH_BYTES = 1 << 16
_CONVOLUTION_COPIES = 2
_CHANNEL_BLOCK = 16


def _workspace_bound(node: Node, moved_bytes: int, machine: Machine) -> int:
    if node.op == GENERATOR_STATE:
        return 0
    if "convolution" in node.op:
        weight = node.arguments[2 if "backward" in node.op else 1]
        groups = cast(int, node.arguments[9 if "backward" in node.op else 8])
        blocked_bytes = sum(
            _blocked_bytes(v.type, groups if v is weight else 0) for v in (*node.operands, *node.values)
        )
        return _CONVOLUTION_COPIES * blocked_bytes + _SCRATCH_BYTES
    if node.op == _LOOKUP and node.operands[0].type.is_contiguous:
        return moved_bytes - node.operands[0].type.nbytes + _SCRATCH_BYTES
    if is_unpacking(node):
        return _SCRATCH_BYTES
    if is_packed_product(node):
        bound = moved_bytes - unpacked_bytes(node)
        return min(bound, unpacked_bytes(node) + (machine.product_workspace_bytes or bound)) + _SCRATCH_BYTES
    if any(part in node.op for part in _REORDERING):
        bound = moved_bytes + _SCRATCH_BYTES
        return min(bound, machine.product_workspace_bytes or bound) if is_plain_product(node) else bound
    if is_elementwise(node) or _is_plain_copy(node):
        return _SCRATCH_BYTES
    largest = max((value.type.nbytes for value in (*node.operands, *node.values)), default=0)
    return largest + _SCRATCH_BYTES


def _is_plain_copy(node: Node) -> bool:
    """Whether a node copies a tensor into another one of its type of elements and device."""
    if node.op != "aten.copy_.default":
        return False
    mine, its = (value.type for value in values_in(node.arguments[:2]))
    return (mine.dtype, mine.device) == (its.dtype, its.device)


def _blocked_bytes(type: TensorType, groups: int) -> int:
    """Bytes of a tensor in the layout of CPU convolutions: channels in whole blocks.

    Args:
        type: The tensor's type.
        groups: Those of a weight, which has blocks of its own in both channels of each; 0 for other tensors.
    """
    if len(type.shape) < 3:
        return type.nbytes
    outer, channels, *space = type.shape
    outer = groups * _whole_blocks(outer // groups) if groups else outer
    return outer * _whole_blocks(channels) * math.prod(space) * type.dtype.itemsize


def _whole_blocks(channels: int) -> int:
    return -(-channels // _CHANNEL_BLOCK) * _CHANNEL_BLOCK


def _flops(node: Node) -> float:
    import torch
    from torch.utils.flop_counter import flop_registry

    namespace, name, _ = node.plain_op.split(".", 2)
    packet = getattr(getattr(torch.ops, namespace), name, None)
    formula: Any = flop_registry.get(packet)
    elements = float(sum(value.type.numel for value in node.values))
    if formula is None:
        return elements

    def stand_in(argument: Argument) -> Any:
        if isinstance(argument, Value):
            dtype = getattr(torch, argument.type.dtype.value)
            return torch.empty(argument.type.shape, dtype=dtype, device="meta")
        if isinstance(argument, tuple):
            return [stand_in(item) for item in argument]
        return argument

    results = tuple(None if value is None else stand_in(value) for value in node.results)
    arguments = [stand_in(argument) for argument in node.arguments]
    if "scaled_dot_product" in name:
        arguments = _with_all_heads(arguments, is_backward="backward" in name)
    keywords = {key: stand_in(argument) for key, argument in node.keywords}
    return float(formula(*arguments, **keywords, out_val=results if node.is_sequence else results[0]))


def _with_all_heads(arguments: list[Any], *, is_backward: bool) -> list[Any]:
    """The arguments of an attention, with a key and a value for each head of the queries.

    torch's formulas know no heads that share them.
    """
    first = 1 if is_backward else 0
    query, *shared = arguments[first : first + 3]
    shared = [each.new_empty(*query.shape[:2], *each.shape[2:]) for each in shared]
    return [*arguments[: first + 1], *shared, *arguments[first + 3 :]]


def signature(node: Node) -> str:
    """The key of an operation's cost: its name, its constants, its operands' types, its results' bytes.

    Operands that are the same value, or that share a storage, are marked as such; names do not matter. The
    workspace is what is taken beside the results, so that it counts how large these are.
    """
    order = {value: index for index, value in enumerate(node.operands)}
    words = {value: f"${index}:{describe_type(value.type)}" for value, index in order.items()}
    for first, *others in shared_operands(node):
        for other in others:
            words[other] += f"^{order[first]}"
    parts = [_describe(argument, words) for argument in node.arguments]
    parts += [f"{key}={_describe(argument, words)}" for key, argument in node.own_keywords]
    form = f"#{KERNELS_FORM}" if node.op == FUSED else ""
    results = {value.storage: None for value in node.values}
    sizes = " ".join(str(storage.nbytes) for storage in results if storage not in {v.storage for v in order})
    return f"{node.op}{form}({', '.join(parts)}) -> {sizes}"


def shared_operands(node: Node) -> list[list[Value]]:
    """Groups operands that share a storage: what a library's kernel takes can depend on that.

    Operations that write see each operand by itself: they refuse some views of what they write. So do
    kernels that are made of elementwise operations.
    """
    if node.op == FUSED or Trait.EFFECT in node.traits or node.releases is not None:
        return []
    groups: dict[tuple[Storage, DType], list[Value]] = {}
    for value in node.operands:
        groups.setdefault((value.storage, value.type.dtype), []).append(value)
    return [values for values in groups.values() if len(values) > 1]


def _describe(argument: Argument, words: Mapping[Value, str]) -> str:
    if isinstance(argument, Value):
        return words[argument]
    if isinstance(argument, tuple):
        return f"[{', '.join(_describe(item, words) for item in argument)}]"
    return repr(argument)


def describe_type(type: TensorType) -> str:
    """A tensor type in one word, strides and device included."""
    shape = "x".join(map(str, type.shape))
    strides = "x".join(map(str, type.strides))
    return f"{type.dtype.value}[{shape}]{{{strides}}}@{type.device}"
