"""The types that the fields of a job spec can have, and Kubernetes quantities ("500m", "32Gi") as numbers. Pure."""

import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from types import GenericAlias
from typing import Annotated, Any

from msgspec import Meta, convert

from launch_templates.names import PROCESS_TEXT
from ranktable.bounded_text import TextError, load_yaml

# The grammar of apimachinery's resource.Quantity, without signs: training never asks for a negative amount.
_QUANTITY = re.compile(r"(?P<number>[0-9]+(\.[0-9]*)?|\.[0-9]+)(?P<suffix>[eE][-+]?[0-9]{1,3}|m|[KMGTPE]i|[kMGTPE])?")
_SCALE = {"": Decimal(1), "m": Decimal("0.001")}
_SCALE |= {letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", start=1)}
_SCALE |= {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)}


def parse_quantity(text: str) -> Decimal:
    """Number that a quantity stands for, in base units (cores, bytes, devices).

    Raises:
        ValueError: `text` is not a quantity.

    >>> parse_quantity("2Ki"), parse_quantity("500m")
    (Decimal('2048'), Decimal('0.500'))
    """
    if (match := _QUANTITY.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is not a quantity such as 8, 500m or 32Gi")
    suffix = match["suffix"] or ""
    scale = _SCALE[suffix] if suffix in _SCALE else Decimal(10) ** int(suffix[1:])
    return Decimal(match["number"]) * scale


def find_quantity(value: object) -> Decimal | None:
    """Number of a quantity as it stands in a manifest (text or number), None when it is none."""
    try:
        return None if isinstance(value, bool) else parse_quantity(str(value))
    except ValueError:
        return None


@dataclass(frozen=True)
class ValueType:
    """How a value, given as text (`--set`) or as YAML (`--values`), is read and checked."""

    type_name: str
    """One word for tables."""
    constraint: str
    """The rule, to be read after "must be"."""
    read: Callable[[Any], Any]
    """The value; raises ValueError when it breaks the rule."""


def _converted(type_name: str, constraint: str, python_type: Any) -> ValueType:
    return ValueType(type_name, constraint, lambda given: convert(given, python_type, strict=False))


def whole(minimum: int, maximum: int = 2**31 - 1) -> ValueType:
    """An integer within limits, both included."""
    limits = f"of at least {minimum}" if maximum == 2**31 - 1 else f"from {minimum} to {maximum}"
    return _converted("int", f"an integer {limits}", Annotated[int, Meta(ge=minimum, le=maximum)])


def text(pattern: str, constraint: str) -> ValueType:
    """Text that matches a pattern as a whole."""
    return _converted("text", constraint, _matching(pattern))


def _matching(pattern: str) -> Any:
    return Annotated[str, Meta(pattern=rf"\A(?:{pattern})\Z")]


def choice(*options: str) -> ValueType:
    """One of a few words; upper and lower case do not matter."""
    known = {option.lower(): option for option in options}

    def read(given: Any) -> str:
        if str(given).lower() not in known:
            raise ValueError
        return known[str(given).lower()]

    return ValueType("choice", f"one of {', '.join(options)}", read)


def table(key_pattern: str, value_pattern: str, constraint: str) -> ValueType:
    """Names mapped to texts: `--set name.KEY=VALUE`."""
    return _converted("table", constraint, GenericAlias(dict, (_matching(key_pattern), _matching(value_pattern))))


def tree(shape: type, constraint: str, accepts: Callable[[Any], bool] = lambda _: True) -> ValueType:
    """A piece of a pod's own YAML, as YAML text or parsed: lists, mappings with text keys, texts, numbers."""

    def read(given: Any) -> Any:
        try:
            given = load_yaml(given) if isinstance(given, str) else given
        except TextError:
            raise ValueError from None
        if not isinstance(given, shape) or not accepts(given):
            raise ValueError
        return plain_copy(given)

    return ValueType("yaml", constraint, read)


def _read_statuses(given: Any) -> tuple[int, ...]:
    words = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    return tuple(dict.fromkeys(_status(str(word).strip()) for word in words if word != ""))


def _status(word: str) -> int:
    """An exit status; a signal is 128 + its number, as the options of msrun take it."""
    name = f"SIG{word.upper().removeprefix('SIG')}"
    if name in signal.Signals.__members__:
        return 128 + signal.Signals[name]
    return int(convert(word, Annotated[int, Meta(ge=1, le=255)], strict=False))


def _read_amount(given: Any) -> str:
    if not find_quantity(given):
        raise ValueError
    return str(given)


def _read_argv(given: Any) -> tuple[str, ...]:
    words: tuple[str, ...] = convert(given, GenericAlias(tuple, (_matching(PROCESS_TEXT), ...)))
    if not words or not words[0]:
        raise ValueError
    return words


FLAG = _converted("bool", "true or false", bool)
STATUSES = ValueType(
    "statuses", "a list of exit statuses from 1 to 255 and signals, such as 75,137,SIGTERM", _read_statuses
)
AMOUNT = ValueType("quantity", "a Kubernetes quantity above zero, such as 8, 500m or 32Gi", _read_amount)
ARGV = ValueType("argv", "a list of one or more texts in UTF-8 without NUL, the first not empty", _read_argv)


def plain_copy(node: Any) -> Any:
    """A copy of parsed YAML without shared parts; raises ValueError for a date, or a mapping that contains itself."""
    try:
        return json.loads(json.dumps(node, allow_nan=False, ensure_ascii=False).encode())
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
