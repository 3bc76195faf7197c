"""Estimates against runs: models built from configurations, their memory and time predicted and measured.

    python -m benchmarks.estimates
    python -m benchmarks.estimates --models gpt2,llama-lora --markdown docs/results/estimates.md

Each model is estimated without weights: with operations measured on this machine, and by the roofline of this
machine. Then it is built and run on the CPU: a step as its user writes it, with AdamW after backward, and one
by irc's plan for a tight budget with AdamW within backward. Exit status 1: a measured peak is over the
predicted one, or a prediction by measured operations is more than 0.5% too high.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from irc.compiler.estimate.estimate import estimate
from irc.compiler.estimate.hf_config import step_of_config
from irc.compiler.estimate.largest_batch import Step, search_largest
from irc.compiler.estimate.lora import Lora
from irc.compiler.model_source import training_loss
from irc.compiler.optimize import optimize
from irc.compiler.request import Request
from irc.compiler.training import measured_peak_bytes
from irc.ir import UsageError, format_bytes
from irc.passes.costs.optimizer_costs import optimizer_of
from irc.passes.costs.this_machine import measure_machine, store

from .command import chosen, parser_of, run_command, run_tasks
from .harness import hardware
from .pages import to_markdown

__all__ = ["CONFIGS", "Result", "main"]

_MOST_OVER = 0.005
_PARTS = 3
"""The plan is made for the smallest budget and this part of what keeping all takes beyond it."""

_STEPS = 5
_SEARCH_SECONDS = 5.0
_FORM = "irc-bench-estimates-1"


@dataclass(frozen=True)
class _Model:
    """A configuration with its batch."""

    config: Mapping[str, Any]
    batch: int = 4
    sequence: int | None = 128
    lora: Lora | None = None


def _llama(kind: str, architecture: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "architectures": [architecture],
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4000,
        "max_position_embeddings": 512,
        **more,
    }


def _encoder(kind: str, architecture: str, **more: Any) -> dict[str, Any]:
    base = _llama(kind, architecture, intermediate_size=1024, num_key_value_heads=4)
    return {**base, **more}


_GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    **{"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 4000, "n_positions": 512},
}

CONFIGS: dict[str, _Model] = {
    "llama": _Model(_llama("llama", "LlamaForCausalLM")),
    "llama-lora": _Model(_llama("llama", "LlamaForCausalLM"), lora=Lora(8)),
    "llama-bf16": _Model(_llama("llama", "LlamaForCausalLM", dtype="bfloat16")),
    "mistral": _Model(_llama("mistral", "MistralForCausalLM")),
    "qwen2": _Model(_llama("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True)),
    "gemma": _Model(_llama("gemma", "GemmaForCausalLM", head_dim=64)),
    "gpt2": _Model(_GPT2),
    "gpt2-lora": _Model(_GPT2, lora=Lora(8)),
    "bert": _Model(_encoder("bert", "BertForMaskedLM")),
    "bert-classes": _Model(_encoder("bert", "BertForSequenceClassification")),
    "t5": _Model(
        {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "decoder_start_token_id": 0,
            **{"d_model": 256, "d_ff": 1024, "d_kv": 64, "num_heads": 4, "num_layers": 2, "vocab_size": 4000},
        }
    ),
    "vit": _Model(
        _encoder("vit", "ViTForImageClassification", image_size=64, patch_size=8, num_channels=3),
        batch=8,
        sequence=None,
    ),
}
"""Twelve models at a size that runs on a CPU in seconds."""


@dataclass(frozen=True)
class Result:
    """One model, predicted and measured.

    Args:
        model: The model's name.
        way: `written`, `planned`, or the largest batch within twice what one row takes.
        predicted_bytes: The peak, by operations measured on this machine.
        described_bytes: The peak by the roofline, whose workspaces are upper bounds; 0 for a plan, which is
            another one by the roofline.
        measured_bytes: The peak of a run.
        roofline_seconds: The time of the step by the roofline of this machine; 0 for the largest batch.
        measured_seconds: The median time of a run's steps.
    """

    model: str
    way: str
    predicted_bytes: int
    described_bytes: int
    measured_bytes: int
    roofline_seconds: float
    measured_seconds: float

    @property
    def over(self) -> float:
        """How far the prediction by measured operations is over the run, as a part of that."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def has_failed(self) -> bool:
        """Whether the prediction is under the run, or too far over it."""
        return not 0 <= self.over <= _MOST_OVER or 0 < self.described_bytes < self.measured_bytes

    @property
    def slowness(self) -> float:
        """The measured time, in times of the roofline's."""
        return self.measured_seconds / self.roofline_seconds

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        return (
            self.model,
            self.way,
            format_bytes(self.measured_bytes),
            f"{self.over:+.3%}",
            f"{self.described_bytes / self.measured_bytes - 1:+.1%}" if self.described_bytes else "",
            f"{1e3 * self.measured_seconds:.0f} ms",
            f"{self.slowness:.2f}" if self.roofline_seconds else "",
            "failed" if self.has_failed else "holds",
        )


