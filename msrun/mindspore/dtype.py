"""MindSpore's names of types of elements: torch's types."""

from __future__ import annotations

from torch import (
    bfloat16,
    complex64,
    complex128,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
)
from torch import bool as bool_

half, single, double = float16, float32, float64
byte, short, int_, long = int8, int16, int64, int64

__all__ = [
    "bfloat16",
    "bool_",
    "byte",
    "complex64",
    "complex128",
    "double",
    "float16",
    "float32",
    "float64",
    "half",
    "int8",
    "int16",
    "int32",
    "int64",
    "int_",
    "long",
    "short",
    "single",
    "uint8",
]
