"""Records what a model's Python code reads from its tensors in one run, and replays it while tracing."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...ir import THROUGH_DYNAMO, UnsupportedError
from .source_lines import user_line
from .state import State

__all__ = ["Branches", "Reading"]

_READS = ("__bool__", "__float__", "__index__", "__int__", "item", "tolist")


@dataclass(frozen=True, slots=True)
class Reading:
    """One number, or list of numbers, that Python code takes out of a tensor.

    Args:
        read: The method: `__bool__`, `__float__`, `__index__`, `__int__` or `item`.
        value: The value that it returned.
        where: The line of the model's code.
    """

    read: str
    value: Any
    where: str | None


@dataclass
class Branches:
    """The readings of a module's forward, which decide its branches.

    Args:
        module: The module.

    Attributes:
        readings: The readings of a run on real tensors, in order.
        tensors: The tensors that were read in the last traced run, in the same order.
        is_noting: Whether a traced run keeps what it reads.
    """

    module: nn.Module
    readings: list[Reading] = field(default_factory=list[Reading])
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    is_noting: bool = True

    def record(
        self, run: Callable[..., Any], tensors: Sequence[Tensor], *, with_gradients: bool = False
    ) -> None:
        """Runs the forward once on copies of real tensors, and notes what it reads.

        The module, its buffers and the generators are as before afterwards. Meanwhile parameters and buffers
        take their bytes twice.

        Args:
            run: Calls the module with its tensors.
            tensors: The tensors of the example arguments.
            with_gradients: Whether autograd records the run.
        """
        recorder = _Recorder()
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        parameters = [(p, p._version, p.detach().clone()) for p in self.module.parameters()]
        copies = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
        try:
            enabled = torch.set_grad_enabled(with_gradients)
            with enabled, torch.random.fork_rng(), State(self.module).kept(), recorder:
                run(*copies)
        finally:
            with torch.no_grad():
                for buffer, value in buffers:  # some kernels write without counting a version
                    buffer.copy_(value)
                for parameter, version, value in parameters:
                    if parameter._version != version:
                        parameter.copy_(value)
        self.readings = recorder.readings

    @contextlib.contextmanager
    def replayed(self) -> Generator[None]:
        """Around one traced run: what is read is what was recorded, and the tensors are noted."""
        replay = _Replay(self.readings, is_noting=self.is_noting)
        with replay:
            yield
        if replay.place != len(self.readings):
            raise _another_way()
        self.tensors = replay.tensors


class _Recorder(TorchFunctionMode):
    """Notes what is read; a list counts as a reading of each of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.readings: list[Reading] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _READS:
            where = user_line(inspect.currentframe())
            if name == "tolist":
                values: list[Any] = args[0].flatten().tolist()
                self.readings += [Reading("item", value, where) for value in values]
            else:
                self.readings.append(Reading(name, result, where))
        return result


class _Replay(TorchFunctionMode):
    """Gives what was noted for what is read; a traced tensor reads a list of itself element by element."""

    def __init__(self, readings: Sequence[Reading], *, is_noting: bool) -> None:
        super().__init__()
        self.readings = readings
        self.is_noting = is_noting
        self.place = 0
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _READS:
            return func(*args, **(kwargs or {}))
        place = self.place
        self.place += args[0].numel() if name == "tolist" else 1
        if self.place > len(self.readings):
            raise _another_way()
        if self.is_noting:
            self.tensors += args[0].detach().clone().flatten().unbind()  # it may be written later
        return func(*args) if name == "tolist" else self.readings[place].value


def _another_way() -> UnsupportedError:
    return UnsupportedError(
        "IRC332",
        "the model's code reads other tensors while it is traced than in a run on the example arguments",
        help="replace the data-dependent branch, or move it out of the module; or "
        f"{THROUGH_DYNAMO}, which leaves it to Python",
    )
