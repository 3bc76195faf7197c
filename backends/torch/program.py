"""A schedule compiled to Python functions, with what is known of its inputs and gradients."""

from __future__ import annotations

import linecache
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any

from torch import Tensor

from ...ir import (
    PAUSE,
    RECEIVE,
    SEND,
    Compute,
    Gradients,
    Graph,
    Input,
    InputRole,
    Loss,
    Output,
    OutputRole,
    Region,
    Schedule,
    Trait,
    Value,
)
from .emit import emit_source, is_partial
from .gradient_dependencies import reached_by
from .offload.table import CopyTable, copy_table

__all__ = ["Program", "Released", "compile_program"]


@dataclass(frozen=True, slots=True)
class Released:
    """A parameter whose gradient is released within backward.

    Args:
        index: Its place among the static inputs.
        depends: The forward outputs whose gradients its own is computed from.
        tied: The places of the same tensor under other names.
    """

    index: int
    depends: frozenset[int]
    tied: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A schedule, compiled; it holds no parameter and can be shared.

    Args:
        statics: The graph's inputs but the tangents, in order.
        tangents: For each forward output, whether a gradient of it is taken.
        gradients: For each static input, its place among the gradients, or None.
        depends: For each gradient, the forward outputs whose gradients it is computed from.
        differentiable: Indices of the static inputs to which a gradient flows; the others that ask for one
            are not part of the autograd graph, as in eager.
        kind: What becomes of the gradients of parameters.
        released: The parameters whose gradients are released within backward, by name.
        read_by_backward: Indices of the static inputs that backward reads and forward does not write.
        read_again: Those of them that only what is computed again reads.
        written: Indices of the static inputs that forward writes.
        forward: The emitted function.
        backward: The emitted function; it takes which outputs have a gradient where that matters, and a
            `OptimizersInBackward` where gradients are released.
        is_partial: Whether it matters: parts of backward come from some outputs alone.
        feeds: For the outputs that other outputs are computed from, which these are.
        parts: The outputs whose gradients meet in an operation that reads what forward left, for each such.
        constants: Values of the constant inputs.
        source: The emitted source.
        forwards_in_flight: How many calls the plan counted whose backward has not run.
        exchanges: Whether it is a pipeline stage that sends or receives: both functions take what does that.
        pauses: Whether backward is a generator that yields once.
        copies: What is copied to tiers; where anything is, both functions take a `Session` last.
    """

    statics: tuple[Input, ...]
    tangents: tuple[Input | None, ...]
    gradients: tuple[int | None, ...]
    depends: tuple[frozenset[int], ...]
    differentiable: tuple[int, ...]
    kind: Gradients
    released: Mapping[str, Released]
    read_by_backward: tuple[int, ...]
    read_again: frozenset[int]
    written: tuple[int, ...]
    forward: Callable[..., tuple[list[Tensor], list[Tensor]]]
    backward: Callable[..., Any]
    constants: Mapping[str, Tensor]
    source: str = field(repr=False)
    forwards_in_flight: int = 1
    is_partial: bool = False
    parts: frozenset[frozenset[int]] = frozenset()
    feeds: Mapping[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    exchanges: bool = False
    pauses: bool = False
    copies: CopyTable = field(default_factory=CopyTable)

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        functions = ("forward", "backward")  # compiled from the source again
        return _again, ({f.name: getattr(self, f.name) for f in fields(self) if f.name not in functions},)


def compile_program(schedule: Schedule, constants: Mapping[str, Tensor]) -> Program:
    """Compiles the Python that `emit_source` writes for `schedule`.

    Args:
        schedule: A verified schedule.
        constants: The tensors of the graph's constant inputs, by target.
    """
    source = emit_source(schedule)
    forward, backward = _functions(source)
    graph = schedule.graph
    statics = tuple(i for i in graph.inputs if i.role is not InputRole.TANGENT)
    tangents = {i.target: i for i in graph.inputs if i.role is InputRole.TANGENT}
    outputs = [o for o in graph.outputs if o.role is OutputRole.OUTPUT]
    gradients = {o.target: k for k, o in enumerate(o for o in graph.outputs if o.role is OutputRole.GRADIENT)}
    loss = next(k for k, i in enumerate(schedule.instructions) if isinstance(i, Loss))
    after = [i.node for i in schedule.instructions[loss:] if isinstance(i, Compute)]
    after = [node for node in after if node.releases is None]
    read = {storage for node in after for storage in graph.reads(node)}
    read_once = {s for node in after if node.region is Region.BACKWARD for s in graph.reads(node)}
    written = {
        node.operands[0].storage
        for node in graph.nodes
        if Trait.EFFECT in node.traits and node.releases is None
    }
    reached = reached_by(graph)
    released = _released(graph, statics, reached)
    flows = {o.target for o in graph.outputs if o.role is OutputRole.GRADIENT and o.value is not None}
    flows |= {f"{InputRole.PARAMETER.value}:{name}" for name in released}
    return Program(
        statics=statics,
        tangents=tuple(tangents.get(str(index)) for index in range(len(outputs))),
        gradients=tuple(gradients.get(f"{i.role.value}:{i.target}") for i in statics),
        depends=tuple(
            reached.get(o.value, frozenset()) if o.value is not None else frozenset()
            for o in graph.outputs
            if o.role is OutputRole.GRADIENT
        ),
        differentiable=tuple(
            k for k, i in enumerate(statics) if i.requires_grad and f"{i.role.value}:{i.target}" in flows
        ),
        kind=graph.gradients,
        released=released,
        read_by_backward=tuple(k for k, i in enumerate(statics) if i.value.storage in read - written),
        read_again=frozenset(
            k for k, i in enumerate(statics) if i.value.storage in read - written - read_once
        ),
        written=tuple(k for k, i in enumerate(statics) if i.value.storage in written),
        forward=forward,
        backward=backward,
        constants=constants,
        source=source,
        forwards_in_flight=graph.forwards_in_flight,
        is_partial=is_partial(graph),
        parts=frozenset(_parts(graph, reached)),
        feeds=_feeds(graph, outputs, {int(target) for target in tangents}),
        exchanges=any(node.op in (SEND, RECEIVE) for node in graph.operations),
        pauses=any(node.op == PAUSE for node in graph.operations),
        copies=copy_table(schedule),
    )


_DETACH = "aten.detach.default"

_numbers = count(1)
"""Of the programs, for the file names that their tracebacks show."""


def _functions(source: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of an emitted source, whose lines stand in tracebacks."""
    filename = f"<irc program {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace)
    weakref.finalize(namespace["forward"], linecache.cache.pop, filename, None)
    return namespace["forward"], namespace["backward"]


