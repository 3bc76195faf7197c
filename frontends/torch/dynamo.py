"""Captures a graph that `torch.compile` (Dynamo) hands to a backend, for one set of concrete arguments."""

# Dynamo writes the source of an input into the node, as an attribute without a public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dis
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._dynamo import trace_rules
from torch._dynamo.cache_size import exceeds_recompile_limit
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ...ir import InputRole, Location, UnsupportedError, UsageError
from ...torch_support.pytree import tensors_of
from .capture import Captured, capture

__all__ = [
    "CapturedGraph",
    "call_arguments",
    "capture_graph",
    "compile_options",
    "compiled_frame",
    "draws_from_numpy",
    "graph_name",
    "is_given_up",
    "lifted_names",
    "numbers_among",
    "refuse_uncompiled_module",
]


@dataclass(frozen=True)
class CapturedGraph:
    """A graph of Dynamo turned into a training graph.

    Args:
        captured: The training graph; parameters and buffers have the names that they have in the model.
        bindings: For each static input of it, the position among the graph's arguments, with the name of
            the part that it is of a packed weight there, or, if the graph itself holds it, the tensor.
    """

    captured: Captured
    bindings: tuple[int | tuple[int, str] | Tensor, ...]

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """The static inputs in a call with these arguments."""
        found: list[Any] = []
        for each in self.bindings:
            if isinstance(each, tuple):
                position, part = each
                found.append(getattr(args[position], part))
            else:
                found.append(args[each] if isinstance(each, int) else each)
        return found


_STEP = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_TENSOR = re.compile(r"\._(?:parameters|buffers)\['[^']+'\]$")


def lifted_names(graph: fx.GraphModule) -> tuple[str | None, ...]:
    """Returns the dotted name of the parameter or buffer that each argument is; None for other arguments.

    Dynamo passes parameters and buffers as arguments. Names start at the object that its frame calls
    `self` (or whatever holds the model there).
    """
    names: list[str | None] = []
    for node in graph.graph.find_nodes(op="placeholder"):
        source = str(getattr(getattr(node, "_dynamo_source", None), "name", ""))
        name = ".".join(_STEP.findall(source)) if _TENSOR.search(source) else None
        names.append(None if name in names else name)
    return tuple(names)


def numbers_among(graph: fx.GraphModule) -> dict[fx.Node, int]:
    """Makes the graph take each number that Dynamo hands over within a tensor as what it is.

    Returns:
        The indices of the arguments that are numbers, those of sizes that are left open among them, by their
        placeholders.
    """
    places: dict[fx.Node, int] = {}
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        reads = [each for each in node.users if (each.op, each.target) == ("call_method", "item")]
        if reads and len(reads) == len(node.users) and node.meta["grapharg"].pass_arg_as_tensor:
            node.meta["example_value"] = reads[0].meta["example_value"]
            for read in reads:
                read.replace_all_uses_with(node)
                graph.graph.erase_node(read)
        if isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat):
            places[node] = index
    graph.recompile()
    return places


def _compiling() -> dict[str, Any] | None:
    """The variables of Dynamo's function that compiles a frame now."""
    frame = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "_compile" and "compiler_fn" in frame.f_locals):
        frame = frame.f_back
    return None if frame is None else frame.f_locals


def compile_options() -> Any:
    """Returns what `torch.compile` makes of its arguments while it asks a backend for its name, or else None.

    Dynamo takes the attributes of this object for those of the backend, such as `backend_ctx_ctor`.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code is not torch._TorchCompileWrapper.__init__.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def call_arguments() -> list[Tensor]:
    """The tensors that what is compiled is called with, within the context around its call."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    arguments = () if frame is None else (frame.f_locals.get("args"), frame.f_locals.get("kwargs"))
    return tensors_of(arguments)


def draws_from_numpy(graph: fx.GraphModule) -> bool:
    """Whether a graph draws for numpy from torch's generator, where the code that it was made of does not."""
    functions = (getattr(node.target, "f", None) for node in graph.graph.nodes if node.op == "call_function")
    return any(getattr(function, "__module__", "") == "torch._numpy.random" for function in functions)


def is_given_up() -> bool:
    """Whether Dynamo gives up the frame that it is to compile now, since it was compiled too often."""
    seen = _compiling()
    return seen is not None and exceeds_recompile_limit(seen["cache_size"], seen["compile_id"])[0]


