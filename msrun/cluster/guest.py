"""Somebody who has connected to the scheduler: a host once it has proved so, a stranger until then."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msrun.cluster.connection import Connection
from msrun.cluster.hosts import HostRequest, Refused
from msrun.cluster.messages import Message
from msrun.cluster.proof import PROTOCOL, host_proof, is_same_proof, new_nonce, scheduler_proof
from msrun.planning.host_seat import HostSeat

if TYPE_CHECKING:  # loaded for jobs with --tls_config
    from msrun.cluster.tls.identity import TlsIdentity


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
    max_restarts: int
    tls: TlsIdentity | None = None
    """What all connections go through; None = as they are."""

    @property
    def beat_s(self) -> float:
        """How often each side gives a sign of life."""
        return min(self.silence_s / 5, 2.0)


@dataclass
class Guest:
    """One connection to the scheduler."""

    connection: Connection
    address: str
    nonce: str = field(default_factory=new_nonce)
    request: HostRequest | None = None
    """None until it has registered."""
    seat: HostSeat | None = None
    """None until all hosts have come."""
    since: float = field(default_factory=time.monotonic)

    def greet(self) -> None:
        """Ask who it is."""
        self.connection.send({"type": "hello", "protocol": PROTOCOL, "nonce": self.nonce})

    def read_request(self, message: Message, token: bytes) -> HostRequest:
        """Return what it asks for, once it has proved that it knows the token.

        Raises:
            Refused: it is no host of this job.
        """
        nonce, said = message.get("nonce"), message.get("request")
        if message.get("type") != "register" or not isinstance(nonce, str) or not isinstance(said, dict):
            raise Refused("no msrun host: it did not register")
        if said.get("protocol") == PROTOCOL and not is_same_proof(
            host_proof(token, self.nonce, nonce, said), message.get("proof")
        ):
            raise Refused("wrong token: give all hosts the same --token_file or MSRUN_TOKEN, or none")
        return HostRequest.from_json(said)

    def accept(self, request: HostRequest, message: Message, terms: MeetingTerms) -> None:
        """Take it for a host from now on, and prove to it in turn who we are."""
        self.request = request
        self.connection.trust()
        proof = scheduler_proof(terms.token, self.nonce, message["nonce"])
        times = {"beat_s": terms.beat_s, "silence_s": terms.silence_s}
        self.connection.send({"type": "accepted", "proof": proof, **times})
