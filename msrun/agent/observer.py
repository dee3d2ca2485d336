"""Who is told of every moment of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msrun.cluster.membership import Membership


class Observer(Protocol):
    """Told of every moment of the job."""

    tick_s: float | None
    """Ask for `tick` this often while the job runs; None = never."""

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Something happened: preparing, ready, scheduler, started, running, exited, signal, hang, stopping,
        restarting, over."""

    def tick(self, membership: Membership) -> None:
        """Regular moment, if asked for."""


class Observers:
    """All observers of one job."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    @property
    def tick_s(self) -> float | None:
        """The shortest interval that any of them asks for."""
        return min((o.tick_s for o in self._observers if o.tick_s is not None), default=None)

    def tell(self, kind: str, **fields: Any) -> None:
        """Tell everybody."""
        for observer in self._observers:
            observer.note(kind, fields)

    def tick(self, membership: Membership) -> None:
        """Give those their regular moment who asked for one."""
        for observer in self._observers:
            if observer.tick_s is not None:
                observer.tick(membership)
