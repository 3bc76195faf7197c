"""The ONNX backend suite against importers: how cases end, what is counted, and the page."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto

from benchmarks.onnx_conformance import environments
from benchmarks.onnx_conformance.__main__ import main
from benchmarks.onnx_conformance.cases import GROUPS, SUBSETS, Case, load_cases
from benchmarks.onnx_conformance.comparison import difference
from benchmarks.onnx_conformance.importers import PEERS, Importer, Run, Unsupported, find, to_numpy, to_torch
from benchmarks.onnx_conformance.own import IRC
from benchmarks.onnx_conformance.page import to_page
from benchmarks.onnx_conformance.results import Outcome, Report, Result
from benchmarks.onnx_conformance.running import run_cases, select

REFERENCE = find("onnx.reference")
OPERATORS = "test_operator_(exp|maxpool|sqrt|max|min)$"


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return load_cases()


def named(cases: Sequence[Case], pattern: str) -> list[Case]:
    found = select(cases, pattern)
    assert found
    return found


# ---------------------------------------------------------------------- the cases


def test_the_suite_of_the_wheel_is_counted_as_a_whole(cases: list[Case]) -> None:
    groups = Counter(case.group for case in cases)
    assert len(cases) == 2033 and set(groups) == set(GROUPS)
    assert groups == Counter(
        {"node": 1884, "simple": 23, "pytorch-converted": 82, "pytorch-operator": 35, "real": 9}
    )
    subsets = Counter(subset for case in cases for subset in case.subsets)
    assert subsets == {"original": 1404, "expanded": 480, "torch-types": 1573, "core": 868}
    assert set(subsets) == set(SUBSETS)


def test_random_cases_are_those_whose_outputs_are_drawn(cases: list[Case]) -> None:
    assert [case.name for case in cases if case.is_random] == [
        "test_bernoulli",
        "test_bernoulli_double",
        "test_bernoulli_double_expanded",
        "test_bernoulli_expanded",
        "test_bernoulli_seed",
        "test_bernoulli_seed_expanded",
        "test_training_dropout",
        "test_training_dropout_default",
        "test_training_dropout_default_mask",
        "test_training_dropout_mask",
    ]


def test_data_is_read_from_files_and_made_for_light_models(cases: list[Case]) -> None:
    (sequences,) = named(cases, "^test_sequence_model6$")
    ((inputs, outputs),) = sequences.read()
    assert isinstance(inputs[0], np.ndarray) and outputs[0].shape == ()
    (light,) = named(cases, "^test_squeezenet$")
    ((inputs, outputs),) = light.read()
    assert inputs[0].shape == (1, 3, 224, 224) and outputs[0].shape == (1, 1000, 1, 1)
    assert inputs[0].ravel()[0] == 0 and inputs[0].max() < 1


# ---------------------------------------------------------------------- outcomes


def answers(change: Any) -> Importer:
    """The reference, with its outputs changed."""

    def load(model: ModelProto) -> Run:
        run = REFERENCE.load(model)
        return lambda *values: change(run(*values))

    return Importer("changed", load)


def raises(error: Exception, is_strict: bool = False) -> Importer:
    def load(model: ModelProto) -> Run:
        raise error

    return Importer("raises", load, is_strict)


@pytest.mark.parametrize(
    ("importer", "outcome", "why"),
    [
        (REFERENCE, Outcome.PASS, ""),
        (answers(lambda outs: [o + 1 for o in outs]), Outcome.WRONG, "values are off, by up to 1"),
        (answers(lambda outs: [o.astype(np.float64) for o in outs]), Outcome.WRONG, "float64 for float32"),
        (answers(lambda outs: [o[None] for o in outs]), Outcome.WRONG, "shape ["),
        (answers(lambda outs: []), Outcome.WRONG, "0 outputs for 1"),
        (answers(lambda outs: [outs]), Outcome.WRONG, "a list for an array"),
        (raises(Unsupported("no complex numbers")), Outcome.UNSUPPORTED, "no complex numbers"),
        (raises(NotImplementedError("Exp")), Outcome.UNSUPPORTED, "NotImplementedError: Exp"),
        (raises(KeyError("Converter is not registered")), Outcome.UNSUPPORTED, "not registered"),
        (raises(ValueError("Unsupported: Exp")), Outcome.UNSUPPORTED, "Unsupported: Exp"),
        (raises(ValueError("no such axis")), Outcome.ERROR, "ValueError: no such axis (test_onnx"),
        (raises(NotImplementedError("Exp"), is_strict=True), Outcome.ERROR, "NotImplementedError: Exp"),
        (raises(Unsupported("Exp"), is_strict=True), Outcome.UNSUPPORTED, "Exp"),
    ],
)
def test_a_case_ends_as_its_importer_behaves(
    cases: list[Case], importer: Importer, outcome: Outcome, why: str
) -> None:
    (result,) = run_cases(importer, named(cases, "^test_operator_exp$"), 20)
    assert result.outcome is outcome and why in result.why


def test_a_hang_and_a_death_cost_one_case_each(cases: list[Case]) -> None:
    def load(model: ModelProto) -> Run:
        operator = model.graph.node[0].op_type
        if operator == "Max":
            time.sleep(60)
        if operator == "Min":
            os.kill(os.getpid(), signal.SIGKILL)
        if operator == "Exp":
            os._exit(3)
        return REFERENCE.load(model)

    results = list(run_cases(Importer("fragile", load), named(cases, OPERATORS), 1))
    assert {result.name.removeprefix("test_operator_"): result.outcome.value for result in results} == {
        "exp": "crash",
        "max": "timeout",
        "maxpool": "pass",
        "min": "crash",
        "sqrt": "pass",
    }
    whys = [result.why for result in results if result.why]
    assert whys == [
        "the process ended with status 3",
        "not done after 1 s",
        "the process ended with signal 9",
    ]


def test_an_importer_that_changes_the_model_changes_its_own(cases: list[Case]) -> None:
    def load(model: ModelProto) -> Run:
        run = REFERENCE.load(model)
        model.graph.ClearField("node")
        return run

    chosen = named(cases, "^test_operator_exp$") * 2
    assert [r.outcome for r in run_cases(Importer("clears", load), chosen, 20)] == [Outcome.PASS] * 2


def test_outputs_are_compared_in_kind_type_and_value() -> None:
    one = np.array([1.0, np.nan, np.inf], np.float32)
    assert difference([one], [one * np.float32(1.0009)], 1e-3, 0) is None
    assert difference([one], [one * np.float32(1.002)], 1e-3, 0) == (
        "output 0: 1 of 3 values are off, by up to 0.002"
    )
    half, near = np.array([[1.0], [1.0078125]]).astype(ml_dtypes.bfloat16)
    assert difference([half], [near], 1e-3, 0) is None
    assert difference([half], [half.view(np.uint16)], 1e-3, 0) == "output 0: uint16 for bfloat16"
    assert difference([[one, one]], [[one, one]], 0, 0) is None
    assert difference([[one, one]], [[one]], 0, 0) == "output 0: in the sequence, 1 outputs for 2"
    assert difference([[one]], [one], 0, 0) == "output 0: an array for a sequence"
    assert difference([None], [None], 0, 0) is None
    assert difference([None], [one], 0, 0) == "output 0: an array for nothing"
    assert difference([one], [None], 0, 0) == "output 0: nothing for an array"
    assert difference([np.array(["a"], object)], [np.array(["a"])], 0, 0) is None
    assert difference([np.array(["a"], object)], [np.array(["b"], object)], 0, 0) == "output 0: other strings"
    assert difference([one[:1]], [-one[1:2]], 1e-3, 0) == "output 0: 1 of 1 values are off"
    wide, other = np.array([[2**62, -5], [2**62, -4]])
    assert difference([wide], [wide], 0, 0) is None
    assert difference([wide], [other], 0, 0) == "output 0: 1 of 2 values are off, by up to 1"
    turned = np.array([1 + 1j], np.complex64)
    assert difference([turned], [turned.conj()], 1e-3, 0) == "output 0: 1 of 1 values are off, by up to 2"


def test_values_go_to_torch_and_back() -> None:
    values = [
        np.arange(3.0, dtype=np.float16),
        np.arange(3).astype(ml_dtypes.bfloat16),
        np.arange(3).astype(ml_dtypes.float8_e5m2),
        np.array(5, np.uint16),
        [np.ones(2, np.int8)],
        None,
    ]
    assert difference(values, [to_numpy(to_torch(value)) for value in values], 0, 0) is None
    with pytest.raises(Unsupported, match="torch has no elements of int4"):
        to_torch(np.zeros(2, ml_dtypes.int4))


def test_onnxruntime_gets_and_gives_types_that_numpy_lacks(cases: list[Case]) -> None:
    pattern = "^test_castlike_(FLOAT_to_BFLOAT16|INT4_to_FLOAT|FLOAT_to_UINT2|FLOAT8E5M2_to_FLOAT16)$"
    results = list(run_cases(find("onnxruntime"), named(cases, pattern), 30))
    assert [(result.outcome, result.why) for result in results] == [(Outcome.PASS, "")] * 4


# ---------------------------------------------------------------------- irc


def test_irc_passes_or_refuses_by_name(cases: list[Case]) -> None:
    pattern = (
        "^test_(abs|conv_with_strides_padding|batchnorm_epsilon_training_mode|batchnorm_epsilon"
        "|layer_normalization_3d_axis1_epsilon_expanded|operator_addmm|Linear|gradient_of_add)$"
    )
    results = {result.name: result for result in run_cases(IRC, named(cases, pattern), 30)}
    refused = results.pop("test_gradient_of_add")
    assert refused.outcome is Outcome.UNSUPPORTED
    assert refused.why.startswith("IRC301: the operator ai.onnx.preview.training::Gradient (opset 1)")
    assert len(results) == 7
    assert {name: result.why for name, result in results.items() if result.outcome is not Outcome.PASS} == {}


# ---------------------------------------------------------------------- the command


def run(*arguments: str) -> int:
    return main(["--group", "pytorch-operator", "-k", OPERATORS, *arguments])


def test_the_command_writes_what_it_found_and_reads_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, page = tmp_path / "irc.json", tmp_path / "page.md"
    assert run("--json", str(written), "--markdown", str(page), "-v") == 0
    said = capsys.readouterr().out
    assert "pass        pytorch-operator  test_operator_exp\n" in said
    assert "| pytorch-operator | 5     | 5    | 0 " in said
    assert "| irc      | 5/5              | 0     | 5/5 | 0     |" in page.read_text()
    (report,) = [Report.from_json(data) for data in json.loads(written.read_text())]
    assert [result.name for result in report.results][:2] == ["test_operator_exp", "test_operator_max"]
    again = tmp_path / "again.md"
    assert run("--read", str(written), "--markdown", str(again), "-v") == 0
    assert again.read_text() == page.read_text()
    assert "test_operator_exp" not in capsys.readouterr().out  # nothing has run


def test_a_wrong_answer_is_exit_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "its_importer.py").write_text(
        "import numpy\ndef load(model):\n    return lambda *values: [numpy.zeros(1)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run("--importer", "its_importer:load") == 1
    assert "wrong    test_operator_exp (Exp): output 0: shape [1] for [" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("-k (", "IRC400", "is no regular expression"),
        ("-k no_such_case", "IRC400", "no case fits these options"),
        ("--limit 0", "IRC400", "--limit is 0 s"),
        ("--peers all", "IRC400", "add --envs DIR"),
        ("--peers onnx2jax --envs .", "IRC400", "there is no peer 'onnx2jax'"),
        ("--importer nowhere", "IRC437", "there is no importer 'nowhere' here"),
        ("--importer json:nothing", "IRC437", "module 'json' has no attribute 'nothing'"),
        ("--importer no_such_module:load", "IRC437", "No module named 'no_such_module'"),
        ("--read {here}", "IRC438", "holds no reports"),
        ("--json {missing}/x.json", "IRC435", "there is no folder"),
    ],
)
def test_what_is_wrong_with_a_command_is_told(
    arguments: str, code: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text('[{"format": 0}]')
    words = arguments.format(here=tmp_path / "other.json", missing=tmp_path / "missing").split()
    assert run(*words) == 2
    said = capsys.readouterr().err
    assert f"error[{code}]" in said and told in said and "help: " in said


def test_a_peer_runs_in_its_environment_without_irc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, requirements in environments.REQUIREMENTS.items():
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
        (tmp_path / name / "installed.txt").write_text("\n".join(requirements) + "\n")
    (tmp_path / "onnx.reference" / "bin" / "python").unlink()
    (tmp_path / "onnx.reference" / "bin" / "python").write_text(
        f'#!/bin/sh\nPYTHONPATH="{os.pathsep.join(sys.path)}" exec {sys.executable} "$@"\n'
    )
    (tmp_path / "onnx.reference" / "bin" / "python").chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", "nowhere")
    report = environments.run_peer("onnx.reference", tmp_path, ["pytorch-operator"], OPERATORS, 20)
    assert report.failure == "" and [r.outcome for r in report.results] == [Outcome.PASS] * 5
    assert report.versions["onnx"] == "1.23.2"


def test_a_peer_that_cannot_be_installed_has_a_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environments.sys, "executable", "/bin/false")
    page = tmp_path / "page.md"
    assert run("--peers", "onnx2fx", "--envs", str(tmp_path / "envs"), "--markdown", str(page)) == 0
    assert "cannot be installed: exit status 1" in capsys.readouterr().out
    assert "| onnx2fx  | cannot be installed: exit status 1 |" in page.read_text()


def test_every_peer_has_pinned_requirements() -> None:
    assert environments.REQUIREMENTS.keys() == PEERS.keys()
    for requirements in environments.REQUIREMENTS.values():
        assert all("==" in requirement for requirement in requirements)


# ---------------------------------------------------------------------- the page


def stored() -> list[Report]:
    def result(name: str, outcome: str, why: str, *operators: str, **more: Any) -> Result:
        return Result(name, "node", Outcome(outcome), why, 0.1, operators, 18, ("original", "core"), **more)

    antialias = "with antialias=1 is not supported"
    own = [
        result("test_a", "pass", "", "Add"),
        result(
            "test_b", "unsupported", "IRC301: the operator ai.onnx::Det (opset 22) is not supported", "Det"
        ),
        result("test_c", "unsupported", f"IRC302: ai.onnx::Resize (opset 19) {antialias}"),
        result("test_d", "unsupported", f"IRC302: ai.onnx::Resize (opset 18) {antialias}"),
        result("test_e", "unsupported", "IRC304: the input 'x' has STRING, which torch has not", "Cast"),
        result("test_f", "wrong", "output 0: 1 of 9 values are off, by up to 2", "Mul"),
        result("test_g", "timeout", "not done after 30 s", "Loop"),
        result("test_h", "wrong", "output 0: 9 of 9 values are off", "Bernoulli", is_random=True),
    ]
    peer = [
        result("test_a", "wrong", "output 0: shape [1] for [2]", "Add"),
        result("test_b", "error", "RuntimeError: Couldn't load custom C++ ops.", "Det"),
    ]
    day = "2026-01-31"
    return [
        Report("irc", {"irc": "1.0"}, day, 30.0, 12.4, own),
        Report("onnx2fx", {"onnx2fx": "0.0.1", "torch": "2.13.0"}, day, 30.0, 3, peer),
        Report("onnx2pytorch", {"onnx2pytorch": "0.6.0"}, day, 30.0, 1, own[:1]),
        Report("onnx2torch", {"onnx2torch": "1"}, day, 30.0, failure="no pip"),
    ]


PAGE = """\
| importer                     | core | wrong | original | wrong | node | wrong | all | wrong |
|------------------------------|------|-------|----------|-------|------|-------|-----|-------|
| irc                          | 1/8  | 1     | 1/8      | 1     | 1/8  | 1     | 1/8 | 1     |
| onnx2fx                      | 0/2  | 1     | 0/2      | 1     | 0/2  | 1     | 0/2 | 1     |
| onnx2pytorch                 | 1/1  | 0     | 1/1      | 0     | 1/1  | 0     | 1/1 | 0     |
| onnx2torch                   | -    | -     | -        | -     | -    | -     | -   | -     |
| any of onnx2fx, onnx2pytorch | 1/2  |       | 1/2      |       | 1/2  |       | 1/2 |       |

