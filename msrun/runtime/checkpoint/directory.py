"""Checkpoints on disk, files and directories: their names, when one is complete, how one takes its place. No torch.

While it is written a checkpoint is called `NAME.saving`. It gets its name by one rename after everything in it has
reached the disk. `NAME.replaced` and `NAME.removing` are on their way out. Which one is the newest is found by looking
at all of them: there is no pointer that could lie.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from msrun.errors import CheckpointError

MOST_BYTES = 1 << 32
"""Of a file that is read whole; the values of tensors are not."""


def is_contained(name: Any) -> bool:
    """Return whether a name is a path that stays below the folder it is seen from."""
    return isinstance(name, str) and bool(name) and not name.startswith("/") and not {"..", ""} & {*name.split("/")}


def find_contained(folder: Path, name: Any, *homes: Path) -> Path:
    """Return the path of a plain file in a folder.

    Args:
        homes: other folders that links in it may lead into.
    """
    if not is_contained(name) or "\0" in name:
        raise ValueError(f"it names {str(name)[:200]!r}, which is no file of its folder")
    path = folder / name
    real = path.resolve(strict=True)
    if not any(real.is_relative_to(home.resolve()) for home in (folder, *homes)):
        raise ValueError(f"{name} is a link that leads out of its folder; copy the file there")
    if not real.is_file():
        raise OSError(errno.EINVAL, f"{name} is no plain file")
    return path


def read_contained(folder: Path, name: str) -> bytes:
    """Return the content of a plain file in a folder."""
    with find_contained(folder, name).open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MOST_BYTES:
            raise ValueError(f"{name} has {size} bytes, at most {MOST_BYTES} are read")
        return stream.read(size)


MANIFEST = "checkpoint.json"
TENSORS = "tensors.json"
"""Where the tensors lie."""
STATE = "state.pt"
"""What is no tensor of a layout."""
FORMAT_VERSION = 2
SAVING = ".saving"
REPLACED = ".replaced"
REMOVING = ".removing"
DAMAGED = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, EOFError, RuntimeError, OverflowError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, struct.error, pickle.UnpicklingError),
)
"""What reading a file raises that is no checkpoint, or half of one."""


def explain(error: Exception) -> str:
    """Return in one line what reading a file has raised."""
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
    elif isinstance(error, KeyError):
        reason = f"it lacks {error}"
    else:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return " ".join(reason.split())[:300] or type(error).__name__


def damaged(path: Path, error: Exception) -> CheckpointError:
    """Return the error to raise for what reading a file of a checkpoint has raised."""
    return CheckpointError(f"checkpoint {path} cannot be read: {explain(error)}; load another one")


@dataclass(frozen=True)
class Position:
    """How far training was."""

    epoch: int = 0
    """Epochs that are done; also the index, from 0, of the epoch to go on with."""
    step_in_epoch: int = 0
    """Steps of that epoch that are done."""
    step: int = 0
    """Steps done over all epochs."""


@dataclass(frozen=True)
class PlaceOfRanks:
    """One of several directories that one save wrote."""

    ranks: list[int]
    """Who wrote into it."""
    path: str
    """Where it is, seen from the folder of the one that says so."""


@dataclass(frozen=True)
class Manifest:
    """What `checkpoint.json` says."""

    position: Position
    world_size: int
    """Ranks that wrote it."""
    serial: int
    """Counts up in the order in which the checkpoints of a directory were written, whatever clocks say."""
    saved_at: float
    """Seconds since 1970."""
    files: dict[str, int] = field(default_factory=dict)
    """Of a directory: file name -> bytes."""
    checksums: dict[str, int] = field(default_factory=dict)
    """Of a directory: file name -> CRC-32."""
    save_id: str = ""
    """The same in all directories that one save wrote; another one for every save."""
    places: list[PlaceOfRanks] = field(default_factory=list)
    """The directories of one save; empty when there is one for all, which is complete."""
    place: int = 0
    """Which of these it is."""
    own: list[str] = field(default_factory=list)
    """Parameters that every rank had cut by hand: they load on as many ranks only."""
    format_version: int = FORMAT_VERSION


def checkpoint_name(prefix: str, epoch_num: int, step_in_epoch: int) -> str:
    """Return MindSpore's name: `CKP-2_32.ckpt` after step 32 of epoch 2, both from 1."""
    return f"{prefix}-{epoch_num}_{step_in_epoch}.ckpt"


