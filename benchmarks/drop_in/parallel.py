"""Rows 9 and 10: over two ranks, with DistributedDataParallel and fully_shard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from irc.ir import IrcError

from .comparison import Difference, check_same, state_of
from .models import Arguments, Calls
from .ranks import on_ranks
from .registry import check, the
from .steps import OPTIMIZERS
from .trial import Pair, Side, Trial

_MODELS = the("convolution", "transformer")


def _own_part(side: Side) -> None:
    """Other examples on each rank: the batch, turned by the rank."""
    turned = tuple(t.roll(dist.get_rank(), 0) * 1 for t in side.arguments.args)
    if dist.get_rank() and turned[0].is_floating_point():
        turned = (turned[0] * 0.5, *turned[1:])
    side.arguments = Arguments(turned, side.arguments.kwargs)


def _same_on_ranks(trial: Trial, pair: Pair, script: Callable[[Side], Any]) -> None:
    """`Trial.same` on each rank; afterwards the parameters are the same on both."""
    for side in (pair.original, pair.ours):
        _own_part(side)
    trial.same(pair, script)
    mine = {
        n: t for n, t in state_of(pair.ours.module).items() if t is not None and n.startswith("parameter")
    }
    for name, tensor in mine.items():
        first = tensor.clone()
        dist.broadcast(first, 0)
        check_same(tensor, first, f"{name} on rank {dist.get_rank()}, compared with rank 0", 1e-6)


def _ddp_steps(
    optimizer: str, *, micro: int = 1, between: Callable[[Side], Any] | None = None, **options: Any
) -> Callable[[Side], Any]:
    """Three steps under DistributedDataParallel; all but the last micro-batch of each within no_sync."""

    def script(side: Side) -> Any:
        wrapped = DistributedDataParallel(side.module, **options)
        made = OPTIMIZERS[optimizer](wrapped.parameters())
        seen: list[Any] = []
        for _ in range(3):
            made.zero_grad()
            losses: list[Tensor] = []
            for k in range(micro):
                with wrapped.no_sync() if k < micro - 1 else contextlib.nullcontext():
                    side.mark()
                    loss = side.lossy(wrapped(*side.arguments.args, **side.arguments.kwargs)) / micro
                    loss.backward()
                losses.append(loss.detach())
            seen.append(losses)
            seen.append([None if p.grad is None else p.grad.clone() for p in side.module.parameters()])
            made.step()
            if between is not None:
                between(side)
        return seen

    return script


def _ddp(
    name: str, promise: str, models: tuple[str, ...] = _MODELS, *, micro: int = 1, **options: Any
) -> None:
    @on_ranks(name)
    def body(trial: Trial) -> None:
        pair = trial.pair()
        _same_on_ranks(trial, trial.twin(pair), _ddp_steps("SGD", micro=micro, **options))
        _same_on_ranks(trial, pair, _ddp_steps("AdamW", micro=micro, **options))

    check(9, models, name=name, promise=promise)(body)


_EQUAL = "Gradients and parameters on both ranks are those of DDP on the original."
_ddp("DDP", _EQUAL)
_ddp("DDP with no_sync", _EQUAL, micro=3)
_ddp("DDP with unused parameters", _EQUAL, the("convolution"), find_unused_parameters=True)
_ddp("DDP with a static graph", _EQUAL, the("convolution"), static_graph=True)
_ddp("DDP with gradients as views", _EQUAL, the("convolution"), gradient_as_bucket_view=True)
_ddp("DDP with small buckets", _EQUAL, the("convolution", "transformer"), bucket_cap_mb=0.001)


@check(9, refusable=True)
@on_ranks("optimize of a DDP module")
def optimize_of_a_module_in_ddp(trial: Trial) -> None:
    """irc.optimize(DDP(model)): equal, or refused by name."""
    module = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)))
    pair = trial.fit(module, Arguments((torch.randn(8, 4),)))

    def script(side: Side) -> Any:
        made = OPTIMIZERS["SGD"](side.module.parameters())
        for _ in range(3):
            made.zero_grad()
            side.loss().backward()
            made.step()

    _same_on_ranks(trial, pair, script)


@check(9)
@on_ranks("DDP with a head that only one rank uses")
def ddp_with_a_head_that_the_loss_does_not_use(trial: Trial) -> None:
    """find_unused_parameters: a head whose result the loss leaves aside has eager's gradient."""

    def forward(m: Any, x: Any) -> Any:
        h = torch.tanh(m.body(x))
        return m.a(h), m.b(h)

    parts = {"body": nn.Linear(4, 8), "a": nn.Linear(8, 4), "b": nn.Linear(8, 4)}
    pair = trial.fit(Calls(forward, **parts), Arguments((torch.randn(8, 4),)), lambda r: r[0].square().mean())
    _same_on_ranks(trial, pair, _ddp_steps("SGD", find_unused_parameters=True))


# ---------------------------------------------------------------------- row 10


def _sharded_steps(shard: Callable[[nn.Module], Any]) -> Callable[[Side], Any]:
    def script(side: Side) -> Any:
        shard(side.module)
        side.mark()
        made = OPTIMIZERS["SGD"](side.module.parameters())
        seen: list[Any] = []
        for _ in range(3):
            made.zero_grad()
            loss = side.loss()
            loss.backward()
            seen.append(loss.detach())
            made.step()
        whole = [
            p.full_tensor().detach() if hasattr(p, "full_tensor") else p for p in side.module.parameters()
        ]
        return seen, whole

    return script


def _named(run: Callable[[], None]) -> None:
    """Whether a refusal names what it is about."""
    try:
        run()
    except IrcError as refusal:
        if not any(name in refusal.message for name in ("fully_shard", "FSDP", "DTensor")):
            raise Difference(f"the refusal names no sharding: {refusal.code}: {refusal.message}") from refusal
        raise


def _fully_shard(module: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


def _fully_shard_parts(module: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for child in module.children():
        if isinstance(child, nn.Linear):
            fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)


def _shardable() -> tuple[nn.Module, Arguments]:
    layers = (nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    return nn.Sequential(*layers), Arguments((torch.randn(8, 4),))


def _sharded(name: str, shard: Callable[[nn.Module], Any]) -> None:
    @on_ranks(name)
    def body(trial: Trial) -> None:
        pair = trial.fit(*_shardable())
        for side in (pair.original, pair.ours):
            _own_part(side)
        _named(lambda: trial.same(pair, _sharded_steps(shard)))

    check(
        10,
        name=name,
        refusable=True,
        promise="fully_shard of a fitted module: equal, or refused by name before the first step.",
    )(body)


_sharded("fully_shard of a fitted module", _fully_shard)
_sharded("fully_shard of its layers", _fully_shard_parts)


@check(10, refusable=True)
@on_ranks("optimize of a sharded module")
def optimize_of_a_sharded_module(trial: Trial) -> None:
    """irc.optimize after fully_shard: equal, or refused by name."""
    sides: list[Side] = []
    for _ in range(2):
        torch.manual_seed(5)
        module, arguments = _shardable()
        _fully_shard(module)
        sides.append(Side(module, arguments, lambda result: result.square().mean()))
        _own_part(sides[-1])

    def run() -> None:
        sides[1].module = trial.plan.fit(sides[1].module, sides[1].arguments, {})
        trial.same(Pair(*sides), _sharded_steps(lambda module: None))

    _named(run)
