"""Reading what the user sets: `--set` texts and values files. Files are read here, values are checked elsewhere."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from launch_templates.errors import BadFile, BadValue
from launch_templates.spec import settings_of_spec
from launch_templates.values import Argv, Table
from ranktable.bounded_text import TextError, load_yaml
from ranktable.files import decode_text
from ranktable.files import read_text as file_text

MAX_BYTES = 16_000_000
"""Largest file of values or manifests; Kubernetes takes no object above 1.5 MB."""
_CHECK = "check the path and its permissions"
_REMEDIES = {errno.EILSEQ: "save it as UTF-8", errno.EFBIG: "give a file of values or manifests"}


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Settings from `KEY=VALUE` and `TABLE.KEY=VALUE` texts; the last one of a key wins.

    Raises:
        BadValue: a text without `=`, a table without a key, or a key below something that is no table.

    >>> parse_settings(["nodes=4", "env.LEVEL=a=b"])
    {'nodes': '4', 'env': {'LEVEL': 'a=b'}}
    """
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise BadValue("--set", text, "KEY=VALUE", f"write --set {key}=VALUE")
        name, dot, entry = key.partition(".")
        name = name.replace("-", "_")
        _check_shape(name, entry, key, text)
        if dot:
            settings.setdefault(name, {})[entry] = value
        else:
            settings[name] = value
    return settings


def _check_shape(name: str, entry: str, key: str, text: str) -> None:
    known = settings_of_spec()
    value_type = known[name].value_type if name in known else None
    if isinstance(value_type, Argv):
        raise BadValue("--set", text, "another name: a script has several words", "end the command with -- SCRIPT ARGS")
    if isinstance(value_type, Table) and not entry:
        raise BadValue("--set", text, f"{name}.KEY=VALUE", f"write --set {name}.KEY=VALUE, once for each key")
    if entry and value_type is not None and not isinstance(value_type, Table):
        raise BadValue("--set", text, f"{name}=VALUE, because {name} has no parts", f"remove {key[len(name) :]}")


def merge_settings(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` overridden by `over`; two tables are merged key by key."""
    merged = dict(base)
    for name, value in over.items():
        before = merged.get(name)
        merged[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def read_values_file(path: str) -> dict[str, Any]:
    """Settings from a YAML file: one mapping of field names to values.

    Raises:
        BadFile: it cannot be read, or is no YAML mapping.
    """
    try:
        content = load_yaml(read_text(path))
    except TextError as error:
        raise BadFile(path, f"{error.place}{error.problem}", error.remedy) from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise BadFile(path, "must be one YAML mapping of field names to values", "write lines such as nodes: 4")
    return content


def read_text(path: str) -> str:
    """Content of a UTF-8 file; - is standard input.

    Raises:
        BadFile: it cannot be read, is not UTF-8 or has more than `MAX_BYTES`.
    """
    try:
        if path == "-":
            return decode_text(sys.stdin.buffer.read(MAX_BYTES + 1), MAX_BYTES)
        return file_text(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadFile(path, f"cannot be read: {reason}", _REMEDIES.get(getattr(error, "errno", 0), _CHECK)) from None
