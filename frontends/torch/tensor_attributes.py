"""Attributes of Python that a model's code reads of its arguments, parameters and buffers, and writes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Generator, Iterable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...ir import InputRole, UnsupportedError
from ...torch_support.object_graph import ABSENT

__all__ = ["TensorAttributes", "TensorReads", "refuse_attributes_of_results"]

TensorReads = tuple[tuple[InputRole, str, str, Any], ...]
"""The role and target of an input, the name of its attribute, and what it holds there or `ABSENT`."""

_TORCH = os.path.dirname(torch.__file__) + os.sep


class TensorAttributes:
    """Shows the attributes of tensors to a forward that runs on others in their place, and notes its reads.

    Args:
        module: The module.
        tensors: The tensors among its arguments.
    """

    def __init__(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        self._module = module
        self._originals = {(InputRole.INPUT, str(k)): tensor for k, tensor in enumerate(tensors)}
        self._originals |= dict(self._of_module())
        self._reads: dict[tuple[InputRole, str, str], Any] = {}

    @property
    def reads(self) -> TensorReads:
        """The attributes that were read so far."""
        return tuple((*key, value) for key, value in self._reads.items())

    @contextlib.contextmanager
    def shown(self, tensors: Sequence[Tensor]) -> Generator[None]:
        """Around one run of the forward.

        Args:
            tensors: The arguments of the run.

        Raises:
            UnsupportedError: IRC343 for an attribute with a tensor; IRC556 for one that the forward sets.
        """
        arguments = [((InputRole.INPUT, str(k)), tensor) for k, tensor in enumerate(tensors)]
        before = [set(vars(tensor)) for tensor in tensors]
        thread = threading.get_ident()

        def read(tensor: Tensor, name: str) -> Any:
            reader = sys._getframe(1).f_code.co_filename  # pyright: ignore[reportPrivateUsage]
            if threading.get_ident() == thread and not reader.startswith(_TORCH):
                places = (key for key, each in (*arguments, *self._of_module()) if each is tensor)
                for key in places:
                    value = self._read(key, name)
                    if value is not ABSENT:
                        return value
            raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")

        with patch.object(Tensor, "__getattr__", read, create=True):  # for attributes that it has not
            yield
        for k, (tensor, names) in enumerate(zip(tensors, before, strict=True)):
            for name in _set_by_code(vars(tensor).keys() - names):
                raise UnsupportedError(
                    "IRC556",
                    f"the forward writes into its arguments: it sets the attribute {name} of input {k}",
                    help="return what it computes, or set the attribute before the module is called",
                )

    def _read(self, key: tuple[InputRole, str], name: str) -> Any:
        """Returns an attribute of the tensor that an input stands for, and notes it."""
        value = vars(self._originals[key]).get(name, ABSENT) if key in self._originals else ABSENT
        if isinstance(value, Tensor):
            raise UnsupportedError(
                "IRC343",
                f"the forward reads a tensor in the attribute {name} of {key[0].value} {key[1]}, and a plan "
                "would take its value for all steps",
                help="pass that tensor as an argument, or register it as a buffer",
            )
        self._reads[(*key, name)] = value
        return value

    def _of_module(self) -> Iterable[tuple[tuple[InputRole, str], Tensor]]:
        for name, tensor in self._module.named_parameters(remove_duplicate=False):
            yield (InputRole.PARAMETER, name), tensor
        for name, tensor in self._module.named_buffers(remove_duplicate=False):
            yield (InputRole.BUFFER, name), tensor


def _set_by_code(names: Iterable[str]) -> list[str]:
    """Returns those of some attributes that are not torch's own marks of tensors without data."""
    return sorted(name for name in names if not name.startswith("_") and name != "elem")


def refuse_attributes_of_results(leaves: Iterable[Any]) -> None:
    """Refuses results with attributes that the forward has set: a planned step makes the tensors anew.

    Raises:
        UnsupportedError: IRC342.
    """
    for leaf in leaves:
        for name in _set_by_code(vars(leaf)) if isinstance(leaf, Tensor) else ():
            raise UnsupportedError(
                "IRC342",
                f"the forward returns a tensor with an attribute {name}, which a planned step would lose",
                help="return what the attribute holds beside the tensor, in a tuple or a dict",
            )
