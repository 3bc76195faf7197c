"""Frozen weights in packed form: the numbers of eager, exact bytes, and no plan for other numbers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.packed_models import SCHEMES, Adapted, bitsandbytes, packed_model, torchao
from torch import Tensor, nn

import irc
from irc.compiler.training import measured_peak_bytes
from irc.frontends.torch import capture
from irc.ir import UnsupportedError, parse_graph, print_graph
from irc.torch_support.packed_weights import packed_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(64, 32, dtype=dtype)


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_of(model(x))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def fitted_to(model: nn.Module, x: Tensor, budget: str = "200%") -> Any:
    return irc.optimize(model, (x,), budget, loss=loss_of, costs="analytic")


def plans_of(fitted: nn.Module) -> int:
    return len(fitted.__dict__["_irc"].compiled_plans)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_packed_model_trains_as_in_eager_within_its_budget(scheme: str, dtype: str) -> None:
    model, x = packed_model(scheme, DTYPES[dtype], blocks=2), rows(DTYPES[dtype])
    eager = step(copy.deepcopy(model), x)
    assert len(eager[1]) == 8
    smallest = fitted_to(copy.deepcopy(model), x).plan.minimum_budget_bytes
    fitted = fitted_to(model, x, f"{smallest}B")
    for _ in range(2):
        torch.testing.assert_close(step(fitted, x), eager, rtol=0, atol=0)
    fitted.zero_grad()
    plan = fitted.plan
    assert measured_peak_bytes(fitted, (x,), plan.static_bytes, loss=loss_of) <= plan.peak_bytes
    assert plan.peak_bytes < 0.9 * plan.baseline_peak_bytes


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_are_inputs_with_their_bytes(scheme: str) -> None:
    model, x = packed_model(scheme, blocks=1), rows()
    graph = capture(model, (x,), loss=loss_of).graph
    parts = [part for _, weight in packed_weights(model) for part in weight.parts().values()]
    trained = [p for p in model.parameters() if p.requires_grad]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*parts, *trained, x)}
    assert graph.static_bytes == sum(storages.values())
    named = {(entry.target, entry.part) for entry in graph.inputs}
    assert {("0.base.weight", "data"), ("0.base.weight", "qdata")} & named
    assert print_graph(parse_graph(print_graph(graph))) == print_graph(graph)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_is_as_it_was_after_planning(scheme: str) -> None:
    model, x = packed_model(scheme, blocks=1), rows()
    names, parameters = list(model.state_dict()), list(model.parameters())
    buffers = [name for name, _ in model.named_buffers()]
    fitted = fitted_to(model, x)
    assert list(fitted.state_dict()) == names
    assert all(a is b for a, b in zip(fitted.parameters(), parameters, strict=True))
    assert [name for name, _ in fitted.named_buffers()] == buffers
    with pytest.raises(irc.BudgetError):
        fitted_to(model, x, "1KiB")
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


@pytest.mark.parametrize("scheme", ["nf4, nested", "int8", "torchao int8"])
def test_one_plan_serves_before_and_after_eager_steps_and_copies(scheme: str) -> None:
    model, x = packed_model(scheme), rows()
    fitted = fitted_to(model, x, "80%")
    expected = step(fitted, x)
    torch.testing.assert_close(step(model, x), expected, rtol=0, atol=0)  # eager notes its first forward
    torch.testing.assert_close(step(fitted, x), expected, rtol=0, atol=0)
    copies = [copy.deepcopy(fitted)]
    if not scheme.startswith("torchao"):  # whose layers hold a function that no pickle takes
        copies.append(pickle.loads(pickle.dumps(fitted)))
    for again in copies:
        torch.testing.assert_close(step(again, x), expected, rtol=0, atol=0)
        assert plans_of(again) == 1
    assert plans_of(fitted) == 1


@pytest.mark.parametrize("scheme", ["nf4", "int8", "torchao int8"])
def test_other_weights_of_the_same_form_need_no_plan(scheme: str) -> None:
    model, x = packed_model(scheme), rows()
    fitted = fitted_to(model, x, "80%")
    before = step(fitted, x)[0]
    other = packed_model(scheme)
    for mine, its in zip(model.modules(), other.modules(), strict=True):
        if isinstance(mine, Adapted) and isinstance(its, Adapted):
            mine.base.weight = its.base.weight
    expected = step(copy.deepcopy(model), x)
    torch.testing.assert_close(step(fitted, x), expected, rtol=0, atol=0)
    assert expected[0] != before and plans_of(fitted) == 1


def test_weights_of_another_form_are_planned_for() -> None:
    model, x = packed_model("nf4", blocks=1), rows()
    fitted = fitted_to(model, x)
    first: Any = model[0]
    first.base = SCHEMES["fp4"](32, 64, torch.float32).to("cpu")
    expected = step(copy.deepcopy(model), x)
    torch.testing.assert_close(step(fitted, x), expected, rtol=0, atol=0)
    torchao_base = SCHEMES["torchao int8"](32, 64, torch.float32)
    first.base = torchao_base
    torch.testing.assert_close(step(fitted, x), step(copy.deepcopy(model), x), rtol=0, atol=0)
    first.base.weight = nn.Parameter(torch.randn(64, 32), requires_grad=False)
    torch.testing.assert_close(step(fitted, x), step(copy.deepcopy(model), x), rtol=0, atol=0)
    first.base.weight = torchao_base.weight
    torch.testing.assert_close(step(fitted, x), step(copy.deepcopy(model), x), rtol=0, atol=0)


def test_the_first_forward_decides_the_type_of_products() -> None:
    """As in eager: a later call in another type computes in the first one's."""
    layer: Any = SCHEMES["nf4"](32, 64, torch.float32).to("cpu")
    x, other = rows().requires_grad_(), rows(torch.bfloat16).requires_grad_()
    model = nn.Sequential(layer)
    fitted = fitted_to(model, x)
    fitted(x).sum().backward()
    assert layer.compute_dtype is torch.float32 and layer.compute_type_is_set
    expected = copy.deepcopy(model)(other)
    assert torch.equal(fitted(other), expected)
    assert not torch.equal(SCHEMES["nf4"](32, 64, torch.float32).to("cpu")(other), expected)


