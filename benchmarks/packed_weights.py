"""Adapters beside frozen weights that a library packs: each scheme, wrapper and type, trained beside eager.

    python -m benchmarks.packed_weights
    python -m benchmarks.packed_weights --only nf4 --markdown docs/results/packed_weights.md

A small Llama of transformers is loaded by each library's configuration and wrapped by PEFT. Exit status: 1
where numbers differ, a measured peak is over the predicted one, or anything fails that is no refusal by name.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import irc
from irc.compiler.training import compare, measured_peak_bytes
from irc.ir import UnsupportedError, first_line

from .command import parser_of, run_command, run_rows, write_page
from .harness import broken_promises, hardware
from .pages import to_markdown

__all__ = ["CASES", "Row", "main", "measure"]

_STEPS = 3
_WORDS, _WIDTH, _ROWS, _LENGTH = 500, 128, 4, 64
_SHARE = 1 / 3
"""The part of what a step takes beyond its smallest budget that the plan may use."""


def _bitsandbytes(**options: Any) -> Callable[[torch.dtype], Any]:
    def config(dtype: torch.dtype) -> Any:
        import transformers

        if "load_in_4bit" in options:
            options["bnb_4bit_compute_dtype"] = dtype
        return transformers.BitsAndBytesConfig(**options)

    return config


def _torchao(name: str, **options: Any) -> Callable[[torch.dtype], Any]:
    def config(dtype: torch.dtype) -> Any:
        import torchao.quantization
        import transformers

        given = {k: getattr(torch, v) if k == "weight_dtype" else v for k, v in options.items()}
        return transformers.TorchAoConfig(getattr(torchao.quantization, name)(**given))

    return config


_SCHEMES: dict[str, Callable[[torch.dtype], Any]] = {
    "bitsandbytes nf4": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes nf4, scales packed": _bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bitsandbytes fp4": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bitsandbytes int8": _bitsandbytes(load_in_8bit=True),
    "torchao int8": _torchao("Int8WeightOnlyConfig"),
    "torchao int4": _torchao("IntxWeightOnlyConfig", weight_dtype="int4"),
    "torchao float8": _torchao("Float8WeightOnlyConfig"),
    "torchao int8, rows packed too": _torchao("Int8DynamicActivationInt8WeightConfig"),
}
_WRAPPERS = ("LoRA", "prepared, LoRA", "prepared with checkpoints, LoRA")
_FULL = ("bitsandbytes nf4, scales packed", "torchao int8")

CASES: tuple[tuple[str, str, str], ...] = (
    *((scheme, wrapper, "bfloat16") for scheme in _SCHEMES for wrapper in _WRAPPERS[::2]),
    *((scheme, _WRAPPERS[1], "float32") for scheme in _SCHEMES),
    *((scheme, "DoRA", "float32") for scheme in _FULL),
)
"""Scheme, wrapper and type of each row."""


@dataclass(frozen=True)
class Row:
    """One model, fitted and trained.

    Args:
        scheme: How the weights are packed.
        wrapper: What is trained beside them.
        dtype: The type of all else.
        eager_bytes: The peak of the step as it is written.
        smallest_bytes: The smallest budget.
        predicted_bytes: The peak of the plan.
        measured_bytes: The same, measured.
        is_equal: Whether losses and gradients of all steps have the same bits.
        refusal: Code and reason of a refusal by name.
        failures: What does not hold.
    """

    scheme: str
    wrapper: str
    dtype: str
    eager_bytes: int = 0
    smallest_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    is_equal: bool = False
    refusal: str = ""
    failures: tuple[str, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether a promise was broken."""
        return bool(self.failures)

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        named = self.scheme, self.wrapper, self.dtype
        if self.refusal or not self.measured_bytes:
            result = f"refused: {self.refusal}" if self.refusal else f"FAIL: {'; '.join(self.failures)}"
            return (*named, *["-"] * 4, result)
        return (
            *named,
            f"{self.eager_bytes:,}",
            f"{self.smallest_bytes / self.eager_bytes:.0%}",
            f"{self.predicted_bytes / self.eager_bytes:.0%}",
            f"{self.measured_bytes / self.predicted_bytes:.4f}",
            f"FAIL: {'; '.join(self.failures)}" if self.failures else "bit-equal",
        )


_HEADER = (
    "weights",
    "wrapper",
    "type",
    "eager's peak, bytes",
    "smallest budget",
    "plan",
    "measured/predicted",
    "losses and gradients",
)


