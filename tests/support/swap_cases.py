"""A small model whose steps swap to the disk, and what has to hold after each."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from irc.backends.torch import DiskTierConfig, Tiers, bind_program, compile_program
from irc.backends.torch.original import FITTED
from irc.frontends.torch import Captured, capture
from irc.ir import Graph, Schedule, Tier, verify_schedule
from support.random_copies import away_at_the_loss
from support.torch_cases import Model, keep_all

__all__ = [
    "DISK",
    "assert_next_step_is_right",
    "away",
    "captured",
    "deep",
    "held_bytes",
    "left_by",
    "scratch_of",
    "step",
    "swapping",
    "tiers_of",
]

DISK = Tier("disk", 1 << 40, 1e9, 1e9)


def away(graph: Graph) -> Schedule:
    return away_at_the_loss(keep_all(graph), "disk")


def deep() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = x + torch.tanh(m.norm(layer(x))) * torch.sigmoid(x)
        return x.square().mean()

    layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
    return Model(forward, layers=layers, norm=nn.BatchNorm1d(48)), (torch.randn(256, 48),)


@functools.cache
def captured() -> Captured:
    """The graph of `deep`, which is the same for all of them."""
    module, args = deep()
    return capture(module, args, loss=lambda result: result)


def swapping(
    module: nn.Module, folder: Path, capacity_bytes: int = 1 << 30, schedule: Any = away, **options: Any
) -> nn.Module:
    chosen = schedule(captured().graph)
    verify_schedule(chosen, {}, tiers=[DISK])
    place = DiskTierConfig("disk", capacity_bytes, str(folder), **options)
    return bind_program(module, compile_program(chosen, {}), captured().signature, tiers=[place])


def tiers_of(module: nn.Module) -> Tiers:
    return module.__dict__[FITTED].tiers


def held_bytes(module: nn.Module) -> int:
    return sum(tiers_of(module).held_bytes.values())


def scratch_of(module: nn.Module) -> Any:
    """The scratch file of a module that has run."""
    running: Any = vars(tiers_of(module))["_running"]["disk"]
    return vars(running)["_file"]


def step(module: nn.Module, args: Any) -> None:
    torch.manual_seed(4)
    module(*args).backward()


def left_by(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None] + [b.clone() for b in module.buffers()]


def assert_next_step_is_right(ours: nn.Module, original: nn.Module, args: Any) -> None:
    """After whatever went wrong: nothing is held, and a step gives the original's numbers."""
    gc.collect()
    assert held_bytes(ours) == 0
    ours.load_state_dict(original.state_dict())
    for module in (ours, original):
        module.zero_grad()
        step(module, args)
    assert all(map(torch.equal, left_by(ours), left_by(original)))
    assert len(left_by(ours)) == len(left_by(original)) > 4
    assert held_bytes(ours) == 0
