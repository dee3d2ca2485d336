"""Sphinx's settings for this site: `make docs` builds it, with warnings as errors."""

from __future__ import annotations

import re
from typing import Any

from msrun import __version__

project = "msrun"
copyright = "the authors of msrun"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# These are shown as text: what they colour is the output of programs.
suppress_warnings = ["misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
autodoc_preserve_defaults = True
napoleon_use_ivar = True

smartquotes = False  # -- is an option's

html_theme = "furo"
html_title = f"msrun {__version__}"
html_copy_source = False
html_show_sourcelink = False


def escape_help(_app: Any, _context: Any, lines: list[str]) -> None:
    """Keep the help of options as it is: it is text, not reStructuredText."""
    lines[:] = [
        line if line.lstrip().startswith((".. ", ":")) else re.sub(r"([*_`|\\])", r"\\\1", line) for line in lines
    ]


def setup(app: Any) -> None:
    """Connect to Sphinx."""
    app.connect("sphinx-click-process-options", escape_help)
    app.connect("sphinx-click-process-arguments", escape_help)
