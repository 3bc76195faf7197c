"""Passes: what operations cost, and which schedule is chosen."""

from .checkpointing import CheckpointProblem, Simulated, Stage, Staging
from .cost import Cost
from .costs import MACHINES, Costs, Machine, analytic_costs
from .manager import Observer, Pass, PassManager, Timing, parse_passes
from .program import Program
from .select_checkpoints import STRATEGIES, SelectCheckpoints, minimum_budget

__all__ = [
    "MACHINES",
    "STRATEGIES",
    "CheckpointProblem",
    "Cost",
    "Costs",
    "Machine",
    "Observer",
    "Pass",
    "PassManager",
    "Program",
    "SelectCheckpoints",
    "Simulated",
    "Stage",
    "Staging",
    "Timing",
    "analytic_costs",
    "minimum_budget",
    "parse_passes",
]
