"""Checkpoints of pipelines: parameters, buffers and optimizer state by the model's names, for any cut."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from ...ir import UsageError, first_line
from ...passes.costs.optimizer_costs import OptimizerFactory, optimizer_of
from ..artifact import replace_folder, staging_folder
from .agreement import first_failure, said_by_all

__all__ = ["load_checkpoint", "load_state", "save_checkpoint"]

_MODEL, _STATE = "model.", "optimizer."
"""The prefixes of the entries' names; the model's name follows, for state also its key there."""

_METADATA = ".metadata"
"""The file by which torch knows a checkpoint."""

_HELP = "give a folder that trainer.save wrote for the same model"


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Writes what each rank has, in the format of torch.distributed.checkpoint; all ranks call it.

    It appears when it is whole, and takes the place of an earlier one. If a process dies between these
    two, the earlier one is beside it under a hidden name.

    Args:
        folder: Where to, on a disk that all ranks see; an earlier checkpoint there is replaced.
        tensors: The rank's parameters and buffers by the model's names.
        parameters: The rank's trained parameters by one name each.
        optimizer: Whose state is written too.
        group: The ranks; None for all.

    Raises:
        UsageError: IRC430 when the folder cannot be written, or holds something else.
    """
    entries: dict[str, Any] = {_MODEL + name: tensor for name, tensor in tensors.items()}
    state, unsaved = _entries_of(parameters, optimizer)
    if unsaved := first_failure(unsaved, group):
        raise UsageError(
            "IRC430",
            f"{folder} cannot hold the optimizer's state: {unsaved}",
            help="plan without the optimizer, and save its state_dict() on each rank",
        )
    is_first = not dist.is_initialized() or dist.get_rank(group) == 0
    staging, failure = said_by_all(_begun(folder) if is_first else ("", ""), group)[0]
    if not failure:
        failure = first_failure(_saved(entries | state, Path(staging), group), group)
        if not failure:
            failure = first_failure(_moved(Path(staging), folder) if is_first else "", group)
        if is_first:
            shutil.rmtree(staging, ignore_errors=True)
    if failure:
        raise UsageError("IRC430", f"{folder} cannot be written: {failure}", help="choose another folder")


def _entries_of(
    parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None
) -> tuple[dict[str, Any], str]:
    """The state of an optimizer as entries, and what a checkpoint cannot hold of it."""
    found: dict[str, Any] = {}
    if optimizer is None:
        return found, ""
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if "." in str(key) or not isinstance(value, Tensor | int | float | str | None):
                kind = type(value).__name__
                return {}, f"of {name} it keeps {key!r}, a {kind}"
            found[f"{_STATE}{name}.{key}"] = value
    return found, ""


def _begun(folder: Path) -> tuple[str, str]:
    """A new folder beside the one that shall be written, and why that is not possible."""
    try:
        target = folder.resolve()
        is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
        if not is_free and not (target / _METADATA).is_file():
            return "", "something that is not a checkpoint is there"
        target.parent.mkdir(parents=True, exist_ok=True)
        return str(staging_folder(target.parent, target.name)), ""
    except (OSError, ValueError, RuntimeError) as error:
        return "", first_line(error)


def _saved(entries: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> str:
    """Writes a rank's part; returns what went wrong."""
    try:
        with _alone_without_a_warning():
            dcp.save(entries, checkpoint_id=folder, process_group=group, no_dist=not dist.is_initialized())
    except Exception as error:  # the other ranks wait for what this one says
        return _reason(error)
    return ""


def _moved(staging: Path, folder: Path) -> str:
    """Puts a whole checkpoint where it belongs; returns what went wrong."""
    try:
        replace_folder(folder.resolve(), staging)
    except OSError as error:
        return str(error)
    return ""


def load_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer | None,
    factory: OptimizerFactory | None,
    names: frozenset[str],
    group: dist.ProcessGroup | None,
) -> None:
    """Reads what each rank has, whatever ranks wrote it; all ranks of the group call it.

    What is read waits in the host's memory until all of it is there.

    Args:
        folder: What `save_checkpoint` wrote.
        tensors: The rank's parameters and buffers by the model's names, which take the values.
        parameters: The rank's trained parameters by all of their names.
        optimizer: What takes the state; its own settings (learning rate and the like) stay.
        factory: What made it.
        names: Of the model, as far as this rank knows them: all ranks together know all.
        group: The ranks; None for all.

    Raises:
        UsageError: IRC497 when the folder is not a checkpoint, is damaged, or is one of another model or
            optimizer; nothing is changed then.
    """
    wanted: dict[str, Any] = {}
    of: _StateOf = {}
    names = names.union(*said_by_all(names, group))
    refusal: UsageError | None = None
    try:
        known = _known(folder)
        wanted = _room_for(folder, tensors, known)
        _check_names(folder, known, names)
        if factory is not None:
            of = _state_of(parameters, known)
            wanted |= {key: _empty(known[key]) for key in of}
            _check_state(folder, of, factory)
    except UsageError as error:
        refusal = error
    failure = first_failure("" if refusal is None else refusal.message, group)
    if refusal is not None:
        raise refusal
    if failure:
        raise UsageError("IRC497", f"another rank refuses the checkpoint: {failure}", help=_HELP)
    try:
        with _alone_without_a_warning():
            dcp.load(wanted, checkpoint_id=folder, process_group=group, no_dist=not dist.is_initialized())
    except (OSError, dcp.api.CheckpointException) as error:
        raise UsageError(
            "IRC497", f"the checkpoint {folder} cannot be read: {_reason(error)}", help=_HELP
        ) from error
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(wanted[_MODEL + name])
    if optimizer is not None:
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for key, (parameter, its) in of.items():
            state.setdefault(parameter, {})[its] = wanted[key]
        _take_state(optimizer, state)


