"""Fitted modules on two ranks: the gradients of DDP and FSDP with the original, or a refusal by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from support.ranks import CHECKS, RANKS, Net, batches, run

import irc

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank found; the ranks are started once, with a fitted module among their arguments."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    module = irc.optimize(Net(), batches(0)[0], "100%", costs="analytic", time_limit=1)
    torch.multiprocessing.spawn(run, args=(str(folder), tuple(CHECKS), module), nprocs=RANKS)
    return [torch.load(Path(folder) / f"results-{rank}") for rank in range(RANKS)]


@pytest.mark.parametrize("name", ["a module that was sent", *CHECKS])
def test_on_two_ranks(name: str, results: list[dict[str, str]]) -> None:
    assert [found[name] for found in results] == ["", ""]


def test_a_replica_of_data_parallel_is_refused() -> None:
    x = torch.randn(3, 4)
    ours = irc.optimize(torch.nn.Linear(4, 4), x, "100%", costs="analytic", time_limit=1)
    with pytest.raises(irc.UnsupportedError, match=r"IRC534.*replica.*DataParallel"):
        ours._replicate_for_data_parallel()(x)


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
@pytest.mark.parametrize("kind", ["script", "trace", "compile"])
def test_what_torch_has_compiled_is_refused(kind: str) -> None:
    module, x = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(3, 4)
    wrapped = {
        "script": lambda: torch.jit.script(module),
        "trace": lambda: torch.jit.trace(module, x),
        "compile": lambda: torch.compile(module, backend="eager"),
    }[kind]()
    with pytest.raises(irc.UnsupportedError, match=r"IRC534.*made by torch\.(jit|compile)") as raised:
        irc.optimize(wrapped, x, "100%", costs="analytic")  # type: ignore[arg-type]
    assert raised.value.help is not None


def test_a_tensor_that_takes_over_operations_is_refused() -> None:
    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: object, types: object, args: object = (), kwargs: object = None
        ) -> None:
            raise AssertionError("not called")

    x = torch.randn(3, 4)
    logged = x.as_subclass(Logged)
    ours = irc.optimize(torch.nn.Linear(4, 4), x, "100%", costs="analytic", time_limit=1)
    with pytest.raises(irc.UnsupportedError, match=r"IRC531.*input 0 is a Logged"):
        ours(logged)
    with pytest.raises(irc.UnsupportedError, match=r"IRC531.*input 0 is a Logged"):
        irc.optimize(torch.nn.Linear(4, 4), (logged,), "100%", costs="analytic")


def test_parameters_that_the_first_forward_makes_are_refused_with_a_cure_that_works() -> None:
    model, x = torch.nn.Sequential(torch.nn.LazyLinear(4)), torch.randn(3, 4)
    with pytest.raises(irc.UnsupportedError, match=r"IRC531.*0.weight is a UninitializedParameter") as raised:
        irc.optimize(model, (x,), "100%", costs="analytic")
    assert raised.value.help == "call the module once on the example before irc.optimize"
    model(x)
    assert irc.optimize(model, (x,), "100%", costs="analytic")(x).requires_grad
