"""Every error of irc by its code, collected from the sources: nothing is listed that is not raised."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from irc.ir import errors

from ..pages import to_markdown

__all__ = ["FOLDERS", "Raised", "collect", "page"]

FOLDERS = ("ir", "torch_support", "passes", "frontends", "backends", "compiler", "tools")
"""The folders of the package that are searched."""

_PACKAGE = Path(__file__).parents[2]
_CODE = re.compile(r"IRC\d{3}")
_LOGGED = re.compile(r"(IRC\d{3}): (.*)", re.DOTALL)
_KINDS = [name for name in errors.__all__ if name.endswith("Error")]

_SECTIONS = {
    "frontends/torch/": (
        "When a torch model is captured",
        "`irc.optimize` raises these before anything is planned; the model is as it was.",
    ),
    "torch_support/": ("When a torch model is captured", ""),
    "passes/": (
        "When a step is planned",
        "`irc.optimize` raises these; the model is as it was.",
    ),
    "compiler/optimize.py": (
        "When a step is planned",
        "",
    ),
    "backends/": (
        "When a fitted module is made or called",
        "Raised by `irc.optimize`, by the call or, where the message says so, within its backward.",
    ),
    "ir/units.py": ("When a step is planned", ""),
    "frontends/onnx/": (
        "When an ONNX file is read",
        "Raised by `irc.from_onnx` and by the command line.",
    ),
    "ir/": (
        "Defects of irc, and files that are no plan or program",
        "The verifiers raise these where a pass has made a mistake; please report them.",
    ),
    "compiler/": (
        "Commands, folders and other tools",
        "Raised by `irc`, by `irc.pareto` and by the other commands.",
    ),
    "tools/": (
        "Commands, folders and other tools",
        "Raised by `irc`, by `irc.pareto` and by the other commands.",
    ),
    "ir/extras.py": ("Commands, folders and other tools", ""),
}
"""Where an error comes from, by the longest beginning of its file's path: a heading, and when it is met."""


@dataclass(frozen=True)
class Raised:
    """An error that the sources can raise, or a warning that they can log.

    Args:
        code: Its code.
        kind: The class, or `log` for a line in the log.
        message: With an ellipsis for each part that is only known when it is raised.
        help: What to do, likewise; "" where nothing is said.
        file: Relative to the package.
    """

    code: str
    kind: str
    message: str
    help: str
    file: str

    @property
    def section(self) -> str:
        """The heading that it stands under."""
        longest = max((prefix for prefix in _SECTIONS if self.file.startswith(prefix)), key=len)
        return _SECTIONS[longest][0]


@functools.cache
def collect() -> tuple[Raised, ...]:
    """Every error and warning with a code, in order of codes; each message once for each file."""
    found: dict[Raised, None] = {}
    for folder in FOLDERS:
        for path in sorted((_PACKAGE / folder).rglob("*.py")):
            for raised in _Source(ast.parse(path.read_text()), str(path.relative_to(_PACKAGE))).raised():
                found[raised] = None
    return tuple(sorted(found, key=lambda raised: (raised.code, raised.file, raised.message)))


def page() -> str:
    """The list as a Markdown page."""
    everything = collect()
    sections = dict.fromkeys(heading for heading, _ in _SECTIONS.values())
    about = {heading: text for heading, text in _SECTIONS.values() if text}
    parts = [
        "# Errors",
        "Every error and warning has a code. Find yours here by its code: the table gives its class, its "
        "message and what to do. An ellipsis stands for what is known only when the error is raised, such as "
        "names, numbers and the line of your model. A fitted module raises `UnsupportedError` if it cannot "
        "do what the original does.",
    ]
    for section in sections:
        of_section = [raised for raised in everything if raised.section == section]
        if of_section:
            rows = [(r.code, r.kind, r.message, r.help or "-") for r in of_section]
            rows = list(dict.fromkeys(rows))
            table = to_markdown(["code", "kind", "message", "what to do"], rows)
            parts += [f"## {section}", about[section], table]
    return "\n\n".join(parts) + "\n"


