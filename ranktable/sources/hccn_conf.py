"""Reads /etc/hccn.conf: which device has which address. `address_N` lines in any order; ids may have gaps.

Source: the network configuration pages of the Ascend driver (`address_N`, `netmask_N`, `netdetect_N`, gateway and
`xsfp_reset` lines, as key=value), and the MindSpore tutorial that takes `device_ip` from it.

Reads a folder with what each host says about its devices: copies of hccn.conf and captured tool answers.

For the host HOST it holds `HOST.conf` (a copy of /etc/hccn.conf) or `HOST.txt` or `HOST.log` (captured answers, see
`ranktable.sources.transcript`), or a folder `HOST` with `hccn.conf` and any `*.txt` and `*.log`. What several files
say about one device must agree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ranktable.errors import ReadError, SourceError
from ranktable.reading.source import read_bytes
from ranktable.sources.answer import HostAnswers, Said, check_device_address, join_answers
from ranktable.sources.transcript import parse_transcript

_ADDRESS = re.compile(r"(?:ipv6)?address_([0-9]{1,4})", re.IGNORECASE)
_LINE = re.compile(r"([^=\s]+)\s*=\s*(.*)")


def parse_hccn_conf(data: bytes, source: str) -> HostAnswers:
    """Return the addresses in a copy of hccn.conf; an IPv6 address counts where a device has no other.

    Raises SourceError with the line for an address that is none, for a device with two, and for a file without any.
    """
    first: dict[int, Said] = {}
    second: dict[int, Said] = {}
    for number, text in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        line = text.partition("#")[0].strip()
        match = _LINE.fullmatch(line)
        if line and match is None:
            raise SourceError(source, number, f"{line[:60]!r} is not key=value", "give a copy of /etc/hccn.conf")
        key = _ADDRESS.fullmatch(match.group(1)) if match else None
        if match is None or key is None:
            continue
        said, device_id = Said(match.group(2).strip().partition("/")[0], source, number), int(key.group(1))
        is_ipv6 = check_device_address(said, device_id).version == 6
        _add(second if is_ipv6 else first, device_id, said)
    if not first and not second:
        raise SourceError(source, None, "it has no address_N line", "give a copy of /etc/hccn.conf, or of hccn_tool")
    left_out = sum(device_id in first for device_id in second)
    notes = (f"{source}: the IPv6 addresses of {left_out} devices are left out beside IPv4 ones",) if left_out else ()
    return HostAnswers({**second, **first}, notes=notes)


def _add(addresses: dict[int, Said], device_id: int, said: Said) -> None:
    earlier = addresses.setdefault(device_id, said)
    if earlier.value != said.value:
        message = f"device {device_id} has address {said.value} here and {earlier.value} at {earlier.origin}"
        raise said.refuse(message, "remove the stale line")


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
