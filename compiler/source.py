"""The origin of a model, as a user names it and as a written folder keeps it; nothing is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, cast

from ..ir import UsageError, printable

__all__ = ["MODEL_HELP", "Source", "parse_constant", "parse_input", "parse_role"]

MODEL_HELP = "give file.onnx, package.module:factory or file.py:factory"
_LONGEST_PATH = 4096


@dataclass(frozen=True)
class Source:
    """The origin of a model; kept in a written folder, so that it can be compared with the original.

    Args:
        model: `file.onnx`, `package.module:factory` or `file.py:factory`.
        batch: Batch size of an ONNX model.
        inputs: Shapes of an ONNX model's inputs.
        seed: Draws the parameters anew; None leaves them as the model has them.
        constants: Values of an ONNX model's inputs that are settled.
        roles: Roles of an ONNX model's weights and constants, by name or pattern.
    """

    model: str
    batch: int | None = None
    inputs: Mapping[str, Sequence[int]] | None = None
    seed: int | None = None
    constants: Mapping[str, Any] | None = None
    roles: Mapping[str, str] | None = None

    @property
    def is_factory(self) -> bool:
        """Whether it is Python, which runs when the model is loaded."""
        return ":" in os.path.basename(self.model)

    def trusted(self, model: str | None, *, is_trusted: bool) -> Source:
        """Returns the source that a written folder names as its original, if its code may run.

        Args:
            model: The model that the user names instead; None for none.
            is_trusted: Whether the user trusts the folder.

        Raises:
            UsageError: IRC436 if the source is Python that nobody vouches for.
        """
        if model is not None:
            return replace(self, model=model).located()
        if self.is_factory and not is_trusted:
            raise UsageError(
                "IRC436",
                f"the folder names {printable(self.model)} as its original, and --check would run that code",
                help="give --original and the name of the factory, or --trust if the folder is your own",
            )
        return self

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Source:
        """Reads the fields of a written source.

        Raises:
            ValueError: A field is missing, unknown or of another type.
        """
        source = Source(**row)
        kinds: Mapping[str, tuple[type, ...]] = {
            "model": (str,),
            **dict.fromkeys(("batch", "seed"), (int, NoneType)),
            **dict.fromkeys(("inputs", "constants", "roles"), (dict, NoneType)),
        }
        for name, kind in kinds.items():
            if not isinstance(getattr(source, name), kind):
                raise ValueError(f"{name} of its source is {printable(repr(getattr(source, name)))}")
        for name, shape in (source.inputs or {}).items():
            if not isinstance(cast(object, shape), list) or not all(type(size) is int for size in shape):
                raise ValueError(f"the shape of {printable(name)} in its source is {printable(repr(shape))}")
        if not all(isinstance(cast(object, role), str) for role in (source.roles or {}).values()):
            raise ValueError("a role of its source is not a text")
        if len(source.model) > _LONGEST_PATH:
            raise ValueError(f"the model of its source is {printable(source.model)}")
        return source

    def located(self) -> Source:
        """The same source from any folder: the path of a file is absolute."""
        if not self.is_factory:
            return replace(self, model=str(Path(self.model).absolute()))
        place, _, name = self.model.rpartition(":")
        return replace(self, model=f"{Path(place).absolute()}:{name}") if place.endswith(".py") else self

    def check(self) -> None:
        """Refuses a text that names neither an ONNX file nor a factory; nothing is imported.

        Raises:
            UsageError: IRC310 when there is no such ONNX file; IRC420 for another text.
        """
        if self.is_factory:
            place, _, _ = self.model.rpartition(":")
            if place.endswith(".py") and not os.path.isfile(place):
                raise UsageError("IRC420", f"there is no file {printable(place)}", help=MODEL_HELP)
            return
        is_there, suffix = os.path.exists(self.model), Path(self.model).suffix
        if suffix == ".onnx" and not is_there:
            raise UsageError("IRC310", f"no such file: {self.model}", help="give the path of an .onnx file")
        if suffix == ".py" or not is_there:
            raise UsageError("IRC420", f"{self.model!r} names no ONNX file and no factory", help=MODEL_HELP)


def parse_input(text: str) -> tuple[str, tuple[int, ...]]:
    """The name and shape of `--input name=8x3x224x224`.

    Raises:
        UsageError: IRC421 when it is written in another way.
    """
    name, equals, shape = text.rpartition("=")
    sizes = shape.replace(",", "x").split("x")
    whole = all(size.strip().isascii() and size.strip().isdecimal() and len(size) < 16 for size in sizes)
    if not equals or not name or not whole:
        raise UsageError(
            "IRC421", f"--input {text!r} is not name=shape", help="write --input name=8x3x224x224"
        )
    return name, tuple(int(size) for size in sizes)


def parse_constant(text: str) -> tuple[str, Any]:
    """The name and value of `--constant name=[3,4]`.

    Raises:
        UsageError: IRC421 when it is written in another way.
    """
    name, equals, value = text.partition("=")
    try:
        parsed: Any = json.loads(value)
    except ValueError:
        parsed = None
    if not equals or not name or not isinstance(parsed, bool | int | float | list):
        raise UsageError(
            "IRC421", f"--constant {text!r} is not name=value", help="write --constant shape=[3,4]"
        )
    return name, cast("Any", parsed)


def parse_role(text: str) -> tuple[str, str]:
    """The pattern and role of `--role 'position*=buffer'`.

    Raises:
        UsageError: IRC421 when it is written in another way.
    """
    pattern, equals, role = text.rpartition("=")
    if not equals or not pattern or not role:
        raise UsageError(
            "IRC421", f"--role {text!r} is not name=role", help="write --role 'position*=buffer'"
        )
    return pattern, role
