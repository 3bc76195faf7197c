"""Trains models as pipelines on several ranks of this machine, beside one device."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from irc.compiler.model_source import load_for_micro_batches
from irc.compiler.pipeline.api import Pipeline
from irc.compiler.pipeline.artifact import write_pipeline
from irc.compiler.pipeline.micro_batches import micro_batches_of
from irc.compiler.pipeline.plan import captured_micro_batch, plan_stages
from irc.compiler.pipeline.request import PipelineRequest
from irc.compiler.source import Source
from irc.ir import BudgetError, IrcError, format_bytes
from irc.passes.costs.profiling import device_name
from irc.torch_support.pytree import flatten

from .command import chosen, parser_of, run_command, write_page
from .models.amoebanet import amoebanet_d
from .models.images import unet
from .models.registry import Example
from .models.sequences import TransformerBlock, t5
from .pages import to_markdown

__all__ = [
    "SOURCES",
    "amoebanet",
    "language_model",
    "main",
    "trained_under_torchrun",
    "translator",
    "wide_unet",
]

_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
_FREE = "1TiB"


class _LanguageModel(nn.Module):
    """GPT-2 blocks between an embedding and scores with the same matrix."""

    def __init__(self, depth: int, width: int, heads: int, vocabulary: int, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence, width)
        nn.init.normal_(self.embedding.weight, 0.0, 0.02)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, 0.0) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """The mean cross entropy of the scores for tokens [batch, sequence]."""
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def language_model() -> Example:
    """A GPT-2 stack with tied embeddings: eight blocks of width 256, 64 tokens, batch 16."""
    torch.manual_seed(0)
    tokens = torch.randint(8192, (16, 65))
    return _LanguageModel(8, 256, 4, 8192, 64), (tokens[:, :-1].clone(), tokens[:, 1:].clone())


def wide_unet() -> Example:
    """A U-Net, batch 16: what the way down makes is read by the stages of the way up."""
    return unet(batch=16, size=64, base=16)


def translator() -> Example:
    """T5 without dropout, batch 16: the encoder's states are read by every block of the decoder."""
    return t5(batch=16, sequence=32, depth=4, width=256, heads=4, vocabulary=4096, dropout=0.0)


def amoebanet() -> Example:
    """AmoebaNet-D (6, 32), batch 16: each cell reads the results of the two before it."""
    return amoebanet_d(batch=16, size=64, classes=10, layers=6, filters=32)


