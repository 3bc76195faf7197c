"""Steadies hypothesis, and keeps collecting tests and garbage quick."""

import gc
from collections.abc import Generator
from pathlib import Path

import pytest

gc.disable()  # until all tests are collected: what is imported until then stays

import torch  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis.strategies import integers, text  # noqa: E402
from support.examples import load_profile  # noqa: E402
from support.model_files import MODELS  # noqa: E402

pytest_plugins = ["pytester", "support.speed"]

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    load_profile(config.option.markexpr == "fast")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    """Measurements of these runs stay among themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRC_CACHE_DIR", str(tmp_path_factory.mktemp("irc-cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _warm(_own_cache: None) -> None:  # pyright: ignore[reportUnusedFunction]
    """Plans and trains something small, so that no test is charged for what is imported and built once."""
    import irc

    x = torch.ones(2, 2)
    irc.optimize(torch.nn.Linear(2, 2), x, "100%")(x).sum().backward()
    given(text() | integers())(lambda _: None)()  # hypothesis reads the constants of all modules once


@pytest.fixture(autouse=True, scope="module")
def _only_new_garbage() -> None:  # pyright: ignore[reportUnusedFunction]
    """The collector passes over what is there before a file's tests: all modules of torch, a million objects.

    A measured step collects garbage several times; without this, that takes half the time of the tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _frozen() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    """Planning need not ask whether the heap is frozen: counting its objects takes longer than a plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """`models.py` with the factories `mlp`, `noisy`, `tied`, `nested` and `branching`."""
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path