_HEADER = (
    "model",
    "step",
    "measured peak",
    "predicted, by measured operations",
    "by the roofline",
    "measured time",
    "in times of the roofline's",
    "",
)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _results(name: str, machine: str) -> list[Result]:
    """Estimates a model, and runs it."""
    model = CONFIGS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(model.config))
        sizes: dict[str, Any] = {"batch": model.batch, "sequence": model.sequence, "lora": model.lora}
        module, batch = step_of_config(path, **sizes)
        whole = estimate(
            module, (), example_kwargs=batch, machine="measured", budget="100%", optimizer=_adamw
        )
        most = whole.plan.peak_bytes if whole.plan is not None else whole.minimum_bytes
        budget = whole.minimum_bytes + (most - whole.minimum_bytes) // _PARTS
        found = {
            source: estimate(
                module, (), example_kwargs=batch, machine=source, budget=budget, optimizer=_adamw
            )
            for source in ("measured", machine)
        }
        torch.manual_seed(0)
        real, example = step_of_config(path, **sizes, has_data=True)
    example = {key: _drawn(tensor, model) for key, tensor in example.items()}
    written = copy.deepcopy(real)
    optimizer = optimizer_of(_adamw, [p for p in written.parameters() if p.requires_grad])
    _step(written, example)
    optimizer.step()
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor))
    static = sum(t.nbytes for t in {*written.parameters(), *written.buffers(), *example.values()})
    peak = measured_peak_bytes(written, (), static + state, keywords=example, optimizer=optimizer)
    rows = [
        Result(
            name,
            "written",
            found["measured"].written.peak_bytes,
            found[machine].written.peak_bytes,
            peak,
            _seconds_of(found[machine]),
            _median_seconds(written, example, optimizer),
        )
    ]
    plan = found["measured"].plan
    assert plan is not None
    fitted = optimize(
        real, (), budget=plan.budget_bytes, example_kwargs=example, optimizer_in_backward=_adamw
    )
    measured = measured_peak_bytes(fitted, (), fitted.plan.static_bytes, keywords=example)
    described = found[machine].plan
    rows.append(
        Result(
            name,
            "planned",
            fitted.plan.peak_bytes,
            0,
            measured,
            _seconds_of(found[machine]) * (1 + (0 if described is None else described.overhead)),
            _median_seconds(fitted, example, None),
        )
    )
    return [*rows, _largest(name)]


