"""The command that shows round trips through torch's exporters: what it finds, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.onnx_exporters import __main__ as command
from benchmarks.onnx_exporters import exporting, round_trip
from benchmarks.onnx_exporters.elements import Elements
from benchmarks.onnx_exporters.exporting import Way, export
from benchmarks.onnx_exporters.round_trip import Original, Row
from benchmarks.onnx_exporters.subjects import Subject
from irc.frontends.onnx import OnnxModule, from_onnx


class Net(nn.Module):
    """A normalised convolution, and a linear layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)
        self.linear, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.linear(self.norm(self.convolution(x))))


@pytest.fixture(scope="module")
def original() -> Original:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net()
        for parameter in net.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return Original(Subject(net.eval(), {"x": torch.randn(2, 2, 6, 6)}))


@pytest.fixture(scope="module")
def kept(original: Original, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "net.onnx"
    export(original.subject, Way("kept", 18), path)
    return path


@pytest.fixture(scope="module")
def folded(original: Original, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folded") / "net.onnx"
    export(original.subject, Way("legacy", None), path)
    return path


def test_a_file_that_keeps_all(original: Original, kept: Path) -> None:
    row = round_trip.round_trip(original, kept, Row("net", "kept 18"))
    assert row.failures == ()
    assert row.parameters == row.original == (7, 56 + 1 + 6 + 16 + 8) and row.named == 7
    assert row.ties == (1, 1) and row.statistics == 2 and row.keys == (9, 9, 11) and row.opset == 18
    assert row.compared == 1 and row.outputs < 1e-5 and row.gradients < 1e-5


def test_a_file_that_folds_and_copies(original: Original, folded: Path) -> None:
    row = round_trip.round_trip(original, folded, Row("net", "legacy"))
    assert row.failures == ()
    assert row.folded == 4 and row.made == 2 and row.statistics == 0  # the convolution takes in its norm
    assert row.named + row.moved == 3 and row.gradients < 1e-5 and 0 < row.compared < 1


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    return module.get_parameter(name)


def _wrong_values(module: OnnxModule) -> None:
    _parameter(module, "norm.bias").data[0] += 1e-3


def _untrained(module: OnnxModule) -> None:
    _parameter(module, "norm.bias").requires_grad_(False)


def _demoted(module: OnnxModule) -> None:
    owner, values = module.get_submodule("norm"), _parameter(module, "norm.bias").data
    del owner.bias
    owner.register_buffer("bias", values)


def _promoted(module: OnnxModule) -> None:
    owner = module.get_submodule("norm")
    values = module.get_buffer("norm.running_mean")
    del owner.running_mean
    owner.register_parameter("running_mean", nn.Parameter(values, requires_grad=False))


def _scaled(module: OnnxModule) -> None:
    def scale(_module: nn.Module, _args: Any, result: Tensor) -> Tensor:
        return result * 1.001

    module.register_forward_hook(scale)


def _other_gradients(module: OnnxModule) -> None:
    _parameter(module, "linear.bias").register_hook(lambda gradient: gradient * 1.01)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_wrong_values, "norm.bias has not the file's values"),
        (_untrained, "1 parameters without gradient: norm.bias"),
        (_demoted, "1 weights of the file are no parameters: norm.bias"),
        (_promoted, "1 buffers of the file are none: norm.running_mean"),
        (_scaled, "outputs differ by 1.0e-03"),
        (_other_gradients, "the gradient of linear.bias differs by 1.0e-02"),
    ],
)
def test_what_does_not_hold_is_told(
    original: Original,
    kept: Path,
    spoil: Callable[[OnnxModule], None],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoiled(path: Path) -> OnnxModule:
        module = from_onnx(path)
        spoil(module)
        return module

    monkeypatch.setattr(round_trip, "from_onnx", spoiled)
    assert told in round_trip.round_trip(original, kept, Row("net", "kept 18")).failures


def test_a_refusal_is_a_failure(original: Original, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"")
    row = round_trip.round_trip(original, tmp_path / "net.onnx", Row("net", "kept 18"))
    assert len(row.failures) == 1 and row.failures[0].startswith("IRC311")


def test_numbers_are_found_by_their_bits() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(5, 7)).astype(np.float32), rng.normal(size=9).astype(np.float32)
    b[3] = b[4]
    elements = Elements({"a": a, "b": b})
    packed = np.concatenate([a.T.reshape(-1), b])
    assert elements.holds(packed) and not elements.holds(packed * 1.5) and not elements.holds(np.zeros(4))
    assert elements.present([a.T]) == {"a"} and elements.present([packed]) == {"a", "b"}
    at, sure = elements.places(a.T.copy())
    assert sure.all() and at.reshape(7, 5).T.reshape(-1).tolist() == list(range(35))
    assert elements.places(b)[1].tolist() == [n not in (3, 4) for n in range(9)]


# ---------------------------------------------------------------------- the command


@pytest.fixture
def one_row(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets every file have the same row."""

    def set_row(**fields: Any) -> None:
        def row(_original: Original, _path: Path, row: Row) -> Row:
            return Row(row.model, row.way, original=(19, 1544), **fields)

        monkeypatch.setattr(command, "round_trip", row)
        monkeypatch.setattr(command, "export", lambda *_: None)

    return set_row


def test_the_command_writes_its_section(
    one_row: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_row(parameters=(9, 1544), named=3, moved=16, opset=18, keys=(3, 3, 19), compared=0.5)
    page = tmp_path / "page.md"
    page.write_text("# Page\n<!-- begin round trips -->\n<!-- end round trips -->\n")
    assert command.main(["--tiny", "--only", "LSTM dynamo 18", "--markdown", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("# Page") and "1 exports, 0 that torch did not write" in text
    cells = [cell.strip() for cell in text.splitlines()[5].split("|")[1:-1]]
    assert cells[:4] == ["LSTM", "dynamo", "18", "9 (1,544)"]
    assert cells[4:9] == ["3 of 19", "-", "-", "3 of 19", "0.0e+00"]
    assert cells[9:] == ["0.0e+00 (50%)", "file has 9 of 19: 16 transposed, packed or copied"]
    assert text[text.index("| model") :].split("\n\n")[0] in capsys.readouterr().out


def test_the_command_fails_where_a_row_does(
    one_row: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    one_row(parameters=(19, 1544), named=19, failures=("outputs differ by 1.0e-03",))
    assert command.main(["--tiny", "--only", "LSTM kept 18"]) == 1
    assert "FAIL: outputs differ by 1.0e-03" in capsys.readouterr().out


def test_what_torch_cannot_export_is_torchs_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("no such operator\nand more")

    monkeypatch.setattr(exporting.torch.onnx, "export", refuse)
    assert command.main(["--tiny", "--only", "LSTM legacy"]) == 0
    text = capsys.readouterr().out
    assert "torch: RuntimeError: no such operator" in text and "1 that torch did not write" in text
