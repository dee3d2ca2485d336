"""Parts of tensors in the files of torch.distributed.checkpoint: written once, read back in any other cut.

The planners speak of boxes alone, so no DTensor and no device mesh is needed on either side.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.parts import Box, Part

NETWORK = "model"
OPTIMIZER = "optimizer"
TensorKey = tuple[str, ...]
"""(NETWORK, name) or (OPTIMIZER, parameter name, key): the path that torch's tools give a tensor in a nested dict."""


def flat_name(key: TensorKey) -> str:
    """Return a tensor's name in the files."""
    return ".".join(key)


class _SavePlanner(DefaultSavePlanner):
    """Offers this rank's boxes; torch's planner gives a box that several ranks hold to one of them."""

    def __init__(self, parts: Mapping[TensorKey, Part]) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._parts = {flat_name(key): part for key, part in parts.items()}
        self._paths = {flat_name(key): key for key in parts}

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(name, part) for name, part in self._parts.items()]
        self.plan = SavePlan(items, planner_data=self._paths)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn].tensor


def _write_item(name: str, part: Part) -> WriteItem:
    chunk = _chunk(part.box)
    properties = TensorProperties(dtype=part.tensor.dtype)
    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(part.box.shape))
    return WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


class _FileWriter(FileSystemWriter):
    """Writes one file per rank, through to the disk; says which error of the system was met."""

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # torch.save covers a full disk up with "unexpected pos": the system's own word is below it.
            below: BaseException | None = error
            while below is not None and not isinstance(below, OSError):
                below = below.__cause__ or below.__context__
            if below is None:
                raise
            raise OSError(below.errno, below.strerror) from None


def write_tensors(path: Path, parts: Mapping[TensorKey, Part]) -> None:
    """Write this rank's parts into the empty directory `path`. All ranks call it together.

    Raises:
        CheckpointError: what the first rank met that could not write; the same on every rank.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(
                {},
                storage_writer=_FileWriter(path),
                planner=_SavePlanner(parts),
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:  # no Exception: it must not leave this function
        rank, (cause, _) = min(error.failures.items())
        text = cause.strerror if isinstance(cause, OSError) else (str(cause).splitlines() or [repr(cause)])[0]
        raise CheckpointError(f"rank {rank}: {text or cause}") from None


class _LoadPlanner(DefaultLoadPlanner):
    """Names the tensors to be filled."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn].tensor


class TensorReader:
    """Reads parts of the tensors of one checkpoint; each rank for itself.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = FileSystemReader(path)
        try:
            metadata = self._reader.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}; load another one") from None
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors: dict[str, TensorStorageMetadata] = {
            name: value
            for name, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }

    @property
    def network_names(self) -> list[str]:
        """Names of the network's tensors."""
        prefix = NETWORK + "."
        return [name.removeprefix(prefix) for name in self._tensors if name.startswith(prefix)]

    def shape(self, key: TensorKey) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return tuple(self._tensors[flat_name(key)].size)

    def dtype(self, key: TensorKey) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return self._tensors[flat_name(key)].properties.dtype

    def fill(self, parts: Mapping[TensorKey, Part]) -> None:
        """Fill tensors with the values of their boxes; another type of element is converted."""
        flat = {flat_name(key): part for key, part in parts.items()}
        items = []
        for name, part in flat.items():
            found = create_read_items_for_chunk_list(name, self._tensors[name], [_chunk(part.box)])
            if sum(math.prod(item.lengths) for item in found) != math.prod(part.box.sizes):
                raise CheckpointError(f"checkpoint {self._path}: parts of {name} are missing; load another one")
            items += found
        try:
            self._reader.read_data(LoadPlan(items), _LoadPlanner(flat)).wait()
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise CheckpointError(f"checkpoint {self._path} cannot be read: {reason}; load another one") from None

    def read(self, key: TensorKey) -> Tensor:
        """Return a whole tensor."""
        shape = self.shape(key)
        value = torch.empty(shape, dtype=self.dtype(key))
        self.fill({key: Part(value, Box(shape, (0,) * len(shape), shape))})
        return value
