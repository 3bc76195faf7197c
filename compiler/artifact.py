"""The folder that `irc optimize -o DIR` writes and `irc run DIR` trains: all of it, or nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..backends.torch import (
    DiskTierConfig,
    HostTierConfig,
    Program,
    StandaloneModule,
    TierConfig,
    compile_program,
    emit_source,
)
from ..frontends.torch import refuse_assignments
from ..ir import (
    Delivery,
    Gradients,
    Graph,
    InputRole,
    IrcError,
    Node,
    Origin,
    OutputRole,
    Plan,
    Schedule,
    Sharing,
    Storage,
    TensorType,
    Tier,
    UnsupportedError,
    UsageError,
    VerificationError,
    count_kernels,
    overwritten,
    parse_program,
    print_file,
    print_program,
    printable,
    reordered,
    verify_graph,
    verify_schedule,
)
from ..ir.files import read_json, require_files
from .operation_allowlist import check_operations
from .optimize import Optimized
from .optimizers import DescribedOptimizer, parse_optimizer
from .plugin_tiers import tier_kind
from .source import Source

__all__ = [
    "CONSTANT",
    "EXAMPLE",
    "PIPELINE_FILE",
    "TIMELINE",
    "Planned",
    "Written",
    "check_target",
    "delivery_from_json",
    "delivery_to_json",
    "in_layout",
    "put_folder",
    "read_folder",
    "read_planned",
    "replace_folder",
    "staging_folder",
    "undamaged",
    "write_folder",
]

CONSTANT = "irc.constant."
EXAMPLE = "irc.example."
_FILES = ("plan.json", "program.irc", "model.py", "weights.safetensors")
TIMELINE = "timeline.json"
PIPELINE_FILE = "pipeline.json"
STAGE_FILE = re.compile(r"stage-[0-9]+\.(irc|py)")
"""The files of a pipeline's folder."""


@dataclass(frozen=True)
class Written:
    """The contents of a written folder.

    Args:
        plan: The certificate.
        source: Where the model came from.
        schedule: What runs.
        program: The same, compiled.
        state: Parameters and buffers, by name; tied ones are one tensor. They are not to be written: they may
            be the file's own bytes.
        examples: The example inputs.
        deliveries: How the flat result is made.
        workspace_bytes: Workspace of each operation, by name, as the plan counted it.
        not_saved: Buffers that the model's own `state_dict()` does not have.
        tier_configs: The configurations of the tiers that the program copies to.
        optimizer: Makes the optimizers that take their steps within backward; None if none does.
    """

    plan: Plan
    source: Source
    schedule: Schedule
    program: Program
    state: dict[str, Tensor]
    examples: tuple[Tensor, ...]
    deliveries: tuple[Delivery, ...]
    workspace_bytes: dict[str, int]
    not_saved: frozenset[str]
    tier_configs: tuple[TierConfig, ...] = ()
    optimizer: DescribedOptimizer | None = None

    def module(self) -> StandaloneModule:
        """A module that trains by the program, from the written weights.

        What lives in a tier goes there straight from the file.
        """
        offloaded_parameters = (copied.offloaded for copied in self.program.copies.tensors)
        offloaded_names = {
            id(self.state[offloaded.parameter])
            for offloaded in offloaded_parameters
            if offloaded is not None and not offloaded.is_state
        }
        copies = {
            id(tensor): tensor
            if id(tensor) in offloaded_names
            else tensor.clone(memory_format=torch.preserve_format)
            for tensor in self.state.values()
        }
        state = {name: copies[id(tensor)] for name, tensor in self.state.items()}
        return StandaloneModule(
            self.program, state, self.deliveries, self.plan, self.tier_configs, self.optimizer
        )


