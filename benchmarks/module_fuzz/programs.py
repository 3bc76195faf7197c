"""Random programs: a module of blocks, its arguments, the options of `irc.optimize`, and a loop."""

from __future__ import annotations

import dataclasses
import inspect
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import irc
from irc.passes.strategy_registry import load_strategies

from .blocks import KINDS, LENGTH, WIDTH

__all__ = [
    "Block",
    "Loop",
    "Program",
    "arguments",
    "build",
    "draw",
    "from_json",
    "to_json",
    "undescribed_options",
]


@dataclass(frozen=True)
class Block:
    """One block.

    Args:
        kind: Its name among `KINDS`.
        seed: Of its choices and weights.
        wiring: How it stands in the model: one of `_WIRINGS`.
    """

    kind: str
    seed: int
    wiring: str = "plain"


@dataclass(frozen=True)
class Loop:
    """What a training loop does beside forward, loss and backward; the defaults are the plainest loop.

    Args:
        steps: How many.
        loss: `squares` of all results, their `means`, their `sums` (whose gradients are expanded), or squares
            of the `first` result alone.
        is_told: Whether `irc.optimize` is told the loss.
        accumulated: Forwards with a backward each, in one step.
        in_flight: Forwards before one backward.
        retains: Whether each graph runs backward twice.
        evaluates: Whether there is a forward in eval() and without gradients between steps.
        looks: Whether there is a forward in train() without gradients between steps.
        zeroing: `none`, `zero` or `never`: what becomes of `.grad` before a step.
        autocast: `forward`, or `all` with the loss in it, or nothing.
        optimizer: Its name, or nothing.
        clips: Whether gradients are clipped by their norm.
        penalizes: Whether the loss has the squares of the parameters.
        gradient: `backward`, `grad` (torch.autograd.grad) or `given` (a gradient in a permuted layout).
        other_rows: Whether the second step has one row less.
        freezes: Whether the first parameter is frozen from the second step on.
        trains_in_eval: Whether the model is in eval() while it trains.
        drops: Whether the results are dropped before backward.
    """

    steps: int = 3
    loss: str = "squares"
    is_told: bool = True
    accumulated: int = 1
    in_flight: int = 1
    retains: bool = False
    evaluates: bool = False
    looks: bool = False
    zeroing: str = "none"
    autocast: str = ""
    optimizer: str = ""
    clips: bool = False
    penalizes: bool = False
    gradient: str = "backward"
    other_rows: bool = False
    freezes: bool = False
    trains_in_eval: bool = False
    drops: bool = False


_LOOPS: dict[str, tuple[Any, ...]] = {
    "loss": ("means", "sums", "first"),
    "is_told": (False, False, False),
    "accumulated": (2,),
    "in_flight": (2,),
    "retains": (True,),
    "evaluates": (True,),
    "looks": (True,),
    "zeroing": ("zero", "never"),
    "autocast": ("forward", "all"),
    "optimizer": ("SGD", "AdamW", "SGD"),
    "clips": (True,),
    "penalizes": (True,),
    "gradient": ("grad", "given"),
    "other_rows": (True,),
    "freezes": (True,),
    "trains_in_eval": (True,),
    "drops": (True,),
}
"""The values of a loop that are not the plainest."""

OPTIONS: dict[str, tuple[Any, ...]] = {
    "strategy": ("ilp", "eviction", *(re.sub("<.>", "2", s.name) for s in load_strategies(copies=False))),
    "time_limit": (),
    "gap": (0.0, 0.1),
    "costs": ("measured", "measured", "measured", "gtx1080"),
    "loss": (),
    "accumulate_gradients": (True,),
    "optimizer_in_backward": ("SGD",),
    "specialize_branches": (True,),
    "forwards_in_flight": (2,),
    "swap": ("disk",),
    "plans": (2,),
    "dynamic": ("batch", "sequence", "rows"),
    "exact": ("sums",),
    "compiler": (),
}
"""The values of the options of `irc.optimize` that are not their defaults; none if a loop or the speed of the
runs decides."""