def compiled_frame() -> tuple[object, list[nn.Module | Tensor]] | None:
    """The backend that Dynamo compiles a frame for now, and the modules and tensors that its code can see."""
    seen = _compiling()
    if seen is None:
        return None
    backend = seen["compiler_fn"]
    for wrapper in ("_torchdynamo_orig_backend", "compiler_fn"):
        backend = getattr(backend, wrapper, backend)
    used = {i.argval for i in dis.get_instructions(seen["code"]) if i.opname == "LOAD_GLOBAL"}
    variables = [*seen["locals"].values(), *(seen["globals"].get(name) for name in sorted(used))]
    arguments = [value for value in variables if isinstance(value, tuple | dict)]  # *args and **kwargs
    variables = [*variables, *pytree.tree_leaves(arguments)]
    return backend, [variable for variable in variables if isinstance(variable, nn.Module | Tensor)]


def refuse_uncompiled_module() -> None:
    """Refuses `module.compile()`, if that is what calls, where Dynamo would compile no frame of the module.

    Dynamo leaves torch's own code to Python at the top of a call: `Module._call_impl`, and a forward such as
    that of `nn.Sequential`. A backend is not asked then, and could neither plan nor refuse.

    Raises:
        UnsupportedError: IRC544.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code is not nn.Module.compile.__code__:
        frame = frame.f_back
    if frame is None:
        return
    module: nn.Module = frame.f_locals["self"]
    codes = [getattr(function, "__code__", None) for function in (nn.Module._call_impl, module.forward)]
    if all(code is not None and trace_rules.check(code) for code in codes):
        raise UnsupportedError(
            "IRC544",
            f"{type(module).__name__}.compile() would compile nothing, and no budget could be kept: torch "
            "leaves calls of its own modules to Python there",
            help="write model = torch.compile(model, backend=irc.backend(...)), not model.compile(...)",
        )


def graph_name(graph: fx.GraphModule) -> str:
    """Returns the place in the user's code at which a graph begins, such as `model.py:12 in forward`."""
    for node in graph.graph.nodes:
        where = _location(node)
        if node.op.startswith("call") and where is not None and where.source is not None:
            return where.source
    return "unknown line"


def capture_graph(
    graph: fx.GraphModule,
    args: Sequence[Any],
    names: Sequence[str | None],
    *,
    stepwise: bool = False,
    time_limit: float = math.inf,
) -> CapturedGraph | None:
    """The training graph of `graph(*args)`; None if there is nothing to differentiate.

    Args:
        graph: The graph that Dynamo traced.
        args: Its arguments in one call: tensors, and numbers (see `numbers_among`), for which the capture
            holds.
        names: The names of the parameters and buffers among them.
        stepwise: As in `capture`.
        time_limit: As there.

    Raises:
        TimeLimitError: As `capture`.
        UnsupportedError: IRC543 for an argument of another kind; what `capture` raises.
    """
    for arg in args:
        if not isinstance(arg, Tensor | bool | int | float):
            raise UnsupportedError(
                "IRC543",
                f"a compiled graph ({graph_name(graph)}) takes an argument of type {type(arg).__name__}",
                help="keep such objects out of the compiled function, for instance by torch.compiler.disable",
            )
    if not torch.is_grad_enabled():
        return None
    module = _LiftedGraph(graph, args, names)
    try:
        captured = capture(module, tuple(module.stand_ins), stepwise=stepwise, time_limit=time_limit)
    except UsageError as error:
        if error.code == "IRC340":
            return None
        raise
    finally:
        module.let_go()
    positions = {name: k for k, name in enumerate(names) if name is not None}
    bindings: list[int | tuple[int, str] | Tensor] = []
    for static in captured.graph.inputs:
        match static.role:
            case InputRole.PARAMETER | InputRole.BUFFER if static.target in positions:
                position = positions[static.target]
                bindings.append((position, static.part) if static.part else position)
            case InputRole.PARAMETER | InputRole.BUFFER:
                bindings.append(_held(graph, static.target.removeprefix(f"{_GRAPH}.")))
            case InputRole.INPUT:
                bindings.append(module.plain[int(static.target)])
            case InputRole.CONSTANT:
                bindings.append(captured.constants[static.target])
            case InputRole.TANGENT:
                pass
    return CapturedGraph(captured, tuple(bindings))


