"""The folder of a planned pipeline: plan, order of work, a program for each stage, and weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...backends.torch import TierConfig, emit_source
from ...ir import (
    InputRole,
    Schedule,
    Tier,
    UnsupportedError,
    UsageError,
    parse_program,
    print_file,
    print_program,
    verify_graph,
    verify_schedule,
)
from ...ir.files import read_json
from ...ir.pipeline.exchange import send_lag, verify_exchanges
from ...ir.pipeline.plan import PipelinePlan
from ...ir.pipeline.schedule import PipelineSchedule
from ..artifact import (
    CONSTANT,
    EXAMPLE,
    PIPELINE_FILE,
    delivery_from_json,
    delivery_to_json,
    in_layout,
    put_folder,
    tier_from_json,
    tier_to_json,
    undamaged,
)
from ..operation_allowlist import check_operations
from ..optimizers import DescribedOptimizer, parse_optimizer
from ..source import Source
from .api import Pipeline
from .trainer import Stages, state_of

__all__ = [
    "WrittenPipeline",
    "is_pipeline",
    "read_pipeline",
    "unread_state",
    "write_pipeline",
    "written_source",
]

_STATE = (InputRole.PARAMETER, InputRole.BUFFER)


@dataclass(frozen=True)
class WrittenPipeline:
    """The contents of a pipeline's folder.

    Args:
        stages: What runs.
        state: Parameters and buffers of the stages that were asked for, by name.
        examples: The tensor arguments of a whole batch.
        source: Where the model came from.
        ties: For each name of a parameter of several names the first one.
        names: Of the model's `state_dict`.
    """

    stages: Stages
    state: dict[str, Tensor]
    examples: tuple[Tensor, ...]
    source: Source
    ties: dict[str, str]
    names: tuple[str, ...]

    @property
    def own_names(self) -> list[str]:
        """Those of the names whose tensors were read."""
        return [name for name in self.names if name in self.state]


def is_pipeline(folder: Path) -> bool:
    """Whether a folder is that of a pipeline."""
    return (folder / PIPELINE_FILE).is_file()


def write_pipeline(folder: Path, pipeline: Pipeline, source: Source, examples: Sequence[Tensor]) -> None:
    """Writes a pipeline; the folder appears when it is complete.

    Args:
        folder: Where to; an earlier folder of irc is replaced.
        pipeline: What to write.
        source: Where the model came from.
        examples: The tensor leaves of the example arguments of a whole batch.

    Raises:
        UsageError: IRC430 when the target cannot be written.
        UnsupportedError: IRC434 when the model returns what no JSON file holds, or the optimizer is made by
            a function of the program.
    """
    if not isinstance(pipeline.stages.optimizer, DescribedOptimizer | None):
        raise UnsupportedError(
            "IRC434",
            "the optimizer is made by a function, which no folder holds",
            help='name it: optimizer=irc.compiler.optimizers.parse_optimizer("adamw:lr=1e-3")',
        )
    put_folder(folder, lambda staging: _write(staging, pipeline, source, examples))


def _write(folder: Path, pipeline: Pipeline, source: Source, examples: Sequence[Tensor]) -> None:
    stages = pipeline.stages
    state = state_of(pipeline.model)
    first: dict[int, str] = {}
    ties = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
    described = {
        **stages.plan.to_json(),
        "order": str(stages.order),
        "tier_configs": [tier_to_json(config) for config in stages.tier_configs],
        "last_differs": bool(stages.last_schedules),
        "source": asdict(source.located()),
        "deliveries": [delivery_to_json(delivery) for delivery in stages.deliveries],
        "names": [name for name in pipeline.model.state_dict() if name in state],
        "ties": {name: its for name, its in ties.items() if name != its},
    }
    (folder / PIPELINE_FILE).write_text(json.dumps(described, indent=1))
    for index, schedule in enumerate(stages.schedules):
        _write_stage(folder, f"stage-{index}", schedule)
    for index, schedule in enumerate(stages.last_schedules):
        _write_stage(folder, f"stage-{index}-last", schedule)
    tensors = {name: state[name] for name in first.values()}
    tensors |= {CONSTANT + name: tensor for name, tensor in stages.constants.items()}
    tensors |= {f"{EXAMPLE}{index}": tensor for index, tensor in enumerate(examples)}
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, folder / "weights.safetensors")
    (folder / "weights.safetensors").chmod((folder / PIPELINE_FILE).stat().st_mode)


def _write_stage(folder: Path, name: str, schedule: Schedule) -> None:
    (folder / f"{name}.irc").write_text(print_file(print_program(schedule)))
    (folder / f"{name}.py").write_text(emit_source(schedule))


def read_pipeline(folder: Path, rank: int | None = None, *, is_trusted: bool = False) -> WrittenPipeline:
    """Reads what `write_pipeline` wrote, and checks it.

    Args:
        folder: Where.
        rank: Reads the weights of the stages of this device alone; None those of all.
        is_trusted: As of `tier_from_json`.

    Raises:
        UsageError: IRC431 when a file is missing or damaged.
        VerificationError: When a graph, a schedule or the order of work is not valid.
    """
    with undamaged(folder / PIPELINE_FILE):
        described: dict[str, Any] = read_json((folder / PIPELINE_FILE).read_text())
        plan = PipelinePlan.from_json(described)
        order = PipelineSchedule.parse(described["order"])
        deliveries = tuple(delivery_from_json(row) for row in described["deliveries"])
        source = Source.from_json(described["source"])
        ties = {str(name): str(its) for name, its in described["ties"].items()}
        optimizer = None if plan.optimizer is None else parse_optimizer(plan.optimizer)
        names = tuple(map(str, described["names"]))
        rows = described["tier_configs"]
        tier_configs = tuple(tier_from_json(row, is_trusted=is_trusted) for row in rows)
        has_last = bool(described["last_differs"])
    order.verify()
    send_lag(order)
    schedules = tuple(_schedule(folder, f"stage-{index}", tier_configs) for index in range(order.stages))
    last = tuple(
        _schedule(folder, f"stage-{index}-last", tier_configs) for index in range(order.stages * has_last)
    )
    for each in (schedules, last) if last else (schedules,):
        verify_exchanges([schedule.graph for schedule in each])
    with undamaged(folder / "weights.safetensors"):
        mine = range(order.stages) if rank is None else order.stages_on(rank)
        state, constants, examples = _tensors(folder, [schedules[k] for k in mine], ties)
    stages = Stages(order, schedules, last, deliveries, constants, plan, optimizer, tier_configs)
    state |= {name: state[first] for name, first in ties.items() if first in state}
    return WrittenPipeline(stages, state, examples, source, ties, names)


def read_pipeline_plan(folder: Path) -> tuple[PipelinePlan, Source]:
    """Reads the plan of a written pipeline and the origin of its model; nothing of it runs.

    Raises:
        UsageError: IRC431 when the file is missing or damaged.
    """
    with undamaged(folder / PIPELINE_FILE):
        described: dict[str, Any] = read_json((folder / PIPELINE_FILE).read_text())
        return PipelinePlan.from_json(described), Source.from_json(described["source"])


def written_source(folder: Path) -> Source:
    """Reads the origin of the model of a written pipeline.

    Raises:
        UsageError: IRC431 when the file is missing or damaged.
    """
    with undamaged(folder / PIPELINE_FILE):
        return Source.from_json(read_json((folder / PIPELINE_FILE).read_text())["source"])


def unread_state(folder: Path, written: WrittenPipeline) -> dict[str, Tensor]:
    """The tensors of the model's `state_dict` that no stage reads, by name."""
    graphs = [schedule.graph for schedule in written.stages.schedules]
    targets = {entry.target for graph in graphs for entry in graph.inputs if entry.role in _STATE}
    read = {written.ties.get(target, target) for target in targets}
    file = folder / "weights.safetensors"
    with undamaged(file), safe_open(file, framework="pt") as opened:
        firsts = ((name, written.ties.get(name, name)) for name in written.names)
        return {name: opened.get_tensor(first) for name, first in firsts if first not in read}


