"""Does another host see the launcher's log directory? The launcher leaves a random word there, the host looks for it.

Equal paths prove nothing: /home may be one disk for all hosts or one for each.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from msrun import contract

_PREFIX = ".msrun-seen-"
MAX_WORD_BYTES = 128


@contextlib.contextmanager
def shown_word(log_dir: Path) -> Iterator[dict[str, str]]:
    """Keep a file with a random word in the log directory, or in the nearest folder above it that exists.

    Yields {path, word} for `sees_word` of other hosts; empty when nothing can be written there. The file is gone
    afterwards, whatever happens.
    """
    folder = log_dir
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    word = secrets.token_hex(32)
    path = folder / f"{_PREFIX}{secrets.token_hex(8)}"  # new, so that no host has remembered that it is not there
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, contract.FILE_MODE)
    except OSError:
        yield {}
        return
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(word)
        yield {"path": str(path), "word": word}
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def sees_word(shown: Mapping[str, str]) -> bool:
    """Return whether this host reads the word that the launcher left."""
    if not shown:
        return False
    try:
        with Path(shown["path"]).open("rb") as file:
            return file.read(MAX_WORD_BYTES) == shown["word"].encode()
    except OSError:
        return False
