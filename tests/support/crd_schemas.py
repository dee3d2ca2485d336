"""Strict JSON schemas out of CustomResourceDefinitions: what they do not name is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def schemas_of(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return (apiVersion, kind) -> schema of all definitions in a folder."""
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        for definition in yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader):
            spec = definition["spec"]
            for version in spec["versions"]:
                name = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                schema = _strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                found[name] = schema
    return found


def _strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: _strict(value) for key, value in node.items()}
    if node.get("x-kubernetes-int-or-string") is True:
        made.pop("type", None)
        made["type"] = ["integer", "string"]
    if isinstance(node.get("properties"), dict) and not node.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if node.get("nullable") is True and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    made.pop("x-kubernetes-validations", None)
    return made
