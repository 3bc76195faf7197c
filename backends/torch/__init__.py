"""Schedules out as executable torch modules."""

from .alive import AliveTensors, storage_key
from .autograd_graph import held_by_history
from .cache_entry import check_tensor
from .compiled_plan import (
    Compilation,
    Compile,
    CompiledPlan,
    ReservedMemory,
    VariedCall,
    VariedNumbers,
    pack_signature,
    unpack_signature,
)
from .deliver import deliver
from .emit import LengthForms, NumberSlots, check_names, emit_source, saved_values
from .hooks import refuse_hooks
from .length_range import LengthFamily, LengthRange
from .module import bind, bind_program
from .offload import DiskTierConfig, HostTierConfig, TierConfig, Tiers, check_tier_configs
from .original import Original, unfitted
from .pending_backward import PendingBackward
from .plan_cache import PlannedCall
from .plan_cache_state import PlanCacheState
from .planning_locks import planning, tracing
from .program import Program, compile_program
from .refuse_wrappers import refuse_unplannable
from .standalone import StandaloneModule
from .step import run_step

__all__ = [
    "AliveTensors",
    "Compilation",
    "Compile",
    "CompiledPlan",
    "DiskTierConfig",
    "HostTierConfig",
    "LengthFamily",
    "LengthForms",
    "LengthRange",
    "NumberSlots",
    "Original",
    "PendingBackward",
    "PlanCacheState",
    "PlannedCall",
    "Program",
    "ReservedMemory",
    "StandaloneModule",
    "TierConfig",
    "Tiers",
    "VariedCall",
    "VariedNumbers",
    "bind",
    "bind_program",
    "check_names",
    "check_tensor",
    "check_tier_configs",
    "compile_program",
    "deliver",
    "emit_source",
    "held_by_history",
    "pack_signature",
    "planning",
    "refuse_hooks",
    "refuse_unplannable",
    "run_step",
    "saved_values",
    "storage_key",
    "tracing",
    "unfitted",
    "unpack_signature",
]
