"""The programs of one graph: for the sizes of its import, for those that a tracer asks for, and for any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import Location, UnsupportedError
from .program import Program, Shapes

__all__ = ["Placement", "Programs"]

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
    """Where a module's constants are, and of which types: what `module.to(...)` has made of each type."""

    def __init__(self) -> None:
        self._samples = {dtype: torch.empty(0, dtype=dtype) for dtype in _DTYPES}

    def change(self, function: Callable[[Tensor], Tensor]) -> bool:
        """Do to the samples what is done to the module's tensors; whether that changes anything."""
        before = {dtype: (sample.device, sample.dtype) for dtype, sample in self._samples.items()}
        self._samples = {dtype: function(sample) for dtype, sample in self._samples.items()}
        return before != {dtype: (sample.device, sample.dtype) for dtype, sample in self._samples.items()}

    def placed(self, tensor: Tensor) -> Tensor:
        """A constant of the file's type as the module has it by now."""
        sample = self._samples.get(tensor.dtype)
        return tensor if sample is None else tensor.to(sample.device, sample.dtype)


class Programs:
    """The programs of a graph, made when a run needs them.

    Where data are at hand, sizes that the import did not know are settled by each run anew, in one program
    for any sizes. A tracer sees no data: it gets a program that is settled for the shapes it brings.

    Args:
        first: The program of the import; the module keeps its constants.
        make: Makes the program for given shapes, `None` leaving one to each run.
    """

    def __init__(self, first: Program, make: Callable[[Shapes], Program]) -> None:
        self.first = replace(first, tensors={})
        self.placement = Placement()
        self._make: Callable[[Shapes], Program] | None = make
        self._others: dict[Shapes, Program | UnsupportedError] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the first program, without the graph."""
        return {"first": self.first, "placement": self.placement}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Without the graph, no other program can be made."""
        self.first, self.placement = state["first"], state["placement"]
        self._make, self._others, self._lock = None, {}, threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Programs:
        """A copy with the same graph, which never changes."""
        twin = Programs.__new__(Programs)
        twin.__setstate__({"first": self.first, "placement": Placement()})
        twin.placement.__dict__.update(self.placement.__dict__)
        twin._make, twin._others = self._make, dict(self._others)
        return twin

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Make the constants of other programs as those of the first become: on a device, of a type."""
        if self.placement.change(function):
            self._others.clear()

    def fitting(self, shapes: Shapes, *, is_traced: bool) -> Program:
        """The program to run on inputs of these shapes.

        Args:
            shapes: Of the inputs.
            is_traced: Whether a tracer runs it, which sees shapes and no data.

        Raises:
            UnsupportedError: IRC302, IRC307 as `from_onnx`, for these shapes; IRC324 when there is no graph
                any more to make it from, or no weight that it would read.
        """
        is_symbolic = not all(type(n) is int for shape in shapes for n in shape or ())
        anything = tuple(None for _ in shapes)
        wanted = anything if is_symbolic else shapes
        if self.first.shapes == wanted or (self.first.shapes == anything and not is_traced):
            return self.first
        if self._make is None:
            return self._without_graph(shapes, is_traced)
        if not is_traced and not is_symbolic:
            try:
                return self._kept(anything)
            except UnsupportedError:  # a node needs sizes, or a weight that these sizes may not need
                pass
        return self._kept(wanted)

    def _without_graph(self, shapes: Shapes, is_traced: bool) -> Program:
        if self.first.sized_by is None and (self.first.knows(shapes) or not is_traced):
            return self.first
        raise UnsupportedError(
            "IRC324",
            f"the module was imported for inputs of shapes {_listed(self.first.shapes)}; for those of shapes"
            f" {_listed(shapes)} it needs the graph, which pickling leaves behind",
            at=Location(onnx_node=self.first.sized_by),
            help="import the file again, and load_state_dict",
        )

    def output_shapes(self, shapes: Shapes) -> Shapes:
        """The shapes of the outputs for inputs of these shapes.

        Raises:
            UnsupportedError: As `fitting`.
        """
        if self.first.shapes == shapes:
            return self.first.output_shapes
        if self._make is None:
            return self._without_graph(shapes, is_traced=True).output_shapes
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
        with ThreadPoolExecutor(1) as aside:  # where no mode of a tracer that runs the module is active
            return aside.submit(self._placed, make, shapes).result()

    def _placed(self, make: Callable[[Shapes], Program], shapes: Shapes) -> Program:
        program = make(shapes)
        return replace(program, tensors={i: self.placement.placed(t) for i, t in program.tensors.items()})


def _listed(shapes: Shapes) -> str:
    return ", ".join("?" if shape is None else str(list(shape)) for shape in shapes)
