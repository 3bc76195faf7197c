"""Plans and folders of the small models, made quickly."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from irc.compiler.pipeline.api import Pipeline
from irc.compiler.pipeline.artifact import write_pipeline
from irc.compiler.pipeline.micro_batches import micro_batches_of
from irc.compiler.pipeline.plan import captured_micro_batch, plan_stages
from irc.compiler.pipeline.request import PipelineRequest
from irc.compiler.source import Source
from irc.frontends.torch import Captured
from support import pipeline_models

__all__ = ["captured_once", "planned", "source_of", "written"]


def source_of(model: str) -> Source:
    return Source(f"{pipeline_models.__file__}:{model}")


def planned(
    model: str,
    ranks: int,
    schedule: str,
    micro_batches: int,
    budget: str | list[str] = "64MiB",
    **options: Any,
) -> Pipeline:
    """As `irc.pipeline`; a model is captured once for each number of micro-batches."""
    request = PipelineRequest(
        ranks, micro_batches, budget, schedule, costs="analytic", time_limit=0.5, **options
    )
    request.check()
    captured = captured_once(model, micro_batches)
    return Pipeline(getattr(pipeline_models, model)()[0], captured, plan_stages(captured, request))


@functools.cache
def captured_once(model: str, micro_batches: int) -> Captured:
    module, args = getattr(pipeline_models, model)()
    return captured_micro_batch(module, micro_batches_of(args, micro_batches)[0], None)


def written(folder: Path, model: str, pipe: Pipeline) -> Path:
    write_pipeline(folder, pipe, source_of(model), getattr(pipeline_models, model)()[1])
    return folder
