"""Pickles of the Python version of CIFAR: one dictionary of bytes, lists, integers and one numpy array of uint8."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from msrun.errors import DataError
from msrun.runtime.inert_pickle import Named, load_inert

_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),  # since protocol 5
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # bytes, as Python 3 writes them for protocols before 3
}


def load_batch(path: Path, content: bytes) -> dict[str, Any]:
    """Return the dictionary that a pickle holds, with text as keys and arrays of uint8 as numpy arrays.

    Raises:
        DataError: the pickle is damaged, names something to run, or holds something else; with its offset.
    """
    try:
        found = load_inert(content, lambda module, name: (_plain(module), name) in _NAMES, encoding="bytes")
        if not isinstance(found, dict):
            raise pickle.UnpicklingError(f"it holds {type(found).__name__}, not a dictionary")
        return {_text(key): _value(value) for key, value in found.items()}
    except (pickle.UnpicklingError, ValueError, TypeError) as error:
        raise DataError(
            f"{path}: cannot be read as a batch of the Python version: {error}; fetch it again from where it is "
            "published"
        ) from error


def _plain(module: str) -> str:
    return module.replace("numpy._core", "numpy.core")


def _value(value: Any) -> Any:
    if not isinstance(value, Named):
        return value
    if value.name == "_reconstruct" and isinstance(value.state, tuple):
        _, shape, dtype, is_fortran, raw = value.state
    elif value.name == "_frombuffer":
        raw, dtype, shape, order = value.args
        is_fortran = _text(order) == "F"
    else:
        return _bytes(value)
    return _array(_bytes(raw), dtype, shape, "F" if is_fortran else "C")


def _array(raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    is_uint8 = isinstance(dtype, Named) and dtype.name == "dtype" and _text(*dtype.args[:1]) in ("u1", "|u1", "uint8")
    if not is_uint8:
        raise pickle.UnpicklingError("it holds an array that is not of uint8")
    if not isinstance(raw, bytes | bytearray | memoryview) or not all(type(edge) is int for edge in shape):
        raise pickle.UnpicklingError("it holds an array without plain bytes")
    if not all(0 <= edge <= len(raw) for edge in shape) or math.prod(shape) != len(raw):
        raise pickle.UnpicklingError(f"it holds an array of shape {shape} with {len(raw)} bytes")
    return np.frombuffer(raw, np.uint8).reshape(shape, order=order)


def _bytes(value: Any) -> Any:
    if isinstance(value, Named) and value.name == "encode":
        text, encoding = (*value.args, "latin1")[:2]
        if _text(encoding) not in ("latin1", "latin-1") or not isinstance(text, str):
            raise pickle.UnpicklingError(f"it holds bytes in the encoding {_text(encoding)!r}")
        return text.encode("latin1")
    return value


def _text(value: Any) -> str:
    value = _bytes(value)
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