How all cases end:

| importer     | cases  | pass | unsupported | wrong | random | error | timeout | crash | seconds |
|--------------|--------|------|-------------|-------|--------|-------|---------|-------|---------|
| irc          | 8      | 1    | 4           | 1     | 1      | 0     | 1       | 0     | 12      |
| onnx2fx      | 2      | 0    | 0           | 1     | 0      | 1     | 0       | 0     | 3       |
| onnx2pytorch | 1      | 1    | 0           | 0     | 0      | 0     | 0       | 0     | 1       |
| onnx2torch   | no pip | -    | -           | -     | -      | -     | -       | -     | -       |

Some importers leave regions of images, and reading images, to torchvision's operators. Where its wheel is
for another build of torch (for CUDA, beside torch for the CPU), it lacks them, and such cases fail for that
reason:
1 of onnx2fx.

| importer     | versions                    | date       | time limit |
|--------------|-----------------------------|------------|------------|
| irc          | irc 1.0                     | 2026-01-31 | 30 s       |
| onnx2fx      | onnx2fx 0.0.1, torch 2.13.0 | 2026-01-31 | 30 s       |
| onnx2pytorch | onnx2pytorch 0.6.0          | 2026-01-31 | 30 s       |
| onnx2torch   | onnx2torch 1                | 2026-01-31 | 30 s       |

