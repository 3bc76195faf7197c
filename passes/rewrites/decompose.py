"""Takes operations apart that are compositions of simpler ones."""

# The identity of a storage has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, fx

from ...ir import Argument, Graph, Node, Storage, TensorType, Trait, Value, allocation_bytes
from ...torch_support.arguments import constant_symbol, empty, to_torch
from ...torch_support.class_checks import CHECK_CLASSES
from ...torch_support.decompositions import COMPOSED, traced
from ...torch_support.element_types import element_type
from ...torch_support.fusible import is_fusible
from ...torch_support.operations import function_of
from ..costs.table import signature

__all__ = ["with_parts"]


def with_parts(graph: Graph, is_wanted: Callable[[Node], bool]) -> tuple[Graph, dict[Node, Node]]:
    """Returns a graph with the parts of composed operations, and the operation of which each is a part.

    Args:
        graph: The graph.
        is_wanted: Whether an operation, which can be taken apart, is.
    """
    known: dict[str, fx.Graph | None] = {}
    nodes: list[Node] = []
    whole: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op in _LOSSES and is_wanted(node):
            nodes += _with_checked_classes(node)
            continue
        if node.op not in COMPOSED or not is_wanted(node):
            nodes.append(node)
            continue
        key = signature(node)
        if key not in known:
            known[key] = _traced(node)
        found = _Parts(node, trace).nodes() if (trace := known[key]) is not None else None
        nodes += found or [node]
        whole.update((each, node) for each in found or () if not each.is_view)
    return replace(graph, nodes=tuple(nodes)), whole


_LOSSES = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")


def _with_checked_classes(node: Node) -> Iterator[Node]:
    """A loss of classes, which are checked before: a kernel cannot refuse a wrong one."""
    data, target, weight, reduction, ignored = node.arguments
    assert isinstance(data, Value) and isinstance(target, Value)
    type, name = target.type, f"{node.name}_classes"
    checked = Value(name, type, Storage(name, allocation_bytes(type.nbytes, type.device), type.device))
    classes = data.type.shape[0 if len(data.type.shape) < 2 else 1]
    yield replace(
        node,
        name=name,
        op=CHECK_CLASSES,
        arguments=(target, classes, ignored),
        results=(checked,),
        is_sequence=False,
        traits=frozenset(),
    )
    yield replace(node, arguments=(data, checked, weight, reduction, ignored))


def _traced(node: Node) -> fx.Graph | None:
    """The operation in simpler ones; None if one of these cannot be fused."""
    from torch._subclasses import FakeTensorMode

    function = function_of(node.op)

    def body(*operands: Tensor) -> Any:
        given: Any = dict(zip(node.operands, operands, strict=True)).__getitem__
        arguments = [to_torch(argument, given) for argument in node.arguments]
        return function(*arguments, **{key: to_torch(each, given) for key, each in node.keywords})

    with torch.no_grad(), FakeTensorMode():
        graph = traced(body, [empty(value.type) for value in node.operands]).graph
    graph.eliminate_dead_code()
    calls = [each for each in graph.nodes if each.op == "call_function" and not _is_item(each)]
    return graph if all(is_fusible(_name(each)) for each in calls) else None


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _name(node: fx.Node) -> str:
    return str(node.target)


class _Parts:
    """Writes the parts of one operation."""

    def __init__(self, whole: Node, graph: fx.Graph) -> None:
        self.whole, self.graph = whole, graph
        self.values: dict[fx.Node, Value | tuple[Value, ...]] = {}
        self.storages: dict[int, Storage] = {}

    def nodes(self) -> list[Node] | None:
        """Returns them; None if a result of the whole is no tensor of its own."""
        (output,) = self.graph.find_nodes(op="output")
        returned = output.args[0] if self.whole.is_sequence else (output.args[0],)
        results = {
            each: value
            for each, value in zip(returned, self.whole.results, strict=True)
            if value is not None and isinstance(each, fx.Node)
        }
        if len(results) < len(self.whole.values) or not all(starmap(_is_as_traced, results.items())):
            return None
        operands = iter(self.whole.operands)
        for each in self.graph.find_nodes(op="placeholder"):
            value = next(operands)
            self.values[each] = value
            self.storages[_storage(each.meta["val"])] = value.storage
        taken = set(self.storages.values())
        made: list[Node] = []
        for each in self.graph.nodes:
            if each.op == "call_function":
                if _is_item(each):
                    several = self.values[each.args[0]]
                    assert isinstance(several, tuple)
                    self.values[each] = several[each.args[1]]
                else:
                    made.append(self._node(each, results))
        for each, value in results.items():
            if self.values[each] is not value or value.storage in taken:
                return None
        views = {v for node in made if node.is_view for v in node.values}
        return None if views.intersection(results.values()) else made

    def _node(self, node: fx.Node, results: dict[fx.Node, Value]) -> Node:
        tensors = node.meta["val"]
        is_sequence = isinstance(tensors, tuple | list)
        items = {each.args[1]: each for each in node.users} if is_sequence else {0: node}
        values: list[Value] = []
        is_view = False
        for index, tensor in enumerate(tensors if is_sequence else [tensors]):
            each = items.get(index)
            is_view = is_view or _storage(tensor) in self.storages
            value = results.get(each) if each is not None else None
            values.append(value or self._value(f"{self.whole.name}_{node.name}_{index}", tensor))
            self.storages.setdefault(_storage(tensor), values[-1].storage)
        self.values[node] = tuple(values) if is_sequence else values[0]
        return replace(
            self.whole,
            name=f"{self.whole.name}_{node.name}",
            op=_name(node),
            arguments=tuple(self._argument(argument) for argument in node.args),
            keywords=tuple((key, self._argument(argument)) for key, argument in node.kwargs.items()),
            results=tuple(values),
            is_sequence=is_sequence,
            traits=frozenset((Trait.VIEW,)) if is_view else frozenset((Trait.REORDERED,)),
            annotation=None if is_view else self.whole.annotation,
        )

    def _value(self, name: str, tensor: Tensor) -> Value:
        type = TensorType(
            tuple(tensor.shape), element_type(tensor), tuple(tensor.stride()), str(tensor.device)
        )
        storage = self.storages.get(_storage(tensor))
        return Value(
            name, type, storage or Storage(name, allocation_bytes(type.nbytes, type.device), type.device)
        )

    def _argument(self, argument: Any) -> Argument:
        match argument:
            case fx.Node():
                found = self.values[argument]
                assert isinstance(found, Value)
                return found
            case list() | tuple():
                return tuple(self._argument(item) for item in argument)
            case _:
                return constant_symbol(argument) or argument


def _is_as_traced(node: fx.Node, value: Value) -> bool:
    """Whether the result of a part has the shape and the elements' type of that of the whole."""
    tensor: Tensor = node.meta["val"]
    return (tensor.shape, element_type(tensor)) == (value.type.shape, value.type.dtype)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
