"""What stands for a model on the command line: factories and files, and what is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from irc.compiler.model_source import load, training_loss
from irc.compiler.source import Source, parse_input
from irc.ir import IrcError, UsageError


def write(folder: Path, text: str, name: str = "m.py") -> Path:
    (folder / name).write_text("import torch\nfrom torch import nn\n" + text)
    return folder / name


def refused(model: str, code: str = "IRC422") -> str:
    with pytest.raises(UsageError) as caught:
        load(Source(model))
    assert caught.value.code == code and caught.value.help and "\n" not in caught.value.message
    return str(caught.value)


GOOD = "def make():\n    return nn.Linear(2, 2), torch.zeros(1, 2)\n"


def test_a_factory_in_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "json.py")
    json, search = sys.modules["json"], list(sys.path)
    loaded = load(Source(f"{path}:make"))
    assert isinstance(loaded.module, nn.Linear) and len(loaded.args) == 1
    assert sys.modules["json"] is json and sys.path == search, "a user's file hides no module"


def test_a_factory_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zoo_of_tests").mkdir()
    write(tmp_path / "zoo_of_tests", GOOD.replace("torch.zeros(1, 2)", "[torch.zeros(1, 2), 3]"), "small.py")
    monkeypatch.chdir(tmp_path)
    assert load(Source("zoo_of_tests.small:make")).args[1] == 3
    assert "no module 'zoo_of_tests.large'" in refused("zoo_of_tests.large:make", "IRC420")
    assert "no function 'build'" in refused("zoo_of_tests.small:build", "IRC420")
    write(tmp_path, "import not_installed_anywhere\n", "needy.py")
    assert "importing needy raised ModuleNotFoundError: No module named 'not_inst" in refused("needy:make")


def test_a_file_may_import_its_neighbours_even_late(tmp_path: Path) -> None:
    write(tmp_path, "size = 3\n", "neighbour_of_m.py")
    path = write(
        tmp_path, "def make():\n    from neighbour_of_m import size\n    return nn.ReLU(), torch.ones(size)\n"
    )
    assert load(Source(f"{path}:make")).args[0].numel() == 3


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("def make(:\n", "IRC422", "cannot be run: SyntaxError"),
        ("1 / 0\n", "IRC422", "cannot be run: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)\n", "IRC422", "cannot be run: SystemExit: 3"),
        ("make = 3\n", "IRC420", "has no function 'make'"),
        ("def make():\n    raise ValueError('two\\nlines')\n", "IRC422", "raised ValueError: two"),
        ("def make():\n    assert False\n", "IRC422", "raised AssertionError"),
        ("def make(size):\n    pass\n", "IRC422", "raised TypeError"),
        ("def make():\n    pass\n", "IRC422", "returned NoneType, not a pair"),
        ("def make():\n    return nn.ReLU()\n", "IRC422", "returned ReLU, not a pair"),
        ("def make():\n    return nn.ReLU, torch.ones(2)\n", "IRC422", "a tuple of (type, Tensor)"),
        ("def make():\n    return nn.ReLU(), torch.ones(2), 3\n", "IRC422", "a tuple of (ReLU, Tensor, int)"),
        ("def make():\n    return nn.ReLU(), {'x': 1}\n", "IRC422", "are a dict"),
    ],
)
def test_factories_that_are_wrong(tmp_path: Path, text: str, code: str, message: str) -> None:
    path = write(tmp_path, text)
    assert message in refused(f"{path}:make", code)


def test_the_place_of_an_error_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "def make():\n    return inner()\ndef inner():\n    raise KeyError('x')\n")
    assert f"--> {path}:6 in inner" in refused(f"{path}:make")
    monkeypatch.setenv("IRC_TRACEBACK", "1")
    with pytest.raises(KeyError):
        load(Source(f"{path}:make"))


def test_errors_of_irc_pass_through(tmp_path: Path) -> None:
    path = write(
        tmp_path, "import irc\ndef make():\n    irc.optimize(nn.ReLU(), torch.ones(2), budget='4Gb')\n"
    )
    with pytest.raises(IrcError, match="4Gb"):
        load(Source(f"{path}:make"))


@pytest.mark.parametrize("model", ["a b:f", ":f", ".m:f", "m..n:f", "m.py", "nowhere", "nowhere.py:f"])
def test_what_is_no_model(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(model, "IRC420")


def test_located_sources_load_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Source("m.onnx").located().model == str(tmp_path / "m.onnx")
    assert Source("d/m.py:f").located().model == f"{tmp_path}/d/m.py:f"
    assert Source("package.module:f", seed=3).located() == Source("package.module:f", seed=3)


def test_weights_drawn_anew(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    first, again, other = (load(Source(f"{path}:make", seed=seed)).module for seed in (1, 1, 2))
    assert isinstance(first, nn.Linear) and isinstance(again, nn.Linear) and isinstance(other, nn.Linear)
    assert torch.equal(first.weight, again.weight) and not torch.equal(first.weight, other.weight)


def test_shapes_of_inputs() -> None:
    assert parse_input("x=8x3") == ("x", (8, 3)) == parse_input("x=8, 3")
    assert parse_input("a=b=2") == ("a=b", (2,))
    for text in ("x", "x=", "=2", "x=ax2", "x=-1", "x=2x", "x=\N{SUPERSCRIPT TWO}", f"x={'9' * 5000}"):
        with pytest.raises(UsageError, match="is not name=shape"):
            parse_input(text)


def test_the_loss_that_is_trained() -> None:
    x = torch.full((2,), 3.0, requires_grad=True)
    assert training_loss(x.sum()).item() == 6
    assert training_loss({"a": x, "b": [x * 2], "c": torch.ones(3), "d": "text"}).item() == 9 + 36
    assert training_loss(x.to(torch.complex64)).item() == 4.5


def test_an_error_of_a_factory_within_torch_is_shown_at_the_line_of_the_factory(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("from torch import nn\ndef made():\n    return nn.Linear('a', 3)\n")
    with pytest.raises(UsageError, match=r"IRC422(?s:.*)wrong.py:3 in made"):
        load(Source(f"{tmp_path / 'wrong.py'}:made"))
