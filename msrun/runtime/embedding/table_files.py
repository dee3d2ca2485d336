"""Tables in memory-mapped files, for those that are larger than the host's memory, and what optimizers keep of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.errors import DataError, StrategyError, describe_limit

_files: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""table -> the file that holds it"""


def make_table(
    place: tuple[slice, slice], dtype: torch.dtype, device: torch.device, storage: str | None, rank: int
) -> Tensor:
    """Return the memory of a rank's part of a table, without values.

    Args:
        storage: None, or the path of files: that of this rank is `storage`.rank, made anew.

    Raises:
        StrategyError: files inside no_init_parameters, or for a table that is not on the host.
        DataError: the file cannot be made.
    """
    sizes = tuple(part.stop - part.start for part in place)
    table = torch.empty(sizes, dtype=dtype, device=device)
    if storage is None:
        return table
    if table.is_meta or device.type != "cpu":
        where = "inside no_init_parameters()" if table.is_meta else f"on {device}"
        raise StrategyError(
            f"EmbeddingLookup(storage={storage!r}) {where}: files hold tables of the host and take no memory; leave "
            'storage out, or build it outside, with target="CPU"'
        )
    return _map_file(Path(f"{storage}.{rank}"), sizes, dtype)


def note_file(table: Tensor, storage: str, rank: int) -> None:
    """Say that `make_table` has put a table into files."""
    _files[table] = Path(f"{storage}.{rank}")


def state_like(parameter: Tensor, key: str, value: float) -> Tensor:
    """Return a tensor of one number, like a parameter: for an optimizer, beside the file of a table that has one."""
    path: Path | None = _files.get(parameter)
    if path is None:
        return torch.full_like(parameter, value)
    found = _map_file(path.with_name(f"{path.name}.{key}"), tuple(parameter.shape), parameter.dtype)
    return found.fill_(value) if value else found  # a new file is zeros, and takes no room until it is written


def _map_file(path: Path, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in a file, which is made anew.

    Raises:
        DataError: it cannot be.
    """
    count = torch.Size(sizes).numel()
    try:
        with path.open("wb") as file:
            file.truncate(max(1, count * dtype.itemsize))
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(sizes)
    except (OSError, RuntimeError) as error:
        reason = describe_limit(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        raise DataError(f"{path}: cannot hold a table of {count * dtype.itemsize} bytes: {reason}") from error
