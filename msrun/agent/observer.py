"""Who is told of every moment of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msrun.agent.own_faults import OwnFaults
from msrun.cluster.membership import Membership


class Observer(Protocol):
    """Told of every moment of the job. What it raises is written down, and is no reason to end the job."""

    tick_s: float | None
    """Ask for `tick` this often while the job runs; None = never."""

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Something happened; `launch.fleet.moments` has the kinds and their fields."""

    def tick(self, membership: Membership) -> None:
        """Regular moment, if asked for."""


class Observers:
    """All observers of one job: each hears of everything, whatever becomes of the others."""

    def __init__(self, observers: Sequence[Observer], faults: OwnFaults) -> None:
        self._observers = list(observers)
        self._faults = faults

    def add(self, observers: Sequence[Observer]) -> None:
        """Tell these too, of what happens from now on."""
        self._observers += observers

    @property
    def tick_s(self) -> float | None:
        """The shortest interval that any of them asks for."""
        return min((o.tick_s for o in self._observers if o.tick_s is not None), default=None)

    def tell(self, kind: str, **fields: Any) -> None:
        """Tell everybody."""
        for observer in self._observers:
            with self._faults.kept_from_job(_name(observer)):
                observer.note(kind, fields)

    def tick(self, membership: Membership) -> None:
        """Give those their regular moment who asked for one."""
        for observer in self._observers:
            if observer.tick_s is not None:
                with self._faults.kept_from_job(_name(observer)):
                    observer.tick(membership)


def _name(observer: Observer) -> str:
    return f"display ({type(observer).__name__})"
