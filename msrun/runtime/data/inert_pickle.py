"""Pickles of the Python version of CIFAR, read without running anything that they name.

They hold one dictionary of bytes, lists, integers and one numpy array. A pickle can name any function of any module to
be called; here the three names that an array needs stand for records of ours, and every other name is refused.
"""

from __future__ import annotations

import codecs
import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from msrun.errors import DataError


def load_inert(path: Path, content: bytes) -> dict[str, Any]:
    """Return the dictionary that a pickle holds, with text as keys and arrays of uint8 as numpy arrays.

    Raises:
        DataError: the pickle is damaged, names something to run, or holds something else; with its offset.
    """
    stream = io.BytesIO(content)
    try:
        found = _InertUnpickler(stream, encoding="bytes").load()
        if not isinstance(found, dict):
            raise pickle.UnpicklingError(f"it holds {type(found).__name__}, not a dictionary")
        return {_text(key): _value(value) for key, value in found.items()}
    except Exception as error:  # bytes of any kind make the unpickler raise anything
        raise DataError(
            f"{path}: cannot be read as a batch of the Python version, at byte {stream.tell()} of {len(content)}: "
            f"{' '.join(str(error).split()) or type(error).__name__}; fetch it again from where it is published"
        ) from error


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the record that stands for a name; nothing is imported."""
        stands_for = _RECORDS.get((module.replace("numpy._core", "numpy.core"), name))
        if stands_for is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which these files do not hold")
        return stands_for


class _DtypeRecord:
    """In the place of numpy.dtype."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = _text(code)

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like: one byte has none."""


class _ArrayRecord:
    """In the place of numpy.ndarray."""

    array: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, raw = state
        self._fill(raw, dtype, shape, "F" if is_fortran else "C")

    def _fill(self, raw: Any, dtype: Any, shape: Any, order: str) -> None:
        if not isinstance(dtype, _DtypeRecord) or dtype.code not in ("u1", "|u1", "uint8"):
            raise pickle.UnpicklingError("it holds an array that is not of uint8")
        if not isinstance(raw, bytes | bytearray | memoryview) or not all(isinstance(edge, int) for edge in shape):
            raise pickle.UnpicklingError("it holds an array without plain bytes")
        if any(edge < 0 for edge in shape) or math.prod(shape) != len(raw):
            raise pickle.UnpicklingError(f"it holds an array of shape {shape} with {len(raw)} bytes")
        self.array = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if order == "F" else "C")


def _reconstruct(*_: Any) -> _ArrayRecord:
    return _ArrayRecord()


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _ArrayRecord:
    """As numpy writes arrays since protocol 5."""
    record = _ArrayRecord()
    record._fill(raw, dtype, shape, _text(order))
    return record


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """As Python 3 writes bytes for protocols before 3."""
    if _text(encoding) not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"it names the encoding {encoding!r}")
    return codecs.encode(text, "latin1")


_RECORDS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): _ArrayRecord,
    ("numpy", "dtype"): _DtypeRecord,
    ("_codecs", "encode"): _encode,
}


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _value(value: Any) -> Any:
    return value.array if isinstance(value, _ArrayRecord) else value
