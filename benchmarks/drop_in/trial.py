"""One check of one model under one plan: two modules, one script, and what a refusal must leave alone."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from irc.ir import IrcError

from .comparison import Difference, check_same, state_of
from .models import Arguments, Subject
from .plans import PlanKind

__all__ = ["Pair", "Script", "Side", "Trial", "Unavailable", "Workshop", "came_in_backward"]

_SEED = 5


class Unavailable(Exception):
    """A check needs what is not installed here."""


@dataclass
class Side:
    """The original or the fitted module, with arguments of its own; a script sees no more than this.

    Args:
        module: The module.
        arguments: Of a step.
        lossy: The subject's loss.
        mark: Tells that what has happened until now is the script's own doing: a refusal that follows must
            leave everything as it is now.
    """

    module: Any
    arguments: Arguments
    lossy: Callable[[Any], Tensor]
    mark: Callable[[], None] = field(default=lambda: None, repr=False)

    def __call__(self) -> Any:
        """The module's result; what came before the call is the script's own doing."""
        self.mark()
        return self.unmarked()

    def unmarked(self) -> Any:
        """The module's result, without the copies that a mark takes: for what measures memory."""
        return self.module(*self.arguments.args, **self.arguments.kwargs)

    def loss(self) -> Tensor:
        """The loss of the module's result."""
        return self.lossy(self())

    def __deepcopy__(self, memo: dict[int, Any]) -> Side:
        module = copy.deepcopy(self.module, memo)
        return Side(module, self.arguments.copied(), self.lossy, self.mark)


@dataclass
class Pair:
    """A module and a fitted twin of it."""

    original: Side
    ours: Side


Script = Callable[[Side], Any]
"""What a user does with a module; what it returns is compared, with all that the modules hold afterwards."""


