"""Pipelines: which stage runs what, in which order, and what each stage exchanges with its neighbours."""

from .placement import Dataflow, Placement, place_backward
from .schedules import SCHEDULES, pipeline_schedule
from .stage_graphs import Boundary, StageGraph, boundary_values, cut

__all__ = [
    "SCHEDULES",
    "Boundary",
    "Dataflow",
    "Placement",
    "StageGraph",
    "boundary_values",
    "cut",
    "pipeline_schedule",
    "place_backward",
]