_NO_OPTIONS = {"model", "example_args", "budget", "example_kwargs", "progress", "same_branches", "profile"}
_WIRINGS = "plain", "residual", "residual_in_place", "twice", "checkpoint", "autocast", "result", "gated"
_LAYOUTS = "contiguous", "permuted", "sliced", "expanded", "offset"
_RESULTS = "tensor", "tuple", "dict", "loss", "with_argument", "nested"
_BUDGETS = "100%", "100%", "min", "min", "70%", "1GiB"
_NOT_BESIDE_OPTIMIZERS = (
    *("accumulate_gradients", "forwards_in_flight"),
    *("accumulated", "in_flight", "retains", "clips", "gradient", "zeroing"),
)
_NOT_BESIDE_RANGES = "specialize_branches", "swap"
_RARE = 0.09


@dataclass(frozen=True)
class Program:
    """A model, options and a loop.

    Args:
        seed: Of the numbers of arguments, and of each step's generators.
        blocks: In order.
        budget: Or `min`, for the smallest.
        options: Of `irc.optimize`, in the words of `OPTIONS`.
        loop: The loop.
        dtype: Of the weights and arguments.
        layout: Of the argument: one of `_LAYOUTS`.
        rows: Of the argument.
        requires_grad: Whether the argument does.
        result: What the model returns: one of `_RESULTS`.
    """

    seed: int
    blocks: tuple[Block, ...]
    budget: str = "100%"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    loop: Loop = Loop()
    dtype: str = "float32"
    layout: str = "contiguous"
    rows: int = 3
    requires_grad: bool = False
    result: str = "tensor"

    def __str__(self) -> str:
        """What is not the plainest, in a line."""
        plain = {each.name: each.default for each in dataclasses.fields(Loop)}
        loop = {name: value for name, value in vars(self.loop).items() if value != plain[name]}
        blocks = " > ".join(
            f"{b.kind}({b.seed})" + ("" if b.wiring == "plain" else f":{b.wiring}") for b in self.blocks
        )
        words = [blocks, f"budget {self.budget}", *(f"{k}={v!r}" for k, v in self.options.items())]
        words += [f"loop.{name}={value!r}" for name, value in loop.items()]
        words += [
            f"{each.name}={getattr(self, each.name)}"
            for each in dataclasses.fields(Program)[5:]
            if getattr(self, each.name) != each.default
        ]
        return ", ".join(words)


def sources(program: Program) -> list[str]:
    """The code of a program's blocks, each in a line."""
    lines: list[str] = []
    for block in program.blocks:
        kind = KINDS[block.kind]
        text = kind.variant(block.seed)[1]
        used = [f"{name} = {value}" for name, value in kind.attributes.items() if f"s.{name}" in text]
        lines.append(f"{block.kind}: {text}" + (f"  # {'; '.join(used)}" if used else ""))
    return lines


def draw(seed: int) -> Program:
    """Draws the program of a seed."""
    choices = random.Random(f"module {seed}")
    kinds = list(KINDS)
    blocks = tuple(
        Block(choices.choice(kinds), choices.randrange(1000), _rare(choices, _WIRINGS[1:], 0.35) or "plain")
        for _ in range(choices.choice((1, 2, 2, 3, 3, 4)))
    )
    loop = {name: choices.choice(values) for name, values in _LOOPS.items() if choices.random() < _RARE}
    options = {n: choices.choice(v) for n, v in OPTIONS.items() if v and choices.random() < _RARE / 2}
    if choices.random() < 0.1:
        options["costs"] = "measured"
    if loop.get("in_flight") and choices.random() < 0.7:
        options["forwards_in_flight"] = 2
    if "optimizer_in_backward" in options:  # what it excludes, as its documentation says
        options = {name: value for name, value in options.items() if name not in _NOT_BESIDE_OPTIMIZERS}
        loop = {name: value for name, value in loop.items() if name not in _NOT_BESIDE_OPTIMIZERS}
    if "dynamic" in options:
        options = {name: value for name, value in options.items() if name not in _NOT_BESIDE_RANGES}
    return Program(
        seed,
        blocks,
        choices.choice(_BUDGETS),
        options,
        Loop(**loop),
        choices.choices(("float32", "float64", "bfloat16"), (18, 1, 1))[0],
        _rare(choices, _LAYOUTS[1:], 0.2) or "contiguous",
        choices.choice((2, 3, 4) if options.get("dynamic") == "rows" else (1, 2, 3, 4)),
        choices.random() < 0.2,
        choices.choice(_RESULTS),
    )


def _rare(choices: random.Random, values: tuple[str, ...], share: float) -> str | None:
    return choices.choice(values) if choices.random() < share else None


