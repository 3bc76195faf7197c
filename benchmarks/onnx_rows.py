"""Plans ONNX files with drawn weights, and holds their import to onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from irc.compiler.model_source import Loaded, Source, load
from irc.compiler.onnx_export.differences import furthest
from irc.ir import IrcError, UsageError

from .harness import Settings, step_of
from .planned_rows import Row, measure_model

__all__ = ["light_folder", "measure_onnx"]

_TOLERANCE = 1e-3
_BUDGET = "70%"


def measure_onnx(path: Path, batches: Sequence[int], settings: Settings) -> Iterator[Row]:
    """An ONNX file with drawn weights at 70% of the baseline; with larger batches until that fits.

    Args:
        path: The file.
        batches: Batch sizes to try after the file's own, until one fits.
        settings: How to measure.
    """
    for batch in (None, *batches):
        refused = False
        for row in _measure_onnx(path, batch, settings):
            refused |= row.refusal is not None
            yield row
        if not refused:
            return


def _measure_onnx(path: Path, batch: int | None, settings: Settings) -> Iterator[Row]:
    name = path.stem.removeprefix("light_") + (f" batch {batch}" if batch else "")
    try:
        loaded = load(Source(str(path), batch=batch, seed=settings.seed))
    except UsageError as error:
        if batch is None:
            raise
        yield Row(name, _BUDGET, refusal=error.brief)
        return
    except IrcError as error:
        yield Row(name, _BUDGET, refusal=error.brief, failures=(error.brief,))
        return
    notes, failures = _against_onnxruntime(path, loaded) if batch is None else ((), ())
    more, missing = _gradients(loaded)
    for row in measure_model(name, loaded, (_BUDGET,), settings):
        yield replace(row, notes=(*row.notes, *notes, *more), failures=(*row.failures, *failures, *missing))


def _gradients(loaded: Loaded) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A note on the gradients of one step, and a failure where a parameter has none."""
    before = [buffer.clone() for buffer in loaded.module.buffers()]
    with torch.random.fork_rng(devices=[]):
        step_of(loaded.module, loaded.args)()
    gradients = {name: parameter.grad for name, parameter in loaded.module.named_parameters()}
    loaded.module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in zip(loaded.module.buffers(), before, strict=True):
            buffer.copy_(value)
    missing = [name for name, gradient in gradients.items() if gradient is None]
    unusable = [name for name, g in gradients.items() if g is not None and not bool(g.isfinite().all())]
    zero = sum(1 for g in gradients.values() if g is not None and not g.any())
    note = f"{len(gradients) - len(missing)} of {len(gradients)} parameters have gradients"
    failures = [f"no gradient for {missing[0]} ({len(missing)} in all)"] if missing else []
    failures += [f"gradient of {unusable[0]} is not finite ({len(unusable)} in all)"] if unusable else []
    return (note + (f", {zero} of them zero" if zero else ""),), tuple(failures)


def _against_onnxruntime(path: Path, loaded: Loaded) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How far the module's outputs in eval mode are from those of onnxruntime with the same weights."""
    modes = {child: child.training for child in loaded.module.modules()}
    with torch.no_grad():
        result = loaded.module.eval()(*loaded.args)
    for child, mode in modes.items():
        child.training = mode
    actual = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    expected = _run_onnxruntime(path, loaded)
    off = furthest(expected, actual)
    text = f"onnxruntime's outputs off by {off:.2g} of the largest"
    return ((text,), ()) if off <= _TOLERANCE else ((), (text,))


def _run_onnxruntime(path: Path, loaded: Loaded) -> list[Tensor]:
    import onnx
    import onnxruntime
    from onnx import numpy_helper

    from irc.frontends.onnx import OnnxModule

    module = loaded.module
    assert isinstance(module, OnnxModule)
    model = onnx.load(str(path))
    graph = model.graph
    weights = {module.onnx_names[key]: p.detach() for key, p in module.named_parameters()}
    nodes = [node for node in graph.node if not weights.keys() & set(node.output)]
    old = [tensor for tensor in graph.initializer if tensor.name not in weights]
    new = [numpy_helper.from_array(tensor.numpy(), name) for name, tensor in weights.items()]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend([*old, *new])
    model.ir_version = max(model.ir_version, 4)  # from 4 on, weights need not be inputs
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [name for name, _, _ in module.input_specs]
    feed = {name: value.numpy() for name, value in zip(names, loaded.args, strict=True)}
    results: list[Any] = list(session.run(None, feed))
    return [torch.as_tensor(array) for array in results]


def light_folder() -> Path:
    """Where the onnx package keeps its light models."""
    import onnx

    return Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
