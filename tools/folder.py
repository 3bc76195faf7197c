"""The folder that `irc optimize -o DIR` writes and `irc run DIR` trains: all of it, or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..backends.torch import Program, StandaloneModule, compile_program, emit_source
from ..ir import Delivery, Origin, Plan, Schedule, UsageError, parse_program, print_program
from .loading import Source
from .optimize import Optimized

__all__ = ["Written", "check_target", "read_folder", "write_folder"]

_CONSTANT = "irc.constant."
_EXAMPLE = "irc.example."
_FILES = ("plan.json", "program.irc", "model.py", "weights.safetensors")


@dataclass(frozen=True)
class Written:
    """What a folder holds.

    Args:
        plan: The certificate.
        source: Where the model came from.
        schedule: What runs.
        program: The same, compiled.
        state: Parameters and buffers, by name.
        examples: The example inputs.
        deliveries: How the flat result is made.
        workspace_bytes: Workspace of each operation, by name, as the plan counted it.
    """

    plan: Plan
    source: Source
    schedule: Schedule
    program: Program
    state: dict[str, Tensor]
    examples: tuple[Tensor, ...]
    deliveries: tuple[Delivery, ...]
    workspace_bytes: dict[str, int]

    def module(self) -> StandaloneModule:
        """A module that trains by the program, from the written weights."""
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        return StandaloneModule(self.program, state, self.deliveries, self.plan)


def check_target(folder: Path) -> None:
    """Refuses a target that is a file, or a folder with something else in it, before any work is done.

    Raises:
        UsageError: IRC430.
    """
    if folder.is_dir() and {entry.name for entry in folder.iterdir()} - set(_FILES):
        raise UsageError("IRC430", f"{folder} is not empty", help="choose a new folder, or one that irc wrote")
    if folder.exists() and not folder.is_dir():
        raise UsageError("IRC430", f"{folder} is a file", help="choose a folder")
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    if not os.access(existing, os.W_OK):
        raise UsageError("IRC430", f"{existing} cannot be written to", help="choose another folder")


def write_folder(folder: Path, optimized: Optimized, source: Source, examples: tuple[Tensor, ...]) -> None:
    """Writes plan, program, readable source and weights; the folder appears when all of them are complete.

    Args:
        folder: Where to; an earlier folder of irc is replaced.
        optimized: What to write.
        source: Where the model came from.
        examples: The tensor leaves of the example arguments.

    Raises:
        UsageError: IRC430 when the target cannot be written.
    """
    check_target(folder)
    schedule, costs = optimized.program.schedule, optimized.program.costs
    assert schedule is not None and costs is not None
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.absolute().parent))
        try:
            workspace = {node.name: nbytes for node, nbytes in costs.workspace_bytes.items() if nbytes}
            described = {
                **optimized.plan.to_json(),
                "source": asdict(source),
                "deliveries": [_delivery_to_json(d) for d in optimized.captured.signature.deliveries],
                "workspace_bytes": workspace,
            }
            (staging / "plan.json").write_text(json.dumps(described, indent=1))
            (staging / "program.irc").write_text(print_program(schedule))
            (staging / "model.py").write_text(emit_source(schedule))
            save_file(_tensors(optimized, examples), staging / "weights.safetensors")
            staging.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise UsageError("IRC430", f"{folder} cannot be written: {error}", help="choose another folder") from error


def _tensors(optimized: Optimized, examples: tuple[Tensor, ...]) -> dict[str, Tensor]:
    module: nn.Module = optimized.module
    graph = optimized.program.graph
    targets = [i.target for i in graph.inputs if i.role.value in ("parameter", "buffer")]
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {target: named[target] for target in targets}
    tensors |= {_CONSTANT + name: tensor for name, tensor in optimized.captured.constants.items()}
    tensors |= {f"{_EXAMPLE}{index}": tensor for index, tensor in enumerate(examples)}
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def read_folder(folder: Path) -> Written:
    """What `write_folder` wrote, parsed, compiled and ready to train.

    Raises:
        UsageError: IRC431 when a file is missing or damaged.
    """
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise UsageError(
            "IRC431", f"{folder} has no {missing[0]}", help="give a folder written by irc optimize MODEL -o DIR"
        )
    try:
        described: dict[str, Any] = json.loads((folder / "plan.json").read_text())
        extra = {key: described.pop(key) for key in ("source", "deliveries", "workspace_bytes")}
        tensors = load_file(folder / "weights.safetensors")
        deliveries = tuple(_delivery_from_json(row) for row in extra["deliveries"])
        source = Source(**extra["source"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UsageError("IRC431", f"{folder} is damaged: {error}", help="write it again with irc optimize") from error
    plan = Plan.from_json(described)
    schedule = parse_program((folder / "program.irc").read_text())
    constants = {k.removeprefix(_CONSTANT): t for k, t in tensors.items() if k.startswith(_CONSTANT)}
    examples = {int(k.removeprefix(_EXAMPLE)): t for k, t in tensors.items() if k.startswith(_EXAMPLE)}
    return Written(
        plan=plan,
        source=source,
        schedule=schedule,
        program=compile_program(schedule, constants),
        state={k: t for k, t in tensors.items() if not k.startswith((_CONSTANT, _EXAMPLE))},
        examples=tuple(examples[index] for index in sorted(examples)),
        deliveries=deliveries,
        workspace_bytes=extra["workspace_bytes"],
    )


def _delivery_to_json(delivery: Delivery) -> dict[str, Any]:
    return {
        "origin": delivery.origin.value,
        "index": delivery.index,
        "view": delivery.view,
        "constant": delivery.constant,
    }


def _delivery_from_json(row: dict[str, Any]) -> Delivery:
    view = row["view"]
    if view is not None:
        view = (tuple(view[0]), tuple(view[1]), int(view[2]))
    return Delivery(Origin(row["origin"]), int(row["index"]), view, row["constant"])

