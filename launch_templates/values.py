"""The types that the fields of a job spec can have, and Kubernetes quantities ("500m", "32Gi") as numbers. Pure."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

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
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity such as 8, 500m or 32Gi")
    suffix = match["suffix"] or ""
    if suffix in _SCALE:
        return Decimal(match["number"]) * _SCALE[suffix]
    return Decimal(match["number"]) * Decimal(10) ** int(suffix[1:])


def find_quantity(value: object) -> Decimal | None:
    """Number of a quantity as it stands in a manifest (text or number), None when it is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return parse_quantity(str(value))
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
    """The value; raises ValueError (with no text, or with a more exact constraint) when it breaks the rule."""


def _check(*, is_right: bool) -> None:
    if not is_right:
        raise ValueError


def whole(minimum: int, maximum: int = 2**31 - 1) -> ValueType:
    """An integer within limits, both included."""

    def read(given: Any) -> int:
        if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 20:
            given = int(given)
        _check(is_right=type(given) is int and minimum <= given <= maximum)
        return int(given)

    limits = f"of at least {minimum}" if maximum == 2**31 - 1 else f"from {minimum} to {maximum}"
    return ValueType("int", f"an integer {limits}", read)


def choice(*options: str) -> ValueType:
    """One of a few words; upper and lower case do not matter."""

    def read(given: Any) -> str:
        found = [option for option in options if isinstance(given, str) and given.lower() == option.lower()]
        _check(is_right=bool(found))
        return found[0]

    return ValueType("choice", f"one of {', '.join(options)}", read)


def text(accepts: Callable[[str], bool], constraint: str) -> ValueType:
    """Text that a predicate accepts."""

    def read(given: Any) -> str:
        _check(is_right=isinstance(given, str) and accepts(given))
        return str(given)

    return ValueType("text", constraint, read)


def _read_flag(given: Any) -> bool:
    words = {"true": True, "false": False}
    found = words.get(given.lower()) if isinstance(given, str) else given
    _check(is_right=isinstance(found, bool))
    return bool(found)


def _read_statuses(given: Any) -> tuple[int, ...]:
    words = given.split(",") if isinstance(given, str) else [given] if type(given) is int else given
    _check(is_right=isinstance(words, list | tuple))
    return tuple(dict.fromkeys(_status(str(word).strip()) for word in words if word != ""))


def _status(word: str) -> int:
    """An exit status; a signal is 128 + its number, as the options of msrun take it."""
    name = f"SIG{word.upper().removeprefix('SIG')}"
    if name in signal.Signals.__members__:
        return 128 + signal.Signals[name]
    _check(is_right=word.isascii() and word.isdigit() and len(word) < 4 and 0 < int(word) < 256)
    return int(word)


def _read_amount(given: Any) -> str:
    text = str(given) if type(given) in (int, float) else given
    _check(is_right=isinstance(text, str) and parse_quantity(text) > 0)
    return str(text)


def table(accepts_key: Callable[[str], bool], accepts_value: Callable[[str], bool], constraint: str) -> ValueType:
    """Names mapped to texts: `--set name.KEY=VALUE`."""

    def read(given: Any) -> dict[str, str]:
        if not isinstance(given, dict):
            raise ValueError(f"a table of {constraint}")
        for key, value in given.items():
            if not isinstance(value, str):
                raise ValueError(f"{constraint}, all as text, but {key!s} is {value!r}: put it in quotes")
            if not isinstance(key, str) or not accepts_key(key) or not accepts_value(value):
                raise ValueError(f"{constraint}, which {key!s} is not")
        return dict(given)

    return ValueType("table", constraint, read)


def tree(shape: type, constraint: str, accepts: Callable[[Any], bool] = lambda _: True) -> ValueType:
    """A piece of a pod's own YAML, as YAML text or parsed: lists, mappings with text keys, texts, numbers."""

    def read(given: Any) -> Any:
        if isinstance(given, str):
            try:
                given = load_yaml(given)
            except TextError:
                raise ValueError from None
        _check(is_right=isinstance(given, shape) and accepts(given))
        return plain_copy(given)

    return ValueType("yaml", constraint, read)


def _read_argv(given: Any) -> tuple[str, ...]:
    _check(is_right=isinstance(given, list | tuple) and bool(given) and bool(given[0]))
    _check(is_right=all(isinstance(item, str) and is_process_text(item) for item in given))
    return tuple(given)


FLAG = ValueType("bool", "true or false", _read_flag)
STATUSES = ValueType(
    "statuses", "a list of exit statuses from 1 to 255 and signals, such as 75,137,SIGTERM", _read_statuses
)
AMOUNT = ValueType("quantity", "a Kubernetes quantity above zero, such as 8, 500m or 32Gi", _read_amount)
ARGV = ValueType("argv", "a list of one or more texts in UTF-8 without NUL, the first not empty", _read_argv)

_MAX_DEPTH = 30
"""Deeper than any part of a pod; what contains itself ends here."""


def plain_copy(node: Any, depth: int = _MAX_DEPTH) -> Any:
    """A copy of parsed YAML without shared parts.

    Raises:
        ValueError: what is no YAML of Kubernetes, such as a date or a mapping that contains itself.
    """
    if depth == 0:
        raise ValueError
    if isinstance(node, list):
        return [plain_copy(item, depth - 1) for item in node]
    if isinstance(node, dict) and all(isinstance(key, str) and is_process_text(key) for key in node):
        return {key: plain_copy(value, depth - 1) for key, value in node.items()}
    if isinstance(node, str) and is_process_text(node):
        return node
    if node is None or type(node) in (bool, int) or (isinstance(node, float) and math.isfinite(node)):
        return node
    raise ValueError


def is_process_text(text: str) -> bool:
    """Whether a process can be given `text` as argument or environment value: UTF-8 without NUL."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
