"""What happens on all hosts as one job's moments: who runs, who has ended, which attempt it is.

Each host tells its own story; here they become the events of one job. A host that is a restart ahead waits until all
are: the events of an attempt are never mixed with those of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from msrun.agent.observer import Observers
from msrun.cluster.membership import Membership, WorkerState
from msrun.launch.fleet.moments import FIELDS, read_moment

_OF_WORKERS = frozenset({"started", "exited"})
_ONCE = frozenset({"stopping", "hang", "waiting"})
"""Told by every host; the first one is the job's."""
_AS_THEY_ARE = frozenset({"server", "signal", "log_lost", "note", "lingering"})
MAX_AHEAD = 1000
"""So many moments, and a few for each of its workers, a host may tell before the others have told of a restart."""
MOMENTS_OF_A_WORKER = 8


class FleetRecord:
    """The job as its hosts tell it. Owned by the launcher's loop."""

    def __init__(self, ranks: Mapping[int, tuple[int, ...]], observers: Observers) -> None:
        """`ranks`: node_rank -> global ranks there."""
        self._ranks = ranks
        self._observers = observers
        self._ahead: dict[int, deque[tuple[str, dict[str, Any]]]] = {}
        """Hosts that have told of a restart of which others have not -> what they have told since."""
        self._told: set[str] = set()
        self._restart: dict[str, Any] = {}
        self._guilty: list[int] = []
        """Ranks because of which the attempt is over."""
        self.membership = self._new_membership()
        self.restarts = 0
        """How often all hosts have begun anew."""

    def _new_membership(self) -> Membership:
        return Membership(rank for ranks in self._ranks.values() for rank in ranks)

    def note(self, node_rank: int, kind: str, value: object) -> None:
        """Take a moment of one host; one of a kind that is not known is left out.

        Raises:
            ValueError: a host that speaks as it should does not say this.
        """
        if node_rank not in self._ranks or kind not in FIELDS:
            return
        fields = read_moment(kind, value)
        if node_rank in self._ahead:
            ahead = self._ahead[node_rank]
            if len(ahead) > MAX_AHEAD + MOMENTS_OF_A_WORKER * len(self._ranks[node_rank]):
                raise ValueError(f"{len(ahead)} moments of an attempt that has not begun")
            ahead.append((kind, fields))
        elif kind == "restarting":
            self._ahead[node_rank] = deque()
            own = [rank for rank in fields["global_ranks"] if rank in self._ranks[node_rank]]
            self._guilty += own
            self._restart = {**fields, "global_ranks": self._guilty}
            self._begin_again()
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
        self._ahead.pop(node_rank, None)
        self._begin_again()

    def _note_worker(self, kind: str, fields: Mapping[str, Any]) -> None:
        rank, membership = fields["global_rank"], self.membership
        if kind == "started":
            membership.started(rank, fields["pid"], 0.0)
            return
        member = membership.members[rank]
        member.state = WorkerState(fields["state"])
        member.wait_status = fields["status"]

    def _note_running(self, kind: str) -> None:
        if kind == "started" and "running" not in self._told and not self.membership.count(WorkerState.PLANNED):
            self._told.add("running")
            self._observers.tell("running", world_size=len(self.membership.members))

    def _begin_again(self) -> None:
        if not self._ahead or self._ahead.keys() != self._ranks.keys():
            return
        self.restarts += 1
        self._told.clear()
        self.membership = self._new_membership()
        self._observers.tell("restarting", **self._restart)
        self._guilty = []
        waiting, self._ahead = self._ahead, {}
        for node_rank, moments in waiting.items():
            for kind, fields in moments:
                self.note(node_rank, kind, fields)
