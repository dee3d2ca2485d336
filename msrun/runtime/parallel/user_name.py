"""Names of parameters and modules as the user knows them."""

from __future__ import annotations


def user_name(name: str) -> str:
    """Take off what our own wrappers (WithLoss, MicroBatchInterleaved) put before a name."""
    while name.startswith("network."):
        name = name.removeprefix("network.")
    return name
