"""The weights of a pipeline as one safetensors file, by the model's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...ir import UsageError
from .agreement import first_failure

__all__ = ["read_weights", "write_weights"]


def write_weights(path: Path, own: Mapping[str, Tensor]) -> None:
    """Writes what all ranks have into one file, which appears when it is whole; all ranks call it.

    Each rank writes its part beside it, and the first one puts them together: it has all of them in its
    host's memory then.

    Args:
        path: The file, on a disk that all ranks see.
        own: What this rank has, by name; what several have is taken of the first.

    Raises:
        UsageError: IRC434 when it cannot be written.
    """
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    parts = [path.with_name(f".{path.name}.{number}") for number in range(count)]
    try:
        failure = first_failure(_written(parts[rank], own))
        if not failure:
            failure = first_failure(_merged(path, parts) if rank == 0 else "")
    finally:
        parts[rank].unlink(missing_ok=True)
    if failure:
        raise UsageError("IRC434", f"{path} cannot be written: {failure}", help="choose another file")


def _written(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes a file; returns what went wrong."""
    try:
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(copies, path)
    except (OSError, ValueError, SafetensorError) as error:
        return str(error)
    return ""


def _merged(path: Path, parts: list[Path]) -> str:
    """Puts the parts together; returns what went wrong."""
    draft = path.with_name(f".{path.name}.part")
    try:
        tensors: dict[str, Tensor] = {}
        for part in parts:
            tensors = load_file(part) | tensors
        save_file(tensors, draft)
        mask = os.umask(0)
        os.umask(mask)
        draft.chmod(0o666 & ~mask)  # it is private otherwise
        os.replace(draft, path)
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        return str(error)
    return ""


def read_weights(path: Path, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file by some names; others are not read.

    Args:
        path: What `write_weights` wrote, or another safetensors file with the model's names.
        names: What is wanted; names of one tensor stand for each other.

    Raises:
        UsageError: IRC497 when it cannot be read, or lacks one.
    """
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            there = set(file.keys())
            by_tensor = {id(tensor): name for name, tensor in names.items() if name in there}
            for name, tensor in names.items():
                source = name if name in there else by_tensor.get(id(tensor))
                if source is None:
                    raise UsageError(
                        "IRC497", f"{path} has no {name}", help="give the weights of the same model"
                    )
                found[name] = file.get_tensor(source)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            "IRC497", f"{path} cannot be read: {error}", help="give a safetensors file"
        ) from error
    return found
