"""Fits known architectures to 60% of their memory, trains each beside the original, and counts what works.

    python -m benchmarks.architectures
    python -m benchmarks.architectures --only gpt2,bert,swin --json architectures.json
    python -m benchmarks.architectures --markdown docs/results/architectures.md

Each architecture is a small instance with random weights and one batch, in training mode. Exit status: 1
where numbers differ, a measured peak is over the predicted one, a predicted one over the budget, a plan for
100% takes more than the original or there is none, or anything fails that is no refusal by name; 2 where the
command is wrong.
"""

from __future__ import annotations

import argparse
import copy
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import irc
from irc.compiler.compare import Numbers, Outcome, numbers_of
from irc.compiler.dynamo.backend import Backend
from irc.compiler.training import compare, measured_peak_bytes
from irc.ir import BudgetError, IrcError, Plan, UnsupportedError, UsageError, first_line

from .command import chosen, parser_of, run_command, run_rows, write_json, write_page
from .harness import FittedShare, broken_promises, fit_share
from .journal import Journal
from .models.architectures import ARCHITECTURES, Instance, Maker, loss_of
from .pages import to_markdown

__all__ = ["HEADER", "Row", "main", "measure"]

_SECTION = "architectures"
_STEPS = 3
_RATE = 1e-3


@dataclass(frozen=True)
class Row:
    """One architecture, fitted and trained.

    Args:
        name: Of the architecture.
        parameters: Number of them.
        operations: Of one training step, views not counted.
        asked: Share of the baseline's peak that the budget is.
        minimum: The smallest share that a schedule was found for, where it is more than what was asked.
        budget_bytes: The budget.
        predicted_bytes: The plan's peak.
        measured_bytes: The fitted module's peak from allocator events, static bytes included.
        original_bytes: The original's.
        baseline_bytes: What a budget of 100% is.
        whole_bytes: The measured peak of a plan for 100%, where that is more than the original takes.
        numbers: Of each step, against the original's.
        specialize_branches: Whether its branches are those of the example, as it is refused otherwise.
        refusal: Code and reason, where `irc.optimize` refuses the model by name.
        graphs: Number of graphs that `irc.backend` trains it by, if it is refused; 0 if that refuses it too.
        graphs_refusal: Code and reason of that.
        failures: What does not hold.
    """

    name: str
    parameters: int = 0
    operations: int | None = None
    asked: float | None = None
    minimum: float | None = None
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    original_bytes: int | None = None
    baseline_bytes: int | None = None
    whole_bytes: int | None = None
    numbers: tuple[Numbers, ...] = ()
    specialize_branches: bool = False
    refusal: str | None = None
    graphs: int = 0
    graphs_refusal: str | None = None
    failures: tuple[str, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether something does not hold."""
        return bool(self.failures)

    @property
    def works(self) -> bool:
        """Whether it trains within its budget as the original does."""
        return (self.refusal is None or self.graphs > 0) and not self.failures

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        parameters = f"{self.parameters:,}"
        if not (self.measured_bytes and self.predicted_bytes and self.original_bytes and self.baseline_bytes):
            return (self.name, parameters, *["-"] * 7, self._result())
        worst = max(self.numbers, key=lambda n: (not n.agrees, not n.bit_equal, n.worst_gradient))
        return (
            self.name,
            parameters,
            "-" if self.operations is None else str(self.operations),
            f"{self.asked:.0%}",
            f"{self.predicted_bytes:,}",
            f"{self.measured_bytes / self.predicted_bytes:.4f}",
            f"{self.measured_bytes / self.original_bytes:.3f}",
            f"{self.baseline_bytes / self.original_bytes:.4f}",
            str(worst),
            self._result(),
        )

    def _result(self) -> str:
        if self.failures:
            return f"FAIL: {'; '.join(self.failures)}"
        if self.refusal is not None and not self.graphs:
            return f"refused: {self.refusal}; irc.backend: {self.graphs_refusal}"
        if self.refusal is not None:
            least = f", smallest {self.minimum:.0%}" if self.minimum else ""
            return (
                f"works by irc.backend, {self.graphs} graphs{least}; irc.optimize refuses it: {self.refusal}"
            )
        how = " with specialize_branches" if self.specialize_branches else ""
        if self.whole_bytes is not None and self.original_bytes is not None:
            how += f"; a plan for 100% measures {self.whole_bytes / self.original_bytes:.4f} of eager"
        return f"works{how}" + (f"; cannot fit, minimum {self.minimum:.0%}" if self.minimum else "")


HEADER = (
    "architecture",
    "parameters",
    "operations",
    "ratio",
    "predicted bytes",
    "measured/predicted",
    "measured/eager",
    "baseline/eager",
    "numbers",
    "result",
)


def measure(name: str, make: Maker, *, share: float = 0.6, time_limit: float = 2.0) -> Row:
    """Captures, fits and trains one architecture.

    Args:
        name: For the table.
        make: Makes the model and its batch.
        share: The budget as a share of the baseline's peak; where that cannot fit, the smallest that can.
        time_limit: Seconds for the search of a schedule.
    """
    row = Row(name)
    try:
        instance = make()
        row = replace(row, parameters=sum(p.numel() for p in instance.module.parameters()))
        try:
            return _measured(row, instance, share, time_limit)
        except UnsupportedError as error:
            refused = error
        if refused.code == "IRC332":
            try:
                return _measured(replace(row, specialize_branches=True), instance, share, time_limit)
            except UnsupportedError as error:
                refused = error
        return _by_graphs(replace(row, refusal=_one_line(refused)), instance, share)
    except UsageError:
        raise
    except Exception as error:
        text = first_line(error)
        return replace(row, failures=(f"{type(error).__name__}: {text}",))


_WARM_STEPS = 5
"""The most steps until what is outside of graphs is measured; one more plans with it."""

_RAISES = (1.0, 1.25, 1.6)
"""Budgets that are tried, by the one asked for; the last one is what the step takes without a plan."""


def _by_graphs(row: Row, instance: Instance, share: float) -> Row:
    """Trains a model that `irc.optimize` refuses as the refusal says, by `irc.backend`."""
    original, args, keywords = instance.module, instance.args, instance.keywords
    tensors = _state(original)
    tensors += [leaf for leaf in pytree.tree_leaves((args, keywords)) if isinstance(leaf, torch.Tensor)]
    static_bytes = sum(tensor.nbytes for tensor in tensors)

    def step(module: nn.Module) -> None:
        result = module(*args, **keywords)  # held until backward ends, as where the peak is measured
        loss_of(result).backward()
        module.zero_grad()

    def measured(module: nn.Module) -> int:
        return measured_peak_bytes(module, args, static_bytes, keywords=keywords, loss=loss_of)

    def compiled(budget: int | str, *, by_parts: bool = False) -> tuple[nn.Module, Backend]:
        torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
        module = copy.deepcopy(original)
        backend = irc.backend(budget, outside="measured", time_limit=1.0)
        run = _compiled_parts(module, backend) if by_parts else _compiled(module, backend)
        try:
            with torch.random.fork_rng(devices=[]):
                for _ in range(_WARM_STEPS):
                    is_settled = backend.outside_bytes is not None
                    step(run)
                    if is_settled:
                        break
        except UnsupportedError as error:
            if error.code != "IRC545" or by_parts:
                raise
            return compiled(budget, by_parts=True)
        if not (backend.plans or by_parts):  # the step runs as eager does, and the log says what to compile
            return compiled(budget, by_parts=True)
        with torch.no_grad():
            for tensor, start in zip(_state(module), _state(original), strict=True):
                tensor.copy_(start)
        return run, backend

    def compared(other: nn.Module) -> tuple[Numbers, ...]:
        return tuple(map(numbers_of, expected, _outcomes(other, instance)))

    def trained(budgets: Sequence[int]) -> tuple[int, Backend, tuple[Numbers, ...], int]:
        budget, *larger = budgets
        try:
            module, backend = compiled(budget)
            return budget, backend, compared(module), measured(module)
        except BudgetError:
            if not larger:
                raise
        return trained(larger)

    try:
        with torch.random.fork_rng(devices=[]):
            step(copy.deepcopy(original))  # fills what a first call fills
        original_bytes = measured(copy.deepcopy(original))
        # apart from the compiled steps: what runs between two of them counts
        expected = _outcomes(copy.deepcopy(original), instance)
        baseline_bytes = compiled("1TiB")[1].baseline_bytes
        tried = [int(share * original_bytes * more) for more in _RAISES]
        tried = [*(budget for budget in tried if budget < baseline_bytes), baseline_bytes]
        budget, backend, numbers, measured_bytes = trained(tried)
        if not all(seen.agrees for seen in numbers) and not all(
            seen.agrees for seen in compared(copy.deepcopy(original))
        ):
            return replace(row, graphs_refusal="the original's numbers differ from run to run")
    except (UnsupportedError, BudgetError) as error:
        return replace(row, graphs_refusal=_one_line(error))
    except Exception as error:
        return replace(row, failures=(f"irc.backend: {type(error).__name__}: {first_line(error)}",))
    finally:
        torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    row = replace(
        row,
        asked=budget / original_bytes,
        minimum=budget / original_bytes if budget > share * original_bytes else None,
        budget_bytes=budget,
        predicted_bytes=backend.latest_peak_bytes,
        measured_bytes=measured_bytes,
        original_bytes=original_bytes,
        baseline_bytes=baseline_bytes,
        numbers=numbers,
        graphs=len(backend.plans),
    )
    failures = broken_promises(measured_bytes, backend.latest_peak_bytes, budget)
    failures += [f"numbers differ: {seen}" for seen in numbers if not seen.agrees][:1]
    return replace(row, failures=tuple(failures))


def _compiled(module: nn.Module, backend: Backend) -> nn.Module:
    compiled: Any = torch.compile(module, backend=backend)
    return compiled


def _compiled_parts(module: nn.Module, backend: Backend) -> nn.Module:
    """The same module with its parts compiled in their place, those of its lists one by one."""
    for name, part in list(module.named_children()):
        if isinstance(part, nn.ModuleList):
            _compiled_parts(part, backend)
        else:
            setattr(module, name, _compiled(part, backend))
    return module


def _state(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _outcomes(module: nn.Module, instance: Instance) -> list[Outcome]:
    """The outcomes of some steps of plain gradient descent."""

    def copied(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
        named = {name.replace("_orig_mod.", ""): t for name, t in tensors if t is not None}
        return {name: (t.to_dense() if t.is_sparse else t).detach().clone() for name, t in named.items()}

    found: list[Outcome] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(_STEPS):
            result = module(*instance.args, **instance.keywords)
            loss_of(result).backward()
            outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            gradients = copied((name, parameter.grad) for name, parameter in module.named_parameters())
            kept = [output.detach().clone() for output in outputs]
            found.append(Outcome(kept, gradients, copied(module.named_buffers()), [torch.get_rng_state()]))
            del result, outputs
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=_RATE)
            module.zero_grad()
    return found


def _measured(row: Row, instance: Instance, share: float, time_limit: float) -> Row:
    original, args, keywords = instance.module, instance.args, instance.keywords

    def fitted_to(budget: float) -> FittedShare:
        return fit_share(
            copy.deepcopy(original),
            args,
            loss_of,
            budget,
            time_limit,
            keywords=keywords,
            specialize_branches=row.specialize_branches,
        )

    fitted = fitted_to(share)
    plan = fitted.plan
    row = replace(
        row,
        operations=len(fitted.graph.operations),
        asked=fitted.share,
        minimum=fitted.share if fitted.is_smallest else None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        seen = compare(original, fitted.module, args, _STEPS, keywords=keywords, loss=loss_of)

    def measured(module: nn.Module) -> int:
        static = fitted.graph.static_bytes
        return measured_peak_bytes(module, args, static, keywords=keywords, loss=loss_of)

    row = replace(
        row,
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.peak_bytes,
        measured_bytes=measured(fitted.module),
        original_bytes=measured(original),
        baseline_bytes=fitted.baseline_bytes,
        numbers=seen.numbers,
    )
    assert row.original_bytes is not None
    if fitted.baseline_bytes > row.original_bytes:
        whole = fitted_to(1.0).module
        measured(whole)  # kernels choose their workspaces
        row = replace(row, whole_bytes=measured(whole))
    return replace(row, failures=tuple(_broken(row, plan)))


def _broken(row: Row, plan: Plan) -> Iterator[str]:
    """What does not hold."""
    assert row.measured_bytes is not None and row.original_bytes is not None
    assert row.baseline_bytes is not None
    yield from broken_promises(row.measured_bytes, plan.peak_bytes, plan.budget_bytes)
    if row.whole_bytes is not None and row.whole_bytes > row.original_bytes:
        yield f"a plan for 100% takes {row.whole_bytes} bytes, the original {row.original_bytes}"
    if plan.budget_bytes > row.baseline_bytes:  # a plan for less is a plan for 100%
        yield f"100% fits no plan, the smallest budget is {plan.budget_bytes} bytes"
    for step, numbers in enumerate(row.numbers):
        if not numbers.agrees:
            yield f"numbers of step {step + 1} differ: {numbers}"
            break


def _one_line(error: IrcError) -> str:
    place = f" ({error.at.source})" if error.at is not None and error.at.source else ""
    return f"{error.brief}{place}"


# ---------------------------------------------------------------------- command


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    parser = parser_of(
        "architectures",
        "Fits known architectures.",
        only=None,
        time_limit=2.0,
        threads=1,
        journal=None,
        json=None,
        markdown=None,
    )
    return run_command(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    names = chosen(options.only, ARCHITECTURES, "architecture", "IRC345")
    about = {"torch": torch.__version__, "time_limit": options.time_limit}
    journal = Journal.open(options.journal, about, "irc-architectures-2", Row)

    def rows() -> Iterator[Row]:
        for name in names:
            if name not in journal.found:
                journal.append(name, [measure(name, ARCHITECTURES[name], time_limit=options.time_limit)])
            yield journal.found[name][0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, text, status = run_rows(rows(), _table)
    write_page(options.markdown, text, _SECTION)
    write_json(options.json, {"torch": torch.__version__, "rows": found})
    return status


def _table(rows: Sequence[Row]) -> str:
    refused, failed = (
        sum(bool(kind) for kind in kinds)
        for kinds in zip(*((r.refusal, r.failures) for r in rows), strict=True)
    )
    works = sum(row.works for row in rows)
    counts = f"{works} of {len(rows)} architectures work, {refused} are refused, {failed} fail."
    return "\n".join(
        [to_markdown(HEADER, [row.cells() for row in rows]), "", counts, f"torch {torch.__version__}."]
    )


if __name__ == "__main__":
    raise SystemExit(main())
