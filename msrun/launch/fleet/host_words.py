"""Whether a message of an agent has the form that the launcher's handlers rely on: who is to blame where one fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msrun.cluster.failure import read_failure, read_report
from msrun.cluster.messages import Message
from msrun.launch.fleet.moments import FIELDS, read_list, read_moment, read_seconds
from msrun.launch.preflight.host_report import HostReport
from msrun.planning.plan import HostPlan
from msrun.planning.record_json import decode_record


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
