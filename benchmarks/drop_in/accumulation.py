"""Row 15: several forwards before backward, and gradients that add up over steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from irc.passes.costs.allocations import peak_bytes

from .cases import check_script, check_step
from .comparison import Difference
from .registry import check, every, having, the
from .steps import train, trains
from .trial import Side, Trial


def _orders(*order: int) -> Any:
    """Forwards for as many micro-batches as named, then their backwards in this order."""

    def step(side: Side, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        losses = [side.loss() * (1 + k) for k in range(len(order))]
        for k in order:
            losses[k].backward()
        optimizer.step()
        return [loss.detach() for loss in losses]

    return step


@check(15, every())
def two_forwards_then_backwards_in_reverse(trial: Trial) -> None:
    """f1 f2 b2 b1: gradients, statistics and the generator are eager's."""
    trains(trial, trial.pair(), step=_orders(1, 0))


@check(15, every())
def three_forwards_then_backwards_in_order(trial: Trial) -> None:
    """f1 f2 f3 b1 b2 b3, and b2 b3 b1."""
    pair = trial.pair()
    trains(trial, trial.twin(pair), step=_orders(0, 1, 2))
    trains(trial, pair, step=_orders(1, 2, 0))


@check(15, every())
def two_forwards_and_one_loss(trial: Trial) -> None:
    """One loss over two calls of the module, as in contrastive training: the sum of both gradients.

    Eager adds up the four parts of a tied weight's gradient in another order: they are equal to 1e-5.
    """

    def step(side: Side, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        loss = side.loss() * 2 + side.loss()
        loss.backward()
        optimizer.step()
        return loss.detach()

    tolerance = 1e-5 if "ties" in trial.subject.traits else None
    trains(trial, trial.pair(), step=step, tolerance=tolerance)


@check_step(15, every())
def gradients_accumulate(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """Four micro-batches before each step of the optimizer: .grad is the sum, in place."""
    optimizer.zero_grad()
    same: list[bool] = []
    held: list[Tensor | None] = []
    for _ in range(4):
        (side.loss() / 4).backward()
        now = [p.grad for p in side.module.parameters()]
        same.append(not held or all(a is b for a, b in zip(now, held, strict=True)))
        held = now
    optimizer.step()
    return same


@check_step(15, every())
def gradients_are_set_to_zero(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """zero_grad(set_to_none=False) keeps the tensors of .grad, and the next backward adds to them."""
    optimizer.zero_grad(set_to_none=False)
    side.loss().backward()
    optimizer.step()


@check(15, every())
def released_gradients_accumulate(trial: Trial) -> None:
    """accumulate_gradients=True: four micro-batches for each step of the optimizer."""

    def step(side: Side, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        for _ in range(4):
            (side.loss() / 4).backward()
        optimizer.step()

    pair = trial.fit(trial.subject.make(), trial.subject.arguments(), accumulate_gradients=True)
    trains(trial, pair, step=step)


# ---------------------------------------------------------------------- bytes

_MEASURED = the("convolution", "transformer")


@check(15, every())
def the_plan_states_how_many_forwards_it_counted(trial: Trial) -> None:
    """The plan says how many forwards in flight it assumed, as a number and in its summary."""
    plan = trial.pair().ours.module.plan
    counted = getattr(plan, "forwards_in_flight", None)
    if counted != 1:
        raise Difference(f"the plan says that {counted} forwards are in flight")
    if "in flight" not in plan.summary():
        raise Difference("the plan's summary does not say how many forwards it counted")


def _measured(trial: Trial, forwards: int = 1, **options: Any) -> tuple[Any, int, int]:
    """Plans with measured workspaces, and measures two steps, of which the second adds to .grad.

    Returns:
        The plan, and the peaks of the two steps in bytes; both hold the plan's static bytes.
    """
    given = {"forwards_in_flight": forwards} if forwards > 1 else {}
    module, arguments = trial.subject.make(), trial.subject.arguments()
    loss = trial.subject.loss
    pair = trial.fit(module, arguments, costs="measured", loss=loss, **given, **options)
    side, plan = pair.ours, pair.ours.module.plan

    def step() -> None:
        losses = [loss(side.unmarked()) for _ in range(forwards)]
        while losses:
            losses.pop().backward()

    step()
    side.module.zero_grad()
    first = peak_bytes(step) + plan.static_bytes
    held = sum(p.grad.nbytes for p in side.module.parameters() if p.grad is not None)
    return plan, first, peak_bytes(step) + plan.static_bytes + held


@check(15, _MEASURED)
def the_peak_of_a_step(trial: Trial) -> None:
    """The measured peak of a step without gradients is at most the predicted one, and the budget."""
    plan, first, _ = _measured(trial)
    _at_most(first, plan.peak_bytes, "a step")
    _at_most(plan.peak_bytes, plan.budget_bytes, "the plan", "the budget")


@check(15, _MEASURED)
def the_peak_while_gradients_exist(trial: Trial) -> None:
    """The measured peak of a step that adds to .grad is at most the one predicted for it."""
    plan, _, second = _measured(trial)
    predicted = getattr(plan, "peak_with_gradients_bytes", None)
    if predicted is None:
        raise Difference(
            f"the plan predicts no peak while .grad exists: measured {second:,}, "
            f"its peak without is {plan.peak_bytes:,}"
        )
    _at_most(second, predicted, "a step that adds to .grad")


@check(15, _MEASURED)
def the_peak_with_released_gradients(trial: Trial) -> None:
    """With accumulate_gradients=True, adding to .grad never takes more than the predicted peak."""
    plan, _, second = _measured(trial, accumulate_gradients=True)
    held = plan.reserved_bytes
    _at_most(second - held, plan.peak_bytes, "a step that adds to .grad")


@check(15, _MEASURED)
def the_peak_of_two_forwards(trial: Trial) -> None:
    """Planned for two forwards in flight, f1 f2 b2 b1 takes at most the predicted peak."""
    plan, first, _ = _measured(trial, forwards=2)
    _at_most(first, plan.peak_bytes, "two forwards")


def _at_most(measured: int, bound: int, what: str, whose: str = "the predicted peak") -> None:
    if measured > bound:
        raise Difference(f"{what} takes {measured:,} bytes, {whose} is {bound:,}")


@check_step(15, having("dropout"))
def evaluation_between_forward_and_backward(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """An evaluation between forward and backward does not touch what backward needs."""
    optimizer.zero_grad()
    loss = side.loss()
    side.module.eval()
    with torch.no_grad():
        seen = side()
    side.module.train()
    loss.backward()
    optimizer.step()
    return loss.detach(), seen


@check_script(15, every())
def a_forward_that_is_given_up(side: Side) -> Any:
    """A forward whose result is dropped, between the forward and the backward of another."""
    loss = side.loss()
    side.loss()
    loss.backward()
    return loss.detach(), train("SGD", 1)(side)
