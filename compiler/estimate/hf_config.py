"""A training step from a `config.json` of Hugging Face: the model without weights, and a batch for it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...ir import UsageError, first_line, printable
from .closed_library import closed_library
from .lora import Lora, add_adapters

__all__ = ["DTYPES", "step_of_config"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_HELP = "give the config.json of a model, or the factory of your own: package.module:factory"
_LEFT_OUT = frozenset(
    {
        *(
            "attribute_map",
            "auto_map",
            "name_or_path",
            "trust_remote_code",
            "model_args",
            "task_specific_params",
        ),
        *("attn_implementation", "experts_implementation", "quantization_config", "generation_config"),
        *("backbone", "backbone_config", "backbone_kwargs", "timm_kwargs"),
        *("use_timm_backbone", "use_pretrained_backbone"),
    }
)
"""The entries that name code, kernels or other models, or say how weights are packed."""

_TABLES = frozenset({"rope_scaling", "rope_parameters", "id2label", "label2id"})
"""The entries that are tables of numbers and names. Any other table may be a model in the model: these may
name code in many ways, and are refused."""

_MOST_PARTS = 1 << 16
"""The most layers and labels."""

_TOKENS = 2048
_ANY_LENGTH = 1 << 40
_POSITIONS = re.compile(r"position[^.]*$|wpe$")
"""The end of the path of an embedding of positions."""

_MOST_BYTES = 1 << 20
"""The largest file that is read as a configuration."""


def step_of_config(
    path: Path,
    *,
    batch: int,
    sequence: int | None = None,
    dtype: str | None = None,
    lora: Lora | None = None,
    has_data: bool = False,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Makes a training step of the model that a file describes.

    The class is the file's first of `architectures` if transformers has it; code that comes with a model is
    never run. Attention is torch's scaled dot product, nothing is cached, and the loss alone is returned.

    Args:
        path: The file.
        batch: The rows of a batch.
        sequence: The tokens of a row, 2,048 or as many as the model has positions; images have the size that
            the file says.
        dtype: One of `DTYPES`; None for the file's, or float32.
        lora: The adapters that are trained; None trains all parameters.
        has_data: Whether weights are drawn; else the tensors have no data, and take no memory.

    Returns:
        The module and its keyword arguments.

    Raises:
        UsageError: IRC581 if the file cannot be read or describes no model that transformers knows; IRC582
            for a kind of model without a known batch; IRC583 if transformers is missing; IRC584 if the model
            cannot be made; IRC586 for rows that are longer than its positions.
    """
    transformers = _transformers()
    data = _read(path)
    with closed_library():
        config = _config(transformers, data, path)
    kind, make_batch = _kind(transformers, data, path)
    named = dtype or str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if named not in DTYPES:
        raise UsageError(
            "IRC581", f"{path} asks for {printable(named)}", help=f"give --dtype {' or '.join(DTYPES)}"
        )
    config.use_cache = False
    if sequence is not None and make_batch is _images:
        raise UsageError(
            "IRC582", f"the model of {path} takes images, which have no tokens", help="leave --sequence out"
        )
    try:
        with closed_library(DTYPES[named]):
            with contextlib.nullcontext() if has_data else torch.device("meta"):
                model = kind._from_config(config, attn_implementation=_attention(kind), dtype=DTYPES[named])
            positions = _positions(model, config)
            tokens = min(_TOKENS, positions) if sequence is None else sequence
            if tokens > positions:
                raise UsageError(
                    "IRC586",
                    f"the model of {path} has {positions} positions, and a row has {tokens} tokens",
                    help=f"give --sequence {positions}, or less",
                )
            # without data on the CPU, whose kernels of attention keep no scores, as those of GPUs
            with contextlib.nullcontext() if has_data else FakeTensorMode(allow_non_fake_inputs=True):
                if not has_data:
                    model.to_empty(device="cpu")
                    model.tie_weights()
                if lora is not None:
                    add_adapters(model, lora, (transformers.pytorch_utils.Conv1D,))
                example = make_batch(config, batch, tokens)
    except UsageError:
        raise
    except Exception as error:  # of the library, for a file that describes no possible model
        raise UsageError(
            "IRC584",
            f"{path} describes a {kind.__name__} that cannot be made: {type(error).__name__}: "
            f"{printable(first_line(error), 500)}",
            help="check the file's numbers against each other, --batch and --sequence",
        ) from error
    return _LossOf(model.train()), example


