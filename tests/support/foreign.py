"""Objects of other libraries that resist being looked at."""

from __future__ import annotations

from typing import Any

__all__ = ["Lazy"]


class Lazy:
    """A proxy whose object is not there yet."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("not loaded yet")

    @__class__.setter
    def __class__(self, value: Any) -> None: ...
