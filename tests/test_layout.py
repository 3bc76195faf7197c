"""The package is the folders of the product at the root, and importing it costs nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import irc

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "irc"


ROOMS = ("ir", "torch_support", "passes", "frontends", "backends", "compiler", "tools")


@pytest.mark.parametrize("name", ROOMS)
def test_links_resolve(name: str) -> None:
    link = PACKAGE / name
    assert link.is_dir() and link.resolve() == ROOT / name, (
        f"src/irc/{name} is not a link to the folder {name}/ at the root: check the repository out again "
        "with symbolic links (git config core.symlinks true; on Windows, in developer mode)"
    )


FOLDERS = {*ROOMS, ".ci", "benchmarks", "docs", "examples", "src", "tests"}
FILES = {
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
}


def test_the_top_level_holds_nothing_else() -> None:
    """What a library or a test left behind is not committed."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no checkout of git, or no git")
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    found = {name.split("/")[0] for name in listed.split("\0") if name}
    assert found - FOLDERS - FILES == set()


def test_all_folders_are_checked_for_types() -> None:
    """The type checker does not follow links: it is told of each."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    links = {f"src/irc/{path.name}" for path in PACKAGE.iterdir() if path.is_symlink()}
    assert len(links) == len(ROOMS) and links <= set(settings["include"])


def test_all_folders_are_in_what_is_built() -> None:
    """No build looks at a link: sdist and wheel are told of the folders and of the files beside the links."""
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    own = {f"src/irc/{path.name}" for path in PACKAGE.iterdir() if path.is_file()}
    assert set(targets["wheel"]["only-include"]) == {*ROOMS, *own}
    assert set(targets["sdist"]["only-include"]) - FILES == {*ROOMS, *own}
    assert targets["wheel"]["sources"] == {"src/irc": "irc"} | {room: f"irc/{room}" for room in ROOMS}


def test_public_names_exist() -> None:
    wanted = {
        "BackwardError",
        "BudgetError",
        "Comparison",
        "Front",
        "IrcError",
        "Plan",
        "Progress",
        "TierError",
        "TimeLimitError",
        "UnsupportedError",
        "UsageError",
    }
    wanted |= {
        "Estimate",
        "LargestBatch",
        "VerificationError",
        "backend",
        "compare",
        "estimate",
        "export_onnx",
        "from_onnx",
        "keep",
        "max_batch",
        "measured_peak_bytes",
        "measured_step",
        "optimize",
        "pareto",
        "pipeline",
        "recompute",
        "report",
        "unmark",
    }
    assert wanted == set(irc.__all__)
    assert all(getattr(irc, name) is not None for name in irc.__all__)
    assert set(irc.__all__) <= set(dir(irc))
    with pytest.raises(AttributeError, match="has no attribute 'optimise'"):
        irc.optimise  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("package", ["ir", "passes", "frontends.torch", "frontends.onnx", "backends.torch"])
def test_every_listed_name_exists(package: str) -> None:
    module = __import__(f"irc.{package}", fromlist=["__all__"])
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


HEAVY = (
    "torch",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "ortools",
    "numpy",
    "safetensors",
    "networkx",
    "rich",
    "matplotlib",
)


@pytest.mark.parametrize(
    "statement",
    [
        "import irc, irc.ir",
        "import irc; irc.Plan; irc.BudgetError; irc.ir.parse_budget('4GiB')",
        "from irc.tools.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from irc.tools.cli import main\nassert main(['nonsense']) == 2",
    ],
)
def test_light_imports(statement: str) -> None:
    code = f"import sys\n{statement}\nprint('heavy:', [n for n in {HEAVY!r} if n in sys.modules])"
    environment = {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"
