"""Dataclasses as JSON and back, by their type hints: how a spec reaches another host and a plan comes home."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def encode_record(value: Any) -> Any:
    """Return a dataclass, or what its fields hold, as JSON-able values; paths become text, tuples lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode_record(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode_record(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_record(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def decode_record(cls: type[T], value: object) -> T:
    """Return what `encode_record` made of a `cls`; fields that are left out keep their defaults.

    Raises:
        ValueError: it is not of this form; a name of a field that `cls` does not have is an error, too.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{cls.__name__}: {type(value).__name__} is no JSON object")
    record: Any = cls
    hints = _hints(record)
    unknown = value.keys() - hints.keys()
    if unknown:
        raise ValueError(f"{cls.__name__}: unknown field {sorted(unknown)[0]}")
    try:
        return cls(**{name: _decode(hints[name], item) for name, item in value.items()})
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from None


_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)
"""A job of many hosts asks thousands of times."""


def _decode(hint: Any, value: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _decode_any([arg for arg in args if arg is not type(None)], value)
    if origin is typing.Literal:
        return _checked(value in args, value, hint)
    if origin is tuple:
        items = _checked(isinstance(value, list), value, hint)
        kinds = [args[0]] * len(items) if args[-1] is Ellipsis else list(args)
        return tuple(_decode(kind, item) for kind, item in zip(kinds, items, strict=True))
    if origin is list:
        return [_decode(args[0], item) for item in _checked(isinstance(value, list), value, hint)]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        items = _checked(isinstance(value, dict), value, hint).items()
        return {(int(key) if args[0] is int else key): _decode(args[1], item) for key, item in items}
    if hint is Path:
        return Path(_checked(isinstance(value, str), value, hint))
    if hint is float:
        return float(_checked(isinstance(value, int | float) and not isinstance(value, bool), value, hint))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return decode_record(hint, value)
    return _checked(type(value) is hint, value, hint)


def _decode_any(hints: list[Any], value: Any) -> Any:
    for hint in hints[:-1]:
        with contextlib.suppress(ValueError):
            return _decode(hint, value)
    return _decode(hints[-1], value)


def _checked(is_right: bool, value: Any, hint: Any) -> Any:
    if not is_right:
        raise ValueError(f"{str(value)[:80]!r} is not {getattr(hint, '__name__', hint)}")
    return value
