"""Dataclasses as JSON and back, by their type hints: how a spec reaches another host and a plan comes home."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def encode_record(value: Any) -> Any:
    """Return a dataclass, or what its fields hold, as JSON-able values; paths become text, tuples lists."""
    import msgspec  # not for `msrun --help`

    return msgspec.to_builtins(value, str_keys=True, enc_hook=str)


def decode_record(cls: type[T], value: object) -> T:
    """Return what `encode_record` made of a `cls`, defaults where fields are left out (ValueError: a wrong field)."""
    import msgspec

    try:
        return msgspec.convert(value, cls, str_keys=True, dec_hook=lambda hint, item: hint(item))
    except (msgspec.ValidationError, RecursionError, TypeError, OverflowError) as error:
        raise ValueError(f"{cls.__name__}: {error}") from None
