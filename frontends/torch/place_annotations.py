"""Places annotations on the operations of a graph: the innermost counts; what leaves a stretch is free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ...ir import (
    Annotation,
    Graph,
    Input,
    InputRole,
    Node,
    Policy,
    Region,
    Storage,
    Trait,
    UnsupportedError,
    Value,
)
from .annotation_scopes import Scope
from .provenance import location_of, scopes_of

__all__ = ["Note", "note_of", "place_annotations", "read_in_reentrant_checkpoints", "written_in_checkpoints"]

_POLICIES = {
    "MUST_SAVE": Policy.KEEP,
    "PREFER_SAVE": Policy.PREFER_KEEP,
    "MUST_RECOMPUTE": Policy.RECOMPUTE,
    "PREFER_RECOMPUTE": Policy.PREFER_RECOMPUTE,
    "PREFER_CPU_OFFLOAD": Policy.PREFER_KEEP,
}
"""The policies that correspond to torch's `CheckpointPolicy`."""


@dataclass(frozen=True, slots=True)
class Note:
    """Notes what is known of a traced operation.

    Args:
        scopes: The stretches that it is in, outermost first.
        tag: The name of the `CheckpointPolicy` that torch gives it, or None.
    """

    scopes: tuple[Scope, ...]
    tag: str | None


def note_of(node: fx.Node) -> Note | None:
    """The note of a traced node; None for one that no annotation is about.

    Raises:
        UnsupportedError: IRC554 for a policy that moves results to the host.
    """
    scopes = scopes_of(node)
    policy: Any = node.meta.get("recompute")
    # outside of its stretches torch leaves the last tag on every node that follows
    is_tagged = policy is not None and any(scope.annotation is None for scope in scopes)
    tag: str | None = None if policy is None or not is_tagged else policy.name
    if tag is not None and tag not in _POLICIES:
        raise UnsupportedError(
            "IRC554",
            f"CheckpointPolicy.{tag} asks to move the result of {node.target} to the host",
            at=location_of(node),
            help="return another policy, such as CheckpointPolicy.PREFER_SAVE",
        )
    return Note(scopes, tag) if scopes else None


def place_annotations(graph: Graph, notes: Mapping[str, Note], asked: Iterable[Annotation]) -> Graph:
    """The graph with an annotation on each forward operation that one is about, and what `adds_apart`.

    Of the stretches around an operation the innermost counts that says what must be: `KEEP`, or `RECOMPUTE`
    if no result leaves the stretch. Without one the innermost hint stands there. A view has no storage of
    its own: nothing can be asked for it.

    Args:
        graph: Without annotations.
        notes: By the names of nodes.
        asked: Annotations that are part of the graph whether they are about an operation or not.

    Raises:
        UnsupportedError: IRC339 for a draw in a checkpoint that draws anew in backward.
    """
    _refuse_new_draws(graph, notes)
    readers: dict[Storage, list[Node]] = {}
    for node in graph.operations:
        # an effect writes at once what stays anyway: the new value of a buffer
        if node.region is Region.FORWARD and Trait.EFFECT not in node.traits:
            for storage in graph.reads(node):
                readers.setdefault(storage, []).append(node)

    def leaves(node: Node, scope: Scope) -> bool:
        made = graph.allocates(node)
        outside = (
            reader
            for storage in made
            for reader in readers.get(storage, ())
            if reader.name not in notes or scope not in notes[reader.name].scopes
        )
        return not graph.output_storages.isdisjoint(made) or any(outside)

    def annotation_of(node: Node) -> Annotation | None:
        note = notes.get(node.name)
        if note is None or node.is_view or node.region is Region.BACKWARD:
            return None
        annotations = [(scope, _annotation_in(scope, note.tag)) for scope in reversed(note.scopes)]
        for scope, annotation in annotations:
            if annotation is None or annotation.is_hint:
                continue
            if annotation.policy is Policy.KEEP or not leaves(node, scope):
                return annotation
        return next(
            (annotation for _, annotation in annotations if annotation is not None and annotation.is_hint),
            None,
        )

    nodes = tuple(
        replace(node, annotation=annotation_of(node)) if node.name in notes else node for node in graph.nodes
    )
    placed = (node.annotation for node in nodes if node.annotation is not None)
    apart = {entry for entry, ways in _ways_to_parameters(graph, notes).items() if any(ways)}
    return replace(
        graph,
        nodes=nodes,
        annotations=tuple(dict.fromkeys((*asked, *placed))),
        inputs=tuple(replace(entry, adds_apart=entry in apart) for entry in graph.inputs),
    )


