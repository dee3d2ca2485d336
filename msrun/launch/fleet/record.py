"""What hosts tell: whether it has the form that is relied on, and what happens on all of them as one job's moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msrun.agent.observer import Observers
from msrun.cluster.failure import read_failure, read_report
from msrun.cluster.membership import Membership, WorkerState
from msrun.cluster.messages import Message
from msrun.launch.preflight.host_report import HostReport
from msrun.planning.plan import HostPlan
from msrun.planning.record_json import decode_record

MAX_TEXT = 4096
MAX_ITEMS = 1 << 16
MAX_NUMBER = 1 << 40


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} is no text")
    return value[:MAX_TEXT]


def _number(value: object) -> int:
    if type(value) is not int or not -MAX_NUMBER < value < MAX_NUMBER:
        raise ValueError(f"a {type(value).__name__} is no number, or it is too large")
    return value


def read_seconds(value: object) -> float:
    """Return a finite number of seconds.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
        raise ValueError(f"a {type(value).__name__} is no number of seconds")
    return float(value)


def read_list(value: object) -> list[Any]:
    """Return a list that is not too long.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise ValueError(f"a {type(value).__name__} is no list, or it is too long")
    return value


def _state(value: object) -> str:
    return WorkerState(value).value


def _list_of(read: Callable[[object], Any]) -> Callable[[object], Any]:
    def read_all(value: object) -> list[Any]:
        return [read(item) for item in read_list(value)]

    return read_all


def _bytes_by_rank(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > MAX_ITEMS:
        raise ValueError(f"a {type(value).__name__} is no object, or it is too long")
    return {str(_number(int(rank))): _number(count) for rank, count in value.items()}


FIELDS: Mapping[str, Mapping[str, Callable[[object], Any]]] = {
    "preparing": {"preload": _list_of(_text)},
    "ready": {"start_method": _text, "reason": _text, "prepare_s": read_seconds},
    "scheduler": {"pid": _number},
    "server": {"index": _number, "pid": _number},
    "started": {"global_rank": _number, "pid": _number},
    "running": {"world_size": _number},
    "exited": {"global_rank": _number, "how": _text, "status": _number, "state": _state},
    "signal": {"name": _text, "global_ranks": _list_of(_number)},
    "hang": {"reason": _text, "lagging": _list_of(_number)},
    "log_lost": {"reason": _text, "lost_bytes": _bytes_by_rank},
    "note": {"text": _text},
    "lingering": {"global_rank": _number, "what": _text},
    "waiting": {"text": _text},
    "stopping": {"reason": _text},
    "restarting": {"attempt": _number, "delay_s": read_seconds, "reason": _text, "global_ranks": _list_of(_number)},
    "over": {"reason": _text},
}
"""Moment -> its fields, as `agent.supervisor` tells them, each with what reads it."""


def read_moment(kind: str, value: object) -> dict[str, Any]:
    """Return the fields of a moment that a host has told of; those that do not belong to it are left out.

    Raises:
        ValueError: one is missing, or is of another type. KeyError for a moment that there is not.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"the fields of {kind} are a JSON {type(value).__name__}")
    found = {}
    for name, read in FIELDS[kind].items():
        try:
            found[name] = read(value.get(name))
        except ValueError as error:
            raise ValueError(f"{kind}: {name}: {error}") from None
    return found


class NotUnderstood(ValueError):
    """A handler's word for what is of the right form, and still not for this host to say."""


def is_understood(message: Message) -> bool:
    """Return whether a message that an agent may send has the form of its kind; what the launcher posts itself has."""
    try:
        _FORMS.get(message["type"], _any)(message)
    except Exception:  # noqa: BLE001 - whatever reading it meets
        return False
    return True


def _any(_message: Message) -> None:
    """Of messages that the launcher's own side makes, and that handlers take as they are."""


def _planned(message: Message) -> None:
    decode_record(HostPlan, message["host"])
    read_list(message["notes"]), message["target"], read_list(message["logs"])


def _event(message: Message) -> None:
    kind, fields = message["moment"], message["fields"]
    if str(kind) in FIELDS:
        read_moment(str(kind), fields)


def _result(message: Message) -> None:
    if message["failure"] is not None:
        read_failure(message["failure"])
    read_list(message["survivors"])


_FORMS: Mapping[str, Callable[[Message], Any]] = {
    "checked": lambda message: HostReport.from_json(message.get("report")),
    "planned": _planned,
    "event": _event,
    "failed": lambda message: read_report(message.get("report")),
    "ready": lambda message: read_seconds(message["clock_s"]),
    "result": _result,
    "error": lambda message: (message["text"], message["exit_code"]),
}


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

    def note(self, node_rank: int, kind: str, value: object) -> None:
        """Take a moment of one host; one of a kind that is not known is left out.

        Raises:
            ValueError: a host that speaks as it should does not say this.
        """
        if node_rank not in self._ranks or kind not in FIELDS:
            return
        fields = read_moment(kind, value)
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
