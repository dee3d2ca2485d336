"""Kubernetes documents read from YAML, and safe access to what may be malformed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launch_templates.errors import BadFile
from ranktable.bounded_text import TextError, load_yaml_documents


@dataclass(frozen=True)
class Document:
    """One Kubernetes object."""

    source: str
    """File it comes from."""
    body: dict[str, Any]

    @property
    def group(self) -> str:
        """API group; empty for the core group."""
        return text(self.body, "apiVersion").rpartition("/")[0]

    @property
    def kind(self) -> str:
        return text(self.body, "kind")

    @property
    def name(self) -> str:
        return text(self.body, "metadata", "name")

    @property
    def namespace(self) -> str:
        """Namespace; empty = that of kubectl."""
        return text(self.body, "metadata", "namespace")

    @property
    def label(self) -> str:
        """Kind/name, as kubectl writes it."""
        return f"{self.kind or '?'}/{self.name or '?'}"


def read_documents(content: str, source: str) -> list[Document]:
    """All Kubernetes objects in a YAML text; the items of a List count one by one.

    Raises:
        BadFile: the text is not YAML, or one of its documents is no mapping.
    """
    try:
        bodies = [body for body in load_yaml_documents(content) if body is not None]
    except TextError as error:
        raise BadFile(source, f"{error.place}{error.problem}", error.remedy) from None
    return [document for body in bodies for document in _unfold(body, source)]


def _unfold(body: Any, source: str) -> Iterator[Document]:
    if not isinstance(body, dict):
        raise BadFile(source, f"a document is {type(body).__name__}, not a mapping", "give Kubernetes manifests")
    if body.get("kind") == "List":
        for item in sequence(body, "items"):
            yield from _unfold(item, source)
    else:
        yield Document(source, body)


def dig(node: Any, *path: str) -> Any:
    """Value at a path of keys; None when a step is missing or no mapping."""
    for key in path:
        if not isinstance(node, dict):
            return None
        node = node.get(key)
    return node


def mapping(node: Any, *path: str) -> dict[str, Any]:
    """Mapping at a path; empty when there is none."""
    found = dig(node, *path)
    return found if isinstance(found, dict) else {}


def sequence(node: Any, *path: str) -> list[Any]:
    """List at a path; empty when there is none."""
    found = dig(node, *path)
    return found if isinstance(found, list) else []


def text(node: Any, *path: str) -> str:
    """Text at a path; empty when there is none."""
    found = dig(node, *path)
    return found if isinstance(found, str) else ""


def number(node: Any, *path: str) -> int | None:
    """Integer at a path; None when there is none."""
    found = dig(node, *path)
    return found if type(found) is int else None