def written_in_checkpoints(graph: Graph, notes: Mapping[str, Note]) -> dict[str, list[str]]:
    """The inputs that a checkpoint writes in eager's forward and again in backward, by its line.

    Raises:
        UnsupportedError: IRC339 for one that other results are computed from: eager computes these anew from
            another value.
    """
    entries = {entry.value.storage: entry for entry in graph.inputs}
    makers = {storage: node for node in graph.nodes for storage in graph.allocates(node)}
    written: dict[str, list[str]] = {}
    for node in graph.nodes:
        if Trait.EFFECT in node.traits and node.operands[0].storage in entries:
            maker = node if node.values else makers.get(node.operands[-1].storage, node)
            scopes = notes[maker.name].scopes if maker.name in notes else ()
            for scope in (scope for scope in scopes if scope.runs_again):
                entry = entries[node.operands[0].storage]
                if _reaches_results(graph, {value.storage for value in node.operands}):
                    raise UnsupportedError(
                        "IRC339",
                        f"torch.utils.checkpoint{scope.where} writes {entry.role.value} {entry.target} and "
                        "computes from it: eager does both again in backward, and gradients are those of "
                        "another function",
                        at=maker.at,
                        help="call the function without the checkpoint: a plan recomputes by itself",
                    )
                written.setdefault(scope.where, []).append(entry.target)
    return written


def _reaches_results(graph: Graph, storages: set[Storage]) -> bool:
    """Whether a forward's outputs or its backward are computed from some storages.

    Norms that compute statistics of their own update running ones, and do not read them.
    """
    reached = set(storages)
    for node in graph.nodes:
        if Trait.EFFECT in node.traits or "batch_norm" in node.op:
            continue
        if not reached.isdisjoint(graph.reads(node)):
            if node.region is Region.BACKWARD:
                return True
            reached.update(graph.allocates(node))
    return not graph.output_storages.isdisjoint(reached)


def read_in_reentrant_checkpoints(graph: Graph, notes: Mapping[str, Note]) -> dict[str, str]:
    """The parameters that a reentrant checkpoint reads beside other code, with the line that calls it."""
    return {
        entry.target: next(way[-1].where for way in ways if way)
        for entry, ways in _ways_to_parameters(graph, notes).items()
        if len(ways) > 1
    }


def _ways_to_parameters(graph: Graph, notes: Mapping[str, Note]) -> dict[Input, set[tuple[Scope, ...]]]:
    """The trained parameters, each with the reentrant checkpoints around what reads it, by reader.

    What reads a view of it reads the parameter, but not what a checkpoint is given, which is detached.
    """
    ways: dict[Value, set[tuple[Scope, ...]]] = {}
    viewed: dict[Value, Value] = {}
    for node in graph.nodes:
        if node.region is not Region.FORWARD:
            continue
        scopes = notes[node.name].scopes if node.name in notes else ()
        if node.is_view and node.op != "aten.detach.default":
            viewed.update((value, viewed.get(node.operands[0], node.operands[0])) for value in node.values)
            continue
        for value in node.operands:
            around = tuple(scope for scope in scopes if scope.is_reentrant)
            ways.setdefault(viewed.get(value, value), set()).add(around)
    parameters = (i for i in graph.inputs if i.role is InputRole.PARAMETER and i.requires_grad)
    return {entry: ways[entry.value] for entry in parameters if entry.value in ways}


def _refuse_new_draws(graph: Graph, notes: Mapping[str, Note]) -> None:
    for node in graph.nodes:
        scopes = notes[node.name].scopes if Trait.RANDOM in node.traits and node.name in notes else ()
        for scope in scopes:
            if scope.draws_anew:
                raise UnsupportedError(
                    "IRC339",
                    f"torch.utils.checkpoint{scope.where} has preserve_rng_state=False: eager draws other "
                    "random numbers in backward than in forward, and gradients are those of another function",
                    at=node.at,
                    help="leave preserve_rng_state at True, or call the function without the checkpoint: a "
                    "plan keeps the numbers or makes the same again",
                )


def _annotation_in(scope: Scope, tag: str | None) -> Annotation | None:
    """Returns the policy of a scope; torch's own policies decide for each operation."""
    if scope.annotation is not None or tag is None:
        return scope.annotation
    return Annotation(_POLICIES[tag], f"CheckpointPolicy.{tag}{scope.where}")
