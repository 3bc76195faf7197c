"""Parses the text form: recursive descent over the tokens of one line at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn, TypeVar

from ..annotation import Annotation, Policy
from ..errors import Location, UsageError
from ..graph import (
    Argument,
    Graph,
    Input,
    InputRole,
    Node,
    OffloadedParameter,
    Output,
    OutputRole,
    Region,
    Symbol,
    Trait,
)
from ..schedule import Compute, Fetch, Free, Instruction, Loss, Offload, Schedule, Wait
from ..types import DType, Storage, TensorType, Value
from .tokens import LOCATION_FIELDS, OPTIONAL, TOKEN, VERSION, WORD

__all__ = ["parse_file", "parse_graph", "parse_program"]

_T = TypeVar("_T")

_MAX_DEPTH = 64


def parse_graph(text: str) -> Graph:
    """The graph that `text` describes.

    Args:
        text: The text form of a graph, printed or written by hand.

    Raises:
        UsageError: IRC101 with the line number, what was expected and what was found.
    """
    parser = _Parser(text)
    graph = parser.graph()
    parser.end()
    return graph


def parse_program(text: str) -> Schedule:
    """The schedule that `text` describes: a graph, then the instructions that run it.

    Args:
        text: The text form of a graph and its schedule, printed or written by hand.

    Raises:
        UsageError: IRC101 with the line number, what was expected and what was found.
    """
    parser = _Parser(text)
    schedule = Schedule(graph := parser.graph(), parser.instructions(graph))
    parser.end()
    return schedule


def parse_file(text: str) -> Graph | Schedule:
    """The graph that `text` describes, or the schedule, if instructions stand after the graph.

    Args:
        text: The text form, perhaps after a line with its version: `irc 1`.

    Raises:
        UsageError: IRC101 as `parse_graph`; IRC102 for another version.
    """
    parser = _Parser(text)
    graph = parser.graph()
    if parser.is_at_end():
        return graph
    schedule = Schedule(graph, parser.instructions(graph))
    parser.end()
    return schedule


class _Parser:
    """Recursive descent over the tokens of one line at a time."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.line = 0
        self.tokens: list[str] = [""]
        self.position = 0
        self.storages: dict[str, Storage] = {}
        self.values: dict[str, Value] = {}
        self.annotations: dict[str, Annotation] = {}

    # Lines and tokens. The last token of a line is "", which no statement expects.

    def next_line(self) -> bool:
        while self.line < len(self.lines):
            text = self.lines[self.line]
            self.line += 1
            tokens: list[str] = TOKEN.findall(text)
            if tokens and tokens[-1][0] == "#":
                tokens.pop()
            if tokens:
                tokens.append("")
                self.tokens, self.position = tokens, 0
                return True
        self.tokens, self.position = [""], 0
        return False

    def fail(self, expected: str, found: str | None = None) -> NoReturn:
        found = self.tokens[self.position] if found is None else found
        shown = f"`{found}`" if found else "the end of the line"
        if self.tokens == [""]:
            shown = "the end of the text"
        raise UsageError("IRC101", f"line {self.line}: expected {expected}, found {shown}")

    def take(self) -> str:
        token = self.tokens[self.position]
        self.position += 1
        return token

    def accept(self, token: str) -> bool:
        if self.tokens[self.position] == token:
            self.position += 1
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            self.fail(f"`{token}`")

    def end_of_line(self) -> None:
        if self.tokens[self.position]:
            self.fail("the end of the line")

    def is_at_end(self) -> bool:
        """Whether nothing but comments is left."""
        line, is_more = self.line, self.next_line()
        self.line = line
        return not is_more

    def version(self) -> None:
        """Reads the first line: the version of the text, or nothing if there is none."""
        self.next_line()
        if self.accept("irc"):
            version = self.integer("the version of the text form")
            self.end_of_line()
            if version != VERSION:
                raise UsageError(
                    "IRC102",
                    f"line {self.line}: the text has version {version}; this version of irc reads {VERSION}",
                    help="read it with the version of irc that wrote it, or write it again",
                )
            self.next_line()

    def end(self) -> None:
        if self.next_line():
            self.fail("the end of the text")

    def block(self, statement: Callable[[], None]) -> None:
        """Statements, one a line, up to the closing brace."""
        self.expect("{")
        self.end_of_line()
        while True:
            if not self.next_line():
                self.fail("a statement or `}`")
            if self.accept("}"):
                return self.end_of_line()
            statement()
            self.end_of_line()

    # Small parts.

    def string(self) -> str:
        token = self.tokens[self.position]
        if token[:1] != '"' or len(token) < 2:
            self.fail("a string")
        self.position += 1
        return self.unquote(token)

    def unquote(self, token: str) -> str:
        try:
            return json.loads(token)
        except ValueError:
            self.fail("a JSON string", token)

    def word(self, what: str) -> str:
        token = self.tokens[self.position]
        if token[:1] == '"':
            return self.string()
        if not WORD.fullmatch(token):
            self.fail(what)
        self.position += 1
        return token

    def name(self, sigil: str, what: str) -> str:
        token = self.tokens[self.position]
        if token[:1] != sigil or len(token) < 2:
            self.fail(what)
        self.position += 1
        return self.unquote(token[1:]) if token[1] == '"' else token[1:]

    def integer(self, what: str) -> int:
        token = self.tokens[self.position]
        try:
            number = int(token)
        except ValueError:
            self.fail(what)
        self.position += 1
        return number

    def number(self) -> int | float:
        token = self.take()
        try:
            return int(token) if token.lstrip("-").isdigit() else float(token)
        except ValueError:
            self.position -= 1
            self.fail("a number")

    def integers(self, opening: str, closing: str, what: str) -> tuple[int, ...]:
        self.expect(opening)
        numbers: list[int] = []
        if not self.accept(closing):
            numbers.append(self.integer(what))
            while self.accept(","):
                numbers.append(self.integer(what))
            self.expect(closing)
        return tuple(numbers)

    def listed(self, item: Callable[[], _T]) -> list[_T]:
        """Items separated by commas, up to the closing parenthesis; the opening one is taken already."""
        found: list[_T] = []
        while not self.accept(")"):
            found.append(item())
            if not self.accept(","):
                self.expect(")")
                break
        return found

    def one_of(self, choices: dict[str, _T], what: str) -> _T:
        token = self.tokens[self.position]
        if token not in choices:
            self.fail(f"{what} ({', '.join(sorted(choices))})")
        self.position += 1
        return choices[token]

    # Names that are used.

    def storage(self) -> Storage:
        name = self.name("@", "a storage such as `@s0`")
        if name not in self.storages:
            self.position -= 1
            self.fail("a storage declared above")
        return self.storages[name]

    def value(self) -> Value:
        name = self.name("%", "a value such as `%x`")
        if name not in self.values:
            self.position -= 1
            self.fail("a value written above")
        return self.values[name]

    # The graph.

    def graph(self) -> Graph:
        self.version()
        self.expect("graph")
        self.expect("loss_bytes")
        self.expect("=")
        loss_bytes = self.integer("bytes")
        optional = dict(OPTIONAL)
        for name in optional:
            if self.accept(name):
                self.expect("=")
                optional[name] = self.integer("bytes" if name.endswith("bytes") else "a number")
        inputs: list[Input] = []
        nodes: dict[str, Node] = {}
        outputs: list[Output] = []
        offloaded_parameters: list[OffloadedParameter] = []
        region: Region | None = None

        def statement() -> None:
            nonlocal region
            token, following = self.tokens[0], self.tokens[1]
            if following == "=":
                self.node_statement(nodes, region)
            elif following == ":":
                region = self.one_of(_REGIONS, "a region")
                self.expect(":")
            elif token == "storage":
                self.storage_statement()
            elif token == "annotation":
                self.annotation_statement()
            elif token == "input":
                inputs.append(self.input_statement())
            elif token == "offloaded":
                offloaded_parameters.append(self.offloaded_statement())
            elif token in _OUTPUT_ROLES:
                outputs.append(self.output_statement())
            else:
                self.fail(
                    "a storage, an annotation, an input, an offloaded parameter, a region, a node, an output "
                    "or `}`"
                )

        self.block(statement)
        annotations = tuple(self.annotations.values())
        return Graph(
            tuple(inputs),
            tuple(nodes.values()),
            tuple(outputs),
            loss_bytes,
            annotations=annotations,
            offloaded_parameters=tuple(offloaded_parameters),
            **optional,
        )

    def storage_statement(self) -> None:
        self.expect("storage")
        start = self.position
        name = self.name("@", "a storage such as `@s0`")
        if name in self.storages:
            self.position = start
            self.fail("a storage that is not declared yet")
        nbytes = self.integer("bytes")
        self.storages[name] = Storage(name, nbytes, self.word("a device"))

    def annotation_statement(self) -> None:
        self.expect("annotation")
        policy = self.one_of(_POLICIES, "a policy")
        start = self.position
        by = self.string()
        if by in self.annotations:
            self.position = start
            self.fail("an annotation that is not declared yet")
        self.annotations[by] = Annotation(policy, by)

    def annotation(self) -> Annotation:
        """The annotation of a node, whose opening parenthesis is taken already."""
        by = self.string()
        if by not in self.annotations:
            self.position -= 1
            self.fail("an annotation declared above")
        self.expect(")")
        return self.annotations[by]

    def input_statement(self) -> Input:
        self.expect("input")
        value = self.result()
        role = self.one_of(_INPUT_ROLES, "a role")
        target = self.string()
        part = self.string() if self.accept("part") else ""
        return Input(value, role, target, self.accept("requires_grad"), part, self.accept("adds_apart"))

    def offloaded_statement(self) -> OffloadedParameter:
        self.expect("offloaded")
        is_state = self.accept("state")
        value = self.result() if is_state else self.value()
        return OffloadedParameter(value, self.word("a tier"), self.string(), is_state)

    def output_statement(self) -> Output:
        role = self.one_of(_OUTPUT_ROLES, "a role")
        value = None if self.accept("none") else self.value()
        return Output(value, role, self.string(), self.string() if self.accept("part") else "")

    def node_statement(self, nodes: dict[str, Node], region: Region | None) -> None:
        name = self.word("a node's name")
        if name in nodes:
            self.position -= 1
            self.fail("a node's name that is not in use yet")
        if region is None:
            self.position -= 1
            self.fail("`forward:` or `backward:` above the first node")
        self.expect("=")
        op = self.word("an operation")
        self.expect("(")
        arguments: list[Argument] = []
        keywords: list[tuple[str, Argument]] = []
        self.listed(lambda: self.call_argument(arguments, keywords))
        is_sequence = False
        results: list[Value | None] = []
        if self.accept("->"):
            is_sequence = self.accept("(")
            if is_sequence:
                results = self.listed(self.optional_result)
            else:
                results.append(self.optional_result())
                while self.accept(","):
                    results.append(self.optional_result())
        traits = self.listed(lambda: self.one_of(_TRAITS, "a trait")) if self.accept_call("traits") else []
        at = self.location() if self.accept_call("loc") else None
        annotation = self.annotation() if self.accept_call("annotation") else None
        nodes[name] = Node(
            name,
            op,
            tuple(arguments),
            tuple(results),
            tuple(keywords),
            is_sequence,
            region,
            frozenset(traits),
            at,
            annotation,
        )

    def accept_call(self, word: str) -> bool:
        if self.accept(word):
            self.expect("(")
            return True
        return False

    def call_argument(self, arguments: list[Argument], keywords: list[tuple[str, Argument]]) -> None:
        if self.tokens[self.position] and self.tokens[self.position + 1] == "=":
            key = self.word("a keyword")
            self.expect("=")
            keywords.append((key, self.argument(0)))
        elif keywords:
            self.fail("a keyword and `=`")
        else:
            arguments.append(self.argument(0))

    def location(self) -> Location:
        fields: dict[str, str] = {}

        def field() -> None:
            key = self.one_of(dict(LOCATION_FIELDS), "a part of a location")
            self.expect("=")
            fields[key] = self.string()

        self.listed(field)
        return Location(**fields)

    def optional_result(self) -> Value | None:
        return None if self.accept("none") else self.result()

    def result(self) -> Value:
        name = self.name("%", "a value such as `%x`, or none")
        if name in self.values:
            self.position -= 1
            self.fail("a value that is not written yet")
        self.expect(":")
        dtype = self.one_of(_DTYPES, "an element type")
        shape = self.integers("[", "]", "a size")
        strides = self.integers("{", "}", "a stride")
        device = self.word("a device") if self.accept("on") else None
        storage = self.storage()
        kind = TensorType(shape, dtype, strides, storage.device if device is None else device)
        value = self.values[name] = Value(name, kind, storage)
        return value

    def argument(self, depth: int) -> Argument:
        token = self.tokens[self.position]
        first = token[:1]
        if first == "%":
            return self.value()
        if token == "(":
            return self.tuple(depth)
        if first == '"' or first.isalpha() or first == "_":
            return self.worded()
        if first.isdigit() or first == "-":
            return self.number()
        self.fail("an argument")

    def tuple(self, depth: int) -> Argument:
        if depth == _MAX_DEPTH:
            self.fail(f"tuples nested at most {_MAX_DEPTH} deep")
        self.expect("(")
        items: list[Argument] = []
        while not self.accept(")"):
            items.append(self.argument(depth + 1))
            if self.accept(","):
                continue
            if len(items) == 1:
                self.fail("`,` after the only item of a tuple")
            self.expect(")")
            break
        return tuple(items)

    def worded(self) -> Argument:
        """A string, a symbol, a complex number, or a word that stands for a constant."""
        if self.tokens[self.position + 1] == "(":
            return self.symbol()
        if self.tokens[self.position][0] == '"':
            return self.string()
        return self.one_of(_CONSTANTS, "an argument")

    def symbol(self) -> Argument:
        if self.accept("complex"):
            self.expect("(")
            real = self.real()
            self.expect(",")
            imaginary = self.real()
            self.expect(")")
            return complex(real, imaginary)
        kind = self.word("a kind of symbol")
        self.expect("(")
        name = self.word("a symbol's name")
        self.expect(")")
        return Symbol(kind, name)

    def real(self) -> float:
        try:
            return float(self.number())
        except OverflowError:
            self.position -= 1
            self.fail("a number that fits a float")

    # The schedule.

    def instructions(self, graph: Graph) -> tuple[Instruction, ...]:
        nodes = {node.name: node for node in graph.nodes}
        found: list[Instruction] = []

        def statement() -> None:
            if self.accept("loss"):
                found.append(Loss())
            elif self.accept("free"):
                found.append(Free(self.storage()))
            elif self.accept("offload"):
                storage = self.storage()
                self.expect("to")
                found.append(Offload(storage, self.word("a tier")))
            elif self.accept("fetch"):
                storage = self.storage()
                self.expect("from")
                found.append(Fetch(storage, self.word("a tier")))
            elif self.accept("wait"):
                found.append(Wait(self.storage()))
            elif self.accept("compute"):
                name = self.word("a node's name")
                if name not in nodes:
                    self.position -= 1
                    self.fail("a node of the graph")
                retained = frozenset(self.listed(self.storage)) if self.accept_call("keep") else frozenset()
                found.append(Compute(nodes[name], retained))
            else:
                self.fail("`compute`, `free`, `loss`, `offload`, `fetch`, `wait` or `}`")

        self.next_line()
        self.expect("schedule")
        self.block(statement)
        return tuple(found)


_REGIONS = {region.value: region for region in Region}
_TRAITS = {trait.value: trait for trait in Trait}
_POLICIES = {policy.value: policy for policy in Policy}
_INPUT_ROLES = {role.value: role for role in InputRole}
_OUTPUT_ROLES = {role.value: role for role in OutputRole}
_DTYPES = {dtype.value: dtype for dtype in DType}
_CONSTANTS: dict[str, Argument] = {
    "none": None,
    "true": True,
    "false": False,
    "inf": float("inf"),
    "nan": float("nan"),
}
