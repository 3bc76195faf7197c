"""The workbench: `irc opt`, tests by FileCheck, and what other distributions add by entry points."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.language import Language, batch

from irc import optimize
from irc.frontends.onnx.lowerings import find
from irc.frontends.torch import capture
from irc.ir import (
    Graph,
    Schedule,
    Tier,
    UsageError,
    load_plugin,
    parse_file,
    parse_tiers,
    plugins,
    print_file,
    print_graph,
)
from irc.passes import PassManager, PlanMemory, Program, machine_named, parse_passes, pass_kinds

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "filecheck"
LIT = Path(sys.executable).with_name("lit")
HEAD = CASES / "tile_rows.irc"

Run = Callable[..., tuple[int, str, str]]


def test_a_file_is_read_rewritten_and_printed(
    irc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, err = irc("opt", HEAD)
    assert status == 0 and out.startswith("irc 1\ngraph ") and err == ""
    assert isinstance(parse_file(out), Graph)
    target = tmp_path / "out.irc"
    passes = "tile-rows{tiles=2,compare=false},cost{profile=cpu},plan-memory"
    assert irc("opt", HEAD, "--passes", passes, "--verify-each", "-o", target) == (0, "", "")
    assert isinstance(parse_file(target.read_text()), Schedule)
    monkeypatch.setattr("sys.stdin", io.StringIO(target.read_text()))
    status, again, _ = irc("opt", "-")
    assert status == 0 and again == target.read_text()


def test_programs_are_printed_between_passes(irc: Run) -> None:
    passes = "tile-rows{tiles=2,compare=false},cost{profile=cpu},plan-memory"
    status, _, err = irc("opt", HEAD, "--passes", passes, "--print-after-all", "--timing")
    assert status == 0
    shown = [line for line in err.splitlines() if line.startswith("# after")]
    assert shown == ["# after tile-rows", "# after cost", "# after plan-memory"]
    assert [line.split()[-1] for line in err.splitlines() if " s  " in line][:2] == ["tile-rows", "cost"]
    _, _, err = irc("opt", HEAD, "--passes", passes, "--print-after", "cost")
    assert err.count("# after") == 1


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["nowhere.irc"], "IRC400"),
        ([HEAD, "--passes", "cost", "--print-after", "tile-rows"], "IRC400"),
        ([HEAD, "--passes", "nothing"], "IRC404"),
        ([ROOT / "README.md"], "IRC101"),
    ],
)
def test_what_cannot_be_read_or_run_is_refused(argv: list[object], code: str, irc: Run) -> None:
    status, out, err = irc("opt", *argv)
    assert status == 2 and out == "" and err.startswith(f"error[{code}]")


def test_a_text_of_another_version_is_refused() -> None:
    text = print_graph(capture(Language(), batch()).graph)
    assert print_graph(parse_file(print_file(text))) == text  # type: ignore[arg-type]
    assert print_graph(parse_file(text)) == text  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        parse_file("irc 2\n" + text)
    assert caught.value.code == "IRC102"


def test_a_pass_that_fails_leaves_what_reproduces_it(irc: Run, tmp_path: Path) -> None:
    kept = tmp_path / "crash.irc"
    passes = "tile-rows{tiles=2,compare=false},cost{profile=cpu},plan-memory{budget=10}"
    status, _, err = irc("opt", HEAD, "--passes", passes, "--reproducer", kept)
    assert status == 3 and "IRC204" in err
    first, command, *_ = kept.read_text().splitlines()
    assert first == "# IRC204 in plan-memory" and command.startswith(
        f"# irc opt {kept} --passes 'plan-memory{{"
    )
    assert "mm_tile1" in kept.read_text()
    status, _, err = irc("opt", kept, "--passes", "plan-memory{budget=10}")
    assert status == 3 and "IRC204" in err


def test_passes_are_listed_with_their_options(irc: Run) -> None:
    status, out, _ = irc("passes")
    assert status == 0 and "tile-rows{tiles=8,exact=false,compare=true}\n    Divides the rows" in out
    data = json.loads(irc("passes", "--json")[1])
    assert data["format"] == "irc-passes-1"
    assert {row["name"] for row in data["passes"]} == set(pass_kinds())
    for row in data["passes"]:
        assert str(PassManager(parse_passes(row["text"]))) == row["text"] and row["doc"]


@pytest.mark.slow
def test_rewrites_do_what_their_files_say() -> None:
    """Each file in tests/filecheck is an example of a rewrite, held to its comments by filecheck."""
    done = subprocess.run([LIT, "-v", CASES], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "PASS" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_file_that_says_otherwise_fails(tmp_path: Path) -> None:
    (tmp_path / "lit.cfg.py").write_text((CASES / "lit.cfg.py").read_text())
    (tmp_path / "wrong.irc").write_text(
        HEAD.read_text().replace("# CHECK: mm_2 = aten.cat", "# CHECK: mm_2 = aten.stack")
    )
    done = subprocess.run([LIT, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "FAIL" in done.stdout


@pytest.mark.parametrize(
    "operation",
    [
        'aten.from_file.default("kept.txt", true, 1024)',
        'load_library("weights.bin")',
        'import_module("this")',
        "aten.manual_seed.default(0)",
        "aten.nope.default(%x)",
    ],
)
@pytest.mark.parametrize("passes", ["cost", "tile-rows{tiles=2}"])
def test_passes_run_no_operation_that_a_file_may_not_hold(
    operation: str, passes: str, irc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    file = tmp_path / "hostile.irc"
    file.write_text(
        "irc 1\ngraph loss_bytes=0 {\n  storage @s0 4096 cpu\n  storage @s1 4096 cpu\n"
        '  input %x: float32[1024]{1} @s0 input "0"\nforward:\n'
        f'  a = {operation} -> %a: float32[1024]{{1}} @s1\n  output %a "0"\n}}\n'
    )
    status, out, err = irc("opt", file, "--passes", passes)
    assert status == 1 and out == "" and "error[IRC132]" in err and kept.read_text() == "mine"


# ---------------------------------------------------------------------- entry points


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs modules with entry points, as a wheel does."""

    def install(name: str, modules: dict[str, str], groups: dict[str, dict[str, str]]) -> None:
        for module, text in modules.items():
            (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [
            line
            for group, entries in groups.items()
            for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        _forget()

    _forget()
    yield install
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    plugins.cache_clear()
    load_plugin.cache_clear()


def example() -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    folder = ROOT / "examples" / "pass_package"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return {"double_transposes": (folder / "double_transposes.py").read_text()}, project["entry-points"]


def test_the_pass_of_the_example_is_found_by_the_command_line(
    installed: Callable[..., None], irc: Run, tmp_path: Path
) -> None:
    modules, groups = example()
    assert len(modules["double_transposes"].splitlines()) <= 40
    installed("irc-double-transposes", modules, groups)
    assert "drop-double-transposes{}   (of irc-double-transposes 1.0)" in irc("passes")[1]
    status, out, _ = irc("opt", HEAD, "--passes", "drop-double-transposes", "--verify-each")
    assert status == 0
    before = irc("opt", HEAD)[1]
    assert out.count("aten.t.default") < before.count("aten.t.default")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}
    listed = subprocess.run(
        [sys.executable, "-m", "irc", "passes"], capture_output=True, text=True, check=True, env=environment
    )
    assert "irc-double-transposes 1.0" in listed.stdout


def test_a_plan_with_the_pass_of_another_has_the_same_numbers(installed: Callable[..., None]) -> None:
    from support.language import gradients

    from irc.compiler.optimize import optimize_module
    from irc.compiler.request import Request

    installed("irc-double-transposes", *example())
    passes = parse_passes("drop-double-transposes,cost{profile=cpu},plan-memory{budget=100%}")
    module, args = Language(), batch()
    fitted = optimize_module(module, args, Request.of_passes(passes)).module
    (_, wanted), (_, found) = gradients(module, *args), gradients(fitted, *args)
    assert all(wanted[name].equal(found[name]) for name in wanted)


OTHERS = """
from irc.ir import UsageError
from irc.passes import Strategy
from irc.passes.costs.machines import machine_named
from dataclasses import replace
from irc.frontends.onnx.lowerings.table import lowering

keeping = Strategy("keep-them-all", "nobody, 2026", lambda problem, asked: [problem.keep_all])
copying = replace(keeping, name="copying", copies=True)
mine = replace(machine_named("cpu"), name="mine")

@lowering("Double", domain="of.others")
def double(call):
    return call.tensor(0) * 2
"""


def test_strategies_machines_and_lowerings_of_others_are_used(
    installed: Callable[..., None], irc: Run
) -> None:
    installed(
        "irc-others",
        {"others_of_irc": OTHERS},
        {
            "irc.strategies": {
                "keep-them-all": "others_of_irc:keeping",
                "copying": "others_of_irc:copying",
            },
            "irc.machines": {"mine": "others_of_irc:mine"},
            "irc.onnx_lowerings": {"double": "others_of_irc"},
        },
    )
    passes = parse_passes("cost{profile=mine},plan-memory{budget=100%,strategy=keep-them-all}")
    program = PassManager(passes).run(Program(capture(Language(), batch()).graph))
    assert program.plan is not None and program.plan.strategy == "keep-them-all"
    chooser = PlanMemory("100%", "copying")
    with pytest.raises(UsageError, match="copies, and there is no tier"):
        chooser.check_tiers(has_tiers=False)
    plan = chooser.run(replace(program, tiers=(Tier("host", 1 << 20, 1e3, 1e3),))).plan
    assert plan is not None and plan.strategy == "copying"
    assert machine_named("mine").name == "mine"
    assert find("of.others", "Double", 1) is not None
    out = irc("passes")[1]
    assert "irc.strategies: keep-them-all   (of irc-others 1.0)" in out and "irc.machines: mine" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('broken')", "cannot be imported: RuntimeError: broken"),
        ("x = 1", "cannot be imported: AttributeError"),
    ],
)
def test_what_cannot_be_imported_is_named(
    text: str, message: str, installed: Callable[..., None], irc: Run, request: pytest.FixtureRequest
) -> None:
    module = f"broken_{abs(hash(request.node.name))}"
    installed("irc-broken", {module: text}, {"irc.passes": {"broken": f"{module}:Broken"}})
    status, _, err = irc("opt", HEAD, "--passes", "broken")
    assert status == 2 and "error[IRC597]" in err and "irc-broken" in err and message in err
    assert irc("opt", HEAD)[0] == 0  # nothing else is touched


