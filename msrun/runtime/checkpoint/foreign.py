"""Files that msrun has not written: what torch.save makes of a state dict, safetensors, and the index of several."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.dict_tensors import DictTensors, is_tensors
from msrun.runtime.checkpoint.directory import DAMAGED, MANIFEST, read_record
from msrun.runtime.checkpoint.safetensors_file import INDEX_SUFFIX, open_safetensors
from msrun.runtime.checkpoint.tensor_key import NETWORK

if TYPE_CHECKING:
    from msrun.runtime.checkpoint.reader import PartReader


def is_foreign(path: Path) -> bool:
    """Return whether a file looks like one to read, which msrun has not written."""
    if not path.is_file():
        return False
    if path.name.endswith((".safetensors", INDEX_SUFFIX)):
        return True
    if not zipfile.is_zipfile(path):
        return False
    try:
        read_record(path, MANIFEST)
    except DAMAGED:
        return True
    return False


def open_foreign(path: Path) -> list[PartReader]:
    """Return readers of such a file.

    Raises:
        CheckpointError: it cannot be read, or holds something else than the tensors of a state dict.
    """
    if path.name.endswith((".safetensors", INDEX_SUFFIX)):
        return list(open_safetensors(path))
    return [DictTensors(path, {(NETWORK, name): value for name, value in load_tensors(path).items()})]


def load_tensors(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a torch.save file, mapped into memory.

    Raises:
        CheckpointError: it cannot be read, or holds something else than the tensors of a state dict.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (*DAMAGED, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [repr(error)])[0].partition(". ")[0]
        raise CheckpointError(f"{path} cannot be read: {reason}; give another file") from None
    if not is_tensors(content):
        raise CheckpointError(f"{path} holds no dict of tensors: give one of torch.save(net.state_dict(), file)")
    return dict(content)
