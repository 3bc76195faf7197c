"""The disk tier for real: the same bits, exactly the predicted memory, nothing left, and all failures."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_tier import FakeTierConfig
from support.random_copies import with_random_copies
from support.swap_cases import (
    DISK,
    assert_next_step_is_right,
    away,
    captured,
    deep,
    held_bytes,
    left_by,
    scratch_of,
    step,
    swapping,
)
from support.swap_faults import run_faults
from support.torch_cases import keep_all, recompute_some

from irc.backends.torch import (
    DiskTierConfig,
    HostTierConfig,
    bind_program,
    check_tier_configs,
    compile_program,
)
from irc.backends.torch.offload import Session, Tiers, copy_table
from irc.backends.torch.offload.extents import PAGE_BYTES, Extents
from irc.backends.torch.offload.lanes import Job
from irc.ir import TierError, liveness, stored_bytes, verify_schedule
from irc.passes.costs.allocations import peak_bytes
from irc.passes.costs.profiling import profile_costs

torch.set_num_threads(1)

# ---------------------------------------------------------------------- numbers and memory


def test_swapped_steps_give_the_same_bits_in_exactly_the_predicted_memory(tmp_path: Path) -> None:
    module, args = deep()
    graph = captured().graph
    workspace_bytes = profile_costs(graph, repeats=1).workspace_bytes
    plain = keep_all(graph)
    chosen = [away(graph), *(with_random_copies(recompute_some(graph, k), k, [DISK]) for k in range(3))]
    predicted = [verify_schedule(each, workspace_bytes, tiers=[DISK]).peak_bytes for each in chosen]
    assert predicted[0] < liveness(plain, workspace_bytes).peak_bytes * 0.8
    for schedule, nbytes in zip(chosen, predicted, strict=True):
        original = copy.deepcopy(module)
        ours: Any = swapping(copy.deepcopy(module), tmp_path, schedule=lambda _, s=schedule: s)
        assert_next_step_is_right(ours, original, args)
        for _ in range(2):
            ours.zero_grad()
            assert peak_bytes(lambda ours=ours: step(ours, args)) == nbytes - graph.static_bytes
            assert held_bytes(ours) == 0
        traffic = ours.irc_traffic["disk"]
        steps = 3 * max(stored_bytes(schedule)["disk"])
        assert traffic.out_bytes >= steps and traffic.in_bytes > 0


@pytest.mark.parametrize("cached", [True, False])
def test_the_page_cache_is_left_alone_where_it_is_asked_for(
    cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    ours = swapping(module, tmp_path, uses_page_cache=cached, checks=True)
    dropped: list[int] = []
    real = os.posix_fadvise
    monkeypatch.setattr(
        os, "posix_fadvise", lambda n, at, size, how: dropped.append(size) or real(n, at, size, how)
    )
    assert_next_step_is_right(ours, original, args)
    stored = stored_bytes(away(captured().graph))["disk"]
    assert sum(dropped) == (0 if cached else 2 * max(stored)), "out and in"


def test_the_scratch_file_is_used_again_from_step_to_step(tmp_path: Path) -> None:
    module, args = deep()
    ours = swapping(module, tmp_path)
    sizes: list[int] = []
    for _ in range(4):
        step(ours, args)
        sizes.append(os.fstat(scratch_of(ours).number).st_size)
    assert len(set(sizes)) == 1 and sizes[0] > 0
    assert os.fstat(scratch_of(ours).number).st_nlink == 0


# ---------------------------------------------------------------------- nothing is left behind


def test_no_file_is_seen_and_threads_end_with_the_module(tmp_path: Path) -> None:
    threads = threading.active_count()
    module, args = deep()
    ours = swapping(module, tmp_path)
    assert threading.active_count() == threads, "nothing is opened before the first step"
    seen: list[list[str]] = []
    loss = ours(*args)
    loss.register_hook(lambda _: seen.append(os.listdir(tmp_path)))
    loss.backward()
    assert seen == [[]]
    assert threading.active_count() == threads + 2
    number = scratch_of(ours).number
    del loss, ours
    gc.collect()
    assert threading.active_count() == threads
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_tier_with_one_channel_has_one_thread(tmp_path: Path) -> None:
    threads = threading.active_count()
    module, args = deep()
    original = copy.deepcopy(module)
    ours = swapping(module, tmp_path, is_duplex=False, checks=True)
    assert_next_step_is_right(ours, original, args)
    assert threading.active_count() == threads + 1


CHILD = """
    import copy, os, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from torch.backends import cuda
    from support.swap_cases import assert_next_step_is_right, deep, step, swapping

    module, args = deep()
    original = copy.deepcopy(module)
    ours = swapping(module, Path({folder!r}))
    step(ours, args)
    ours.load_state_dict(original.state_dict())
    forked = os.fork()
    if not forked:
        if not cuda.is_built():  # built for CUDA, torch refuses backward in a fork
            assert_next_step_is_right(ours, original, args)
        waiting = ours(*args)
        sys.exit()
    assert os.waitpid(forked, 0)[1] == 0
    assert_next_step_is_right(ours, original, args)
    waiting = ours(*args)
    print("waits", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_process_that_ends_or_is_killed(tmp_path: Path) -> None:
    """One that was forked ends by itself, with a call in flight; the other is killed."""
    code = textwrap.dedent(CHILD).format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    pipe = subprocess.PIPE
    command = [sys.executable, "-W", "ignore", "-c", code]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "waits\n", child.stderr.read()
        if sys.platform == "linux":
            numbers = Path(f"/proc/{child.pid}/fd").iterdir()
            assert any(os.readlink(number).startswith(str(tmp_path)) for number in numbers)
        assert os.listdir(tmp_path) == []
        os.kill(child.pid, signal.SIGKILL)
        assert child.stderr.read() == ""
    assert child.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------------- failures


@contextlib.contextmanager
def largest_file(nbytes: int) -> Generator[None]:
    """The system refuses larger files, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_nothing_is_lost_or_left_after_faults() -> None:
    """`python -m support.swap_faults` tries more."""
    found = run_faults(12, seed=0)
    assert sum(found.values()) == 12


def test_a_full_disk_is_told_before_anything_has_run(tmp_path: Path) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    ours = swapping(module, tmp_path)
    before = left_by(ours)
    with (
        largest_file(1 << 16),
        pytest.raises(TierError, match=r"IRC570.*reserving \d+ KiB in a scratch file in .*: File too large"),
    ):
        ours(*args)
    assert all(map(torch.equal, left_by(ours), before)), "buffers are as they were"
    assert_next_step_is_right(ours, original, args)


@pytest.mark.parametrize("how", ["no such call", "not on this file system"])
def test_a_disk_that_is_full_where_nothing_could_be_reserved(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    if how == "no such call":
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    module, args = deep()
    original = copy.deepcopy(module)
    ours = swapping(module, tmp_path)
    with largest_file(1 << 18), pytest.raises(TierError, match=r"IRC570.*writing 48 KiB .*: File too large"):
        step(ours, args)
    assert_next_step_is_right(ours, original, args)


def test_an_error_that_is_over_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    module, args = deep()
    ours = swapping(module, tmp_path)
    step(ours, args)
    gc.collect()
    gc.disable()
    try:
        monkeypatch.setattr(os, "preadv", fails)
        with contextlib.suppress(TierError):
            step(ours, args)
        kinds = map(type, gc.get_objects())
        assert not [kind for kind in kinds if issubclass(kind, Job | Session)]
    finally:
        gc.enable()


def test_a_folder_that_no_file_can_be_made_in(tmp_path: Path) -> None:
    module, args = deep()
    ours = swapping(module, tmp_path / "none")
    with pytest.raises(TierError, match=r"IRC571.*no scratch file can be made in .*none: No such file"):
        ours(*args)
    (tmp_path / "none").mkdir()
    assert_next_step_is_right(ours, copy.deepcopy(module), args)
    with pytest.raises(TierError, match="IRC571"):
        check_tier_configs([DiskTierConfig("disk", 1, str(tmp_path / "other"))], ["cpu"])
    check_tier_configs([DiskTierConfig("disk", 1, str(tmp_path)), DiskTierConfig("temporary", 1)], ["cpu"])


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    ours = swapping(module, tmp_path)
    step(ours, args)
    loss = ours(*args)
    size = os.fstat(scratch_of(ours).number).st_size
    os.ftruncate(scratch_of(ours).number, 100)
    with pytest.raises(
        TierError, match=r"IRC572.*reading 48 KiB .*: the file ends at byte \d+, \d+ B too early"
    ):
        loss.backward()
    os.ftruncate(scratch_of(ours).number, size)
    del loss
    assert_next_step_is_right(ours, original, args)


@pytest.mark.parametrize(("call", "doing"), [("pwritev", "writing"), ("preadv", "reading")])
def test_an_error_of_the_disk(call: str, doing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    ours = swapping(module, tmp_path)
    calls: list[int] = []
    real = getattr(os, call)

    def fails(number: int, *others: Any) -> int:
        calls.append(number)
        if len(calls) == 4:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(number, *others)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(TierError, match=f"IRC572.*{doing} 48 KiB .*: Input/output error"):
            step(ours, args)
    assert_next_step_is_right(ours, original, args)


def test_transfers_go_on_where_the_system_ended_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    ours = swapping(module, tmp_path, checks=True)
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda n, parts, at: write(n, [parts[0][:5000]], at))
    monkeypatch.setattr(os, "preadv", lambda n, parts, at: read(n, [parts[0][:5000]], at))
    assert_next_step_is_right(ours, original, args)


def test_a_thread_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    ours = swapping(module, tmp_path)
    step(ours, args)

    def dies(*_: Any) -> int:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", dies)
        patch.setattr(threading, "excepthook", lambda _: None)  # pytest's keeps what it is told
        with pytest.raises(TierError, match=r"IRC573.*has died, with 49152 B to copy"):
            step(ours, args)
    assert_next_step_is_right(ours, original, args)


def test_bytes_that_came_back_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    ours = swapping(module, tmp_path, checks=True)
    lax = swapping(copy.deepcopy(module), tmp_path)
    for asked in (False, True):
        if asked:
            monkeypatch.setenv("IRC_SWAP_CHECK", "1")
        for each in (ours, lax):
            loss = each(*args)
            os.pwrite(scratch_of(each).number, b"\x01" * PAGE_BYTES, PAGE_BYTES)
            if each is ours or asked:
                with pytest.raises(
                    TierError, match=r"IRC574.*\(49152 B\) came back from tier disk with other"
                ):
                    loss.backward()
            else:
                loss.backward()
            del loss
    assert_next_step_is_right(ours, original, args)


def test_a_tier_without_room_for_the_forwards_in_flight(tmp_path: Path) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    stored = max(stored_bytes(away(captured().graph))["disk"])
    ours = swapping(module, tmp_path, capacity_bytes=stored)
    first = ours(*args)
    with pytest.raises(TierError, match=r"IRC577.*disk holds 770 KiB of its 770 KiB, and 48 KiB more"):
        ours(*args)
    first.backward()
    assert_next_step_is_right(ours, original, args)


# ---------------------------------------------------------------------- refused


def test_tiers_that_cannot_hold_the_tensors_are_refused() -> None:
    with pytest.raises(
        TierError, match=r"IRC575.*tier host \(host\) cannot hold tensors on cpu.*host's memory"
    ):
        check_tier_configs([HostTierConfig("host", 1)], ["cpu"])
    for config in (DiskTierConfig("disk", 1), FakeTierConfig("disk", 1)):
        with pytest.raises(TierError, match=r"IRC575.*cannot hold tensors on cuda:0"):
            check_tier_configs([config], ["cuda:0"])
    with pytest.raises(TierError, match=r"IRC575.*for models on CUDA"):
        check_tier_configs([HostTierConfig("host", 1)], ["mps"])
    check_tier_configs([HostTierConfig("host", 1)], ["cuda:0"])
    program = compile_program(away(captured().graph), {})
    with pytest.raises(TierError, match="IRC575"):
        bind_program(deep()[0], program, captured().signature, tiers=[HostTierConfig("disk", 1 << 30)])


def test_a_tier_without_a_config_and_two_configs_for_one_tier() -> None:
    program = compile_program(away(captured().graph), {})
    with pytest.raises(TierError, match=r"IRC576.*copies to tier disk, .*\(known: fast\)"):
        bind_program(deep()[0], program, captured().signature, tiers=[DiskTierConfig("fast", 1)])
    with pytest.raises(TierError, match=r"IRC576.*\(known: none\)"):
        Tiers().session(program.copies)
    with pytest.raises(TierError, match=r"IRC576.*the same name: disk, disk"):
        Tiers([DiskTierConfig("disk", 1), FakeTierConfig("disk", 1)])


def test_a_tensor_that_is_not_one_block_of_memory(tmp_path: Path) -> None:
    session = Tiers([DiskTierConfig("disk", 1 << 30, str(tmp_path))]).session(
        copy_table(away(captured().graph))
    )
    shape = 256, 48
    with pytest.raises(TierError, match=r"IRC578.*has shape \[256, 48\] and strides \[96, 1\], planned were"):
        session.offload(0, torch.randn(shape[0], shape[1] * 2)[:, : shape[1]])
    with pytest.raises(TierError, match=r"IRC578.*is torch\.float16, planned was float32"):
        session.offload(0, torch.randn(shape).half())  # a copy would read beyond its end
    turned = torch.randn(shape[1], shape[0]).t()
    session.offload(0, turned)
    session.wait(0)
    back = session.fetch(0)
    session.wait(0)
    assert torch.equal(back, turned) and back.stride() == turned.stride()


def test_a_system_that_cannot_read_at_an_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    with pytest.raises(TierError, match=r"IRC579.*no preadv"):
        check_tier_configs([DiskTierConfig("disk", 1, str(tmp_path))], ["cpu"])


# ---------------------------------------------------------------------- room


def test_extents_are_taken_whole_where_they_can_be_and_in_parts_else() -> None:
    extents = Extents()
    extents.grow(10 * PAGE_BYTES)
    taken = [extents.take(PAGE_BYTES * 2 - 5) for _ in range(5)]
    assert extents.free == [] and all(len(ranges) == 1 for ranges in taken)
    extents.give_back(taken[1])
    extents.give_back(taken[3])
    with pytest.raises(ValueError, match=r"20480 B of 16384 B"):
        extents.take(4 * PAGE_BYTES + 1)
    assert extents.take(PAGE_BYTES * 2) == taken[1]
    extents.give_back(taken[0])
    parts = extents.take(PAGE_BYTES * 3)
    assert len(parts) == 2 and sum(stop - start for start, stop in parts) == 3 * PAGE_BYTES
    for ranges in (parts, taken[1], taken[2], taken[4]):
        extents.give_back(ranges)
    assert extents.free == [(0, 10 * PAGE_BYTES)]


def test_a_session_that_is_closed_lets_go_of_all(tmp_path: Path) -> None:
    tiers = Tiers([DiskTierConfig("disk", 1 << 30, str(tmp_path))])
    table = copy_table(away(captured().graph))
    session: Session = tiers.session(table)
    for key, copied in enumerate(table.tensors):
        session.offload(key, torch.randn(copied.type.shape))
    assert tiers.held_bytes == {"disk": sum(copied.nbytes for copied in table.tensors)}
    session.close()
    assert tiers.held_bytes == {"disk": 0}
