"""Tensors in memory-mapped files, for tables that are larger than memory, and what optimizers keep of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.errors import DataError, describe_limit

_files: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""tensor -> the file that holds it"""


def note_file(tensor: Tensor, path: Path) -> None:
    """Say that a tensor is one of `map_file`."""
    _files[tensor] = path


def state_like(parameter: Tensor, key: str, value: float) -> Tensor:
    """Return a tensor of one number, like a parameter: for an optimizer, beside the file of a table that has one."""
    path: Path | None = _files.get(parameter)
    if path is None:
        return torch.full_like(parameter, value)
    found = map_file(path.with_name(f"{path.name}.{key}"), tuple(parameter.shape), parameter.dtype)
    return found.fill_(value) if value else found  # a new file is zeros, and takes no room until it is written


def map_file(path: Path, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in a file, which is made anew."""
    count = torch.Size(sizes).numel()
    try:
        with path.open("wb") as file:
            file.truncate(max(1, count * dtype.itemsize))
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(sizes)
    except (OSError, RuntimeError) as error:
        reason = describe_limit(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        raise DataError(f"{path}: cannot hold a table of {count * dtype.itemsize} bytes: {reason}") from error
