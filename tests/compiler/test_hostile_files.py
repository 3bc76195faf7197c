"""Files of others: no text in them runs, reaches the terminal as it is, or makes an internal error."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from support.hostile_texts import KINDS, fields_of, hostile, model, outcome, rewritten, text_fields, texts_of
from support.model_files import planned_folder

from irc.ir import VerificationError
from irc.tools import cli
from irc.torch_support.operations import function_of


@pytest.fixture
def tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., int]:
    """Runs a command; nothing of a file may have run, and what is printed is printable and short."""

    def run(*argv: object) -> int:
        capsys.readouterr()
        status = cli.main([str(argument) for argument in argv])
        out, err = capsys.readouterr()
        assert not (tmp_path / "ran").exists(), "code of the file ran"
        assert "IRC000" not in err, err[:2000]
        assert all(line.isprintable() for line in (out + err).split("\n"))
        assert len(out) + len(err) < 20_000
        return status

    return run


# ---------------------------------------------------------------------- ONNX files


TEXTS = sorted({text for *_, text in texts_of(model())})


def test_each_field_of_onnx_that_can_hold_text_is_tried(tmp_path: Path) -> None:
    whole = model()
    assert text_fields() == {field for text in TEXTS for field in fields_of(whole, text)}
    assert outcome(whole, tmp_path) == "trains"


@pytest.mark.slow
@pytest.mark.parametrize(("text", "kind"), [(t, KINDS[k % len(KINDS)]) for k, t in enumerate(TEXTS)])
def test_texts_of_an_onnx_file(text: str, kind: str, tmp_path: Path) -> None:
    """One kind for each text; `python -m support.hostile_texts` tries all."""
    new = hostile(tmp_path / "ran")[kind]
    assert outcome(rewritten(model(), text, new), tmp_path)


# ---------------------------------------------------------------------- written folders


@pytest.fixture
def folder(models: Path) -> Path:
    return planned_folder(models, "noisy", "--budget", "90%", "--time-limit", "1")


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_written_program(
    kind: str, folder: Path, tmp_path: Path, tried: Callable[..., int]
) -> None:
    """Names, targets, locations, operations, keywords and symbols: one of each at a time."""
    new, path = json.dumps(hostile(tmp_path / "ran")[kind]), folder / "program.irc"
    text = path.read_text()
    names = (r'"[^"\n]+"', r"(?<=[%@])[A-Za-z0-9_.]+", r"aten\.[\w.]+(?=\()", r"\w+(?==)", r"\w+(?=\()")
    for pattern in names:
        found = sorted(set(re.findall(pattern, text)))
        assert found
        for old in found[:: max(1, len(found) // 4)]:
            changed = re.sub(rf"{pattern}", lambda m, old=old: new if m[0] == old else m[0], text)
            path.write_text(changed)
            assert tried("run", folder, "--steps", 1) in (0, 1, 2, 4)


READING = (
    *(("explain", "--by", by) for by in ("module", "line", "storage")),
    ("explain", "--peak"),
)
"""The commands that read a plan and run nothing."""


def fields(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that JSON data hold, but for the rows of a list after its second."""
    if path:
        yield path
    items = data.items() if isinstance(data, dict) else enumerate(data[:2]) if isinstance(data, list) else ()
    for key, value in items:
        yield from fields(value, (*path, key))


def replaced(data: Any, where: tuple[Any, ...], value: object) -> Any:
    """A copy of JSON data with another value at a path."""
    if not where:
        return value
    changed = dict(data) if isinstance(data, dict) else list(data)
    changed[where[0]] = replaced(data[where[0]], where[1:], value)
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_plan(kind: str, folder: Path, tmp_path: Path, tried: Callable[..., int]) -> None:
    new, path = hostile(tmp_path / "ran")[kind], folder / "plan.json"
    plan = json.loads(path.read_text())
    for where in fields(plan):
        path.write_text(json.dumps(replaced(plan, where, new)))
        assert tried("run", folder, "--steps", 1) in (0, 1, 2)
        for command in (*READING, ("report", "-o", tmp_path / "page.html")):
            assert tried(*command[:1], folder, *command[1:]) in (0, 1, 2)
        if where[0] == "source":
            assert tried("run", folder, "--steps", 1, "--check") == 2  # nobody said --trust


