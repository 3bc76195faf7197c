"""Gradients that may differ from eager's by rounding, as sums of the same terms in another order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...ir import Delivery, Graph, InputRole, Origin, OutputRole, Sharing, UnsupportedError, Value

__all__ = ["roundings"]


def roundings(
    graph: Graph,
    trained: Iterable[Delivery],
    recurrent: Iterable[str],
    parts: Iterable[str],
    apart: Iterable[str],
    reentrant: Mapping[str, str],
    written: Mapping[str, Sequence[str]],
    *,
    as_compiled: UnsupportedError | None,
) -> Iterator[str]:
    """Describes what may differ from eager's numbers by rounding, each with the reason.

    Args:
        graph: The training graph.
        trained: The leaves of the result that the loss may use and that require a gradient.
        recurrent: The functions of recurrent layers, such as `gru`, that round in another way.
        parts: The lines that compute in place in parts of tensors.
        apart: The decompositions of which the loss may use the values alone, such as `svd`.
        reentrant: The parameters that a reentrant checkpoint reads beside other code, with its line.
        written: The buffers that a checkpoint writes, by its line.
        as_compiled: What stood in the way until the module was told that it is compiled; None if it was not.
    """
    trained = [delivery for delivery in trained if delivery.sharing is Sharing.VIEW]
    if as_compiled is not None:
        at = f" ({as_compiled.at})" if as_compiled.at else ""
        yield (
            f"all numbers: {as_compiled.message.splitlines()[0]}{at}, so it is planned as if compiled "
            "(torch.compiler.is_compiling() is true); where it then computes in another way, these are its "
            "numbers"
        )
    statics = [entry for entry in graph.inputs if entry.role is not InputRole.TANGENT]
    outputs = [o for o in graph.outputs if o.role is OutputRole.OUTPUT]
    returned = [delivery for delivery in trained if delivery.origin is Origin.INPUT]
    for place in sorted({delivery.index for delivery in returned}):
        entry = statics[place]
        has_view = any(delivery.index == place and delivery.view is not None for delivery in returned)
        if entry.requires_grad and _readers(graph, entry.value) > (0 if has_view else 1):
            yield (
                f"the gradient of {entry.role.value} {entry.target}, which the model returns too: eager adds "
                "its uses to that of the result one by one"
            )
    for place in sorted({d.index for d in trained if d.origin is Origin.OUTPUT}):
        yield (
            f"gradients through output {outputs[place].target}, of which another output is a view: eager "
            "adds them to those of its other uses one by one"
        )
    for name, line in sorted(reentrant.items()):
        yield (
            f"the gradient of parameter {name}, which a reentrant checkpoint{line} reads beside other code: "
            "eager adds what each checkpoint makes of it to .grad by itself"
        )
    for line, buffers in sorted(written.items()):
        yield (
            f"buffers {', '.join(sorted(set(buffers)))}, which the checkpoint{line} writes: eager writes "
            "again when backward runs the checkpoint again, and a plan does once a step"
        )
    for name in sorted(set(recurrent)):
        kind = name.partition("_")[0].upper()
        yield f"numbers of {kind} layers: eager sums in other orders"
    for line in sorted(set(parts)):
        yield f"what is computed from the part of a tensor that {line} writes in place: it is planned apart"
    for name in sorted(apart):
        yield f"gradients through {name}, if the loss uses its values alone: eager leaves out terms of zeros"


def _readers(graph: Graph, value: Value) -> int:
    return sum(value in node.operands for node in graph.nodes)
