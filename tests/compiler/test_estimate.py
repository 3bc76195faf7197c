"""Estimates: never under what a run takes, taken apart by kind, and made without weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import irc
from irc.compiler.case import Case
from irc.compiler.estimate.estimate import items_of
from irc.compiler.estimate.hf_config import step_of_config
from irc.compiler.estimate.lora import Lora, parse_train
from irc.compiler.model_source import training_loss
from irc.compiler.optimizers import parse_optimizer
from irc.compiler.request import Request
from irc.compiler.training import measured_peak_bytes
from irc.ir import DType, Storage, TensorType, UsageError, Value
from irc.passes.costs.optimizer_costs import extrapolated_step_costs, step_costs

WORDS = 60


class Language(nn.Module):
    """Tokens to logits to a loss."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def tokens() -> Tensor:
    return torch.zeros(8, 32, dtype=torch.long)


def config(folder: Path, **more: Any) -> Path:
    data = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        **{"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 100, "n_positions": 64},
        **{"bos_token_id": 0, "eos_token_id": 0},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(data | more))
    return path


# ---------------------------------------------------------------------- against runs


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_a_step_as_written_is_predicted(has_optimizer: bool) -> None:
    model, ids = Language(), tokens()
    found = irc.estimate(model, ids, machine="measured", optimizer=adamw if has_optimizer else None)
    optimizer = adamw(list(model.parameters())) if has_optimizer else None
    model(ids).backward()
    state_bytes = 0
    if optimizer is not None:
        optimizer.step()
        state_bytes = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    static_bytes = sum(parameter.nbytes for parameter in model.parameters()) + ids.nbytes
    measured = measured_peak_bytes(model, (ids,), static_bytes + state_bytes, optimizer=optimizer)
    assert measured <= found.written.peak_bytes <= measured * 1.02 + 4096


def test_the_plan_holds_when_it_runs() -> None:
    model, ids = Language(), tokens()
    whole = irc.estimate(model, ids, machine="measured", budget="100%")
    assert whole.plan is not None
    budget = (whole.minimum_bytes + whole.plan.peak_bytes) // 2
    found = irc.estimate(model, ids, machine="measured", budget=budget)
    fitted = irc.optimize(model, ids, budget)
    assert found.plan is not None and found.plan.peak_bytes == fitted.plan.peak_bytes
    assert measured_peak_bytes(fitted, (ids,), fitted.plan.static_bytes) <= found.plan.peak_bytes


# ---------------------------------------------------------------------- what it says


def test_kinds_add_up_and_logits_are_told_apart() -> None:
    found = irc.estimate(Language(), tokens(), machine="cpu", optimizer=adamw)
    assert found.planned is not None and found.plan is not None
    for use in (found.written, found.planned):
        assert sum(use.kinds.values()) == use.peak_bytes
        assert use.kinds["parameters"] == found.parameters * 4
    assert found.planned.peak_bytes == found.plan.peak_bytes
    assert found.planned.kinds["optimizer state"] >= 2 * 4 * found.parameters
    assert found.planned.kinds["logits"] >= 8 * 32 * WORDS * 4
    assert (found.items, found.unit) == (8 * 32, "tokens") and found.items_per_second > 0


def test_what_a_machine_has_is_the_budget_unless_one_is_given() -> None:
    found = irc.estimate(Language(), tokens(), machine="h100")
    assert found.budget_bytes == int((80 << 30) * 0.95) and found.fits
    refused = irc.estimate(Language(), tokens(), machine="h100", budget=1000)
    assert not refused.fits and refused.why_not.startswith("a training step needs")
    assert refused.minimum_bytes > refused.budget_bytes == 1000 and refused.items_per_second == 0
    data = refused.to_json()
    assert data["fits"] is False and data["planned"] is None and "none: " in refused.summary()
    assert json.loads(json.dumps(found.to_json()))["planned"]["overhead"] == 0


def test_a_percentage_is_of_the_baseline_also_where_nothing_fits() -> None:
    whole = irc.estimate(Language(), tokens(), machine="cpu", budget="100%")
    refused = irc.estimate(Language(), tokens(), machine="cpu", budget="1%")
    assert whole.plan is not None and not refused.fits
    assert refused.budget_bytes == whole.plan.baseline_peak_bytes // 100


@pytest.mark.parametrize("ids", [torch.zeros(4, 6, dtype=dtype) for dtype in (torch.int64, torch.int32)])
def test_tokens_are_counted_whatever_comes_first(ids: Tensor) -> None:
    scale, mask, lengths = torch.ones(2, 3), torch.ones(4, 6), torch.ones(4, dtype=torch.long)
    assert items_of((scale, ids), {}) == items_of((), {"a": (mask, lengths), "b": ids}) == (24, "tokens")
    assert items_of((scale,), {"lengths": lengths}) == (2, "samples")


