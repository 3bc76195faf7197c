"""Prints graphs and schedules."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..graph import Argument, Graph, Node, Region, Symbol
from ..schedule import Compute, Fetch, Free, Loss, Offload, Schedule, Wait
from ..types import Value
from .tokens import LOCATION_FIELDS, NAME, OPTIONAL, VERSION, WORD

__all__ = ["print_file", "print_graph", "print_program", "print_schedule", "same_graph", "same_schedule"]


def print_graph(graph: Graph) -> str:
    """The text of `graph`, which `parse_graph` reads back."""
    return "\n".join(_graph_lines(graph)) + "\n"


def print_schedule(schedule: Schedule) -> str:
    """The text of the instructions alone; the nodes and storages are named, not described."""
    return "\n".join(_schedule_lines(schedule)) + "\n"


def print_program(schedule: Schedule) -> str:
    """The text of a graph followed by its schedule, which `parse_program` reads back."""
    return print_graph(schedule.graph) + print_schedule(schedule)


def print_file(text: str) -> str:
    """The content of a file of this text form: it begins with its version."""
    return f"irc {VERSION}\n{text}"


def same_graph(a: Graph, b: Graph) -> bool:
    """Whether two graphs are equal in structure and in every name, though their nodes are other objects."""
    return print_graph(a) == print_graph(b)


def same_schedule(a: Schedule, b: Schedule) -> bool:
    """Whether two schedules have equal instructions over equal graphs."""
    return print_program(a) == print_program(b)


def _graph_lines(graph: Graph) -> Iterator[str]:
    optional = ((name, getattr(graph, name), usual) for name, usual in OPTIONAL.items())
    more = "".join(f" {name}={number}" for name, number, usual in optional if number != usual)
    yield f"graph loss_bytes={graph.loss_bytes}{more} {{"
    for storage in graph.storages:
        yield f"  storage {_sigil('@', storage.name)} {storage.nbytes} {_word(storage.device)}"
    for annotation in graph.annotations:
        yield f"  annotation {annotation.policy.value} {json.dumps(annotation.by)}"
    for entry in graph.inputs:
        grad = " requires_grad" * entry.requires_grad + " adds_apart" * entry.adds_apart
        part = f" part {json.dumps(entry.part)}" if entry.part else ""
        yield f"  input {_result(entry.value)} {entry.role.value} {json.dumps(entry.target)}{part}{grad}"
    for offloaded in graph.offloaded_parameters:
        what = f"state {_result(offloaded.value)}" if offloaded.is_state else _argument(offloaded.value)
        yield f"  offloaded {what} {_word(offloaded.tier)} {json.dumps(offloaded.parameter)}"
    region: Region | None = None
    for node in graph.nodes:
        if node.region is not region:
            region = node.region
            yield f"{region.value}:"
        yield f"  {_node(node)}"
    for output in graph.outputs:
        part = f" part {json.dumps(output.part)}" if output.part else ""
        yield f"  {output.role.value} {_argument(output.value)} {json.dumps(output.target)}{part}"
    yield "}"


def _schedule_lines(schedule: Schedule) -> Iterator[str]:
    yield "schedule {"
    for instruction in schedule.instructions:
        match instruction:
            case Compute(node, retained):
                names = ", ".join(_sigil("@", name) for name in sorted(s.name for s in retained))
                yield f"  compute {_word(node.name)} keep({names})"
            case Free(storage):
                yield f"  free {_sigil('@', storage.name)}"
            case Loss():
                yield "  loss"
            case Offload(storage, tier):
                yield f"  offload {_sigil('@', storage.name)} to {_word(tier)}"
            case Fetch(storage, tier):
                yield f"  fetch {_sigil('@', storage.name)} from {_word(tier)}"
            case Wait(storage):
                yield f"  wait {_sigil('@', storage.name)}"
    yield "}"


def _node(node: Node) -> str:
    arguments = [_argument(argument) for argument in node.arguments]
    arguments += [f"{_word(key)}={_argument(argument)}" for key, argument in node.keywords]
    text = f"{_word(node.name)} = {_word(node.op)}({', '.join(arguments)})"
    results = ", ".join("none" if value is None else _result(value) for value in node.results)
    if node.is_sequence:
        text += f" -> ({results})"
    elif node.results:
        text += f" -> {results}"
    if node.traits:
        text += f" traits({', '.join(sorted(trait.value for trait in node.traits))})"
    if node.at is not None:
        fields = ((key, getattr(node.at, field)) for key, field in LOCATION_FIELDS)
        text += f" loc({', '.join(f'{key}={json.dumps(part)}' for key, part in fields if part is not None)})"
    if node.annotation is not None:
        text += f" annotation({json.dumps(node.annotation.by)})"
    return text


def _result(value: Value) -> str:
    shape, strides = (",".join(map(str, sizes)) for sizes in (value.type.shape, value.type.strides))
    device = "" if value.type.device == value.storage.device else f" on {_word(value.type.device)}"
    text = f"{value.type.dtype.value}[{shape}]{{{strides}}}{device}"
    return f"{_sigil('%', value.name)}: {text} {_sigil('@', value.storage.name)}"


def _argument(argument: Argument) -> str:
    match argument:
        case Value():
            return _sigil("%", argument.name)
        case None:
            return "none"
        case bool():
            return "true" if argument else "false"
        case complex():
            return f"complex({argument.real!r}, {argument.imag!r})"
        case str():
            return json.dumps(argument)
        case Symbol(kind, name):
            shown = json.dumps(kind) if kind == "complex" else _word(kind)
            return f"{shown}({_word(name)})"
        case tuple():
            items = ", ".join(_argument(item) for item in argument)
            return f"({items},)" if len(argument) == 1 else f"({items})"
        case _:
            return repr(argument)


def _word(name: str) -> str:
    return name if WORD.fullmatch(name) else json.dumps(name)


def _sigil(sigil: str, name: str) -> str:
    return sigil + (name if NAME.fullmatch(name) else json.dumps(name))
