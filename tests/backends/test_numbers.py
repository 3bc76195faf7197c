"""Numbers among the arguments: which of them are part of the key of a plan; steps are eager's."""

from __future__ import annotations

import copy
import functools
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.torch_cases import Model
from torch import Tensor, nn

import irc
from irc.compiler import captured_call
from irc.compiler import compile as compiler_compile

torch.set_num_threads(1)


class Traces:
    """Counts the captures."""

    count = 0


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    found = Traces()
    capture = compiler_compile.capture

    def counting(*args: Any, **options: Any) -> Any:
        found.count += 1
        return capture(*args, **options)

    for room in (captured_call, compiler_compile):
        monkeypatch.setattr(room, "capture", counting)
    return found


def pair(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The original and the fitted module; the example's keyword arguments are those of the forward."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"costs": "analytic", "strategy": "eviction", "time_limit": 5}
    original = Model(function, lin=nn.Linear(4, 4), label="")
    fitted = irc.optimize(copy.deepcopy(original), args, "1GiB", example_kwargs=kwargs, **options)
    return original, fitted


def bits(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.detach().contiguous().view(torch.uint8).tolist())


def step(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The bits of the outputs and gradients of one step, or the kind of error that it raises."""
    model.zero_grad()
    given = [arg.detach().clone().requires_grad_() if isinstance(arg, Tensor) else arg for arg in args]
    try:
        result = model(*given, **kwargs)
    except (ZeroDivisionError, OverflowError, IndexError, ValueError) as error:
        return [type(error)]
    except RuntimeError as error:
        return [str(error)]
    results = result if isinstance(result, tuple) else (result,)
    tensors = [each for each in results if isinstance(each, Tensor)]
    torch.autograd.backward([each.square().sum() for each in tensors])
    gradients = [p.grad for p in (*model.parameters(), *(g for g in given if isinstance(g, Tensor)))]
    return [
        *map(bits, (*tensors, *gradients)),
        [repr(each) for each in results if not isinstance(each, Tensor)],
    ]


def assert_agree(original: Any, fitted: Any, *args: Any, **kwargs: Any) -> None:
    assert step(fitted, args, kwargs) == step(original, args, kwargs)


X = torch.linspace(-2, 2, 12).view(3, 4).requires_grad_()


# ---------------------------------------------------------------------- numbers that nothing looks at


def unread(m: Any, x: Tensor, t: Any = 0, **_: Any) -> Tensor:
    return torch.tanh(m.lin(x))


def passed_on(m: Any, x: Tensor, t: Any) -> Tensor:
    def inner(x: Tensor, **options: Any) -> Tensor:
        return m.lin(x) * len(options)

    notes = [t, (t, {"t": t})]
    return inner(x, t=t, notes=notes)


def in_list(m: Any, x: Tensor, sizes: list[Any]) -> Tensor:
    return m.lin(x) * sizes[1]["scale"] * len(sizes)


@pytest.mark.parametrize("numbers", [(5, 6, 0, 1, -1, 2**70), (1.5, 0.0, -0.0, math.nan, math.inf)])
@pytest.mark.parametrize("function", [unread, passed_on])
def test_a_number_that_nothing_looks_at_is_no_part_of_the_key(
    function: Callable[..., Any], numbers: Sequence[Any], traces: Traces
) -> None:
    original, fitted = pair(function, X, numbers[0])
    for number in numbers:
        assert_agree(original, fitted, X, number)
    assert traces.count == 1 and len(fitted.irc_plans) == 1


def test_numbers_in_lists_dicts_and_keywords_are_looked_for_one_by_one(traces: Traces) -> None:
    original, fitted = pair(in_list, X, [3, {"scale": 2.0, "label": 7}])
    for label in (8, 9):
        assert_agree(original, fitted, X, [label, {"scale": 2.0, "label": -label}])
    assert traces.count == 1
    for scale in (4.0, 8.0, 0.0):
        assert_agree(original, fitted, X, [3, {"scale": scale, "label": 7}])
    assert traces.count == 1 + 2  # the call, and the call with other numbers
    original, fitted = pair(unread, X, t=1, step=2)
    assert_agree(original, fitted, X, step=3, t=1)
    assert_agree(original, fitted, X, step=4, t=7)
    assert traces.count == 4


class Sizes(NamedTuple):
    count: Any
    label: Any


@dataclass
class Options:
    count: Any
    mask: Any = None


@pytest.mark.parametrize("mask", [None, torch.ones(4)])
def test_numbers_within_other_objects_are_part_of_the_key(mask: Any, traces: Traces) -> None:
    def function(m: Any, x: Tensor, sizes: Any, t: Any) -> Tensor:
        return m.lin(x) * (2 if isinstance(sizes.count, int) else t)

    kept = Options(1)

    def one_object(count: Any) -> Options:
        kept.count = count
        return kept

    of_tensors = one_object if mask is None else lambda count: Options(count, mask)
    for make in (of_tensors, lambda count: Sizes(count, mask)):
        original, fitted = pair(function, X, make(1), 5)
        for count, number in ((1, 6), (2, 6), (1.0, 6), (1.0, 7)):
            assert_agree(original, fitted, X, make(count), number)


def test_numbers_are_looked_for_at_the_same_time_by_threads_and_under_autocast(traces: Traces) -> None:
    original, fitted = pair(unread, X, 0)
    wanted = step(original, (X, 0), {})
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: fitted(X, number).detach(), range(1, 9)))
    assert all(bits(each) == wanted[0] for each in found) and traces.count == 1
    with torch.autocast("cpu", torch.bfloat16):
        for number in (1, 2, 3):
            assert_agree(original, fitted, X, number)
    assert traces.count == 2


def test_another_class_of_number_is_another_call(traces: Traces) -> None:
    original, fitted = pair(unread, X, 1)
    for number in (2, True, 1.0, None, "1"):
        assert_agree(original, fitted, X, number)
    assert traces.count == 5


def test_an_unread_number_counts_for_a_module_with_one_plan() -> None:
    original = Model(unread, lin=nn.Linear(4, 4))
    fitted = irc.optimize(copy.deepcopy(original), (X, 1), "1GiB", costs="analytic", plans=1)
    assert_agree(original, fitted, X, 2)
    with pytest.raises(irc.UsageError, match="IRC501"):
        fitted(X, "2")


def test_looking_for_unread_numbers_runs_nothing_and_leaves_no_traces(traces: Traces) -> None:
    original = Model(lambda m, x, t: m.norm(m.lin(x)), lin=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    fitted = irc.optimize(copy.deepcopy(original), (X, 1), "1GiB", costs="analytic")
    known = {name: dict(vars(module)) for name, module in fitted.named_modules()}
    state = torch.get_rng_state()
    for number in (2, 3):
        assert_agree(original, fitted, X, number)
    assert torch.equal(torch.get_rng_state(), state) and traces.count == 1
    assert fitted.norm.num_batches_tracked == 2
    for name, module in fitted.named_modules():
        assert vars(module).keys() == known[name].keys()
    assert not any(vars(tensor) for tensor in (*fitted.parameters(), *fitted.buffers(), X))


@pytest.mark.parametrize("disabled", ["config", "stance"])
def test_without_dynamo_each_number_is_part_of_the_key(disabled: str, traces: Traces) -> None:
    original, fitted = pair(unread, X, 1)
    if disabled == "config":
        with torch._dynamo.config.patch(disable=True):  # pyright: ignore
            assert_agree(original, fitted, X, 2)
    else:
        with torch.compiler.set_stance("force_eager"):
            assert_agree(original, fitted, X, 2)
    assert traces.count == 2


# ---------------------------------------------------------------------- numbers that enter arithmetic


def scaled(m: Any, x: Tensor, t: Any) -> Tensor:
    return torch.tanh(m.lin(x)) * t + x / t


def warmed_up(m: Any, x: Tensor, t: Any) -> Tensor:
    return (1 - t / 1000) * m.lin(x) + torch.sin(x) * min(1.0, (t + 1) / 10)


def decayed(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * (0.99**t) - x * math.cos(math.pi * t) * (t // 2)


def in_place(m: Any, x: Tensor, t: Any) -> Tensor:
    y = m.lin(x)
    y *= t
    y = y.masked_fill(y.detach() > 1, t).add_(t)
    return torch.add(y, torch.full((4,), t)) * (t - x)


def twice(m: Any, x: Tensor, t: Any) -> Tensor:
    return (m.lin(x) * (t * 2)).to(torch.bfloat16) * (t * 2.0) + x * 2


def in_dropout(m: Any, x: Tensor, t: Any) -> Tensor:
    return nn.functional.dropout(m.lin(x) * t, 0.5)


@pytest.mark.parametrize("numbers", [(5, 6, 7, 1, -3, 10**6, 2), (0.5, 0.25, 1e30, -0.0, 1.0, -7.5, 2.5)])
@pytest.mark.parametrize("function", [scaled, warmed_up, decayed, in_place, in_dropout])
def test_a_number_that_only_enters_arithmetic_is_an_input(
    function: Callable[..., Any], numbers: Sequence[Any], traces: Traces
) -> None:
    original, fitted = pair(function, X, numbers[0])
    for number in numbers:
        torch.manual_seed(1)
        wanted = step(original, (X, number), {})
        torch.manual_seed(1)
        assert step(fitted, (X, number), {}) == wanted
    assert traces.count == 3 and len(fitted.irc_plans) == 2


def test_equal_expressions_of_two_classes_are_two(traces: Traces) -> None:
    original, fitted = pair(twice, X, 5)
    for number in (6, 7, 2**60):
        assert_agree(original, fitted, X, number)
    assert traces.count == 3


def test_a_plan_recomputes_by_the_number_of_its_own_forward(traces: Traces) -> None:
    def chain(m: Any, x: Tensor, t: Any) -> Tensor:
        for _ in range(6):
            x = torch.tanh(m.lin(x) * t)
        return x

    torch.manual_seed(0)
    original = Model(chain, lin=nn.Linear(64, 64))
    x = torch.linspace(-2, 2, 64 * 512).view(512, 64).requires_grad_()
    fitted = irc.optimize(copy.deepcopy(original), (x, 0.5), "85%", costs="analytic")
    assert fitted.irc_plan.overhead > 0
    assert_agree(original, fitted, x, 0.25)
    found = [model(x, t) for t in (0.3, 0.7) for model in (original, fitted)]
    for model in (original, fitted):
        model.zero_grad()
    for result in found:  # the second forward ran before the first backward
        result.square().sum().backward()
    for mine, its in zip(original.parameters(), fitted.parameters(), strict=True):
        assert bits(mine.grad) == bits(its.grad)
    assert traces.count == 3


def test_a_number_that_enters_and_one_that_decides_are_told_apart(traces: Traces) -> None:
    def both(m: Any, x: Tensor, t: Any, k: Any) -> Tensor:
        return m.lin(x) * t if k > 2 else m.lin(x) + t

    original, fitted = pair(both, X, 0.5, 1)
    for t, k in ((0.75, 1), (0.1, 1), (0.2, 5), (0.3, 5), (0.4, 1)):
        assert_agree(original, fitted, X, t, k)
    assert traces.count == 1 + 2 + 2


def test_each_shape_is_planned_once_for_all_numbers(traces: Traces) -> None:
    original, fitted = pair(scaled, X, 0.5)
    for x in (X, X[:2]):
        for number in (0.25, 0.75, 0.125):
            assert_agree(original, fitted, x, number)
    assert traces.count == 1 + 2 + 2


def test_a_number_that_an_expression_refuses_raises_as_in_the_original() -> None:
    original, fitted = pair(scaled, X, 2)
    assert_agree(original, fitted, X, 4)
    assert_agree(original, fitted, X, 2**70)
    _, fitted = pair(lambda m, x, t: m.lin(x) * math.sqrt(t), X, 2.0)
    fitted(X, 3.0)
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        fitted(X, -1.0)


def test_copies_and_pickles_keep_a_plan_for_all_numbers(traces: Traces) -> None:
    original, fitted = pair(scaled, X, 0.5)
    fitted(X, 0.25)
    count = traces.count
    for other in (copy.deepcopy(fitted), fitted):
        for number in (0.1, 0.2):
            assert_agree(original, other, X, number)
    assert traces.count == count


def as_text(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * float(f"{t:.1f}") + x * t


def as_constant(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * torch.tensor([t, 1.0])[0]


def as_zero(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * torch.tensor(float(t)) * torch.full((), 2.0)


def as_exponent(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) ** t


def as_alpha(m: Any, x: Tensor, t: Any) -> Tensor:
    return torch.add(m.lin(x), x, alpha=t)


def as_rate(m: Any, x: Tensor, t: Any) -> Tensor:
    return nn.functional.dropout(m.lin(x), min(t * 0.1, 0.9))


def by_rounding(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * (2 if (t + 1e-20) - t else 3)


def by_whole_part(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * [2.0, 3.0, 4.0][int((t + 1.0) - t)]


def by_difference(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * (2 if t * 3 - t - t - t == 0 else 3)


def dead(m: Any, x: Tensor, t: Any) -> Tensor:
    _ = x * (1 / (t - 0.75))
    return m.lin(x) * t


def dead_number(m: Any, x: Tensor, t: Any) -> Tensor:
    _ = 1 / (t - 0.75)
    return m.lin(x) * t


@pytest.mark.parametrize(
    "function",
    [
        *(
            as_text,
            as_constant,
            as_zero,
            as_exponent,
            as_alpha,
            as_rate,
            by_rounding,
            by_whole_part,
            by_difference,
            dead,
            dead_number,
        ),
    ],
)
def test_other_uses_of_a_number_are_no_inputs(function: Callable[..., Any]) -> None:
    original, fitted = pair(function, X, 0.5)
    for number in (0.25, 0.5, 1.0, 2.0, 1e17, 3.0, 0.0, -0.0):
        torch.manual_seed(1)
        wanted = step(original, (X, number), {})
        torch.manual_seed(1)
        assert step(fitted, (X, number), {}) == wanted


@pytest.mark.parametrize("function", [dead, dead_number])
def test_a_number_whose_result_is_dropped_raises_as_in_the_original(function: Callable[..., Any]) -> None:
    _, fitted = pair(function, X, 0.5)
    fitted(X, 0.25)
    with pytest.raises(ZeroDivisionError):
        fitted(X, 0.75)


# ---------------------------------------------------------------------- numbers that decide


def by_branch(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) if t > 3 else m.lin(x) * 2


def by_class_and_value(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * (2 if isinstance(t, int) and t == 5 else 3)


def by_identity(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * (2 if t is SENTINEL else 3)


def by_identity_of_operator(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * (2 if operator.is_(t, SENTINEL) else 3)


SENTINEL = 7


def by_index(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0][t]


def by_dict(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * {5: 1.5, 6: 2.5}.get(t, 4.0)


def by_range(m: Any, x: Tensor, t: Any) -> Tensor:
    for _ in range(t):
        x = m.lin(x)
    return m.lin(x)


def by_shape(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x)[:, : max(t - 4, 1)]


def by_text(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * len(f"{t}" * 2)


def by_truth(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) if t else x * 2


def by_membership(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * (2 if t in (6, 7) else 3)


def by_sum(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * sum([t, 1])


def by_comparison_of_lists(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * (2 if [t, 1] == [6, 1] else 3)


@functools.lru_cache
def _scale(t: Any) -> float:
    return t * 0.5


def by_cache(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * _scale(t)


def by_tensor(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * torch.tensor([float(t)] * 4)


def by_closure(m: Any, x: Tensor, t: Any) -> Tensor:
    y = torch.tanh(m.lin(x))
    y.register_hook(lambda gradient: gradient * t)
    return y


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.t = t
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * ctx.t, None


def by_backward(m: Any, x: Tensor, t: Any) -> Tensor:
    return _Scaled.apply(m.lin(x), t)  # pyright: ignore[reportReturnType]


def returned(m: Any, x: Tensor, t: Any) -> Any:
    return m.lin(x), t


def returned_in_text(m: Any, x: Tensor, t: Any) -> Any:
    return m.lin(x), f"step {t}"


def by_compiling(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) if torch.compiler.is_compiling() else m.lin(x) * t


def by_dynamo(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) if torch.compiler.is_dynamo_compiling() else m.lin(x) * (t + 1)


def by_exception(m: Any, x: Tensor, t: Any) -> Tensor:
    try:
        return m.lin(x) * (1 / (t - 6))
    except ZeroDivisionError:
        return m.lin(x)


DECIDING = [
    *(
        by_branch,
        by_class_and_value,
        by_identity,
        by_identity_of_operator,
        by_index,
        by_dict,
        by_range,
        by_shape,
    ),
    *(by_text, by_truth, by_membership, by_sum, by_comparison_of_lists, by_cache, by_tensor, by_closure),
    *(by_backward, returned, returned_in_text, by_compiling, by_dynamo, by_exception),
]


@pytest.mark.parametrize("function", DECIDING)
def test_a_number_that_decides_gives_the_original_s_numbers(function: Callable[..., Any]) -> None:
    original, fitted = pair(function, X, 5)
    for number in (6, 7, 5, 0, 1, 6):
        assert_agree(original, fitted, X, number)


def by_set(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * (2 if t in {6, 7} else 3)


def by_match(m: Any, x: Tensor, t: Any) -> Tensor:
    match [t]:
        case [6]:
            return m.lin(x) * 2
        case [n]:
            return m.lin(x) * (n is t) * 3
        case _:
            return x


def by_attribute(m: Any, x: Tensor, t: Any) -> Tensor:
    holder = Sizes(t, t)
    return m.lin(x) * (2 if holder == (6, 6) else 3)


def by_sorting(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * sorted([6, t])[0] * [6, t].count(6) * divmod(t, 3)[1]


def by_bits(m: Any, x: Tensor, t: Any) -> Tensor:
    return m.lin(x) * (t & 1) * (t >> 1) * t.bit_length()


@pytest.mark.parametrize(
    "function",
    [
        by_match,
        by_bits,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (*DECIDING, by_set, by_attribute, by_sorting)),
    ],
)
def test_a_number_that_decides_and_enters_gives_the_original_s_numbers(function: Callable[..., Any]) -> None:
    def both(m: Any, x: Tensor, t: Any) -> Any:
        found = function(m, x * t, t)
        return (found if isinstance(found, Tensor) else found[0]) * t + x

    original, fitted = pair(both, X, 5)
    for number in (6, 7, 5, 0, 1, 6, 300):
        if number == 300 and function is by_range:
            continue
        assert_agree_or_raise(original, fitted, X, number)


def assert_agree_or_raise(original: Any, fitted: Any, *args: Any) -> None:
    """Checks one step, which raises what the original raises."""
    try:
        wanted = step(original, args, {})
    except (AttributeError, KeyError) as error:
        with pytest.raises(type(error)):
            step(fitted, args, {})
    else:
        assert step(fitted, args, {}) == wanted


def test_a_number_that_the_forward_stores_is_part_of_the_key() -> None:
    def storing(m: Any, x: Tensor, t: Any) -> Tensor:
        m.label = t
        return m.lin(x)

    original = Model(storing, lin=nn.Linear(4, 4), label=5)
    fitted = irc.optimize(copy.deepcopy(original), (X, 5), "1GiB", costs="analytic")
    for number in (5, 6, 7, 6, 0.5, True):
        assert_agree(original, fitted, X, number)
        assert type(fitted.label) is type(number) and fitted.label == original.label == number


# ---------------------------------------------------------------------- any program


class Code(NamedTuple):
    text: str
    runs: list[tuple[Any, Any]]


NUMBERS = st.sampled_from((0, 1, 2, 3, 5, -1, 300, 0.0, -0.0, 0.5, 1.0, 3.0, 1e300))
TERMS = st.sampled_from(("a", "b", "2", "0.5", "len(x)"))
EXPRESSIONS = st.recursive(
    TERMS,
    lambda inner: (
        st.tuples(st.sampled_from(("+", "-", "*", "/", "//", "%")), inner, inner).map(
            lambda e: f"({e[1]} {e[0]} {e[2]})"
        )
        | st.tuples(st.sampled_from(("min", "max")), inner, inner).map(lambda e: f"{e[0]}({e[1]}, {e[2]})")
        | st.tuples(st.sampled_from(("math.cos", "math.tanh", "int", "round")), inner).map(
            lambda e: f"{e[0]}({e[1]})"
        )
        | inner.map(lambda e: f"float('%.1f' % {e})")
        | st.sampled_from(("float(f'{a:.1f}')", "float(f'{b:.1f}')"))
        | inner.map(lambda e: f"(-{e})")
        | inner.map(lambda e: f"float({e})")
        | inner.map(lambda e: f"abs({e})")
    ),
    max_leaves=4,
)
CONDITIONS = st.tuples(EXPRESSIONS, st.sampled_from(("<", "==", "!=", ">=", "is")), EXPRESSIONS).map(
    lambda c: f"{c[0]} {c[1]} {c[2]}"
) | st.sampled_from(
    ("isinstance(a, int)", "type(b) is float", "a is None", "a", "not b", "a is b", "a in (1, 2)")
)
SIMPLE = (
    EXPRESSIONS.map(lambda e: f"x = x * {e}")
    | EXPRESSIONS.map(lambda e: f"x = {e} - x")
    | EXPRESSIONS.map(lambda e: f"x = x + {e}")
    | EXPRESSIONS.map(lambda e: f"x = x / {e}")
    | EXPRESSIONS.map(lambda e: f"x = x ** {e}")
    | EXPRESSIONS.map(lambda e: f"x += {e}")
    | EXPRESSIONS.map(lambda e: f"a = {e}")
    | st.sampled_from(("x = torch.tanh(m.lin(x))", "x = x * [1.5, 2.5, 3.5][int(b) % 3]", "a, b = b, a"))
    | st.sampled_from(("b = 1", "for _ in range(int(a) % 3): x = torch.sin(x)", "x = x.clamp(max=b)"))
    | st.sampled_from(("x = x.add(m.lin(x), alpha=a)", "x = x * torch.tensor(float(b))", "_ = 1 / a"))
)
STATEMENTS = SIMPLE.map(lambda s: [s]) | st.tuples(CONDITIONS, SIMPLE, SIMPLE).map(
    lambda b: [f"if {b[0]}:", f"    {b[1]}", "else:", f"    {b[2]}"]
)


@st.composite
def codes(draw: st.DrawFn) -> Code:
    lines = [line for block in draw(st.lists(STATEMENTS, min_size=1, max_size=4)) for line in block]
    body = ["x = m.lin(x)", *lines, "return torch.tanh(x)"]
    text = "\n".join(["def forward(m, x, a, b):", *(f"    {line}" for line in body)])
    return Code(text, draw(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=3, max_size=5)))


@pytest.mark.slow
@examples(60)
@given(codes())
def test_programs_of_numbers_give_the_original_s_numbers(code: Code) -> None:
    namespace: dict[str, Any] = {"torch": torch, "math": math}
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
        exec(code.text, namespace)
    try:
        original, fitted = pair(namespace["forward"], X, *code.runs[0])
    except irc.IrcError:
        return
    for numbers in code.runs:
        try:
            found = step(fitted, (X, *numbers), {})
        except irc.IrcError:
            continue
        assert found == step(original, (X, *numbers), {})


def decides_if_compiled(m: Any, x: Tensor, mask: Tensor, count: int, t: int) -> Tensor:
    """Gives the same either way: `count` is the sum of the mask."""
    y = m.lin(x)
    if t < 6:
        return y * 1.0
    return y / count if torch.compiler.is_compiling() else y / y[mask.detach() > 0].numel()


def test_a_proof_is_for_plans_of_the_same_answers_alone() -> None:
    """The number decides only where the model is told that it is compiled, as in the next plan's capture."""
    masks = [(torch.arange(12).view(3, 4) < count).float() for count in range(8)]
    original, fitted = pair(decides_if_compiled, X, masks[3], 3, 5)
    for count, t in ((3, 5), (3, 6), (4, 6), (7, 6)):
        assert_agree(original, fitted, X, masks[count], count, t)
