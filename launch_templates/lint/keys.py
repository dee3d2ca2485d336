"""Keys that no object of a kind has: the API server refuses them, or drops them, and with them what they were to say.

The table is made of the JSON schemas of Kubernetes and of the definitions of JobSet, PyTorchJob and Volcano's Job (all
Apache-2.0); it holds names and types alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from launch_templates.lint.document import Document, text
from launch_templates.lint.finding import Finding, Severity

_MAX_DEPTH = 60
"""Deeper than any manifest; one that contains itself ends here."""


@cache
def load_types() -> dict[str, dict[str, str]]:
    """Return type -> key -> type of its value: "" for anything, `*T` for a mapping of any keys to T.

    Kinds are named `APIVERSION KIND`. A list has the type of its items.
    """
    table = json.loads((files("launch_templates.lint") / "kubernetes_keys.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, str]] = table["types"]
    return found


def find_unknown_keys(documents: Sequence[Document]) -> list[Finding]:
    """Return a finding for each key that its object does not have, with the one that may be meant."""
    types = load_types()
    found = []
    for document in documents:
        kind = f"{text(document.body, 'apiVersion')} {document.kind}"
        for path, key, near in _walk(document.body, kind, "", types) if kind in types else ():
            message = f"{key!r} is no key of {path or document.kind}"
            remedy = f"did you mean {near!r}?" if near else "remove it"
            place = f"{path}.{key}" if path else str(key)
            found.append(
                Finding("unknown-key", Severity.ERROR, document.source, document.label, place, message, remedy)
            )
    return found


def _walk(
    node: Any, kind: str, path: str, types: Mapping[str, Mapping[str, str]], depth: int = 0
) -> Iterator[tuple[str, Any, str]]:
    """Yield (path, key, near key) of the unknown keys in a node of a type."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(node, list):
        for position, item in enumerate(node):
            yield from _walk(item, kind, f"{path}[{position}]", types, depth + 1)
    elif isinstance(node, dict) and kind.startswith("*"):
        for key, value in node.items():
            yield from _walk(value, kind[1:], f"{path}.{key}", types, depth + 1)
    elif isinstance(node, dict) and kind in types:
        known = types[kind]
        for key, value in node.items():
            if key in known:
                if known[key]:
                    yield from _walk(value, known[key], f"{path}.{key}" if path else str(key), types, depth + 1)
            else:
                near = get_close_matches(str(key), known, n=1)
                yield path, key, near[0] if near else ""