def check_target(folder: Path) -> None:
    """Refuses a target that cannot be written, or holds something else, before any work is done.

    Raises:
        UsageError: IRC430.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError("IRC430", f"{folder} is a file", help="choose a folder")
        if folder.is_dir() and not _is_ours([*folder.iterdir()]):
            raise UsageError(
                "IRC430", f"{folder} is not empty", help="choose a new folder, or one that irc wrote"
            )
        existing = next(parent for parent in folder.resolve().parents if parent.exists())
        if not existing.is_dir():
            raise UsageError("IRC430", f"{existing} is a file", help="choose another folder")
        staging_folder(existing, folder.name).rmdir()  # tells more than the permissions do
    except OSError as error:
        raise UsageError(
            "IRC430", f"{folder} cannot be written: {error}", help="choose another folder"
        ) from error


def _is_ours(entries: Sequence[Path]) -> bool:
    """Whether a folder is empty, or holds what irc wrote, a plan or a pipeline, and nothing else."""
    known = (*_FILES, TIMELINE, PIPELINE_FILE)
    named = all(
        (entry.name in known or STAGE_FILE.fullmatch(entry.name)) and entry.is_file() for entry in entries
    )
    return not entries or (named and any(map(_is_certificate, entries)))


def _is_certificate(file: Path) -> bool:
    """Whether a file is the description of a plan or a pipeline, by its format."""
    if file.name not in ("plan.json", PIPELINE_FILE):
        return False
    try:
        data = read_json(file.read_bytes())
    except ValueError:
        return False
    return isinstance(data, dict) and str(data.get("format")).startswith("irc-")


def staging_folder(parent: Path, name: str) -> Path:
    """A new folder beside one of this name, which it will take the place of."""
    folder = parent / f".{name}-{secrets.token_hex(4)}"
    folder.mkdir()
    return folder


def write_folder(
    folder: Path,
    optimized: Optimized,
    source: Source,
    examples: tuple[Tensor, ...],
    optimizer: DescribedOptimizer | None = None,
) -> None:
    """Writes plan, program, readable source and weights; the folder appears when all of them are complete.

    Args:
        folder: Where to; an earlier folder of irc is replaced.
        optimized: What to write.
        source: Where the model came from.
        examples: The tensor leaves of the example arguments.
        optimizer: What made the module's optimizers, if gradients are applied within backward.

    Raises:
        UsageError: IRC430 when the target cannot be written.
        UnsupportedError: IRC434 when the module returns what no JSON file holds.
    """
    put_folder(folder, lambda staging: _write_files(staging, optimized, source, examples, optimizer))


def put_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder that appears when all of its files are complete; an earlier one of irc is replaced.

    Args:
        folder: Where to.
        fill: Writes the files into the folder that it is given.

    Raises:
        UsageError: IRC430 when the target cannot be written.
    """
    check_target(folder)
    target = folder.resolve()
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = staging_folder(target.parent, target.name)
        try:
            fill(staging)
            replace_folder(target, staging)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except BaseException as error:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError | SafetensorError):
            raise UsageError(
                "IRC430", f"{folder} cannot be written: {error}", help="choose another folder"
            ) from error
        raise


def _write_files(
    folder: Path,
    optimized: Optimized,
    source: Source,
    examples: tuple[Tensor, ...],
    optimizer: DescribedOptimizer | None,
) -> None:
    refuse_assignments(optimized.captured.signature, "a written plan")
    schedule, costs = optimized.program.schedule, optimized.program.costs
    assert schedule is not None and costs is not None
    applies = schedule.graph.gradients is Gradients.APPLIED
    assert optimizer is not None or not applies, "nothing says which optimizer applies the gradients"
    described = {
        **optimized.plan.to_json(),
        "source": asdict(source.located()),
        "deliveries": [delivery_to_json(d) for d in optimized.captured.signature.deliveries],
        "workspace_bytes": {
            node.name: costs.workspace_bytes[node]
            for node in schedule.graph.operations
            if costs.workspace_bytes[node]
        },
        "optimizer": str(optimizer) if applies else None,
        "tier_configs": [tier_to_json(config) for config in optimized.tier_configs],
        "not_saved": sorted(
            {name for name, _ in optimized.module.named_buffers(remove_duplicate=False)}
            - set(optimized.module.state_dict())
        ),
    }
    (folder / "plan.json").write_text(json.dumps(described, indent=1))
    (folder / TIMELINE).write_text(json.dumps(optimized.plan.timeline().to_json(), separators=(",", ":")))
    (folder / "program.irc").write_text(print_file(print_program(schedule)))
    (folder / "model.py").write_text(emit_source(schedule))
    save_file(_tensors(optimized, examples), folder / "weights.safetensors")
    (folder / "weights.safetensors").chmod((folder / "plan.json").stat().st_mode)  # it is private otherwise


