"""Steadies hypothesis, and keeps collecting garbage quick."""

import gc
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from support.model_files import MODELS

torch.set_num_threads(1)


settings.register_profile("irc", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("irc")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    """Measurements of these runs stay among themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRC_CACHE_DIR", str(tmp_path_factory.mktemp("irc-cache")))
        yield


@pytest.fixture(autouse=True, scope="module")
def _only_new_garbage() -> None:  # pyright: ignore[reportUnusedFunction]
    """The collector passes over what is there before a file's tests: all modules of torch, a million objects.

    A measured step collects garbage several times; without this, that takes half the time of the tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """`models.py` with the factories `mlp`, `noisy`, `tied`, `nested` and `branching`."""
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path
