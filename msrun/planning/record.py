"""Records as JSON and back, by their type hints: how a spec reaches another host and a plan comes home."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ranktable.record import Record as Record

T = TypeVar("T")


def encode_record(value: Any) -> Any:
    """Return a dataclass, or what its fields hold, as JSON-able values; paths become text, tuples lists."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): encode_record(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [encode_record(one) for one in value]
    names = getattr(value, "__dataclass_fields__", None)
    return str(value) if names is None else {name: encode_record(getattr(value, name)) for name in names}


def decode_record(cls: type[T], value: object) -> T:
    """Return what `encode_record` made of a `cls`, defaults where fields are left out (ValueError: a wrong field)."""
    import msgspec  # not for a job on one host

    try:
        return msgspec.convert(value, cls, str_keys=True, dec_hook=lambda hint, item: hint(item))
    except (msgspec.ValidationError, RecursionError, TypeError, OverflowError) as error:
        raise ValueError(f"{cls.__name__}: {error}") from None
