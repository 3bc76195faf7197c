"""Operations of which it is known that they take no workspace: measured, they take none."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from irc.frontends.torch import capture
from irc.ir import Node
from irc.passes.costs.no_workspace import takes_none
from irc.passes.costs.profiling import first_runs

torch.set_num_threads(1)


class Product(nn.Module):
    """A product of two matrices, added to a bias if there is one."""

    def forward(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        return a @ b if bias is None else torch.addmm(bias, a, b)


def products(a: Tensor, b: Tensor, *bias: Tensor) -> list[Node]:
    graph = capture(Product(), (a.requires_grad_(), b.requires_grad_(), *bias)).graph
    return [node for node in graph.operations if "mm" in node.op]


def matrix(rows: int, columns: int, layout: str) -> Tensor:
    match layout:
        case "rows":
            return torch.randn(rows, columns)
        case "columns":
            return torch.randn(columns, rows).t().detach()
        case "gaps":
            return torch.randn(rows, 2 * columns)[:, ::2].detach()
        case _:
            return torch.randn(1, 1).expand(rows, columns).detach()


SIZES = ((1, 1, 1), (1, 64, 32), (64, 1, 32), (64, 32, 1), (7, 5, 3), (300, 200, 100), (16, 1024, 512))


LAYOUTS = list(itertools.product(("rows", "columns", "gaps", "expanded"), repeat=2))


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(pair, marks=() if pair[0] == "rows" or pair[0] == pair[1] else pytest.mark.slow)
        for pair in LAYOUTS
    ],
    ids=str,
)
def test_products_that_are_said_to_take_no_workspace_take_none(layouts: tuple[str, str]) -> None:
    nodes: list[Node] = []
    for rows, inner, columns in SIZES:
        a, b = matrix(rows, inner, layouts[0]), matrix(inner, columns, layouts[1])
        nodes += products(a, b)
        nodes += products(a, b, torch.randn(columns))
    said = [node for node in nodes if takes_none(node)]
    assert all(measured.workspace_bytes == 0 for measured in first_runs(said))
    if set(layouts) <= {"rows", "columns"}:
        assert said and (not torch.backends.mkl.is_available() or len(said) == len(nodes))


class Square(nn.Module):
    """One matrix in both places of a product."""

    def forward(self, a: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, a, a)


def test_a_product_of_a_matrix_with_itself() -> None:
    nodes = capture(Square(), (torch.randn(8, 8, requires_grad=True), torch.randn(8))).graph.operations
    said = [node for node in nodes if takes_none(node)]
    assert said and all(measured.workspace_bytes == 0 for measured in first_runs(said))


def test_other_products_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = products(matrix(8, 8, "rows"), matrix(8, 8, "rows"))
    gaps = products(matrix(8, 8, "gaps"), matrix(8, 8, "rows"))
    doubles = products(matrix(8, 8, "rows").double(), matrix(8, 8, "rows").double())
    assert not takes_none(gaps[0]) and not any(map(takes_none, doubles))
    biased = products(matrix(8, 8, "rows"), matrix(8, 8, "rows"), matrix(8, 8, "columns"))
    assert not takes_none(biased[0])  # torch copies such a bias by tiles

    def mixed() -> str:
        raise RuntimeError("legacy and new APIs are mixed")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_float32_matmul_precision", mixed)
        assert not any(map(takes_none, whole))
    assert all(map(takes_none, whole))
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not any(map(takes_none, whole))
