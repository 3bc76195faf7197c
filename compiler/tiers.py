"""The tiers that a user names: how fast they are for planning, and where they are when a module runs."""

from __future__ import annotations

import timeit
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from ..backends.torch import DiskTierConfig, HostTierConfig, TierConfig
from ..ir import Tier, TierRequest, UsageError, format_bytes, parse_tiers
from ..passes import OFFLOADABLE, OfferTiers
from ..passes.costs.measure_tiers import measure_tier, tier_bytes
from ..passes.costs.this_machine import this_machine
from .plugin_tiers import measured_plugin, plugin_config

__all__ = ["device_of", "measured_tiers", "offer", "tier_configs", "what_moves"]


def what_moves(swap: str | Sequence[str]) -> tuple[list[str], str]:
    """Parses `swap` of `irc.optimize`: the tiers, and what lives there, as `PlanMemory.offload`.

    Raises:
        UsageError: IRC423 if something is to live in a tier and no tier is named.
    """
    texts = [swap] if isinstance(swap, str) else [*swap]
    tiers: list[str] = []
    offloaded_parameters: list[str] = []
    for text in texts:
        words = [word.strip() for word in text.split(",")] if isinstance(cast(object, text), str) else []
        if words and all(word in OFFLOADABLE for word in words):
            offloaded_parameters += words
        else:
            tiers.append(text)
    if offloaded_parameters and not tiers:
        raise UsageError(
            "IRC423",
            f"{' and '.join(dict.fromkeys(offloaded_parameters))} shall live in a tier, and swap= names none",
            help='name one beside it: ["disk:/scratch:200GiB", "params,optimizer"]',
        )
    return tiers, "+".join(word for word in OFFLOADABLE if word in offloaded_parameters) or "none"


def offer(swap: str | Sequence[str], costs: str) -> OfferTiers:
    """The pass that offers the tiers that `swap` names, with the bandwidths of the machine a plan is for.

    Args:
        swap: Tiers, as `what_moves` gives them.
        costs: As of `irc.optimize`. The bandwidths are those of the machine that it names, those of the
            machine `cpu` if costs are analytic, or else those of this machine, see `measured_tiers`.

    Raises:
        UsageError: IRC423 to IRC429 for what names no tier; IRC408 for a machine without such a tier; IRC447
            for what lives in a tier, if the caller does not plan that.
    """
    _, offloaded = what_moves(swap)
    if offloaded != "none":
        raise UsageError(
            "IRC447",
            f"{offloaded} shall live in a tier between steps, and only irc.optimize and "
            "`irc optimize` plan that",
            help="leave params and optimizer out of swap=, or of --swap",
        )
    requests = parse_tiers(swap)
    machine = "" if costs in ("measured", "thorough") else "cpu" if costs == "analytic" else costs
    found = OfferTiers("+".join(str(request) for request in requests), machine, asked=requests)
    found.check()
    if machine in ("", "cpu"):
        for request in requests:
            _check_capacity(request)
    return found


def _check_capacity(request: TierRequest) -> None:
    """Refuses a disk of this machine that has not the bytes that a plan may count on.

    Raises:
        UsageError: IRC425.
    """
    asked_bytes = request.capacity_bytes
    if request.name != "disk" or asked_bytes is None:
        return
    free_bytes = tier_bytes(request.name, request.folder)
    if asked_bytes > free_bytes:
        raise UsageError(
            "IRC425",
            f"a disk tier of {format_bytes(asked_bytes)} ({asked_bytes:,} bytes) is asked for, and"
            f" {request.folder} has {format_bytes(free_bytes)} ({free_bytes:,} bytes) free",
            help="ask for less, name a folder on a larger disk, or leave the amount out to use what is free",
        )


def measured_tiers(offer: OfferTiers, device: torch.device) -> OfferTiers:
    """The pass, with the tiers of this machine measured if it offers those.

    They are as `irc machine` measured them, or else measured now, for a second each; in seconds of one
    thread of the CPU, as measured costs are.

    Args:
        offer: What is offered.
        device: Where the model is.
    """
    if offer.machine or offer.tiers:
        return offer
    return replace(offer, tiers=tuple(_measured(offer, device)))


def _measured(step: OfferTiers, device: torch.device) -> list[Tier]:
    found: list[Tier] = []
    speedup = _speedup(device)
    for request in step.requests():
        theirs = plugin_config(request)
        if theirs is not None:
            found.append(_slower(measured_plugin(theirs, device), speedup))
            continue
        machine = this_machine(str(device), request.folder)
        known = {tier.name: tier for tier in machine.tiers} if machine is not None else {}
        tier = known.get(request.name) or measure_tier(request.name, request.folder, device=str(device))
        free_bytes = tier_bytes(request.name, request.folder)
        capacity_bytes = free_bytes if request.capacity_bytes is None else request.capacity_bytes
        found.append(_slower(replace(tier, capacity_bytes=capacity_bytes), speedup))
    return found


def _slower(tier: Tier, factor: float) -> Tier:
    """Returns a tier whose copies take that many times as long."""
    return replace(
        tier,
        out_bytes_per_second=tier.out_bytes_per_second / factor,
        in_bytes_per_second=tier.in_bytes_per_second / factor,
        latency_seconds=tier.latency_seconds * factor,
    )


_SIZE = 512
_REPEATS = 5


def _speedup(device: torch.device) -> float:
    """Returns the seconds of the cost table, which are those of one thread, that pass in a second of a step.

    It is that of a matrix product; what is bound by memory gains less from threads, so that copies are
    rather counted as too slow.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        return 1.0
    left, right = torch.ones(_SIZE, _SIZE), torch.ones(_SIZE, _SIZE)

    def seconds(count: int) -> float:
        torch.set_num_threads(count)
        try:
            return min(timeit.repeat(lambda: torch.mm(left, right), number=1, repeat=_REPEATS))
        finally:
            torch.set_num_threads(threads)

    return max(seconds(1) / seconds(threads), 1.0)


def tier_configs(offer: OfferTiers, device: torch.device) -> tuple[TierConfig, ...]:
    """Returns the configurations of the offered tiers for a module on `device`.

    A plan for another machine may name the host of a GPU; if the module is on the CPU, what goes there
    is written to a scratch file: the numbers and the memory beside it are the same.
    """
    found: dict[str, TierConfig] = {}
    known = {tier.name: tier for tier in (offer.offered() if offer.machine else offer.tiers)}
    for request in offer.requests():
        tier = known.get(request.name)
        nbytes = _UNLIMITED if tier is None else tier.capacity_bytes
        is_duplex = tier is None or tier.is_duplex
        elsewhere = bool(offer.machine) and device.type == "cpu"
        theirs = plugin_config(request)
        if theirs is not None:
            found[request.name] = theirs
        elif request.name == "host" and not elsewhere:
            found[request.name] = HostTierConfig(request.name, nbytes)
        else:
            folder = request.folder or None
            found[request.name] = DiskTierConfig(request.name, nbytes, folder, is_duplex=is_duplex)
    return tuple(found.values())


_UNLIMITED = 1 << 62
"""The capacity of a tier that is not measured yet."""


def device_of(model: Any, leaves: Sequence[Any]) -> torch.device:
    """Returns the device of a model's first parameter or buffer, or of its first tensor argument."""
    tensors = (*model.parameters(), *model.buffers(), *(x for x in leaves if isinstance(x, torch.Tensor)))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
