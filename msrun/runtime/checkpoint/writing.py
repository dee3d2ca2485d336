"""One checkpoint on its way to the disk: everything is decided, only the group's messages and the files are missing.

It runs in the training's own thread over the world's group, or in a thread beside it over a group of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import CheckpointError
from msrun.runtime.agreement import Group, attempt, attempt_all, gather
from msrun.runtime.checkpoint.catalogue import (
    NETWORK,
    Catalogue,
    Entry,
    Held,
    TensorKey,
    build_catalogue,
    covers,
    flat_name,
    pieces_of,
)
from msrun.runtime.checkpoint.directory import (
    SAVING,
    Manifest,
    complete_directory,
    give_name,
    recover,
    remove,
    start_writing,
)
from msrun.runtime.checkpoint.part_index import Written
from msrun.runtime.checkpoint.plain_file import STATE, PlainFileWriter
from msrun.runtime.checkpoint.tensor_files import write_indexes, write_parts
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.world import get_rank

VISIBLE_WITHIN_S = 10.0
"""How long a file that another host made may take to appear."""

_shared: dict[tuple[str, tuple[str, ...]], bool] = {}
"""(folder, hosts) -> whether they see the same files in it; looked at once"""


@dataclass(frozen=True)
class Place:
    """One path, and the ranks to which it is the same."""

    path: Path
    ranks: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The rank that does what is done once."""
        return self.ranks[0]


def find_places(path: str | os.PathLike[str]) -> list[Place]:
    """Return where all ranks' paths lead, the lowest rank's first. All ranks call it together."""
    own = Path(path).absolute()
    asked = gather((str(own), host()))
    together: dict[str, dict[str, list[int]]] = {}
    for rank, (text, its_host) in enumerate(asked):
        together.setdefault(text, {}).setdefault(its_host, []).append(rank)
    found = []
    for text, hosts in together.items():
        if len(hosts) == 1 or _is_shared(Path(text).parent, hosts):
            found.append(Place(Path(text), tuple(sorted(rank for ranks in hosts.values() for rank in ranks))))
        else:
            found += [Place(Path(text), tuple(ranks)) for ranks in hosts.values()]
    return sorted(found, key=lambda place: place.leader)


def own_place(places: Sequence[Place], rank: int) -> int:
    """Return the index of a rank's place."""
    return next(index for index, place in enumerate(places) if rank in place.ranks)


def host() -> str:
    """Return what processes have in common that see the same files: the host, and the container on it."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/mnt').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _is_shared(folder: Path, hosts: dict[str, list[int]]) -> bool:
    """Return whether all these hosts have one folder under its name. All ranks of the world call it together."""
    key = (str(folder), tuple(sorted(hosts)))
    if key not in _shared:
        lookers = [min(ranks) for ranks in hosts.values()]
        first = min(lookers)
        name = gather(f".msrun-{uuid.uuid4().hex}")[first]

        def make() -> None:
            if get_rank() == first:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()

        def see() -> bool:
            return get_rank() not in lookers or _appears(folder / name)

        try:
            attempt(make)
            _shared[key] = all(attempt_all(see))
        finally:
            if get_rank() == first:
                (folder / name).unlink(missing_ok=True)
    return _shared[key]


def _appears(path: Path) -> bool:
    end = time.monotonic() + VISIBLE_WITHIN_S
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@dataclass(frozen=True)
class Writing:
    """What is to be written, as this rank knows it. The parts are not copied."""

    places: list[Place]
    own: Place
    parts: Mapping[TensorKey, Chunk]
    """What this rank writes or sends."""
    catalogues: list[Catalogue]
    """Of each place."""
    state: bytes
    """`state.pt`; empty on ranks that do not write it."""
    tied: Mapping[str, str]
    """name -> name of the same tensor of the network, which is written in its stead."""
    manifest: Manifest
    is_integrated: bool
    then: Callable[[], None] = lambda: None
    """What a leader does when its checkpoint has its name."""

    def with_parts(self, parts: Mapping[TensorKey, Chunk]) -> Writing:
        """Return the same with other tensors of the same values."""
        return replace(self, parts=parts)

    def run(self, group: Group = None) -> None:
        """Write it. All ranks call it together.

        Raises:
            CheckpointError: it could not be written; the same on every rank, and earlier ones are as they were.
        """
        final = self.own.path
        temporary = final.with_name(final.name + SAVING)
        is_leader = get_rank() == self.own.leader

        def start() -> int:
            return start_writing(final, is_file=self.is_integrated)[1] if is_leader else 0

        try:
            serial = max(attempt_all(start, group))
            manifest = replace(self.manifest, serial=serial, saved_at=time.time())
            write = self._write_file if self.is_integrated else self._write_directory
            try:
                write(temporary, manifest, group)
                attempt(lambda: give_name(temporary, final) if is_leader else None, group)
                if is_leader:
                    self.then()
            except CheckpointError:
                if is_leader:
                    with contextlib.suppress(OSError):
                        remove(temporary)
                    recover(final)
                raise
        except CheckpointError as error:
            raise CheckpointError(explain(final, str(error))) from None

    def _write_directory(self, temporary: Path, manifest: Manifest, group: Group) -> None:
        rank = get_rank()

        def write() -> tuple[Written, dict[str, int]]:
            _see(temporary)
            return write_parts(temporary, self.parts.items(), rank)

        everyone = attempt_all(write, group)
        outcomes = [everyone[of_rank] for of_rank in self.own.ranks]

        def complete() -> None:
            if rank != self.own.leader:
                return
            catalogue = self.catalogues[self.places.index(self.own)]
            checksums = write_indexes(temporary, catalogue, [written for written, _ in outcomes])
            for _, of_files in outcomes:
                checksums |= of_files
            with (temporary / STATE).open("wb") as stream:
                stream.write(self.state)
                stream.flush()
                os.fsync(stream.fileno())
            checksums[STATE] = zlib.crc32(self.state)
            complete_directory(temporary, replace(manifest, checksums=checksums))

        attempt(complete, group)

    def _write_file(self, temporary: Path, manifest: Manifest, group: Group) -> None:
        """Send every tensor to the ranks that write a file, one after another."""
        rank = get_rank()
        file: PlainFileWriter | None = None
        failure: OSError | None = None
        if rank == self.own.leader:
            entries = self.catalogues[self.places.index(self.own)]
            try:
                file = PlainFileWriter(temporary, [(k, e.shape, e.dtype) for k, e in entries.items()], self.tied)
            except OSError as error:
                failure = error
        for place, catalogue in zip(self.places, self.catalogues, strict=True):
            for key, entry in catalogue.items():
                value = self._bring_together(key, entry, place.leader, group)
                if file is None or value is None or failure is not None:
                    continue
                try:
                    file.write(key, value)
                except OSError as error:  # the others send on: they learn of it at the end
                    failure = error

        def finish() -> None:
            if failure is not None:
                raise failure
            if file is not None:
                file.finish(self.state, manifest)

        try:
            attempt(finish, group)
        except CheckpointError:
            if file is not None:
                file.abandon()
            raise

    def _bring_together(self, key: TensorKey, entry: Entry, to: int, group: Group) -> Tensor | None:
        """Return a whole tensor on the rank that writes it."""
        rank = get_rank()
        if len(entry.pieces) == 1 and entry.pieces[0][1] == to:
            return self.parts[key].tensor if rank == to else None
        value = torch.empty(entry.shape, dtype=entry.dtype) if rank == to else None
        for box, of_rank in entry.pieces:
            if value is not None and of_rank == to:
                value[box.slices].copy_(self.parts[key].tensor)
            elif value is not None:
                there = value[box.slices]
                part = there if there.is_contiguous() else torch.empty(box.sizes, dtype=entry.dtype)
                dist.recv(_flat(part), of_rank, group)
                if part is not there:
                    there.copy_(part)
            elif rank == of_rank:
                dist.send(_flat(self.parts[key].tensor.detach().cpu().contiguous()), to, group)
        return value


def _flat(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor: groups send those of every type."""
    return tensor.reshape(-1).view(torch.uint8)