def _positions(model: nn.Module, config: Any) -> int:
    """The longest row that a model takes: as many tokens as it has learned positions, else any.

    Some count their positions from 2 on, or behind that of padding.
    """
    learned = [
        module.num_embeddings - _reserved(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and _POSITIONS.search(name)
    ]
    return min(learned, default=_ANY_LENGTH)


def _reserved(embedding: nn.Embedding) -> int:
    """The first positions of an embedding that stand for no token."""
    behind_padding = 0 if embedding.padding_idx is None else embedding.padding_idx + 1
    return getattr(embedding, "offset", behind_padding)


class _LossOf(nn.Module):
    """A model of transformers that returns its loss alone, as a training loop uses it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        with closed_library():  # kernels may be loaded when they are first called
            return self.model(**batch).loss


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "IRC583", "--config needs the package transformers", help="pip install transformers"
        ) from error
    return transformers


def _read(path: Path) -> dict[str, Any]:
    """The entries of the file."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            raise UsageError("IRC581", f"{path} is not a file of a model's configuration", help=_HELP)
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError("IRC581", f"{path} cannot be read: {first_line(error)}", help=_HELP) from error
    if not isinstance(data, dict) or not isinstance(cast("dict[str, Any]", data).get("model_type"), str):
        raise UsageError("IRC581", f"{path} names no model_type", help=_HELP)
    return cast("dict[str, Any]", data)


def _config(transformers: Any, data: Mapping[str, Any], path: Path) -> Any:
    """The configuration as transformers knows it; nothing that the file refers to is loaded."""
    given = {key: value for key, value in data.items() if key not in _LEFT_OUT and not key.startswith("_")}
    _check_entries(transformers, given, path)
    try:
        return transformers.AutoConfig.for_model(**given)
    except Exception as error:
        known = f"transformers {transformers.__version__}"
        reason = " ".join(str(error).split())
        raise UsageError(
            "IRC581",
            f"{path} describes no model that {known} knows: {printable(reason, 300)}",
            help=_HELP,
        ) from error


def _check_entries(transformers: Any, given: Mapping[str, Any], path: Path) -> None:
    """Refuses a model of several models, and entries that stand for more than numbers and names.

    Raises:
        UsageError: IRC582 for models within the model; IRC581 for other entries.
    """
    kind = given["model_type"]
    nested = [key for key, value in given.items() if key not in _TABLES and _has_table(value)]
    if nested or kind.startswith("timm"):
        raise UsageError(
            "IRC582",
            f"{path} describes a model of several models or of another library: "
            f"{printable(', '.join(nested) or kind, 200)}",
            help="give a factory, package.module:factory, or the configuration of its text model alone",
        )
    methods = [
        key
        for key in given
        if key not in ("num_labels", "torch_dtype")
        and isinstance(
            getattr(transformers.PreTrainedConfig, key, None), (property, FunctionType, MethodType)
        )
    ]
    counts = {key: value for key, value in given.items() if key.startswith(("num_", "n_"))}
    many = [key for key, value in counts.items() if "layer" in key or key == "num_labels" if _is_over(value)]
    if methods or many:
        raise UsageError(
            "IRC581",
            f"{path} has an entry that cannot be: {printable(', '.join((*methods, *many)), 200)}",
            help=_HELP,
        )


def _is_over(value: object) -> bool:
    return isinstance(value, int | float) and value > _MOST_PARTS


def _has_table(value: object) -> bool:
    if isinstance(value, list):
        return any(_has_table(item) for item in cast("list[object]", value))
    return isinstance(value, dict)


# ---------------------------------------------------------------------- kinds of models


def _kind(transformers: Any, data: Mapping[str, Any], path: Path) -> tuple[Any, _MakeBatch]:
    """The class of the model, and what makes a batch for it."""
    named = data.get("architectures")
    names = (
        [name for name in cast("list[Any]", named) if isinstance(name, str)]
        if isinstance(named, list)
        else []
    )
    if not names:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as mapping

        names = [name for key, name in mapping.items() if key == data["model_type"]]
    for name in names:
        found = getattr(transformers, name, None) if name.isidentifier() else None
        ending = next((end for end in _BATCHES if name.endswith(end)), None)
        if ending is not None and isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found, _BATCHES[ending]
    raise UsageError(
        "IRC582",
        f"{path} names {printable(', '.join(names)) or 'no architecture'}, for which no batch is known",
        help=f"architectures that end in {', '.join(_BATCHES)} are; for others give a factory: "
        "package.module:factory",
    )


_MakeBatch = Callable[[Any, int, int], dict[str, Tensor]]


def _tokens(config: Any, batch: int, sequence: int) -> dict[str, Tensor]:
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    return {"input_ids": ids, "labels": torch.zeros(batch, sequence, dtype=torch.long)}


def _labelled_tokens(config: Any, batch: int, sequence: int) -> dict[str, Tensor]:
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    return {"input_ids": ids, "labels": torch.zeros(batch, dtype=torch.long)}


def _images(config: Any, batch: int, sequence: int) -> dict[str, Tensor]:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", 3)
    labels = torch.zeros(batch, dtype=torch.long)
    return {"pixel_values": torch.zeros(batch, channels, height, width), "labels": labels}


_BATCHES: Mapping[str, _MakeBatch] = {
    "ForCausalLM": _tokens,
    "LMHeadModel": _tokens,
    "ForMaskedLM": _tokens,
    "ForConditionalGeneration": _tokens,
    "ForSequenceClassification": _labelled_tokens,
    "ForImageClassification": _images,
}
"""The endings of the names of classes, with what makes a batch for them."""


def _attention(kind: Any) -> str:
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
