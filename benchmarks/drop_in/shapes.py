"""Row 18: calls of other shapes than the example."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from irc.passes.costs.allocations import peak_bytes

from .comparison import Difference
from .models import Arguments
from .registry import check, every, having, the
from .steps import train
from .trial import Pair, Side, Trial


def _over(trial: Trial, *shapes: tuple[int, int]) -> Callable[[Side], Any]:
    """A script that takes one step for each (batch, length), with an optimizer over all of them."""
    drawn = [trial.subject.arguments(batch, length) for batch, length in shapes]

    def script(side: Side) -> Any:
        optimizer = torch.optim.AdamW(side.module.parameters(), lr=3e-3)
        seen: list[Tensor] = []
        for arguments in drawn:
            side.arguments = arguments.copied()
            optimizer.zero_grad()
            loss = side.loss()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        return seen

    return script


@check(18, every())
def a_smaller_last_batch(trial: Trial) -> None:
    """An epoch whose last batch is smaller, twice: as in eager."""
    full, part = (trial.subject.batch, trial.subject.length), (3, trial.subject.length)
    trial.same(trial.pair(), _over(trial, full, full, part, full, part))


@check(18, every())
def a_batch_of_one(trial: Trial) -> None:
    """A batch of one example."""
    if "batch norm" in trial.subject.traits:
        trial.same(trial.pair(), _over(trial, (1, trial.subject.length), (2, trial.subject.length)))
        return
    trial.same(trial.pair(), _over(trial, (1, trial.subject.length)))


@check(18, having("sequence"))
def other_lengths_of_sequences(trial: Trial) -> None:
    """Shorter sequences in turns with the planned length, as with padding to the longest of a batch."""
    batch, length = trial.subject.batch, trial.subject.length
    lengths = (length, length - 1, length - 2, length, length - 1)
    trial.same(trial.pair(), _over(trial, *((batch, n) for n in lengths)))


@check(18, every(), refusable=True)
def a_larger_batch(trial: Trial) -> None:
    """A larger batch than planned: within the budget and as in eager, or refused with what would fit."""
    batch, length = trial.subject.batch, trial.subject.length
    trial.same(trial.pair(), _over(trial, (batch, length), (2 * batch, length)))


@check(18, having("sequence"), refusable=True)
def a_longer_sequence(trial: Trial) -> None:
    """A longer sequence than planned: within the budget and as in eager, or refused."""
    batch, length = trial.subject.batch, trial.subject.length
    trial.same(trial.pair(), _over(trial, (batch, length), (batch, 2 * length)))


@check(18, the("convolution", "transformer"))
def never_over_the_budget(trial: Trial) -> None:
    """Steps of a smaller batch take at most the budget, by the allocator's own events."""
    subject = trial.subject
    pair = trial.fit(subject.make(), subject.arguments(), costs="measured")
    side, plan = pair.ours, pair.ours.module.plan
    held = sum(t.nbytes for t in (*side.module.parameters(), *side.module.buffers()))
    for batch in (subject.batch // 2, 3):
        side.arguments = subject.arguments(batch)
        for _ in range(2):
            side.module.zero_grad()
            side.loss().backward()
        side.module.zero_grad()
        inputs = sum(t.nbytes for t in side.arguments.tensors)
        measured = peak_bytes(lambda: side.lossy(side.unmarked()).backward()) + held + inputs
        if measured > plan.budget_bytes:
            raise Difference(
                f"a batch of {batch} takes {measured:,} bytes, the budget is {plan.budget_bytes:,}"
            )


class _Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _logged(run: Callable[[], Any]) -> list[str]:
    """What the logger `irc` says while something runs."""
    logger, records = logging.getLogger("irc"), _Records()
    level = logger.level
    logger.addHandler(records)
    logger.setLevel(logging.DEBUG)
    try:
        run()
    finally:
        logger.removeHandler(records)
        logger.setLevel(level)
    return records.lines


@check(18, the("transformer"))
def planned_once_for_each_shape(trial: Trial) -> None:
    """A shape that comes again is not planned again; each new one leaves a line in the log."""
    pair: Pair = trial.pair()
    side = pair.ours
    batch, length = trial.subject.batch, trial.subject.length

    def steps(*batches: int) -> Callable[[], Any]:
        return lambda: _over(trial, *((n, length) for n in batches))(side)

    new, again = _logged(steps(batch, batch - 1)), _logged(steps(batch, batch - 1, batch))
    if not new:
        raise Difference("nothing is logged when another shape is planned")
    if again:
        raise Difference(f"a shape that came before is logged again: {again[0]}")


@check(18, the("transformer"))
def many_shapes(trial: Trial) -> None:
    """Twelve shapes, one after the other, and the first again: plans are kept up to a limit, never wrong."""
    batches = [*range(2, 14), 2, trial.subject.batch]
    trial.same(trial.pair(), _over(trial, *((n, 4) for n in batches)))


def _laid_out(change: Callable[[Tensor], Tensor]) -> Callable[[Side], Any]:
    def script(side: Side) -> Any:
        args = tuple(change(t) if t.is_floating_point() else t for t in side.arguments.args)
        side.arguments = Arguments(args, side.arguments.kwargs)
        side.mark()
        return train("SGD", 2)(side)

    return script


@check(18, having("images"), refusable=True)
def images_with_channels_last(trial: Trial) -> None:
    """Images whose channels come last in memory, after planning with the others: as in eager, or refused."""

    def change(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last)

    trial.same(trial.pair(), _laid_out(change))


@check(18, having("tensor"), refusable=True)
def arguments_that_are_not_contiguous(trial: Trial) -> None:
    """A slice of a larger tensor in place of a contiguous argument: as in eager, or refused."""

    def change(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]

    trial.same(trial.pair(), _laid_out(change))


@check(18, having("tensor"), refusable=True)
def arguments_of_another_type(trial: Trial) -> None:
    """A float64 argument for a float32 model: what eager raises or gives, or a refusal."""
    pair = trial.pair()
    trial.same(pair, _laid_out(lambda t: t.double()), raises=RuntimeError, may_raise=True)
