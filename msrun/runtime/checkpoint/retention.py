"""Which checkpoints of a directory stay, and how the others go. No torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from msrun.runtime.checkpoint.directory import REMOVING, REPLACED, SAVING, Manifest, recover_all, remove


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
