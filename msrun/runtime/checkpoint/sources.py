"""Checkpoints to read from as they lie in folders: one, a folder with those of all ranks, or plain files of slices."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.dict_tensors import DictTensors
from msrun.runtime.checkpoint.directory import Manifest, Position, find_checkpoints
from msrun.runtime.checkpoint.reader import CheckpointReader, is_foreign, load_torch_file, open_checkpoint
from msrun.runtime.checkpoint.tensor_key import NETWORK, TensorKey
from msrun.runtime.parallel.strategy_file import Strategy, read_strategy, shared_ranks
from msrun.runtime.sharding.box import Box

_RANK_FOLDER = re.compile(r"rank_(\d+)")
StrPath = str | os.PathLike[str]


def find_rank_checkpoints(folder: Path) -> dict[int, Path]:
    """Return rank -> its checkpoint: the last one by name in `rank_N`; or {0: folder} when it is a checkpoint itself.

    Raises:
        CheckpointError: there is none.
    """
    ranks = {int(found[1]): path for path in folder.glob("rank_*") if (found := _RANK_FOLDER.fullmatch(path.name))}
    if not ranks:
        return {0: folder}
    last = {}
    for rank, path in sorted(ranks.items()):
        names = {entry.name: entry for entry, _ in find_checkpoints(path)}
        names |= {entry.name: entry for entry in path.iterdir() if is_foreign(entry)}
        if not names:
            raise CheckpointError(f"{path} has no checkpoint: copy that of rank {rank} there")
        last[rank] = names[max(names)]
    return last


def open_source(
    sources: Mapping[int, Path], strategy_file: StrPath | None = None, *, needs_all: bool = True
) -> tuple[CheckpointReader, Manifest]:
    """Return a reader of a checkpoint, whole or in the ranks' files.

    Args:
        sources: rank -> its file or directory; one is enough where it is complete, or names the others.
        strategy_file: how the slices of plain torch.save files were cut.
        needs_all: refuse a set of which some are missing.

    Raises:
        CheckpointError: it is not complete, or no strategy tells how plain files were cut.
    """
    paths = [path.absolute() for path in sources.values()]
    if strategy_file is not None and all(is_foreign(path) for path in paths):
        return _open_slices(sources, read_strategy(strategy_file), needs_all=needs_all)
    return open_checkpoint(paths, needs_all=needs_all)


def _open_slices(
    sources: Mapping[int, Path], strategy: Strategy, *, needs_all: bool
) -> tuple[CheckpointReader, Manifest]:
    count = shared_ranks([strategy])
    missing = [rank for rank in range(count) if rank not in sources]
    if missing and needs_all:
        raise CheckpointError(f"the strategy is one of {count} ranks, and the file of rank {missing[0]} is missing")
    readers = []
    for rank, path in sources.items():
        tensors: dict[TensorKey, Tensor] = {(NETWORK, name): value for name, value in load_torch_file(path).items()}
        boxes: dict[TensorKey, Box] = {}
        for name, layout in strategy.items():
            box = layout.box(rank)
            value = tensors.get((NETWORK, name))
            if value is not None and box is not None:
                if tuple(value.shape) != box.sizes:
                    raise CheckpointError(
                        f"{path}: {name} has shape {tuple(value.shape)}, rank {rank} has {box.sizes} by the strategy: "
                        "give the strategy file of these checkpoints"
                    )
                boxes[NETWORK, name] = box
        readers.append(DictTensors(path, tensors, boxes))
    manifest = Manifest(Position(), world_size=count, serial=0, saved_at=time.time())
    return CheckpointReader(readers, is_foreign=True), manifest
