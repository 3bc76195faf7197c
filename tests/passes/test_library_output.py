"""Output of libraries, which does not reach the user's terminal."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from irc.passes import milp
from irc.passes.milp import Model, solve

_PLAN = """
import sys
import torch, irc
if "before" in sys.argv:
    from torch.profiler import profile
    with profile(): torch.ones(3)
    print("profiled", file=sys.stderr, flush=True)
layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers)
irc.optimize(model, (torch.randn(256, 64),), "100%", time_limit=5)(torch.randn(256, 64)).sum().backward()
if "before" in sys.argv:
    with profile(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("profiled", [False, True])
def test_planning_by_the_python_api_prints_nothing(tmp_path: Path, *, profiled: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"}
    environment |= {"IRC_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    code = [sys.executable, "-c", _PLAN, *(["before"] if profiled else [])]
    done = subprocess.run(code, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == ""
    if not profiled:
        assert done.stderr == ""
    else:
        assert "\nprofiled\n" in done.stderr  # the profiler's lines of the user's own sessions stay
        assert done.stderr.count("profiler_start") == 2


def test_what_a_solver_prints_is_discarded_and_what_threads_print_is_not(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library, original = ctypes.CDLL(None), milp.mathopt.solve

    def talkative(*args: Any, **kwargs: Any) -> Any:
        library.puts(b"noise of a library")
        other = threading.Thread(target=lambda: os.write(1, b"words of a thread\n"))
        other.start()
        other.join()
        return original(*args, **kwargs)

    monkeypatch.setattr(milp.mathopt, "solve", talkative)
    model = Model()
    model.minimize([(1.0, model.add_variable(lower=3.0))])
    threads = [threading.Thread(target=solve, args=(model,), kwargs={"seconds": 1, "gap": 0}) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    library.puts(b"after")
    library.fflush(None)
    assert capfd.readouterr().out == "words of a thread\n" * 2 + "after\n"
