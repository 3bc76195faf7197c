"""Specializes one graph: for the sizes of its import, for those that a tracer asks for, and for any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ...ir.errors import IrcError, UnsupportedError
from .program import Program, Shapes
from .tensors import Static

__all__ = ["Placement", "Specializations"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_MOST = 16
"""Programs for other sizes that are kept; the one that was used longest ago goes first."""

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


class Placement:
    """Records the devices and types that `module.to(...)` has given to a module's constants."""

    def __init__(self) -> None:
        self._samples = {dtype: torch.empty(0, dtype=dtype) for dtype in _DTYPES}

    def change(self, function: Callable[[Tensor], Tensor]) -> bool:
        """Applies to the samples what is applied to the module's tensors; tells whether they change."""
        before = {dtype: (sample.device, sample.dtype) for dtype, sample in self._samples.items()}
        self._samples = {dtype: function(sample) for dtype, sample in self._samples.items()}
        return before != {dtype: (sample.device, sample.dtype) for dtype, sample in self._samples.items()}

    def placed(self, tensor: Tensor) -> Tensor:
        """A constant of the file's type as the module has it by now."""
        sample = self._samples.get(tensor.dtype)
        return tensor if sample is None else tensor.to(sample.device, sample.dtype)


@dataclass(frozen=True)
class _WithoutGraph:
    """Stands in for a graph that is gone: returns the program for any sizes.

    Args:
        shapes: The shapes of the import.
        program: The program for any sizes, without its tensors; otherwise the reason why there is none.
        read: The indices of the constants that it reads as tensors.
    """

    shapes: Shapes
    program: Program | str
    read: tuple[int, ...] = ()

    @classmethod
    def of(cls, first: Program, make: Callable[[Shapes], Program]) -> _WithoutGraph:
        """Keeps what remains without a graph; constants that equal those of the first program are shared."""
        try:
            program = make(tuple(None for _ in first.shapes))
        except IrcError as error:
            return cls(first.shapes, f"{error.code} {error.message}")
        known = {_content(static): static for static in first.statics}
        statics = tuple(known.get(_content(static), static) for static in program.statics)
        return cls(first.shapes, replace(program, statics=statics, tensors={}), tuple(program.tensors))

    def __call__(self, shapes: Shapes) -> Program:
        """Returns the program for any sizes, whatever the shapes.

        Raises:
            UnsupportedError: IRC324 when there is none.
        """
        if isinstance(self.program, str):
            raise UnsupportedError(
                "IRC324",
                f"the module was imported for inputs of shapes {_listed(self.shapes)}; for those of shapes"
                f" {_listed(shapes)} it needs the graph, which pickling left behind, for there is no program"
                f" for any shapes: {self.program}",
                help="import the file again, and load_state_dict",
            )
        return replace(self.program, tensors={i: self.program.statics[i].tensor() for i in self.read})


def _content(static: Static) -> tuple[Any, ...]:
    return static.dtype, static.array.dtype, static.array.shape, static.array.tobytes()


class Specializations:
    """Holds the programs of a graph, each made when a run needs it.

    A run with data computes the sizes that the import did not know, in one program for any sizes. A tracer
    does not see data: it gets a program that is specialized for the shapes of its inputs.

    Args:
        first: The program of the import; the module keeps its constants.
        make: Makes the program for given shapes, `None` leaving one to each run.
    """

    def __init__(self, first: Program, make: Callable[[Shapes], Program]) -> None:
        self.first = replace(first, tensors={})
        self.placement = Placement()
        self._make: Callable[[Shapes], Program] | None = make
        """None if there is only the first, which is the one for any sizes."""
        self._others: dict[Shapes, Program | UnsupportedError] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the first program and the one for any sizes, without the graph."""
        make = self._make
        if not isinstance(make, _WithoutGraph) and make is not None:
            make = None if self._is_open else _aside(_WithoutGraph.of, self.first, make)
        return {"first": self.first, "placement": self.placement, "make": make}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled or copied object."""
        self.first, self.placement, self._make = state["first"], state["placement"], state["make"]
        self._others, self._lock = {}, threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Specializations:
        """A copy with the same graph, which never changes."""
        twin = Specializations.__new__(Specializations)
        twin.__setstate__({"first": self.first, "placement": Placement(), "make": self._make})
        twin.placement.__dict__.update(self.placement.__dict__)
        twin._others = dict(self._others)
        return twin

    @property
    def _is_open(self) -> bool:
        """Whether the first program is the one for any sizes."""
        return all(shape is None for shape in self.first.shapes)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Moves the constants of all programs as those of the first one: to a device, to a type."""
        if self.placement.change(function):
            self._others.clear()

    def fitting(self, shapes: Shapes, *, is_traced: bool) -> Program:
        """The program to run on inputs of these shapes.

        Args:
            shapes: The shapes of the inputs.
            is_traced: Whether a tracer runs it, which sees shapes and no data.

        Raises:
            UnsupportedError: IRC302, IRC307 as `from_onnx`, for these shapes; IRC324 when there is no graph
                any more to make it from, or no weight that it would read.
        """
        is_symbolic = not all(type(n) is int for shape in shapes for n in shape or ())
        anything = tuple(None for _ in shapes)
        wanted = anything if is_symbolic else shapes
        if self.first.shapes == wanted or (self._is_open and not is_traced) or self._make is None:
            return self.first
        if not is_traced and not is_symbolic:
            try:
                return self._kept(anything)
            except UnsupportedError:  # a node needs sizes, or a weight that these sizes may not need
                pass
        return self._kept(wanted)

    def output_shapes(self, shapes: Shapes) -> Shapes:
        """The shapes of the outputs for inputs of these shapes.

        Raises:
            UnsupportedError: As `fitting`.
        """
        if self.first.shapes == shapes or self._make is None:
            return self.first.output_shapes
        return self._made(self._make, shapes).output_shapes

    def _kept(self, shapes: Shapes) -> Program:
        with self._lock:
            found = self._others.pop(shapes, None)
            if found is None:
                assert self._make is not None
                try:
                    found = self._made(self._make, shapes)
                except UnsupportedError as error:
                    found = error
            self._others[shapes] = found
            while len(self._others) > _MOST:
                self._others.pop(next(iter(self._others)))
        if isinstance(found, UnsupportedError):
            raise found
        return found

    def _made(self, make: Callable[[Shapes], Program], shapes: Shapes) -> Program:
        return _aside(self._placed, make, shapes)

    def _placed(self, make: Callable[[Shapes], Program], shapes: Shapes) -> Program:
        program = make(shapes)
        return replace(program, tensors={i: self.placement.placed(t) for i, t in program.tensors.items()})


def _aside(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Calls a function in another thread, in which no tracing mode is active."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args, **kwargs).result()


def _listed(shapes: Shapes) -> str:
    return ", ".join("?" if shape is None else str(list(shape)) for shape in shapes)
