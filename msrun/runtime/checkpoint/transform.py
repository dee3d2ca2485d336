"""Checkpoints cut otherwise, and exported, without ranks or devices: one part is in memory at a time.

What the source holds it says itself, so `src_strategy` is only needed for plain torch.save files with one rank's slices
each. Names, arguments and folders are those of mindspore.parallel.checkpoint_transform.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint import storage
from msrun.runtime.checkpoint.directory import Manifest, PlaceOfRanks, give_name, remove, start_writing
from msrun.runtime.checkpoint.index import HEADER_LENGTH, INDEX_SUFFIX, NETWORK, SAFETENSORS, TensorKey, raw_bytes
from msrun.runtime.checkpoint.reader import (
    CheckpointReader,
    StrPath,
    find_rank_checkpoints,
    open_checkpoint,
    open_source,
)
from msrun.runtime.parallel.parameters.layouts import ParameterLayout
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.parallel.strategy_file import Strategy, read_strategy, shared_ranks
from msrun.runtime.sharding.layout import whole
from ranktable.files import open_whole
from ranktable.files import write_whole as write_whole_file

_MOST_THREADS = 4
"""Each holds the memory of one part."""


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
    parts = _parts(reader, strategy, rank)
    final, others = name(rank), [name(other) for other in range(shared_ranks([strategy]))]
    temporary, serial = start_writing(final, is_file=False)
    memory = torch.empty(max((part.tensor.nbytes for part in parts.values()), default=0), dtype=torch.uint8)

    def read(key: TensorKey, part: Chunk) -> Tensor:
        """Return the values of a part, all in the same memory."""
        value = memory[: part.tensor.nbytes].view(part.tensor.dtype).view(part.box.sizes)
        reader.fill({key: Chunk(value, part.box)})
        return value

    try:
        file = storage.write_parts(temporary, 0, parts, read)
        save_id = hashlib.sha256(f"{manifest.save_id} {sorted((n, repr(x)) for n, x in strategy.items())}".encode())
        places = [PlaceOfRanks([number], os.path.relpath(path, final.parent)) for number, path in enumerate(others)]
        manifest = replace(
            manifest,
            world_size=manifest.world_size or len(others),
            serial=serial,
            saved_at=time.time(),
            save_id=save_id.hexdigest()[:32],
            places=places if len(others) > 1 else [],
            place=rank if len(others) > 1 else 0,
            own=[],
        )
        storage.finish_directory(temporary, [file], storage.to_bytes(reader.state()), manifest)
        give_name(temporary, final)
    except BaseException:
        remove(temporary)
        raise


def _parts(reader: CheckpointReader, strategy: Strategy, rank: int) -> storage.Parts:
    """Return what a rank holds, without values: tensors that the strategy does not name are whole on all."""
    if any(key[0].startswith("rank_") for key in reader.tensors):
        raise CheckpointError(f"checkpoint {reader.path} holds parameters cut by hand, which cannot be cut otherwise")
    parts = {}
    for key, stored in reader.tensors.items():
        layout = strategy.get(key[1])
        if layout is not None and layout.tensor_shape != stored.shape:
            raise CheckpointError(
                f"{key[1]} has shape {stored.shape} in the checkpoint, {layout.tensor_shape} in the strategy: give the "
                "strategy file of this network"
            )
        box = layout.box(rank) if layout is not None else whole(stored.shape)
        if box is not None:
            parts[key] = Chunk(torch.empty(box.sizes, dtype=stored.dtype, device="meta"), box)
    return parts


def write_whole(reader: CheckpointReader, manifest: Manifest, final: Path) -> None:
    """Write a file with whole tensors."""
    _refuse_own(reader, manifest, "load_checkpoint them and use merge_sliced_parameter")
    keys = sorted(reader.tensors, key=lambda key: key[0] != NETWORK)
    temporary, serial = start_writing(final.absolute(), is_file=True)
    file: storage.PlainFileWriter | None = None
    try:
        room = [(key, reader.tensors[key].shape, reader.tensors[key].dtype) for key in keys]
        file = storage.PlainFileWriter(temporary, room, {})
        for key in keys:
            file.write(key, reader.read(key))
        manifest = replace(manifest, serial=serial, saved_at=time.time(), files={}, checksums={}, places=[], place=0)
        file.finish(storage.to_bytes(reader.state()), manifest)
        give_name(temporary, final.absolute())
    except BaseException:
        if file is not None:
            file.abandon()
        remove(temporary)
        raise


def _refuse_own(reader: CheckpointReader, manifest: Manifest, remedy: str) -> None:
    if manifest.own:
        raise CheckpointError(
            f"checkpoint {reader.path}: {manifest.own[0]} is marked layerwise_parallel, and nobody knows how its parts "
            f"make a whole; {remedy}"
        )


# -- safetensors ------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_ALIGNMENT = 8
_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}


def export_checkpoint(checkpoint: StrPath, file: StrPath, *, max_shard_size: int | str | None = None) -> list[Path]:
    """Write the network's tensors of a checkpoint, whole, in the safetensors format; returns the files' paths.

    One process calls it, without a world. `load_checkpoint(file, net)` reads the result back, and so do the safetensors
    package and what builds on it.

    Args:
        checkpoint: path of a checkpoint, or of one of the directories that the ranks of one save wrote.
        file: to be written, such as `model.safetensors`.
        max_shard_size: bytes, or text such as "5GB", that no file exceeds, but for one with a single tensor: files are
            then called `model-00001-of-00003.safetensors`, and `model.safetensors.index.json`, as Hugging Face writes
            it, says which tensor is in which.

    Raises:
        CheckpointError: the checkpoint is incomplete, holds a type of element that the format does not know, or cannot
            be written.
    """
    reader, manifest = open_checkpoint([Path(checkpoint).absolute()])
    target = Path(file).absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return _export(reader, manifest, target, None if max_shard_size is None else parse_bytes(max_shard_size))
    except OSError as error:
        raise CheckpointError(f"{target} was not written: {error.strerror}; give a path with room") from None


def _export(reader: CheckpointReader, manifest: Manifest, target: Path, max_bytes: int | None) -> list[Path]:
    _refuse_own(reader, manifest, "export the parts yourself")
    stored = {name: reader.tensors[NETWORK, name] for name in reader.network_names}
    sizes = {name: math.prod(one.shape) * one.dtype.itemsize for name, one in stored.items()}
    files: list[list[str]] = [[]]
    for name in stored:
        if max_bytes is not None and files[-1] and sum(sizes[other] for other in files[-1]) + sizes[name] > max_bytes:
            files.append([])
        files[-1].append(name)
    if len(files) == 1:
        _write_safetensors(target, files[0], reader)
        return [target]
    stem, suffix = target.name.removesuffix(target.suffix), target.suffix
    paths = [target.with_name(f"{stem}-{number:05}-of-{len(files):05}{suffix}") for number in range(1, len(files) + 1)]
    for path, names in zip(paths, files, strict=True):
        _write_safetensors(path, names, reader)
    weight_map = {name: path.name for path, names in zip(paths, files, strict=True) for name in names}
    index = target.with_name(target.name + INDEX_SUFFIX)
    content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    write_whole_file(index, json.dumps(content, indent=2).encode())
    return [*paths, index]


def _write_safetensors(path: Path, names: Sequence[str], reader: CheckpointReader) -> None:
    """Write one file, a tensor at a time: the safetensors package writes what is all in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        stored = reader.tensors[NETWORK, name]
        if stored.dtype not in _NAMES:
            raise CheckpointError(
                f"{name} is {stored.dtype}, which safetensors does not know: convert it before saving"
            )
        begin, end = end, end + math.prod(stored.shape) * stored.dtype.itemsize
        header[name] = {"dtype": _NAMES[stored.dtype], "shape": list(stored.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open_whole(path) as stream:
        stream.write(HEADER_LENGTH.pack(len(text)) + text)
        for name in names:
            for chunk in storage.chunks_of(raw_bytes(reader.read((NETWORK, name)))):
                stream.write(chunk)


def parse_bytes(text: int | str) -> int:
    """Return a number of bytes: 1000000, "5GB", "200 MiB"."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?I?)B?", str(text).strip().upper())
    count = int(match[1]) * _UNITS.get(match[2], 0) if match else 0
    if isinstance(text, bool) or count < 1:
        raise CheckpointError(f"max_shard_size={text!r}: must be a number of bytes, such as 5GB or 200MiB")
    return count