def test_a_pass_that_is_no_dataclass_of_its_name_is_refused(installed: Callable[..., None], irc: Run) -> None:
    installed("irc-odd", {"odd_of_irc": "class Odd: pass"}, {"irc.passes": {"odd": "odd_of_irc:Odd"}})
    status, _, err = irc("opt", HEAD, "--passes", "odd")
    assert status == 2 and "error[IRC404]" in err and "is not a dataclass of that name" in err
    assert irc("passes")[0] == 2


def test_what_is_not_asked_for_is_not_imported(installed: Callable[..., None], irc: Run) -> None:
    broken = {"mute": "mute_of_irc:mute"}
    installed(
        "irc-mute", {"mute_of_irc": "raise RuntimeError"}, {"irc.strategies": broken, "irc.machines": broken}
    )
    for passes in ("cost{profile=cpu},plan-memory{strategy=min-cut}", "cost{profile=cpu},plan-memory"):
        assert irc("opt", HEAD, "--passes", passes)[0] == 0
    for passes in ("cost{profile=mute}", "cost{profile=cpu},plan-memory{strategy=mute}"):
        status, _, err = irc("opt", HEAD, "--passes", passes)
        assert status == 2 and "error[IRC597]" in err and "irc-mute" in err


def test_an_entry_point_of_another_class_is_refused(installed: Callable[..., None], irc: Run) -> None:
    installed("irc-odd", {"odd_class_of_irc": "odd = 3"}, {"irc.strategies": {"odd": "odd_class_of_irc:odd"}})
    status, _, err = irc("opt", HEAD, "--passes", "cost{profile=cpu},plan-memory{strategy=odd}")
    assert status == 2 and "is not a Strategy" in err


