"""No name or text of a graph becomes more than a name, a comment or a constant of the emitted source."""

from __future__ import annotations

import ast
import json
import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.torch_cases import keep_all
from torch import nn

from irc.backends.torch import emit_source
from irc.frontends.torch import capture
from irc.ir import VerificationError, parse_program, print_program, printable

HOSTILE = (
    "w\nopen('/tmp/irc-ran', 'w')\n#",
    "w\r\nimport os\r#",
    "w\u2028import os",
    "w\x0cimport os",
    "\x00",
    '"""',
    "'",
    "\\",
    "\\\n",
    "\x1b[2J\x1b]0;title\x07",
    "\ud800",
    "\u202eright to left",
    "#",
    "",
    "7",
    "lambda",
    "None",
    "float",
    "torch",
    "inputs",
    "saved",
    "forward",
    "aten_tanh",
    "fi",
    "\ufb01",
    "a b",
    "a_b",
    "\uff11",
    "x" * 100_000,
)
NAMES = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20))


class Net(nn.Module):
    """Operations with constants, keywords and symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.linear(x).tanh(), approximate="tanh")
        return (y.to(torch.float64) * self.get_buffer("scale")).clamp(-1.5, float("inf")).sum()


torch.manual_seed(0)
TEXT = print_program(keep_all(capture(Net(), (torch.ones(2, 3),)).graph))
VALUES = sorted(set(re.findall(r"%([A-Za-z0-9_.]+)", TEXT)))
TARGETS = sorted(text for text in set(re.findall(r'"([^"]+)"', TEXT)) if not text.isdigit())


def shape(text: str, *constants: str) -> str:
    """The structure of a program's source.

    Its identifiers are numbered as they come, some constants count as the same, and comments are gone.
    """
    tree = ast.parse(emit_source(parse_program(text)))
    numbers: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = f"n{numbers.setdefault(node.id, len(numbers))}"
        elif isinstance(node, ast.Constant) and node.value in constants:
            node.value = "a constant"
    return ast.dump(tree)


PLAIN = shape(TEXT)


def renamed(text: str, sigil: str, names: dict[str, str]) -> str:
    """The program with some names that follow a sigil written as others."""

    def other(match: re.Match[str]) -> str:
        name = match[1]
        return sigil + (json.dumps(names[name]) if name in names else name)

    return re.sub(rf"{sigil}([A-Za-z0-9_.]+)", other, text)


@given(st.data())
def test_names_of_values_are_identifiers_and_stay_apart(data: st.DataObject) -> None:
    first, second = data.draw(st.permutations(VALUES))[:2]
    new = data.draw(st.lists(NAMES, min_size=2, max_size=2, unique=True).filter(set(VALUES).isdisjoint))
    text = renamed(TEXT, "%", {first: new[0], second: new[1]})
    assert shape(text) == PLAIN


@given(st.sampled_from(TARGETS), NAMES)
def test_texts_are_comments_or_constants(target: str, new: str) -> None:
    """Targets, locations and texts of operations: the shape is the same but for the constant."""
    text = TEXT.replace(json.dumps(target), json.dumps(new))
    assert shape(text, target, new) == shape(TEXT, target, new)


@given(NAMES)
@example("load_library")
@example("x.y.z")
@example("aten.mul")
def test_operations_keywords_and_symbols_are_names_or_refused(new: str) -> None:
    for old in ("aten.tanh.default", "approximate", "float64"):
        text = re.sub(rf"(?<![\w.\"]){re.escape(old)}(?=[(=)])", lambda _: json.dumps(new), TEXT)
        assert text != TEXT
        try:
            source = emit_source(parse_program(text))
        except VerificationError as error:
            assert error.code == "IRC132" and "\n" not in error.message and len(error.message) < 500
        else:
            assert len(ast.parse(source).body) == len(ast.parse(emit_source(parse_program(TEXT))).body)
            assert new.isascii()


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_shown_is_one_line_of_printable_characters(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable() and len(shown) <= 300
    shown.encode()


def test_what_is_plain_is_shown_as_it_is() -> None:
    assert printable("layer1.0.conv2 (größe 3)") == "layer1.0.conv2 (größe 3)"
