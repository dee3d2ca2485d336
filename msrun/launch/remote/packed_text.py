"""Text that goes to every host of a job: deflated once, for all of them."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence

from msrun.planning.host_assignment import HostAssignment


def pack_text(text: str) -> str:
    """Return text as it goes to the hosts; empty text stays empty."""
    return base64.b64encode(zlib.compress(text.encode("utf-8", "surrogateescape"))).decode("ascii") if text else ""


def unpack_text(packed: str) -> str:
    """Inverse of `pack_text`."""
    return zlib.decompress(base64.b64decode(packed)).decode("utf-8", "surrogateescape") if packed else ""


def pack_hosts(hosts: Sequence[HostAssignment]) -> str:
    """Return the hosts of a job as they go to each of them."""
    return pack_text(json.dumps([host.to_json() for host in hosts], separators=(",", ":")) if hosts else "")


def unpack_hosts(packed: str) -> tuple[HostAssignment, ...]:
    """Inverse of `pack_hosts`."""
    text = unpack_text(packed)
    return tuple(HostAssignment.from_json(value) for value in json.loads(text)) if text else ()