def _held(graph: fx.GraphModule, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    found = getattr(graph.get_submodule(path), last)
    assert isinstance(found, Tensor)
    return found


_GRAPH = "dynamo_graph"


class _LiftedGraph(nn.Module):
    """A graph of Dynamo as a module: parameters and buffers are its own again, the rest are arguments.

    Attributes:
        plain: The positions of the tensors that are arguments.
        stand_ins: Leaves that stand for these tensors while the graph is traced.
        static_inputs: The inputs of the graph that are parameters and buffers.
        current_location: The location of the operation that runs.
    """

    def __init__(self, graph: fx.GraphModule, args: Sequence[Any], names: Sequence[str | None]) -> None:
        super().__init__()
        self.add_module(_GRAPH, graph)
        self.given: list[Any] = list(args)
        self.owners: list[tuple[nn.Module, str] | None] = []
        for arg, name in zip(args, names, strict=True):
            self.owners.append(self._register(name, arg) if name is not None else None)
        pairs = enumerate(zip(args, self.owners, strict=True))
        self.plain = [k for k, (arg, owner) in pairs if owner is None and isinstance(arg, Tensor)]
        self.stand_ins = [args[k].detach().requires_grad_(args[k].requires_grad) for k in self.plain]
        self.current_location: Location | None = None
        inputs = graph.graph.find_nodes(op="placeholder")
        self.static_inputs = {
            node for node, owner in zip(inputs, self.owners, strict=True) if owner is not None
        }

    def _register(self, name: str, tensor: Tensor) -> tuple[nn.Module, str]:
        path, _, last = name.rpartition(".")
        owner: nn.Module = self
        for part in filter(None, path.split(".")):
            child = owner._modules.get(part)
            if child is None:
                child = nn.Module()
                owner.add_module(part, child)
            owner = child
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            owner.register_buffer(last, tensor)
        return owner, last

    def forward(self, *tensors: Tensor) -> Any:
        args = list(self.given)
        for index, tensor in zip(self.plain, tensors, strict=True):
            args[index] = tensor
        for index, owner in enumerate(self.owners):
            if owner is not None:
                args[index] = getattr(*owner)
        return _Located(self.get_submodule(_GRAPH), self).run(*args)

    def let_go(self) -> None:
        """Drops every tensor that was given."""
        self.given.clear()
        self.stand_ins.clear()
        self.owners.clear()
        self._modules.clear()
        self._parameters.clear()
        self._buffers.clear()


class _Located(fx.Interpreter):
    """Runs a graph, and tells the location of each operation in the user's code."""

    def __init__(self, graph: nn.Module, told: _LiftedGraph) -> None:
        super().__init__(graph)
        self.told = told

    def run_node(self, n: fx.Node) -> Any:
        self.told.current_location = _location(n)
        try:
            if n.target is tag_activation_checkpoint:  # torch's own makes of each one that is not reentrant
                return self._checkpoint(*n.args, **n.kwargs)
            return super().run_node(n)
        finally:
            self.told.current_location = None

    def _checkpoint(self, body: Any, *operands: Any, **options: Any) -> Any:
        """Calls a checkpoint as the model does: Dynamo hands on the parameters that its function reads."""
        function, *values = cast("tuple[Any, ...]", self.map_nodes_to_values((body, *operands), body))
        is_read = [isinstance(node, fx.Node) and node in self.told.static_inputs for node in operands]

        def run(*arguments: Any) -> Any:
            rest = iter(arguments)
            inputs = [value if read else next(rest) for value, read in zip(values, is_read, strict=True)]
            return fx.Interpreter(function).run(*inputs)

        policy = function.meta.get("_checkpoint_context_fn")
        more = options if policy is None else {**options, "context_fn": policy}
        arguments = [value for value, read in zip(values, is_read, strict=True) if not read]
        return checkpoint(run, *arguments, **more)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _GET_DATA:
            return args[0].data  # which modes see
        return super().call_function(target, args, kwargs)


_GET_DATA = cast(Any, torch)._C._autograd._get_data_attr
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_RESUMED = re.compile(r"torch_dynamo_resume_in_(\w+)_at_\d+")
_TORCH = str(Path(torch.__file__).parent)
_ROOT = re.compile(r"^[LG]\['[^']*'\]\.?")


def _location(node: fx.Node) -> Location | None:
    """The innermost line of the user's code that Dynamo recorded for an operation, and its module."""
    frames = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
    outside = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    modules = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    if not frames and not modules:
        return None
    source = None
    if outside:
        file, line, function = outside[-1]
        resumed = _RESUMED.fullmatch(function)
        source = f"{Path(file).name}:{line} in {resumed[1] if resumed else function}"
    module = _ROOT.sub("", modules[-1]) if modules else ""
    return Location(module=module or None, source=source)
