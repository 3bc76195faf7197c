"""Fitted modules as drop-ins, by the checks of `benchmarks.drop_in`, and that these checks can fail."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.drop_in import families
from benchmarks.drop_in.__main__ import main
from benchmarks.drop_in.comparison import Difference, check_same
from benchmarks.drop_in.models import MODELS, Arguments
from benchmarks.drop_in.plans import PLANS, PlanKind
from benchmarks.drop_in.refusals import FOLDERS, collect, page
from benchmarks.drop_in.registry import CHECKS, ROWS, Check, Outcome, Verdict, run_check
from benchmarks.drop_in.trial import Trial, Workshop
from irc.ir import UnsupportedError

ROOT = Path(__file__).parents[1]

assert families


# ---------------------------------------------------------------------- the checks


def _subset() -> list[Any]:
    """Every fourth check of each row (one of each row at least), with plans and models in turns.

    The whole matrix is what `python -m benchmarks.drop_in` runs; the subset has every row, plan and model. A
    model comes with one plan alone, so that it is planned once.
    """
    plans = list(PLANS)
    plan_of = {name: plans[index % len(plans)] for index, name in enumerate(MODELS)}
    chosen: list[Any] = []
    for row in ROWS:
        checks = [check for check in CHECKS.values() if check.row == row]
        for index, check in enumerate(checks[::4]):
            model = check.models[index % len(check.models)]
            plan = plan_of.get(model, plans[len(chosen) % len(plans)])
            name = f"{row}-{check.name}-{model}-{plan}".replace(" ", "_")
            chosen.append(pytest.param(check, plan, model, id=name))
    return chosen


@pytest.fixture(scope="module")
def workshop() -> Workshop:
    return Workshop()


@pytest.mark.parametrize(("check", "plan", "model"), _subset())
def test_a_fitted_module_does_what_the_original_does(
    check: Check, plan: str, model: str, workshop: Workshop
) -> None:
    outcome = run_check(check, PLANS[plan], model, workshop)
    assert outcome.verdict in (Verdict.PASS, Verdict.REFUSED), f"{check.promise} {outcome.message}"


@pytest.mark.parametrize("model", ["experts", "structures"])
def test_tight_plans_of_the_models_compute_things_twice(model: str, workshop: Workshop) -> None:
    plan = Trial(PLANS["min"], MODELS[model], workshop).pair().ours.module.plan
    assert sum(decision.runs_again for decision in plan.decisions) > 20


def test_every_row_has_checks_on_every_kind_of_model() -> None:
    assert {check.row for check in CHECKS.values()} == set(ROWS)
    assert {model for check in CHECKS.values() for model in check.models} >= set(MODELS)


# ---------------------------------------------------------------------- that they can fail

Forward = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...]], Any]


def _plan(forward: Forward | None = None, at_planning: Callable[[nn.Module], object] | None = None) -> Any:
    """A plan whose module is the original itself, with another forward."""

    def fit(module: nn.Module, arguments: Arguments, options: Any) -> nn.Module:
        if at_planning is not None:
            at_planning(module)
        original, other = type(module), forward or _as_it_is

        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return other(self, lambda *given: original.forward(self, *given, **kwargs), args)

        module.__class__ = type(original.__name__, (original,), {"forward": run})
        return module

    return PlanKind("injected", fit, "for tests")


def _as_it_is(module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return run(*args)


def _ran(name: str, plan: PlanKind, model: str) -> Outcome:
    return run_check(CHECKS[name], plan, model, Workshop())


class _Doubles(torch.autograd.Function):
    """The identity, with twice its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def _draws_more(module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = run(*args)
    torch.rand(1)
    return result


def _counts_twice(module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    run(*args)
    return run(*args)


def _refuses_too_late(module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    run(*args)
    raise UnsupportedError("IRC999", "no", help="yes")


def _refuses(module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    raise UnsupportedError("IRC999", "not this", help="another")


def _without_help(module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    raise UnsupportedError("IRC999", "not this")


def _off(module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return run(*args) * (1 + 1e-7)


def _crashes(module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    raise KeyError("primals_1")


def _casts(module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return run(*args).double()


@pytest.mark.parametrize(
    ("name", "model", "forward", "words"),
    [
        ("three steps", "experts", _off, "is off by"),
        ("three steps", "experts", lambda m, run, args: _Doubles.apply(run(*args)), "is off by"),
        ("three steps", "experts", _draws_more, "is off by"),
        ("three steps", "experts", _crashes, "KeyError"),
        ("three steps", "experts", _casts, "of type torch.float64"),
        ("three steps", "experts", _refuses, "refused where the row promises that it works: IRC999"),
        ("statistics after training", "u-net", _counts_twice, "off by"),
        ("a norm is frozen after planning", "u-net", _refuses_too_late, "has changed something: buffer"),
        ("a norm is frozen after planning", "u-net", _without_help, "without a word on what to do"),
        ("a generator of the model s own", "own", _draws_more, "is off by"),
    ],
)
def test_a_wrong_module_is_a_fail(name: str, model: str, forward: Any, words: str) -> None:
    outcome = _ran(name, _plan(forward), model)
    assert outcome.verdict is Verdict.FAIL and words in outcome.message, outcome


def test_planning_that_changes_something_is_a_fail() -> None:
    def write(module: nn.Module) -> None:
        with torch.no_grad():
            next(module.parameters()).add_(1.0)

    assert "planning has changed something" in _ran("three steps", _plan(None, write), "experts").message
    outcome = _ran("three steps", _plan(None, lambda module: torch.rand(1)), "experts")
    assert outcome.verdict is Verdict.FAIL and "the generator's state" in outcome.message


def test_the_original_itself_passes_and_a_refusal_is_one() -> None:
    for name, model in (("three steps", "experts"), ("backward twice with a retained graph", "structures")):
        assert _ran(name, _plan(), model).verdict is Verdict.PASS
    outcome = _ran("a norm is frozen after planning", _plan(_refuses), "u-net")
    assert (outcome.verdict, outcome.code, outcome.help) == (Verdict.REFUSED, "IRC999", "another")


def test_a_refusal_in_backward_is_a_fail_unless_nothing_tells_earlier() -> None:
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise _NotImplemented("IRC999", "no", help="yes")

    plan = _plan(lambda module, run, args: Late.apply(run(*args)))
    outcome = _ran("inputs ask for gradients after planning", plan, "experts")
    assert outcome.verdict is Verdict.FAIL and "only in backward" in outcome.message
    assert _ran("a penalty on gradients", plan, "experts").verdict is Verdict.REFUSED


class _NotImplemented(UnsupportedError, NotImplementedError):
    """As the rows on other derivatives ask for."""


@pytest.mark.parametrize(
    ("found", "wanted", "words"),
    [
        (torch.ones(2), torch.ones(3), "of shape [2]"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "of type torch.float32"),
        (torch.ones(2, 2).t(), torch.ones(2, 2), "of strides (1, 2)"),
        (torch.ones(2), torch.ones(2, requires_grad=True), "requires_grad False"),
        (nn.Parameter(torch.ones(2)), torch.ones(2), "is a Parameter"),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 1.0]), "off by inf"),
        (None, torch.ones(2), "is None"),
        ({"a": 1}, {"b": 1}, "has the keys ['a']"),
        ([1, 2], [1], "has 2 elements"),
        ((1,), [1], "is a tuple"),
        (1.0, 2.0, "is 1.0"),
    ],
)
def test_what_differs_is_named(found: object, wanted: object, words: str) -> None:
    with pytest.raises(Difference, match=re.escape(words)):
        check_same(found, wanted, "it")


def test_what_is_the_same_passes() -> None:
    nan = torch.tensor([float("nan"), -0.0])
    check_same([{"a": (nan, None, 1.0)}], [{"a": (nan.clone(), None, 1.0)}], "it")
    check_same(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-6]), "it", tolerance=1e-5)


# ---------------------------------------------------------------------- the command


@pytest.fixture
def _injected(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setitem(PLANS, "right", _plan())
    monkeypatch.setitem(PLANS, "wrong", _plan(_off))


@pytest.mark.usefixtures("_injected")
def test_the_command_tells_by_its_exit_status_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--markdown", str(tmp_path / "a.md"), "--json", str(tmp_path / "a.json")]
    only = ["--rows", "2", "--models", "experts", "--checks", "three steps"]
    assert main([*only, "--plans", "right"]) == 0
    assert main([*only, "--plans", "right,wrong", *files]) == 1
    assert "right: pass" in capsys.readouterr().out
    rows = json.loads((tmp_path / "a.json").read_text())
    assert [(row["plan"], row["verdict"]) for row in rows] == [("right", "pass"), ("wrong", "FAIL")]
    written = (tmp_path / "a.md").read_text()
    assert "| three steps |" in written and "## Failures" in written and "is off by" in written


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "21"], "there is no row '21'"),
        (["--plans", "half"], "there is no plan 'half'"),
        (["--models", "resnet"], "there is no model 'resnet'"),
        (["--checks", "no such words"], "no check fits"),
        (["--markdown", "/nowhere/at/all.md"], "there is no folder"),
    ],
)
def test_a_wrong_command_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_the_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CHECKS)


# ---------------------------------------------------------------------- the page of refusals


def test_the_page_of_refusals_is_up_to_date() -> None:
    assert (ROOT / "docs" / "reference" / "errors.md").read_text() == page(), (
        "run python -m benchmarks.drop_in --refusals docs/reference/errors.md"
    )


def test_every_code_that_the_sources_name_is_on_the_page() -> None:
    named: set[str] = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            constants = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant))
            found = (re.match(r"IRC\d{3}(?=$|: )", n.value) for n in constants if isinstance(n.value, str))
            named |= {match[0] for match in found if match is not None}
    assert len(named) > 80
    assert named == {raised.code for raised in collect()}
    text = page()
    assert all(f"| {code} " in text for code in named)


def test_a_refusal_is_listed_with_its_words() -> None:
    everything = collect()
    messages = [raised.message for raised in everything if raised.code == "IRC510"]
    helps = [raised.help for raised in everything if raised.code == "IRC505"]
    assert any("retain_graph=True asks for a second backward" in message for message in messages)
    assert any(help.startswith("remove it") for help in helps)
    assert all(raised.message for raised in everything)
