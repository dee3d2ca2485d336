"""MindSpore's names of types of elements: torch's types."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import torch

from msrun.errors import UsageError, near_miss

bool_, bfloat16, complex64, complex128 = torch.bool, torch.bfloat16, torch.complex64, torch.complex128
float16, float32, float64 = torch.float16, torch.float32, torch.float64
int8, int16, int32, int64 = torch.int8, torch.int16, torch.int32, torch.int64
uint8, uint16, uint32, uint64 = torch.uint8, torch.uint16, torch.uint32, torch.uint64
half, single, double = float16, float32, float64
byte, short, int_, long = int8, int16, int64, int64
intc, intp, float_, ubyte, ushort, uint = int32, int64, float32, uint8, uint16, uint32
type_none, tensor_type, number = type(None), torch.Tensor, builtins.float
string, list_, tuple_ = builtins.str, builtins.list, builtins.tuple
Type = torch.dtype

__all__ = """
Type bfloat16 bool_ byte complex64 complex128 double dtype_to_nptype dtype_to_pytype float16 float32 float64 float_ half
int8 int16 int32 int64 int_ intc intp list_ long number pytype_to_dtype short single string tensor_type tuple_
type_none ubyte uint uint8 uint16 uint32 uint64 ushort
""".split()
_OF_PYTHON = {builtins.bool: torch.bool, builtins.int: torch.int64, builtins.float: torch.float32}


def as_dtype(word: Any) -> torch.dtype:
    """Return torch's type for a type of torch, numpy or Python, or for its name.

    Raises:
        UsageError: no type of elements.
    """
    if isinstance(word, torch.dtype):
        return word
    if word in _OF_PYTHON:
        return _OF_PYTHON[word]
    name = word if isinstance(word, str) else np.dtype(word).name
    name = name.lower().removesuffix("_")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"type of elements {word!r}: unknown{near_miss(name, __all__)}")
    return found


def dtype_to_nptype(type_: torch.dtype) -> Any:
    """Return numpy's type; of bfloat16, which numpy lacks, float32."""
    return torch.empty((), dtype=torch.float32 if type_ == bfloat16 else type_).numpy().dtype.type


def dtype_to_pytype(type_: torch.dtype) -> type:
    """Return Python's type."""
    return builtins.bool if type_ == bool_ else builtins.float if type_.is_floating_point else builtins.int


def pytype_to_dtype(obj: Any) -> torch.dtype:
    """Return the type of elements for a type of Python or numpy."""
    return as_dtype(obj)
