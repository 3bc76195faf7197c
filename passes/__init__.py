"""Passes: what operations cost, and which schedule is chosen."""

from .costs.machines import MACHINES, Machine, machine_named
from .costs.measure_costs import Cost
from .costs.table import Costs, analytic_costs
from .offload.offer_tiers import OfferTiers
from .offload.offloaded_parameters import OFFLOADABLE, offloadable_in
from .offload.plan_memory import PlanMemory, smallest_budget
from .pass_manager import Observer, Pass, PassManager, Timing, parse_passes
from .program import Program
from .remat.planner import Planner, recomputation_problem
from .remat.problem import CheckpointProblem, Recomputations, Solution
from .remat.reuse_schedule import carry_over
from .remat.select_checkpoints import STRATEGIES, SelectCheckpoints, minimum_budget
from .rewrites.hold_forwards import HoldForwards
from .rewrites.release_gradients import ReleaseGradients
from .rewrites.split_convolutions import SplitConvolutions
from .rewrites.split_dropout import SplitDropout

__all__ = [
    "MACHINES",
    "OFFLOADABLE",
    "STRATEGIES",
    "CheckpointProblem",
    "Cost",
    "Costs",
    "HoldForwards",
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
    "SelectCheckpoints",
    "Solution",
    "SplitConvolutions",
    "SplitDropout",
    "Timing",
    "analytic_costs",
    "carry_over",
    "machine_named",
    "minimum_budget",
    "offloadable_in",
    "parse_passes",
    "recomputation_problem",
    "smallest_budget",
]
