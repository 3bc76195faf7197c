"""What each rank of a process group runs: fitted modules beside originals, under DDP and FSDP."""

from __future__ import annotations

import copy
import datetime
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import irc
from irc.passes.costs.allocations import allocation_events, peak_bytes
from support.torch_cases import fitted, recompute_some

__all__ = ["CHECKS", "Net", "run"]

RANKS = 2


class Net(nn.Module):
    """Convolution, normalization with running statistics, dropout, and maybe a layer that nothing uses."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 4)
        self.unused = nn.Linear(3, 3) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).relu()
        return self.head(self.drop(h.mean((2, 3))))


def planned(module: nn.Module, x: Tensor) -> Any:
    return fitted(module, x, schedule=lambda graph: recompute_some(graph, 3))


def batches(rank: int) -> list[Tensor]:
    """Others on each rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(4, 3, 6, 6, generator=generator) for _ in range(3)]


Left = list[Tensor | None]


def _whole(tensor: Tensor) -> Tensor:
    """A copy, with all shards."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[attr-defined]
    return whole.detach().clone()


def replanned(module: nn.Module, x: Tensor) -> Any:
    """A fitted module that plans other calls."""
    return irc.optimize(module, x, "1GiB", costs="analytic", strategy="eviction")


def train(
    model: Any,
    factory: Callable[..., Any],
    quiet: Callable[[Any], Any] | None = None,
    sizes: tuple[int, ...] = (4, 4, 4),
) -> Left:
    """Three steps; all gradients and buffers after each, and the parameters at the end.

    Args:
        model: What trains.
        factory: Makes its optimizer.
        quiet: A backward in which gradients are accumulated without being exchanged comes first, in this
            context.
        sizes: Of the batches; those of the quiet backwards are whole.
    """
    optimizer = factory(model.parameters(), lr=0.05)
    left: Left = []
    for k, (x, size) in enumerate(zip(batches(dist.get_rank()), sizes, strict=True)):
        torch.manual_seed(k)
        if quiet is not None:
            with quiet(model):
                model(x * 0.5).square().mean().backward()
        model(x[:size]).square().mean().backward()
        left += [None if p.grad is None else _whole(p.grad) for p in model.parameters()]
        left += [buffer.clone() for buffer in model.buffers()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=k == 0)
    return left + [_whole(p) for p in model.parameters()]


def difference(mine: Left, its: Left) -> str:
    """Nothing where both are the same bit for bit."""
    assert len(mine) == len(its)
    for k, (a, b) in enumerate(zip(mine, its, strict=True)):
        if (a is None) != (b is None) or (a is not None and b is not None and not torch.equal(a, b)):
            return f"{k} of {len(its)} differs: {a} is not {b}"
    return ""


# ---------------------------------------------------------------------- DistributedDataParallel


def under_ddp(
    *,
    unused: bool = False,
    accumulates: bool = False,
    factory: Any = torch.optim.SGD,
    fit: Callable[[nn.Module, Tensor], Any] = planned,
    sizes: tuple[int, ...] = (4, 4, 4),
    **options: Any,
) -> str:
    """The original and a fitted module from the same weights, each under DDP."""
    torch.manual_seed(dist.get_rank())  # DDP sends those of rank 0
    original = Net(unused=unused)
    ours = fit(copy.deepcopy(original), batches(0)[0])
    quiet = DistributedDataParallel.no_sync if accumulates else None
    its, mine = (
        train(DistributedDataParallel(m, **options), factory, quiet, sizes) for m in (original, ours)
    )
    assert not unused or any(gradient is None for gradient in its)
    return difference(mine, its)


def unused_parameter() -> str:
    """DDP finds out about a parameter that gets no gradient, as with the original."""
    errors: list[str] = []
    for is_planned in (False, True):
        model: nn.Module = Net(unused=True)
        if is_planned:
            model = planned(model, batches(0)[0])
        try:
            train(DistributedDataParallel(model), torch.optim.SGD)
        except RuntimeError as error:
            errors.append(str(error).partition(".")[0])
    return "" if len(errors) == 2 and errors[0] == errors[1] else str(errors)


def received(module: Any) -> str:
    """A fitted module that came from the process that started this one, with whom it shares its memory."""
    assert repr(module).startswith("FittedNet(") and module.plan is not None
    assert all(parameter.is_shared() for parameter in module.parameters())
    ours, twin = copy.deepcopy(module), Net()
    twin.load_state_dict(ours.state_dict())
    its, mine = (train(DistributedDataParallel(m), torch.optim.AdamW) for m in (twin, ours))
    return difference(mine, its)


def buckets() -> str:
    """The buckets take the bytes of the gradients once more, beside what the plan predicts."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.randn(64, 64)
    ours = planned(model, x)
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def step(trained: nn.Module) -> None:
        trained(x).square().mean().backward()

    def peak_of(trained: nn.Module) -> int:
        trained.zero_grad()
        return peak_bytes(lambda: step(trained))

    step(ours)
    alone = peak_of(ours)
    found: list[str] = []
    for views in (False, True):
        taken = _taken_bytes(ours, views=views)
        wrapped = DistributedDataParallel(ours, gradient_as_bucket_view=views)
        step(wrapped)
        peak = min(peak_of(wrapped) for _ in range(8))
        if not 0 <= taken - gradient_bytes <= 64 or not alone <= peak <= alone + 64:
            found.append(f"buckets {taken} B, gradients {gradient_bytes} B, peak {peak} B, alone {alone} B")
        ours.zero_grad()
    return "; ".join(found)


