"""Configuration of the documentation site: `make docs`."""

import sys
from pathlib import Path

import irc

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

project = "irc"
author = "the irc authors"
version = release = irc.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "sphinxarg.ext",
]
default_role = "code"
exclude_patterns = [
    "_build",
    "tutorials/*.md",
    "tutorials/*.rst",
    "tutorials/*.ipynb",
    "tutorials/README.rst",
]
html_theme = "furo"
html_title = f"irc {release}"
html_static_path: list[str] = []
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath", "colon_fence"]
suppress_warnings = ["myst.domains"]  # that of sphinx-argparse resolves nothing by itself
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_custom_sections = [("Source", "notes_style"), ("Source:", "notes_style")]
sphinx_gallery_conf = {
    "examples_dirs": ["tutorials"],
    "gallery_dirs": ["_gallery"],
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "min_reported_time": 5,
    "remove_config_comments": True,
    "image_scrapers": (),
    "reset_modules": (),
}
smartquotes = False  # options of commands keep their two hyphens
