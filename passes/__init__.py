"""Passes: what operations cost, and which schedule is chosen."""

from .carry_over import carry_over
from .checkpointing import CheckpointProblem, Repeats, Simulated
from .cost import Cost
from .costs import MACHINES, Costs, Machine, analytic_costs
from .hold_forwards import HoldForwards
from .manager import Observer, Pass, PassManager, Timing, parse_passes
from .planner import Planner, recomputation_problem
from .program import Program
from .release_gradients import ReleaseGradients
from .select_checkpoints import STRATEGIES, SelectCheckpoints, minimum_budget
from .split_convolutions import SplitConvolutions

__all__ = [
    "MACHINES",
    "STRATEGIES",
    "CheckpointProblem",
    "Cost",
    "Costs",
    "HoldForwards",
    "Machine",
    "Observer",
    "Pass",
    "PassManager",
    "Planner",
    "Program",
    "ReleaseGradients",
    "Repeats",
    "SelectCheckpoints",
    "Simulated",
    "SplitConvolutions",
    "Timing",
    "analytic_costs",
    "carry_over",
    "minimum_budget",
    "parse_passes",
    "recomputation_problem",
]
