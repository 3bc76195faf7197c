"""Measures operations on the device that they will run on: time, and workspace from allocator events."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...ir import (
    FUSED,
    Gradients,
    Graph,
    IrcError,
    Kernel,
    Node,
    Region,
    Symbol,
    TensorType,
    Trait,
    UnsupportedError,
    UsageError,
    Value,
    allocation_bytes,
    overwritten,
)
from ...ir.files import read_json
from ...torch_support.arguments import to_torch
from ...torch_support.kernels import kernel
from ...torch_support.operations import function_of
from .allocations import allocation_events, cuda_events, run_beside_sessions
from .machines import machine_named
from .no_workspace import takes_none
from .table import Costs, StepCost, analytic_costs, shared_operands, signature

__all__ = [
    "Level",
    "Measured",
    "ProfileStore",
    "allocation_levels",
    "device_name",
    "first_runs",
    "made_up",
    "made_up_operands",
    "one_thread",
    "profile_costs",
    "run_seconds",
    "runner",
]


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured operation.

    Args:
        seconds: The best time of its runs; None if none of them was timed.
        workspace_bytes: The allocator's bytes at the operation's own peak, beyond its results; below zero if
            a kernel's results take the memory of operands.
        runs: The number of runs that were timed.
    """

    seconds: float | None
    workspace_bytes: int
    runs: int = 2

    def is_timed(self, runs: int) -> bool:
        """Whether the time counts for an operation that runs so often in a step.

        A first run takes longer, by what it fills caches with: it counts for an operation that runs once, if
        it is long.
        """
        return self.seconds is not None and (self.runs > 1 or (runs == 1 and self.seconds >= _LONG_SECONDS))


def profile_costs(
    *graphs: Graph,
    store: ProfileStore | None = None,
    measured: Mapping[str, Measured] | None = None,
    repeats: int = 5,
    most_bytes: int | None = None,
    with_times: bool = True,
) -> Costs:
    """Measures costs on the devices that the graphs' tensors live on.

    Each distinct operation (name, constants, operand types) runs on made-up tensors: to count its
    allocations, on a GPU after a run to warm up, unless it is known to take none (see `takes_none`); then
    again for the time until the two best agree, of which the best counts. On one thread the run that counts
    allocations is the first of these, and the only one of a long operation that runs once in every step: of
    backward, or one that must not run again. The generator's state is as before. The cost of an optimizer's
    step stands at its node (see `StepCost`).

    Args:
        *graphs: The graphs whose operations are measured, all on the same devices.
        store: The store of earlier measurements; None measures everything anew.
        measured: Measurements of runs that a rewrite has made, by `signature`; they are stored too.
        repeats: The most timed runs of an operation that may run again; long and steady ones get fewer.
        most_bytes: An operation with more bytes of operands and results, or for which the device has no room,
            is not measured: unless it was before, its costs are modelled. None lets all run.
        with_times: Whether to measure times too; without, times are modelled unless all are known.

    Raises:
        IrcError: IRC411 when an operation does not run by itself.
        UsageError: IRC457 when cuDNN is to choose the algorithms of convolutions by timing them.
    """
    for graph in graphs:
        _refuse_chosen_by_time(graph)
    store = ProfileStore(None) if store is None else store
    operations = [node for graph in graphs for node in graph.operations]
    steps: dict[Node, StepCost | Measured] = {
        n: StepCost.of(n) for n in operations if n.releases is Gradients.APPLIED
    }
    steps |= {n: Measured(0.0, 0) for n in operations if Trait.EXCHANGE in n.traits}
    keys = {node: signature(node) for node in operations if node not in steps}
    touched_bytes = {
        keys[node]: (node, _touched_bytes(graph, node))
        for graph in reversed(graphs)
        for node in reversed(graph.operations)
        if node not in steps
    }
    again = {key for node, key in keys.items() if _may_run_again(node)}
    runs = {key: 2 if key in again else 1 for key in touched_bytes}
    device = _device_of(graphs)
    known = store.load(device)
    new = {key: found for key, found in (measured or {}).items() if key not in known}
    none = {key: Measured(None, 0, 0) for key, (node, _) in touched_bytes.items() if takes_none(node)}
    known = none | known | new
    missing = {
        key: node
        for key, (node, nbytes) in touched_bytes.items()
        if (most_bytes is None or nbytes <= most_bytes)
        and (key not in known or (with_times and not known[key].is_timed(runs[key])))
    }
    try:
        fresh = _measure(missing, known, runs, repeats, with_times)
    except torch.OutOfMemoryError:
        if most_bytes is None:
            raise
        fresh = {}
    if new or fresh:
        store.save(device, {**new, **fresh})
    table = {**known, **fresh}
    has_times = with_times or all(key in table and table[key].is_timed(runs[key]) for key in touched_bytes)
    found = steps | {node: table.get(key) for node, key in keys.items()}
    return _costs_of(graphs, found, device, has_times=has_times)


