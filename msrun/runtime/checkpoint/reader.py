"""One checkpoint to read from: a file, a directory, or the directories that the ranks of one save wrote apart."""

from __future__ import annotations

import io
import math
import os
import re
import time
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.catalogue import NETWORK, TensorKey, flat_name
from msrun.runtime.checkpoint.dcp_metadata import METADATA
from msrun.runtime.checkpoint.directory import (
    DAMAGED,
    MANIFEST,
    REMOVING,
    SAVING,
    Manifest,
    Position,
    damaged,
    find_checkpoints,
    read_manifest,
    read_record,
)
from msrun.runtime.checkpoint.plain_file import STATE, open_plain_file
from msrun.runtime.checkpoint.safetensors_file import INDEX_SUFFIX, open_safetensors
from msrun.runtime.checkpoint.tensor_files import PartFilesReader
from msrun.runtime.checkpoint.torch_saving import load_weights
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.parallel.strategy_file import Strategy, read_strategy, shared_ranks
from msrun.runtime.sharding.layout import Box, whole


class DictTensors:
    """Reads tensors, and parts of them, from tensors.

    Args:
        path: where they come from, for messages.
        tensors: whole ones, but for those of `boxes`.
        boxes: which parts they are.
    """

    def __init__(
        self, path: Path, tensors: Mapping[TensorKey, Tensor], boxes: Mapping[TensorKey, Box] | None = None
    ) -> None:
        self.path = path
        self._tensors = {
            key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in tensors.items()
        }
        self._boxes = {key: whole(value.shape) for key, value in self._tensors.items()} | dict(boxes or {})
        self.keys: list[TensorKey] = list(tensors)

    def shape(self, key: TensorKey) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._boxes[key].shape

    def dtype(self, key: TensorKey) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return self._tensors[key].dtype

    def boxes(self, key: TensorKey) -> list[Box]:
        """Return the part that is there."""
        return [self._boxes[key]]

    def fill(self, parts: Mapping[TensorKey, Chunk]) -> None:
        """Fill tensors with the values of their boxes; another type of element is converted."""
        for key, part in parts.items():
            value = self._tensors[key].detach()[part.box.slices_in(self._boxes[key])]
            part.tensor.detach().copy_(value)


def is_tensors(value: Any) -> bool:
    """Return whether something is a dict of names and tensors, as state_dict returns."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items()
    )


class PartReader(Protocol):
    """Reads parts of tensors from one file or directory."""

    path: Path
    keys: list[TensorKey]

    def shape(self, key: TensorKey) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""

    def dtype(self, key: TensorKey) -> torch.dtype:
        """Return the type of a tensor's elements."""

    def boxes(self, key: TensorKey) -> list[Box]:
        """Return the parts that are there; they do not overlap."""

    def fill(self, parts: Mapping[TensorKey, Chunk]) -> None:
        """Fill tensors with the values of their boxes, all of which is there."""


class TensorSource(Protocol):
    """Where the values of tensors come from: a checkpoint or a dict."""

    def fill(self, parts: Mapping[TensorKey, Chunk]) -> None:
        """Fill tensors with the values of their boxes; another type of element is converted."""


