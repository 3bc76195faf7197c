"""Carries out copies to tiers while steps run."""

from .disk import DiskTierConfig
from .offloaded_parameters import State
from .pinned import HostTierConfig
from .session import Session
from .slots import Room, Slot
from .table import CopiedTensor, CopyTable, copy_table
from .tier import ResidentTier, RunningTier, Ticket, Traffic
from .tier_config import TierConfig
from .tiers import Tiers, check_tier_configs

__all__ = [
    "CopiedTensor",
    "CopyTable",
    "DiskTierConfig",
    "HostTierConfig",
    "ResidentTier",
    "Room",
    "RunningTier",
    "Session",
    "Slot",
    "State",
    "Ticket",
    "TierConfig",
    "Tiers",
    "Traffic",
    "check_tier_configs",
    "copy_table",
]