class _Source:
    """A parsed file.

    Args:
        tree: The file.
        file: Its path, relative to the package.
    """

    def __init__(self, tree: ast.Module, file: str) -> None:
        self.tree = tree
        self.file = file
        self.functions = {f.name: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self.bases = {c.name: base.id for c in classes for base in c.bases if isinstance(base, ast.Name)}
        self.calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self.texts = {**_texts(ast.parse(Path(errors.__file__).read_text())), **_texts(tree)}

    def raised(self) -> Iterator[Raised]:
        """What the file raises and logs."""
        for function in [None, *self.functions.values()]:
            for call in self._own_calls(function):
                yield from self._of(call, function)

    def _own_calls(self, function: ast.FunctionDef | None) -> list[ast.Call]:
        """The calls within a function, or those outside of all functions."""
        if function is not None:
            return [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        inside = {id(call) for f in self.functions.values() for call in self._own_calls(f)}
        return [call for call in self.calls if id(call) not in inside]

    def _of(self, call: ast.Call, function: ast.FunctionDef | None) -> Iterator[Raised]:
        first = call.args[0] if call.args else None
        if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
            return
        if logged := _LOGGED.fullmatch(first.value):
            text = re.sub(r"%[a-z]|%\.\d[a-z]", "…", logged[2])
            yield Raised(logged[1], "log", _one_line(text), "", self.file)
        if not _CODE.fullmatch(first.value):
            return
        message = call.args[1] if len(call.args) > 1 else None
        help = next((k.value for k in call.keywords if k.arg == "help"), None)
        for given in self._given(function, (message, help)):
            texts = [_one_line(_text(part, given)) for part in (message, help)]
            yield Raised(first.value, self._kind(call), texts[0], texts[1], self.file)

    def _given(
        self, function: ast.FunctionDef | None, parts: Sequence[ast.expr | None]
    ) -> list[Mapping[str, ast.expr]]:
        """What the callers of a function give for those of its parameters that the parts show."""
        if function is None:
            return [self.texts]
        names = [argument.arg for argument in function.args.args if argument.arg != "self"]
        pieces = [piece for part in parts if part is not None for piece in _pieces(part)]
        shown = {piece.id for piece in pieces if isinstance(piece, ast.Name)}
        known = {**self.texts, **_texts(function)}
        callers = [call for call in self.calls if _called(call) == function.name and len(call.args)]
        if not shown & set(names) or not callers:
            return [known]
        return [{**known, **dict(zip(names, call.args, strict=False))} for call in callers]

    def _kind(self, call: ast.Call) -> str:
        """The class of an error, or the base of one of the file's own; else what a function of it makes."""
        called = self.bases.get(_called(call), _called(call))
        if called in _KINDS:
            return called
        body = self.functions.get(called)
        inner = [] if body is None else [_called(c) for c in self._own_calls(body)]
        return next((name for name in inner if name in _KINDS), "IrcError")


def _called(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _texts(scope: ast.Module | ast.FunctionDef) -> dict[str, ast.expr]:
    """The texts that names stand for in a module or a function."""
    return {
        target.id: statement.value
        for statement in scope.body
        if isinstance(statement, ast.Assign) and _is_text(statement.value)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def _pieces(expression: ast.expr) -> list[ast.expr]:
    """The parts of a text: constants, and expressions that are shown in it."""
    if isinstance(expression, ast.JoinedStr):
        return [piece for value in expression.values for piece in _pieces(value)]
    if isinstance(expression, ast.FormattedValue):
        return _pieces(expression.value)
    if isinstance(expression, ast.BinOp) and _has_text(expression):
        return [*_pieces(expression.left), *_pieces(expression.right)]
    if (
        isinstance(expression, ast.Call)
        and isinstance(expression.func, ast.Attribute)
        and expression.func.attr == "join"
        and len(expression.args) == 1
        and isinstance(expression.args[0], ast.Tuple | ast.List)
    ):
        between, parts = expression.func.value, expression.args[0].elts
        return [piece for part in parts for piece in (between, *_pieces(part))][1:]
    return [expression]


def _has_text(expression: ast.expr) -> bool:
    """Whether a sum has a text in it."""
    if isinstance(expression, ast.BinOp):
        return _has_text(expression.left) or _has_text(expression.right)
    return _is_text(expression)


def _is_text(expression: ast.expr) -> bool:
    is_constant = isinstance(expression, ast.Constant) and isinstance(expression.value, str)
    return is_constant or isinstance(expression, ast.JoinedStr)


def _text(expression: ast.expr | None, given: Mapping[str, ast.expr]) -> str:
    if expression is None:
        return ""
    parts: list[str] = []
    for piece in _pieces(expression):
        if isinstance(piece, ast.Constant):
            parts.append(str(piece.value))
        elif isinstance(piece, ast.Name) and piece.id in given:
            parts.append(_text(given[piece.id], {}))
        else:
            parts.append("…")
    return "".join(parts)


def _one_line(text: str) -> str:
    """The text's first line, with runs of ellipses as one."""
    return re.sub(r"…(\s*…)+", "…", " ".join(next(iter(text.strip().splitlines()), "").split()))