def _may_run_again(node: Node) -> bool:
    """Whether a step may run an operation more than once: one of forward that gives the same numbers."""
    return node.region is Region.FORWARD and node.is_recomputable


def _costs_of(
    graphs: Iterable[Graph],
    found: Mapping[Node, StepCost | Measured | None],
    device: str,
    *,
    has_times: bool,
) -> Costs:
    """Makes the table of what was found; what was not is modelled, and all times if some are not known."""
    seconds: dict[Node, float] = {}
    workspace_bytes: dict[Node, int] = {}
    if not has_times or None in found.values():
        modelled = Costs.united([analytic_costs(graph, machine_named("cpu")) for graph in graphs])
        seconds, workspace_bytes = dict(modelled.seconds), dict(modelled.workspace_bytes)
    for node, cost in found.items():
        if cost is not None:
            workspace_bytes[node] = _in_step(node, cost.workspace_bytes)
            if has_times and cost.seconds is not None:
                seconds[node] = cost.seconds
    return Costs(seconds, workspace_bytes, f"profile:{device}", has_times)


def _in_step(node: Node, workspace_bytes: int) -> int:
    """The workspace of an operation in a step, given that of its kernel.

    Each run of a draw that may run again ends with a copy of the generator's state: it takes its bytes when
    the kernel has given back its own, beside the results. What writes into an operand takes its memory.
    """
    state, written = node.generator_state, node.written_operand
    workspace_bytes = workspace_bytes if state is None else max(workspace_bytes, state.storage.nbytes)
    return workspace_bytes if written is None else workspace_bytes - written.storage.nbytes


def _touched_bytes(graph: Graph, node: Node) -> int:
    """The bytes that an operation reads and allocates."""
    return sum(storage.nbytes for storage in {*graph.reads(node), *graph.allocates(node)})