def test_half_precision_computes_by_matrix_units() -> None:
    model, x = nn.Linear(512, 512), torch.randn(4096, 512, requires_grad=True)
    full = irc.estimate(model, x, machine="h100").step_seconds
    half = irc.estimate(model.bfloat16(), x.detach().bfloat16(), machine="h100").step_seconds
    assert half < full / 2


# ---------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd:lr=0.1,momentum=0.9"])
def test_steps_of_large_parameters_are_extrapolated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factory = parse_optimizer(name)
    kinds = [TensorType.contiguous(shape, DType.FLOAT32) for shape in ((96, 32), (64,), (8, 4, 4))]
    exact = step_costs(factory, [Value("p", kind, Storage("p", kind.nbytes)) for kind in kinds]).values()
    monkeypatch.setattr("irc.passes.costs.optimizer_costs._LARGE_BYTES", 2048)
    found = extrapolated_step_costs(factory, kinds).values()
    for known, guessed in zip(exact, found, strict=True):
        assert known.state_bytes <= guessed.state_bytes <= known.state_bytes + 512
        assert guessed.workspace_bytes == pytest.approx(known.workspace_bytes, abs=1024)


@pytest.mark.parametrize(
    ("machine", "foreach", "at_once"),
    [("h100", None, True), ("h100", False, False), ("cpu", None, False), ("cpu", True, True)],
)
def test_steps_of_all_tensors_at_once_take_memory_at_once(
    machine: str, foreach: bool | None, at_once: bool
) -> None:
    """The roots that AdamW divides by: of each parameter in turn, or one of each after backward."""

    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, foreach=foreach)

    model = Language(width=128)
    found = irc.estimate(model, torch.zeros(1, 4, dtype=torch.long), machine=machine, optimizer=factory)
    all_bytes, workspace_bytes = found.written.kinds["parameters"], found.written.kinds["workspaces"]
    assert (all_bytes <= workspace_bytes <= all_bytes + 8192) == at_once


# ---------------------------------------------------------------------- without data


def test_a_model_on_meta_is_captured_as_on_the_cpu() -> None:
    graphs = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model, ids = Language(), tokens()
        graphs.append(Case.of(model, (ids,), {}, Request.of("100%", costs="cpu")).captured.graph)
    real, meta = graphs
    assert [node.op for node in real.nodes] == [node.op for node in meta.nodes]
    assert [o.target for o in real.outputs if o.value] == [o.target for o in meta.outputs if o.value]


@pytest.mark.parametrize("is_meta", [True, False])
def test_a_plan_without_weights_can_be_saved_and_asks_for_them(is_meta: bool) -> None:
    with torch.device("meta") if is_meta else FakeTensorMode():
        model, ids = Language(), tokens()
    fitted = irc.optimize(model, ids, "100%", costs="cpu")
    assert irc.Plan.from_json(json.loads(json.dumps(fitted.plan.to_json()))) == fitted.plan
    for given in (ids, tokens()):
        with pytest.raises(UsageError, match=r"IRC527.*without weights.*embedding\.weight"):
            fitted(given)
    if not is_meta:
        return
    fitted.to_empty(device="cpu")
    fitted.load_state_dict(Language().state_dict())
    assert torch.isfinite(fitted(tokens()))


# ---------------------------------------------------------------------- configurations


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, Lora(4), Lora(4, in_four_bits=True)])
def test_a_configuration_is_estimated_as_its_model(tmp_path: Path, lora: Lora | None) -> None:
    path = config(tmp_path)
    module, batch = step_of_config(path, batch=2, sequence=16, lora=lora)
    real, example = step_of_config(path, batch=2, sequence=16, lora=lora, has_data=True)
    found = irc.estimate(module, (), example_kwargs=batch, machine="cpu", budget="100%")
    same = irc.estimate(real, (), example_kwargs=example, machine="cpu", budget="100%")
    assert found.plan is not None and same.plan is not None
    assert found.written == same.written and found.planned == same.planned
    assert (found.trained < found.parameters) == (lora is not None)
    assert training_loss(real(**example)).isfinite()


def test_weights_in_4_bits_need_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UsageError, match=r"IRC587.*cannot be imported"):
        step_of_config(config(tmp_path), batch=2, sequence=16, lora=Lora(4, in_four_bits=True))


def test_the_older_name_of_the_element_type_is_read(tmp_path: Path) -> None:
    module, _ = step_of_config(config(tmp_path, torch_dtype="bfloat16"), batch=1, sequence=16)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model_type": "no-such-model"}, "IRC581.*describes no model"),
        ({"model_type": 3}, "IRC581.*names no model_type"),
        ({"architectures": ["os"]}, "IRC582"),
        ({"architectures": ["__class__ForCausalLM"]}, "IRC582"),
        ({"architectures": ["GPT2Model"]}, "IRC582.*no batch is known"),
        ({"n_head": 5}, "IRC584.*cannot be made"),
        ({"n_positions": 8}, "IRC586.*8 positions"),
        ({"dtype": "int4"}, "IRC581.*int4"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        step_of_config(config(tmp_path, **more), batch=1, sequence=16)


TINY = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50}
BERT = {"model_type": "bert", "intermediate_size": 16, **TINY}


