"""Arrays of strings, which each run carries as numpy's; nothing of them trains."""

from __future__ import annotations

import numpy as np

from .table import Call, Result, lowering


@lowering("StringConcat", since=20)
def string_concat(c: Call) -> Result:
    """Joined element by element, broadcast."""
    return (np.asarray(np.strings.add(c.text(0).astype(str), c.text(1).astype(str))).astype(object),)


@lowering("StringNormalizer", since=10)
def string_normalizer(c: Call) -> Result:
    """Removes the stop words and changes the case; returns one empty string if nothing is left."""
    words, action = c.text(0), c.str_("case_change_action", "NONE")
    c.str_("locale", "en_US")
    sensitive, stop = c.flag("is_case_sensitive"), c.strs_("stopwords") or []
    if words.ndim not in (1, 2) or (words.ndim == 2 and words.shape[0] != 1):
        raise ValueError(f"strings of shape {list(words.shape)}; [C] or [1, C] is expected")
    if action not in ("NONE", "LOWER", "UPPER"):
        c.refuse(f"with case_change_action={action}")
    stopped = set(stop) if sensitive else {word.lower() for word in stop}
    kept = [
        word for word in words.reshape(-1).tolist() if (word if sensitive else word.lower()) not in stopped
    ]
    changed = [{"LOWER": str.lower, "UPPER": str.upper}.get(action, str)(word) for word in kept] or [""]
    return (np.array(changed, dtype=object).reshape((1,) * (words.ndim - 1) + (-1,)),)