def share_out(
    places: Sequence[Place], held: Sequence[Held], *, is_integrated: bool, order: Sequence[TensorKey]
) -> list[Catalogue]:
    """Decide which rank writes which part into each place.

    Args:
        held: per rank.
        order: of the tensors of the network, those of the optimizer follow.

    Raises:
        CheckpointError: no rank holds some part of a tensor that is to be written whole.
    """
    catalogues = []
    position = {key: number for number, key in enumerate(order)}
    for place in places:
        ranks = range(len(held)) if is_integrated else place.ranks
        found = build_catalogue({rank: held[rank] for rank in ranks}, place.leader if is_integrated else None)
        for key, entry in found.items() if is_integrated else ():
            if not covers([box for box, _ in entry.pieces], entry.shape):
                raise CheckpointError(
                    f"{flat_name(key)}: the ranks hold parts that do not make the whole: save it with "
                    "integrated_save=False"
                )
        keys = sorted(found, key=lambda key: (key[0] != NETWORK, position.get(key, len(position))))
        catalogues.append({key: found[key] for key in keys})
    return catalogues


def needed_parts(
    catalogues: Sequence[Catalogue], parts: Mapping[TensorKey, Chunk], rank: int
) -> dict[TensorKey, Chunk]:
    """Return what a rank writes or sends."""
    return {key: part for catalogue in catalogues for key, part in pieces_of(catalogue, parts, rank).items()}


def _see(temporary: Path) -> None:
    end = time.monotonic() + VISIBLE_WITHIN_S
    while not temporary.is_dir():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{temporary} is there for another rank but not here: give a directory that all hosts share, or one "
                "of its own to every rank"
            )
        time.sleep(0.05)


_REMEDIES: Sequence[tuple[str, str]] = (
    ("No space left on device", "free some space, or keep fewer checkpoints (keep_checkpoint_max)"),
    ("Disk quota exceeded", "free some space, or keep fewer checkpoints (keep_checkpoint_max)"),
    ("Permission denied", "give a directory that this user may write to"),
    ("Read-only file system", "give a directory that can be written to"),
)


def explain(final: Path, failure: str) -> str:
    """Return why a checkpoint was not written, and what to do."""
    remedy = next((remedy for text, remedy in _REMEDIES if text in failure), "")
    return f"checkpoint {final} was not saved, earlier ones are untouched: {failure}" + (
        f"; {remedy}" if remedy else ""
    )
