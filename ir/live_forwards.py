"""Counts the bytes that other forwards in flight hold while one step runs.

A forward is in flight from its start until its backward has run. Let n of them be: all n forwards run, and
then their backwards, one by one in any order, or all in one `backward()`. While one of the n calls runs, each
of the others either *waits*, between its forward and its backward, or is *finished*, with its outputs still
in the caller's hands.

- A waiting call holds H bytes: its outputs, what its schedule keeps at the loss, and its loss, of which
  either the forward has run (`loss_saved_bytes`) or the backward too (tangents and `loss_held_bytes`).
- A finished call holds F bytes: its outputs, its loss, the gradients of its inputs, and the gradient of its
  loss, which is that of an output where the loss is one, or a sum with one. A `backward()` for all calls
  holds what it began with until it ends.
- Once one call is finished there is a set of gradients, G bytes, to which the later ones are added: in
  `.grad`, or within one `backward()` in the autograd engine, until that ends. If gradients are released
  there is none, or it is part of `reserved_bytes`.
- Parameters, buffers and constants are shared. Inputs are not, and count n times in `Graph.static_bytes`.

Before the loss no call is finished: the others hold at most (n - 1) H. At the loss and after it k of them may
be finished: (n - 1 - k) H + k F, and G if k > 0. That is linear in k from 1 on, so its largest value is at
k = 0, 1 or n - 1. H depends on the schedule and all else on the graph, so each of these is an `Others`.

A step may also find `.grad` there. Then calls may follow each other in any order, and any of them may share
a `backward()`, as long as no more than n are in flight or finished and held: the others hold G more than
above, and before the loss too they may be finished. That covers what is left out above as well: one
`backward()` for some of the calls after one for others.

A backward that retains its graph frees nothing that its forward saved, and takes at most H more than another:
it counts as one more forward in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .graph import Graph, Input, InputRole, OutputRole
from .types import Storage

__all__ = ["Others", "gradient_bytes", "loss_waiting_bytes", "others_after", "others_before"]


@dataclass(frozen=True, slots=True)
class Others:
    """Holds the bytes of other calls in one of the cases that may be the worst.

    Args:
        waiting: The number of them that wait.
        nbytes: The bytes that the finished ones hold, and `.grad`.
    """

    waiting: int
    nbytes: int

    def bytes_at(self, held_bytes: int) -> int:
        """The bytes that they hold if a waiting call holds `held_bytes`."""
        return self.waiting * held_bytes + self.nbytes


def others_before(graph: Graph, *, with_gradients: bool = False) -> tuple[Others, ...]:
    """The cases for what runs before the loss.

    Args:
        graph: The graph of one call.
        with_gradients: Whether `.grad` is there from the start.
    """
    count = graph.forwards_in_flight
    if not with_gradients:
        return (Others(count - 1, 0),)
    gradients, finished = gradient_bytes(graph), _finished_bytes(graph)
    return _worst(Others(count - 1 - k, gradients + k * finished) for k in (0, count - 1))


def others_after(graph: Graph, *, with_gradients: bool = False) -> tuple[Others, ...]:
    """The cases for the loss and what runs after it; the arguments are those of `others_before`."""
    count = graph.forwards_in_flight
    gradients, finished = gradient_bytes(graph), _finished_bytes(graph)
    there = gradients if with_gradients else 0
    return _worst(
        Others(count - 1 - k, there + k * finished + (gradients if k else 0))
        for k in (0, min(1, count - 1), count - 1)
    )


def _worst(cases: Iterable[Others]) -> tuple[Others, ...]:
    """The cases without those that are never above another one, most waiting first."""
    found: list[Others] = []
    for case in sorted(cases, key=lambda case: (-case.waiting, -case.nbytes)):
        if all(case.nbytes > other.nbytes for other in found):
            found.append(case)
    return tuple(found)


def loss_waiting_bytes(graph: Graph) -> int:
    """Returns the most that the loss of a waiting call holds: after its forward, or after its backward."""
    return max(graph.loss_saved_bytes, _sum(graph.tangent_storages) + graph.loss_held_bytes)


def gradient_bytes(graph: Graph) -> int:
    """Bytes of one set of the gradients that are delivered to parameters; tied ones have one gradient."""
    made = ((e, s) for e, s in _gradients(graph) if e.role is not InputRole.INPUT)
    return sum({(e.value.storage, e.value.type): s.nbytes for e, s in made}.values())


def _finished_bytes(graph: Graph) -> int:
    of_inputs = {s for e, s in _gradients(graph) if e.role is InputRole.INPUT}
    results_bytes = _sum((graph.output_storages & _results(graph)) | of_inputs)
    return results_bytes + graph.loss_held_bytes + graph.loss_tangent_bytes


def _gradients(graph: Graph) -> Iterator[tuple[Input, Storage]]:
    """The inputs whose gradients backward makes, each with the gradient's storage."""
    entries = {f"{i.role.value}:{i.target}": i for i in graph.inputs}
    results = _results(graph)
    for output in graph.outputs:
        if output.role is OutputRole.GRADIENT and output.value is not None:
            storage = output.value.storage
            if storage in graph.producers and storage not in results:
                yield entries[output.target], storage


def _results(graph: Graph) -> set[Storage]:
    """The storages that forward returns."""
    return {o.value.storage for o in graph.outputs if o.role is OutputRole.OUTPUT and o.value is not None}


def _sum(storages: Iterable[Storage]) -> int:
    return sum(storage.nbytes for storage in storages)
