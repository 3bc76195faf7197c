"""Drops from a program what its fault does not need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace

from .programs import Loop, Program

__all__ = ["shrunk"]

_PARTS = "budget", "dtype", "layout", "requires_grad", "result"
_Change = Callable[[Program], Program]


def shrunk(program: Program, is_same: Callable[[Program], bool], tries: int = 80) -> Program:
    """The smallest program near this one that shows the same.

    Args:
        program: The program.
        is_same: Whether another program shows the same.
        tries: The most programs that are tried.
    """
    for change in _all_at_once():
        if tries and (smaller := change(program)) != program:
            tries -= 1
            program = smaller if is_same(smaller) else program
    while True:
        before = program
        for change in list(_one_by_one(program)):
            if tries and (smaller := change(program)) != program:
                tries -= 1
                program = smaller if is_same(smaller) else program
        if program == before:
            return program


def _all_at_once() -> Iterator[_Change]:
    """Changes that often succeed at once: a fault seldom needs much."""
    plain = {each.name: each.default for each in dataclasses.fields(Program) if each.name in _PARTS}
    yield lambda program: replace(program, loop=Loop())
    yield lambda program: replace(program, **plain)
    yield lambda program: replace(program, options={})
    yield lambda program: _without_wirings(program)
    yield lambda program: replace(program, loop=replace(program.loop, steps=1))


def _without_wirings(program: Program) -> Program:
    return replace(program, blocks=tuple(replace(block, wiring="plain") for block in program.blocks))


def _one_by_one(program: Program) -> Iterator[_Change]:
    """Changes that leave one thing out; blocks first, from the last one on."""
    for index in reversed(range(len(program.blocks))):
        yield lambda p, i=index: replace(p, blocks=p.blocks[:i] + p.blocks[i + 1 :])
    for block in program.blocks:
        plain = replace(block, wiring="plain")
        yield lambda p, b=block, q=plain: replace(
            p, blocks=tuple(q if each == b else each for each in p.blocks)
        )
    for name in program.options:
        yield lambda p, n=name: replace(p, options={key: v for key, v in p.options.items() if key != n})
    for each in dataclasses.fields(Loop):
        if each.name != "steps" and getattr(program.loop, each.name) != each.default:
            yield lambda p, e=each: replace(p, loop=replace(p.loop, **{e.name: e.default}))
    if program.loop.steps > 1:
        yield lambda p: replace(p, loop=replace(p.loop, steps=p.loop.steps - 1))
    for each in dataclasses.fields(Program):
        if each.name in _PARTS and getattr(program, each.name) != each.default:
            yield lambda p, e=each: replace(p, **{e.name: e.default})
