"""The shapes of a graph's outputs, as expressions over the symbols of its inputs.

An expression is first guessed: sums and products of symbols from the shapes at a few sizes, and what
onnxruntime's symbolic shape inference says where these do not do. A guess is kept when it gives the shape of
the output at every size that was tried and that the graph takes; other axes stay unknown.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import onnx

from ...ir.errors import IrcError
from ..quiet import quiet
from .binding import Shape
from .module import OnnxModule

__all__ = ["output_shapes", "some_sizes"]

_BASES = ((2, 64), (2, 16), (2, 224), (2, 7), (1, 512), (2, 3), (1, 1))
"""Sizes to begin with: of leading axes, and of others."""
_SMALL = (2, 7)
"""The sizes to begin with if inference is slow, as for loops over an axis."""
_SLOW_SECONDS = 0.5
_MOST_SECONDS = 10.0
"""After these no further size is looked at."""
_PER_SYMBOL = 5
_LARGE = 4096
"""A size beyond most bounds that a graph has: a cut at 512 positions shows here."""

_Sizes = dict[str, int]


def output_shapes(module: OnnxModule) -> dict[str, Shape | None]:
    """The shape of each output.

    Args:
        module: The result of `from_onnx`.

    Returns:
        By output: for each axis its size, an expression over the symbols of the inputs such as
        `floor(width/4) + 1`, or `?`; `None` if the shape depends on data, or the value is not a tensor.
    """
    symbols = _symbols(module)
    if not symbols:
        return dict(zip(module.output_names, module.shapes_for({}), strict=True))
    probes = list(_probe(module, symbols))
    if not probes:
        return dict.fromkeys(module.output_names)
    guesses: dict[str, list[str]] | None = None
    found: dict[str, Shape | None] = {}
    for place, name in enumerate(module.output_names):
        shapes = [shapes[place] for _, shapes in probes]
        first = shapes[0]
        if first is None or any(shape is None or len(shape) != len(first) for shape in shapes):
            found[name] = None
            continue
        axes: list[int | str] = []
        for axis in range(len(first)):
            points = [(sizes, shape[axis]) for (sizes, _), shape in zip(probes, shapes, strict=True) if shape]
            expression = _fitted(points, list(symbols))
            if expression is None:
                guesses = _inferred(module, list(symbols)) if guesses is None else guesses
                said = guesses.get(name, [])
                guess = _Expression(said[axis], list(symbols)) if len(said) == len(first) else None
                holds = guess is not None and all(guess.value(sizes) == n for sizes, n in points)
                expression = guess.said() if guess is not None and holds else "?"
            axes.append(expression)
        found[name] = tuple(axes)
    return found


def some_sizes(module: OnnxModule) -> dict[str, int] | None:
    """Sizes of the open axes that the graph takes, by symbol; `None` if none was found."""
    return next((sizes for sizes, _ in _probe(module, _symbols(module))), None)


def _symbols(module: OnnxModule) -> dict[str, bool]:
    """The open axes, and whether each leads an input."""
    found: dict[str, bool] = {}
    for _, shape, _ in module.input_specs:
        for axis, size in enumerate(shape or ()):
            if isinstance(size, str):
                found[size] = found.get(size, False) or axis == 0
    return found


# Sizes to look at


@dataclass
class _Prober:
    """Looks at what a graph makes of sizes, within a time.

    Args:
        module: The graph.
        symbols: Its open axes, and whether each leads an input.
    """

    module: OnnxModule
    symbols: Mapping[str, bool]
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    """The time that the last inference took."""

    @property
    def is_late(self) -> bool:
        """Whether no further size is looked at."""
        return time.monotonic() - self.started > _MOST_SECONDS

    def sizes(self, leading: int, other: int) -> _Sizes:
        """One size for leading axes, one for others."""
        return {symbol: leading if leads else other for symbol, leads in self.symbols.items()}

    def shapes(self, sizes: _Sizes) -> list[Any] | None:
        """The shapes of the outputs; `None` if the graph does not take the sizes."""
        started = time.monotonic()
        try:
            return list(self.module.shapes_for(sizes))
        except IrcError:
            return None
        finally:
            self.seconds = time.monotonic() - started


def _probe(module: OnnxModule, symbols: Mapping[str, bool]) -> Iterator[tuple[_Sizes, list[Any]]]:
    """Sizes that the graph takes, with the shapes of its outputs: one to begin with, and others beside it."""
    prober = _Prober(module, symbols)
    base = prober.sizes(*_SMALL)
    found = prober.shapes(base)
    if found is None or prober.seconds < _SLOW_SECONDS:
        for leading, other in _BASES:
            larger = prober.shapes(prober.sizes(leading, other))
            if larger is not None:
                base, found = prober.sizes(leading, other), larger
                break
    if found is None:
        return
    yield base, found
    for symbol in symbols:
        yield from _beside(prober, base, symbol)
    doubled = {symbol: 2 * n for symbol, n in base.items()}
    found = None if prober.is_late else prober.shapes(doubled)
    if found is not None:
        yield doubled, found


def _beside(prober: _Prober, base: _Sizes, symbol: str) -> Iterator[tuple[_Sizes, list[Any]]]:
    """The same with other sizes of one symbol; a large one too, unless time grows with it as in loops."""
    n, seen, seconds = base[symbol], 0, dict[int, float]()
    for other in (n + 1, 2 * n, _LARGE, 1, n + 3, 3 * n, n + 32, n // 2, 5):
        grows = seconds.get(2 * n, 0.0) > 1.3 * seconds.get(n + 1, 0.0) + 0.02
        if other in (n, 0) or seen == _PER_SYMBOL or prober.is_late or (other == _LARGE and grows):
            continue
        sizes = base | {symbol: other}
        found = prober.shapes(sizes)
        seconds[other] = prober.seconds
        if found is not None:
            seen += 1
            yield sizes, found


# Sums and products


def _fitted(points: Sequence[tuple[_Sizes, int]], symbols: Sequence[str]) -> int | str | None:
    """A constant, a sum of multiples of symbols, or a multiple of a product of them, that fits all points."""
    base, at_base = points[0]
    slopes: dict[str, Fraction] = {}
    for symbol in symbols:
        beside = [(s, n) for s, n in points[1:] if all((s[o] == base[o]) != (o == symbol) for o in symbols)]
        if not beside:  # nothing is known of how it counts
            return None
        sizes, n = beside[0]
        slopes[symbol] = Fraction(n - at_base, sizes[symbol] - base[symbol])
    rest = Fraction(at_base) - sum(slopes[s] * base[s] for s in symbols)
    if all(rest + sum(slopes[s] * sizes[s] for s in symbols) == n for sizes, n in points):
        return _sum(slopes, rest)
    for count in range(2, len(symbols) + 1):
        for chosen in itertools.combinations(symbols, count):
            factor = Fraction(at_base, math.prod(base[s] for s in chosen))
            if all(factor * math.prod(sizes[s] for s in chosen) == n for sizes, n in points):
                return _times(factor, "*".join(map(_named, chosen)))
    return None


def _sum(slopes: Mapping[str, Fraction], rest: Fraction) -> int | str:
    used = [symbol for symbol, slope in slopes.items() if slope]
    if not used:
        return int(rest)
    if len(used) == 1 and slopes[used[0]] == 1 and not rest:
        return used[0]
    terms = [_times(slopes[symbol], _named(symbol)) for symbol in used]
    text = " + ".join(terms)
    if rest:
        text += f" {'-' if rest < 0 else '+'} {abs(rest)}"
    return text.replace("+ -", "- ")


def _named(symbol: str) -> str:
    """A symbol as a part of an expression; a file may call one `L + 1`."""
    return symbol if re.fullmatch(r"[\w.:]+", symbol) else f"({symbol})"


def _times(factor: Fraction, symbols: str) -> str:
    above = "" if factor.numerator == 1 else "-" if factor.numerator == -1 else f"{factor.numerator}*"
    return f"{above}{symbols}" + ("" if factor.denominator == 1 else f"/{factor.denominator}")


# What onnxruntime infers

_FUNCTIONS: dict[str, Callable[..., Fraction]] = {
    "floor": lambda x: Fraction(math.floor(x)),
    "ceiling": lambda x: Fraction(math.ceil(x)),
    "Max": max,
    "Min": min,
    "Mod": lambda x, y: x - y * math.floor(x / y),
}
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda x, y: x + y,
    ast.Sub: lambda x, y: x - y,
    ast.Mult: lambda x, y: x * y,
    ast.Div: lambda x, y: x / y,
}


@dataclass(frozen=True)
class _Expression:
    """An expression in which `irc_0`, `irc_1` and so on stand for the symbols.

    Args:
        source: As onnxruntime writes it.
        symbols: The number or expression that stands for each symbol.
    """

    source: str
    symbols: Sequence[str]

    def said(self) -> int | str:
        """A number, or the expression over the symbols of the file."""
        if self.source.isdecimal():
            return int(self.source)
        return re.sub(r"\birc_(\d+)\b", lambda match: _named(self.symbols[int(match[1])]), self.source)

    def value(self, sizes: _Sizes) -> Fraction | None:
        """Its value; `None` when it is none of sums, products, quotients and roundings of the symbols."""
        try:
            return self._value(ast.parse(self.source, mode="eval").body, sizes)
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, LookupError, TypeError):
            return None

    def _value(self, node: ast.expr, sizes: _Sizes) -> Fraction:
        match node:
            case ast.Constant(value=int(number)):
                return Fraction(number)
            case ast.Name(id=name) if name.startswith("irc_"):
                return Fraction(sizes[self.symbols[int(name[4:])]])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand, sizes)
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](self._value(left, sizes), self._value(right, sizes))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return _FUNCTIONS[name](*(self._value(arg, sizes) for arg in args))
            case _:
                raise ValueError(self.source)


def _inferred(module: OnnxModule, symbols: Sequence[str]) -> dict[str, list[str]]:
    """Returns the axes that onnxruntime infers for each output; nothing if it cannot."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    if module.path is None:
        return {}
    model = onnx.load(module.path, load_external_data=False)
    specs = {name: shape for name, shape, _ in module.input_specs}
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, specs.get(value.name) or (), strict=False):
            if isinstance(size, int):
                dim.dim_value = size
            else:
                dim.dim_param = f"irc_{symbols.index(size)}"
    inference: Any = SymbolicShapeInference(2**31 - 1, auto_merge=True, guess_output_rank=False, verbose=0)
    try:
        with quiet("onnxruntime.tools.symbolic_shape_infer"):
            # As `infer_shapes` does, which writes the model into the current folder if it gives up.
            inference._preprocess(model)
            while inference.run_:
                inference._infer_impl()
            inference._update_output_from_vi()
    except Exception:  # it covers few operators, and gives up in many ways
        return {}
    return {
        value.name: [dim.dim_param or str(dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        for value in inference.out_mp_.graph.output
    }