class ProfileStore:
    """Measurements on disk: one JSON file for each device, torch version and number of threads.

    Args:
        folder: The folder of the files; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @staticmethod
    def default() -> ProfileStore:
        """The user's store: `$IRC_CACHE_DIR`, or `irc` in the user's cache folder."""
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return ProfileStore(Path(os.environ.get("IRC_CACHE_DIR") or Path(cache) / "irc"))

    def load(self, device: str) -> dict[str, Measured]:
        """The measurements for `device`; a file that cannot be read counts as empty."""
        path = self._path(device)
        if path is None or not path.is_file():
            return {}
        try:
            rows = read_json(path.read_bytes())["operations"]
            return {
                key: Measured(None if seconds is None else float(seconds), int(workspace), *map(int, runs))
                for key, (seconds, workspace, *runs) in rows.items()
                if seconds is None or 0 <= seconds < _MOST_SECONDS
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return {}

    def save(self, device: str, measured: dict[str, Measured]) -> None:
        """Adds measurements; the file is replaced as a whole, so that a reader never sees half of it."""
        path = self._path(device)
        if path is None:
            return
        rows = {**self.load(device), **measured}
        content = {
            "device": device,
            "operations": {k: [m.seconds, m.workspace_bytes, m.runs] for k, m in rows.items()},
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, suffix=".tmp") as file:
                json.dump(content, file, indent=0, sort_keys=True)
            os.replace(file.name, path)
        except OSError:
            return  # a cache that cannot be written costs time, not the run

    def _path(self, device: str) -> Path | None:
        if self.folder is None:
            return None
        plain = "".join(c if c.isalnum() or c in ".-" else "-" for c in device)
        return self.folder / f"profile-{plain}.json"


def _device_of(graphs: Iterable[Graph]) -> str:
    devices = sorted({storage.device for graph in graphs for storage in graph.storages})
    on_cuda = any(device.startswith("cuda") for device in devices)
    names = [*map(device_name, devices), *(_cuda_settings() if on_cuda else ())]
    return f"torch-{torch.__version__}-{'-'.join(names)}"


def _cuda_settings() -> list[str]:
    """Lists versions and settings, if on, that decide which kernels a GPU runs, with their workspaces."""
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    settings = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn-deterministic": cudnn.deterministic,
        "no-cudnn": not cudnn.enabled,
        "cudnn-tf32": cudnn.allow_tf32,
        "tf32": cuda.matmul.allow_tf32,
        "fp16-reduced": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "bf16-reduced": cuda.matmul.allow_bf16_reduced_precision_reduction,
        f"cublas{os.environ.get('CUBLAS_WORKSPACE_CONFIG', '')}": True,
    }
    versions = [f"cuda-{torch.version.cuda}", f"cudnn-{cudnn.version()}"]
    return versions + [name for name, is_on in settings.items() if is_on]


def _refuse_chosen_by_time(graph: Graph) -> None:
    """Refuses convolutions on a GPU whose algorithms cuDNN chooses by timing them in each thread.

    Backward runs in a thread of its own, where it may choose others, with other workspaces, and takes memory
    to try them.
    """
    if not (torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark):
        return
    for node in graph.operations:
        if "convolution" in node.op and _device_of_node(node).startswith("cuda"):
            raise UsageError(
                "IRC457",
                f"torch.backends.cudnn.benchmark is on: the workspace of {node.op} is not known beforehand",
                at=node.at,
                help="set torch.backends.cudnn.benchmark = False before irc.optimize, and leave it so",
            )


def device_name(device: str) -> str:
    """The name of a device: a GPU's, or the processor and the number of threads."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{_processor()}-{torch.get_num_threads()}-threads"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# ---------------------------------------------------------------------- operations


def _measure(
    missing: Mapping[str, Node],
    known: Mapping[str, Measured],
    runs: Mapping[str, int],
    repeats: int,
    with_times: bool,
) -> dict[str, Measured]:
    """Measures what is not known of operations: one pass for allocations, and one for times.

    Args:
        missing: The operations.
        known: What was measured before.
        runs: How often a step runs each operation, 2 if it may run again.
        repeats: The most timed runs.
        with_times: Whether to measure times.
    """
    if not missing:
        return {}
    drawn_on = sorted({d for d in map(_device_of_node, missing.values()) if d.startswith("cuda")})
    with torch.no_grad(), torch.random.fork_rng(devices=drawn_on):
        found = {key: known[key] for key in missing if key in known}
        unknown = {key: node for key, node in missing.items() if key not in known}
        if unknown:
            found |= zip(unknown, first_runs(list(unknown.values())), strict=True)
        if with_times:
            with one_thread():
                for key, node in missing.items():
                    found[key] = _timed(node, found[key], runs[key], repeats)
    return found


def _timed(node: Node, known: Measured, runs: int, repeats: int) -> Measured:
    """Adds the time of an operation, which a step runs so often, to what is known of it."""
    if known.is_timed(runs):
        return known
    with _explained(node):
        run, device = runner(node), _device_of_node(node)
        times = [] if known.seconds is None else [known.seconds]
        if device.startswith("cuda"):
            run()  # kernels are chosen and caches filled on the first run
        while not _is_timed(times, runs, repeats):
            times.append(run_seconds(run, device))
    return Measured(min(times), known.workspace_bytes, len(times))


@contextlib.contextmanager
def _explained(node: Node) -> Generator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise IrcError(
            "IRC411",
            f"{node.op} cannot be measured by itself: {str(error).splitlines()[0]}",
            at=node.at,
            help='plan with analytic costs (costs="analytic", --costs analytic): bounds of workspaces that '
            "nothing measures, so that the peak is no promise",
        ) from error


