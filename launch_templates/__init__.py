"""Jobs that start msrun, for clusters: one spec, kinds as data, a renderer and a lint.

    from launch_templates import render_manifest
    print(render_manifest("jobset", {"name": "train", "image": "r.example/train:1"}, ["train.py", "--lr", "0.1"]))

The public names are loaded on first use, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch_templates.errors import BadFile, BadValue, LaunchTemplateError, MissingValue, UnknownName
    from launch_templates.kinds import Kind, list_kinds, load_kind
    from launch_templates.lint import has_errors, lint_texts
    from launch_templates.lint.rules import Finding, Severity
    from launch_templates.render import render_manifest
    from launch_templates.spec import JobSpec, Setting

__all__ = [
    "BadFile", "BadValue", "Finding", "JobSpec", "Kind", "LaunchTemplateError", "MissingValue", "Setting", "Severity",
    "UnknownName", "has_errors", "lint_texts", "list_kinds", "load_kind", "render_manifest",
]  # fmt: skip
_HOMES = ("errors", "spec", "kinds", "lint", "lint.rules", "render")


def own_version() -> str:
    """That of the installed distribution msrun, of which this is a part; `unknown` when it is only on Python's path."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("msrun")
    except PackageNotFoundError:
        return "unknown"


def __getattr__(name: str) -> Any:
    modules = (import_module(f"{__name__}.{home}") for home in _HOMES if name in __all__)
    for module in modules:
        if name in vars(module):
            return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
