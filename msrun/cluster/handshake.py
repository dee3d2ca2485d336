"""How a host that dials in and the scheduler come to know each other, before anything else is said.

    both          hello with a nonce, in the clear
    host          register {request}                sealed: it proves that it knows the token
    scheduler     accepted {silence_s}, sealed, or in the clear why the host is refused

After `accepted` the connection carries a stream of sealed bytes (`launch.transport.pipe.SealedPipe`).
"""

from __future__ import annotations

from collections.abc import Callable

from msrun.cluster.connection import Connection
from msrun.cluster.hosts import WRONG_KEY, HostRequest, NoKey, Refused, other_protocol
from msrun.cluster.messages import NotUnderstood
from msrun.cluster.proof import NotProved, Seal, hello, new_nonce, read_hello
from msrun.cluster.protocol import protocol
from msrun.planning.record_json import encode_record

REFUSED = b"refused "
"""Before the reason; sent in the clear."""
MAX_REASON = 1000


class Guest:
    """The scheduler's side: somebody who has connected, until it is a host of the job or is sent away."""

    def __init__(self, connection: Connection, token: bytes) -> None:
        """Say the first words."""
        self.connection = connection
        self._token = token
        self._nonce = new_nonce()
        self._is_greeted = False
        self.knows_token = False
        """It has proved that; it may be refused all the same."""
        connection.send_plain(hello(self._nonce))

    def take(self, body: bytes) -> HostRequest | None:
        """Take what it has said; its request, once that has come.

        Raises:
            Refused: it is no host of this job.
        """
        if not self._is_greeted:
            said = read_hello(body)
            if said is None:
                raise Refused("no msrun host: it did not say hello")
            spoken, nonce = said
            if spoken != protocol():
                raise Refused(other_protocol(spoken))
            self.connection.agree(Seal(self._token, self._nonce, nonce, is_scheduler=True))
            self._is_greeted = True
            return None
        try:
            message = self.connection.open(body)
        except NotProved:
            raise Refused(WRONG_KEY) from None
        self.knows_token = True
        return HostRequest.from_json(message.get("request"))

    def accept(self, silence_s: float) -> None:
        """Let it in. `silence_s`: how long either side may give no sign of life."""
        self.connection.trust()
        self.connection.send({"type": "accepted", "silence_s": silence_s})

    def refuse(self, reason: str) -> None:
        """Send it away, and say why, as plainly as it has to be said to one who knows no token."""
        self.connection.send_plain(REFUSED + reason.encode("utf-8", "replace"))
        self.connection.close()


class Caller:
    """The host's side of one connection."""

    def __init__(self, connection: Connection, token: bytes, place: str, request: Callable[[], HostRequest]) -> None:
        """Say the first words.

        Args:
            place: the scheduler's address and port, for errors.
            request: what this host asks for, once the scheduler has said hello.
        """
        self.connection = connection
        self._token, self.place, self._request = token, place, request
        self.nonce = new_nonce()
        self._is_greeted = False
        connection.send_plain(hello(self.nonce))

    def take(self, body: bytes) -> float | None:
        """Take what the scheduler has said; how long it may be silent, once it has let this host in.

        Raises:
            Refused: this host is not let in, or what answers is no scheduler.
        """
        if body.startswith(REFUSED):
            reason = body.removeprefix(REFUSED).decode("utf-8", "replace")
            kind = NoKey if reason == WRONG_KEY else Refused
            raise kind(f"the scheduler has refused this host: {_plain(reason)}")
        try:
            if self._is_greeted:
                silence_s = float(self.connection.open(body)["silence_s"])
                self.connection.trust()
                return silence_s
            said = read_hello(body)
            if said is None:
                raise ValueError("it does not say hello")
        except NotProved:
            raise NoKey("the scheduler does not know this job's token: is it another job's?") from None
        except (ValueError, TypeError, KeyError) as error:
            raise Refused(f"what answers at {self.place} is no msrun scheduler: {error}") from None
        spoken, nonce = said
        if spoken != protocol():
            raise Refused(
                f"the scheduler's msrun speaks protocol {spoken}, this one {protocol()}: install the same version on "
                "all hosts"
            )
        self._is_greeted = True
        self.connection.agree(Seal(self._token, nonce, self.nonce, is_scheduler=False))
        self.connection.send({"type": "register", "request": encode_record(self._request())})
        return None

    def receive(self) -> list[bytes]:
        """Return what has come.

        Raises:
            Refused: the two sides cannot speak with each other.
        """
        try:
            return self.connection.receive()
        except NotUnderstood as error:
            raise Refused(f"no connection with the scheduler at {self.place}: {error}") from None
        except ValueError as error:
            raise Refused(f"what answers at {self.place} is no msrun scheduler: {error}") from None


def _plain(value: str) -> str:
    """Return what somebody unknown has sent as text that cannot do anything to a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in value[:MAX_REASON])
