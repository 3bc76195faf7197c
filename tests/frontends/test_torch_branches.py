"""Python code that looks at data: told that it is traced, or planned as it branches on the example."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.torch_cases import Model
from torch import Tensor, nn

import irc
from irc.frontends.torch import Captured, capture
from irc.ir import UnsupportedError

torch.set_num_threads(1)


def linear(function: Any) -> Model:
    return Model(function, lin=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 4)


def operations(captured: Captured) -> set[str]:
    return {node.op.split(".")[1] for node in captured.graph.nodes}


# ---------------------------------------------------------------------- told that it is traced


def test_code_that_looks_at_data_unless_it_is_traced_is_traced_so(x: Tensor) -> None:
    """As masks in transformers: left out where they mask nothing, and always there while compiling."""

    def forward(m: Any, x: Tensor) -> Tensor:
        mask = x > 0
        if not torch.compiler.is_compiling() and mask.all():
            return m.lin(x)
        return m.lin(x).masked_fill(mask, 0.0)

    assert "masked_fill" in operations(capture(linear(forward), (x,)))
    assert not torch.compiler.is_compiling()


def test_code_that_is_whole_only_where_it_is_exported_is_traced_so(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return m.lin(x).sin()
        return m.lin(x) * x.sum().item()

    assert "sin" in operations(capture(linear(forward), (x,)))
    assert not torch.compiler.is_exporting()


def test_code_that_is_told_keeps_to_its_plain_operations(x: Tensor) -> None:
    """As scans in transformers: compiled they run in another order, whose numbers are not eager's."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and (x > 0).all():
            return m.lin(x)
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return m.lin(x).flip(0).cumsum(0)
        return m.lin(x).sin()

    assert "sin" in operations(capture(linear(forward), (x,)))


def test_code_that_need_not_know_is_not_told(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.lin(x).sin() if torch.compiler.is_compiling() else m.lin(x).cos()

    assert "cos" in operations(capture(linear(forward), (x,)))


def test_the_refusal_of_a_branch_shows_its_line(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.lin(x) if x.sum() > 0 else x

    with pytest.raises(UnsupportedError) as raised:
        capture(linear(forward), (x,))
    assert raised.value.code == "IRC332" and "`return m.lin(x) if x.sum() > 0 else x`" in raised.value.message
    assert "layerdrop=0" in str(raised.value.help) and "specialize_branches" in str(raised.value.help)
    assert "irc.backend" in str(raised.value.help)


# ---------------------------------------------------------------------- as it branches on the example


def _checks(m: Any, x: Tensor) -> Tensor:
    h = m.norm(m.lin(x))
    if not torch.isfinite(h).all():
        h = h.nan_to_num()
    if x.abs().max() > 100:
        raise ValueError("too large")
    many = int((x > 50).sum()) + (x > 60).sum().item() + sum((x > 70).sum(0).tolist())
    return h * (1 + many) + float(x.isnan().sum())


def test_branches_of_the_example_are_planned_and_checked(x: Tensor) -> None:
    torch.manual_seed(1)
    module = linear(_checks)
    original = copy.deepcopy(module)
    state, generator = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    fitted = irc.optimize(module, (x,), "100%", costs="analytic", specialize_branches=True)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    for batch in (x, -x):
        ours, theirs = fitted(batch), original(batch)
        assert torch.equal(ours, theirs)
        ours.sum().backward()
        theirs.sum().backward()
    for p, q in zip(module.parameters(), original.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # pyright: ignore[reportArgumentType]
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), original.buffers(), strict=True))


@pytest.mark.parametrize(("wrong", "line"), [(1000.0, "x.abs()"), (float("nan"), "isfinite")])
def test_a_step_that_branches_otherwise_is_refused(wrong: float, line: str, x: Tensor) -> None:
    fitted = irc.optimize(linear(_checks), (x,), "100%", costs="analytic", specialize_branches=True)
    other = x.clone()
    other[1, 2] = wrong
    with pytest.raises(irc.IrcError, match=r"reads (True|False); it read (True|False)") as raised:
        fitted(other)
    assert raised.value.code == "IRC347" and raised.value.at is not None
    assert "_checks" in str(raised.value.at.source)
    assert torch.equal(fitted(x), fitted(x))  # the next step is as planned


def test_a_number_that_is_not_a_number_twice_is_the_same(x: Tensor) -> None:
    fitted = irc.optimize(
        linear(lambda m, x: m.lin(x) + 0 * int((x[0, 0] * float("nan")).item() > 0)),
        (x,),
        "100%",
        costs="analytic",
        specialize_branches=True,
    )
    fitted(x)


def test_code_that_reads_otherwise_while_it_is_traced_is_refused(x: Tensor) -> None:
    calls = [0]

    def forward(m: Any, x: Tensor) -> Tensor:
        calls[0] += 1
        return m.lin(x) if all(x.sum() < 1e9 for _ in range(calls[0])) else x

    with pytest.raises(UnsupportedError, match=r"IRC332.*reads other tensors while it is traced"):
        capture(linear(forward), (x,), specialize_branches=True)


def test_a_shape_that_depends_on_data_is_refused_all_the_same(x: Tensor) -> None:
    with pytest.raises(UnsupportedError, match=r"IRC332.*nonzero") as raised:
        capture(linear(lambda m, x: m.lin(x[x[:, 0] > 0])), (x,), specialize_branches=True)
    assert "specialize_branches" not in str(raised.value.help)
