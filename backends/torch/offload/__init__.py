"""Copies to tiers while steps run: where they go, and who carries them out."""

from .offloaded_parameters import State
from .session import Session
from .table import CopiedTensor, CopyTable, copy_table
from .tier import Traffic
from .tier_config import DiskPlace, FakePlace, HostPlace, TierPlace
from .tiers import Tiers, check_places

__all__ = [
    "CopiedTensor",
    "CopyTable",
    "DiskPlace",
    "FakePlace",
    "HostPlace",
    "Session",
    "State",
    "TierPlace",
    "Tiers",
    "Traffic",
    "check_places",
    "copy_table",
]
