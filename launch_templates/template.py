"""The manifests that come with the package, read from their YAML files.

A file `manifests/NAME.yaml` is a template; its first comment line is `NAME: summary`. Adding a file adds a template.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from launch_templates.catalogue import CATALOGUE
from launch_templates.errors import UnknownName
from launch_templates.fill import find_placeholders
from launch_templates.job import DERIVED
from launch_templates.placeholder import Placeholder

_SUFFIX = ".yaml"


@dataclass(frozen=True)
class Template:
    """One manifest with open places. Do not change `documents`: it is shared."""

    name: str
    comment: str
    """Head comment without its comment signs."""
    documents: tuple[Any, ...]
    """Parsed YAML documents with placeholders in them."""

    @property
    def summary(self) -> str:
        """What it is, in one line."""
        return self.comment.partition("\n")[0].partition(": ")[2]

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """What can be set, directly or through a derived value, in the order of the catalogue."""
        used = set(find_placeholders(list(self.documents)))
        wanted = {need for name in used for need in (DERIVED[name].needs if name in DERIVED else (name,))}
        return tuple(placeholder for placeholder in CATALOGUE if placeholder.name in wanted)


def list_templates() -> list[str]:
    """Names of all templates, sorted."""
    folder = files("launch_templates") / "manifests"
    return sorted(item.name.removesuffix(_SUFFIX) for item in folder.iterdir() if item.name.endswith(_SUFFIX))


@cache
def load_template(name: str) -> Template:
    """The template of that name.

    Raises:
        UnknownName: there is none.
    """
    known = list_templates()
    if name not in known:
        raise UnknownName("template", name, known)
    text = (files("launch_templates") / "manifests" / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    return Template(name, _head_comment(text), tuple(yaml.safe_load_all(text)))


def _head_comment(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)
