"""Tiers of other distributions: their configs by entry points, and their speeds by their own copies."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..backends.torch import TierConfig, check_tier_configs
from ..backends.torch.offload import RunningTier, Slot, Ticket
from ..ir import TIER_KINDS, Tier, TierRequest, UsageError, first_line, load_plugin
from ..passes.costs.measure_tiers import measure_copies

__all__ = ["measured_plugin", "plugin_config", "tier_kind"]


def tier_kind(name: str) -> type[TierConfig] | None:
    """Imports the config of a tier of another distribution; None if no entry point has that name.

    Raises:
        UsageError: IRC597 if it cannot be imported, or is not a `TierConfig` of that kind.
    """
    if name in TIER_KINDS:
        return None
    found = load_plugin("irc.tiers", name, type)
    if found is not None and not (issubclass(found, TierConfig) and getattr(found, "kind", None) == name):
        raise UsageError(
            "IRC597",
            f"the entry point {name!r} in irc.tiers does not name a TierConfig whose kind is {name!r}",
            help="mend or uninstall its distribution",
        )
    return found


def plugin_config(request: TierRequest) -> TierConfig | None:
    """Returns the config of a tier of another distribution; None for `host` and `disk`.

    Raises:
        UsageError: IRC425 if the request means nothing to the tier; IRC597 as `tier_kind`.
    """
    kind = tier_kind(request.name)
    if kind is None:
        return None
    config = kind.from_request(request.folder, request.capacity_bytes)
    try:
        json.dumps(asdict(config))
    except (TypeError, ValueError) as error:
        raise UsageError(
            "IRC597",
            f"a field of the tier {request.name} is not a value of JSON: {first_line(error)}",
            help="mend or uninstall its distribution",
        ) from error
    return config


_PROBE_BYTES = 16 << 20
_SMALL_BYTES = 4096
_SMALL_COPIES = 20


def measured_plugin(config: TierConfig, device: torch.device) -> Tier:
    """Measures a tier by the copies that a step makes, alone and beside computations."""
    check_tier_configs([config], {str(device)})
    tier = config.open()
    with torch.no_grad():
        small = _Probe(tier, device, min(_SMALL_BYTES, config.capacity_bytes))
        latency_seconds = max(
            statistics.median(copy() for _ in range(_SMALL_COPIES)) for copy in (small.out, small.back)
        )
        del small  # gives its slot back
        is_duplex = bool(getattr(config, "is_duplex", False))
        found = Tier(config.name, config.capacity_bytes, 1.0, 1.0, latency_seconds, is_duplex)
        probe = _Probe(tier, device, min(_PROBE_BYTES, config.capacity_bytes))
        return measure_copies(found, probe, device, seconds=1.0).tier


@dataclass
class _Probe:
    """Copies of `nbytes` to an open tier and back, each of which returns its seconds."""

    tier: RunningTier
    device: torch.device
    nbytes: int

    def __post_init__(self) -> None:
        self.tensor = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
        self.slot: Slot[Any] = self.tier.room.take(self.nbytes)

    def out(self) -> float:
        return self._seconds(lambda: self.tier.begin_out(self.tensor, self.slot))

    def back(self) -> float:
        return self._seconds(lambda: self.tier.begin_in(self.slot, self.tensor))

    def _seconds(self, begin: Callable[[], Ticket]) -> float:
        self._synchronize()
        start = time.perf_counter()
        begin().wait()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
