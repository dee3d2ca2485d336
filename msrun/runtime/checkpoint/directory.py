"""Checkpoint directories on disk: their names, when one is complete, how one takes its place. No torch.

While it is written a checkpoint is called `NAME.saving`. It gets its name by one rename after everything in it has
reached the disk. `NAME.replaced` and `NAME.removing` are on their way out. Which one is the newest is found by looking
at all of them: there is no pointer that could lie.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from msrun.errors import CheckpointError

MANIFEST = "checkpoint.json"
FORMAT_VERSION = 1
SAVING = ".saving"
REPLACED = ".replaced"
REMOVING = ".removing"


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
    """File name -> bytes."""
    format_version: int = FORMAT_VERSION


def checkpoint_name(prefix: str, epoch_num: int, step_in_epoch: int) -> str:
    """Return MindSpore's name: `CKP-2_32.ckpt` after step 32 of epoch 2, both from 1."""
    return f"{prefix}-{epoch_num}_{step_in_epoch}.ckpt"


def read_manifest(path: Path) -> Manifest | None:
    """Return what a checkpoint says of itself; None when it is not there or not complete.

    Raises:
        CheckpointError: a later version of the format.
    """
    if path.name.endswith((SAVING, REMOVING)):
        return None
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        version = content["format_version"]
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {path} has format {version}, this msrun reads up to {FORMAT_VERSION}: use a newer msrun"
            )
        manifest = Manifest(**{**content, "position": Position(**content["position"])})
        sizes = {name: (path / name).stat().st_size for name in manifest.files}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return manifest if sizes == manifest.files else None


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
        if entry.is_dir() and pattern.fullmatch(entry.name):
            manifest = read_manifest(Path(entry.path))
            if manifest is not None and not entry.name.endswith(REPLACED):
                found.append((Path(entry.path), manifest))
    return sorted(found, key=lambda item: (item[1].serial, item[1].saved_at, item[0].name))


def start_writing(final: Path) -> Path:
    """Make the empty directory in which a checkpoint is written and return it.

    Raises:
        CheckpointError: `final` is something that is no checkpoint of ours.
        OSError: as making a directory does.
    """
    if final.exists() and not _may_be_replaced(final):
        raise CheckpointError(
            f"{final} exists and is no checkpoint: it is left alone; give a name that is free, or remove it"
        )
    temporary = final.with_name(final.name + SAVING)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def _may_be_replaced(final: Path) -> bool:
    return final.is_dir() and ((final / MANIFEST).is_file() or not any(final.iterdir()))


def finish_writing(temporary: Path, final: Path, position: Position, world_size: int) -> None:
    """Write the manifest, make everything durable and give the checkpoint its name, in one rename.

    Raises:
        OSError: nothing has its name yet then.
    """
    earlier = find_checkpoints(final.parent)
    serial = 1 + max((manifest.serial for _, manifest in earlier), default=0)
    files = {entry.name: entry.stat().st_size for entry in os.scandir(temporary)}
    manifest = Manifest(position, world_size, serial, time.time(), files)
    with (temporary / MANIFEST).open("w") as stream:
        json.dump(asdict(manifest), stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_directory(temporary)
    replaced = final.with_name(final.name + REPLACED)
    if final.exists() and any(final.iterdir()):
        if replaced.exists():
            shutil.rmtree(replaced)
        final.rename(replaced)
    temporary.rename(final)
    _sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint as far as possible; it loses its name first, so that half of one is never found."""
    leaving = path.with_name(path.name + REMOVING)
    shutil.rmtree(leaving, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


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


def sweep(directory: Path, prefix: str) -> None:
    """Remove what an interrupted job left behind under a ModelCheckpoint's prefix."""
    endings = "|".join(re.escape(ending) for ending in (SAVING, REMOVING, REPLACED))
    pattern = re.compile(rf"{re.escape(prefix)}-\d+_\d+\.ckpt({endings})")
    recover_all(directory)
    for path in sorted(directory.glob("*.ckpt.*")):
        if pattern.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


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
