"""`irc.compare`: each strategy at each budget, above one bound, and who needs more."""

import copy
import csv
import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import irc
from irc.compiler.comparison import compare_strategies
from irc.compiler.comparison import measure as measuring
from irc.compiler.comparison.cells import Cell
from irc.compiler.comparison.comparison import FILES
from irc.compiler.comparison.torch_methods import Method
from irc.tools.cli import main

FACTORY = """
import torch
from torch import nn


def factory():
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers), (torch.randn(4096, 16),)
"""


def chain() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(4096, 16)


@pytest.mark.slow
def test_no_strategy_beats_the_bound_and_each_says_what_it_takes() -> None:
    found = irc.compare(*chain(), budgets=["95%", "85%", "min"], costs="analytic", time_limit=1.0)
    assert len(found.budgets) == 3 and found.minimum_bytes in found.budgets
    planned = [cell for cell in found.cells if cell.overhead is not None]
    assert {"auto", "rotor", "revolve", "ogc", "sqrt-n"} <= {cell.strategy for cell in planned}
    for cell in found.cells:
        if cell.overhead is None or cell.peak_bytes is None or cell.gap is None:
            assert cell.code in ("IRC204", "IRC205", "IRC206")
            assert (cell.code == "IRC204") == (cell.smallest_bytes is not None)
            assert cell.smallest_bytes is None or cell.smallest_bytes > cell.budget_bytes
        else:
            assert cell.peak_bytes <= cell.budget_bytes and cell.gap >= -1e-9
    best = {c.budget_bytes: c.overhead for c in planned if c.strategy == "auto" and c.overhead is not None}
    assert all(best[c.budget_bytes] <= (c.overhead or 0.0) + 0.006 for c in planned if c.budget_bytes in best)
    table = found.table()
    assert "from bound" in table and "need more:" in table and "proved" not in table
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert len(rows) == len(found.cells) == len(found.to_json()["cells"])


def test_plans_are_measured_if_asked() -> None:
    strategies = ["auto", "revolve", "keep-all"]
    found = irc.compare(
        *chain(), budgets=["100%", "90%"], strategies=strategies, measure=True, time_limit=1.0
    )
    planned = [cell for cell in found.cells if cell.peak_bytes is not None]
    assert len(planned) >= 4 and "other numbers" not in found.table() and "measured overhead" in found.table()
    assert "measured_peak_bytes" in found.to_csv()
    whole = [cell.measured for cell in planned if cell.overhead == 0.0]
    assert len(whole) >= 2 and all(found is whole[0] for found in whole)  # one schedule, measured once
    for cell in planned:
        assert cell.measured is not None and cell.peak_bytes is not None
        assert 0.95 * cell.peak_bytes < cell.measured.peak_bytes <= cell.peak_bytes


@pytest.mark.slow
def test_pytorchs_own_methods_are_measured_beside_the_plans() -> None:
    dropped = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 16))
    blocks = nn.Sequential(*(copy.deepcopy(dropped) for _ in range(4)))
    found = irc.compare(
        blocks,
        torch.randn(1024, 16),
        budgets=["100%", "60%"],
        strategies="auto",
        measure=True,
        time_limit=1.0,
    )
    own = [cell for cell in found.cells if cell.source == "PyTorch"]
    assert {c.strategy for c in own} >= {"checkpoint per block", "activation_memory_budget 0.5"}
    assert len(own) == 2 * len({c.strategy for c in own})
    for cell in own:
        assert cell.peak_bytes is None and cell.overhead is None
        if cell.measured is not None:
            assert cell.shown == (cell.measured.peak_bytes, cell.measured.overhead)
            assert cell.measured.peak_bytes <= cell.budget_bytes < 2 * found.baseline_bytes
        else:
            assert cell.smallest_bytes is not None and cell.smallest_bytes > cell.budget_bytes
    by_name = {c.strategy: c.measured for c in own if c.measured is not None}
    blocked, compiled = by_name["checkpoint per block"], by_name["activation_memory_budget 0.5"]
    assert blocked.agrees and blocked.peak_bytes < 0.9 * found.baseline_bytes
    assert not compiled.agrees and "*: other numbers" in found.table()  # it draws dropout otherwise
    svg = found.picture("svg").decode()
    assert "activation_memory_budget" in svg and "activation_memory_budget 0" not in svg