@pytest.mark.parametrize(
    "operation",
    [
        'aten.from_file.default("/etc/hostname", true, 4)',
        'aten.save.default("/tmp/x")',
        'aten.warn.default("x", 2)',
        "aten.manual_seed.default(1)",
        "prim.Print.default(%x)",
        "profiler._record_function_enter.default()",
        "os.system.default()",
        "builtins.open.default()",
    ],
)
def test_operations_that_reach_outside_are_refused(
    operation: str, folder: Path, tried: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "program.irc"
    text, count = re.subn(
        r"(?m)^(  \S+ = )aten\.tanh\.default\(%\w+\)", rf"\g<1>{operation}", path.read_text()
    )
    assert count
    path.write_text(text)
    assert cli.main(["run", str(folder), "--steps", "1"]) in (1, 2)
    assert re.match(r"error\[IRC(1|43)", capsys.readouterr().err)
    shutil.rmtree(folder)


FORGED = ('"irc.send"(%primals_1, dtype({}))', '"irc.receive"(dtype({}))', '"irc.pause"()')


@pytest.mark.parametrize("traits", ["effect", "exchange", "exchange, effect", ""])
@pytest.mark.parametrize("operation", FORGED)
def test_forged_exchanges_are_refused(
    operation: str, traits: str, folder: Path, tmp_path: Path, tried: Callable[..., int]
) -> None:
    code = json.dumps(f"float32, 0)\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n(")
    line = f"  forged = {operation.format(code)}" + (f" traits({traits})" if traits else "")
    path = folder / "program.irc"
    text = re.sub(r"(?m)^forward:$", lambda _: f"forward:\n{line}", path.read_text())
    text = re.sub(r"(?m)^schedule \{$", "schedule {\n  compute forged keep()", text)
    path.write_text(text)
    assert tried("run", folder, "--steps", 1) in (1, 2)


def test_export_runs_no_code_that_a_folder_names(
    folder: Path, models: Path, tmp_path: Path, tried: Callable[..., int]
) -> None:
    models.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n" + models.read_text())
    assert tried("export", folder, "-o", tmp_path / "x.onnx") == 2


def test_defaults_of_a_function_s_attributes_are_read_from_the_model_s_folder(
    tmp_path: Path, tried: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(16))
    (tmp_path / "model").mkdir()
    tensor = TensorProto(data_type=TensorProto.FLOAT, dims=[4], name="k")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=str(secret))
    constant = helper.make_node("Constant", [], ["k"])
    constant.attribute.add(name="value", ref_attr_name="value", type=onnx.AttributeProto.TENSOR)
    opset = helper.make_opsetid("", 20)
    body = [constant, helper.make_node("Add", ["x", "k"], ["y"])]
    function = helper.make_function("of.others", "F", ["x"], ["y"], body, [opset])
    function.attribute_proto.append(helper.make_attribute("value", tensor))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("F", ["x"], ["y"], domain="of.others")],
        "g",
        [value("x", TensorProto.FLOAT, [4])],
        [value("y", TensorProto.FLOAT, [4])],
    )
    imports = [opset, helper.make_opsetid("of.others", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9, functions=[function])
    path = tmp_path / "model" / "m.onnx"
    path.write_bytes(model.SerializeToString())
    assert cli.main(["inspect", str(path)]) == 2
    assert "error[IRC312]" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", ["1" + 400 * "0", "1e400", "-1", "NaN", "true", 5000 * "[" + 5000 * "]"])
def test_numbers_of_a_plan(number: str, folder: Path, tried: Callable[..., int]) -> None:
    path = folder / "plan.json"
    plan = json.loads(path.read_text())
    for where in fields(plan):
        path.write_text(json.dumps(replaced(plan, where, "a number")).replace('"a number"', number))
        for command in (("run", "--steps", 1), *READING):
            assert tried(*command[:1], folder, *command[1:]) in (0, 1, 2)


@pytest.mark.parametrize("row", [{"folder": 1}, {"folder": True}, {"capacity_bytes": -1}, {"name": 3}])
def test_tiers_of_a_plan(row: dict[str, Any], folder: Path, tried: Callable[..., int]) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    tier = {"kind": "disk", "name": "disk", "capacity_bytes": 1 << 20, "folder": None, "is_duplex": False}
    (folder / "plan.json").write_text(json.dumps(plan | {"tier_configs": [tier | row]}))
    assert tried("run", folder, "--steps", 1) == 2


@pytest.mark.parametrize(
    "operation",
    [
        *("set_.source_Tensor", "as_strided_.default", "requires_grad_.default", "detach_.default"),
        *("_backward.default", "_resize_output_.default", "_sparse_coo_tensor_unsafe.default"),
    ],
)
def test_operations_that_change_what_a_tensor_is_are_refused(
    operation: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "program.irc"
    text, count = re.subn(r"aten\.tanh\.default(?=\()", f"aten.{operation}", path.read_text())
    assert count
    path.write_text(text)
    assert cli.main(["run", str(folder), "--steps", "1"]) == 1
    assert (
        f"error[IRC132]: aten.{operation} is not an operation that a file may hold" in capsys.readouterr().err
    )


def test_views_of_several_tensors_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A chain of them would be written out twice as long with each: 24 lines took minutes and 7 GB."""
    path = folder / "program.irc"
    text = path.read_text()
    found = re.search(r"^  input %(\w+): (\S+ @\w+) input", text, re.MULTILINE)
    assert found is not None
    name, kind = found.groups()
    lines = [
        f"  twice_{k} = aten.expand_as.default(%{before}, %{before}) -> %twice{k}: {kind} traits(view)"
        for k, before in enumerate([name, *(f"twice{k}" for k in range(23))])
    ]
    path.write_text(text.replace("forward:\n", "forward:\n" + "\n".join(lines) + "\n", 1))
    assert cli.main(["run", str(folder), "--steps", "1"]) == 1
    assert "aten.expand_as.default is a view of several tensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    "op", ["load_library", "import_module", "_dir.append", "aten.nope.default", "aten.relu"]
)
def test_a_text_names_an_operation_of_torch_or_nothing(op: str) -> None:
    with pytest.raises(VerificationError, match=r"IRC132.*is not an operation of torch"):
        function_of(op)


def test_names_of_folders_reach_no_terminal_as_they_are(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = folder.rename(tmp_path / "odd\x1b[31m\nname")
    target = tmp_path / "page\x1b[0m.html"
    assert cli.main(["run", str(odd), "--steps", "1", "-v"]) == 0
    assert cli.main(["report", str(odd), "-o", str(target), "-v"]) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err and "\nname" not in said.out + said.err and target.is_file()
