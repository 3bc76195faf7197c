"""Measures the rates at which a device computes and moves bytes in a training step."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ...ir import UsageError

__all__ = [
    "Product",
    "busy",
    "device_bytes",
    "free_host_bytes",
    "launch_seconds",
    "median_seconds",
    "memory_bandwidth",
    "present_device",
    "product_flops",
    "several",
    "total_host_bytes",
]

_PRODUCT_SECONDS = 0.02
_LARGEST_PRODUCT = 8192
_STREAM_BYTES = 64 << 20
_LAUNCHES = 1000
_LEAST_REPEATS = 3
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def present_device(device: str = "") -> torch.device:
    """Finds the device of that name; if empty a GPU if there is one, else the CPU.

    Raises:
        UsageError: IRC419 when this machine has no such device.
    """
    try:
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        found = None
    has_index = found is not None and found.type == "cuda" and (found.index or 0) < torch.cuda.device_count()
    if found is None or not (found.type == "cpu" or has_index):
        raise UsageError(
            "IRC419",
            f"this machine has no device {device!r} that can be measured",
            help="give cpu, or cuda if there is one",
        )
    return found


def product_flops(device: torch.device, seconds: float) -> float:
    """Measures the floating-point operations a second of float32 matrix products, in the median.

    Args:
        device: The device.
        seconds: The time to measure for.
    """
    product = Product(device)
    return product.flops / median_seconds(product.run, device, seconds)


def memory_bandwidth(device: torch.device, seconds: float) -> float:
    """Measures the bytes a second between the device and its memory, in the median.

    Two float32 arrays, too large for caches, are added into a third (STREAM's "Add", McCalpin 1995).

    Args:
        device: The device.
        seconds: The time to measure for.
    """
    free_bytes = device_bytes(device)[1]
    count = max(min(_STREAM_BYTES, free_bytes // 16) // 4, 1 << 16)
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    return 3 * 4 * count / median_seconds(lambda: torch.add(a, b, out=c), device, seconds)


def launch_seconds(device: torch.device, seconds: float) -> float:
    """Measures the time of an operation on one number: the cost beside the work, in the median.

    Args:
        device: The device.
        seconds: The time to measure for.
    """
    x = torch.ones(1, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            torch.add(x, x)

    return median_seconds(launch, device, seconds) / _LAUNCHES


def median_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The median time of runs on a device, after one that warms up."""
    _timed(run, device)
    return statistics.median(several(lambda: _timed(run, device), seconds))


def several(measure: Callable[[], float], seconds: float) -> list[float]:
    """Measures runs for `seconds`, and three at least unless these take more than three times as long."""
    start = time.perf_counter()
    times: list[float] = []
    while True:
        times.append(measure())
        passed = time.perf_counter() - start
        if passed >= 3 * seconds or (passed >= seconds and len(times) >= _LEAST_REPEATS):
            return times


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Measures one run by the clock on the wall; on a GPU until it is done."""
    _finish(device)
    start = time.perf_counter()
    run()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    """Waits for the work that the present thread's stream of a GPU has been given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# ---------------------------------------------------------------------- computing


class Product:
    """A product of two square float32 matrices, large enough to take some time.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = 256
        while True:
            self.matrices = [torch.full((size, size), 1e-3, device=device) for _ in range(3)]
            self.flops = 2.0 * size**3
            _timed(self.run, device)
            if _timed(self.run, device) >= _PRODUCT_SECONDS or size >= _LARGEST_PRODUCT:
                return
            size *= 2

    def run(self) -> Tensor:
        """Computes it once."""
        a, b, c = self.matrices
        return torch.mm(a, b, out=c)

    def seconds(self) -> float:
        """Measures the time of one product."""
        return _timed(self.run, self.device)


@contextmanager
def busy(product: Product) -> Generator[list[float]]:
    """Lets a thread of its own compute a product over and over; its times are in the list, one at least."""
    seconds: list[float] = []
    errors: list[Exception] = []
    running, stop = threading.Event(), threading.Event()

    def compute() -> None:
        try:
            product.seconds()  # a GPU's libraries are made ready for the thread
            running.set()
            while not (seconds and stop.is_set()):
                seconds.append(product.seconds())
        except Exception as error:  # raised again when the copies are measured
            errors.append(error)
            running.set()

    thread = threading.Thread(target=compute, name="irc-busy", daemon=True)
    thread.start()
    running.wait()
    try:
        yield seconds
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


# ---------------------------------------------------------------------- capacities


def device_bytes(device: torch.device) -> tuple[int, int]:
    """The memory of a device in bytes: all of it, and what is free now. A CPU's is the host's."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return total_bytes, free_bytes
    return total_host_bytes(), free_host_bytes()


def total_host_bytes() -> int:
    """The memory of the host, or of the container that the process is in."""
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit_bytes = _container_bytes("memory.max")
    return physical_bytes if limit_bytes is None else min(physical_bytes, limit_bytes)


def free_host_bytes() -> int:
    """The memory that new tensors can have without swapping, page cache that can go included."""
    free_bytes = _available_bytes()
    limit_bytes, used_bytes = _container_bytes("memory.max"), _container_bytes("memory.current")
    if limit_bytes is not None and used_bytes is not None:
        free_bytes = min(free_bytes, max(limit_bytes - used_bytes, 0))
    return free_bytes


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        # not Linux: half of the memory, as nothing says how much of it is in use
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _container_bytes(name: str) -> int | None:
    """A figure of the control group (version 2) that the process is in; None if there is none."""
    try:
        text = (_CONTROL_GROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
