"""Kubernetes manifests that start msrun in pods: templates as data, a renderer and a lint.

    from launch_templates import render_manifest
    print(render_manifest("jobset", {"name": "train", "image": "r.example/train:1"}, ["train.py", "--lr", "0.1"]))

The public names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch_templates.errors import BadFile, BadValue, LaunchTemplateError, MissingValue, UnknownName
    from launch_templates.lint.finding import Finding, Severity
    from launch_templates.lint.linter import has_errors, lint_texts
    from launch_templates.placeholder import Placeholder
    from launch_templates.render import render_manifest
    from launch_templates.template import Template, list_templates, load_template

_HOMES = {
    "BadFile": "errors",
    "BadValue": "errors",
    "Finding": "lint.finding",
    "LaunchTemplateError": "errors",
    "MissingValue": "errors",
    "Placeholder": "placeholder",
    "Severity": "lint.finding",
    "Template": "template",
    "UnknownName": "errors",
    "has_errors": "lint.linter",
    "lint_texts": "lint.linter",
    "list_templates": "template",
    "load_template": "template",
    "render_manifest": "render",
}

__all__ = [
    "BadFile",
    "BadValue",
    "Finding",
    "LaunchTemplateError",
    "MissingValue",
    "Placeholder",
    "Severity",
    "Template",
    "UnknownName",
    "has_errors",
    "lint_texts",
    "list_templates",
    "load_template",
    "render_manifest",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