def test_a_tier_of_another_distribution_is_measured_and_copied_to(
    installed: Callable[..., None], irc: Run
) -> None:
    installed("irc-fake", {}, {"irc.tiers": {"fake-async": "support.fake_tier:FakeTierConfig"}})
    assert "irc.tiers: fake-async   (of irc-fake 1.0)" in irc("passes")[1]
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    x = torch.randn(4096, 256)
    fitted = optimize(model, x, "75%", swap="fake-async:1GiB", strategy="swap")
    (copied,) = fitted.plan.tiers
    assert copied.tier == "fake-async" and copied.out_bytes > 0
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(module(x).square().sum(), parameters) for module in (fitted, model))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.slow
def test_a_written_plan_finds_its_tier_of_another_distribution(
    installed: Callable[..., None], irc: Run, models: Path, tmp_path: Path
) -> None:
    installed("irc-fake", {}, {"irc.tiers": {"fake-async": "support.fake_tier:FakeTierConfig"}})
    folder = tmp_path / "written"
    options = ("--budget", "80%", "--strategy", "swap", "--swap", "fake-async:1GiB", "-o", folder)
    status, out, err = irc("optimize", f"{models}:mlp", *options)
    assert status == 0 and "to fake-async and" in out, out + err
    assert irc("run", folder, "--check", "--trust")[0] == 0
    status, _, err = irc("run", folder)  # the folder may be another's, and the tier is code
    assert status == 2 and "error[IRC436]" in err and "a tier of another distribution, fake-async" in err
    written = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(written.replace('"kind": "fake-async"', '"kind": "no-such-tier"'))
    status, _, err = irc("run", folder, "--trust")
    assert status == 2 and "error[IRC433]" in err and "there is no tier no-such-tier" in err


