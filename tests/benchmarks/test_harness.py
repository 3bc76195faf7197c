"""Steps take turns, copies share their parameters, and plans of one fitter live side by side."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.harness import Fitter, Original, Settings, StepTime, Timed, TimeRatio, interleave, load_named
from irc.ir import BudgetError, UsageError

QUICK = Settings(time_limit=2.0, repeats=1, costs="measured")


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU()) for _ in range(4)
        ]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def original() -> Original:
    torch.manual_seed(0)
    return Original(Tiny(), (torch.randn(4, 8, 16, 16),))


# ---------------------------------------------------------------------- time


def test_steps_take_turns_with_the_original() -> None:
    order: list[str] = []
    steps = [lambda name=name: order.append(name) for name in "abcde"]
    found = interleave(lambda: order.append("."), steps, 3)
    rounds = ["".join(order)[start : start + 8] for start in range(0, 24, 8)]
    for each in rounds:
        assert sorted(each) == sorted("...abcde") and (each[0], each[5], each[7]) == (".", ".", ".")
    assert len(set(rounds)) == 3
    assert [len(timed.steps) for timed in found] == [len(timed.beside) for timed in found] == [3] * 5
    last = "abcde".index(rounds[0][6])
    others = [timed.beside[0] for index, timed in enumerate(found) if index != last]
    assert all(reference == others[0] for reference in others) and found[last].beside[0] != others[0]


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=9))
def test_the_spread_is_in_order(rounds: list[float]) -> None:
    ratio = TimeRatio.of(rounds, [1.0] * len(rounds))
    assert ratio.low <= ratio.lower <= ratio.median <= ratio.upper <= ratio.high
    assert ratio.best == ratio.low == min(rounds)


def test_ratios_are_of_the_steps_of_one_round() -> None:
    ratio = TimeRatio.of([2.0, 4.0, 3.0], [2.0, 1.0, 3.0])
    assert (ratio.best, ratio.median, ratio.low, ratio.high) == (2.0, 1.0, 1.0, 4.0)
    assert (ratio.lower, ratio.upper) == (1.0, 2.5)
    assert str(ratio) == "2.000 (1.000 to 4.000)"


def test_one_thread_is_held_to_the_processor_and_several_to_the_clock() -> None:
    timed = Timed((StepTime(cpu=3.0, wall=8.0),), (StepTime(cpu=2.0, wall=4.0),))
    assert timed.cpu.best == 1.5 and timed.wall.best == 2.0
    assert torch.get_num_threads() == 1 and timed.ratio == timed.cpu


# ---------------------------------------------------------------------- modules


def test_a_copy_shares_parameters_and_has_its_own_buffers() -> None:
    reference = original()
    copied = reference.copy()
    assert type(copied) is Tiny and copied is not reference.module
    pairs = zip(reference.module.parameters(), copied.parameters(), strict=True)
    assert all(mine is theirs for mine, theirs in pairs)
    pairs = zip(reference.module.buffers(), copied.buffers(), strict=True)
    assert all(mine is not theirs and torch.equal(mine, theirs) for mine, theirs in pairs)


def test_running_statistics_do_not_disturb_the_comparison() -> None:
    reference = original()
    copied = reference.copy()
    reference.warm_up(copied)
    assert reference.numbers(copied).bit_equal


def test_static_bytes_count_each_storage_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.again = self.weight
            self.register_buffer("base", torch.ones(8))
            self.register_buffer("tail", self.get_buffer("base")[4:])

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return (x @ self.weight * scale).sum()

    reference = Original(Tied(), (torch.ones(2, 4),))
    assert reference.static_bytes == 4 * (16 + 8 + 8)


def test_plans_of_one_planner_live_side_by_side() -> None:
    reference = original()
    fitter = Fitter(reference, QUICK)
    assert fitter.static_bytes == reference.static_bytes
    full, _ = fitter.fit("100%")
    less, plan = fitter.fit("min")
    for module in (full, less, full):
        reference.warm_up(module)
        assert reference.numbers(module).bit_equal
    assert reference.peak_of(less) < reference.peak_of(full) <= reference.step_bytes
    assert reference.peak_of(less) + fitter.static_bytes == plan.peak_bytes == fitter.smallest_bytes
    assert len(reference.timed([full, less], 2)) == 2
    with pytest.raises(BudgetError) as refused:
        fitter.fit(fitter.held_bytes)
    assert refused.value.minimum_bytes == fitter.smallest_bytes


def test_unknown_models_are_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(UsageError, match="resnet51") as refused:
        load_named("resnet51")
    assert refused.value.code == "IRC420" and "resnet50" in (refused.value.help or "")
