"""The published GPT-2 grid: the network, the allocator, the replay, and plans within a budget."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.gpt2_grid.__main__ import main
from benchmarks.gpt2_grid.allocator import Block, CachingAllocator
from benchmarks.gpt2_grid.own_plan import Planning
from benchmarks.gpt2_grid.page import Page, errors
from benchmarks.gpt2_grid.published import PLANS, DeviceRow, PublishedRow, published
from benchmarks.gpt2_grid.replay import Run, StageMoves, replayed, stages_of
from benchmarks.models.gpt2_grid import GRID, Shape, gpt2

MIB = 2**20
SMALL = Shape(layers=4, width=16, heads=2, vocabulary=40, positions=8, batch=8)


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    return gpt2(SMALL)


@pytest.fixture(scope="module")
def pair(model: nn.Sequential) -> list[StageMoves]:
    """Two stages, with four micro-batches."""
    return stages_of(model, SMALL, [(4, 4)], 4)[0]


# ----------------------------------------------------------------------------------- what was published


def test_the_network_has_exactly_the_published_parameters() -> None:
    with torch.device("meta"):
        network = gpt2(GRID)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == 89_762_304
    assert {(row.parameters, row.parameter_memory_bytes) for row in published()} == {(count, 12 * count)}
    assert all(sum(plan) == len(network) for plan in PLANS.values())


def test_all_rows_are_read() -> None:
    rows = published()
    assert len(rows) == 84 and len({(row.devices, row.run) for row in rows}) == 84
    assert all(len(row.reserved_bytes) == row.devices for row in rows)
    assert all(nbytes % (2 * MIB) == 0 for row in rows for nbytes in row.reserved_bytes)
    largest = next(row for row in rows if row.devices == 4 and row.run == Run("torchgpipe", True, 32))
    assert max(largest.reserved_bytes) == 986 * MIB


# ----------------------------------------------------------------------------------------- the allocator


def test_segments_are_reserved_by_size() -> None:
    memory = CachingAllocator()
    small = memory.take(1)
    assert (small.nbytes, memory.reserved_bytes) == (512, 2 * MIB)
    memory.take(MIB)
    assert memory.reserved_bytes == 2 * MIB  # beside the other one
    memory.take(MIB + 1)
    assert memory.reserved_bytes == 22 * MIB
    memory.take(9 * MIB)
    assert memory.reserved_bytes == 22 * MIB
    memory.take(10 * MIB)
    assert memory.reserved_bytes == 32 * MIB
    memory.take(11 * MIB)
    assert memory.reserved_bytes == 44 * MIB


def test_what_is_left_of_a_block_is_kept_whole_up_to_a_mebibyte() -> None:
    memory = CachingAllocator()
    assert memory.take(19 * MIB).nbytes == 20 * MIB
    assert memory.take(19 * MIB - 512).nbytes == 19 * MIB - 512
    assert memory.alive_bytes == memory.peak_bytes == 39 * MIB - 512


def test_free_neighbours_become_one_and_the_smallest_that_fits_is_taken() -> None:
    memory = CachingAllocator()
    first, second, third = (memory.take(6 * MIB) for _ in range(3))
    memory.give(first)
    memory.give(third)
    assert memory.take(2 * MIB).address == first.address  # 6 MiB at the front, 8 at the end
    memory.give(second)
    assert memory.take(16 * MIB).address == first.address + 2 * MIB
    assert memory.reserved_bytes == 20 * MIB


def test_streams_share_nothing() -> None:
    memory = CachingAllocator()
    memory.give(memory.take(2 * MIB, stream=1))
    memory.take(2 * MIB)
    assert memory.reserved_bytes == 40 * MIB


@given(st.lists(st.tuples(st.integers(0, 30 * MIB), st.integers(0, 2), st.booleans()), max_size=40))
def test_blocks_never_overlap_and_all_become_one_segment_again(moves: list[tuple[int, int, bool]]) -> None:
    memory = CachingAllocator()
    alive: list[Block] = []
    for nbytes, stream, is_taken in moves:
        if is_taken or not alive:
            alive.append(memory.take(nbytes, stream))
            assert alive[-1].nbytes >= max(nbytes, 512)
        else:
            memory.give(alive.pop(nbytes % len(alive)))
        places = sorted((block.address, block.address + block.nbytes) for block in alive)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
        assert memory.alive_bytes == sum(block.nbytes for block in alive) <= memory.peak_bytes
        assert memory.peak_bytes <= memory.reserved_bytes
    pools = {(block.pool, block.address >> 48): 0 for block in alive}
    for block in alive:
        memory.give(block)
    reserved = memory.reserved_bytes
    for pool, _ in pools:  # each segment is whole again: as many of the least size of its pool fit
        memory.take(2 * MIB - 512 if not pool[1] else MIB, pool[0])
    assert memory.reserved_bytes == reserved


# -------------------------------------------------------------------------------------------- the replay


def _as_on_a_gpu(x: torch.Tensor, rate: float, train: bool) -> torch.Tensor:
    """Dropout with a mask of a byte an element; on a CPU torch keeps it in the type of `x`."""
    return torch.native_dropout(x, rate, train)[0]


def test_a_forward_keeps_what_autograd_saves(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    (stage,) = stages_of(model, SMALL, [(8,)], 2)[0]
    tokens = torch.zeros(SMALL.batch // 2, SMALL.positions, dtype=torch.int64)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), tokens)}
    saved: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    monkeypatch.setattr("torch.nn.functional._VF.dropout", _as_on_a_gpu)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = model(tokens)
    of_scores = scores.untyped_storage().nbytes()
    assert stage.saved_bytes - of_scores == pytest.approx(sum(saved.values()), rel=1e-3)


def test_checkpointing_saves_memory_and_one_micro_batch_of_torchgpipe_does_not(
    pair: list[StageMoves], model: nn.Sequential
) -> None:
    for stage in pair:
        kept, again = (replayed(stage, Run("torchgpipe", on, 4)).alive_bytes for on in (False, True))
        assert again < kept
    (whole,) = stages_of(model, SMALL, [(8,)], 1)[0]
    assert replayed(whole, Run("torchgpipe", True, 1)) == replayed(whole, Run("torchgpipe", False, 1))
    assert replayed(whole, Run("self", True, 1)) != replayed(whole, Run("self", False, 1))


def test_a_device_holds_what_can_be_counted_by_hand(pair: list[StageMoves]) -> None:
    first, last = pair
    assert sum(first.parameters) + sum(last.parameters) == 4 * sum(
        parameter.numel() for parameter in gpt2(SMALL).parameters()
    )
    crossing = 2 * SMALL.positions * SMALL.width * 4  # of a micro-batch of two
    held = replayed(last, Run("torchgpipe", False, 4))
    assert held.boundary_bytes == 2 * crossing  # there and back
    scores = SMALL.batch * SMALL.positions * SMALL.vocabulary * 4
    static = 3 * sum(last.parameters)
    least = (
        static + 4 * held.saved_bytes - scores + 2 * scores
    )  # all micro-batches, the last step's and this one's
    assert least <= held.alive_bytes - 2 * 8_519_680
    assert held.reserved_bytes >= held.alive_bytes


def test_one_row_of_full_size_is_predicted() -> None:
    stages = stages_of(gpt2(GRID), GRID, [PLANS[4]], 16)[0]
    row = next(row for row in published() if row.devices == 4 and row.run == Run("torchgpipe", False, 16))
    found = [replayed(stage, row.run).reserved_bytes for stage in stages]
    assert max(map(abs, errors(found, row.reserved_bytes))) < 0.03


# ------------------------------------------------------------------------------------------ the command


def test_a_small_grid_from_end_to_end(model: nn.Sequential) -> None:
    rows: list[DeviceRow] = []
    stages = stages_of(model, SMALL, [(4, 4)], 4)[0]
    for run in (Run(name, on, 4) for name in ("self", "torchgpipe") for on in (False, True)):
        helds = [replayed(stage, run) for stage in stages]
        row = PublishedRow(2, run, tuple(held.reserved_bytes + 2 * MIB for held in helds), 0, 0)
        rows += [DeviceRow(row, device, held) for device, held in enumerate(helds)]
    page = Page(tuple(rows))
    assert errors(page.predictions["with the allocator"], page.published) == pytest.approx(
        [-2 * MIB / nbytes for nbytes in page.published]
    )
    text = page.text()
    assert "| 2 | 4 | on         | torchgpipe |" in text and text.count("\n| 2 |") == 4


def test_a_plan_is_within_the_budget() -> None:
    """The published run holds 986 MiB on a device; 1F1B holds few micro-batches, so masks are kept."""
    own = Planning(4, 32, 1.0, is_measured=False).plan("1f1b", 650 * MIB)
    assert own.plan is not None and max(own.plan.peak_bytes) <= 650 * MIB
    assert not own.draws_again
    parameters = [stage.parameter_bytes for stage in own.plan.stages]
    assert sum(parameters) == 4 * 89_762_304
    assert all(its > 3 * mine for its, mine in zip(own.plan.peak_bytes, parameters, strict=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "3"], "the grid has no such rows"),
        (["--devices", "two"], "'two' is no list of numbers"),
        (["--markdown", "nowhere/page.md"], "there is no folder nowhere"),
        (["--budget", "650Mb"], "650Mb"),
    ],
)
def test_wrong_commands_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
