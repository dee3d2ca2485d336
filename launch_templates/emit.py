"""Writing manifests as YAML that every parser reads alike. Pure.

YAML 1.1 and 1.2 and the parsers of kubectl disagree on plain scalars such as `y`, `on`, `1e3` or `0o17`. So a text
is written plain only when it cannot be anything but a text, and in double quotes otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z]+([-_./]?[A-Za-z0-9]+)*")
_WORDS_WITH_A_MEANING = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})
_ENDLESS = 2**31
"""Line width: lines are never folded, so that a search for an argument finds it."""


class _Dumper(yaml.SafeDumper):
    """Block style, keys in the given order, no aliases, sequences indented below their key."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)  # noqa: FBT003 - PyYAML takes it by position


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS_WITH_A_MEANING
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


_Dumper.add_representer(str, _represent_text)


def dump_documents(documents: Iterable[Any]) -> str:
    """YAML text of one or more documents, ending with a newline.

    Raises:
        yaml.YAMLError: a document holds something else than mappings, lists, texts, numbers, booleans and None.
    """
    return "---\n".join(
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_ENDLESS)
        for document in documents
    )
