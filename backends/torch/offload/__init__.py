"""Carries out copies to tiers while steps run."""

from .disk import DiskTierConfig
from .offloaded_parameters import State
from .pinned import HostTierConfig
from .session import Session
from .table import CopiedTensor, CopyTable, copy_table
from .tier import Traffic
from .tier_config import TierConfig, TierPlace
from .tiers import Tiers, check_places, check_tier_configs

__all__ = [
    "CopiedTensor",
    "CopyTable",
    "DiskTierConfig",
    "HostTierConfig",
    "Session",
    "State",
    "TierConfig",
    "TierPlace",
    "Tiers",
    "Traffic",
    "check_places",
    "check_tier_configs",
    "copy_table",
]
