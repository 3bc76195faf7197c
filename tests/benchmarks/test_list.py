"""`python -m benchmarks` lists the benchmarks, and each of them explains itself."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks.__main__ import benchmarks


def test_every_benchmark_has_a_line() -> None:
    found = benchmarks()
    assert {"architectures", "bench_recompute", "drop_in", "gpt2_grid", "measure_offload"} <= found.keys()
    assert "command" not in found and "harness" not in found and all(found.values())


@pytest.mark.parametrize("name", benchmarks())
def test_a_benchmark_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    is_package = (Path(__file__).parents[2] / "benchmarks" / name).is_dir()
    module = importlib.import_module(f"benchmarks.{name}{'.__main__' if is_package else ''}")
    with pytest.raises(SystemExit) as stopped:
        module.main(["--help"])
    assert stopped.value.code == 0 and f"usage: python -m benchmarks.{name}" in capsys.readouterr().out
