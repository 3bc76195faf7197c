"""Code of torch.jit within a model: what it holds outside of Python, and whether it can be traced."""

# torch.jit has no public way to what a scripted module holds.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import enum
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "ScriptTable",
    "as_written",
    "bound",
    "is_method_of",
    "is_scripted",
    "rounds_otherwise",
    "script_settings",
    "unoptimized",
    "untraceable",
]

_BESIDE_OPERATIONS = ("prim::SetAttr", "prim::CallFunction", "prim::PythonOp", "prim::Print")
"""What a graph may hold that no trace sees, or that is not in its inlined form."""
_KERNELS = ("lstm", "gru", "rnn_tanh", "rnn_relu", "quantized")
"""Operations that a plan takes apart where Python calls them."""
_RANDOM = ("dropout", "rand", "bernoulli", "normal", "multinomial", "uniform", "exponential", "rrelu")
_AS_EAGER = frozenset({"aten::linear", "aten::relu"})
"""Operations whose gradients have the bits of eager in what torch.jit differentiates by its own formulas."""
_MAKING = ("prim::ListConstruct", "prim::DictConstruct")
_PLAIN = (bool, int, float, complex, str, type(None), torch.device, enum.Enum)


class ScriptTable(Mapping[str, Tensor | None]):
    """The parameters or buffers of a module as a mapping: those of torch.jit have one that is incomplete.

    Args:
        held: The table.
    """

    def __init__(self, held: Any) -> None:
        self._held = held

    def __getitem__(self, name: str) -> Tensor | None:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held.keys())

    def __len__(self) -> int:
        return len(self._held)


def is_scripted(module: nn.Module) -> bool:
    """Whether a module is one of torch.jit."""
    return issubclass(type(module), torch.jit.ScriptModule)


def is_method_of(method: Any, module: nn.Module) -> bool:
    """Whether a method of scripted code is one of a module; torch.jit.trace wraps the module that has it."""
    owner = vars(module).get("_actual_script_module", module)
    return vars(owner).get(method.name) is method


def untraceable(code: Any) -> str:
    """Returns what of a scripted module or function cannot be traced; "" if all of it can."""
    parts: Iterable[nn.Module] = code.modules() if isinstance(code, nn.Module) else ()
    graphs = list(_graphs(code))
    for part in parts:
        if not hasattr(part, "training"):
            return "torch.jit.freeze has made its weights constants"
        registered = {*dict(part.named_parameters()), *dict(part.named_buffers())}
        values = {name: _held(part).getattr(name) for name in _attributes(part) if name not in registered}
        for name, value in values.items():
            if isinstance(value, Tensor):
                return f"its attribute {name} is a tensor, and no buffer"
            if not _is_plain(value):
                return f"its attribute {name} holds more than numbers and text"
        graphs += _graphs(part) if part is not code else ()
    return next(filter(None, map(_why_untraceable, graphs)), "")


def rounds_otherwise(code: Any) -> bool:
    """Whether gradients of a module or a function may be computed by formulas of torch.jit's own."""
    kinds = {node.kind() for graph in _graphs(code) for node in _nodes(graph)}
    return any(kind.startswith("aten::") and kind not in _AS_EAGER for kind in kinds)


