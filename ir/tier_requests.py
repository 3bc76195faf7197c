"""The tiers that a user asks for: `host:64GiB`, `disk:/scratch:200GiB`."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError
from .plugins import plugins
from .units import parse_budget

__all__ = ["TIER_KINDS", "TierRequest", "check_scratch", "parse_tiers"]

TIER_KINDS = ("host", "disk")
"""The tiers that a user may name, beside those of other distributions."""

_HELP = (
    'write "host:64GiB", "disk:/scratch:200GiB", or a list of such texts; folder and amount may be left out'
)


@dataclass(frozen=True, slots=True)
class TierRequest:
    """A tier that a plan may swap to.

    Args:
        name: `host`, `disk`, or the name of an entry point in `irc.tiers`.
        folder: The folder of a disk's scratch file, as an absolute path; empty for the host. A tier of
            another distribution says itself what it reads here.
        capacity_bytes: The most that the plan may hold there; None if the user does not say.
    """

    name: str
    folder: str = ""
    capacity_bytes: int | None = None

    def __str__(self) -> str:
        is_digit = self.name == "disk" and self.folder[:1].isdigit()
        folder = [f"./{self.folder}" if is_digit else self.folder] if self.folder else []
        unit = "" if self.name in TIER_KINDS else "B"  # theirs may be told a number
        nbytes = [] if self.capacity_bytes is None else [f"{self.capacity_bytes}{unit}"]
        return ":".join((self.name, *folder, *nbytes))


def parse_tiers(swap: str | Sequence[str]) -> tuple[TierRequest, ...]:
    """The tiers of `swap="host:64GiB"`, `"disk:/scratch:200GiB"`, `"disk"`, or a list of such texts.

    A disk without a folder is in the system's folder for temporary files. What begins with a digit is an
    amount; a folder of such a name is written `./200GiB`.

    Raises:
        UsageError: IRC423 if it is not a text or a list of texts; IRC424 for another kind of tier; IRC425 for
            a malformed amount; IRC426 for a tier that is named twice; IRC427 for a missing folder; IRC428 for
            a folder that cannot be written to; IRC429 for a folder of a host.
    """
    texts = [swap] if isinstance(swap, str) else list(swap) if _is_sequence(swap) else []
    if not texts or not all(_is_text(text) for text in texts):
        raise UsageError("IRC423", f"swap={swap!r:.80} names no tier", help=_HELP)
    requests = tuple(_parse_tier(text.strip()) for text in texts)
    names = [request.name for request in requests]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                "IRC426", f"swap= names the tier {name!r} {names.count(name)} times", help="name it once"
            )
    return requests


def check_scratch(folder: str | Path) -> None:
    """Refuses a folder in which no scratch file can be made.

    Raises:
        UsageError: IRC427 when there is no such folder; IRC428 when it cannot be written to.
    """
    if not os.path.isdir(folder):
        raise UsageError(
            "IRC427",
            f"{folder} is not a folder" if os.path.exists(folder) else f"there is no folder {folder}",
            help="make it, or name another one, as disk:/scratch; an amount is written 200GiB",
        )
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            "IRC428",
            f"nothing can be written to {folder}: {error.strerror}",
            help="name a folder that you may write to, as disk:/scratch",
        ) from error


def _is_sequence(given: object) -> bool:
    return isinstance(given, list | tuple)


def _is_text(given: object) -> bool:
    return isinstance(given, str)


def _parse_tier(text: str) -> TierRequest:
    name, _, rest = text.partition(":")
    is_own = name in TIER_KINDS
    if not is_own and name not in plugins("irc.tiers"):
        known = ", ".join((*TIER_KINDS, *plugins("irc.tiers")))
        raise UsageError("IRC424", f"{text!r}: there is no tier {name!r}", help=f"tiers: {known}; {_HELP}")
    before, _, last = rest.rpartition(":")
    has_amount = _is_amount(last) and (is_own or last[-1].isalpha())  # what theirs are told may be a number
    folder, amount = (before, last) if has_amount else (rest, "")
    if name == "host" and "/" in folder:
        raise UsageError("IRC429", f"{text!r}: the host's memory has no folder", help=_HELP)
    if text.endswith(":") or (name == "host" and folder):
        what = f"{folder!r} is not an amount of memory" if folder else "nothing follows the colon"
        raise UsageError("IRC425", f"{text!r}: {what}", help=_HELP)
    capacity_bytes = _capacity_bytes(text, amount) if amount else None
    if name != "disk":
        return TierRequest(name, folder, capacity_bytes)
    path = Path(folder).expanduser() if folder else Path(tempfile.gettempdir())
    check_scratch(path)
    return TierRequest(name, str(path.absolute()), capacity_bytes)


def _is_amount(text: str) -> bool:
    """Whether it is to be read as an amount: it begins with a digit, and has no folder in it."""
    return re.match(r"\s*[-+]?\.?[0-9]", text) is not None and "/" not in text


def _capacity_bytes(text: str, amount: str) -> int:
    if "%" in amount:
        raise UsageError("IRC425", f"{text!r}: {amount!r} says no bytes", help=_HELP)
    try:
        return parse_budget(amount)
    except UsageError as error:
        raise UsageError("IRC425", f"{text!r}: {error.message}", help=_HELP) from error
