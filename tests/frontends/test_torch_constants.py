"""Tensors that a module reads and does not register: shared, viewed and read again, each in one storage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from torch import Tensor, nn
from torch.nn import functional

from irc.backends.torch import bind_program, compile_program
from irc.frontends.torch import capture
from irc.ir import InputRole, Trait, verify_graph
from irc.passes import Cost, PassManager, PlanMemory, Planner, Program

torch.set_num_threads(1)

WIDTH = 4
TABLES = {"float": torch.arange(16.0).reshape(4, 4) / 8 - 1, "int": torch.arange(16).reshape(4, 4) % WIDTH}


@functools.cache
def cached(kind: str) -> Tensor:
    return TABLES[kind].flip(0)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda t: t[:3],
    "steps": lambda t: t[..., ::2],
    "view": lambda t: t.reshape(-1),
    "transpose": lambda t: t.transpose(0, -1),
    "expand": lambda t: t.expand(2, *t.shape),
    "select": lambda t: t[1],
    "unsqueeze": lambda t: t.unsqueeze(-1),
    "split": lambda t: t.split(2)[0],
    "unbind": lambda t: t.unbind(0)[-1],
}
SOURCES = ("global", "cached", "own", "shared", "part")
Read = tuple[str, str, list[str]]
READS = st.tuples(
    st.sampled_from(SOURCES),
    st.sampled_from(sorted(TABLES)),
    st.lists(st.sampled_from(sorted(VIEWS)), max_size=3),
)


class Layer(nn.Module):
    """Reads views of a global, of a cached tensor, of attributes, and of a tensor that other layers read."""

    def __init__(self, shared: Mapping[str, Tensor], reads: Sequence[Read]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.own = {kind: table.clone() for kind, table in TABLES.items()}
        self.shared = shared
        self.part = {kind: table[1:] for kind, table in shared.items()}
        self.reads = reads

    def source(self, name: str, kind: str) -> Tensor:
        match name:
            case "global":
                return TABLES[kind]
            case "cached":
                return cached(kind)
            case _:
                return getattr(self, name)[kind]

    def forward(self, x: Tensor) -> Tensor:
        for name, kind, views in self.reads:
            table = self.source(name, kind)
            for view in views:
                if table.dim() and table.shape[0] > 1:
                    table = VIEWS[view](table)
            if kind == "int":
                x = x + functional.embedding(table, self.weight).reshape(-1, WIDTH).mean(0)
            else:
                x = (x * table.reshape(-1)[:1]).tanh() + x * table.mean() + table.sum()
        return x @ self.weight


def trained(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    result = module(x)
    result.square().mean().backward()
    return [result.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def assert_plans_train_the_same(module: nn.Module, x: Tensor) -> None:
    """Compares two plans with eager, that which keeps all and that of the smallest budget."""
    captured = capture(module, (x,))
    verify_graph(captured.graph)
    inputs = [i for i in captured.graph.inputs if i.role is InputRole.CONSTANT]
    held = {captured.constants[i.target].untyped_storage().data_ptr() for i in inputs}
    assert len({i.value.storage for i in inputs}) == len(held)
    views = ("aten.slice.Tensor", "aten.view.default", "aten.select.int", "aten.expand.default")
    assert all(Trait.VIEW in node.traits for node in captured.graph.nodes if node.op in views)
    expected = trained(module, x)
    planner = Planner(PassManager([Cost(profile="cpu")]).run(Program(captured.graph)))
    for budget in (planner.baseline_bytes, planner.minimum_bytes()):
        program = PlanMemory(budget, time_limit=0.2).choose(planner)
        assert program.schedule is not None
        fitted = bind_program(
            module, compile_program(program.schedule, captured.constants), captured.signature
        )
        for ours, its in zip(trained(fitted, x), expected, strict=True):
            assert torch.equal(ours, its)
    for ours, its in zip(trained(module, x), expected, strict=True):
        assert torch.equal(ours, its)


@pytest.mark.parametrize("views", [["slice"], ["transpose"], ["slice", "view"]])
@pytest.mark.parametrize("kind", sorted(TABLES))
def test_a_constant_may_be_viewed_twice(kind: str, views: list[str]) -> None:
    layer = Layer(TABLES, [("shared", kind, views), ("shared", kind, views)])
    assert_plans_train_the_same(nn.Sequential(layer, layer), torch.randn(3, WIDTH))


@pytest.mark.slow
@examples(60)
@given(data=st.data(), is_repeated=st.booleans(), is_run_before=st.booleans())
def test_plans_of_shared_constants_give_the_numbers_of_eager(
    data: st.DataObject, is_repeated: bool, is_run_before: bool
) -> None:
    torch.manual_seed(0)
    cached.cache_clear()
    shared = {kind: table.clone() for kind, table in TABLES.items()}
    first = Layer(shared, data.draw(st.lists(READS, min_size=1, max_size=4)))
    module = nn.Sequential(first, first if is_repeated else Layer(shared, first.reads))
    x = torch.randn(3, WIDTH)
    if is_run_before:
        module(x)
    assert_plans_train_the_same(module, x)