def runner(node: Node, given: Sequence[Tensor] | None = None) -> Callable[[], Any]:
    """Returns an operation, ready to run on tensors for its operands: on made-up ones if none are given."""
    # the parameter, of the same type, stands for the `.grad` that its gradient is added to
    op = "aten.add_.Tensor" if node.releases is Gradients.ACCUMULATED else node.op
    operands = given or made_up_operands(node)
    if op == FUSED:
        compiled = kernel(Kernel.of(node).text)
        return lambda: compiled([*operands])
    operation = function_of(op)
    tensors = dict(zip(node.operands, operands, strict=True))

    def given_for(argument: Value | Symbol) -> Any:
        is_tensor = isinstance(argument, Value)
        return tensors[argument] if is_tensor else torch.Generator(argument.name.partition("@")[2])

    arguments = [to_torch(argument, given_for) for argument in node.arguments]
    keywords = {key: to_torch(argument, given_for) for key, argument in node.own_keywords}
    return lambda: operation(*arguments, **keywords)


def made_up_operands(node: Node) -> list[Tensor]:
    """Makes tensors for the operands of an operation; those that share a storage share one here.

    They lie behind one another if the storage has room for that. Else they overlap, and begin together. Whole
    numbers are zero, but for operations that refuse it.
    """
    tensors: dict[Value, Tensor] = {}
    for values in shared_operands(node):
        types, storage = [value.type for value in values], values[0].storage
        reaches = [_reach(type) for type in types]
        is_apart = sum(reaches) * types[0].dtype.itemsize <= storage.nbytes
        starts = [0, *accumulate(reaches)] if is_apart else [0] * len(types)
        flat = _flat(sum(reaches) if is_apart else max(reaches), types[0])
        for value, type, start in zip(values, types, starts, strict=False):
            tensors[value] = flat.as_strided(type.shape, type.strides, start)
    tensors |= {v: made_up(v.type) for v in node.operands if v not in tensors}
    _make_acceptable(node, tensors)
    return [tensors[value] for value in node.operands]


def _make_acceptable(node: Node, tensors: Mapping[Value, Tensor]) -> None:
    """Sets numbers of an operation that accepts no made-up ones, or takes least with them."""
    name = node.op.split(".")[1]
    place = _ONES.get(name.removesuffix("_"))
    operand = None if place is None else node.arguments[place]
    if isinstance(operand, Value):
        tensors[operand].fill_(1)
    lengths = dict(node.keywords).get("lengths")
    if name == "segment_reduce" and isinstance(lengths, Value):  # they add up to what is reduced
        reduced = node.operands[0].type.shape[len(lengths.type.shape) - 1]
        tensors[lengths][..., :1].fill_(reduced)
    if name == "cholesky":  # of a positive matrix alone
        tensors[node.operands[0]].zero_().diagonal(dim1=-2, dim2=-1).fill_(1)


_ONES = {
    "_embedding_bag_backward": 4,  # sizes of bags: takes most where none is empty
    **dict.fromkeys(("linalg_lu_solve", "linalg_ldl_solve", "lu_unpack"), 1),  # pivots count from one
    **dict.fromkeys(("div", "floor_divide", "remainder", "fmod"), 1),  # divisors
}
"""The argument that is made of ones, by the operation's name."""


def made_up(type: TensorType) -> Tensor:
    """Makes a tensor of `type`: floats between 0.1 and 1, all else zero (so that indices are in range)."""
    return _flat(_reach(type), type).as_strided(type.shape, type.strides)


def _reach(type: TensorType) -> int:
    """The elements from the first to the last of a tensor, with those between that are not its own."""
    steps = zip(type.shape, type.strides, strict=True)
    return 1 + sum((size - 1) * step for size, step in steps) if type.numel else 0


