"""Sphinx's settings for this site: `make docs` builds it, with warnings as errors."""

from __future__ import annotations

import re
from typing import Any

import click

from msrun import __version__
from msrun.cli import command
from msrun.cli.options import GROUPS

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


def group_options(_app: Any, context: click.Context, lines: list[str]) -> None:
    """Put the options of msrun under the titles that --help gives them."""
    if context.command is not command:
        return
    options: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith(".. option:: "):
            name = re.split(r"[ ,]", line.removeprefix(".. option:: "))[0]
            options[name] = []
        options[name].append(line)
    lines.clear()
    for title, group in GROUPS.items():
        lines += [f".. rubric:: {title}", ""]
        for parameter in group:
            lines += options.pop(parameter.opts[0], [])
    for rest in options.values():
        lines += rest


def setup(app: Any) -> None:
    """Connect to Sphinx."""
    app.connect("sphinx-click-process-options", escape_help)
    app.connect("sphinx-click-process-options", group_options)
    app.connect("sphinx-click-process-arguments", escape_help)