class CheckpointReader:
    """Reads parts of the tensors of one checkpoint; each rank for itself.

    Args:
        sources: its files and directories; of a part that several have, the first one's is read.
        is_foreign: msrun has not written them.

    Raises:
        CheckpointError: a file is missing or damaged; also from the methods.
    """

    def __init__(self, sources: Sequence[PartReader], *, is_foreign: bool = False) -> None:
        self.sources = list(sources)
        self._is_foreign = is_foreign
        self._of_key: dict[TensorKey, list[PartReader]] = {}
        for source in self.sources:
            for key in source.keys:
                others = self._of_key.setdefault(key, [source])
                if (source.shape(key), source.dtype(key)) != (others[0].shape(key), others[0].dtype(key)):
                    raise CheckpointError(
                        f"{others[0].path} and {source.path} have {flat_name(key)} in different shapes or types: give "
                        "those of one save"
                    )
                if source is not others[0]:
                    others.append(source)

    @property
    def path(self) -> Path:
        """Where it is, for messages."""
        return self.sources[0].path

    @property
    def keys(self) -> list[TensorKey]:
        """All tensors."""
        return list(self._of_key)

    @property
    def network_names(self) -> list[str]:
        """Names of the network's tensors."""
        return [key[1] for key in self._of_key if key[0] == NETWORK]

    def __contains__(self, key: TensorKey) -> bool:
        return key in self._of_key

    def shape(self, key: TensorKey) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._of_key[key][0].shape(key)

    def dtype(self, key: TensorKey) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return self._of_key[key][0].dtype(key)

    def boxes(self, key: TensorKey) -> list[Box]:
        """Return the different parts that are there."""
        return list(dict.fromkeys(box for source in self._of_key[key] for box in source.boxes(key)))

    def fill(self, parts: Mapping[TensorKey, Chunk]) -> None:
        """Fill tensors with the values of their boxes; another type of element is converted."""
        direct: dict[int, dict[TensorKey, Chunk]] = {}
        for key, part in parts.items():
            if not math.prod(part.box.sizes):
                continue
            source = next((s for s in self._of_key[key] if _has_all(s.boxes(key), part.box)), None)
            if source is not None:
                direct.setdefault(self.sources.index(source), {})[key] = part
            else:
                self._fill_from_many(key, part)
        for number, wanted in direct.items():
            self.sources[number].fill(wanted)

    def _fill_from_many(self, key: TensorKey, part: Chunk) -> None:
        done: set[Box] = set()
        count = 0
        for source in self._of_key[key]:
            for box in source.boxes(key):
                common = box.intersect(part.box)
                if box in done or common is None:
                    continue
                done.add(box)
                source.fill({key: Chunk(part.tensor[common.slices_in(part.box)], common)})
                count += math.prod(common.sizes)
        if count != math.prod(part.box.sizes):
            raise CheckpointError(f"checkpoint {self.path}: parts of {flat_name(key)} are missing; load another one")

    def read(self, key: TensorKey) -> Tensor:
        """Return a whole tensor."""
        shape = self.shape(key)
        if sum(math.prod(box.sizes) for box in self.boxes(key)) < math.prod(shape):
            raise CheckpointError(f"checkpoint {self.path}: parts of {flat_name(key)} are missing; load another one")
        try:
            value = torch.empty(shape, dtype=self.dtype(key))
        except RuntimeError as error:  # more than there is memory
            raise damaged(self.path, error) from None
        self.fill({key: Chunk(value, whole(shape))})
        return value

    def state(self) -> dict[str, Any]:
        """Return what is no tensor of a layout; of a file that msrun has not written, that there is nothing.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        if self._is_foreign:
            return {"extra": {}, "appended": {}, "optimizer": None, "random": {"now": [None], "epoch": [None]}}
        try:
            state = load_weights(io.BytesIO(read_record(self.path, STATE)))
            if not _is_state(state):
                raise ValueError(f"{STATE} holds something else than the state of a training")
        except DAMAGED as error:
            raise damaged(self.path, error) from None
        return dict(state)


def _is_state(value: Any) -> bool:
    """Return whether a value has the form of what `save` writes as the state."""
    if not isinstance(value, dict) or not {"extra", "appended", "optimizer", "random"} <= value.keys():
        return False
    randoms = value["random"].values() if isinstance(value["random"], dict) else []
    optimizer = value["optimizer"] if value["optimizer"] is not None else {"groups": [], "state": {}}
    return (
        isinstance(value["extra"], dict)
        and isinstance(value["appended"], dict)
        and len(randoms) == 2
        and all(isinstance(states, list) and states for states in randoms)
        and all(_is_random(state) for states in randoms for state in states)
        and _are(optimizer.get("groups"), list, {"parameters": list, "settings": dict})
        and _are(optimizer.get("state"), dict, {"parts": list, "values": dict})
    )


def _is_random(state: Any) -> bool:
    return state is None or _are([state], list, {"torch": Tensor, "python": tuple, "numpy": tuple})


def _are(values: Any, kind: type[list[Any] | dict[Any, Any]], fields: Mapping[str, type]) -> bool:
    """Return whether a list or dict holds dicts with fields of these types."""
    if not isinstance(values, kind):
        return False
    each: Iterable[Any] = values.values() if isinstance(values, dict) else values
    return all(
        isinstance(item, dict) and all(isinstance(item.get(name), of_type) for name, of_type in fields.items())
        for item in each
    )


def _has_all(boxes: Sequence[Box], wanted: Box) -> bool:
    common = (box.intersect(wanted) for box in boxes)
    return sum(math.prod(box.sizes) for box in common if box is not None) == math.prod(wanted.sizes)


def open_parts(paths: Sequence[Path]) -> CheckpointReader:
    """Return a reader of what of a checkpoint is here.

    Args:
        paths: of a complete checkpoint, or directories of one save.

    Raises:
        CheckpointError: a file is damaged.
    """
    manifest = read_manifest(paths[0])
    if manifest is None:
        return CheckpointReader(open_foreign(paths[0]), is_foreign=True)
    is_plain = manifest.format_version > 1
    return CheckpointReader(
        [PartFilesReader(path, is_plain=is_plain) if path.is_dir() else open_plain_file(path) for path in paths]
    )


def look_at(path: Path) -> Manifest | None:
    """Return what a checkpoint says of itself, or could say if msrun had written it; None when it is not complete."""
    manifest = read_manifest(path)
    if manifest is None and is_foreign(path):
        return Manifest(Position(), world_size=0, serial=0, saved_at=path.stat().st_mtime)
    return manifest


def find_set(paths: Sequence[Path]) -> tuple[dict[int, Path], Manifest]:
    """Return the directories that one save wrote, by their number, as far as they are here.

    Args:
        paths: some of them, or all; those that the manifest names are looked for beside them.

    Raises:
        CheckpointError: one of `paths` is no complete checkpoint, or of another save than the first.
    """
    found: dict[int, Path] = {}
    first: Manifest | None = None
    for path in paths:
        manifest = look_at(path)
        if manifest is None:
            what = f"{path} is no complete checkpoint" if path.exists() else f"there is no checkpoint {path}"
            raise CheckpointError(f"{what}: give another one")
        first = first or manifest
        if manifest.save_id != first.save_id:
            raise CheckpointError(f"{paths[0]} and {path} are of different saves: give those of one")
        found.setdefault(manifest.place, path)
    assert first is not None, "at least one path is given"
    for number, place in enumerate(first.places):
        path = Path(os.path.normpath(paths[0].parent / place.path))
        if number not in found:
            other = read_manifest(path)
            if other is not None and (other.save_id, other.place) == (first.save_id, number):
                found[number] = path
    return found, first


def check_set(path: Path, manifest: Manifest, found: Collection[int]) -> None:
    """Refuse a set of directories that is not complete.

    Raises:
        CheckpointError: it names those that are missing.
    """
    missing = [place for number, place in enumerate(manifest.places) if number not in found]
    if missing:
        ranks = ", ".join(str(rank) for rank in missing[0].ranks[:8])
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"checkpoint {path} is one of {len(manifest.places)} directories of one save, and that of rank {ranks} "
            f"({missing[0].path} beside it){more} is missing: copy all of them to where they were, or give them all to "
            "load_distributed_checkpoint"
        )


def open_checkpoint(paths: Sequence[Path], *, needs_all: bool = True) -> tuple[CheckpointReader, Manifest]:
    """Return a reader of a checkpoint, of which one path is enough, and what it says of itself.

    Args:
        needs_all: False: of several directories some may be missing.

    Raises:
        CheckpointError: it is not there, or not complete.
    """
    found, manifest = find_set(paths)
    if needs_all:
        check_set(paths[0], manifest, found)
    return open_parts(list(found.values())), manifest


# -- what msrun has not written: of torch.save, safetensors, the index of several, torch.distributed.checkpoint ------


def is_foreign(path: Path) -> bool:
    """Return whether a file or directory looks like one to read, which msrun has not written."""
    if path.is_dir() and not path.name.endswith((SAVING, REMOVING)):
        return (path / METADATA).is_file() and not any((path / name).exists() for name in (MANIFEST, STATE))
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
    """Return readers of such a file or directory.

    Raises:
        CheckpointError: it cannot be read, or holds something else than the tensors of a state dict.
    """
    if path.name.endswith((".safetensors", INDEX_SUFFIX)):
        return list(open_safetensors(path))
    if path.is_dir():
        return [PartFilesReader(path, is_plain=False)]
    return [DictTensors(path, {(NETWORK, name): value for name, value in load_torch_file(path).items()})]


def load_torch_file(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a torch.save file, mapped into memory.

    Raises:
        CheckpointError: it cannot be read, or holds something else than the tensors of a state dict.
    """
    try:
        content = load_weights(path, mmap=True)
    except DAMAGED as error:
        raise CheckpointError(f"{path} cannot be read: {error}; give another file") from None
    if not is_tensors(content):
        raise CheckpointError(f"{path} holds no dict of tensors: give one of torch.save(net.state_dict(), file)")
    return dict(content)


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