## What irc refuses

| operator | reason                                                   | cases |
|----------|----------------------------------------------------------|-------|
| Resize   | with antialias=1 (IRC302)                                | 2     |
| Cast     | the input '...' has STRING, which torch has not (IRC304) | 1     |
| Det      | no lowering for opset 22 (IRC301)                        | 1     |

## Where irc is wrong, fails or does not end

| outcome | case   | operator | what                                        |
|---------|--------|----------|---------------------------------------------|
| wrong   | test_f | Mul      | output 0: 1 of 9 values are off, by up to 2 |
| timeout | test_g | Loop     | not done after 30 s                         |

## Random outcomes

The outputs of these are drawn, from a generator that the standard leaves open. Another implementation cannot
have the expected numbers, so *wrong* says nothing here; it is counted as *random* above.

| case   | irc   | onnx2fx | onnx2pytorch | onnx2torch |
|--------|-------|---------|--------------|------------|
| test_h | wrong | -       | -            | -          |
"""


def test_the_page_from_stored_results() -> None:
    reports = [Report.from_json(json.loads(json.dumps(report.to_json()))) for report in stored()]
    page = to_page(reports)
    assert page == to_page(stored())
    assert page.startswith(
        "# ONNX conformance\n\nWritten by `python -m benchmarks.onnx_conformance --peers all"
    )
    assert page.partition("what matters most for training.\n\n")[2] == PAGE
