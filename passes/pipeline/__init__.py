"""Pipelines: the stages of a model, the order in which they run, and what neighbours exchange."""

from .baselines import PARTITIONS
from .boundaries import Boundary, boundary_values
from .devices import Devices
from .linear_order import LinearOrder
from .linear_partition import LinearPartition, lower_bound_seconds
from .optimizer_steps import OptimizerSteps
from .placement import Dataflow, Placement, place_backward
from .plan import linear_order_of, plan_pipeline
from .planned_pipeline import PipelineOptions, PlannedPipeline
from .schedules import SCHEDULES, pipeline_schedule
from .stage_graphs import StageGraph, cut_graph
from .stage_plan import PlannedStage, StagePlanner

__all__ = [
    "PARTITIONS",
    "SCHEDULES",
    "Boundary",
    "Dataflow",
    "Devices",
    "LinearOrder",
    "LinearPartition",
    "OptimizerSteps",
    "PipelineOptions",
    "Placement",
    "PlannedPipeline",
    "PlannedStage",
    "StageGraph",
    "StagePlanner",
    "boundary_values",
    "cut_graph",
    "linear_order_of",
    "lower_bound_seconds",
    "pipeline_schedule",
    "place_backward",
    "plan_pipeline",
]
