"""Is a written ONNX file the module? It is read again, weight by weight, and onnxruntime runs it."""

from __future__ import annotations

import copy
import fnmatch
import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import onnx
import onnx_ir as ir
import torch
from torch import Tensor
from torch.func import functional_call

from ...frontends.onnx import OnnxModule, example_inputs, from_model, some_sizes
from ...frontends.onnx.binding import bound, is_open
from ...frontends.onnx.export import write_back
from ...frontends.onnx.graphs import subgraphs
from ...frontends.onnx.reader import normalise, read
from ...frontends.onnx.rebatch import fixed_batch
from ...ir import IrcError, VerificationError, first_line
from ...torch_support.bits import bits, same_bits
from .differences import furthest
from .evaluating import evaluate, random_node

__all__ = ["Check", "check_written"]

_TOLERANCE = 1e-3
"""The share of an output's largest element that onnxruntime may be from the module."""
_SLACK = 4
"""The factor by which it may be farther than the original file is from the original module (a variance that
is a difference of large numbers, say)."""
_ROUNDINGS = 16
"""If a module's element types are not the file's: the number of roundings of the coarser type its outputs may
be from the file's, as a share of the largest element."""


@dataclass(frozen=True)
class Check:
    """The checks that a written file went through, and their outcome.

    Args:
        read_again: What the file, imported again, has in common with the module.
        checked: Who computed the file's outputs, or why nobody could.
        difference: The largest difference from the module's, as a share of the largest element of the output;
            None if the outputs were not compared.
    """

    read_again: str
    checked: str
    difference: float | None


def check_written(module: OnnxModule, draft: Path, inputs: Sequence[Any] | None = None) -> Check:
    """Imports the file again and requires the module's weights and outputs; then onnxruntime's outputs too.

    All evaluate: what the file says of training does not count. The module and the file that
    is imported again draw the same random numbers; onnxruntime draws others.

    Args:
        module: What was written.
        draft: The file; copies of it lie beside it meanwhile.
        inputs: What the outputs are computed from, in the order of `input_specs`; drawn without it. For
            onnxruntime they are drawn also if the import has changed the batch that the file fixes.

    Raises:
        VerificationError: IRC322 when a weight or an output is another one.
    """
    again = _imported(module, draft)
    casts = _check_weights(module, again)
    types = "" if not casts else f", up to the file's {', '.join(sorted(map(_plain, casts)))}"
    run = _outputs(module, inputs, casts)
    read_again = f"the weights and the outputs are the module's{types}"
    if isinstance(run, str):
        read_again = f"the weights are the module's{types}"
        run = _outputs(again, inputs, {}) if casts else run
        if isinstance(run, str):
            return Check(read_again, run, None)
    else:
        found = evaluated(again, run.inputs, None if casts else _swapped(module, again))
        _check_outputs(module, run.outputs, found, casts)
    drawn = random_node(onnx.load(str(draft), load_external_data=False))
    if drawn is not None:
        return Check(read_again, f"{drawn} draws at random", None)
    checked, difference = _by_onnxruntime(again, draft, run.inputs)
    if difference is not None and difference > _TOLERANCE:
        own = _own_difference(module, draft, run.inputs)
        if own is None or difference > _SLACK * own:
            raise _defect(
                f"{checked} computes other outputs from the written file: {difference:.3g} of the largest "
                f"element apart, where {_TOLERANCE:g} is allowed"
            )
    return Check(read_again, checked, difference)


def _defect(what: str) -> VerificationError:
    return VerificationError(
        "IRC322", what, help="nothing was written; this is a defect of irc, or of the model's numbers"
    )


# ------------------------------------------------------------------------------------------- read again


def _imported(module: OnnxModule, path: Path) -> OnnxModule:
    """The module of another file of the same graph, imported as `module` was, in eval mode, if that is."""
    try:
        again = _import(module, path)
    except IrcError as error:
        raise _defect(f"the written file cannot be imported again: {error.code} {error.message}") from error
    again.eval()
    return again.to(_device(module))