class Counting(nn.Module):
    """Counts its forwards in a buffer that is not saved, and keeps its last result."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        for block in self.blocks:
            x = block(x)
        self.last = x
        return x


def test_what_a_model_keeps_between_steps_disturbs_no_measurement() -> None:
    found = irc.compare(
        Counting(), torch.randn(512, 16), budgets="100%", strategies="auto,sqrt-n", measure=True
    )
    measured = [cell.measured for cell in found.cells if cell.measured is not None]
    assert len(measured) >= 5 and all(one.agrees for one in measured)


@pytest.mark.slow
def test_a_plan_that_takes_too_long_is_not_run() -> None:
    layers = [layer for _ in range(36) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.randn(64, 16)
    found = irc.compare(model, x, budgets="100%", strategies="auto,checkpoints-0", costs="cpu", measure=True)
    auto, slow = found.cells[:2]
    assert slow.overhead is not None and slow.overhead > 4 and slow.measured is None
    assert auto.measured is not None and "not run" in found.table()
    assert "checkpoints-0" not in found.picture("svg").decode()
    assert "measured peak of a step" in found.picture("svg").decode()


def test_no_error_of_a_method_reaches_the_terminal_or_a_file_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(module: nn.Module) -> None:
        raise RuntimeError('bad \x1b[31m,"\r\nsecond line')

    monkeypatch.setattr(measuring, "methods", lambda *_: [Method("strange", fail)])
    found = irc.compare(*chain(), budgets="100%", strategies="keep-all", costs="cpu", measure=True)
    (cell,) = (cell for cell in found.cells if cell.strategy == "strange")
    assert cell.code == "IRC403" and cell.plan_seconds is None
    assert all(line.isprintable() for line in found.table().splitlines())
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert len(rows) == len(found.cells) and "second line" not in found.to_csv()


def test_a_method_of_pytorch_that_does_not_apply_is_a_refusal() -> None:
    found = irc.compare(
        nn.Linear(4, 4), torch.randn(8, 4), budgets="100%", strategies="keep-all", measure=True
    )
    refused = [cell for cell in found.cells if cell.code == "IRC403"]
    assert {cell.strategy for cell in refused} >= {"checkpoint per block", "checkpoint_sequential 2"}
    assert found.table().count("\ncheckpoint per block: IRC403, the model has no blocks") == 1


def test_a_strategy_that_cannot_hold_a_graph_says_so_once() -> None:
    budgets = ["100%", "99%"]
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    found = irc.compare(model, x, budgets=budgets, strategies=["rotor", "keep-all"], costs="analytic")
    assert all(cell.code == "IRC403" for cell in found.cells if cell.strategy == "rotor")
    assert found.table().count("this graph is none") == 1


def test_the_command_writes_a_table_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.py"
    model.write_text(FACTORY)
    asked = [
        "compare",
        f"{model}:factory",
        "--time-limit",
        "1",
        "--budgets",
        "80%,min",
        "--strategies",
        "auto,ogc,checkpoints-2",
    ]
    assert main([*asked, "--costs", "analytic", "-o", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert "checkpoints-2" in output and "written:" in output
    assert all((tmp_path / "out" / name).stat().st_size > 100 for name in FILES)
    saved = json.loads((tmp_path / "out" / FILES[0]).read_text())
    assert saved["format"] == "irc-comparison-1" and len(saved["cells"]) == 6


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"strategies": ["checkpoints-x"]}, "IRC403"),
        ({"strategies": []}, "IRC403"),
        ({"strategies": ["swap"]}, "IRC403"),
        ({"budgets": ["lots"]}, "IRC401"),
        ({"budgets": "0.0000001%", "costs": "analytic"}, "IRC401"),
        ({"time_limit": -1.0}, "IRC403"),
    ],
)
def test_malformed_options_are_refused(options: dict[str, object], code: str) -> None:
    with pytest.raises(irc.UsageError, match=code):
        irc.compare(*chain(), **options)  # pyright: ignore[reportArgumentType]


def test_nothing_from_outside_reaches_the_terminal_or_the_picture_as_it_is(tmp_path: Path) -> None:
    strange = "a$^$b<i>&\x1b[31m\n"
    planned = Cell("auto", "this project", 90, 0.1, 80, 0.1, 0.05)
    refused = Cell("rotor", "someone", 90, 0.1, code="IRC403", refusal=f"no chain {strange}")
    found = irc.Comparison(strange, 100, 10, 20, 30, 1.0, f"analytic:{strange}", "", (planned, refused))
    assert all(line.isprintable() for line in found.table().splitlines())
    assert "\x1b" not in found.table() and found.table().count("\n") == 6
    found.draw(tmp_path / "picture.svg")
    ElementTree.fromstring((tmp_path / "picture.svg").read_text())
    rows = list(csv.reader(io.StringIO(found.to_csv())))
    assert len({len(row) for row in rows}) == 1 and len(rows) == 3
    with pytest.raises(irc.UsageError, match="IRC445"):
        found.draw(tmp_path / "picture.pdf")


def test_measuring_leaves_the_users_model_and_tensors_alone() -> None:
    model, x = chain()
    x.requires_grad_()
    x.grad = torch.ones_like(x)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [
        t.clone()
        for t in (*model.parameters(), *(p.grad for p in model.parameters()), x, x.grad)
        if t is not None
    ]
    state = torch.get_rng_state()
    irc.compare(model, x, budgets="100%", strategies="keep-all", measure=True)
    after = [
        t for t in (*model.parameters(), *(p.grad for p in model.parameters()), x, x.grad) if t is not None
    ]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_without_data_is_refused_before_anything_is_planned() -> None:
    model, x = chain()
    with pytest.raises(irc.UsageError, match=r"IRC403.*without data"):
        irc.compare(model.to("meta"), x.to("meta"), costs="cpu", measure=True)


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = tmp_path / "model.py", tmp_path / "file"
    model.write_text(FACTORY)
    file.write_text("")
    monkeypatch.setattr(compare_strategies, "compare_call", None)  # a call would fail otherwise
    for options in (["-o", str(file / "out")], ["--budgets", ""], ["--strategies", ""]):
        assert main(["compare", f"{model}:factory", *options]) == irc.UsageError("", "").exit_status


def test_kernels_of_lstm_layers_are_remarked_on() -> None:
    found = irc.compare(
        nn.LSTM(8, 8), torch.randn(4, 2, 8), budgets=["100%"], strategies="keep-all", costs="analytic"
    )
    assert "by their time steps" in found.table() and len(found.cells) == 1
