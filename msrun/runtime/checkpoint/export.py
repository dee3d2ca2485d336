"""export_checkpoint: the network of a checkpoint as safetensors files, for other programs; one tensor in memory."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.catalogue import NETWORK
from msrun.runtime.checkpoint.directory import Manifest
from msrun.runtime.checkpoint.reader import CheckpointReader, open_checkpoint
from msrun.runtime.checkpoint.safetensors_file import INDEX_SUFFIX, Tensors, share_into_files, write_safetensors
from ranktable.files import open_whole, write_whole

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
StrPath = str | os.PathLike[str]


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
    if manifest.own:
        raise CheckpointError(
            f"checkpoint {reader.path}: {manifest.own[0]} is marked layerwise_parallel, and nobody knows how its parts "
            "make a whole; export the parts yourself"
        )
    tensors = [(name, reader.shape((NETWORK, name)), reader.dtype((NETWORK, name))) for name in reader.network_names]
    files = [tensors] if max_bytes is None else share_into_files(tensors, max_bytes)
    if len(files) == 1:
        _write(target, files[0], reader)
        return [target]
    stem, suffix = target.name.removesuffix(target.suffix), target.suffix
    paths = [target.with_name(f"{stem}-{number:05}-of-{len(files):05}{suffix}") for number in range(1, len(files) + 1)]
    for path, of_file in zip(paths, files, strict=True):
        _write(path, of_file, reader)
    weight_map = {name: path.name for path, of_file in zip(paths, files, strict=True) for name, _, _ in of_file}
    size = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in tensors)
    index = target.with_name(target.name + INDEX_SUFFIX)
    write_whole(index, json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2).encode())
    return [*paths, index]


def _write(path: Path, tensors: Tensors, reader: CheckpointReader) -> None:
    with open_whole(path) as stream:
        write_safetensors(stream, tensors, _values(tensors, reader))


def _values(tensors: Tensors, reader: CheckpointReader) -> Iterator[Tensor]:
    for name, _, _ in tensors:
        yield reader.read((NETWORK, name))


def parse_bytes(text: int | str) -> int:
    """Return a number of bytes: 1000000, "5GB", "200 MiB".

    Raises:
        CheckpointError: something else, or none at all.
    """
    match = re.fullmatch(r"(\d+)\s*([KMG]?I?)B?", str(text).strip().upper())
    count = int(match[1]) * _UNITS.get(match[2], 0) if match else 0
    if isinstance(text, bool) or count < 1:
        raise CheckpointError(f"max_shard_size={text!r}: must be a number of bytes, such as 5GB or 200MiB")
    return count