def under_autocast(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(x))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("scheme", ["nf4", "int8", "torchao int8", "torchao float8"])
def test_packed_models_train_under_autocast(scheme: str) -> None:
    model, x = packed_model(scheme, blocks=1), rows()
    with torch.autocast("cpu", torch.bfloat16):
        if scheme == "nf4":
            with pytest.raises(UnsupportedError, match=r"IRC335.*computes in torch\.float32 under"):
                fitted_to(copy.deepcopy(model), x)
            for layer in model.modules():
                if isinstance(layer, bitsandbytes.nn.Linear4bit):
                    layer.compute_dtype, layer.compute_type_is_set = torch.bfloat16, True
        fitted = fitted_to(copy.deepcopy(model), x)
    torch.testing.assert_close(under_autocast(fitted, x), under_autocast(model, x), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by Dynamo, of torch's own classes
@pytest.mark.parametrize("scheme", ["nf4", "int8", "torchao int8"])
def test_dynamo_s_graphs_with_packed_weights_train(scheme: str) -> None:
    model, x = packed_model(scheme, blocks=1), rows()
    expected = step(copy.deepcopy(model), x)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend=irc.backend("1GiB"))
    model.zero_grad()
    loss = loss_of(compiled(x))
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close((loss.detach(), found), expected, rtol=0, atol=0)


@pytest.mark.parametrize("scheme", ["nf4, nested", "int8", "torchao int8"])
def test_what_is_written_into_parts_is_seen(scheme: str) -> None:
    model, x = packed_model(scheme, blocks=1), rows()
    fitted = fitted_to(model, x)
    before = step(fitted, x)[0]
    for _, weight in packed_weights(model):
        for name, part in weight.parts().items():
            if name in ("scale", "scales", "nested_absmax"):
                part.mul_(2)
    expected = step(copy.deepcopy(model), x)
    torch.testing.assert_close(step(fitted, x), expected, rtol=0, atol=0)
    assert expected[0] != before and plans_of(fitted) == 1


def test_a_packed_layer_that_casts_its_bias_in_its_first_call_trains() -> None:
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(32, 64, quant_type="nf4", compute_dtype=torch.bfloat16)
    model = Adapted(layer, 32, 64, torch.bfloat16).to("cpu").train()
    layer.bias.requires_grad_(False)  # in float32, as `prepare_model_for_kbit_training` leaves it
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    original = copy.deepcopy(model)
    fitted = irc.optimize(model, (x,), "100%", costs="analytic")
    for module in (fitted, original):
        module(x).square().mean().backward()
    assert torch.equal(model.down.grad, original.down.grad)  # pyright: ignore
    assert torch.equal(model.up.grad, original.up.grad)  # pyright: ignore


def _unpacked() -> nn.Module:
    return bitsandbytes.nn.Linear4bit(32, 64, bias=False)


def _trained() -> nn.Module:
    return bitsandbytes.nn.Linear8bitLt(32, 64, bias=False)


def _trained_by_torchao() -> nn.Module:
    linear = nn.Linear(32, 64, bias=False)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    return linear.requires_grad_(True)


class Other(bitsandbytes.nn.Linear4bit):
    """A layer whose forward is not that of bitsandbytes."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _with_its_own_forward() -> nn.Module:
    return Other(32, 64, bias=False).to("cpu")


@pytest.mark.parametrize("layer", [_unpacked, _trained, _trained_by_torchao, _with_its_own_forward])
def test_other_layers_are_refused(layer: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"IRC531.*no frozen, packed weight"):
        fitted_to(Adapted(layer(), 32, 64, torch.float32), rows())


def test_a_weight_that_an_evaluation_ordered_anew_is_refused() -> None:
    model, x = packed_model("nf4", blocks=1), rows()
    fitted = fitted_to(model, x)
    step(fitted, x)
    held: Any = model[0]
    held.base.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UnsupportedError, match="IRC531"):
        step(fitted, x)