class Workshop:
    """Keeps one planned pair of each model and plan; each check gets a deep copy of it."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[str, str], Pair] = {}


class Trial:
    """One check of one model under one plan.

    Args:
        plan: How to fit.
        subject: The model; None where the check brings its own.
        workshop: Of the whole matrix.
    """

    def __init__(self, plan: PlanKind, subject: Subject | None, workshop: Workshop) -> None:
        self.plan = plan
        self.workshop = workshop
        self._subject = subject
        self._watched: list[nn.Module] = []
        self._marked: list[dict[str, Tensor | None]] = []
        torch.manual_seed(_SEED)

    @property
    def subject(self) -> Subject:
        """The model that the check runs on."""
        assert self._subject is not None, "this check brings its own model"
        return self._subject

    @property
    def subject_name(self) -> str | None:
        """The model's name; None where the check brings its own."""
        return None if self._subject is None else self._subject.name

    # ------------------------------------------------------------------ pairs

    def pair(self) -> Pair:
        """The subject and its fitted twin, planned once for all checks and copied."""
        key = (self.subject.name, self.plan.name)
        if key not in self.workshop.pairs:
            torch.manual_seed(_SEED)
            self.workshop.pairs[key] = self.fit(self.subject.make(), self.subject.arguments())
            self._watched.clear()
            self._marked.clear()
        return self.twin(self.workshop.pairs[key])

    def fit(
        self,
        module: nn.Module,
        arguments: Arguments,
        lossy: Callable[[Any], Tensor] | None = None,
        *,
        is_tried: bool = True,
        **options: Any,
    ) -> Pair:
        """A module, and its fitted twin; planning must leave the module and the generator as they were.

        Args:
            module: The fitted module shares its parameters; the original is a deep copy.
            arguments: Of a step.
            lossy: The script's loss, from the module's result; the subject's where there is one.
            is_tried: Whether to see first that the original runs.
            options: More options of `irc.optimize`.

        Raises:
            IrcError: The module is refused.
            Difference: Planning has changed something.
        """
        lossy = lossy or (self._subject.loss if self._subject is not None else _mean_square)
        original = Side(copy.deepcopy(module), arguments.copied(), lossy)
        if is_tried:
            _check_runs(original)
        self._watched.append(module)
        self.mark()
        fitted = self.plan.fit(module, arguments, options)
        self.check_unchanged("planning")
        return self._watch(Pair(original, Side(fitted, arguments, lossy)))

    def twin(self, pair: Pair) -> Pair:
        """A deep copy of both modules."""
        return self._watch(Pair(copy.deepcopy(pair.original), copy.deepcopy(pair.ours)))

    def _watch(self, pair: Pair) -> Pair:
        pair.ours.mark = self.mark
        self._watched.append(pair.ours.module)
        self.mark()
        return pair

    def forget(self, pair: Pair) -> None:
        """Lets go of a pair."""
        self._watched.remove(pair.ours.module)
        self.mark()

    # ------------------------------------------------------------------ what a refusal leaves alone

    def mark(self) -> None:
        """What has happened until now is the script's own doing."""
        self._marked = [state_of(module) for module in self._watched]

    def check_unchanged(self, what: str) -> None:
        """Compares everything with what it was at the last mark.

        Raises:
            Difference: Something has changed.
        """
        for module, before in zip(self._watched, self._marked, strict=True):
            now = state_of(module)
            for name, value in before.items():
                try:
                    check_same(now.get(name), value, name)
                except Difference as difference:
                    raise Difference(f"{what} has changed something: {name}") from difference

    # ------------------------------------------------------------------ comparing

    def same(
        self,
        pair: Pair,
        script: Script,
        *,
        raises: type[Exception] | None = None,
        may_raise: bool = False,
        tolerance: float | None = None,
    ) -> None:
        """Runs a script on the original and on the fitted module, from one seed, and compares.

        Compared are what the script returns, both modules' parameters, gradients and buffers, the arguments
        and their gradients, and the generator's state.

        Args:
            pair: The two modules.
            script: What a user does.
            raises: What the original raises; the fitted module must then raise it too. Gradients are not
                compared then.
            may_raise: Whether the original may also go through; the fitted module must then do so too.
            tolerance: As in `check_same`; the subject's where it is None.

        Raises:
            IrcError: The fitted module refuses.
            Difference: It does something else.
        """
        expected = raises or ()
        wanted, error = _ran(script, pair.original, expected, lambda: None)
        if raises is not None and error is None and not may_raise:
            raise AssertionError(f"the check is wrong: the original does not raise {raises.__name__}")
        found, other = _ran(script, pair.ours, expected, self.mark)
        if (error is None) != (other is None):
            ours, its = (_described(e) for e in (other, error))
            raise Difference(f"the fitted module {ours}, the original {its}")
        if tolerance is None:
            tolerance = self._subject.tolerance if self._subject is not None else 0.0
        for name, value in wanted.items():
            if error is not None and "gradient" in name:
                continue  # eager accumulates some of them before it raises
            check_same(found.get(name), value, name, tolerance)


def _check_runs(side: Side) -> None:
    """A model that does not run in eager would be refused for that, and show nothing."""
    twin = copy.deepcopy(side)
    with torch.random.fork_rng(devices=[]):
        try:
            twin()
        except Exception as error:
            raise AssertionError(f"the check is wrong: the original raises {error}") from error


def _mean_square(result: Tensor) -> Tensor:
    return result.square().mean()


def _ran(
    script: Script, side: Side, expected: Any, mark: Callable[[], None]
) -> tuple[dict[str, Any], Exception | None]:
    """What a script leaves behind, and what it raised of what is expected."""
    torch.manual_seed(_SEED)
    mark()
    returned, error = None, None
    try:
        returned = script(side)
    except expected as raised:
        if isinstance(raised, IrcError):
            raise
        error = raised
    left: dict[str, Any] = {"the result": returned}
    for name, value in state_of(side.module).items():
        left[f"afterwards, {name}"] = value
    for index, tensor in enumerate(side.arguments.tensors):
        left[f"afterwards, input {index}"] = tensor.detach()
        left[f"afterwards, gradient of input {index}"] = tensor.grad
    return left, error


def _described(error: Exception | None) -> str:
    return "goes through" if error is None else f"raises {type(error).__name__}: {str(error).splitlines()[0]}"


def came_in_backward(error: BaseException) -> bool:
    """Whether an error was raised while the autograd engine ran, and not to trace a backward."""
    frames = [(f.filename.replace("\\", "/"), f.name) for f in traceback.extract_tb(error.__traceback__)]
    if any(file.endswith("frontends/torch/capture.py") for file, _ in frames):
        return False
    return any("torch/autograd/" in file and name != "apply" for file, name in frames)
