"""Kernels of fused operations, which torch's Inductor compiles; equal computations share one."""

# The compiler of a traced graph has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..ir import RESULT, IrcError, Kernel, Symbol, TensorType, UnsupportedError, Value, first_line
from .arguments import empty, to_torch
from .decompositions import traced
from .draws import DROPOUT_BACKWARD, DROPOUT_PRODUCT
from .fusible import is_fusible
from .operations import function_of
from .this_thread import replaced_here

__all__ = ["Body", "Compiled", "compile_kernels", "compiled", "forget", "kernel"]

Compiled = Callable[[list[Tensor]], Sequence[Tensor]]
"""A kernel: it is given a list of its operands, which it empties, and returns its results."""

_SETTINGS: dict[str, Any] = {
    "cpp.dynamic_threads": True,  # the number of threads is that of the run, and not that of the compilation
    "max_autotune": False,
    "pattern_matcher": False,  # it drops the copies by which each result has memory of its own
    "triton.cudagraphs": False,
}

_known: dict[str, Compiled] = {}
_lock = threading.RLock()

_AT_ONCE = 8
"""The most kernels whose C++ is compiled while Inductor goes on."""


def kernel(text: str) -> Compiled:
    """Returns the kernel of a computation, compiled if no equal one was.

    Args:
        text: Of `Kernel.text`. It may come from a file: operations other than fusible ones are refused.

    Raises:
        UnsupportedError: IRC470 if the text is no computation of fusible operations, or does not compile.
    """
    found = _known.get(text)
    if found is None:
        with _lock:
            found = _known.get(text)
            if found is None:
                found = _known[text] = compiled(_read(text))
    return found


def forget() -> None:
    """Drops the kernels of this process, so that the next ones are compiled, or come from torch's cache."""
    _known.clear()


def compile_kernels(
    computations: Iterable[Kernel],
    seconds: float = math.inf,
    begun: Callable[[int, int], None] | None = None,
) -> dict[Kernel, UnsupportedError | None]:
    """Compiles the kernels of computations: the C++ of several of them at the same time.

    Args:
        computations: The computations; equal ones have one kernel.
        seconds: Seconds of the clock after which no other kernel is begun.
        begun: Told of each kernel that has to be compiled: its number, and how many there are.

    Returns:
        None for each kernel that is there, and an error (IRC470) for each that does not compile; those that
        were not begun are missing.
    """
    started = time.perf_counter()
    found = dict[Kernel, UnsupportedError | None]()
    texts = {computation: computation.text for computation in computations}
    missing = [computation for computation, text in texts.items() if text not in _known]
    found.update((computation, None) for computation in texts if computation not in set(missing))
    for first in range(0, len(missing), _AT_ONCE):
        if time.perf_counter() - started > seconds:
            break
        some = missing[first : first + _AT_ONCE]
        if begun is not None:
            begun(first + len(some), len(missing))
        with _lock:
            found.update(_compile_at_once({computation: texts[computation] for computation in some}))
    return found


def _compile_at_once(texts: Mapping[Kernel, str]) -> dict[Kernel, UnsupportedError | None]:
    """Compiles some kernels; the compilers that Inductor starts are waited for when all have been started."""
    from torch._inductor.async_compile import AsyncCompile

    wait = AsyncCompile.wait
    started: list[tuple[Any, Any]] = []

    def later(self: Any, scope: Any) -> None:
        started.append((self, scope))

    failed: dict[Kernel, UnsupportedError | None] = dict.fromkeys(texts)
    made: dict[Kernel, tuple[Compiled, list[tuple[Any, Any]]]] = {}
    with replaced_here(AsyncCompile, "wait", later):
        for computation, text in texts.items():
            started = []
            try:
                made[computation] = compiled(_read(text)), started
            except UnsupportedError as error:
                failed[computation] = error
    for computation, (run, waited_for) in made.items():
        try:
            for compiler, scope in waited_for:
                wait(compiler, scope)
            _known[texts[computation]] = run
        except Exception as error:
            failed[computation] = _not_compiled(computation, error)
    return failed


def _read(text: str) -> Kernel:
    try:
        computation = Kernel.parse(text)
        for step in computation.steps:
            if not is_fusible(step.op):
                raise ValueError(f"{step.op} cannot be fused")
            _check((step.arguments, step.keywords))
        return computation
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedError("IRC470", f"a fused operation cannot be read: {first_line(error)}") from error


def _check(argument: Any) -> None:
    """Refuses texts and names that no fusible operation has.

    Raises:
        ValueError: For one.
    """
    match argument:
        case tuple():
            for item in cast("tuple[Any, ...]", argument):
                _check(item)
        case str():
            if not _WORD.fullmatch(argument):
                raise ValueError("a text is none that an operation takes")
        case Symbol(kind, name) if kind in _CONSTANTS:
            if not isinstance(getattr(torch, name, None), _CONSTANTS[kind]):
                raise ValueError(f"{name} is no {kind}")
        case Symbol(kind, name):
            if kind not in ("operand", "device", RESULT):
                raise ValueError(f"{kind} is no kind of argument")
        case _:
            pass


