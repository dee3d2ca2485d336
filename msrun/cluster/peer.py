"""Somebody who has connected to the scheduler: a host once it has proved so, a stranger until then."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msrun.cluster.connection import Connection
from msrun.cluster.hosts import HostRequest, Refused, other_protocol
from msrun.cluster.proof import PROTOCOL, NotProved, Seal, hello, new_nonce, read_hello
from msrun.cluster.restart import RestartPolicy
from msrun.planning.host_assignment import HostAssignment

if TYPE_CHECKING:  # loaded for jobs with --tls_config
    from msrun.cluster.tls.identity import TlsIdentity


REFUSED = b"refused "
"""Before the reason; sent in the clear."""
MAX_REPORT_BYTES = 1 << 20
"""Of a message from a host; the longest has the last lines of a log."""


@dataclass(frozen=True)
class MeetingTerms:
    """What the scheduler knows before anybody has come."""

    token: bytes
    job_id: str
    store_port: int
    cluster_time_out_s: float
    """Negative = for ever."""
    silence_s: float
    """How long a host may give no sign of life."""
    restarts: RestartPolicy
    tls: TlsIdentity | None = None
    """What all connections go through; None = as they are."""

    @property
    def beat_s(self) -> float:
        """How often each side gives a sign of life."""
        return min(self.silence_s / 5, 2.0)


@dataclass
class Peer:
    """One connection to the scheduler."""

    connection: Connection
    address: str
    host: str
    """Its address without the port."""
    nonce: str = field(default_factory=new_nonce)
    is_greeted: bool = False
    """Its first words have come; what it says now has to be proved."""
    knows_token: bool = False
    """It has proved that; it may be refused all the same."""
    request: HostRequest | None = None
    """None until it has registered."""
    assignment: HostAssignment | None = None
    """None until all hosts have come."""
    since: float = field(default_factory=time.monotonic)

    def greet(self) -> None:
        """Say the first words."""
        self.connection.send_plain(hello(self.nonce))

    def hear_greeting(self, body: bytes, token: bytes) -> None:
        """Take its first words.

        Raises:
            Refused: they are no host's of this version.
        """
        said = read_hello(body)
        if said is None:
            raise Refused("no msrun host: it did not say hello")
        protocol, nonce = said
        if protocol != PROTOCOL:
            raise Refused(other_protocol(protocol))
        self.connection.agree(Seal(token, self.nonce, nonce, is_scheduler=True))
        self.is_greeted = True

    def read_request(self, body: bytes) -> HostRequest:
        """Return what it asks for, which proves that it knows the token.

        Raises:
            Refused: it is no host of this job.
        """
        try:
            message = self.connection.open(body)
        except NotProved:
            raise Refused("wrong token: give all hosts the same --token_file or MSRUN_TOKEN, or none") from None
        self.knows_token = True
        return HostRequest.from_json(message.get("request"))

    def accept(self, request: HostRequest, terms: MeetingTerms) -> None:
        """Take it for a host from now on."""
        self.request = request
        self.connection.trust(MAX_REPORT_BYTES)
        self.connection.send({"type": "accepted", "beat_s": terms.beat_s, "silence_s": terms.silence_s})

    def refuse(self, reason: str) -> None:
        """Send it away, and say why, as plainly as it has to be said to one who knows no token."""
        self.connection.send_plain(REFUSED + reason.encode("utf-8", "replace"))
