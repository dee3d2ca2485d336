"""Plans back from JSON: dataclasses rebuilt from their type hints."""

from __future__ import annotations

import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any

from msrun.errors import StrategyError


def build_from_json(kind: Any, value: Any, where: str = "plan") -> Any:
    """Return the value of type `kind` that `dataclasses.asdict` and JSON made into `value`.

    Dataclasses, tuples, dicts with text keys, optional values and plain ones are understood.

    Raises:
        StrategyError: a field is missing or unknown.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return (
            None if value is None else build_from_json(next(a for a in arguments if a is not type(None)), value, where)
        )
    if is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(build_from_json(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict:
        return {name: build_from_json(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    return value


def _build_dataclass(kind: Any, value: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    if not isinstance(value, dict) or set(value) != set(names):
        found = sorted(value) if isinstance(value, dict) else value
        raise StrategyError(f"{where}: the fields of {kind.__name__} are {', '.join(names)}; found {found}")
    return kind(**{name: build_from_json(hints[name], value[name], f"{where}.{name}") for name in names})