def _schedule(folder: Path, name: str, tier_configs: Sequence[TierConfig]) -> Schedule:
    file = folder / f"{name}.irc"
    if not file.is_file():
        raise UsageError(
            "IRC431",
            f"{folder} has no {file.name}",
            help="give a folder written by irc optimize MODEL --stages K -o DIR",
        )
    with undamaged(file):
        schedule = parse_program(file.read_text())
    verify_graph(schedule.graph)
    tiers = [Tier(config.name, config.capacity_bytes, math.inf, math.inf) for config in tier_configs]
    verify_schedule(schedule, {}, tiers=tiers)
    check_operations(schedule.graph)
    return schedule


def _tensors(
    folder: Path, schedules: Sequence[Schedule], ties: dict[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[Tensor, ...]]:
    """Parameters and buffers, constants, and the examples; nothing else of the file is read."""
    state: dict[str, Tensor] = {}
    constants: dict[str, Tensor] = {}
    with safe_open(folder / "weights.safetensors", framework="pt") as file:
        names = set(file.keys())

        def taken(name: str, entry: Any) -> Tensor:
            tensors = {name: file.get_tensor(name)} if name in names else {}
            return in_layout(name, tensors, entry.value.type)

        for schedule in schedules:
            for entry in schedule.graph.inputs:
                if entry.role is InputRole.CONSTANT:
                    constants[entry.target] = taken(CONSTANT + entry.target, entry)
                elif entry.role in _STATE:
                    first = ties.get(entry.target, entry.target)
                    if first not in state:
                        tensor = taken(first, entry)
                        is_parameter = entry.role is InputRole.PARAMETER
                        state[first] = nn.Parameter(tensor, entry.requires_grad) if is_parameter else tensor
                    state[entry.target] = state[first]
        count = sum(name.startswith(EXAMPLE) for name in names)
        examples = tuple(file.get_tensor(f"{EXAMPLE}{index}") for index in range(count))
    return state, constants, examples
