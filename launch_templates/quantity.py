"""Kubernetes quantities ("500m", "32Gi") as numbers.

The grammar is that of apimachinery's resource.Quantity, without signs: training never asks for a negative amount.
"""

from __future__ import annotations

import re
from decimal import Decimal

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