def _import(module: OnnxModule, path: Path, own_batch: bool = False) -> OnnxModule:
    model = read(path)
    normalise(model)
    graphs = [model.graph, *(inner for node in model.graph.all_nodes() for inner in subgraphs(node))]
    present = {name for graph in graphs for name in graph.initializers}
    present |= {value.name for node in model.graph.all_nodes() for value in node.outputs}
    names = [stored.name for stored in module.stored if stored.name and stored.name in present]
    # What was unpacked is a float now, and roles for its codes find nothing.
    roles = {p: role for p, role in module.roles.items() if any(fnmatch.fnmatchcase(n, p) for n in names)}
    batch = _changed_batch(module, model)
    closed = bound([spec for spec in module.input_specs if not is_open(spec[1])])
    shapes = {name: shape for name, shape, _ in closed if shape is not None}
    constants = {n: s.tensor() for n, s in module.bound_at_import.items()}
    options = (None if own_batch else batch, shapes if batch is None else None, constants)
    again = from_model(model, *options, roles)
    new = {stored.name: stored.role for stored in again.stored}
    moved = {s.name: s.role for s in module.stored if s.name in names and new.get(s.name, s.role) != s.role}
    if moved:  # a rule looks at the values, which training has changed
        given = {glob.escape(name): role for name, role in moved.items()}
        again = from_model(read(path), *options, {**given, **roles})
    return again


def _changed_batch(module: OnnxModule, model: ir.Model) -> int | None:
    """The batch size of a module whose file fixes another one."""
    leading = {shape[0] if shape else None for _, shape, _ in module.input_specs}
    if module.bound_at_import or len(leading) != 1:
        return None
    (size,) = leading
    return size if isinstance(size, int) and fixed_batch(model.graph, size) is not None else None


def _weights(module: OnnxModule) -> dict[str, Tensor]:
    """The parameters and buffers by ONNX name."""
    state = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return {name: state[key].detach() for key, name in module.onnx_names.items()}


def _swapped(module: OnnxModule, again: OnnxModule) -> dict[str, Tensor]:
    """The module's weights under the keys of the other: the same memory gives the same bits."""
    weights = _weights(module)
    return {key: weights[name] for key, name in again.onnx_names.items() if name in weights}


def _check_weights(module: OnnxModule, again: OnnxModule) -> dict[torch.dtype, torch.dtype]:
    """Requires equal bits, and returns the module's type for each of the file's that is another."""
    casts: dict[torch.dtype, torch.dtype] = {}
    written = _weights(again)
    for name, tensor in _weights(module).items():
        if name not in written:
            raise _defect(f"the written file, imported again, has no weight {name!r}")
        found = written[name]
        expected = tensor.to(found.dtype)
        if not same_bits(expected, found):
            raise _defect(
                f"the written file, imported again, has another weight {name!r} than the module: "
                f"{found.dtype} {list(found.shape)}, {_share(expected, found)} of its elements differ"
            )
        if found.dtype is not tensor.dtype:
            casts[found.dtype] = tensor.dtype
    return casts


def _share(expected: Tensor, found: Tensor) -> str:
    if expected.shape != found.shape:
        return "all"
    size = expected.element_size()
    differs = (bits(expected) != bits(found)).reshape(-1, size).any(1)
    return f"{int(differs.sum()):,} of {expected.numel():,}"


def _check_outputs(
    module: OnnxModule,
    expected: Sequence[Any],
    found: Sequence[Any],
    casts: Mapping[torch.dtype, torch.dtype],
) -> None:
    coarse = max(
        (torch.finfo(t).eps for pair in casts.items() for t in pair if t.is_floating_point), default=0.0
    )
    is_exact = not casts and _device(module).type == "cpu"  # elsewhere sums are in any order
    allowed = 0.0 if is_exact else max(_TOLERANCE, _ROUNDINGS * coarse)
    for name, mine, other in zip(module.output_names, expected, found, strict=True):
        difference = furthest([mine], [other])
        if difference > allowed:
            raise _defect(
                f"the written file, imported again, computes another output {name!r} than the module: "
                f"{difference:.3g} of the largest element apart, where {allowed:g} is allowed"
            )


# ---------------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class _Run:
    """The inputs and outputs of one run."""

    inputs: Sequence[Any]
    outputs: list[Any]