def replace_folder(target: Path, staging: Path) -> None:
    """Puts `staging` in the place of `target`, which is given up only once the new one stands."""
    if not target.exists():
        os.replace(staging, target)
        return
    retired = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    os.replace(target, retired)
    try:
        os.replace(staging, target)
    except BaseException:
        os.replace(retired, target)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def _tensors(optimized: Optimized, examples: tuple[Tensor, ...]) -> dict[str, Tensor]:
    module: nn.Module = optimized.module
    graph = optimized.program.graph
    targets = _ties(graph).values()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    named = {**parameters, **dict(module.named_buffers(remove_duplicate=False))}
    tensors = {target: named[target] for target in targets}
    tensors |= {CONSTANT + name: tensor for name, tensor in optimized.captured.constants.items()}
    tensors |= {f"{EXAMPLE}{index}": tensor for index, tensor in enumerate(examples)}
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Planned:
    """The plan and the program of a written folder, checked, before anything of it is compiled.

    Args:
        described: The contents of `plan.json`.
        plan: The certificate.
        source: Where the model came from.
        schedule: What runs.
        by_name: Workspace of each operation, by name, as the plan counted it.
    """

    described: dict[str, Any]
    plan: Plan
    source: Source
    schedule: Schedule
    by_name: dict[str, int]


def read_planned(folder: Path, *more: str) -> Planned:
    """Reads the plan and the program of a folder; nothing of it runs.

    Args:
        folder: Of `write_folder`.
        *more: The names of other files that have to be there.

    Raises:
        UsageError: IRC431 when a file is missing or damaged.
        VerificationError: When graph or schedule are not valid, or take other memory than the plan claims.
    """
    require_files(folder, *_FILES[:2], *more)
    with undamaged(folder / "plan.json"):
        described: dict[str, Any] = read_json((folder / "plan.json").read_text())
        plan = Plan.from_json(described)
        source = Source.from_json(described["source"])
        by_name = {str(name): int(nbytes) for name, nbytes in described["workspace_bytes"].items()}
    with undamaged(folder / "program.irc"):
        schedule = parse_program((folder / "program.irc").read_text())
    with undamaged(folder / "plan.json"):
        nodes = {node.name: node for node in schedule.graph.nodes}
        for name, nbytes in by_name.items():
            taken = sum(value.storage.nbytes for value in overwritten(nodes[name]))
            if not -taken <= nbytes < 1 << 63:
                raise ValueError(f"the workspace of {printable(name)} is {nbytes:,} bytes")
        _verify(schedule, plan, {nodes[name]: nbytes for name, nbytes in by_name.items()})
    return Planned(described, plan, source, schedule, by_name)


def read_folder(folder: Path, *, is_trusted: bool = False) -> Written:
    """Reads what `write_folder` wrote: parsed, verified against its plan, compiled and ready to train.

    Args:
        folder: Where.
        is_trusted: As of `tier_from_json`.

    Raises:
        UsageError: IRC431 when a file is missing or damaged; IRC433 when the program's device is missing.
        VerificationError: When graph or schedule are not valid, or take other memory than the plan claims.
    """
    planned = read_planned(folder, *_FILES)
    described, schedule = planned.described, planned.schedule
    with undamaged(folder / "plan.json"):
        deliveries = tuple(delivery_from_json(row) for row in described["deliveries"])
        not_saved = frozenset(str(name) for name in described["not_saved"])
        rows = described["tier_configs"]
        tier_configs = tuple(tier_from_json(row, is_trusted=is_trusted) for row in rows)
        text = described.get("optimizer")
        optimizer = None if text is None else parse_optimizer(text)
        _check_optimizer(schedule.graph, optimizer)
    with undamaged(folder / "weights.safetensors"):
        tensors = load_file(folder / "weights.safetensors")
        constants, state, examples = _placed(schedule, tensors)
    with undamaged(folder / "plan.json"):
        _check_deliveries(schedule, deliveries)
    with undamaged(folder / "program.irc"):
        program = compile_program(schedule, constants)
    return Written(
        plan=planned.plan,
        source=planned.source,
        schedule=schedule,
        program=program,
        state=state,
        examples=examples,
        deliveries=deliveries,
        workspace_bytes=planned.by_name,
        not_saved=not_saved,
        tier_configs=tier_configs,
        optimizer=optimizer,
    )


@contextlib.contextmanager
def undamaged(file: Path) -> Generator[None]:
    """Turns what goes wrong while a file is read into IRC431."""
    try:
        yield
    except (
        OSError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        SafetensorError,
        SyntaxError,
        TypeError,
        ValueError,
        UsageError,
    ) as error:
        is_usage = isinstance(error, UsageError)
        if isinstance(error, IrcError) and (not is_usage or error.code.startswith("IRC43")):
            raise
        text = error.message if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        raise UsageError(
            "IRC431",
            f"{file} is damaged: {text}",
            help="write the folder again with irc optimize MODEL -o DIR",
        ) from error