@contextlib.contextmanager
def _alone_without_a_warning() -> Generator[None]:
    """A process without a group saves and loads by itself, and means it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        yield


def _reason(error: BaseException) -> str:
    """Returns the first rank's failure, in a line."""
    if isinstance(error, dcp.api.CheckpointException):
        error = min(error.failures.items())[1][0]
    return first_line(error)


def _known(folder: Path) -> Mapping[str, Any]:
    """Reads the entries of a checkpoint, by name."""
    try:
        return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling meets
        raise UsageError("IRC497", f"{folder} is not a checkpoint: {error}", help=_HELP) from error


_StateOf = dict[str, tuple[nn.Parameter, str]]
"""For entries of a checkpoint the parameter that each is state of, and what it is called there."""


def _check_names(folder: Path, known: Mapping[str, Any], names: frozenset[str]) -> None:
    """Refuses tensors, and state of parameters, that the model does not have.

    Raises:
        UsageError: IRC497.
    """
    found = {key.removeprefix(_MODEL) for key in known if key.startswith(_MODEL)}
    found |= {key.removeprefix(_STATE).rpartition(".")[0] for key in known if key.startswith(_STATE)}
    if unknown := sorted(found - names):
        raise UsageError(
            "IRC497", f"the model has no {unknown[0]}, which the checkpoint {folder} has", help=_HELP
        )


def _room_for(folder: Path, tensors: Mapping[str, Tensor], known: Mapping[str, Any]) -> dict[str, Any]:
    """Memory for the tensors of a checkpoint, by their entries.

    Raises:
        UsageError: IRC497 for one that is missing, or of another type.
    """
    for name, tensor in tensors.items():
        _check(folder, name, tensor, known.get(_MODEL + name))
    return {_MODEL + name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}


def _state_of(parameters: Mapping[str, nn.Parameter], known: Mapping[str, Any]) -> _StateOf:
    """The entries that are state of some parameters, which are given by all of their names."""
    found: _StateOf = {}
    for key in known:
        name, _, its = key.removeprefix(_STATE).rpartition(".")
        if key.startswith(_STATE) and name in parameters:
            found[key] = parameters[name], its
    return found


def _empty(meta: object) -> Tensor | None:
    """Memory for an entry; None for what is not a tensor."""
    is_tensor = isinstance(meta, TensorStorageMetadata)
    return torch.empty(meta.size, dtype=meta.properties.dtype) if is_tensor else None


def _check(folder: Path, name: str, tensor: Tensor, found: object) -> None:
    if not isinstance(found, TensorStorageMetadata):
        raise UsageError("IRC497", f"the checkpoint {folder} has no tensor {name}", help=_HELP)
    if found.size != tensor.shape or found.properties.dtype != tensor.dtype:
        raise UsageError(
            "IRC497",
            f"{name} is {_text(found.size, found.properties.dtype)} in the checkpoint {folder}, and "
            f"{_text(tensor.shape, tensor.dtype)} in the model",
            help=_HELP,
        )


def _check_state(folder: Path, of: _StateOf, factory: OptimizerFactory) -> None:
    """Refuses state of another optimizer than the factory makes, which shows on parameters of one element."""
    found: dict[nn.Parameter, set[str]] = {}
    for parameter, its in of.values():
        found.setdefault(parameter, set()).add(its)
    known: dict[int, set[str]] = {}
    for parameter, names in found.items():
        dimensions = parameter.dim()
        if dimensions not in known:
            scratch = nn.Parameter(torch.zeros([1] * dimensions, dtype=parameter.dtype))
            scratch.grad = torch.zeros_like(scratch)
            made = optimizer_of(factory, [scratch])
            made.step()
            known[dimensions] = set(made.state[scratch])
        if names != known[dimensions]:
            raise UsageError(
                "IRC497",
                f"the optimizer of the checkpoint {folder} keeps {_listed(names)} for a parameter, and the "
                f"planned one {_listed(known[dimensions])}",
                help="plan the pipeline with the optimizer that the checkpoint was trained with",
            )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _take_state(optimizer: Optimizer, state: Mapping[nn.Parameter, dict[str, Any]]) -> None:
    """Puts state by parameter into an optimizer, which casts and moves it as it does with its own."""
    described = optimizer.state_dict()
    numbers = (number for group in described["param_groups"] for number in group["params"])
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    described["state"] = {
        number: state[parameter]
        for number, parameter in zip(numbers, held, strict=True)
        if parameter in state
    }
    optimizer.load_state_dict(described)


def load_state(own: Mapping[str, Tensor], known: frozenset[str], given: Mapping[str, Tensor]) -> None:
    """Copies the values of a state dict of the whole model, or of a part with these tensors, into them.

    Args:
        own: The rank's parameters and buffers by the model's names, which take the values.
        known: All names of the model.
        given: Values by name.

    Raises:
        UsageError: IRC497 when one is missing, of another shape, or unknown; nothing is changed then.
    """
    help_text = "give the state dict of the same model"
    for name, tensor in own.items():
        found = given.get(name)
        if found is None or found.shape != tensor.shape:
            shown = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise UsageError(
                "IRC497", f"{name} {shown}; the model's has shape {list(tensor.shape)}", help=help_text
            )
    if unknown := sorted(cast("set[str]", given.keys()) - known):
        raise UsageError("IRC497", f"the model has no {unknown[0]}", help=help_text)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(given[name])
