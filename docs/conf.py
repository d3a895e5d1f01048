"""How Sphinx builds these pages: `make docs`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from generated import write_reference  # noqa: E402
from pygments.lexers.special import TextLexer  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402
from sphinx_gallery.scrapers import figure_rst  # noqa: E402

from harness.basics.version import version as harness_version  # noqa: E402

os.environ.setdefault("MPLBACKEND", "Agg")

project = "stability-harness"
copyright = "the stability-harness authors, MIT licence"
release = version = harness_version()

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "tutorials/README.rst", "**/GALLERY_HEADER.rst"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["config.cache"]  # the gallery's configuration has functions in it
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
linkcheck_ignore = [r"http://127\.0\.0\.1:.*"]  # the address of `watch`, in an example
default_role = "code"  # a word in single backticks is one of code

html_theme = "pydata_sphinx_theme"
html_title = "stability-harness"
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_end": [],
}
html_sidebars: dict[str, list[str]] = {"index": []}
html_show_sourcelink = False


def written_pictures(block: Any, variables: dict[str, Any], gallery: dict[str, Any]) -> str:
    """Shows the pictures that a tutorial's block has written into its `folder`, in that order."""
    folder = variables["example_globals"].get("folder")
    written = sorted(Path(folder).glob("*.png"), key=lambda file: file.stat().st_mtime_ns) if folder else []
    shown = [shutil.move(file, next(variables["image_path_iterator"])) for file in written]
    return str(figure_rst(shown, gallery["src_dir"]))


sphinx_gallery_conf = {
    "image_scrapers": ("matplotlib", written_pictures),
    "examples_dirs": "tutorials/scripts",
    "gallery_dirs": "tutorials",
    "filename_pattern": r"/\d\d_",  # every one of them is run
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "download_all_examples": False,
    "show_signature": False,
    "matplotlib_animations": False,
    "min_reported_time": 0,
}


def with_gallery(app: Sphinx, page: str, source: list[str]) -> None:
    """A link to the scripts of the tutorials, which a checkout has, leads to the gallery, which the site has."""
    source[0] = source[0].replace("(../tutorials/scripts)", "(../tutorials/index.rst)")


def setup(app: Sphinx) -> None:
    """Write the pages that the code itself tells, before Sphinx looks for files."""
    app.connect("source-read", with_gallery)
    app.add_lexer("mermaid", TextLexer)  # which hosts of code draw, and needs a script from elsewhere here
    write_reference(HERE / "reference")