_TIER_KINDS: dict[str, type[TierConfig]] = {"disk": DiskTierConfig, "host": HostTierConfig}


def tier_to_json(config: TierConfig) -> dict[str, Any]:
    """Returns the tier's configuration as JSON; `tier_from_json` reads it."""
    return {"kind": config.kind, **asdict(config)}


def tier_from_json(row: dict[str, Any], *, is_trusted: bool = False) -> TierConfig:
    """Reads what `tier_to_json` wrote.

    Args:
        row: The written tier.
        is_trusted: Whether code of other distributions may run, with what the row says.

    Raises:
        UsageError: IRC436 for a tier of another distribution, if the row is not trusted; IRC433 if it is not
            installed.
        ValueError: The row is damaged.
    """
    known = dict(row)
    kind = str(known.pop("kind"))
    own = _TIER_KINDS.get(kind)
    if own is None and not is_trusted:
        raise UsageError(
            "IRC436",
            f"the folder copies to a tier of another distribution, {printable(kind)}, whose code would run",
            help="give --trust to irc run if the folder is your own",
        )
    own = own or tier_kind(kind)
    if own is None:
        raise UsageError(
            "IRC433",
            f"there is no tier {printable(kind)} here, which the folder copies to",
            help="install the distribution that has it; irc passes lists what is there",
        )
    config = own(**known)
    folder = getattr(config, "folder", None)
    is_whole = isinstance(cast(object, config.name), str) and type(config.capacity_bytes) is int
    if not is_whole or config.capacity_bytes < 0 or not isinstance(folder, str | None):
        raise ValueError(f"a tier is {printable(repr(row))}")
    return config


def _verify(schedule: Schedule, plan: Plan, workspace_bytes: Mapping[Node, int]) -> None:
    """Holds the program to the plan before anything of it runs."""
    verify_graph(schedule.graph)
    verify_schedule(
        schedule,
        workspace_bytes,
        budget_bytes=plan.budget_bytes,
        peak_bytes=plan.peak_bytes,
        tiers=[Tier(use.tier, use.capacity_bytes, math.inf, math.inf) for use in plan.tiers],
    )
    static_bytes = schedule.graph.static_bytes
    if static_bytes != plan.static_bytes:
        raise VerificationError(
            "IRC129",
            f"parameters, buffers and inputs take {static_bytes} B, not the {plan.static_bytes} B claimed",
        )
    if schedule.graph.forwards_in_flight != plan.forwards_in_flight:
        raise VerificationError(
            "IRC129",
            f"the program counts {schedule.graph.forwards_in_flight} forwards in flight, not the "
            f"{plan.forwards_in_flight} claimed",
        )
    reached = reordered(schedule.graph)
    if reached != plan.reordered:
        named = [", ".join(each.name for each in sums) or "nothing" for sums in (reached, plan.reordered)]
        raise VerificationError(
            "IRC129", f"sums in another order reach {named[0]}, not {named[1]} as claimed, or by other bounds"
        )
    if count_kernels(schedule.graph) != (plan.kernels, plan.fused_operations):
        found = "{} kernels for {} fused operations".format(*count_kernels(schedule.graph))
        claimed = f"{plan.kernels} for {plan.fused_operations}"
        raise VerificationError("IRC129", f"the program has {found}, not {claimed} as claimed")
    offloaded_bytes = sum(offloaded.storage.nbytes for offloaded in schedule.graph.offloaded_parameters)
    if offloaded_bytes != plan.offloaded_bytes:
        raise VerificationError(
            "IRC129",
            f"{offloaded_bytes} B live in tiers between steps, not the {plan.offloaded_bytes} B claimed",
        )
    check_operations(schedule.graph)


_Placed = tuple[dict[str, Tensor], dict[str, Tensor], tuple[Tensor, ...]]


