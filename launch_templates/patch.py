"""A patch over rendered manifests, as `kubectl patch` and kustomize merge it (strategic merge). Pure.

Mappings are merged and `null` removes a key. Items of a list are merged by name (of volumeMounts by mountPath), an item
with `$patch: delete` is removed; other lists are replaced.
"""

from __future__ import annotations

import copy
from typing import Any

from launch_templates.errors import BadFile
from launch_templates.lint.document import Document
from launch_templates.values import plain_copy

_KEYS = {"volumeMounts": "mountPath", "ports": "containerPort"}
"""Lists whose items are not told apart by their name alone."""


def apply_patch(bodies: list[Any], patch: list[Document]) -> list[Any]:
    """Return the manifest with each document of a patch merged into the object of its kind and, if given, name.

    Raises:
        BadFile: a document of the patch fits no object, or several.
    """
    patched = [Document("", body) for body in copy.deepcopy(bodies)]
    for document in patch:
        try:
            over = plain_copy(document.body)
        except ValueError:
            problem = (
                f"the patch of {document.label} holds what is no Kubernetes YAML, such as a date, or contains itself"
            )
            raise BadFile(document.source, problem, "put dates into quotes, and write aliases out") from None
        fits = [
            number
            for number, one in enumerate(patched)
            if one.kind == document.kind and document.name in ("", one.name)
        ]
        if len(fits) != 1:
            seen = ", ".join(one.label for one in patched)
            problem = f"a patch of {document.label} fits {len(fits)} of the rendered objects"
            raise BadFile(document.source, problem, f"give kind and metadata.name of one of: {seen}")
        patched[fits[0]] = Document("", _merge(patched[fits[0]].body, over, ""))
    return [one.body for one in patched]


def _merge(base: Any, over: Any, field: str) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        merged = dict(base)
        for key, value in over.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = _merge(base.get(key), value, key)
        return merged
    if isinstance(over, list):
        key = _KEYS.get(field, "name")
        if all(isinstance(item, dict) and key in item for item in [*over, *(base if isinstance(base, list) else [])]):
            return _merge_items(base if isinstance(base, list) else [], over, key)
    return _without_nulls(over)


def _merge_items(base: list[Any], over: list[Any], key: str) -> list[Any]:
    items = {item[key]: item for item in base}
    for item in over:
        if item.get("$patch") == "delete":
            items.pop(item[key], None)
        else:
            items[item[key]] = _merge(items.get(item[key], {}), item, "")
    return list(items.values())


def _without_nulls(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_nulls(value) for key, value in node.items() if value is not None}
    if isinstance(node, list):
        return [_without_nulls(item) for item in node]
    return node
