"""Checkpoints cut otherwise, without ranks or devices: one part is in memory at a time.

What the source holds it says itself, so `src_strategy` is only needed for plain torch.save files with one rank's slices
each. Names, arguments and folders are those of mindspore.parallel.checkpoint_transform.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.catalogue import NETWORK, Entry, TensorKey
from msrun.runtime.checkpoint.directory import (
    Manifest,
    PlaceOfRanks,
    complete_directory,
    give_name,
    remove,
    start_writing,
)
from msrun.runtime.checkpoint.plain_file import STATE, PlainFileWriter
from msrun.runtime.checkpoint.reader import CheckpointReader, find_rank_checkpoints, open_source
from msrun.runtime.checkpoint.tensor_files import write_indexes, write_parts
from msrun.runtime.checkpoint.torch_saving import to_bytes
from msrun.runtime.parallel.parameters.layouts import ParameterLayout
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.parallel.strategy_file import Strategy, read_strategy, shared_ranks
from msrun.runtime.sharding.layout import Box, whole

_MOST_THREADS = 4
"""Each holds the memory of one part."""
StrPath = str | os.PathLike[str]


def transform_checkpoints(
    src_checkpoints_dir: StrPath,
    dst_checkpoints_dir: StrPath,
    ckpt_prefix: str,
    src_strategy_file: StrPath | None = None,
    dst_strategy_file: StrPath | None = None,
) -> None:
    """Cut a checkpoint as a strategy file says, into `rank_N/PREFIXN.ckpt` for every rank of it.

    Args:
        src_checkpoints_dir: a folder with `rank_0`, `rank_1`, ..., of each of which the last checkpoint by name is
            taken; or a checkpoint itself, file or directory.
        dst_checkpoints_dir: where the folders `rank_N` are made.
        ckpt_prefix: begins the names of the new checkpoints.
        src_strategy_file: how the source was cut; only needed for plain torch.save files with one rank's slices each.
        dst_strategy_file: how to cut; None writes whole tensors into one file, `rank_0/PREFIX0.ckpt`.

    Raises:
        CheckpointError: the source is incomplete, or the strategy is one of another network.
    """
    reader, manifest = open_source(find_rank_checkpoints(Path(src_checkpoints_dir)), src_strategy_file)
    folder = Path(dst_checkpoints_dir)

    def name(rank: int) -> Path:
        return folder.absolute() / f"rank_{rank}" / f"{ckpt_prefix}{rank}.ckpt"

    if dst_strategy_file is None:
        write_whole(reader, manifest, name(0))
        return
    strategy = read_strategy(dst_strategy_file)
    # Threads: reading, writing and summing up hold no lock of Python, and one file is flushed while another is written.
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        ranks = range(shared_ranks([strategy]))
        list(threads.map(lambda rank: write_rank(reader, manifest, strategy, rank, name), ranks))


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, StrPath],
    save_checkpoint_file_name: StrPath,
    src_strategy_file: StrPath | None = None,
    dst_strategy_file: StrPath | None = None,
) -> None:
    """Write what one rank holds under a strategy, from the checkpoints of the ranks that have it.

    Args:
        rank_id: the target rank.
        checkpoint_files_map: source rank -> its checkpoint, for the ranks of `rank_list_for_transform` at least.
        save_checkpoint_file_name: path of the new checkpoint; where the rank's number stands in its folder and name,
            those of the other ranks are taken to have theirs.
        src_strategy_file: how the source was cut; only needed for plain torch.save files.
        dst_strategy_file: how to cut; None writes whole tensors into one file, for rank 0.

    Raises:
        CheckpointError: parts that the rank needs are missing, or the strategy is one of another network.
    """
    sources = {int(rank): Path(path) for rank, path in checkpoint_files_map.items()}
    reader, manifest = open_source(sources, src_strategy_file, needs_all=False)
    target = Path(save_checkpoint_file_name).absolute()
    if dst_strategy_file is None:
        if rank_id != 0:
            raise CheckpointError(f"rank_id={rank_id}: without dst_strategy_file there is rank 0 alone")
        write_whole(reader, manifest, target)
        return

    def name(rank: int) -> Path:
        parent, own = (
            re.sub(rf"(?<!\d){rank_id}(?!\d)", str(rank), part) for part in (target.parent.name, target.name)
        )
        return target.parent.parent / parent / own

    write_rank(reader, manifest, read_strategy(dst_strategy_file), rank_id, name)


def merge_sliced_parameter(
    sliced_parameters: Sequence[Tensor], strategy: ParameterLayout | Mapping[str, ParameterLayout] | None = None
) -> Tensor:
    """Return the whole of a parameter from the slices of all ranks, in their order.

    Args:
        sliced_parameters: one for each rank.
        strategy: how it was cut: an entry of `find_layouts` or `read_strategy`, or a dict with that one alone; None
            joins the slices along dimension 0.

    Raises:
        CheckpointError: another number of slices, or other shapes, than the strategy says.
    """
    if isinstance(strategy, Mapping):
        if len(strategy) != 1:
            raise CheckpointError(
                f"strategy holds {len(strategy)} parameters: give the layout of the one that is merged"
            )
        (strategy,) = strategy.values()
    slices = [value.detach() for value in sliced_parameters]
    if not slices:
        raise CheckpointError("sliced_parameters is empty: give the slices of all ranks")
    if strategy is None:
        return torch.cat(slices)
    if len(slices) != strategy.world_size:
        raise CheckpointError(f"{len(slices)} slices, but the strategy is one of {strategy.world_size} ranks: give all")
    value = torch.empty(strategy.tensor_shape, dtype=slices[0].dtype)
    for rank, part in enumerate(slices):
        box = strategy.box(rank)
        if box is not None:
            if tuple(part.shape) != box.sizes:
                raise CheckpointError(f"slice {rank} has shape {tuple(part.shape)}, by the strategy {box.sizes}")
            value[box.slices].copy_(part)
    return value


def write_rank(
    reader: CheckpointReader, manifest: Manifest, strategy: Strategy, rank: int, name: Callable[[int], Path]
) -> None:
    """Write the parts that one rank holds under a strategy.

    Args:
        name: rank -> path of its checkpoint.
    """
    boxes = _boxes(reader, strategy, rank)
    count = shared_ranks([strategy])
    final = name(rank)
    temporary, serial = start_writing(final, is_file=False)
    try:
        catalogue = {key: Entry(box.shape, reader.dtype(key), ((box, rank),)) for key, box in boxes.items()}
        written, checksums = write_parts(temporary, _read_parts(reader, boxes), rank)
        checksums |= write_indexes(temporary, catalogue, [written])
        state = to_bytes(reader.state())
        (temporary / STATE).write_bytes(state)
        checksums[STATE] = zlib.crc32(state)
        places = [PlaceOfRanks([other], os.path.relpath(name(other), final.parent)) for other in range(count)]
        save_id = hashlib.sha256(f"{manifest.save_id} {sorted((n, repr(x)) for n, x in strategy.items())}".encode())
        complete_directory(
            temporary,
            replace(
                manifest,
                world_size=manifest.world_size or count,
                serial=serial,
                saved_at=time.time(),
                files={},
                checksums=checksums,
                save_id=save_id.hexdigest()[:32],
                places=places if count > 1 else [],
                place=rank if count > 1 else 0,
                own=[],
            ),
        )
        give_name(temporary, final)
    except BaseException:
        remove(temporary)
        raise


def _boxes(reader: CheckpointReader, strategy: Strategy, rank: int) -> dict[TensorKey, Box]:
    """Return what a rank holds: tensors that the strategy does not name are whole on all."""
    if any(key[0].startswith("rank_") for key in reader.keys):
        raise CheckpointError(f"checkpoint {reader.path} holds parameters cut by hand, which cannot be cut otherwise")
    boxes = {}
    for key in reader.keys:
        layout = strategy.get(key[1])
        shape = reader.shape(key)
        if layout is not None and layout.tensor_shape != shape:
            raise CheckpointError(
                f"{key[1]} has shape {shape} in the checkpoint, {layout.tensor_shape} in the strategy: give the "
                "strategy file of this network"
            )
        box = layout.box(rank) if layout is not None else whole(shape)
        if box is not None:
            boxes[key] = box
    return boxes


def _read_parts(reader: CheckpointReader, boxes: Mapping[TensorKey, Box]) -> Iterator[tuple[TensorKey, Chunk]]:
    """Read one part after another, all into the same memory."""
    sizes = [math.prod(box.sizes) * reader.dtype(key).itemsize for key, box in boxes.items()]
    memory = torch.empty(max(sizes, default=0), dtype=torch.uint8)
    for (key, box), size in zip(boxes.items(), sizes, strict=True):
        part = Chunk(memory[:size].view(reader.dtype(key)).view(box.sizes), box)
        reader.fill({key: part})
        yield key, part


def write_whole(reader: CheckpointReader, manifest: Manifest, final: Path) -> None:
    """Write a file with whole tensors.

    Raises:
        CheckpointError: parameters cut by hand have no whole.
        OSError: as writing a file does.
    """
    if manifest.own:
        raise CheckpointError(
            f"checkpoint {reader.path}: {manifest.own[0]} is marked layerwise_parallel, and nobody knows how its parts "
            "make a whole: load_checkpoint them and use merge_sliced_parameter"
        )
    keys = sorted(reader.keys, key=lambda key: key[0] != NETWORK)
    temporary, serial = start_writing(final.absolute(), is_file=True)
    file: PlainFileWriter | None = None
    try:
        file = PlainFileWriter(temporary, [(key, reader.shape(key), reader.dtype(key)) for key in keys], {})
        for key in keys:
            file.write(key, reader.read(key))
        file.finish(
            to_bytes(reader.state()),
            replace(manifest, serial=serial, saved_at=time.time(), files={}, checksums={}, places=[], place=0),
        )
        give_name(temporary, final.absolute())
    except BaseException:
        if file is not None:
            file.abandon()
        remove(temporary)
        raise