def _largest(name: str) -> Result:
    """Finds the largest batch of a model within a budget, and runs it; one more is refused.

    Raises:
        UsageError: IRC452 if the next size was not refused.
    """
    model = CONFIGS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(model.config))

        def step(size: int) -> Step:
            torch.manual_seed(0)
            module, example = step_of_config(
                path, batch=size, sequence=model.sequence, lora=model.lora, has_data=True
            )
            return module, (), example

        module, _, example = step(1)
        written = estimate(module, (), example_kwargs=example, machine="cpu", budget="100%").written
        request = Request.of(2 * written.peak_bytes, loss=training_loss, time_limit=_SEARCH_SECONDS)
        found = search_largest(step, request, axis="batch", measure=True)
    assert found.plan is not None and found.measured_peak_bytes is not None
    assert found.measured_per_second is not None
    after = next((trial for trial in found.trials if trial.size == found.size + 1), None)
    if after is None or after.overhead is not None:
        raise UsageError("IRC452", f"{name}: a batch of {found.size + 1} was not refused")
    return Result(
        name,
        f"largest batch, {found.size}",
        found.plan.peak_bytes,
        0,
        found.measured_peak_bytes,
        0.0,
        found.size * (model.sequence or 1 if found.unit == "tokens" else 1) / found.measured_per_second,
    )


def _drawn(tensor: Tensor, model: _Model) -> Tensor:
    """Tokens, labels or pixels that are drawn."""
    if tensor.is_floating_point():
        return torch.randn_like(tensor)
    return torch.randint_like(tensor, 2)


def _seconds_of(found: Any) -> float:
    return found.step_seconds


def _step(module: nn.Module, example: dict[str, Tensor]) -> None:
    training_loss(module(**example)).backward()


def _median_seconds(
    module: nn.Module, example: dict[str, Tensor], optimizer: torch.optim.Optimizer | None
) -> float:
    seconds: list[float] = []
    for _ in range(_STEPS + 1):
        started = time.thread_time()
        _step(module, example)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.thread_time() - started)
    return statistics.median(seconds[1:])


# ---------------------------------------------------------------------- the page


def _page(found: Mapping[str, Sequence[Result]]) -> str:
    rows = [row for results in found.values() for row in results]
    slow = sorted(row.slowness for row in rows if row.way == "written")
    lines = [
        "# Estimates against runs",
        "",
        "`python -m benchmarks.estimates --markdown docs/results/estimates.md`",
        "",
        f"{hardware()}. Each model is estimated from its configuration, without weights. Then it is built "
        "with drawn weights and runs on one thread. The step as it is written has AdamW after backward. The "
        "planned one is irc's, with AdamW within backward: its budget is the smallest and a third of what "
        "keeping all takes beyond it. Predicted peaks are compared with measured ones: by operations that "
        "were measured one by one here, and by the roofline of `irc machine`, whose workspaces are "
        "upper bounds. The largest batch is that of `irc max-batch` within twice the peak of one row as "
        "it is written; it was run, and one row more was refused.",
        "",
        to_markdown(_HEADER, [row.cells() for row in rows]),
        "",
    ]
    if slow:
        under = sum(row.predicted_bytes < row.measured_bytes for row in rows)
        lines += [
            f"Under the measured peak: {under} of {len(rows)} predictions. Steps took {slow[0]:.2f} to "
            f"{slow[-1]:.2f} times as long as the roofline says, in the median "
            f"{statistics.median(slow):.2f} times.",
            "",
        ]
    return "\n".join(lines).rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    """Estimates, runs, writes what was asked for, and returns the exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    return parser_of(
        "estimates",
        "Memory and time that are estimated, against runs.",
        models=None,
        threads=1,
        journal=None,
        markdown=None,
    )


def _run(options: argparse.Namespace) -> int:
    names = chosen(options.models, CONFIGS, "model")
    with tempfile.TemporaryDirectory() as folder:
        machine = str(store(measure_machine("cpu", folder, quick=True), Path(folder) / "machine.json"))
        found = run_tasks(
            options,
            _FORM,
            {"hardware": hardware()},
            Result,
            lambda known: ((name, lambda name=name: _results(name, machine)) for name in names),
            _page,
        )
    print(_page(found))
    return int(any(row.has_failed for rows in found.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
