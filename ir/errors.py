"""The errors that users see: a code, a place, the numbers with units, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .printable import printable

__all__ = [
    "THROUGH_DYNAMO",
    "BackwardError",
    "BudgetError",
    "IrcError",
    "Location",
    "TierError",
    "TimeLimitError",
    "UnsupportedError",
    "UsageError",
    "VerificationError",
    "first_line",
]


THROUGH_DYNAMO = 'train with torch.compile(model, backend=irc.backend(budget, outside="measured"))'
"""The way of models that one graph cannot hold, for the help of errors."""

_MOST = 4000
"""The most characters of a message; names of others may stand in it."""


@dataclass(frozen=True, slots=True)
class Location:
    """Locates a node in the user's model, as far as its origin is known.

    Args:
        module: Dotted path of the `nn.Module` that ran, such as `layer1.0.conv2`.
        onnx_node: Name (or first output) of the ONNX node, such as `Conv_17`.
        source: `file.py:line` of the user's code, and optionally ` in function`.
    """

    module: str | None = None
    onnx_node: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        parts = [self.source, self.module and f"module {self.module}"]
        parts.append(self.onnx_node and f"ONNX node {self.onnx_node}")
        return printable(", ".join(part for part in parts if part), 1000)


class IrcError(Exception):
    """An error that a user can act on.

    Args:
        code: Stable code, such as `IRC204`.
        message: The fault, with numbers and units.
        at: The place, if one is at fault.
        help: The next thing to do.
    """

    exit_status: ClassVar[int] = 1

    def __init__(
        self, code: str, message: str, *, at: Location | None = None, help: str | None = None
    ) -> None:
        message = printable(message, _MOST)
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.at = at
        self.help = None if help is None else printable(help, _MOST)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__new__, (type(self), *self.args), self.__dict__  # other processes send them

    @property
    def brief(self) -> str:
        """Code and first line of the message, for tables."""
        return f"{self.code} {self.message.splitlines()[0]}"

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.message}"]
        if self.at is not None and str(self.at):
            lines.append(f"  --> {self.at}")
        if self.help is not None:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error of other code says, or its type if it says nothing."""
    lines = str(error).strip().splitlines()
    return printable(lines[0], 300) if lines else type(error).__name__


class VerificationError(IrcError):
    """A graph, a schedule or a measured step is not what it claims to be: a defect of irc."""

    exit_status = 1


class UsageError(IrcError):
    """The command or the call is wrong: a missing file, a malformed budget, an unknown input."""

    exit_status = 2


class BudgetError(IrcError):
    """The model cannot be trained in the budget.

    Args:
        code: Stable code.
        message: The fault.
        minimum_bytes: The smallest budget that is known to fit.
        at: The operation at the peak.
        help: The next thing to do.
    """

    exit_status = 3

    def __init__(
        self,
        code: str,
        message: str,
        *,
        minimum_bytes: int,
        at: Location | None = None,
        help: str | None = None,
    ) -> None:
        super().__init__(code, message, at=at, help=help)
        self.minimum_bytes = minimum_bytes


class UnsupportedError(IrcError):
    """The model uses something that irc does not support: refused by name, before anything runs."""

    exit_status = 4


class BackwardError(UnsupportedError, RuntimeError):
    """Reports a fault that only backward shows; a RuntimeError, as autograd's own errors are."""


class TimeLimitError(IrcError):
    """The time limit ended before any plan was found."""

    exit_status = 5


class TierError(IrcError, RuntimeError):
    """A copy between the device and a tier cannot be made: a full disk, a folder that nobody may write to."""
