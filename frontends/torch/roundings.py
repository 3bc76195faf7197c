"""Gradients that may differ from eager's by rounding, as sums of the same terms in another order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...ir import (
    Delivery,
    Graph,
    InputRole,
    Origin,
    OutputRole,
    Region,
    Rounding,
    Sharing,
    UnsupportedError,
    Value,
    computed_from,
    gradients_through,
    tensor_names,
)

__all__ = ["roundings"]


def roundings(
    graph: Graph,
    trained: Iterable[Delivery],
    recurrent: Mapping[str, Iterable[str]],
    parts: Iterable[str],
    apart: Iterable[str],
    derivatives: Iterable[str],
    reentrant: Mapping[str, str],
    written: Mapping[str, Sequence[str]],
    *,
    scripted: Iterable[str],
    as_compiled: UnsupportedError | None,
) -> Iterator[Rounding]:
    """Describes what may differ from eager's numbers by rounding, each with the reason.

    Args:
        graph: The training graph.
        trained: The leaves of the result that the loss may use and that require a gradient.
        recurrent: The lines that call recurrent layers that round in another way, by their functions, such as
            `gru`.
        parts: The lines that compute in place in parts of tensors.
        apart: The decompositions of which the loss may use the values alone, such as `svd`.
        derivatives: The lines that take derivatives under autocast, and sum gradients of several uses.
        reentrant: The parameters that a reentrant checkpoint reads beside other code, with its line.
        written: The buffers that a checkpoint writes, by its line.
        scripted: The submodules and functions of torch.jit that eager runs in
            another way than they are written.
        as_compiled: What stood in the way until the module was told that it is compiled; None if it was not.
    """
    trained = [delivery for delivery in trained if delivery.sharing is Sharing.VIEW]
    if as_compiled is not None:
        at = f" ({as_compiled.at})" if as_compiled.at else ""
        yield Rounding(
            f"all numbers: {as_compiled.message.splitlines()[0]}{at}, so it is planned as if compiled "
            "(torch.compiler.is_compiling() is true); where it then computes in another way, these are its "
            "numbers"
        )
    for name in scripted:
        yield Rounding(
            f"numbers of {name}, made by torch.jit: after its first calls eager runs what "
            "torch.jit makes of it, with gradients by other formulas, and a plan what is written"
        )
    statics = [entry for entry in graph.inputs if entry.role is not InputRole.TANGENT]
    all_names = tensor_names(statics)
    values = {entry.target: entry.value for entry in statics if entry.role is not InputRole.INPUT}
    outputs = [o for o in graph.outputs if o.role is OutputRole.OUTPUT]
    for place, deliveries in _by_place(trained, Origin.INPUT).items():
        entry, views = statics[place], sum(delivery.view is not None for delivery in deliveries)
        uses = _uses(graph, entry.value)
        if entry.requires_grad and (uses > 1 or (views and len(deliveries) + uses > 2)):
            yield Rounding(
                f"the gradient of {entry.role.value} {entry.target}, which the model returns too: eager adds "
                "its uses to that of the result one by one",
                all_names[entry.value],
            )
    for place, deliveries in _by_place(trained, Origin.OUTPUT).items():
        value = outputs[place].value
        if value is None or len(deliveries) + _uses(graph, value) > 1:
            yield Rounding(
                f"gradients through output {outputs[place].target}, of which another output is a view: eager "
                "adds them to those of its other uses one by one",
                _through(graph, [value]),
            )
    for name, line in sorted(reentrant.items()):
        yield Rounding(
            f"the gradient of parameter {name}, which a reentrant checkpoint{line} reads beside other code: "
            "eager adds what each checkpoint makes of it to .grad by itself",
            all_names[values[name]],
        )
    for line, buffers in sorted(written.items()):
        names = tuple(sorted(set(buffers)))
        yield Rounding(
            f"buffers {', '.join(names)}, which the checkpoint{line} writes: eager writes "
            "again when backward runs the checkpoint again, and a plan does once a step",
            tuple(dict.fromkeys(tied for name in names for tied in all_names[values[name]])),
            is_more=True,
        )
    for name, lines in sorted(recurrent.items()):
        kind, places = name.partition("_")[0].upper(), sorted(set(lines))
        yield Rounding(
            f"numbers of {kind} layers ({', '.join(places)}): eager sums in other orders",
            _from_lines(graph, places),
        )
    for line in sorted(set(parts)):
        yield Rounding(
            f"what is computed from the part of a tensor that {line} writes in place: it is planned apart",
            _from_lines(graph, [line]),
        )
    for line in sorted(derivatives):
        yield Rounding(
            f"what is computed from derivatives that the forward takes under autocast at {line}: eager keeps "
            "its casts of leaves, and sums their gradients before it casts back",
            _from_lines(graph, [line]),
        )
    for name in sorted(apart):
        nodes = (n for n in graph.nodes if n.region is Region.FORWARD and f"linalg_{name}" in n.op)
        yield Rounding(
            f"gradients through {name}, if the loss uses its values alone: eager leaves out terms of zeros",
            _through(graph, [value for node in nodes for value in node.values]),
        )


def _through(graph: Graph, values: Sequence[Value | None]) -> tuple[str, ...] | None:
    """The tensors whose gradients come through some values; None if it is not known through which."""
    through = [value for value in values if value is not None]
    return gradients_through(graph, through) if through else None


def _from_lines(graph: Graph, lines: Sequence[str]) -> tuple[str, ...] | None:
    """The tensors that are computed from what some lines compute; None if no operation has such a line."""
    nodes = [node for node in graph.nodes if node.at is not None and node.at.source in lines]
    are_known = {node.at.source for node in nodes if node.at is not None} == set(lines)
    return computed_from(graph, nodes) if are_known else None


def _by_place(trained: Iterable[Delivery], origin: Origin) -> dict[int, list[Delivery]]:
    """The deliveries of an origin, by the place of what they are, or are views of."""
    places: dict[int, list[Delivery]] = {}
    for delivery in sorted(trained, key=lambda delivery: delivery.index):
        if delivery.origin is origin:
            places.setdefault(delivery.index, []).append(delivery)
    return places


def _uses(graph: Graph, value: Value) -> int:
    """How often the forward computes with gradients from a value, or from a view of it."""
    uses, views = 0, {value}
    for node in graph.nodes:
        if node.region is not Region.FORWARD:
            continue
        if not node.is_view:
            uses += sum(operand in views for operand in node.operands)
        elif node.op != "aten.detach.default" and node.operands[0] in views:
            views.update(node.values)
    return uses
