"""Reads a folder with what each host says about its devices: copies of hccn.conf and captured tool answers.

For the host HOST it holds `HOST.conf` (a copy of /etc/hccn.conf) or `HOST.txt` or `HOST.log` (captured answers, see
`ranktable.sources.transcript`), or a folder `HOST` with `hccn.conf` and any `*.txt` and `*.log`. What several files
say about one device must agree.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ranktable.errors import ReadError, SourceError
from ranktable.reading.source import read_bytes
from ranktable.sources.answer import HostAnswers, join_answers
from ranktable.sources.hccn_conf import parse_hccn_conf
from ranktable.sources.transcript import parse_transcript

_CONF = ".conf"
_CAPTURES = (".txt", ".log")


def find_host_files(folder: str | os.PathLike[str]) -> dict[str, list[Path]]:
    """Return the files of each host of the folder, by server id in the order of the ids.

    Raises ReadError for a folder that cannot be read, SourceError for one without any such file.
    """
    top = Path(folder)
    found: dict[str, list[Path]] = {}
    for path in _list(top):
        if path.is_dir():
            inner = [file for file in _list(path) if file.name == "hccn.conf" or file.suffix in _CAPTURES]
            if inner:
                found.setdefault(path.name, []).extend(inner)
        elif path.suffix in (_CONF, *_CAPTURES):
            found.setdefault(path.name.removesuffix(path.suffix), []).append(path)
    if not found:
        message = "no HOST.conf, HOST.txt, HOST.log or HOST/hccn.conf is in the folder"
        raise SourceError(str(top), None, message, "copy /etc/hccn.conf of each host to FOLDER/HOST.conf")
    return found


def read_host_answers(paths: Iterable[Path]) -> HostAnswers:
    """Return what the files of one host say together; raises ReadError, SourceError with both places."""
    return join_answers(read_answers(path) for path in paths)


def read_answers(path: Path) -> HostAnswers:
    """Return what one file says: a copy of hccn.conf by its suffix `.conf`, captured answers otherwise."""
    parse = parse_hccn_conf if path.suffix == _CONF else parse_transcript
    return parse(read_bytes(str(path)), str(path))


def _list(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        remedy = "name a folder with one HOST.conf for each host"
        raise ReadError(str(folder), reason.lower(), remedy) from error
