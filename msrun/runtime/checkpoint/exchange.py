"""What ranks send each other of a checkpoint whose directories not all of them see, because their hosts share none."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import CheckpointError
from msrun.runtime.agreement import attempt, gather
from msrun.runtime.checkpoint.catalogue import covers
from msrun.runtime.checkpoint.dict_tensors import DictTensors
from msrun.runtime.checkpoint.reader import CheckpointReader
from msrun.runtime.checkpoint.tensor_key import TensorKey
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.progress import waiting_in
from msrun.runtime.sharding.box import Box
from msrun.runtime.world import get_rank

Table = dict[TensorKey, tuple[tuple[int, ...], torch.dtype, list[Box]]]


def complete(reader: CheckpointReader) -> CheckpointReader:
    """Return a reader that has every tensor whole on every rank. All ranks call it together.

    Where some rank sees only some parts, all tensors are sent to all ranks and stay in memory until they are read.

    Raises:
        CheckpointError: a file cannot be read; the same on every rank.
    """
    tables = gather({key: (reader.shape(key), reader.dtype(key), reader.boxes(key)) for key in _shared(reader)})
    keys = list(dict.fromkeys(key for table in tables for key in table))
    if all(key in table and covers(table[key][2], table[key][0]) for table in tables for key in keys):
        return reader
    failures: list[str] = []
    whole = {key: _bring(reader, key, tables, failures) for key in keys}

    def look() -> None:
        if failures:
            raise CheckpointError(failures[0])

    attempt(look)
    return CheckpointReader([*reader.sources, DictTensors(reader.path, whole)])


def _shared(reader: CheckpointReader) -> list[TensorKey]:
    """Return the tensors that do not belong to one rank alone."""
    return [key for key in reader.keys if not key[0].startswith("rank_")]


def _bring(reader: CheckpointReader, key: TensorKey, tables: list[Table], failures: list[str]) -> Tensor:
    """Send every part of a tensor from the lowest rank that has it to all."""
    shape, dtype, _ = next(table[key] for table in tables if key in table)
    value = torch.empty(shape, dtype=dtype)
    owners: dict[Box, int] = {}
    for rank, table in enumerate(tables):
        for box in table[key][2] if key in table else ():
            owners.setdefault(box, rank)
    for box, owner in owners.items():
        part = torch.zeros(box.sizes, dtype=dtype)
        if owner == get_rank():
            try:
                reader.fill({key: Chunk(part, box)})
            except CheckpointError as error:  # the others wait for the message
                failures.append(str(error))
        with waiting_in(lambda: f"the parts of {'.'.join(key)}"):
            dist.broadcast(part.view(-1).view(torch.uint8), owner)
        value[box.slices].copy_(part)
    return value
