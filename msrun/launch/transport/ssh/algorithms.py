"""The lists of algorithms in ssh_config: Ciphers, MACs, KexAlgorithms and the like."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

KEYWORDS: Mapping[str, str] = {
    "ciphers": "Ciphers",
    "macs": "MACs",
    "kexalgorithms": "KexAlgorithms",
    "hostkeyalgorithms": "HostKeyAlgorithms",
    "pubkeyacceptedalgorithms": "PubkeyAcceptedAlgorithms",
    "casignaturealgorithms": "CASignatureAlgorithms",
}
OLD_NAMES: Mapping[str, str] = {"pubkeyacceptedkeytypes": "pubkeyacceptedalgorithms"}
AUTHORITY_SIGNATURES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)
"""By which a certificate may be signed: not with SHA-1."""
_SAME: Mapping[str, str] = {"curve25519-sha256": "curve25519-sha256@libssh.org"}
"""Two names of one algorithm; servers have both, paramiko the second."""


def choose_algorithms(given: str, usual: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    """Return what a list of ssh_config leaves, the likeliest first; empty when it leaves nothing.

    A list replaces the usual ones; after + it is appended to them, after ^ put before them, and after - taken away.

    Args:
        given: patterns, with commas between them.
        usual: what is offered without a list.
        known: all that could be offered.
    """
    sign = given[:1] if given[:1] in ("+", "-", "^") else ""
    patterns = [_SAME.get(word, word) for word in given.removeprefix(sign).split(",") if word]
    every = dict.fromkeys([*usual, *known])
    named = [name for pattern in patterns for name in every if fnmatch.fnmatchcase(name, pattern)]
    if sign == "-":
        return tuple(name for name in usual if name not in named)
    before, after = {"": ((), ()), "+": (usual, ()), "^": ((), usual)}[sign]
    return tuple(dict.fromkeys([*before, *named, *after]))
