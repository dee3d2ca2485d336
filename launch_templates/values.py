"""The types that the fields of a job spec can have, and Kubernetes quantities ("500m", "32Gi") as numbers. Pure.

Each type reads a value given either as text (`--set`) or as YAML (`--values`) and says its constraint in words.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

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


class ValueType(Protocol):
    """How a value is read and checked."""

    @property
    def type_name(self) -> str:
        """One word for tables."""

    @property
    def constraint(self) -> str:
        """The rule, to be read after "must be"."""

    def read(self, given: Any) -> Any:
        """The value; raises ValueError (with no text, or with a more exact constraint) when `given` breaks the rule."""


@dataclass(frozen=True)
class Whole:
    """An integer within limits, both included."""

    minimum: int
    maximum: int = 2**31 - 1
    type_name: str = "int"

    @property
    def constraint(self) -> str:
        if self.maximum == 2**31 - 1:
            return f"an integer of at least {self.minimum}"
        return f"an integer from {self.minimum} to {self.maximum}"

    def read(self, given: Any) -> int:
        if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 20:
            given = int(given)
        if type(given) is not int or not self.minimum <= given <= self.maximum:
            raise ValueError
        return given


@dataclass(frozen=True)
class Flag:
    """true or false."""

    type_name: str = "bool"
    constraint: str = "true or false"

    def read(self, given: Any) -> bool:
        words = {"true": True, "false": False}
        if isinstance(given, str):
            given = words.get(given.lower())
        if not isinstance(given, bool):
            raise ValueError
        return given


@dataclass(frozen=True)
class Choice:
    """One of a few words; upper and lower case do not matter."""

    options: tuple[str, ...]
    type_name: str = "choice"

    @property
    def constraint(self) -> str:
        return f"one of {', '.join(self.options)}"

    def read(self, given: Any) -> str:
        for option in self.options:
            if isinstance(given, str) and given.lower() == option.lower():
                return option
        raise ValueError


@dataclass(frozen=True)
class Text:
    """Text that a predicate accepts."""

    accepts: Callable[[str], bool]
    constraint: str
    type_name: str = "text"

    def read(self, given: Any) -> str:
        if not isinstance(given, str) or not self.accepts(given):
            raise ValueError
        return given


@dataclass(frozen=True)
class Statuses:
    """Exit statuses and signals, `75,137,SIGTERM`, as the options of msrun take them; a signal is 128 + its number."""

    type_name: str = "statuses"
    constraint: str = "a list of exit statuses from 1 to 255 and signals, such as 75,137,SIGTERM"

    def read(self, given: Any) -> tuple[int, ...]:
        words = given.split(",") if isinstance(given, str) else [given] if type(given) is int else given
        if not isinstance(words, list | tuple):
            raise ValueError
        return tuple(dict.fromkeys(self._status(str(word).strip()) for word in words if word != ""))

    @staticmethod
    def _status(word: str) -> int:
        name = f"SIG{word.upper().removeprefix('SIG')}"
        if name in signal.Signals.__members__:
            return 128 + signal.Signals[name]
        if not (word.isascii() and word.isdigit() and len(word) < 4 and 0 < int(word) < 256):
            raise ValueError
        return int(word)


@dataclass(frozen=True)
class Amount:
    """A Kubernetes quantity above zero; numbers of a YAML file are taken as they are written."""

    type_name: str = "quantity"
    constraint: str = "a Kubernetes quantity above zero, such as 8, 500m or 32Gi"

    def read(self, given: Any) -> str:
        text = str(given) if type(given) in (int, float) else given
        if not isinstance(text, str) or parse_quantity(text) <= 0:
            raise ValueError
        return text


@dataclass(frozen=True)
class Table:
    """Names mapped to texts: `--set name.KEY=VALUE`."""

    accepts_key: Callable[[str], bool]
    accepts_value: Callable[[str], bool]
    constraint: str
    type_name: str = "table"

    def read(self, given: Any) -> dict[str, str]:
        if not isinstance(given, dict):
            raise ValueError(f"a table of {self.constraint}")
        for key, value in given.items():
            if not isinstance(value, str):
                raise ValueError(f"{self.constraint}, all as text, but {key!s} is {value!r}: put it in quotes")
            if not isinstance(key, str) or not self.accepts_key(key) or not self.accepts_value(value):
                raise ValueError(f"{self.constraint}, which {key!s} is not")
        return dict(given)


_MAX_DEPTH = 30
"""Deeper than any part of a pod; what contains itself ends here."""


@dataclass(frozen=True)
class Tree:
    """A piece of a pod's own YAML, as YAML text or parsed: lists, mappings with text keys, texts, numbers."""

    shape: type
    """list or dict."""
    constraint: str
    accepts: Callable[[Any], bool] = lambda _: True
    type_name: str = "yaml"

    def read(self, given: Any) -> Any:
        if isinstance(given, str):
            try:
                given = load_yaml(given)
            except TextError:
                raise ValueError from None
        if not isinstance(given, self.shape) or not self.accepts(given):
            raise ValueError
        return plain_copy(given)


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


@dataclass(frozen=True)
class Argv:
    """A program's argument list, taken byte for byte."""

    type_name: str = "argv"
    constraint: str = "a list of one or more texts in UTF-8 without NUL, the first not empty"

    def read(self, given: Any) -> tuple[str, ...]:
        if not isinstance(given, list | tuple) or not given or not given[0]:
            raise ValueError
        if not all(isinstance(item, str) and is_process_text(item) for item in given):
            raise ValueError
        return tuple(given)


def is_process_text(text: str) -> bool:
    """Whether a process can be given `text` as argument or environment value: UTF-8 without NUL."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
