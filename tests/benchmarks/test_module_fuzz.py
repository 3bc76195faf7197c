"""Random modules beside eager, and the oracle that compares them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import irc
from benchmarks.module_fuzz import compare
from benchmarks.module_fuzz.__main__ import main, page
from benchmarks.module_fuzz.blocks import KINDS
from benchmarks.module_fuzz.compare import BAD, Outcome, Verdict, examine
from benchmarks.module_fuzz.loops import run
from benchmarks.module_fuzz.programs import (
    Block,
    Loop,
    Program,
    build,
    draw,
    from_json,
    to_json,
    undescribed_options,
)
from benchmarks.module_fuzz.rounding import noise
from benchmarks.module_fuzz.running import Worker
from benchmarks.module_fuzz.shrink import shrunk
from irc.backends.torch.original import FITTED
from irc.ir import Rounding, UnsupportedError

PLAIN = Program(3, (Block("linear", 1), Block("softmax", 2)))
MODULES, GROUP = 200, 10
OPEN: dict[int, str] = {}
"""Seeds that show a fault which is not mended yet. What mends one takes its seeds out."""


@pytest.mark.parametrize("first", range(0, MODULES, GROUP))
def test_random_modules_train_as_in_eager_or_are_refused(first: int) -> None:
    outcomes = [examine(draw(seed)) for seed in range(first, first + GROUP) if seed not in OPEN]
    assert not [str(outcome) for outcome in outcomes if outcome.verdict in BAD]


def test_the_table_of_options_is_whole() -> None:
    assert undescribed_options() == set() and len(KINDS) >= 60


def test_a_seed_draws_the_same_program_each_time() -> None:
    programs = [draw(seed) for seed in range(40)]
    assert programs == [draw(seed) for seed in range(40)]
    assert programs == [from_json(to_json(program)) for program in programs]
    assert len(set(map(str, programs))) == 40


@dataclass(frozen=True)
class _Fault:
    """Spoils a tensor of each record of the fitted module, and has its plans name some tensors.

    Args:
        tensor: As records name it; nothing is spoilt if there is none.
        ulps: By how many ulps of its largest element.
        roundings: What the plans name.
    """

    tensor: str
    ulps: float
    roundings: tuple[Rounding, ...] = ()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        optimize = irc.optimize

        def naming(*args: Any, **kwargs: Any) -> Any:
            fitted = optimize(*args, **kwargs)
            for compiled in vars(fitted)[FITTED].compiled_plans:
                compiled.program.noticed_roundings.update(dict.fromkeys(self.roundings))
            return fitted

        monkeypatch.setattr(irc, "optimize", naming)
        monkeypatch.setattr(compare, "run", self._run)

    def _run(self, program: Program, module: nn.Module, *, applies: bool = True) -> Any:
        steps, reference = run(program, module, applies=applies), None
        while True:
            try:
                record = steps.send(reference)
            except StopIteration:
                return
            if not applies and isinstance(value := record.numbers.get(self.tensor), Tensor):
                step = self.ulps * torch.finfo(value.dtype).eps * value.abs().max()
                spoilt = value.clone()
                spoilt.view(-1)[value.abs().argmax()] += step
                record.numbers[self.tensor] = spoilt
            reference = yield record


SCALE, BIAS = "gradient of scale", "gradient of blocks.0.block.l.bias"


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (_Fault(SCALE, 1), "undeclared, rounding"),
        (
            _Fault(SCALE, 1, (Rounding("another", ("blocks.0.block.l.weight", "output 0")),)),
            "undeclared, rounding",
        ),
        (_Fault(SCALE, 1e6, (Rounding("another", ()),)), "undeclared, not rounding"),
        (_Fault(SCALE, 1000, (Rounding("it", ("scale",)),)), "named, but not rounding"),
        (_Fault(SCALE, 1000, (Rounding("all"),)), "named, but not rounding"),
        (_Fault("forward 0, output 0", 1, (Rounding("it", ("output 1",)),)), "undeclared, rounding"),
        (_Fault("loss 0", 1, (Rounding("all"),)), "undeclared, rounding"),
        (_Fault("parameter scale", 1, (Rounding("all"),)), "undeclared, rounding"),
    ],
)
def test_a_difference_is_judged_by_its_tensor(
    monkeypatch: pytest.MonkeyPatch, fault: _Fault, cause: str
) -> None:
    fault.install(monkeypatch)
    outcome = examine(PLAIN)
    assert outcome.verdict is Verdict.DIFFERENT and outcome.cause == cause
    assert f": {fault.tensor} by " in outcome.message and "; 1 tensors: " in outcome.message


@pytest.mark.parametrize(
    ("fault", "differing"),
    [
        (_Fault("", 0, (Rounding("it", ("scale",)), Rounding("all"))), ()),
        (_Fault(SCALE, 1, (Rounding("it", ("scale",)), Rounding("other", ("output 0",)))), ("it",)),
        (_Fault(SCALE, 50, (Rounding("it", ("scale",)), Rounding("all"))), ("all", "it")),
        (_Fault("forward 0, output 0", 50, (Rounding("it", ("output 0",)),)), ("it",)),
        (_Fault(SCALE, 1e6, (Rounding("it", ("scale",), is_more=True),)), ("it",)),
    ],
)
def test_named_differences_that_are_roundings_pass_and_are_counted(
    monkeypatch: pytest.MonkeyPatch, fault: _Fault, differing: tuple[str, ...]
) -> None:
    fault.install(monkeypatch)
    outcome = examine(PLAIN)
    assert outcome.verdict is (Verdict.ROUNDING if differing else Verdict.EQUAL), str(outcome)
    assert outcome.roundings == tuple(sorted(map(str, fault.roundings))) and outcome.differing == differing
    assert outcome.off == ((fault.tensor,) if differing else ())


def test_a_sum_that_cancels_may_differ_by_eagers_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a bias before a norm is what rounding leaves of terms whose sum is zero."""
    seed = next(seed for seed in range(100) if KINDS["linear"].variant(seed)[1] == "s.l(x)")
    program = replace(PLAIN, blocks=(Block("linear", seed), Block("batch_norm", 2)), loop=Loop(steps=1))
    (record, *_) = run(program, build(program))
    bias = record.numbers[BIAS]
    shift = noise(program, [record])[BIAS]
    assert bias.abs().max() < 1e-6 < shift * 1e3
    for shifts, verdict in ((5, Verdict.ROUNDING), (1000, Verdict.DIFFERENT)):
        ulps = shifts * shift / (torch.finfo(bias.dtype).eps * float(bias.abs().max()))
        with monkeypatch.context() as patch:
            _Fault(BIAS, ulps, (Rounding("it", ("blocks.0.block.l.bias",)),)).install(patch)
            assert ulps > 100 and examine(program).verdict is verdict