class _Loss(nn.Module):
    """The loss of a language model, as a module of its token numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        return self.model(input_ids=words, labels=words).loss


def _model(scheme: str, wrapper: str, dtype: torch.dtype) -> nn.Module:
    import peft
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=_WORDS,
        max_position_embeddings=_LENGTH,
        use_cache=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        plain: Any = transformers.LlamaForCausalLM(config)
        plain.to(dtype).save_pretrained(folder)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=_SCHEMES[scheme](dtype), dtype=dtype, device_map="cpu"
        )
    if wrapper.startswith("prepared"):
        model = peft.prepare_model_for_kbit_training(
            model, use_gradient_checkpointing="checkpoints" in wrapper
        )
    adapters = peft.LoraConfig(
        r=8,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        lora_dropout=0.0 if wrapper == "DoRA" else 0.1,
        use_dora=wrapper == "DoRA",
    )
    model = peft.get_peft_model(model, adapters).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)  # they begin as zeros, for which much is equal
    return _Loss(model)


def measure(scheme: str, wrapper: str, dtype: str) -> Row:
    """Fits a model between its smallest budget and what keeping all takes, and trains it beside eager.

    Args:
        scheme: A key of the schemes.
        wrapper: What is trained.
        dtype: The name of a type of torch.
    """
    torch.manual_seed(0)
    model = _model(scheme, wrapper, getattr(torch, dtype))
    words = torch.randint(0, _WORDS, (_ROWS, _LENGTH))
    row = Row(scheme, wrapper, dtype)
    try:
        whole = irc.optimize(copy.deepcopy(model), (words,), "100%", costs="analytic").plan
        smallest = whole.minimum_budget_bytes
        budget = smallest + int(_SHARE * max(whole.baseline_peak_bytes - smallest, 0))
        fitted = irc.optimize(copy.deepcopy(model), (words,), budget)
    except UnsupportedError as error:
        return Row(scheme, wrapper, dtype, refusal=f"{error.code}: {error.message}")
    except Exception as error:
        return Row(scheme, wrapper, dtype, failures=(f"{type(error).__name__}: {first_line(error)}",))
    plan: Any = fitted.plan
    eager_bytes = measured_peak_bytes(copy.deepcopy(model), (words,), plan.static_bytes)
    measured = measured_peak_bytes(copy.deepcopy(fitted), (words,), plan.static_bytes)
    steps = compare(model, fitted, (words,), _STEPS)
    is_equal = all(seen.bit_equal for seen in steps.numbers)
    failures = broken_promises(measured, plan.peak_bytes, budget)
    failures += [f"numbers differ: {seen}" for seen in steps.numbers if not seen.bit_equal][:1]
    return Row(
        *(row.scheme, row.wrapper, row.dtype),
        eager_bytes=eager_bytes,
        smallest_bytes=smallest,
        predicted_bytes=plan.peak_bytes,
        measured_bytes=measured,
        is_equal=is_equal,
        failures=tuple(failures),
    )


def _page(rows: Sequence[Row]) -> str:
    trained = sum(row.is_equal and not row.has_failed for row in rows)
    refused = sum(bool(row.refusal) for row in rows)
    return "\n".join(
        [
            "# Frozen weights that a library packs",
            "",
            "`python -m benchmarks.packed_weights --markdown docs/results/packed_weights.md`",
            "",
            f"{hardware()}. A Llama of three layers of width {_WIDTH}, {_ROWS} rows of {_LENGTH} tokens. "
            "Its linear layers are packed by transformers' configurations and wrapped by PEFT; `prepared` is "
            "`prepare_model_for_kbit_training`. Each is fitted to its smallest budget and a third of what "
            f"keeping all takes beyond it, and takes {_STEPS} steps beside eager. Budgets and peaks are "
            "parts of eager's measured peak.",
            "",
            f"{trained} of {len(rows)} train with the bits of eager within their budgets, {refused} are "
            f"refused by name, {len(rows) - trained - refused} fail.",
            "",
            to_markdown(_HEADER, [row.cells() for row in rows]),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes what was asked for, and returns the exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    return parser_of(
        "packed_weights",
        "Adapters beside frozen weights that bitsandbytes or torchao packs.",
        only=None,
        threads=1,
        markdown=None,
    )


def _run(options: argparse.Namespace) -> int:
    def rows() -> Iterator[Row]:
        for case in CASES:
            if options.only is None or options.only in " ".join(case):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    yield measure(*case)

    _, text, status = run_rows(rows(), _page)
    write_page(options.markdown, text)
    return status


if __name__ == "__main__":
    sys.exit(main())
