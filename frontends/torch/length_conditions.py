"""The lengths for which a model runs as it does on its example: a trace with one size as a symbol tells."""

# Symbolic shapes have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ...ir import UnsupportedError
from ...ir.scalars import is_same

__all__ = ["Axes", "SymbolicLength"]

Axes = Mapping[int, tuple[int, ...]]
"""The dimensions that have the length, by the index of the tensor among those of a call."""

_FUNCTIONS = {
    "FloorDiv": np.floor_divide,
    "CleanDiv": np.floor_divide,
    "Mod": np.mod,
    "PythonMod": np.mod,
    "Max": np.maximum,
    "Min": np.minimum,
    "IntTrueDiv": np.true_divide,
    "FloatTrueDiv": np.true_divide,
    "ToFloat": np.float64,
}
"""The functions of torch's expressions, other than those of sympy."""

_DEGREE = 2


_MOST_READINGS = 100_000
"""The number of readings of values, each at one length, after which it is not told what they decide."""


class SymbolicLength:
    """A length as a symbol of torch's, for one trace.

    Args:
        axes: The dimensions that have it.
        first: The smallest length that is asked for.
        last: The largest; the tensors that are traced have it.
    """

    def __init__(self, axes: Axes, first: int, last: int) -> None:
        self.axes, self.length = axes, last
        self.lengths = np.arange(first, last + 1)
        self.holds = np.ones(len(self.lengths), dtype=bool)
        self.readings = 0
        self.shapes = ShapeEnv(duck_shape=False, specialize_zero_one=True)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.shapes)
        self.symbol: Any = None

    def tensors(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns stand-ins for the tensors of a call, on which the length is a symbol."""
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        with torch.no_grad():
            line = torch.empty(self.length)
        size = self.mode.from_tensor(line, source=ConstantSource("length"), symbolic_context=context).shape[0]
        self.symbol = cast(Any, size).node.expr
        return tuple(self._stand_in(index, tensor, size) for index, tensor in enumerate(tensors))

    def _stand_in(self, index: int, tensor: Tensor, size: Any) -> Tensor:
        places = self.axes.get(index, ())
        if not places:
            return self.mode.from_tensor(tensor, static_shapes=True)
        shape = [size if place in places else each for place, each in enumerate(tensor.shape)]
        with self.mode:
            made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        return made.requires_grad_(tensor.requires_grad)

    def number(self, symbolic: Any, length: int) -> Any:
        """The number that an expression of the symbol is at a length."""
        expression = symbolic.node.expr
        found = (
            length if expression == self.symbol else expression.xreplace({self.symbol: sympy.Integer(length)})
        )
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(symbolic)]
        return kind(found)

    def read(self, value: Callable[[int], Any]) -> Any:
        """What is read of a value that depends on the length; others than it reads so are left out.

        Raises:
            UnsupportedError: IRC351 after too many readings.
        """
        self.readings += int(self.holds.sum())
        if self.readings > _MOST_READINGS:
            raise UnsupportedError("IRC351", "the model reads too many values that depend on the length")
        read = value(self.length)
        for place in np.flatnonzero(self.holds):
            found = value(int(self.lengths[place]))
            self.holds[place] = is_same(found, read)
        return read

    def holding(self, joint: torch.fx.GraphModule) -> int:
        """Returns the smallest length from which on, up to the largest, the trace is that of the symbol.

        Args:
            joint: The graph that was traced.

        Raises:
            UnsupportedError: IRC351 if the length decides in a way that cannot be told for other lengths.
        """
        for guard in self.shapes.guards:
            self.holds &= self._evaluated(guard.expr, str(guard.sloc)).astype(bool)
        bounds = self.shapes.var_to_range[self.symbol]
        self.holds &= (self.lengths >= int(bounds.lower)) & (self.lengths <= bounds.upper)
        fixed = self.shapes.replacements.get(self.symbol)
        if fixed is not None:
            self.holds &= self.lengths == (int(fixed) if fixed.is_number else -1)
        failing = np.flatnonzero(~self.holds)
        start = int(failing[-1]) + 1 if len(failing) else 0
        for expression in self._sizes(joint):
            if expression.is_polynomial(self.symbol) and sympy.degree(expression, self.symbol) <= _DEGREE:
                continue
            numbers = self._evaluated(expression, "a size")[start:]
            if np.diff(numbers, _DEGREE + 1).any():
                raise UnsupportedError("IRC351", f"a size is {expression} of the length {self.symbol}")
        return int(self.lengths[start])

    def _evaluated(self, expression: Any, where: str) -> Any:
        """Returns what an expression of the length is at each length."""
        if expression.free_symbols - {self.symbol}:
            raise UnsupportedError("IRC351", f"values of tensors decide, as well as the length ({where})")
        function = sympy.lambdify([self.symbol], expression, modules=[_FUNCTIONS, "numpy"])
        try:
            return np.broadcast_to(np.asarray(function(self.lengths)), self.lengths.shape)
        except (NameError, TypeError) as error:  # one of torch's functions that is not among these
            raise UnsupportedError(
                "IRC351", f"{where} is {expression} of the length {self.symbol}"
            ) from error

    def _sizes(self, joint: torch.fx.GraphModule) -> Iterator[Any]:
        """Yields the expressions of the length that are sizes or numbers in the graph."""
        found: set[Any] = set()
        for node in joint.graph.nodes:
            value = node.meta.get("val")
            for each in value if isinstance(value, tuple | list) else (value,):
                if isinstance(each, Tensor):
                    found.update(
                        s.node.expr for s in (*each.shape, *each.stride()) if isinstance(s, py_sym_types)
                    )
                elif isinstance(each, py_sym_types):
                    found.add(each.node.expr)
        yield from found
