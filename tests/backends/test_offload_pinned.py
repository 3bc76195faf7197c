"""The host tier: its order of events over streams that lag behind, and on a GPU where there is one."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, ClassVar

import pytest
import torch
from support.random_copies import TIERS, with_random_copies
from support.swap_cases import captured, deep, held_bytes, left_by, step, tiers_of
from support.torch_cases import keep_all, recompute_some
from torch import Tensor

from irc.backends.torch import HostTierConfig, bind_program, compile_program
from irc.backends.torch.offload import pinned, tiers
from irc.backends.torch.offload.memory import bytes_of
from irc.frontends.torch import capture
from irc.ir import TierError

torch.set_num_threads(1)

HOSTS = [HostTierConfig(tier.name, 1 << 30, checks=True) for tier in TIERS]


class Event:
    """Recorded on a stream, or, without one, on the computing stream, which is never behind."""

    def __init__(self, stream: Lagging | None = None) -> None:
        self.stream = stream
        self.is_done = stream is None

    def query(self) -> bool:
        return self.is_done

    def force(self) -> None:
        while not self.is_done:
            assert self.stream is not None
            self.stream.go_on(force=True)


class Lagging:
    """A stream that does its work as late as it may, or, by a draw, earlier."""

    every: ClassVar[list[Lagging]] = []
    draw: ClassVar[random.Random] = random.Random(0)

    def __init__(self, device: object = None) -> None:
        self.work: deque[Callable[[], None] | Event] = deque()
        Lagging.every.append(self)

    def wait_event(self, event: Event) -> None:
        self.work.append(event)

    def record_event(self) -> Event:
        event = Event(self)
        self.work.append(lambda: setattr(event, "is_done", True))
        return event

    def go_on(self, force: bool = False) -> bool:
        """Does one thing; whether it could."""
        if not self.work:
            return False
        first = self.work[0]
        if isinstance(first, Event):
            if force:
                first.force()
            elif not first.is_done:
                return False
        else:
            first()
        self.work.popleft()
        return True


class Computing:
    """The stream that the CPU's operations run on, at once."""

    def wait_event(self, event: Event) -> None:
        event.force()
        for stream in Lagging.every:
            while Lagging.draw.random() < 0.3 and stream.go_on():
                pass

    def record_event(self) -> Event:
        return Event()


@pytest.fixture
def lagging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and pinned memory as CUDA has them, over memory of the CPU."""
    current: list[Lagging] = []
    empty = torch.empty

    @contextlib.contextmanager
    def on(stream: Lagging) -> Generator[None]:
        current.append(stream)
        yield
        current.pop()

    def late_copy(source: Tensor, target: Tensor) -> None:
        if Lagging.every.index(current[-1]) % 2:  # the second of each pair, back to the device
            target.fill_(0xFF)
        current[-1].work.append(lambda: [target.copy_(source)].clear())

    def allocate(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return empty(*size, **options)

    Lagging.every = []
    Lagging.draw = random.Random(0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Computing())
    monkeypatch.setattr(torch.cuda, "Stream", Lagging)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(pinned, "_copy", late_copy)
    monkeypatch.setattr(tiers, "_refuse_device", lambda *_: None)


@pytest.mark.parametrize("chunk_bytes", [1 << 14, 1 << 26])
@pytest.mark.usefixtures("lagging")
def test_streams_that_lag_behind_give_the_original_s_bits(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_CHUNK_BYTES", chunk_bytes)
    module, args = deep()
    for seed in range(7):
        schedule = with_random_copies(recompute_some(captured().graph, seed), seed)
        ours = bind_program(
            copy.deepcopy(module), compile_program(schedule, {}), captured().signature, tiers=HOSTS
        )
        original = copy.deepcopy(module)
        for _ in range(2):
            for each in (ours, original):
                step(each, args)
            assert all(map(torch.equal, left_by(ours), left_by(original)))
            assert held_bytes(ours) == 0
        loss = ours(*args)
        loss.backward(retain_graph=True)
        loss.backward()
        ours(*args)
        assert held_bytes(ours) == 0
        running: Any = vars(tiers_of(ours))["_running"].values()
        assert all(chunk.numel() == chunk_bytes for tier in running for chunk in tier.room.chunks)
        if chunk_bytes == 1 << 26:
            assert all(len(tier.room.chunks) <= 1 for tier in running)


@pytest.mark.usefixtures("lagging")
def test_the_streams_of_these_tests_do_lag_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where computing does not wait for copies, numbers are wrong."""
    monkeypatch.setattr(Computing, "wait_event", lambda *_: None)
    module, args = deep()
    original = copy.deepcopy(module)
    step(original, args)
    for seed in range(4):
        schedule = with_random_copies(keep_all(captured().graph), seed, rate=1.0)
        configs = [HostTierConfig(tier.name, 1 << 30) for tier in TIERS]
        ours = bind_program(
            copy.deepcopy(module), compile_program(schedule, {}), captured().signature, tiers=configs
        )
        step(ours, args)
        assert not all(map(torch.equal, left_by(ours), left_by(original)))


@pytest.mark.usefixtures("lagging")
def test_pinned_memory_that_is_still_read_is_written_after_that() -> None:
    """A call of another thread, on a stream of its own, has given its slot up."""
    tier = pinned.HostTier(HostTierConfig("host", 1 << 30))
    slot, kept, back = tier.room.take(40), torch.arange(10.0), torch.zeros(10)
    tier.begin_out(kept, slot).wait()
    reading = tier.begin_in(slot, back)
    del slot
    slot = tier.room.take(40)
    tier.begin_out(torch.zeros(10), slot).wait()
    reading.wait()
    assert torch.equal(back, kept)
    assert tier.room.readers() == []


@pytest.mark.usefixtures("lagging")
def test_a_host_without_pinned_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nand more")

    module, args = deep()
    schedule = with_random_copies(keep_all(captured().graph), 1, rate=1.0)
    ours = bind_program(module, compile_program(schedule, {}), captured().signature, tiers=HOSTS)
    monkeypatch.setattr(torch, "empty", none_left)
    with pytest.raises(
        TierError, match=r"IRC570.*holds 0 B of pinned memory, .*: CUDA error: out of memory\n"
    ):
        ours(*args)


def test_the_bytes_of_a_tensor_are_those_of_its_memory() -> None:
    tensor = torch.randn(3, 4, 5).permute(2, 0, 1)
    assert torch.equal(bytes_of(tensor).view(torch.float32), tensor.permute(1, 2, 0).flatten())
    part = torch.arange(10)[4:7]
    assert bytes_of(part).view(torch.int64).tolist() == [4, 5, 6]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to pinned memory need a CUDA device")
@pytest.mark.parametrize("seed", range(8))
def test_swapped_steps_on_cuda_give_the_same_bits(seed: int) -> None:
    module, args = deep()
    module.cuda()
    args = tuple(x.cuda() for x in args)
    original = copy.deepcopy(module)
    found = capture(module, args, loss=lambda result: result)
    schedule = with_random_copies(recompute_some(found.graph, seed), seed)
    ours = bind_program(module, compile_program(schedule, found.constants), found.signature, tiers=HOSTS)
    for _ in range(3):
        for each in (ours, original):
            each.zero_grad()
            step(each, args)
        assert all(map(torch.equal, left_by(ours), left_by(original)))
        assert held_bytes(ours) == 0