def test_noise_leaves_a_maximum_where_its_gradient_finds_it() -> None:
    seed = next(seed for seed in range(1000) if KINDS["order"].variant(seed)[1] == "x + x.max()")
    program = replace(PLAIN, blocks=(Block("order", seed), Block("softmax", 2)), loop=Loop(steps=1))
    assert noise(program, list(run(program, build(program))))["gradient of scale"] > 0


def test_noise_runs_through_lstms_that_autocast_casts() -> None:
    """The looks at what a step computes read strided tensors of two elements, too."""
    program = replace(
        PLAIN, blocks=(Block("average_pool", 938), Block("recurrent", 68)), loop=Loop(autocast="all", steps=1)
    )
    shifts = noise(program, list(run(program, build(program))))
    assert shifts["gradient of blocks.1.block.layer.weight_hh_l0"] > 0


def test_the_page_tells_which_names_never_differed() -> None:
    texts = "the gradient of input 0, which", "numbers of LSTM layers (a.py:3 in forward): eager"
    rows = [
        Outcome(1, Verdict.EQUAL, roundings=texts),
        Outcome(2, Verdict.ROUNDING, roundings=texts, differing=texts[:1]),
    ]
    lines = page(rows).splitlines()
    assert "names of roundings that never differed: 1 of 2" in lines
    (row,) = (line.split() for line in lines if line.startswith("| numbers of LSTM"))
    assert row[-5:] == ["|", "2", "|", "0", "|"]


def test_a_peak_over_the_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(irc, "measured_peak_bytes", lambda *_, **__: 1 << 40)
    assert examine(PLAIN).verdict is Verdict.OVER


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (UnsupportedError("IRC332", "no"), Verdict.REFUSED),
        (UnsupportedError("IRC000", "a defect"), Verdict.CRASH),
        (RuntimeError("view size"), Verdict.CRASH),
    ],
)
def test_errors_are_refusals_or_crashes(
    monkeypatch: pytest.MonkeyPatch, error: Exception, verdict: Verdict
) -> None:
    def planned(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(compare, "_planned", planned)
    assert examine(PLAIN).verdict is verdict


def test_what_eager_refuses_counts_apart() -> None:
    assert examine(replace(PLAIN, dtype="int32")).verdict is Verdict.EAGER


def test_shrinking_leaves_what_the_fault_needs() -> None:
    blocks = Block("linear", 1), Block("gru_cell", 2, "gated"), Block("softmax", 3)
    program = Program(
        0, blocks, "min", {"gap": 0.0, "swap": "disk"}, Loop(clips=True, looks=True), "bfloat16", rows=2
    )

    def has_fault(program: Program) -> bool:
        kinds = {block.kind for block in program.blocks}
        return "gru_cell" in kinds and "swap" in program.options and program.loop.clips

    expected = Program(
        0, (Block("gru_cell", 2),), options={"swap": "disk"}, loop=Loop(steps=1, clips=True), rows=2
    )
    assert shrunk(program, has_fault) == expected


def test_a_process_that_dies_is_a_crash() -> None:
    worker = Worker()
    try:
        assert worker.examine(PLAIN).verdict is Verdict.EQUAL
        os.kill(worker.pid, signal.SIGKILL)
        outcome = worker.examine(PLAIN)
        assert outcome.verdict is Verdict.CRASH and outcome.cause == "the process ended with -9"
        assert worker.examine(PLAIN).verdict is Verdict.EQUAL
    finally:
        worker.close()


def test_the_command_goes_on_from_its_journal(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    journal = ["--journal", str(tmp_path / "journal")]
    main(["--seeds", "2:4", *journal])
    lines = (tmp_path / "journal").read_text().splitlines()
    main(["--seeds", "2:4", *journal])
    assert (tmp_path / "journal").read_text().splitlines() == lines and len(lines) == 3
    assert "refused: " in capsys.readouterr().out
