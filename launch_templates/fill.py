"""Placing values into the parsed structure of a manifest. Pure.

The values never meet YAML text, so no value can change the structure, whatever it contains:

    key: ${x}         the value with its type; None and empty lists and mappings remove the key
    - ${x}            a list is spliced in, another value becomes the item
    key: a-${x}       the value as text inside a text
    $if: x            first key of a mapping: keeps the mapping only when x is neither false, 0, None nor empty
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

CONDITION: Final = "$if"
_PLACEHOLDER = re.compile(r"\$\{([a-z_]+)\}")


class _Dropped:
    """Marks a node that is left out."""


_DROPPED: Final = _Dropped()


def fill(node: Any, values: Mapping[str, Any]) -> Any:
    """A new structure with every placeholder of `node` replaced; None when the whole node is left out.

    Raises:
        KeyError: `node` names a placeholder that `values` lacks.
    """
    filled = _fill(node, values)
    return None if filled is _DROPPED else filled


def find_placeholders(node: Any) -> Iterator[str]:
    """Names of all placeholders in `node`, in order, with repeats."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from [value] if key == CONDITION else find_placeholders(value)
    elif isinstance(node, list):
        for item in node:
            yield from find_placeholders(item)
    elif isinstance(node, str):
        yield from _PLACEHOLDER.findall(node)


def _fill(node: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        return _fill_mapping(node, values)
    if isinstance(node, list):
        return [filled for item in node for filled in _fill_item(item, values)]
    if isinstance(node, str):
        return _fill_text(node, values)
    return node


def _fill_mapping(node: dict[str, Any], values: Mapping[str, Any]) -> Any:
    if CONDITION in node and not values[node[CONDITION]]:
        return _DROPPED
    filled = {key: _fill(value, values) for key, value in node.items() if key != CONDITION}
    return {key: value for key, value in filled.items() if value is not _DROPPED}


def _fill_item(item: Any, values: Mapping[str, Any]) -> list[Any]:
    filled = _fill(item, values)
    if filled is _DROPPED:
        return []
    is_splice = isinstance(item, str) and isinstance(filled, list)
    return filled if is_splice else [filled]


def _fill_text(node: str, values: Mapping[str, Any]) -> Any:
    whole = _PLACEHOLDER.fullmatch(node)
    if whole is None:
        return _PLACEHOLDER.sub(lambda match: _text(values[match[1]]), node)
    value = values[whole[1]]
    return _DROPPED if value is None or value in ([], {}) else copy.deepcopy(value)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
