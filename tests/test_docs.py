"""The documentation: links lead somewhere, Python blocks run, and commands are those of the parser."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

from irc.passes.costs.machines import machine_named
from irc.tools.cli import parser

ROOT = Path(__file__).parents[1]
WRITTEN = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_gallery" not in page.parts]
OTHERS = ("benchmarks", "tests", "examples", "docs")
"""The folders with Python beside those of the product."""
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


FILES = [
    path.relative_to(ROOT)
    for folder in (
        *(link.resolve() for link in (ROOT / "src" / "irc").iterdir()),
        *map(ROOT.joinpath, OTHERS),
    )
    for path in ([folder] if folder.is_file() else folder.rglob("*.py"))
]

NAMES = {name for path in FILES for name in re.findall(r"[A-Za-z_]\w*", (ROOT / path).read_text())}


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "explanation" / "design.md"])
def test_files_and_names_in_backticks_exist(page: Path) -> None:
    """A word in capitals, as in `passes/NAME.py`, stands for a file that the reader writes."""
    paths = {*map(str, FILES), *(f"{parent}/" for path in FILES for parent in path.parents)}
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    missing: list[str] = []
    for quoted in re.findall(r"(?<!\})`([^`\n]+)`", text):
        path, _, name = quoted.partition(":")
        if re.fullmatch(r"\w+(/[\w.]+)*(\.py|/)", path):
            while re.search(r"[A-Z]{3}", path.rpartition("/")[2]):
                path = path.rpartition("/")[0]
            is_known = (ROOT / path).exists() or any(known.endswith(f"/{path}") for known in paths)
        elif re.fullmatch(r"[A-Za-z]?\w*(_|[a-z][A-Z])\w*(\.\w+)*", quoted):
            is_known, name = True, quoted
        else:
            continue
        if not is_known or not {*filter(None, name.split("."))} <= NAMES:
            missing.append(quoted)
    assert missing == []


def test_result_pages_name_no_folder_of_a_machine() -> None:
    for page in (ROOT / "docs" / "results").glob("*.md"):
        assert re.findall(r"(?<![\w.])/(?:tmp|home|root|work|var|mnt|Users)/\S*", page.read_text()) == [], (
            page
        )


# The blocks of a page share a namespace. What a reader has already (a model, its inputs) stands in a block
# that the site hides: <!-- invisible-code-block: python ... -->.
BLOCKS = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "```python" in page.read_text()],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for example in BLOCKS.parse(page).examples():
            example.evaluate()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_those_of_the_parser(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text(json.dumps(machine_named("cpu").to_json()))
    blocks = re.findall(r"^```(.*?)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for line in (
        "\n".join(block for language, block in blocks if language in ("", "sh"))
        .replace("\\\n", " ")
        .splitlines()
    ):
        if re.match(r"irc [a-z]", line):
            parser().parse_args(shlex.split(line, comments=True)[1:])
