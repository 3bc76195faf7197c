"""Parts that torch.jit has made: traced as they are written, compared in each call, refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import assert_same
from torch import Tensor, nn

import irc
from irc.compiler.compare import difference, largest

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Scaled(nn.Module):
    """Holds a number, and looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale if self.scale > 1 else x.relu()


class Counted(Scaled):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


class Unregistered(Scaled):
    """Holds a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


class Listed(Scaled):
    """Counts its calls in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [2.0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1.0)
        return self.linear(x) * float(len(self.calls))


class Keyed(Scaled):
    """Counts in a dict, by a list that lies in it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"all": [2.0]}

    def forward(self, x: Tensor) -> Tensor:
        self.calls["all"][0] += 1.0
        return self.linear(x) * self.calls["all"][0]


class Printing(Scaled):
    """Prints in another method than its forward."""

    @torch.jit.export
    def shown(self, x: Tensor) -> Tensor:
        print("called")
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Tensors(Scaled):
    """Holds a list of tensors, and writes into one."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = [torch.zeros(4)]

    def forward(self, x: Tensor) -> Tensor:
        self.shifts[0].add_(1)
        return self.linear(x) + self.shifts[0]


class Collecting(nn.Module):
    """Fills lists of its own, in a loop and in a branch."""

    def forward(self, x: Tensor) -> Tensor:
        rows: list[Tensor] = []
        for i in range(3):
            rows += [x[i] + 1]
            if i > 1:
                rows.append(x[0])
        return torch.stack(rows)[:3]


def _appended(x: Tensor, rows: list[Tensor]) -> Tensor:
    rows.append(x)
    return torch.stack(rows).sum(0)


def _gated(x: Tensor, scale: float = 1.5, shift: float = 0.0) -> Tensor:
    return torch.sigmoid(x) * torch.tanh(x) * x * scale + shift


def _printed(x: Tensor, shift: float) -> Tensor:
    print("called")
    return x + shift


class Calling(nn.Module):
    """Calls a function, which torch.jit may have made."""

    def __init__(self, function: Callable[..., Tensor], *, rows: bool = False) -> None:
        super().__init__()
        self.function, self.rows = function, rows

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, [x]) if self.rows else self.function(x, shift=2.0)


def _linear() -> nn.Module:
    return nn.Linear(4, 4)


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def _norms() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))


def scripted(part: nn.Module) -> Any:
    return torch.jit.script(part)


def traced(part: nn.Module) -> Any:
    return torch.jit.trace(part, torch.randn(3, 4), check_trace=False)


def model(part: Callable[[], nn.Module], make: Callable[[nn.Module], Any] = scripted) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), make(part()), nn.Linear(4, 4))


def planned(module: nn.Module, x: Tensor) -> Any:
    return irc.optimize(module, x, "1MiB", costs="analytic", time_limit=1)


def step(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    module.zero_grad()
    x.grad = None
    y = module(x)
    y.square().sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients, **dict(module.named_buffers())}


@pytest.mark.parametrize("part", [_plain, _linear])
@pytest.mark.parametrize("make", [scripted, traced])
def test_a_part_of_torch_jit_has_the_bits_of_eager(part: Any, make: Any) -> None:
    x, original = torch.randn(3, 4, requires_grad=True), model(part, make)
    ours = planned(model(part, make), x)
    assert ours.irc_plan.roundings == ()
    for _ in range(4):  # torch.jit changes what it runs after some calls
        assert_same(step(ours, x), step(original, x))
    assert torch.equal(ours.eval()(x), original.eval()(x))


@pytest.mark.parametrize("make", [scripted, traced])
def test_other_parts_round_otherwise_which_is_named(make: Callable[[nn.Module], Any]) -> None:
    x, original = torch.randn(3, 4, requires_grad=True), model(_norms, make)
    ours = planned(model(_norms, make), x)
    assert [str(each).partition(",")[0] for each in ours.irc_plan.roundings] == ["numbers of submodule 1"]
    for _ in range(4):
        mine, its = step(ours, x), step(original, x)
        for name, wanted in its.items():
            value = mine[name]
            assert wanted is not None and value is not None
            assert difference(wanted, value) <= 1e-5 * max(largest(wanted), 1.0), name


def test_a_part_may_fill_lists_of_its_own() -> None:
    x, original = torch.randn(3, 4, requires_grad=True), model(Collecting)
    ours = planned(model(Collecting), x)
    mine, its = step(ours, x), step(original, x)
    assert mine["y"] is not None and its["y"] is not None and torch.equal(mine["y"], its["y"])


def _called(function: Any, *, rows: bool = False) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Calling(function, rows=rows), nn.Linear(4, 4))