def _again(known: Mapping[str, Any]) -> Program:
    """A program that was written down."""
    forward, backward = _functions(known["source"])
    return Program(**known, forward=forward, backward=backward)


def _parts(graph: Graph, reached: Mapping[Value, frozenset[int]]) -> Iterator[frozenset[int]]:
    for node in graph.operations:
        if any(value not in reached for value in node.operands):
            through = [reached[value] for value in node.operands if value in reached]
            yield frozenset[int]().union(*through)


def _feeds(
    graph: Graph, outputs: Sequence[Output], differentiable: AbstractSet[int]
) -> dict[int, frozenset[int]]:
    """The differentiable outputs that others are computed from, with the indices of these."""
    values = {index: value for index in differentiable if (value := outputs[index].value) is not None}
    made_of: dict[Value, frozenset[int]] = defaultdict(frozenset)
    for index, value in values.items():
        made_of[value] |= {index}
    for node in graph.operations:
        if node.region is Region.FORWARD and node.op != _DETACH:
            through = frozenset[int]().union(*(made_of[value] for value in node.operands))
            for value in node.values:
                made_of[value] |= through
    found: dict[int, frozenset[int]] = defaultdict(frozenset)
    for index, value in values.items():
        for source in made_of[value] - {index}:
            found[source] |= {index}
    return dict(found)


def _released(
    graph: Graph, statics: Sequence[Input], reached: Mapping[Value, frozenset[int]]
) -> dict[str, Released]:
    index = {static.value: k for k, static in enumerate(statics)}
    names = {static.value: static.target for static in statics}
    found: dict[str, Released] = {}
    for node in sorted(graph.releases, key=lambda node: index[node.operands[0]]):
        parameter, gradient = node.operands
        tied = (index[v] for v, first in graph.tied.items() if first is parameter and v is not parameter)
        found[names[parameter]] = Released(index[parameter], reached.get(gradient, frozenset()), tuple(tied))
    return found