def _flat(count: int, type: TensorType) -> Tensor:
    dtype: torch.dtype = getattr(torch, type.dtype.value)
    is_drawn = dtype.is_floating_point and dtype.itemsize > 1
    make = torch.empty if is_drawn else torch.zeros
    flat = make(count, dtype=dtype, device=type.device)
    if is_drawn:
        drawn = flat[:_DRAWN].uniform_(0.1, 1.0, generator=torch.Generator(type.device).manual_seed(0))
        for part in flat[_DRAWN:].split(_DRAWN):
            part.copy_(drawn[: part.numel()])
    return flat


_DRAWN = 1 << 16
"""The elements of a made-up tensor that are drawn; the others repeat them, which takes less time."""


_MOST_SECONDS = 1e6
"""The longest time that a file of measurements may name: no operation takes days."""

_LONG_SECONDS = 0.02
"""A run of this time for each of the repeats is enough: operations that take longer run less often."""

_SHORT_SECONDS = 1e-3
"""With less time for each of the repeats, times vary too much for two that agree to mean anything."""

_STEADY = 0.05
"""The best two times agree if they differ by at most this fraction."""


def _is_timed(found: Sequence[float], runs: int, repeats: int) -> bool:
    """Whether these times are enough for an operation that a step runs so often."""
    if len(found) < 2 or runs == 1:
        return bool(found) and Measured(min(found), 0, len(found)).is_timed(runs)
    return len(found) >= repeats or _is_enough(found, repeats)


def _is_enough(found: Sequence[float], repeats: int) -> bool:
    best, second = sorted(found)[:2]
    is_steady = second <= best * (1 + _STEADY) and sum(found) >= repeats * _SHORT_SECONDS
    return is_steady or sum(found) >= repeats * _LONG_SECONDS


def _check_sizes(node: Node, results: Any) -> None:
    """Refuses an operation whose results are larger than traced: its memory cannot be promised."""
    made = results if isinstance(results, (tuple, list)) else (results,)
    operands = {value.storage for value in node.operands}
    for value, tensor in zip(node.results, made, strict=False):
        if value is None or not isinstance(tensor, Tensor) or value.storage in operands:
            continue
        nbytes = allocation_bytes(tensor.untyped_storage().nbytes(), value.storage.device)
        if nbytes > value.storage.nbytes:
            raise UnsupportedError(
                "IRC412",
                f"{node.op} returns {nbytes} bytes, but {value.storage.nbytes} bytes were traced",
                at=node.at,
                help="if it is an observer that has seen nothing, call the module once before irc.optimize; "
                "else its memory cannot be promised: use another operation here",
            )


def run_seconds(run: Callable[[], Any], device: str) -> float:
    """Measures one run: of the processor (let one thread compute), or between two events of a GPU."""
    if device.startswith("cuda"):
        return _cuda_seconds(run, device)
    start = time.process_time()
    result = run()
    seconds = time.process_time() - start
    del result
    return seconds