def test_tiers_of_irc_keep_their_names(installed: Callable[..., None], tmp_path: Path) -> None:
    named = {"irc.tiers": {"disk": "support.fake_tier:FakeTierConfig"}}
    installed("irc-disk", {}, named)
    module = torch.nn.Linear(2, 2)
    assert optimize(module, torch.ones(2, 2), "100%", swap=f"disk:{tmp_path}").plan.peak_bytes


@pytest.mark.parametrize(
    ("text", "argument", "capacity_bytes"),
    [
        ("fake-async:tcp://h:8080:1GiB", "tcp://h:8080", 1 << 30),
        ("fake-async:tcp://h:8080", "tcp://h:8080", None),
        ("fake-async:0:1GiB", "0", 1 << 30),
        ("fake-async", "", None),
    ],
)
def test_a_tier_of_another_distribution_is_told_what_stands_before_the_amount(
    installed: Callable[..., None], text: str, argument: str, capacity_bytes: int | None
) -> None:
    installed("irc-fake", {}, {"irc.tiers": {"fake-async": "support.fake_tier:FakeTierConfig"}})
    (found,) = parse_tiers(text)
    assert (found.folder, found.capacity_bytes) == (argument, capacity_bytes)
    assert parse_tiers(str(found)) == (found,)


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        ("fake-async", "takes an amount of memory"),
        ("fake-async:folder:1GiB", "takes an amount of memory, not 'folder'"),
        ("fake-async:x", "takes an amount of memory, not 'x'"),
        ("fake", "there is no tier 'fake'"),
    ],
)
def test_a_tier_of_another_distribution_reads_what_is_asked_of_it(
    installed: Callable[..., None], swap: str, message: str
) -> None:
    installed("irc-fake", {}, {"irc.tiers": {"fake-async": "support.fake_tier:FakeTierConfig"}})
    with pytest.raises(UsageError, match=message):
        optimize(torch.nn.Linear(2, 2), torch.ones(2, 2), "100%", swap=swap)


def test_a_tier_of_another_kind_is_refused(installed: Callable[..., None]) -> None:
    installed("irc-fake", {}, {"irc.tiers": {"other": "support.fake_tier:FakeTierConfig"}})
    with pytest.raises(UsageError, match="does not name a TierConfig whose kind is 'other'"):
        optimize(torch.nn.Linear(2, 2), torch.ones(2, 2), "100%", swap="other:1GiB")


def test_a_reproducers_name_is_quoted_for_the_shell(irc: Run, tmp_path: Path) -> None:
    kept = tmp_path / "a'; echo owned; '\n# x.irc"
    irc("opt", HEAD, "--passes", "cost{profile=cpu},plan-memory{budget=10}", "--reproducer", kept)
    assert "echo owned; '\"'\"'" in kept.read_text().splitlines()[1]
    assert isinstance(parse_file(kept.read_text()), Graph)
