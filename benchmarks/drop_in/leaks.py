"""Rows 19 and 20: what stays behind after steps and after exceptions; threads and data loaders."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from irc.passes.costs.allocations import allocation_events

from .cases import check_script, fitted
from .comparison import Difference, check_same, state_of
from .models import Arguments
from .registry import check, every, having, the
from .steps import OPTIMIZERS, one_step, train
from .trial import Side, Trial


@contextlib.contextmanager
def _no_collection() -> Generator[None]:
    """Without the garbage collector: what a cycle holds stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check_no_more(step: Callable[[], Any], steps: int, what: str) -> None:
    """Whether as many bytes are alive after these steps as after two of them.

    What a step puts in place of something older counts as taken, and not as given back, where the older one
    is from before the measurement: hence the comparison of two measurements.
    """

    def left(steps: int) -> int:
        return sum(allocation_events(lambda: [step() for _ in range(steps)].clear()))

    step()
    with _no_collection():
        left(2)
        few, many = left(2), left(steps)
    if many > few:
        raise Difference(f"{what}: {many - few:,} bytes more are alive after {steps} steps than after 2")


# ---------------------------------------------------------------------- row 19


@check(19, every())
def live_bytes_after_fifty_steps(trial: Trial) -> None:
    """With the garbage collector off, as many bytes are alive after step 50 as after step 2."""
    side = trial.pair().ours
    optimizer = OPTIMIZERS["SGD"](side.module.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        side.lossy(side.unmarked()).backward()
        optimizer.step()

    _check_no_more(step, 50, "training steps")


@check(19, every())
def forwards_without_backward(trial: Trial) -> None:
    """A forward whose result is dropped frees what it saved at once."""
    side = trial.pair().ours

    def step() -> None:
        side.lossy(side.unmarked())
        with torch.no_grad():
            side.unmarked()

    _check_no_more(step, 10, "forwards without backward")


@check(19, every())
def retained_graphs(trial: Trial) -> None:
    """A retained graph that is dropped frees what it saved."""
    side = trial.pair().ours

    def step() -> None:
        side.module.zero_grad(set_to_none=False)
        side.lossy(side.unmarked()).backward(retain_graph=True)

    side.lossy(side.unmarked()).backward()
    _check_no_more(step, 10, "retained graphs")


class _Fails(TorchDispatchMode):
    """Raises at an operation, as an allocator does that is out of memory.

    Args:
        after: How many operations go through before.
    """

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.after -= 1
        if self.after < 0:
            raise MemoryError("out of memory, as the check wants it")
        return func(*args, **(kwargs or {}))


class _Counts(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _recovers(trial: Trial, fail: Callable[[Side, int], None], places: Callable[[Side], int]) -> None:
    """An exception in different places: nothing stays alive, and the next step is the original's."""
    pair = trial.pair()
    side = pair.ours
    start = {name: value.clone() for name, value in side.module.state_dict().items()}
    count = places(side)
    side.module.zero_grad()

    def once(share: float) -> None:
        try:
            fail(side, int(count * share))
        except MemoryError:
            side.module.zero_grad()
        else:
            raise Difference("the exception did not come out")

    for share in (0.1, 0.5, 0.95):

        def step(share: float = share) -> None:
            once(share)

        _check_no_more(step, 5, f"exceptions after {share:.0%} of the operations")
    side.module.load_state_dict(start)
    trial.same(pair, train("SGD"))


@check(19, every())
def an_exception_in_forward(trial: Trial) -> None:
    """An operation of the forward raises: what was saved is freed, and the next step is right."""

    def fail(side: Side, at: int) -> None:
        with _Fails(at):
            side.unmarked()

    def places(side: Side) -> int:
        with _Counts() as counted:
            side.unmarked()
        return counted.count

    _recovers(trial, fail, places)


@check(19, every())
def an_exception_in_backward(trial: Trial) -> None:
    """An operation of backward, or of a recomputation in it, raises: the same."""

    def fail(side: Side, at: int) -> None:
        loss = side.lossy(side.unmarked())
        with _Fails(at):
            loss.backward()

    def places(side: Side) -> int:
        loss = side.lossy(side.unmarked())
        with _Counts() as counted:
            loss.backward()
        return counted.count

    _recovers(trial, fail, places)


@check(19, every())
def an_exception_in_a_hook(trial: Trial) -> None:
    """A hook of the script on a parameter or a result raises: the same."""

    def broken(gradient: Tensor) -> None:
        raise MemoryError("from a hook")

    def fail(side: Side, at: int) -> None:
        parameters = list(side.module.parameters())
        loss = side.lossy(side.unmarked())
        handle = parameters[at].register_hook(broken) if at else loss.register_hook(broken)
        try:
            loss.backward()
        finally:
            handle.remove()

    _recovers(trial, fail, lambda side: len(list(side.module.parameters())))


@check_script(19, having("tokens"))
def arguments_that_fail(side: Side) -> Any:
    """A token outside of the vocabulary raises IndexError as in eager, and the next step is right."""
    (tokens,) = side.arguments.args
    side.arguments = Arguments((tokens + 13,))
    seen: list[str] = []
    for _ in range(2):
        try:
            side.loss().backward()
        except IndexError as error:
            seen.append(type(error).__name__)
    side.arguments = Arguments((tokens,))
    side.module.zero_grad()
    return seen, train("SGD", 2)(side)


@check(19, every())
def modules_that_are_dropped(trial: Trial) -> None:
    """A fitted module that nobody holds any more is freed, with its parameters."""
    pair = trial.pair()

    def run() -> None:
        twin = trial.twin(pair)
        train("SGD", 1)(twin.ours)
        trial.forget(twin)

    def step() -> None:
        run()
        gc.collect()

    _check_no_more(step, 5, "fitted modules that were dropped")


# ---------------------------------------------------------------------- row 20

_WITHOUT_DROPOUT = the("u-net", "experts", "structures")
"""Threads share the default generator: models that draw are not the same in two runs of the original."""


def _in_threads(*runs: Callable[[], Any]) -> list[Any]:
    """What functions return that run at once, each in a thread of its own."""
    results: list[Any] = [None] * len(runs)
    errors: list[BaseException] = []
    start = threading.Barrier(len(runs))

    def run(index: int) -> None:
        try:
            start.wait()
            results[index] = runs[index]()
        except BaseException as error:  # it is raised again in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise Difference("a thread has not ended after 60 seconds")
    return results


def _nothing() -> None:
    pass


@check(20, _WITHOUT_DROPOUT)
def two_modules_in_two_threads(trial: Trial) -> None:
    """Two fitted modules that train at once in two threads give the numbers of the original."""
    first, second = trial.pair(), trial.pair()
    for pair in (first, second):
        pair.ours.mark = _nothing  # a mark copies both modules, of which another thread writes one
    script = train("AdamW", 10)
    wanted = script(first.original)
    found = _in_threads(lambda: script(first.ours), lambda: script(second.ours))
    for index, result in enumerate(found):
        check_same(result, wanted, f"the result of thread {index}")
    for pair in (first, second):
        check_same(state_of(pair.ours.module), state_of(first.original.module), "the state afterwards")


@check_script(20, _WITHOUT_DROPOUT, pair=fitted)
def trained_in_another_thread(side: Side) -> Any:
    """A module planned in one thread and trained in another."""
    return _in_threads(lambda: train("SGD")(side))[0]


@check(20, the("experts", "structures"))
def gradients_in_two_threads(trial: Trial) -> None:
    """Forward and autograd.grad of one module in two threads at once (its state does not change)."""
    pair = trial.pair()

    def gradients(side: Side) -> list[Any]:
        parameters = list(side.module.parameters())
        return [torch.autograd.grad(side.loss(), parameters, allow_unused=True) for _ in range(8)]

    wanted = gradients(pair.original)
    ours = pair.ours
    ours.mark = _nothing
    for found in _in_threads(lambda: gradients(ours), lambda: gradients(ours)):
        check_same(found, wanted, "the gradients of a thread")


@check_script(20, the("u-net", "experts"))
def backward_in_another_thread(side: Side) -> Any:
    """The forward in one thread, its backward in another."""
    loss = side.loss()
    _in_threads(loss.backward)
    return loss.detach()


class _Numbered(Dataset[Any]):
    """Examples made from their number, in a worker process."""

    def __init__(self, example: Tensor, count: int) -> None:
        self.example = example
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.example * (1 + 0.01 * index)


@check(20, the("u-net", "convolution"))
def a_loop_over_a_data_loader(trial: Trial) -> None:
    """Batches from a DataLoader with two worker processes, shuffled, whole batches alone."""
    _over_loader(trial, trial.subject.batch * 4, drop_last=True)


@check(20, the("u-net"))
def a_loop_over_a_data_loader_with_a_last_batch(trial: Trial) -> None:
    """The same with a smaller last batch."""
    _over_loader(trial, trial.subject.batch * 2 + 3, drop_last=False)


def _over_loader(trial: Trial, examples: int, *, drop_last: bool) -> None:
    data = _Numbered(torch.linspace(-1, 1, 192).view(3, 8, 8), examples)

    def script(side: Side) -> Any:
        loader = DataLoader(data, trial.subject.batch, shuffle=True, num_workers=2, drop_last=drop_last)
        optimizer = OPTIMIZERS["SGD"](side.module.parameters())
        seen: list[Any] = []
        for batch in loader:
            side.arguments = Arguments((batch,))
            seen.append(one_step(side, optimizer))
        return seen

    trial.same(trial.pair(), script)