def to_json(program: Program) -> dict[str, Any]:
    """The fields of a program that are not the plainest."""

    def others(value: Any) -> dict[str, Any]:
        return {
            each.name: getattr(value, each.name)
            for each in dataclasses.fields(value)
            if each.default is dataclasses.MISSING or getattr(value, each.name) != each.default
        }

    loop = others(program.loop)
    return {**others(program), "blocks": [others(block) for block in program.blocks], "loop": loop}


def from_json(data: Mapping[str, Any]) -> Program:
    """The program whose fields a journal holds."""
    blocks = tuple(Block(**block) for block in data["blocks"])
    fields: dict[str, Any] = {**data, "blocks": blocks, "loop": Loop(**data["loop"])}
    return Program(**fields)


def undescribed_options() -> set[str]:
    """The options of `irc.optimize` that this table does not know."""
    return set(inspect.signature(irc.optimize).parameters) ^ (OPTIONS.keys() | _NO_OPTIONS)


# ---------------------------------------------------------------------- from a program to a module


class _Wired(nn.Module):
    """A block, the way it stands in the model."""

    def __init__(self, block: nn.Module, wiring: str) -> None:
        super().__init__()
        self.block, self.wiring = block, wiring
        if wiring == "gated":
            self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """The tensor that goes on, and more results."""
        if self.wiring == "checkpoint":
            given = checkpoint(self.block, x, use_reentrant=False)
        elif self.wiring == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                given = self.block(x)
        else:
            given = self.block(x)
        y, more = (given[0], list(given[1:])) if isinstance(given, tuple) else (given, [])
        if self.wiring == "twice":
            again = self.block(y)
            y = again[0] if isinstance(again, tuple) else again
        match self.wiring:
            case "residual":
                y = x + y
            case "residual_in_place":
                y = y.mul(1) if y is x else y
                y += x
            case "gated":
                y = y * self.gate(x).sigmoid()
            case "result":
                more.append(y)
            case _:
                pass
        return y.to(x.dtype), more


class _Model(nn.Module):
    """A chain of blocks; the results are the last tensor and what blocks return beside theirs."""

    def __init__(self, blocks: list[nn.Module], result: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(blocks)
        self.result = result

    def forward(self, x: Tensor) -> Any:
        """The results, in the structure of the program."""
        y, more = x * self.scale, list[Any]()
        for block in self.blocks:
            y, results = block(y)
            more += results
        match self.result:
            case "loss":
                return y.float().square().mean() + sum(_scalars(more))
            case "tensor":
                return (y, *more) if more else y
            case "dict":
                return {"y": y, "more": more, "none": None}
            case "with_argument":
                return y, x, *more
            case "nested":
                return {"y": [y, (y.mean(-1), 2)], "more": tuple(more)}
            case _:
                return y, y.detach().sum(), *more


def _scalars(more: list[Any]) -> list[Tensor]:
    return [t.square().mean() for t in more if isinstance(t, Tensor) and t.is_floating_point()]


def build(program: Program) -> nn.Module:
    """A program's model, with the same numbers each time."""
    blocks: list[nn.Module] = []
    for block in program.blocks:
        torch.manual_seed(block.seed)
        blocks.append(_Wired(KINDS[block.kind].make(block.seed), block.wiring))
    model = _Model(blocks, program.result)
    if program.dtype != "float32":
        model.to(getattr(torch, program.dtype))
    return model.eval() if program.loop.trains_in_eval else model.train()


def arguments(program: Program, number: int) -> tuple[Tensor]:
    """The arguments of a forward, with the same numbers each time.

    Args:
        program: The program.
        number: Of the forward.
    """
    rows = program.rows - (program.loop.other_rows and number == 1 and program.rows > 1)
    generator = torch.Generator().manual_seed(program.seed * 100 + number)
    shape, dtype = (rows, LENGTH, WIDTH), getattr(torch, program.dtype)
    numbers = torch.randn(shape, generator=generator).to(dtype)
    match program.layout:
        case "permuted":
            x = numbers.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        case "sliced":
            x = torch.zeros(rows, LENGTH, 2 * WIDTH, dtype=dtype)[..., ::2].copy_(numbers)
        case "expanded":
            x = numbers[:1].expand(shape)
        case "offset":
            x = torch.zeros(rows * LENGTH * WIDTH + 3, dtype=dtype)[3:].view(shape).copy_(numbers)
        case _:
            x = numbers
    return (x.requires_grad_(program.requires_grad),)