_WORD = re.compile("[A-Za-z_]{0,40}")
_CONSTANTS: Mapping[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def compiled(computation: Kernel) -> Compiled:
    """Compiles the kernel of a computation; it may run once its C++ is there, as of `compile_kernels`."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._subclasses import FakeTensorMode

    body = Body(computation)
    try:
        with torch.no_grad(), torch._C._DisableAutocast(), config.patch(_SETTINGS):
            with FakeTensorMode():
                operands = [empty(type) for type in computation.operands]
                graph = traced(body, operands)
            output = next(iter(graph.graph.find_nodes(op="output")))
            output.meta["user_visible_output_idxs"] = list(range(len(computation.returns)))
            made: Any = compile_fx_inner(graph, operands)
    except Exception as error:
        raise _not_compiled(computation, error) from error
    return _checked(getattr(made, "current_callable", None) or made, computation)


def _checked(run: Compiled, computation: Kernel) -> Compiled:
    """A kernel whose results have exactly the strides of their types, and that refuses operands of others.

    A kernel reads memory by the strides that were traced; other operations take tensors as they come. Strides
    of dimensions of size one, which Inductor leaves open, decide in what layout a convolution returns.
    """
    loose: list[tuple[int, TensorType]] | None = None
    dtypes = [getattr(torch, type.dtype.value) for type in computation.operands]
    types = computation.results

    def checked(operands: list[Tensor]) -> Sequence[Tensor]:
        nonlocal loose
        if loose is None:  # Inductor's own checks leave out the types of elements
            for operand, dtype in zip(operands, dtypes, strict=True):
                if operand.dtype != dtype:
                    raise _not_as_traced(f"its elements are {operand.dtype}, not {dtype}")
        try:
            made = run(operands)
        except AssertionError as error:
            raise _not_as_traced(first_line(error)) from error
        if loose is None:
            loose = [(k, type) for k, type in enumerate(types) if made[k].stride() != type.strides]
        for k, type in loose:
            made[k].as_strided_(type.shape, type.strides)
        return made

    return checked


def _not_as_traced(why: str) -> IrcError:
    return IrcError(
        "IRC471",
        f"a kernel was given a tensor that is not laid out as it was traced: {why}",
        help="leave compiler= out for this model, and report it",
    )


def _not_compiled(computation: Kernel, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        "IRC470",
        f"torch's Inductor does not compile {', '.join(step.op for step in computation.steps[:4])}: "
        f"{first_line(error)}",
        help="leave compiler= out, or see that a C++ compiler is installed (g++)",
    )


class Body:
    """A computation as a function of tensors."""

    def __init__(self, computation: Kernel) -> None:
        self.computation = computation

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Runs the operations one by one."""
        results: list[Any] = []
        given = partial(_given, operands, results)
        for step in self.computation.steps:
            function = _FUNCTIONS.get(step.op) or function_of(step.op)
            arguments = [to_torch(argument, given) for argument in step.arguments]
            results.append(
                function(*arguments, **{key: to_torch(each, given) for key, each in step.keywords})
            )
        returned = zip(self.computation.returns, self.computation.results, strict=True)
        made = [_alone(given(symbol), type) for symbol, type in returned]
        for operand, result in self.computation.overwrites:
            made[result] = operands[operand].copy_(made[result])
        return tuple(made)


def _given(operands: Sequence[Tensor], results: Sequence[Any], argument: Value | Symbol) -> Any:
    """Returns the tensor of an operand, or of a result."""
    index, _, which = argument.name.partition(".")
    if isinstance(argument, Symbol) and argument.kind == RESULT:
        return results[int(index)][int(which)] if which else results[int(index)]
    return operands[int(index)]


def _alone(tensor: Tensor, type: TensorType) -> Tensor:
    """Returns a result that fills memory of its own, as it was traced: a part of another tensor would not."""
    if (tensor.shape, tensor.dtype) != (type.shape, getattr(torch, type.dtype.value)):
        raise ValueError(f"a result is {tensor.dtype}{list(tensor.shape)}, not the {type.dtype.value} traced")
    is_whole = tensor.untyped_storage().nbytes() == type.nbytes
    return tensor if is_whole and tuple(tensor.stride()) == type.strides else _copied(tensor, type)


def _copied(tensor: Tensor, type: TensorType) -> Tensor:
    """Copies a result to memory of its own, with the strides of a type that fills its memory."""
    order = sorted(range(tensor.dim()), key=lambda dim: (-type.strides[dim], -type.shape[dim]))
    whole = tensor.permute(order).clone(memory_format=torch.contiguous_format)
    return whole.permute([order.index(dim) for dim in range(tensor.dim())])


def _dropout_product(data: Tensor, mask: Tensor, rate: float) -> Tensor:
    return mask.to(data.dtype) * (1.0 / (1.0 - rate)) * data


def _dropout_backward(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    return mask.to(gradient.dtype) * gradient * scale


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    DROPOUT_PRODUCT: _dropout_product,
    DROPOUT_BACKWARD: _dropout_backward,
}
"""The functions of irc's own operations, without writes in place."""
