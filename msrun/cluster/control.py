"""The coordinator of a job as one of its hosts sees it, whatever carries what they say."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from msrun.cluster.messages import Message
from msrun.cluster.own_thread import Inbox
from msrun.planning.host_assignment import Fleet


@dataclass(frozen=True)
class Meeting:
    """What all hosts of a job of several have agreed on."""

    job_id: str
    fleet: Fleet
    store_port: int


@dataclass(frozen=True)
class Control:
    """How a host hears the coordinator and tells it, and what it knows of the other hosts."""

    orders: Inbox
    """What the coordinator says, see `cluster.coordinator`; `lost {reason}` when it has gone; `note {text}`."""
    send: Callable[[Message], None]
    """Tells the coordinator."""
    meeting: Meeting | None = None
    """None: the job has this host alone."""
    store_listener: socket.socket | None = None
    """Where the workers' store of several hosts will be served; None on all hosts but the first."""