def read_manifest(path: Path) -> Manifest | None:
    """Return what a checkpoint says of itself; None when it is not there or not complete."""
    if path.name.endswith((SAVING, REMOVING)) or not (path.is_dir() or path.is_file()):
        return None
    try:
        content = json.loads(read_record(path, MANIFEST))
        version = content["format_version"]
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {path} has format {version}, this msrun reads up to {FORMAT_VERSION}: use a newer msrun"
            )
        places = [PlaceOfRanks(**place) for place in content.get("places", [])]
        manifest = Manifest(**{**content, "position": Position(**content["position"]), "places": places})
        _check(manifest)
        if not all(is_contained(name) for name in manifest.files):
            raise ValueError("it names files outside of its folder")
        sizes = {name: (path / name).stat().st_size for name in manifest.files}
    except DAMAGED:
        return None
    return manifest if sizes == manifest.files else None


def _check(manifest: Manifest) -> None:
    """Refuse values of other types than a save writes."""
    numbers = [manifest.world_size, manifest.serial, manifest.place, *asdict(manifest.position).values()]
    numbers += [*manifest.files.values(), *manifest.checksums.values()]
    numbers += [rank for place in manifest.places for rank in place.ranks]
    texts = [manifest.save_id, *manifest.own, *(place.path for place in manifest.places)]
    is_time = type(manifest.saved_at) in (int, float) and 0 <= manifest.saved_at < 1 << 40
    if not all(type(number) is int and number >= 0 for number in numbers) or not is_time:
        raise TypeError("it holds other things than numbers where numbers belong")
    if not all(isinstance(text, str) and "\0" not in text for text in texts):
        raise TypeError("it holds other things than text where names belong")
    if not all(place.ranks for place in manifest.places) or manifest.place >= max(1, len(manifest.places)):
        raise TypeError("it is none of the directories that it names")


def read_record(path: Path, name: str) -> bytes:
    """Return a file of a checkpoint that is a directory, or a record of one that is a file."""
    if path.is_dir():
        return read_contained(path, name)
    with zipfile.ZipFile(path) as archive:
        root = archive.filelist[0].filename.partition("/")[0] if archive.filelist else ""
        record = archive.getinfo(f"{root}/{name}")
        if record.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is compressed, which may hide a size that no memory has")
        return archive.read(record)


def manifest_text(manifest: Manifest) -> str:
    """Return `checkpoint.json`."""
    return json.dumps(asdict(manifest), indent=1)


def find_checkpoints(directory: Path, prefix: str | None = None) -> list[tuple[Path, Manifest]]:
    """Return the complete checkpoints of a directory, the one written last at the end.

    Args:
        prefix: only those that ModelCheckpoint named with it; None for all.
    """
    pattern = re.compile(rf"{re.escape(prefix)}-\d+_\d+\.ckpt" if prefix is not None else r".*", re.DOTALL)
    found = []
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:
        return []
    for entry in entries:
        if pattern.fullmatch(entry.name):
            manifest = read_manifest(Path(entry.path))
            if manifest is not None and not entry.name.endswith(REPLACED):
                found.append((Path(entry.path), manifest))
    return sorted(found, key=lambda item: (item[1].serial, item[1].saved_at, item[0].name))