@contextlib.contextmanager
def one_thread() -> Generator[None]:
    """Times on several threads wait for one another if the machine is busy; on one they are steady."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _cuda_seconds(run: Callable[[], Any], device: str) -> float:
    stream = torch.cuda.current_stream(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    result = run()
    end.record(stream)
    end.synchronize()
    del result
    return start.elapsed_time(end) / 1000


def first_runs(nodes: Sequence[Node], look: Callable[[Node, Any], None] | None = None) -> list[Measured]:
    """Measures one run of each operation: the allocator's peak less the bytes of its results, and the time.

    On a processor that is the first run, unless it leaves bytes behind: what fills a cache runs again. It is
    timed if operations compute on this one thread. On a GPU, a run before fills the caches of libraries.

    Args:
        nodes: The operations.
        look: Called with each operation and its results.
    """
    levels: dict[Node, Level] = {}
    seconds: dict[Node, float] = {}
    for device in sorted(set(map(_device_of_node, nodes))):
        mine = [node for node in nodes if _device_of_node(node) == device]
        if not device.startswith("cuda"):
            levels |= _levels_of(mine, _timing_runs(mine, seconds, look), device)
            mine = [node for node in mine if _leaves_more(node, levels[node])]
        levels |= _levels_of(mine, map(_warm_runner, mine), device)
    workspaces = {node: _workspace_bytes(node, levels[node]) for node in nodes}
    return [Measured(seconds.get(node), workspaces[node], int(node in seconds)) for node in nodes]


def _levels_of(nodes: Sequence[Node], runs: Iterable[Callable[[], Any]], device: str) -> dict[Node, Level]:
    return dict(zip(nodes, allocation_levels(runs, device) if nodes else (), strict=True))


def _device_of_node(node: Node) -> str:
    """The device that an operation runs on: a GPU if one of its tensors is there."""
    return max((value.type.device for value in (*node.operands, *node.values)), default="cpu")


def _timing_runs(
    nodes: Iterable[Node], seconds: dict[Node, float], look: Callable[[Node, Any], None] | None
) -> Iterator[Callable[[], Any]]:
    """Makes the first runs of operations on a processor, which take their times, and shows their results."""
    for node in nodes:
        with _explained(node):
            run = runner(node)
        held: list[Any] = []

        def run_first(node: Node = node, run: Callable[[], Any] = run, held: list[Any] = held) -> Any:
            with _explained(node):
                start = time.process_time()
                results = run()
                if torch.get_num_threads() == 1:
                    seconds[node] = time.process_time() - start
                _check_sizes(node, results)
            if look is not None:
                held.append(results)
            return results

        yield run_first
        del run, run_first
        if look is not None:  # after the run's window: what is freed here is not its own
            look(node, held.pop())


def _warm_runner(node: Node) -> Callable[[], Any]:
    with _explained(node):
        run = runner(node)
        _check_sizes(node, run())  # kernels are chosen on the first run with this number of threads
    return run


def _workspace_bytes(node: Node, level: Level) -> int:
    """The workspace of a kernel: one that writes into an operand makes nothing beside it."""
    if node.written_operand is not None:
        return level.peak_bytes
    return max(level.peak_bytes - _result_bytes(node), -_overwritten_bytes(node))


def _leaves_more(node: Node, level: Level) -> bool:
    """Whether an operation leaves other bytes behind than its results."""
    return level.left_bytes != _result_bytes(node) - _overwritten_bytes(node)


def _overwritten_bytes(node: Node) -> int:
    return sum(value.storage.nbytes for value in overwritten(node))


def _result_bytes(node: Node) -> int:
    allocated = {value.storage for value in node.values} - {value.storage for value in node.operands}
    return sum(storage.nbytes for storage in allocated)


@dataclass(frozen=True, slots=True)
class Level:
    """The memory that the allocator hands out in one run, above its level before.

    Args:
        peak_bytes: The most at once while it runs.
        left_bytes: The bytes that are still held when it ends, its result included.
    """

    peak_bytes: int
    left_bytes: int


def allocation_levels(runs: Iterable[Callable[[], Any]], device: str) -> list[Level]:
    """The levels of a device's allocator in each run; the work to come to the next run is not counted."""
    if not device.startswith("cuda"):
        return _cpu_levels(runs)
    gc.collect()
    return [_cuda_level(run, torch.device(device)) for run in runs]


def _cuda_level(run: Callable[[], Any], device: torch.device) -> Level:
    results: list[Any] = []
    return _level(cuda_events(lambda: results.append(run()), device))


def _level(events: Iterable[int]) -> Level:
    reached = list(accumulate(events, initial=0))
    return Level(max(reached), reached[-1])


_MARK_BYTES = 1_000_003


def _mark() -> None:
    """An allocation of a size that no tensor has: it marks the beginning and the end of a run."""
    torch.empty(_MARK_BYTES, dtype=torch.uint8)


def _cpu_levels(runs: Iterable[Callable[[], Any]]) -> list[Level]:
    count = 0

    def run_all() -> None:
        nonlocal count
        for run in runs:
            _mark()
            result = run()
            _mark()
            del run, result
            count += 1

    events = run_beside_sessions(lambda: allocation_events(run_all))
    marks = [index for index, nbytes in enumerate(events) if nbytes == _MARK_BYTES]
    assert len(marks) == 2 * count, "every run has a mark before and after it"
    windows = (events[marks[2 * k] + 2 : marks[2 * k + 1]] for k in range(count))
    return list(map(_level, windows))
