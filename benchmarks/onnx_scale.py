"""How much memory an import takes beside the weights: a file of the size asked for is made and imported.

    python -m benchmarks.onnx_scale --gigabytes 3
    python -m benchmarks.onnx_scale --gigabytes 1.5 --inline

The file is a chain of matrix products with an open batch axis. A process of its own imports it; the peak is
that of its resident memory (`VmHWM`), so this runs on Linux. Exit status 1 where the peak is above 1.25 of
the weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from irc.ir import UsageError, format_bytes

from .command import parser_of, run_command

__all__ = ["Usage", "make_file", "measure"]

_ROWS, _COLUMNS = 2048, 2048
_WEIGHT_BYTES = 4 * _ROWS * _COLUMNS
_MOST = 1.25
"""Of the weights' bytes: the largest weight is there twice while it is copied, and the graph takes some."""


@dataclass(frozen=True)
class Usage:
    """What an import took.

    Args:
        weight_bytes: Of the module's parameters.
        peak_bytes: Resident memory at its peak, over that before the import.
        held_bytes: The same afterwards.
        seconds: From the file to the module.
    """

    weight_bytes: int
    peak_bytes: int
    held_bytes: int
    seconds: float

    @property
    def ratio(self) -> float:
        """The peak over the weights."""
        return self.peak_bytes / self.weight_bytes

    def text(self) -> str:
        """For a person."""
        return (
            f"{format_bytes(self.weight_bytes)} of weights imported in {self.seconds:.1f} s: "
            f"{format_bytes(self.peak_bytes)} more at the peak ({self.ratio:.3f} of them), "
            f"{format_bytes(self.held_bytes)} held"
        )


def make_file(folder: Path, weight_bytes: int, *, inline: bool = False) -> Path:
    """A model with so many bytes of weights, in matrices of 16 MiB.

    Args:
        folder: Where it goes.
        weight_bytes: At least.
        inline: Whether the weights are in the file itself, as they can be below 2 GiB.
    """
    count = max(1, -(-weight_bytes // _WEIGHT_BYTES))
    names = [f"w{i}" for i in range(count)]
    nodes = [helper.make_node("MatMul", [f"h{i}", w], [f"h{i + 1}"]) for i, w in enumerate(names)]
    generator = np.random.default_rng(0)
    one = (generator.standard_normal((_ROWS, _COLUMNS), np.float32) / 64).tobytes()
    initializers: list[onnx.TensorProto] = []
    with open(folder / "model.data", "wb") as data:
        for i, name in enumerate(names):
            tensor = onnx.TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[_ROWS, _COLUMNS])
            if inline:
                tensor.raw_data = one
            else:
                data.write(one)
                tensor.data_location = onnx.TensorProto.EXTERNAL
                place = {"location": "model.data", "offset": i * len(one), "length": len(one)}
                for key, value in place.items():
                    tensor.external_data.add(key=key, value=str(value))
            initializers.append(tensor)
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("h0", TensorProto.FLOAT, ["batch", _ROWS])],
        [helper.make_tensor_value_info(f"h{count}", TensorProto.FLOAT, ["batch", _COLUMNS])],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


_PROGRAM = """
import json, resource, sys, time, torch
from irc.frontends.onnx import from_onnx

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

from_onnx(sys.argv[2])  # what an import of any size needs is there
torch.zeros(1).sum()
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")  # the peak begins anew
before, started = resident(), time.perf_counter()
module = from_onnx(sys.argv[1])
seconds = time.perf_counter() - started
peak = next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
held, weights = resident(), sum(p.nbytes for p in module.parameters())
print(json.dumps([weights, peak - before, held - before, seconds]))
"""


def measure(path: Path) -> Usage:
    """Import a file in a process of its own.

    Raises:
        UsageError: IRC451 when the process fails, or does not tell its memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        small = make_file(Path(folder), 1)
        command = [sys.executable, "-c", _PROGRAM, str(path), str(small)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        line = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise UsageError("IRC451", f"the import of {path} failed: {line}", help="run this on Linux")
    return Usage(*json.loads(done.stdout))


def main(argv: Sequence[str] | None = None) -> int:
    """Makes, measures, prints, and returns the exit status."""
    parser = parser_of("onnx_scale", (__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.0, metavar="N", help="of weights (3)")
    parser.add_argument("--inline", action="store_true", help="weights in the file itself, not beside it")
    return run_command(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        usage = measure(make_file(Path(folder), int(options.gigabytes * 1e9), inline=options.inline))
    print(usage.text())
    return 0 if usage.ratio <= _MOST else 1


if __name__ == "__main__":
    sys.exit(main())
