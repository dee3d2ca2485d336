"""Recognises compressed text that stands where a rank table is expected.

Volcano's configmap1980 plugin stores tables so when it is told to (--rank-table-compress), and sharded tables are
stored so too; a copy of the ConfigMap's value is then no JSON.
"""

from __future__ import annotations

import base64
import binascii
import re

_MAGICS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_BASE64 = re.compile(rb"[A-Za-z0-9+/]+={0,2}")
_PROBED_BYTES = 64


def name_compression(data: bytes) -> str | None:
    """Return how `data` is compressed ("gzip", "zstd in base64", ...), None when it does not look compressed.

    >>> name_compression(b"H4sIAAAAAAAAA6vmqgUAhrEhAQMAAAA=")
    'gzip in base64'
    >>> name_compression(b'{"version": "1.0"}') is None
    True
    """
    plain = _name_magic(data)
    if plain is not None:
        return plain
    head = data.lstrip()[:_PROBED_BYTES].split()[:1]
    if not head or not _BASE64.fullmatch(head[0]):
        return None
    whole = head[0][: len(head[0]) // 4 * 4]
    try:
        inner = _name_magic(base64.b64decode(whole, validate=True))
    except binascii.Error:
        return None
    return f"{inner} in base64" if inner else None


def _name_magic(data: bytes) -> str | None:
    return next((name for magic, name in _MAGICS.items() if data.startswith(magic)), None)
