"""Passes: what operations cost, and which schedule is chosen."""

import warnings
from typing import Any

from .costs.machines import MACHINES, Machine, machine_named
from .costs.measure_costs import Cost
from .costs.table import Costs, analytic_costs
from .offload.offer_tiers import OfferTiers
from .offload.offloaded_parameters import OFFLOADABLE, offloadable_in
from .pass_manager import Observer, Pass, PassManager, parse_passes, pass_kinds, print_pass
from .plan_memory import PlanMemory, smallest_budget
from .program import Program
from .remat.floor import Floor
from .remat.planner import Planner, recomputation_problem
from .remat.problem import CheckpointProblem, Recomputations, Solution
from .remat.reuse_schedule import reuse_schedule
from .rewrites.fuse_operations import FuseOperations
from .rewrites.hold_forwards import HoldForwards
from .rewrites.loss_gradients import LossGradientsInForward
from .rewrites.release_gradients import ReleaseGradients
from .rewrites.replay_draws import ReplayDraws
from .rewrites.row_regions import row_regions
from .rewrites.split_convolutions import SplitConvolutions
from .rewrites.tile_rows import TileRows
from .rewrites.write_in_place import WriteInPlace
from .step_memory import step_memory
from .strategy_registry import Asked, Strategy

__all__ = [
    "MACHINES",
    "OFFLOADABLE",
    "Asked",
    "CheckpointProblem",
    "Cost",
    "Costs",
    "Floor",
    "FuseOperations",
    "HoldForwards",
    "LossGradientsInForward",
    "Machine",
    "Observer",
    "OfferTiers",
    "Pass",
    "PassManager",
    "PlanMemory",
    "Planner",
    "Program",
    "Recomputations",
    "ReleaseGradients",
    "ReplayDraws",
    "Solution",
    "SplitConvolutions",
    "Strategy",
    "TileRows",
    "WriteInPlace",
    "analytic_costs",
    "machine_named",
    "offloadable_in",
    "parse_passes",
    "pass_kinds",
    "print_pass",
    "recomputation_problem",
    "reuse_schedule",
    "row_regions",
    "smallest_budget",
    "step_memory",
]


def __getattr__(name: str) -> Any:
    """The name of a pass in the version before, which goes with the next one."""
    if name == "SelectCheckpoints":
        warnings.warn("SelectCheckpoints is now PlanMemory", DeprecationWarning, stacklevel=2)
        return PlanMemory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
