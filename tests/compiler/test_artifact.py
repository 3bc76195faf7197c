"""A written folder: all of it or nothing, and what is damaged or tampered with is refused."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_files import MODELS, planned_folder
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from irc.compiler import artifact as folders
from irc.compiler.artifact import check_target, read_folder, write_folder
from irc.compiler.model_source import load, training_loss
from irc.compiler.optimize import Optimized, optimize_module
from irc.compiler.request import Request
from irc.compiler.source import Source
from irc.ir import Delivery, IrcError, Origin, UnsupportedError, UsageError, VerificationError

FILES = ["model.py", "plan.json", "program.irc", "timeline.json", "weights.safetensors"]


Optimize = Callable[[str], tuple[Optimized, Source, tuple[Tensor, ...]]]


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> Optimize:
    """Optimizes the model of a name, once for all tests."""
    models = tmp_path_factory.mktemp("models") / "models.py"
    models.write_text(MODELS)

    @functools.cache
    def optimize(name: str) -> tuple[Optimized, Source, tuple[Tensor, ...]]:
        source = Source(f"{models}:{name}")
        loaded = load(source)
        request = Request.of("90%", time_limit=1, loss=training_loss)
        found = optimize_module(loaded.module, loaded.args, request)
        examples = pytree.tree_leaves(loaded.args)
        return found, source, tuple(leaf for leaf in examples if isinstance(leaf, Tensor))

    return optimize


@pytest.fixture
def written(models: Path) -> Path:
    return planned_folder(models, "noisy", "--budget", "90%", "--time-limit", "1")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def edit_plan(folder: Path, **changes: Any) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | changes))


def edit_program(folder: Path, edit: Callable[[str], str]) -> None:
    text = (folder / "program.irc").read_text()
    edited = edit(text)
    assert edited != text
    (folder / "program.irc").write_text(edited)


# ---------------------------------------------------------------------- writing


def test_nothing_is_left_when_writing_fails(
    optimized: Optimize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = optimized("noisy")
    before = names(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(folders, "save_file", fail)
    with pytest.raises(UsageError, match="no space left") as caught:
        write_folder(tmp_path / "new" / "deep" / "out", *what)
    assert caught.value.code == "IRC430" and names(tmp_path) == before

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "out", *what)
    assert names(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["save_file", "rename"])
def test_an_older_folder_survives_a_failure(
    optimized: Optimize, written: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    what = optimized("mlp")
    before = {name: (written / name).read_bytes() for name in names(written)}
    around = names(written.parent)
    rename = os.replace

    def fail(source: Path, *rest: Any) -> None:
        if failing == "save_file" or Path(rest[0]) == written:
            monkeypatch.undo()
            raise OSError("interrupted")
        rename(source, *rest)

    if failing == "save_file":
        monkeypatch.setattr(folders, "save_file", fail)
    else:
        monkeypatch.setattr(folders.os, "replace", fail)
    with pytest.raises(UsageError, match="interrupted"):
        write_folder(written, *what)
    assert {name: (written / name).read_bytes() for name in names(written)} == before
    assert names(written.parent) == around


def test_an_older_folder_is_replaced(optimized: Optimize, written: Path) -> None:
    around = names(written.parent)
    write_folder(written, *optimized("mlp"))
    assert read_folder(written).source.model.endswith("models.py:mlp")
    assert names(written) == FILES and names(written.parent) == around
    modes = {(written / name).stat().st_mode for name in FILES}
    assert len(modes) == 1, "the weights are as readable as the rest"


def test_targets_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    for target, text in {
        "file": "is a file",
        "file/out": "is a file",
        "full": "is not empty",
    }.items():
        with pytest.raises(UsageError, match=text) as caught:
            check_target(tmp_path / target)
        assert caught.value.code == "IRC430" and caught.value.help
    with pytest.raises(UsageError, match="cannot be written"):
        check_target(Path("/proc/nowhere/out"))
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty")
    check_target(tmp_path / "a" / "b")
    assert names(tmp_path) == ["empty", "file", "full"]


def test_a_refused_target_costs_no_planning(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from irc.compiler import model_source as loading
    from irc.tools import cli

    def fail(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(loading, "load", fail)
    status = cli.main(["optimize", f"{models}:mlp", "--budget", "60%", "-o", str(tmp_path)])
    assert status == 2 and "is not empty" in capsys.readouterr().err


def test_a_result_that_no_file_holds(optimized: Optimize, tmp_path: Path) -> None:
    found, source, examples = optimized("mlp")
    odd: Any = object()
    deliveries = (*found.captured.signature.deliveries, Delivery(Origin.CONSTANT, constant=odd))
    signature = replace(found.captured.signature, deliveries=deliveries)
    found = replace(found, captured=replace(found.captured, signature=signature))
    with pytest.raises(UnsupportedError, match="returns a object") as caught:
        write_folder(tmp_path / "out", found, source, examples)
    assert caught.value.code == "IRC434" and not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- reading


@pytest.mark.parametrize("name", ["noisy", "tied", "nested"])
def test_a_folder_holds_the_model(optimized: Optimize, tmp_path: Path, name: str) -> None:
    found, source, examples = optimized(name)
    write_folder(tmp_path / "out", found, source, examples)
    written = read_folder(tmp_path / "out")
    assert written.plan == found.plan and written.source == source
    original, module = load(source).module, written.module()
    expected, actual = dict(original.named_parameters()), dict(module.named_parameters())
    assert set(expected) == set(actual), "tied weights are one parameter, under the same name"
    for key, parameter in expected.items():
        assert torch.equal(parameter, actual[key]) and parameter.stride() == actual[key].stride()
        assert parameter.requires_grad == actual[key].requires_grad
    for key, buffer in module.named_buffers():
        assert torch.equal(buffer, original.get_buffer(key))
    for example, given in zip(written.examples, examples, strict=True):
        assert torch.equal(example, given) and example.requires_grad == given.requires_grad
    again = written.module()
    assert all(a is not b for a, b in zip(again.parameters(), module.parameters(), strict=True))


def test_the_readable_model_runs(written: Path) -> None:
    source = (written / "model.py").read_text()
    namespace: dict[str, Any] = {}
    exec(compile(source, "model.py", "exec"), namespace)
    assert "def forward(inputs):" in source and callable(namespace["backward"])


def test_a_written_program_is_for_training_alone(written: Path) -> None:
    module, examples = read_folder(written).module(), read_folder(written).examples
    with pytest.raises(IrcError, match="only the training step"), torch.no_grad():
        module(*examples)
    with pytest.raises(IrcError, match="only the training step"):
        module.eval()(*examples)
    assert isinstance(module, nn.Module)


def truncate(name: str) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return cut


def tensors(edit: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = load_file(folder / "weights.safetensors")
        edit(found)
        save_file(found, folder / "weights.safetensors")

    return change


def plan(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_plan(folder, **changes)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda folder: (folder / "weights.safetensors").unlink(), "has no weights.safetensors"),
        (lambda folder: (folder / "plan.json").unlink(), "has no plan.json"),
        (truncate("plan.json"), "plan.json is damaged"),
        (truncate("program.irc"), "program.irc is damaged: line"),
        (truncate("weights.safetensors"), "weights.safetensors is damaged"),
        (lambda folder: (folder / "plan.json").write_text("[]"), "plan.json is damaged"),
        (lambda folder: (folder / "program.irc").write_bytes(b"\xff\xfe"), "program.irc is damaged"),
        (plan(format="irc-plan-0"), "this is not a plan of irc"),
        (plan(peak_bytes="all"), "peak_bytes is 'all'"),
        (plan(source={"path": "x"}), "plan.json is damaged"),
        (plan(deliveries=[{"origin": "nowhere", "index": 0, "view": None, "constant": None}]), "damaged"),
        (plan(deliveries=[{"origin": "computed", "index": 99, "view": None, "constant": None}]), "99 of 1"),
        (plan(workspace_bytes={"no_such_node": 4}), "no_such_node"),
        (tensors(lambda t: t.pop("layers.0.weight")), "there is no tensor layers.0.weight"),
        (tensors(lambda t: t.pop("irc.example.0")), "there is no tensor irc.example.0"),
        (
            tensors(lambda t: t.update({"layers.0.weight": torch.zeros(3, 3)})),
            r"layers.0.weight is float32\[3, 3\]; the program reads float32\[16, 16\]",
        ),
        (tensors(lambda t: t.update({"layers.0.bias": torch.zeros(16).half()})), r"is float16\[16\]"),
    ],
)
def test_damaged_folders(written: Path, damage: Callable[[Path], object], text: str) -> None:
    damage(written)
    with pytest.raises(UsageError, match=text) as caught:
        read_folder(written)
    assert caught.value.code == "IRC431" and caught.value.help and "\n" not in caught.value.message


@pytest.mark.parametrize("wrong", [-2, float("nan"), float("inf"), 1e300, 1 << 70])
def test_amounts_that_no_plan_has(written: Path, wrong: float) -> None:
    plan = json.loads((written / "plan.json").read_text())
    names: list[str] = [name for name, value in plan.items() if type(value) in (int, float) and name != "gap"]
    rows = [name for name, value in plan["decisions"][0].items() if type(value) in (int, float)]
    first = next(iter(re.findall(r"compute (\S+)", (written / "program.irc").read_text())))
    decision: dict[str, object] = plan["decisions"][0]
    changes: list[dict[str, object]] = [{name: wrong} for name in names]
    for name in rows:
        changes.append({"decisions": [{**decision, name: wrong}]})
    changes.append({"workspace_bytes": {first: wrong}})
    assert len(changes) > 10
    for change in changes:
        edit_plan(written, **change)
        with pytest.raises(UsageError, match="IRC431"):
            read_folder(written)
        edit_plan(written, **plan)


def drop_first(pattern: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, "", text, count=1, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (drop_first(r"^  free .*\n"), "IRC1"),
        (drop_first(r"^  compute .*\n"), "IRC12"),
        (lambda text: text.replace("aten.tanh.default", "aten.no_such_op.default"), "IRC132"),
        (lambda text: text.replace("aten.tanh.default", "os.system.default"), "IRC132"),
    ],
)
def test_a_tampered_program_never_runs(written: Path, edit: Callable[[str], str], code: str) -> None:
    edit_program(written, edit)
    with pytest.raises(VerificationError) as caught:
        read_folder(written)
    assert caught.value.code.startswith(code) and caught.value.exit_status == 1


@pytest.mark.parametrize("key", ["peak_bytes", "budget_bytes", "static_bytes"])
def test_a_plan_that_claims_too_little(written: Path, key: str) -> None:
    claimed = json.loads((written / "plan.json").read_text())
    below = {**claimed, "budget_bytes": claimed["peak_bytes"]}[key] - 1
    edit_plan(written, **{key: below})
    with pytest.raises(VerificationError) as caught:
        read_folder(written)
    assert caught.value.code in ("IRC128", "IRC129")


def test_a_moved_folder_still_works(written: Path, tmp_path: Path) -> None:
    shutil.move(written, tmp_path / "elsewhere")
    assert os.path.isabs(read_folder(tmp_path / "elsewhere").source.model.rpartition(":")[0])


def test_a_folder_of_the_users_is_not_taken_for_one_of_irc(tmp_path: Path) -> None:
    mine = tmp_path / "project"
    (mine / "weights.safetensors").parent.mkdir()
    for name in ("model.py", "weights.safetensors"):
        (mine / name).write_text("mine")
        with pytest.raises(UsageError, match=r"IRC430.*is not empty"):
            check_target(mine)
    (mine / "plan.json").write_text('{"format": "other"}')
    with pytest.raises(UsageError, match=r"IRC430.*is not empty"):
        check_target(mine)
    (mine / "plan.json").write_text('{"format": "irc-plan-1"}')
    check_target(mine)
    (mine / "model.py").unlink()
    (mine / "model.py").mkdir()
    with pytest.raises(UsageError, match=r"IRC430.*is not empty"):
        check_target(mine)