def start_writing(final: Path, *, is_file: bool) -> tuple[Path, int]:
    """Make way for a checkpoint; return what it is called while it is written, and its serial.

    Args:
        is_file: False: the empty directory of that name is made.
    """
    is_own = (final / MANIFEST).is_file() or not any(final.iterdir()) if final.is_dir() else bool(read_manifest(final))
    if os.path.lexists(final) and not is_own:
        raise CheckpointError(
            f"{final} exists and is no checkpoint: it is left alone; give a name that is free, or remove it"
        )
    temporary = final.with_name(final.name + SAVING)
    remove(temporary)
    (temporary.parent if is_file else temporary).mkdir(parents=True, exist_ok=True)
    earlier = find_checkpoints(final.parent)
    return temporary, 1 + max((manifest.serial for _, manifest in earlier), default=0)


def complete_directory(temporary: Path, manifest: Manifest) -> None:
    """Write the manifest of a directory, with the sizes of its files, and have all of it reach the disk."""
    files = {entry.name: entry.stat().st_size for entry in os.scandir(temporary)}
    write_through(temporary / MANIFEST, manifest_text(replace(manifest, files=files)).encode())
    _sync_directory(temporary)


def write_through(path: Path, content: bytes) -> None:
    """Write a file and return when it has reached the disk."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def give_name(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name, in one rename; one that had the name before goes."""
    replaced = final.with_name(final.name + REPLACED)
    if (final.is_dir() and any(final.iterdir())) or (final.is_file() and temporary.is_dir()):
        remove(replaced)
        final.rename(replaced)
    elif final.is_dir() and temporary.is_file():
        final.rmdir()
    temporary.rename(final)
    _sync_directory(final.parent)
    with contextlib.suppress(OSError):
        remove(replaced)


def remove(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def recover(final: Path) -> None:
    """Give a checkpoint its name back when the writing of its successor was cut off between two renames."""
    replaced = final.with_name(final.name + REPLACED)
    if not final.exists() and read_manifest(replaced) is not None:
        with contextlib.suppress(OSError):
            replaced.rename(final)


def recover_all(directory: Path) -> None:
    """Recover every checkpoint of a directory."""
    for path in sorted(directory.glob("*" + REPLACED)):
        recover(path.with_name(path.name.removesuffix(REPLACED)))


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint as far as possible; it loses its name first, so that half of one is never found."""
    leaving = path.with_name(path.name + REMOVING)
    with contextlib.suppress(OSError):
        remove(leaving)
    with contextlib.suppress(OSError):
        path.rename(leaving)
    with contextlib.suppress(OSError):
        remove(leaving)


def sweep(directory: Path, prefix: str) -> None:
    """Remove what an interrupted job left behind under a ModelCheckpoint's prefix."""
    endings = "|".join(re.escape(ending) for ending in (SAVING, REMOVING, REPLACED))
    pattern = re.compile(rf"{re.escape(prefix)}-\d+_\d+\.ckpt({endings})")
    recover_all(directory)
    for path in sorted(directory.glob("*.ckpt.*")):
        if pattern.fullmatch(path.name):
            with contextlib.suppress(OSError):
                remove(path)


def choose_surplus(checkpoints: Sequence[tuple[Path, Manifest]], keep_max: int, keep_per_minutes: int) -> list[Path]:
    """Return which checkpoints retention removes; never the last one.

    Args:
        checkpoints: oldest first, the last one just written.
        keep_max: how many stay; 0 = ask keep_per_minutes.
        keep_per_minutes: of those written within so many minutes, the oldest stays; 0 = all stay.
    """
    if keep_max > 0:
        return [path for path, _ in checkpoints[:-keep_max]]
    surplus = []
    last_kept = -float("inf")
    for path, manifest in checkpoints[:-1] if keep_per_minutes > 0 else []:
        if manifest.saved_at - last_kept < keep_per_minutes * 60:
            surplus.append(path)
        else:
            last_kept = manifest.saved_at
    return surplus
