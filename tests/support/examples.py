"""The examples of properties: all in `make test`, a quarter in `make fast`, new ones in `make fuzz`.

But for `make fuzz` they are the same each time, so that a commit passes or fails whoever tries it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["examples", "load_profile"]

_EXAMPLES = 60
"""The examples of a property that asks for no number."""

_FAST_PART = 4
_LEAST = 3

_FUZZ = "IRC_FUZZ"
"""The environment variable that asks for new examples, so many times as many."""


def load_profile(is_fast: bool) -> None:
    """Sets what holds for all properties, before tests are imported.

    Args:
        is_fast: Whether only the tests of `make fast` run.
    """
    times = int(os.environ.get(_FUZZ, "0"))
    settings.register_profile(
        "irc",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=_EXAMPLES * times or (_EXAMPLES // _FAST_PART if is_fast else _EXAMPLES),
        derandomize=not times,
    )
    settings.load_profile("irc")


def examples(count: int) -> settings:
    """Settings of a property that is tried on so many examples, and on a quarter of them in `make fast`."""
    assert settings.default is not None
    return settings(max_examples=max(_LEAST, count * settings.default.max_examples // _EXAMPLES))
