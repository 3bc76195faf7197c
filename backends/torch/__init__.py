"""Schedules out as executable torch modules."""

from .alive import AliveTensors, storage_key
from .cache_entry import check_tensor
from .compiled_plan import CompiledPlan, Replan, Replanned, ReservedMemory, pack_signature, unpack_signature
from .deliver import deliver
from .emit import emit_source, saved_values
from .guards.attribute_reads import recording_attribute_reads
from .history import held_by_history
from .hooks import refuse_hooks
from .module import fit, fit_planned
from .offload import (
    DiskTierConfig,
    HostTierConfig,
    TierConfig,
    TierPlace,
    Tiers,
    check_places,
    check_tier_configs,
)
from .original import Original, unfitted
from .pending_backward import PendingBackward
from .plan_cache import PlannedCall
from .program import Program, compile_program
from .standalone import StandaloneModule
from .step import run_step
from .tracing import planning, tracing
from .wrappers import refuse_unplannable

__all__ = [
    "AliveTensors",
    "CompiledPlan",
    "DiskTierConfig",
    "HostTierConfig",
    "Original",
    "PendingBackward",
    "PlannedCall",
    "Program",
    "Replan",
    "Replanned",
    "ReservedMemory",
    "StandaloneModule",
    "TierConfig",
    "TierPlace",
    "Tiers",
    "check_places",
    "check_tensor",
    "check_tier_configs",
    "compile_program",
    "deliver",
    "emit_source",
    "fit",
    "fit_planned",
    "held_by_history",
    "pack_signature",
    "planning",
    "recording_attribute_reads",
    "refuse_hooks",
    "refuse_unplannable",
    "run_step",
    "saved_values",
    "storage_key",
    "tracing",
    "unfitted",
    "unpack_signature",
]