@pytest.mark.parametrize(
    ("more", "longest"),
    [
        ({"model_type": "opt", "architectures": ["OPTForCausalLM"], "ffn_dim": 16, **TINY}, 10),
        (BERT | {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, 10 - 2),
        (BERT | {"architectures": ["BertForMaskedLM"]}, 10),
    ],
)
def test_the_longest_row_fills_the_positions(tmp_path: Path, more: dict[str, Any], longest: int) -> None:
    path = config(tmp_path, max_position_embeddings=10, **more)
    module, batch = step_of_config(path, batch=2, has_data=True)
    assert batch["input_ids"].shape == (2, longest)
    module(**batch).backward()
    with pytest.raises((IndexError, RuntimeError)):
        module(**{name: torch.zeros(2, longest + 1, dtype=torch.long) for name in batch})
    with pytest.raises(UsageError, match=f"IRC586.*{longest} positions"):
        step_of_config(path, batch=2, sequence=longest + 1)


T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("more", "head"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **T5}, set[str]()),
        (BERT | {"architectures": ["BertForSequenceClassification"]}, {"classifier"}),
    ],
)
def test_adapters_and_the_heads_of_classifiers_are_trained(
    tmp_path: Path, more: dict[str, Any], head: set[str]
) -> None:
    module, batch = step_of_config(config(tmp_path, **more), batch=2, sequence=8, lora=Lora(2), has_data=True)
    module(**batch).backward()
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    assert {
        name.split(".")[1]
        for name in trained
        if "." in name and not name.endswith(("up.weight", "down.weight"))
    } == head
    assert len(trained) > 8


def test_code_that_a_configuration_names_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "modeling.py").write_text(f"open({str(mark)!r}, 'w')")
    path = config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.C"})
    step_of_config(path, batch=1, sequence=16)
    assert not mark.exists()


@pytest.mark.parametrize(
    "more",
    [
        {"text_config": {"model_type": "trocr", "auto_map": {"AutoModel": "modeling.Model"}}},
        {"extra": [{"model_type": "swin", "auto_map": {"AutoBackbone": "modeling.Model"}}]},
        {
            "timm_kwargs": {"trust_remote_code": True},
            "sub": {"attribute_map": {"timm_kwargs": "attribute_map"}},
        },
        {"model_type": "timm_wrapper"},
    ],
)
def test_models_within_a_model_are_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    """Their configurations can name code in ways that transformers follows without a word."""
    with pytest.raises(UsageError, match=r"IRC582.*several models"):
        step_of_config(config(tmp_path, **more), batch=1, sequence=16)


def test_no_code_is_loaded_and_no_hub_is_asked_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants
    from transformers import GPT2LMHeadModel, dynamic_module_utils

    seen: list[bool] = []

    def made_with_code(*args: Any, **options: Any) -> Any:
        seen.append(bool(constants.HF_HUB_OFFLINE))
        dynamic_module_utils.get_class_from_dynamic_module("modeling.Model", str(tmp_path))

    before = torch.get_default_dtype(), constants.HF_HUB_OFFLINE
    monkeypatch.setattr(GPT2LMHeadModel, "_from_config", made_with_code)
    with pytest.raises(UsageError, match=r"IRC584.*it refers to code, which is not run"):
        step_of_config(config(tmp_path), batch=1, sequence=16, dtype="bfloat16")
    assert seen == [True] and before == (torch.get_default_dtype(), constants.HF_HUB_OFFLINE)


@pytest.mark.parametrize(
    "more", [{"num_labels": 50_000_000}, {"num_hidden_layers": 10_000_000}, {"to_dict": 1}]
)
def test_entries_that_cannot_be_are_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"IRC581.*cannot be"):
        step_of_config(config(tmp_path, **more), batch=1, sequence=16)


def test_a_configuration_without_architectures_is_a_language_model(tmp_path: Path) -> None:
    module, _ = step_of_config(config(tmp_path, architectures=None), batch=1, sequence=16)
    assert "GPT2LMHeadModel" in str(module)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": null}', "[" * 100_000])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for place in (path, tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="IRC581"):
            step_of_config(place, batch=1, sequence=16)


@pytest.mark.parametrize(
    "text", ["", "lora", "lora:r=", "lora:r=0", "lora:r=x", "lora:r=-1", "lora:r=²", "qlora"]
)
def test_what_is_trained_is_full_or_adapters(text: str) -> None:
    assert parse_train("full") is None and parse_train("lora:r=16") == Lora(16)
    assert parse_train("qlora:r=8") == Lora(8, in_four_bits=True)
    with pytest.raises(UsageError, match="IRC580"):
        parse_train(text)