def _outputs(
    module: OnnxModule, inputs: Sequence[Any] | None, casts: Mapping[torch.dtype, torch.dtype]
) -> _Run | str:
    """Computes the module's outputs from these inputs, or from drawn ones; else says why it cannot."""
    if inputs is not None:
        return _Run(inputs, evaluated(module, _cast(inputs, casts)))
    try:
        drawn = example_inputs(module, sizes=some_sizes(module))
        try:
            return _Run(drawn, evaluated(module, _cast(drawn, casts)))
        except IrcError:  # floats that stand for whole numbers
            whole = tuple((x > 0).to(x.dtype) if x.is_floating_point() else x for x in drawn)
            return _Run(whole, evaluated(module, _cast(whole, casts)))
    except IrcError as error:
        return f"the module does not run on inputs that are drawn: {error.message}"


def _cast(inputs: Sequence[Any], casts: Mapping[torch.dtype, torch.dtype]) -> list[Any]:
    return [x.to(casts.get(x.dtype, x.dtype)) if isinstance(x, Tensor) else x for x in inputs]


def evaluated(
    module: OnnxModule, inputs: Sequence[Any], weights: dict[str, Tensor] | None = None
) -> list[Any]:
    """The module's outputs in eval mode; its own mode, and torch's random generators, stay as they are.

    Args:
        module: The module.
        inputs: In the order of `input_specs`; moved to where its weights are.
        weights: Taken in place of its own, by key.
    """
    twin = copy.copy(module)
    twin.__class__ = OnnxModule
    twin.training = False
    device = _device(module)
    placed = tuple(x.to(device) if isinstance(x, Tensor) else x for x in inputs)
    cuda = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(cuda):  # which draws the same numbers each time
        result = (
            OnnxModule.forward(twin, *placed) if weights is None else functional_call(twin, weights, placed)
        )
    return list(result) if isinstance(result, tuple) else [result]


def _device(module: OnnxModule) -> torch.device:
    return next((t.device for t in _weights(module).values()), torch.device("cpu"))


# ------------------------------------------------------------------------------------------ onnxruntime


def _by_onnxruntime(module: OnnxModule, path: Path, inputs: Sequence[Any]) -> tuple[str, float | None]:
    """Names the runtime that computed the file's outputs, and their distance from those of its module."""
    notes: list[str] = []
    if _changed_batch(module, read(path)) is not None:  # onnxruntime takes the batch that the file has
        notes.append("at the batch of the file")
        module = _import(module, path, own_batch=True)
        run = _outputs(module, None, {})
        if isinstance(run, str):
            return run, None
        inputs = run.inputs
    expected = evaluated(module, inputs)
    feed = {name: _numpy(x) for (name, _, _), x in zip(module.input_specs, inputs, strict=True)}
    feed |= {name: static.array for name, static in module.bound_at_import.items()}
    model = onnx.load(str(path), load_external_data=False)
    changed = evaluate(model)
    evaluating = path.with_name(f"evaluating-{path.name}")  # beside it: external weights are found
    try:
        if changed:
            evaluating.write_bytes(model.SerializeToString())
        checked, found = run_onnxruntime(evaluating if changed else path, feed)
    except Exception as error:
        return f"onnxruntime cannot run the file ({first_line(error)[:160]})", None
    finally:
        evaluating.unlink(missing_ok=True)
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        notes.append(f"with {changed[0]}{more} evaluating")
    if notes:
        checked = f"{checked}, {', '.join(notes)},"
    return checked, furthest(expected, found)


def _own_difference(module: OnnxModule, draft: Path, inputs: Sequence[Any]) -> float | None:
    """Returns the distance of onnxruntime from the module with the weights of the original file."""
    assert module.path is not None
    original = draft.with_name(f"original-{draft.name}")
    try:
        write_back(module.path, {}, original)  # a copy; external weights come along
        return _by_onnxruntime(_imported(module, original), original, inputs)[1]
    finally:
        original.unlink(missing_ok=True)
        original.with_name(f"{original.name}.data").unlink(missing_ok=True)


def run_onnxruntime(path: Path, feed: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Runs the file; returns the runtime's name and the outputs."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return f"onnxruntime {ort.__version__}", list(session.run(None, dict(feed)))


def _numpy(value: Any) -> Any:
    if isinstance(value, list):
        return [_numpy(item) for item in cast("list[Any]", value)]
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach().cpu()
    return tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
