"""Passes: what operations cost, and which schedule is chosen."""

from .carry_over import carry_over
from .checkpointing import CheckpointProblem, Repeats, Simulated
from .cost import Cost
from .costs import Costs, analytic_costs
from .hold_forwards import HoldForwards
from .homes import HOMED, homes_in
from .machines import MACHINES, Machine, machine_named
from .manager import Observer, Pass, PassManager, Timing, parse_passes
from .offer_tiers import OfferTiers
from .plan_memory import PlanMemory, smallest_budget
from .planner import Planner, recomputation_problem
from .program import Program
from .release_gradients import ReleaseGradients
from .schedule_swaps import ScheduleSwaps
from .select_checkpoints import STRATEGIES, SelectCheckpoints, minimum_budget
from .split_convolutions import SplitConvolutions
from .split_dropout import SplitDropout

__all__ = [
    "HOMED",
    "MACHINES",
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
    "ReleaseGradients",
    "Repeats",
    "ScheduleSwaps",
    "SelectCheckpoints",
    "Simulated",
    "SplitConvolutions",
    "SplitDropout",
    "Timing",
    "analytic_costs",
    "carry_over",
    "homes_in",
    "machine_named",
    "minimum_budget",
    "parse_passes",
    "recomputation_problem",
    "smallest_budget",
]
