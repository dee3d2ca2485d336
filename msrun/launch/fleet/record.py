"""What happens on all hosts, as one job's moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msrun.agent.observer import Observers
from msrun.cluster.membership import Membership, WorkerState
from msrun.cluster.protocol import MOMENTS, read_moment


class NotUnderstood(ValueError):
    """A handler's word for what is of the right form, and still not for this host to say."""


_OF_WORKERS = frozenset({"started", "exited"})
_ONCE = frozenset({"stopping", "hang", "waiting"})
"""Told by every host; the first one is the job's."""
_AS_THEY_ARE = frozenset({"server", "signal", "log_lost", "note", "lingering"})


class FleetRecord:
    """The job as its hosts tell it. Owned by the launcher's loop."""

    def __init__(self, ranks: Mapping[int, tuple[int, ...]], observers: Observers) -> None:
        """`ranks`: node_rank -> global ranks there."""
        self._ranks = ranks
        self._observers = observers
        self._told: set[str] = set()
        self._restart: dict[str, Any] = {}
        self._unready: set[int] = set()
        """Hosts that have not told yet that they start again."""
        self.membership = self._new_membership()

    def _new_membership(self) -> Membership:
        return Membership(rank for ranks in self._ranks.values() for rank in ranks)

    def note(self, node_rank: int, kind: str, value: Mapping[str, Any]) -> None:
        """Take a moment of one host; one of a kind that is not known is left out.

        Raises:
            NotUnderstood: a host that speaks as it should does not say this.
        """
        if node_rank not in self._ranks or kind not in MOMENTS:
            return
        try:
            fields = read_moment(kind, value)
        except ValueError as error:
            raise NotUnderstood(str(error)) from None
        if kind == "restarting":
            self._unready.discard(node_rank)
            self._tell_restart()
        elif kind in _OF_WORKERS:
            if fields["global_rank"] in self._ranks[node_rank]:
                self._note_worker(kind, fields)
                self._observers.tell(kind, **fields)
                self._note_running(kind)
        elif kind in _ONCE:
            if kind not in self._told:
                self._told.add(kind)
                self._observers.tell(kind, **fields)
        elif kind in _AS_THEY_ARE:
            self._observers.tell(kind, **fields)
        elif kind != "running":
            self._observers.tell(f"host_{kind}", node_rank=node_rank, **fields)

    def lost(self, node_rank: int) -> None:
        """A host will tell no more; the others are not to wait for it."""
        self._ranks = {node: ranks for node, ranks in self._ranks.items() if node != node_rank}
        self._unready.discard(node_rank)
        self._tell_restart()

    def restart(self, attempt: int, delay_s: float, reason: str, global_ranks: Sequence[int]) -> None:
        """The coordinator starts the job again; observers hear of it when all hosts have put their logs away.

        Args:
            global_ranks: because of which the attempt before is over.
        """
        self._restart = {"attempt": attempt, "delay_s": delay_s, "reason": reason, "global_ranks": list(global_ranks)}
        self._unready = set(self._ranks)
        self._told.clear()
        self.membership = self._new_membership()

    def _tell_restart(self) -> None:
        if self._restart and not self._unready:
            self._observers.tell("restarting", **self._restart)
            self._restart = {}

    def _note_worker(self, kind: str, fields: Mapping[str, Any]) -> None:
        rank, membership = fields["global_rank"], self.membership
        if kind == "started":
            membership.started(rank, fields["pid"], 0.0)
        else:
            membership.ended(rank, WorkerState(fields["state"]), fields["status"])

    def _note_running(self, kind: str) -> None:
        if kind == "started" and "running" not in self._told and not self.membership.count(WorkerState.PLANNED):
            self._told.add("running")
            self._observers.tell("running", world_size=len(self.membership.members))