def _taken_bytes(model: nn.Module, *, views: bool) -> int:
    """What wrapping takes; the least of several, as what it sends may be freed late, by another thread."""
    wrapped: list[nn.Module] = []
    counts: list[int] = []
    for twin in [copy.deepcopy(model) for _ in range(8)]:

        def wrap(twin: nn.Module = twin) -> None:
            wrapped.append(DistributedDataParallel(twin, gradient_as_bucket_view=views))

        counts.append(sum(allocation_events(wrap)))
    return min(counts)


# ---------------------------------------------------------------------- fully_shard


Shard = Callable[[nn.Module, DeviceMesh], None]


def _whole_module(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def _freed_between(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _parts(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model.conv, mesh=mesh)
    fully_shard(model.head, mesh=mesh)


def _parts_and_whole(model: Any, mesh: DeviceMesh) -> None:
    _parts(model, mesh)
    fully_shard(model, mesh=mesh)


def _parts_that_stay(model: Any, mesh: DeviceMesh) -> None:
    """After a forward without gradients the parameters of the parts are ordinary ones."""
    for part in (model.conv, model.norm, model.head, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    model.eval()
    with torch.no_grad():
        model(batches(0)[0])
    model.train()


def _cast(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def _columns(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"head": RowwiseParallel()})


def _no_exchange(model: Any) -> Any:
    """FSDP's `no_sync`."""

    class Quiet:
        def __enter__(self) -> None:
            model.set_requires_gradient_sync(False)

        def __exit__(self, *_: object) -> None:
            model.set_requires_gradient_sync(True)

    return Quiet()


def sharded(
    shard: Shard,
    *,
    accumulates: bool = False,
    fit: Callable[[nn.Module, Tensor], Any] = planned,
    sizes: tuple[int, ...] = (4, 4, 4),
) -> str:
    """The original and a fitted module from the same weights, both sharded in the same way."""
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    original = Net()
    ours = fit(copy.deepcopy(original), batches(0)[0])
    for model in (original, ours):
        shard(model, mesh)
    quiet = _no_exchange if accumulates else None
    its, mine = (train(model, torch.optim.AdamW, quiet, sizes) for model in (original, ours))
    return difference(mine, its)


def _accumulating(module: nn.Module, x: Tensor) -> Any:
    return irc.optimize(module, x, "100%", costs="analytic", time_limit=1, accumulate_gradients=True)


def fsdp1() -> str:
    """The older FSDP, around the whole module."""
    torch.manual_seed(0)
    original = Net()
    ours = planned(copy.deepcopy(original), batches(0)[0])
    its, mine = (
        train(
            FullyShardedDataParallel(m, use_orig_params=True, device_id=torch.device("cpu")),
            torch.optim.AdamW,
        )
        for m in (original, ours)
    )
    return difference(mine, its)


# ---------------------------------------------------------------------- what is refused


def refused(code: str, act: Callable[[], object]) -> str:
    """Nothing where `act` is refused with this code, by name, before any parameter has a gradient."""
    try:
        act()
    except irc.IrcError as error:
        return "" if error.code == code and error.help else str(error)
    return "it was not refused"


def refused_step(code: str, shard: Shard) -> str:
    ours = planned(Net(), batches(0)[0])
    shard(ours, init_device_mesh("cpu", (RANKS,)))
    found = refused(code, lambda: ours(batches(0)[0]))
    return found or ("" if all(p.grad is None for p in ours.parameters()) else "there are gradients")


def refused_plan(code: str, shard: Shard) -> str:
    model = Net()
    shard(model, init_device_mesh("cpu", (RANKS,)))
    return refused(code, lambda: irc.optimize(model, batches(0)[0], "100%", costs="analytic"))


def refused_wrapper() -> str:
    wrapped = DistributedDataParallel(Net())
    within = nn.Sequential(DistributedDataParallel(Net()))
    old = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    x = batches(0)[0]
    found = (refused("IRC534", lambda m=m: irc.optimize(m, x, "100%")) for m in (wrapped, within, old))
    return "".join(found)


def refused_release(**options: Any) -> str:
    """Gradients that never reach DDP."""
    ours = irc.optimize(Net(), batches(0)[0], "100%", costs="analytic", time_limit=1, **options)
    wrapped = DistributedDataParallel(ours)
    return refused("IRC509", lambda: wrapped(batches(0)[0]))


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


CHECKS: dict[str, Callable[[], str]] = {
    "DDP": under_ddp,
    "DDP, no_sync": lambda: under_ddp(accumulates=True, factory=torch.optim.AdamW),
    "DDP, no_sync, other batch sizes": lambda: under_ddp(
        accumulates=True, fit=replanned, sizes=(4, 2, 3), factory=torch.optim.AdamW
    ),
    "DDP, bucket views": lambda: under_ddp(accumulates=True, gradient_as_bucket_view=True),
    "DDP, unused parameters": lambda: under_ddp(unused=True, accumulates=True, find_unused_parameters=True),
    "DDP, static graph": lambda: under_ddp(unused=True, static_graph=True, factory=torch.optim.AdamW),
    "DDP, many buckets": lambda: under_ddp(bucket_cap_mb=0.0001),
    "DDP, an unused parameter that it is not told of": unused_parameter,
    "DDP, memory of the buckets": buckets,
    "DDP, gradients accumulated within backward": lambda: refused_release(accumulate_gradients=True),
    "DDP, gradients applied within backward": lambda: refused_release(optimizer_in_backward=_sgd),
    "a wrapper is not planned": refused_wrapper,
    "fully_shard": lambda: sharded(_whole_module),
    "fully_shard, freed between": lambda: sharded(_freed_between),
    "fully_shard, accumulation": lambda: sharded(_whole_module, accumulates=True),
    "fully_shard, other batch sizes": lambda: sharded(
        _whole_module, accumulates=True, fit=replanned, sizes=(4, 2, 3)
    ),
    "fully_shard, gradients accumulated within backward": lambda: sharded(
        _whole_module, accumulates=True, fit=_accumulating
    ),
    "FullyShardedDataParallel": fsdp1,
    "fully_shard of parts": lambda: refused_step("IRC534", _parts),
    "fully_shard of parts and the whole": lambda: refused_step("IRC534", _parts_and_whole),
    "fully_shard of parts that stay": lambda: refused_step("IRC534", _parts_that_stay),
    "fully_shard with another type": lambda: refused_step("IRC501", _cast),
    "tensor parallel": lambda: refused_step("IRC505", _columns),
    "fully_shard before planning": lambda: refused_plan("IRC534", _whole_module),
    "fully_shard of parts before planning": lambda: refused_plan("IRC531", _parts),
    "tensor parallel before planning": lambda: refused_plan("IRC531", _columns),
}
"""Each says what is wrong, or nothing."""


def run(rank: int, folder: str, names: Iterable[str], module: Any) -> None:
    """Runs the checks on one rank; rank 0 writes what each found.

    Args:
        rank: Which of `RANKS` this is.
        folder: Where the ranks find each other, and where the results go.
        names: Which of `CHECKS`.
        module: A fitted module from the process that starts the ranks.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    limit = datetime.timedelta(seconds=120)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=limit)
    try:
        results = {"a module that was sent": received(module)}
        for name in names:
            results[name] = CHECKS[name]()
            dist.barrier()
    finally:
        dist.destroy_process_group()
    torch.save(results, Path(folder) / f"results-{rank}")