def test_a_function_rounds_otherwise_which_is_named() -> None:
    function = torch.jit.script(_gated)
    x, original = torch.randn(3, 4, requires_grad=True), _called(function)
    for _ in range(4):
        step(original, x)  # torch.jit has changed what it runs before it is traced
    ours = planned(_called(function), x)
    (rounding,) = map(str, ours.irc_plan.roundings)
    assert rounding.startswith("numbers of function _gated (test_scripted_parts.py:")
    assert "in forward), made by torch.jit" in rounding
    as_written = _called(_gated)
    for _ in range(4):
        mine = step(ours, x)
        assert_same(mine, step(as_written, x))
        for name, wanted in step(original, x).items():
            value = mine[name]
            assert wanted is not None and value is not None
            assert difference(wanted, value) <= 1e-5 * max(largest(wanted), 1.0), name


def _squared(x: Tensor, shift: float) -> Tensor:
    return x * x + shift


def test_another_function_makes_another_plan() -> None:
    x, module = torch.randn(3, 4), _called(torch.jit.script(_gated))
    ours = planned(module, x)
    ours(x)
    ours[1].function = torch.jit.script(_squared)
    for _ in range(2):
        wanted = ours[2](ours[0](x).square() + 2.0)
        assert torch.equal(ours(x), wanted) and len(ours.irc_plans) == 2


@pytest.mark.parametrize(
    ("function", "rows", "why"),
    [(_printed, False, "prim::Print"), (_appended, True, "aten::append writes into a list")],
)
def test_a_function_that_does_more_is_refused_by_name(
    function: Any, rows: bool, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = function.__name__
    with pytest.raises(irc.UnsupportedError, match=rf"IRC534.*function '{name}' is made by.*{why}") as raised:
        planned(_called(torch.jit.script(function), rows=rows), torch.randn(3, 4))
    assert capsys.readouterr().out == ""
    assert raised.value.help == "use the function that it was made of"
    planned(_called(function, rows=rows), torch.randn(3, 4))  # the cure


def test_a_scripted_module_that_is_no_submodule_is_refused_by_name() -> None:
    beside, x = scripted(Listed()), torch.randn(3, 4)
    with pytest.raises(irc.UnsupportedError, match=r"IRC534.*forward of a module that torch.jit has made"):
        planned(_called(lambda rows, shift: beside(rows) + shift), x)
    assert beside.calls == [2.0]
    cure = scripted(Scaled())
    planned(nn.Sequential(nn.Linear(4, 4), cure), x)


def test_a_refused_part_holds_what_it_held() -> None:
    module = model(Listed)
    with pytest.raises(irc.UnsupportedError, match="IRC534"):
        planned(module, torch.randn(3, 4))
    assert module[1].calls == [2.0]


def test_a_frozen_part_is_refused_by_name() -> None:
    module = model(_plain, lambda part: torch.jit.freeze(scripted(part.eval())))
    with pytest.raises(irc.UnsupportedError, match=r"IRC534.*'1' is made by torch.jit.*torch.jit.freeze"):
        planned(module, torch.randn(3, 4))


def test_what_a_part_holds_may_change() -> None:
    x, original = torch.randn(3, 4, requires_grad=True), model(Scaled)
    ours = planned(model(Scaled), x)
    for scale, count in ((2.0, 1), (3.0, 2), (0.5, 3), (2.0, 3)):
        for module in (original, ours):
            module[1].scale = scale
        mine, its = step(ours, x), step(original, x)
        assert mine["y"] is not None and its["y"] is not None and torch.equal(mine["y"], its["y"])
        assert len(ours.irc_plans) == count
    ours[1].eval()
    step(ours, x)
    assert len(ours.irc_plans) == 4


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "state": (Counted, "prim::SetAttr"),
    "list": (Listed, "aten::append writes into a list"),
    "dict": (Keyed, "aten::_set_item writes into a list"),
    "print": (Printing, "prim::Print"),
    "tensors": (Tensors, "its attribute shifts holds more than numbers"),
    "tensor": (lambda: nn.Sequential(Unregistered()), "its attribute shift is a tensor"),
    "random": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), "aten::dropout"),
    "recurrent": (lambda: nn.Sequential(nn.Linear(4, 4), nn.GRUCell(4, 4)), "aten::gru_cell"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_trace_sees_is_refused_by_name(kind: str) -> None:
    part, why = REFUSED[kind]
    with pytest.raises(irc.UnsupportedError, match=rf"IRC534.*'1' is made by torch.jit.*{why}") as raised:
        planned(model(part), torch.randn(3, 4))
    assert raised.value.help == "use the module that it was made of"
    if kind not in ("state", "list", "dict", "tensors"):  # the cure; of these, Python's state is refused too
        planned(model(part, lambda module: module), torch.randn(3, 4))
