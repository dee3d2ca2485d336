"""Early receives: where a receive may be started well before the value is needed, so that it travels meanwhile.

A message of gloo moves only when both ends have asked for it. torch's order asks right before the value is read: then
the reader waits for the whole way, and the sender's thread for a moment on a busy processor.
"""

from __future__ import annotations

from collections.abc import Sequence

from msrun.runtime.parallel.pipeline.schedule import Action

AHEAD = 4
"""Computing actions that a receive is moved before: two micro batches forward and back."""


def receive_early(actions: Sequence[Action], ahead: int = AHEAD) -> tuple[Action, ...]:
    """Return a rank's actions with every receive before the `ahead` computing actions that precede it.

    Receives stay in their order among themselves, and so do sends, but a receive may pass a send: only for a backend
    that carries both ways at once (gloo; NCCL runs all messages of two ranks one after the other).
    """
    order: list[Action] = []
    for action in actions:
        order.insert(_place(order, ahead) if action.kind.startswith("RECV") else len(order), action)
    return tuple(order)


def _place(order: Sequence[Action], ahead: int) -> int:
    """Return where a receive that would stand at the end may stand."""
    passed = 0
    for place in range(len(order), 0, -1):
        before = order[place - 1]
        if before.kind.startswith("RECV") or (before.computes and passed == ahead):
            return place
        passed += before.computes
    return 0
