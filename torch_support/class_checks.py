"""Checks the classes of rows before a kernel reads them, which could only end the process at a wrong one."""

# The assertion that nothing waits for has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CHECK_CLASSES", "check_classes"]

CHECK_CLASSES = "irc.check_classes.default"
"""The operation (target, classes, ignored) that returns a copy of the classes of rows."""


def check_classes(target: Tensor, classes: int, ignored: int) -> Tensor:
    """Returns a copy of the classes of rows.

    Args:
        target: The class of each row, whole numbers.
        classes: The number of classes.
        ignored: The class of rows that do not count.

    Raises:
        IndexError: A class is out of range, with torch's own words.
    """
    wrong = ((target < 0) | (target >= classes)) & (target != ignored)
    if target.is_cuda:
        torch._assert_async(~wrong.any())  # as torch's own kernel: nothing waits for it
    elif wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")
    return target.clone()
