"""What launcher and agents say to each other: a form for each message, and a version that follows from all of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, Union

import msgspec

from msrun.cluster.failure import FailureReport, JobFailure
from msrun.cluster.host_report import HostReport, ReachResult
from msrun.cluster.messages import Message
from msrun.planning.plan import HostPlan
from msrun.planning.record import Record
from msrun.planning.spec import LaunchSpec

MAX_ITEMS = 1 << 16
MAX_NUMBER = 1 << 40
Number = Annotated[int, msgspec.Meta(gt=-MAX_NUMBER, lt=MAX_NUMBER)]
Seconds = Annotated[float, msgspec.Meta(gt=-float(MAX_NUMBER), lt=float(MAX_NUMBER))]
Numbers = Annotated[list[Number], msgspec.Meta(max_length=MAX_ITEMS)]
Texts = Annotated[list[str], msgspec.Meta(max_length=MAX_ITEMS)]
State = Literal["planned", "running", "done", "failed", "stopped by msrun"]


class HostJob(Record):
    """What a launcher asks of one host."""

    protocol: int
    job_id: str
    number: int  # of this agent among all of the job
    spec: LaunchSpec  # what is asked of this host, as far as it is known; its log_dir is the launcher's
    environment: Mapping[str, str]  # what workers get beside this host's own
    silence_s: float  # how long launcher and agent may hear nothing of each other
    will_run: bool  # not only look at the host; what takes long may be begun before all hosts have been looked at
    can_resume: bool  # whether a broken connection may be replaced
    shown: Mapping[str, str] = field(default_factory=dict)
    """From `shown_word`: what a host sees that shares the launcher's log directory."""
    master_name: str = ""  # what --master_addr says, for the host that has to know it
    is_launchers_host: bool = False  # `environment` is all that workers get, and no look is needed


class HostPart(Record):
    """One host's part of one start of a job, once all hosts are known."""

    job_id: str
    node_rank: int
    spec: LaunchSpec | None  # what is asked of this host; None where msrun was typed there, which knows that
    master_addr: str
    master_port: int
    use_shared: bool  # the host sees the launcher's log directory
    hosts: str  # all of them, from `pack_hosts`; empty where there is one
    rank_table: str  # text of the table that was given, from `pack_text`
    first_attempt: int
    max_restarts: int
    folder: int  # number of the log directory of a host where msrun was typed


_Fields = Mapping[str, Any]  # field -> its type, or that with its default
SAID: Mapping[str, _Fields] = {  # what an agent says: type -> its fields. What else is in a message is left out
    "checked": {"report": HostReport},
    "listening": {"port": Number, "error": (str, "")},
    "reached": {"result": ReachResult},
    "planned": {"host": HostPlan, "notes": Texts, "target": str, "logs": Texts},
    "event": {"moment": str, "fields": dict[str, Any]},
    "failed": {"attempt": Number, "report": FailureReport},
    "ended": {
        "attempt": Number,
        "can_continue": bool,
        "come": Numbers,
        "has_begun": bool,
        "report": FailureReport | None,
    },
    "done": {"attempt": Number, "rank": Number, "has_come": bool},
    "ready": {"attempt": Number, "clock_s": Seconds},
    "log": {"name": str, "attempt": Number | None, "data": str},
    "logs_end": {},  # all of them have been sent
    "result": {"failure": JobFailure | None, "survivors": Numbers},
    "error": {"text": str, "exit_code": Number, "traceback": (str, "")},
    "fault": {"text": str, "traceback": str},
    "beat": {"seen": Number},
    "attached": {"seen": Number},
}
TOLD: Mapping[str, _Fields] = {  # what it is told, beside signals
    "job": {"job": HostJob},
    "listen": {"address": str, "port": Number},
    "reach": {"address": str, "port": Number},
    "plan": {"part": HostPart},
    "run": {"part": HostPart},
    "stop": {"attempt": Number, "report": FailureReport, "goes_on": bool},
    "absent": {"attempt": Number, "ranks": Numbers},
    "restart": {"attempt": Number, "delay_s": Seconds, "reason": str, "ranks": Numbers},
    "start": {"attempt": Number},
    "over": {"report": FailureReport | None, "goes_on": bool},
    "waiting": {"text": str},
    "called_off": {"reason": str, "exit_code": Number},
}
MOMENTS: Mapping[str, Mapping[str, Any]] = {  # moment -> its fields, as `agent.supervisor` tells them
    "preparing": {"preload": Texts},
    "ready": {"start_method": str, "reason": str, "prepare_s": Seconds},
    "scheduler": {"pid": Number},
    "server": {"index": Number, "pid": Number},
    "started": {"global_rank": Number, "pid": Number},
    "running": {"world_size": Number},
    "exited": {"global_rank": Number, "how": str, "status": Number, "state": State},
    "signal": {"name": str, "global_ranks": Numbers},
    "hang": {"reason": str, "lagging": Numbers},
    "note": {"text": str},
    "lingering": {"global_rank": Number, "what": str},
    "waiting": {"text": str},
    "stopping": {"reason": str},
    "restarting": {"attempt": Number, "delay_s": Seconds, "reason": str, "global_ranks": Numbers},
    "over": {"reason": str},
}


def _forms(fields_of: Mapping[str, _Fields]) -> dict[str, type[msgspec.Struct]]:
    return {
        kind: msgspec.defstruct(
            kind,
            [(name, *form) if isinstance(form, tuple) else (name, form) for name, form in fields.items()],
            tag_field="type",
            tag=kind,
        )
        for kind, fields in fields_of.items()
    }


@functools.cache
def _agent_says() -> Any:
    """Return the type of all of `SAID`; a job on one host needs it not."""
    return Union[tuple(_forms(SAID).values())]  # noqa: UP007 - of a table


def check_said(message: Message) -> None:
    """Look at a message of an agent. Raises ValueError: no msrun of this version says this; names the field."""
    msgspec.convert(message, _agent_says(), str_keys=True, dec_hook=lambda hint, item: hint(item))


def read_moment(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a moment that a host has told of (ValueError: one is missing, or of another type)."""
    found = {}
    for name, form in MOMENTS[kind].items():
        try:
            found[name] = msgspec.convert(value.get(name), form)
        except msgspec.ValidationError as error:
            raise ValueError(f"{kind}: {name}: {error}") from None
    return found


@functools.cache
def protocol() -> int:
    """Return the version of what hosts, launcher and coordinator say: it changes with any form."""
    import hashlib  # loads OpenSSL

    tables = [[*_forms(fields).values()] for fields in (SAID, TOLD, MOMENTS)]
    forms = [msgspec.json.schema_components(forms, schema_hook=lambda _: {"type": "string"}) for forms in tables]
    text = json.dumps(forms)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:3])
