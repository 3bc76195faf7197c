"""Files of published graphs: dnn-partitioning's, PipeDream's profiles and Piper's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from irc.ir import UsageError
from irc.passes.pipeline.coarsened_problem import DeviceClass

from .partition_problem import PartitionNode, PartitionProblem

__all__ = ["Layer", "Profile", "Solution", "read_graph", "read_piper", "read_profile", "read_solution"]

_Made = TypeVar("_Made")

_MS = 1e-3


@dataclass(frozen=True, slots=True)
class Solution:
    """A stored partition.

    Args:
        assignment: The device of each node, a position in `PartitionProblem.devices`.
        max_load_seconds: As it is stated beside it.
    """

    assignment: tuple[int, ...]
    max_load_seconds: float


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a profile.

    Args:
        name: With its number.
        seconds: Forward and backward.
        activation_bytes: Of its output.
        parameter_bytes: Of its parameters.
    """

    name: str
    seconds: float
    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile of a network's layers.

    Args:
        name: Of the network.
        layers: In the order of their numbers, which no edge goes against.
        edges: From the position of a layer to that of one that reads its output.
    """

    name: str
    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]

    def problem(self, devices: int, bandwidth: float) -> PartitionProblem:
        """The profile to be divided among equal devices.

        Args:
            devices: How many.
            bandwidth: Bytes a second; outputs go one way with it, their gradients the other. Infinite
                where transfers take no time.
        """
        nodes = (
            PartitionNode(layer.name, (layer.seconds,), 0, 2 * layer.activation_bytes / bandwidth, position)
            for position, layer in enumerate(self.layers)
        )
        return PartitionProblem(self.name, tuple(nodes), self.edges, (DeviceClass("accelerator", devices),))


def read_graph(path: Path, *, has_hosts: bool) -> PartitionProblem:
    """A graph of dnn-partitioning, with accelerators and, if asked for, its CPUs.

    Times are taken as milliseconds. A node without a colour is alone; sizes are rounded up to bytes.

    Raises:
        UsageError: IRC476 when the file cannot be read; IRC477 when it is no such graph; those of
            `PartitionProblem`.
    """

    def made(text: str) -> PartitionProblem:
        stored = json.loads(text)
        position = {node["id"]: i for i, node in enumerate(stored["nodes"])}
        transfers = {edge["sourceId"]: edge["cost"] * _MS for edge in stored["edges"]}
        classes = (
            DeviceClass("accelerator", stored["maxFPGAs"], stored["maxSizePerFPGA"]),
            DeviceClass("host", stored["maxCPUs"], math.inf, pays_transfers=False),
        )
        used = classes if has_hosts else classes[:1]
        nodes = (
            PartitionNode(
                node.get("name", str(node["id"])),
                _seconds(node)[: len(used)],
                math.ceil(node["size"]),
                transfers.get(node["id"], 0.0),
                node.get("colorClass", -1 - node["id"]),
                bool(node["isBackwardNode"]),
            )
            for node in stored["nodes"]
        )
        edges = ((position[edge["sourceId"]], position[edge["destId"]]) for edge in stored["edges"])
        return PartitionProblem(f"{path.parent.name}/{path.stem}", tuple(nodes), tuple(edges), used)

    return _read(path, "graph of dnn-partitioning", made)


def _seconds(node: Mapping[str, Any]) -> tuple[float, ...]:
    runs = node["supportedOnFpga"]
    return (node["fpgaLatency"] * _MS if runs else math.inf, node["cpuLatency"] * _MS)


def read_solution(path: Path, graph: Path, problem: PartitionProblem) -> Solution:
    """A partition that dnn-partitioning's programme has written.

    Args:
        path: Its file.
        graph: The file of the graph; it has the nodes' numbers.
        problem: The graph with its hosts.

    Raises:
        UsageError: IRC476 when a file cannot be read; IRC477 when it is no such partition.
    """

    def numbered(text: str) -> list[int]:
        return [node["id"] for node in json.loads(text)["nodes"]]

    numbers = _read(graph, "graph of dnn-partitioning", numbered)

    def made(text: str) -> Solution:
        stored = json.loads(text)
        device_of: dict[int, int] = {}
        for kind, name in enumerate(("fpgas", "cpus")):
            first = problem.devices.index(kind)
            for device, part in enumerate(stored[name], first):
                device_of |= dict.fromkeys(part["nodes"], device)
        return Solution(tuple(device_of[each] for each in numbers), stored["maxLoad"] * _MS)

    return _read(path, "partition of dnn-partitioning", made)


_LAYER = re.compile(r"(node(\d+)) -- (.*) -- (.*)")
_EDGE = re.compile(r"\t(node\d+) -- (node\d+)")


def read_profile(path: Path) -> Profile:
    """A profile of PipeDream; its times are milliseconds.

    Raises:
        UsageError: IRC476 when the file cannot be read; IRC477 when it is no such profile.
    """

    def made(text: str) -> Profile:
        layers: dict[str, tuple[int, Layer]] = {}
        edges: list[tuple[str, str]] = []
        for line in text.splitlines():
            if edge := _EDGE.fullmatch(line):
                edges.append((edge[1], edge[2]))
            elif layer := _LAYER.fullmatch(line):
                layers[layer[1]] = int(layer[2]), _layer(layer[1], layer[3], layer[4])
            elif line.strip():
                raise ValueError(f"neither a layer nor an edge: {line[:60]!r}")
        order = sorted(layers, key=lambda name: layers[name][0])
        position = {name: i for i, name in enumerate(order)}
        pairs = tuple((position[tail], position[head]) for tail, head in edges)
        for tail, head in pairs:
            if tail >= head:
                raise ValueError(f"{order[head]} reads {order[tail]}, which is not before it")
        name = path.stem.removesuffix("_graph").removeprefix("image_classification_")
        return Profile(name.removeprefix("translation_"), tuple(layers[each][1] for each in order), pairs)

    return _read(path, "profile of PipeDream", made)


def _layer(number: str, what: str, facts: str) -> Layer:
    given = dict(fact.split("=", 1) for fact in facts.split(", "))
    activations = given["activation_size"].strip("[]").split(";")
    return Layer(
        f"{number} {what}",
        (float(given["forward_compute_time"]) + float(given["backward_compute_time"])) * _MS,
        sum(map(float, activations)),
        float(given["parameter_size"]),
    )


def read_piper(path: Path) -> PartitionProblem:
    """A graph of Piper on all of its devices: no node split, none computed twice, one micro-batch in flight.

    Times are taken as seconds, as its bandwidth is bytes a second.

    Raises:
        UsageError: IRC476 when the file cannot be read; IRC477 when it is no such graph; those of
            `PartitionProblem`.
    """

    def made(text: str) -> PartitionProblem:
        stored = json.loads(text)
        position = {node["id"]: i for i, node in enumerate(stored["nodes"])}
        sent: dict[int, float] = {}
        for edge in stored["edges"]:
            sent[edge["sourceId"]] = max(sent.get(edge["sourceId"], 0.0), edge["communicationCost"])
        nodes: list[PartitionNode] = []
        for i, node in enumerate(stored["nodes"]):
            plain = next(way for way in node["TMPCs"]["1"] if way["id"] == "vanilla")
            nbytes = math.ceil(plain["memoryUsageA"] + plain["memoryUsageB"])
            transfer_seconds = 2 * sent.get(node["id"], 0.0) / stored["bandwidth"]
            nodes.append(PartitionNode(node["name"], (plain["timePerSample"],), nbytes, transfer_seconds, i))
        edges = tuple((position[edge["sourceId"]], position[edge["destId"]]) for edge in stored["edges"])
        device = DeviceClass("accelerator", stored["maxDevices"], stored["maxMemoryPerDevice"])
        return PartitionProblem(f"piper/{path.stem}", tuple(nodes), edges, (device,))

    return _read(path, "graph of Piper", made)


def _read(path: Path, kind: str, made: Callable[[str], _Made]) -> _Made:
    try:
        return made(path.read_text())
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(
            "IRC476", f"{path} cannot be read: {error.strerror}", help="name another file or --data folder"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise UsageError(
            "IRC477",
            f"{path} is no {kind}: {type(error).__name__}: {error}",
            help="name another file or --data folder, or fetch the file again",
        ) from error