def _placed(schedule: Schedule, tensors: Mapping[str, Tensor]) -> _Placed:
    """Constants, parameters and buffers, and inputs, each on the device and in the layout of the graph."""
    constants: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    ties = _ties(schedule.graph)
    examples = {int(k.removeprefix(EXAMPLE)): t for k, t in tensors.items() if k.startswith(EXAMPLE)}
    for entry in schedule.graph.inputs:
        match entry.role:
            case InputRole.TANGENT:
                continue
            case InputRole.INPUT:
                index = int(entry.target)
                placed = in_layout(EXAMPLE + entry.target, tensors, entry.value.type)
                examples[index] = placed.requires_grad_(entry.requires_grad)
            case InputRole.CONSTANT:
                constants[entry.target] = in_layout(CONSTANT + entry.target, tensors, entry.value.type)
            case _:
                first = ties[entry.target]
                if first not in state:
                    state[first] = in_layout(first, tensors, entry.value.type, may_share=True)
                state[entry.target] = state[first]
    return constants, state, tuple(examples[index] for index in range(len(examples)))


def _ties(graph: Graph) -> dict[str, str]:
    """For each parameter and buffer its first name; others of the same storage and type are tied to it."""
    first: dict[tuple[Storage, TensorType, InputRole], str] = {}
    entries = [i for i in graph.inputs if i.role in (InputRole.PARAMETER, InputRole.BUFFER)]
    return {i.target: first.setdefault((i.value.storage, i.value.type, i.role), i.target) for i in entries}


def in_layout(
    name: str, tensors: Mapping[str, Tensor], wanted: TensorType, *, may_share: bool = False
) -> Tensor:
    """A tensor of the file as the program reads it; in memory of its own, unless it may be the file's."""
    if name not in tensors:
        raise ValueError(f"there is no tensor {name}")
    found = tensors[name]
    dtype = str(found.dtype).removeprefix("torch.")
    if tuple(found.shape) != wanted.shape or dtype != wanted.dtype.value:
        raise ValueError(
            f"{name} is {dtype}{list(found.shape)}; the program reads "
            f"{wanted.dtype.value}{list(wanted.shape)}"
        )
    if wanted.device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(
            "IRC433",
            f"the program was planned for {wanted.device}, which is not here",
            help="plan it again on this machine",
        )
    if may_share and wanted.device == "cpu" and tuple(found.stride()) == wanted.strides:
        return found
    placed = torch.empty_strided(wanted.shape, wanted.strides, dtype=found.dtype, device=wanted.device)
    repeated = tuple(slice(0, 1) if step == 0 else slice(None) for step in wanted.strides)
    placed[repeated].copy_(found[repeated])
    return placed


def _check_optimizer(graph: Graph, optimizer: DescribedOptimizer | None) -> None:
    if graph.gradients is Gradients.APPLIED and optimizer is None:
        raise ValueError("the program applies gradients, and no optimizer is named")
    if graph.gradients is not Gradients.APPLIED and optimizer is not None:
        raise ValueError(f"optimizer {optimizer} is named, and the program applies no gradients")


def _check_deliveries(schedule: Schedule, deliveries: tuple[Delivery, ...]) -> None:
    statics = sum(i.role is not InputRole.TANGENT for i in schedule.graph.inputs)
    outputs = sum(o.role is OutputRole.OUTPUT for o in schedule.graph.outputs)
    for delivery in deliveries:
        limit = statics if delivery.origin is Origin.INPUT else outputs
        if delivery.origin is not Origin.CONSTANT and not 0 <= delivery.index < limit:
            raise ValueError(f"a result comes from {delivery.origin.value} {delivery.index} of {limit}")


def delivery_to_json(delivery: Delivery) -> dict[str, Any]:
    """Returns the delivery of a leaf of the result as JSON.

    Raises:
        UnsupportedError: IRC434 for a constant that no JSON file holds.
    """
    constant = cast(object, delivery.constant)
    if not isinstance(constant, None | bool | int | float | str):
        raise UnsupportedError(
            "IRC434",
            f"the module returns a {type(constant).__name__} beside its tensors, which a folder cannot hold",
            help="return tensors, numbers and texts, or use irc.optimize from Python",
        )
    return {
        "origin": delivery.origin.value,
        "index": delivery.index,
        "view": delivery.view,
        "sharing": delivery.sharing.value,
        "constant": delivery.constant,
    }


def delivery_from_json(row: dict[str, Any]) -> Delivery:
    """Reads what `delivery_to_json` wrote."""
    view = row["view"]
    if view is not None:
        view = (tuple(view[0]), tuple(view[1]), int(view[2]))
    older = Sharing.DETACHED if row.get("detached") else Sharing.VIEW
    sharing = Sharing(row.get("sharing", older))
    return Delivery(Origin(row["origin"]), int(row["index"]), view, row["constant"], sharing)
