"""Changes to messages, bytes and texts, each decided by a random generator alone, so that a seed repeats them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

MAX_CHANGES = 4


def nested(depth: int) -> Any:
    """Return so many lists in each other."""
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


ODD: Sequence[Any] = (
    None, True, False, 0, -1, 1, 255, 256, 1 << 31, 1 << 63, -(1 << 63), 10**30, 0.5, 1e308, float("inf"), float("nan"),
    "", "\0", "\x1b]52;c;aGk=\x07", "\n", "\ud800", "☃" * 9, "../../x.log", "x" * 5000, "-1", "%s%n", "NaN",
    "worker_0.log", [], {}, [[]], [{}], {"": ""}, {"__class__": 1}, {"type": []}, [1] * 300, nested(30),
)  # fmt: skip
"""What a field may hold that nobody thought of."""
BYTES = (b"\0", b"\xff", b"\n", b"[", b"{", b'"', b"\\u", b"\x16\x03\x01", b"9" * 400, b"[" * 1000, b'{"a":' * 300)


def change_value(rng: Random, value: Any) -> Any:
    """Return a JSON value with a few nodes of it changed, added or taken away."""
    changed = [copy.deepcopy(value)]
    for _ in range(rng.randint(1, MAX_CHANGES)):
        holder, key = _pick(rng, changed)
        kind = rng.random()
        if kind < 0.6:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        elif kind < 0.75 and holder is not changed:
            del holder[key]
        elif kind < 0.9 and isinstance(holder, dict):
            name = rng.choice(["type", "seq", "node", "kind", "self", "x" * 99, "", str(key)[::-1]])
            holder[name] = copy.deepcopy(rng.choice(ODD))
        elif isinstance(holder[key], int):
            holder[key] += rng.choice([-1, 1, 1 << 16, 1 << 40])
    return changed[0]


def _pick(rng: Random, root: list[Any]) -> tuple[Any, Any]:
    """Return a node as what holds it and where."""
    holder, key = root, 0
    while True:
        value = holder[key]
        keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
        if not keys or rng.random() < 0.25:
            return holder, key
        holder, key = value, rng.choice(keys)


def encode_any(rng: Random, value: Any) -> bytes:
    """Return JSON, now and then damaged, as deep as Python writes it."""
    data = json.dumps(value).encode("utf-8", "surrogatepass")
    return change_bytes(rng, data) if rng.random() < 0.2 else data


def change_bytes(rng: Random, data: bytes) -> bytes:
    """Return bytes of which some are changed, doubled, cut off or put in."""
    found = bytearray(data)
    for _ in range(rng.randint(1, MAX_CHANGES)):
        at = rng.randint(0, len(found))
        kind = rng.randrange(5)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[at:at] = rng.choice(BYTES)
        elif kind == 2:
            del found[at : at + rng.randint(1, 40)]
        elif kind == 3:
            found[at:at] = rng.randbytes(rng.randint(1, 16))
        else:
            found[at:at] = found[at : at + rng.randint(1, 60)]
    return bytes(found)