def _resnet() -> str:
    """The ResNet-50 that the onnx package has."""
    import onnx

    return str(Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx")


SOURCES: dict[str, Callable[[], Source]] = {
    "gpt2-tied": lambda: Source("benchmarks.pipeline_runs:language_model"),
    "u-net": lambda: Source("benchmarks.pipeline_runs:wide_unet"),
    "resnet50.onnx": lambda: Source(_resnet(), batch=8, seed=0),
    "t5": lambda: Source("benchmarks.pipeline_runs:translator"),
    "amoebanet-d": lambda: Source("benchmarks.pipeline_runs:amoebanet"),
}
"""What is trained; the names are those of the table."""


@dataclass(frozen=True)
class _Row:
    """One pipeline, as it was planned and as it ran."""

    model: str
    ranks: int
    schedule: str
    pipeline: Pipeline
    report: dict[str, Any]

    def cells(self) -> list[str]:
        plan, ranks = self.pipeline.plan, self.report["ranks"]
        off = [rank["predicted_bytes"] / rank["measured_bytes"] - 1 for rank in ranks]
        scale = max(rank["gradient_scale"] for rank in ranks)
        difference = max(rank["gradient_difference"] for rank in ranks)
        losses = zip(self.report["losses"], self.report["original_losses"], strict=True)
        again = sum(stage.again_seconds for stage in plan.stages) * plan.micro_batches / plan.single_seconds
        return [
            self.model,
            str(self.ranks),
            self.schedule,
            str(plan.micro_batches),
            format_bytes(plan.budget_bytes[0]),
            ", ".join(f"{rank['measured_bytes'] / 2**20:.1f}" for rank in ranks) + " MiB",
            f"{min(off):+.2%} to {max(off):+.2%}",
            f"{again:.1%}",
            f"{difference / scale:.1e}",
            f"{max(abs(ours - its) for ours, its in losses):.1e}",
            "; ".join(self.report["failures"]) or "none",
        ]


_HEADER = [
    "model",
    "ranks",
    "schedule",
    "micro-batches",
    "budget of each",
    "measured peaks",
    "predicted is off by",
    "computed again",
    "gradients off by",
    "losses off by",
    "failures",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 where a promise was not kept, 2 for a wrong command."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "pipeline_runs",
        "Trains models as pipelines under torchrun, and compares each rank with one device.",
        models=None,
        time_limit=15.0,
        costs="thorough",
        markdown=None,
    )
    parser.add_argument("--ranks", default="2,4", metavar="A,B", help="how many (2,4)")
    parser.add_argument("--schedules", default=",".join(_SCHEDULES), metavar="A,B")
    parser.add_argument("--micro-batches", type=int, default=8, metavar="M")
    parser.add_argument(
        "--part",
        type=float,
        default=0.9,
        metavar="X",
        help="budget, in parts of the largest peak without one",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    names = chosen(options.models, SOURCES, "model that runs as a pipeline", "IRC489")
    rows: list[_Row] = []
    for row in _rows(options, names):
        rows.append(row)
        print(" | ".join(row.cells()), flush=True)
        write_page(options.markdown, _page(options, rows))
    return 1 if any(row.report["failures"] for row in rows) else 0


def _rows(options: argparse.Namespace, names: Sequence[str]) -> Iterator[_Row]:
    for name in names:
        for ranks in map(int, options.ranks.split(",")):
            for schedule in options.schedules.split(","):
                pipeline, source, examples = _planned(options, name, ranks, schedule)
                yield _Row(
                    name, ranks, schedule, pipeline, trained_under_torchrun(pipeline, source, examples, ranks)
                )


def _planned(
    options: argparse.Namespace, name: str, ranks: int, schedule: str
) -> tuple[Pipeline, Source, list[Tensor]]:
    """A plan within a part of what the pipeline takes without a budget, or a little more."""
    source = SOURCES[name]()
    count = options.micro_batches
    loaded = load_for_micro_batches(source, count)
    captured = captured_micro_batch(loaded.module, micro_batches_of(loaded.args, count)[0], None)

    def plan(budget: int | str) -> Pipeline:
        request = PipelineRequest(
            ranks, count, budget, schedule, time_limit=options.time_limit, costs=options.costs
        )
        return Pipeline(loaded.module, captured, plan_stages(captured, request))

    largest_bytes = max(plan(_FREE).plan.peak_bytes)
    examples = [leaf for leaf in flatten(loaded.args)[0] if isinstance(leaf, Tensor)]
    part = options.part
    while True:
        try:
            return plan(round(largest_bytes * part)), source, examples
        except BudgetError:
            if part >= 1:
                raise
            part = min(part + 0.02, 1.0)


def trained_under_torchrun(
    pipeline: Pipeline, source: Source, examples: Sequence[Tensor], ranks: int
) -> dict[str, Any]:
    """What `irc run --check` says of a pipeline that trains for two steps on so many ranks of this machine.

    Raises:
        IrcError: IRC489 when the ranks end without a report.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "pipeline"
        write_pipeline(target, pipeline, source, examples)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += ["-m", "irc", "run", str(target), "--steps", "2", "--check", "--trust", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        said = [line for line in done.stderr.splitlines() if line.startswith(("error[", "  help:"))]
        raise IrcError("IRC489", f"the ranks ended with status {done.returncode}: {' '.join(said)}")
    return json.loads(done.stdout)


def _page(options: argparse.Namespace, rows: Sequence[_Row]) -> str:
    """The page, as Markdown."""
    failed = sum(bool(row.report["failures"]) for row in rows)
    worst = max(
        abs(rank["predicted_bytes"] / rank["measured_bytes"] - 1) for r in rows for rank in r.report["ranks"]
    )
    return "\n".join(
        [
            "# Pipelines on several ranks, beside one device",
            "",
            "```",
            "python -m benchmarks.pipeline_runs --markdown docs/results/pipeline_runs.md",
            "```",
            "",
            "Each row is a model that was cut for so many ranks, and trained for two steps under torchrun",
            f"(gloo) on {device_name('cpu')}, torch {torch.__version__}.",
            f"The budget of each rank is {options.part:.0%} of the largest peak that the same pipeline has",
            "without a budget, or the next of two percent more for which a plan was found. Peaks are from",
            "allocator events of a step, with what is there between steps. Gradients are compared with the",
            "original's on one device, micro-batch by micro-batch: the largest difference over the largest",
            "gradient. Computed again is a part of the time of a step's operations.",
            "",
            to_markdown(_HEADER, [row.cells() for row in rows]),
            "",
            f"{len(rows)} rows, {failed} with a promise that was not kept; the prediction of a rank's",
            f"peak is at most {worst:.2%} off.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
