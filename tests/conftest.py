"""Makes `strategies` importable from every test, steadies hypothesis, and keeps collecting garbage quick."""

import gc
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

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