def script_settings(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Returns what a scripted module holds outside of Python besides tensors, in words: numbers, modes."""
    values = ((name, _held(module).getattr(name)) for name in _attributes(module))
    return tuple((name, repr(value)) for name, value in values if not isinstance(value, Tensor))


def _held(module: nn.Module) -> Any:
    return module._c  # pyright: ignore[reportAttributeAccessIssue]


def _attributes(module: nn.Module) -> list[str]:
    kind: Any = torch._C.ConcreteModuleType.from_jit_type(_held(module)._type())
    return sorted(kind.get_attributes())


@contextlib.contextmanager
def unoptimized() -> Generator[None]:
    """Meanwhile this thread runs scripted code as it is written, operation by operation."""
    before = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(before)


def as_written(function: Any) -> Any:
    """Returns a scripted function as it was before its first calls; what it became, torch.jit runs always."""
    return torch._C._create_function_from_graph(function.name, function.inlined_graph.copy())


def bound(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns all arguments of a call in their order: a function made of a graph has no defaults."""
    rest = function.schema.arguments[len(args) :]
    values = {each.name: each.default_value for each in rest if each.has_default_value()} | dict(kwargs)
    in_order = [values.pop(each.name) for each in rest if each.name in values]
    return [*args, *in_order, *values.values()]  # torch refuses a wrong number


def _graphs(code: Any) -> Iterator[Any]:
    """Yields the inlined graph of a function, or those of all methods of a module."""
    if not isinstance(code, nn.Module):
        yield code.inlined_graph
        return
    for name in _held(code)._method_names():
        graph = _held(code)._get_method(name).graph.copy()
        torch._C._jit_pass_inline(graph)
        yield graph


def _nodes(graph: Any) -> Iterator[Any]:
    waiting = list(graph.nodes())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [each for block in node.blocks() for each in block.nodes()]


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, _PLAIN)


def _why_untraceable(graph: Any) -> str:
    nodes = list(_nodes(graph))
    kinds = [node.kind() for node in nodes]
    if beside := next((kind for kind in kinds if kind in _BESIDE_OPERATIONS), ""):
        return beside
    if apart := next((k for k in kinds if any(name in k for name in (*_KERNELS, *_RANDOM))), ""):
        return apart
    sources = _sources(nodes)
    for node in nodes:
        for value in _written(node):
            is_tensor, origins = value.type().kind() == "TensorType", _origins(value, sources)
            if is_tensor and any(each.node().kind() == "prim::Constant" for each in origins):
                return f"{node.kind()} writes into a constant"
            if not is_tensor and not all(_is_made(each.node()) for each in origins):
                return f"{node.kind()} writes into a list or a dict from outside of the call"
    return ""


def _written(node: Any) -> Iterator[Any]:
    """Yields the values that an operation writes into."""
    if "!" in node.schema():
        arguments = torch._C.parse_schema(node.schema()).arguments
        for value, argument in zip(node.inputs(), arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield value


def _is_made(node: Any) -> bool:
    """Whether an operation makes a list or a dict anew, and returns none that it was given."""
    if node.kind().startswith("aten::"):
        return "*" not in node.schema().rpartition("->")[2]
    return node.kind() in _MAKING


def _sources(nodes: list[Any]) -> dict[str, list[Any]]:
    """Returns the values that another one may be, by its name: through loops, branches and views."""
    sources = dict[str, list[Any]]()

    def may_be(values: Iterable[Any], others: Iterable[Any]) -> None:
        for value, other in zip(values, others, strict=True):
            sources.setdefault(value.debugName(), []).append(other)

    for node in nodes:
        blocks, outputs = list(node.blocks()), list(node.outputs())
        if node.kind() == "prim::Loop":
            first, carried = list(node.inputs())[2:], list(blocks[0].inputs())[1:]
            last = list(blocks[0].outputs())[1:]
            for values in (carried, outputs):
                may_be(values, first)
                may_be(values, last)
        elif node.kind() == "prim::If":
            for block in blocks:
                may_be(outputs, block.outputs())
        elif "->" in node.schema():
            schema = torch._C.parse_schema(node.schema())
            for output, result in zip(outputs, schema.returns, strict=False):
                for value, argument in zip(node.inputs(), schema.arguments, strict=False):
                    if _names(result) & _names(argument):
                        may_be([output], [value])
    return sources


def _names(argument: Any) -> set[str]:
    """Returns the names, in a schema, of the memory that an argument or a result may lie in."""
    return set(argument.alias_info.before_set) - {"*"} if argument.alias_info is not None else set()


def _origins(value: Any, sources: Mapping[str, list[Any]]) -> list[Any]:
    """Returns the values of which a value is one, or a view, and that come from no other one."""
    origins, waiting, seen = list[Any](), [value], set[str]()
    while waiting:
        each = waiting.pop()
        if each.debugName() not in seen:
            seen.add(each.debugName())
            waiting += (more := sources.get(each.debugName(), []))
            origins += [] if more else [each]
    return origins
