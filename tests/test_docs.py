"""The documentation: links lead somewhere, and Python blocks of the first pages run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
WRITTEN = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_gallery" not in page.parts]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *WRITTEN]


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and myst make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http", "mailto")):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        assert file.exists(), f"{page.relative_to(ROOT)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.relative_to(ROOT)} links to {target}"
    for name in re.findall(r"\{doc\}`([^`<]+)`", text):
        assert (page.parent / f"{name}.md").is_file(), f"{page.relative_to(ROOT)} names {name}"


def test_no_page_is_left_out_of_the_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {
        str(p.relative_to(ROOT / "docs").with_suffix("")) for p in PAGES if p.is_relative_to(ROOT / "docs")
    }
    listed = set(re.findall(r"^([a-z_]+(?:/[a-z_]+)?)$", index, re.MULTILINE))
    assert pages - listed - {"index"} - {p for p in pages if p.startswith("results/")} == set()


def test_the_first_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "start.md").read_text(), re.DOTALL)
    with torch.random.fork_rng():
        exec(compile(script, "start.md", "exec"), {})
    assert "predicted peak" in capsys.readouterr().out
