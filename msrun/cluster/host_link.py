"""A host's end of its connection to the scheduler: registers, gives signs of life, and passes on what it hears.

A thread, so that a launcher whose terminal is held up is not taken for dead. What it hears lands in the launcher's
inbox: the scheduler's messages as they are (see `cluster.coordinator_server`), and of its own
    waiting {text}      what it waits for, every few seconds
    registered {tls}    the scheduler has let it in; `tls`: through what, e.g. TLSv1.3, or empty
    refused {reason}    it cannot take part
    absent {reason}     nobody was there in time
    lost {reason}       the scheduler has gone
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msrun.cluster.connection import Connection
from msrun.cluster.coordinator_server import REFUSED
from msrun.cluster.hosts import HostRequest
from msrun.cluster.messages import Message, NotUnderstood
from msrun.cluster.own_thread import Inbox, OwnThread, describe_fault, print_fault
from msrun.cluster.proof import PROTOCOL, NotProved, Seal, hello, new_nonce, read_hello
from msrun.planning.record_json import encode_record

if TYPE_CHECKING:  # loaded for jobs with --tls_config
    from msrun.cluster.tls.identity import TlsIdentity

CONNECT_S = 3.0
RETRY_S = 0.5
FIRST_LINE_S = 2.0
LINE_S = 5.0
GREETING_S = 15.0
"""How long the scheduler may take to answer."""
CLOSE_S = 2.0
MAX_REASON = 1000


class HostLink(OwnThread):
    """Serves one job. `close` it when the launcher is done."""

    def __init__(
        self,
        place: tuple[str, int],
        token: bytes,
        request: Callable[[str], HostRequest],
        inbox: Inbox,
        *,
        limit_s: float,
        tls: TlsIdentity | None = None,
        on_fault: Callable[[BaseException], None] = print_fault,
    ) -> None:
        """
        Args:
            place: numeric address and port of the scheduler.
            request: what to say, from this host's address towards the scheduler.
            limit_s: how long the scheduler may be absent; negative = for ever.
            tls: what the connection goes through; None = as it is.
            on_fault: told what the thread raises, for the record; the job is told that it is lost.
        """
        super().__init__("msrun-host-link", self._serve_job, self._tell_fault)
        self._record_fault = on_fault
        self._place = place
        self._token = token
        self._request = request
        self._inbox = inbox
        self._limit_s = limit_s
        self._tls = tls
        self._outbox = Inbox()
        self._nonce = ""
        """Of this connection; another has another."""
        self._is_greeted = False
        """The scheduler's first words have come."""
        self._is_registered = False
        self._is_over = False
        """Nothing more will come, and nobody has to be told so."""
        self._beat_s = self._silence_s = GREETING_S

    def send(self, message: Message) -> None:
        """Send the scheduler a message, as soon as that can be done."""
        self._outbox.post(message)

    def close(self) -> None:
        """Send what is waiting and end the thread."""
        self._outbox.post({"type": "close"})
        self.join(CLOSE_S + CONNECT_S)
        self._outbox.close()

    def _tell_fault(self, error: BaseException) -> None:
        self._record_fault(error)
        self._finish("lost", describe_fault(error))

    def _serve_job(self) -> None:
        """Connect, register and serve until the job is over, the scheduler is gone or `close` is called."""
        begin = time.monotonic()
        next_line = begin + FIRST_LINE_S
        while not self._is_over:
            why = self._connect()
            if self._is_over or self._is_told_to_close():
                return
            now = time.monotonic()
            what = f"no scheduler at {self._place[0]}:{self._place[1]} ({why})"
            if 0 <= self._limit_s <= now - begin:
                self._finish("absent", what)
                return
            if now >= next_line:
                next_line = now + LINE_S
                self._inbox.post({"type": "waiting", "text": what})
            time.sleep(RETRY_S)

    def _is_told_to_close(self) -> bool:
        """Before there is a connection only the wish to end can be waiting."""
        return bool(self._outbox.take())

    def _connect(self) -> str:
        """Return why there was no connection, or none that got as far as an answer."""
        try:
            stream = socket.create_connection(self._place, timeout=CONNECT_S)
        except OSError as error:
            return error.strerror or str(error) or type(error).__name__
        connection = Connection(stream, tls=self._tls.open_session() if self._tls else None)
        self._nonce, self._is_greeted = new_nonce(), False
        try:
            connection.send_plain(hello(self._nonce))
            self._serve(connection, stream.getsockname()[0].partition("%")[0])
        finally:
            connection.close()
        return "it closed the connection"

    def _serve(self, connection: Connection, own_address: str) -> None:
        next_beat = time.monotonic() + self._beat_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._outbox, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while not self._is_over and not connection.is_closed:
                selector.select(max(0.0, min(next_beat, connection.heard_at + self._silence_s) - time.monotonic()))
                self._receive(connection, own_address)
                for message in self._outbox.take():
                    self._is_over |= message["type"] == "close"
                    if self._is_registered and message["type"] != "close":
                        connection.send(message)
                now = time.monotonic()
                next_beat = min(next_beat, now + self._beat_s)  # it is known only once the scheduler has answered
                if now >= next_beat:
                    next_beat = now + self._beat_s
                    if self._is_registered:
                        connection.send({"type": "beat"})
                silent_s = now - connection.heard_at
                if silent_s > self._silence_s and not self._is_over:
                    self._lose(f"has given no sign of life for {silent_s:.0f} s: its host or the network is down")
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
                selector.modify(connection, wanted)
                connection.flush()
        self._send_rest(connection)
        if connection.is_closed and self._is_registered and not self._is_over:
            self._lose("has closed its connection: msrun was killed there, or the host went down")

    def _send_rest(self, connection: Connection) -> None:
        end = time.monotonic() + CLOSE_S
        while connection.has_unsent and time.monotonic() < end:
            with selectors.DefaultSelector() as selector:
                selector.register(connection, selectors.EVENT_WRITE)
                selector.select(end - time.monotonic())
            connection.flush()

    def _receive(self, connection: Connection, own_address: str) -> None:
        where = f"{self._place[0]}:{self._place[1]}"
        try:
            for body in connection.receive():
                if self._is_over:
                    return
                self._take(connection, own_address, body)
        except NotUnderstood as error:
            kind = "lost" if self._is_registered else "refused"
            self._finish(kind, f"no connection with the scheduler at {where}: {error}")
        except (ValueError, TypeError, KeyError) as error:
            if self._is_registered:
                self._lose(f"has sent what cannot be read ({error}): something between the hosts changes it")
            else:
                self._finish("refused", f"what answers at {where} is no msrun scheduler: {error}")

    def _take(self, connection: Connection, own_address: str, body: bytes) -> None:
        if self._is_registered:
            self._hear(connection.open(body))
        elif body.startswith(REFUSED):
            reason = body.removeprefix(REFUSED).decode("utf-8", "replace")
            self._finish("refused", f"the scheduler has refused this host: {_plain(reason)}")
        elif self._is_greeted:
            self._begin(connection, body)
        else:
            self._greet(connection, own_address, body)

    def _hear(self, message: Message) -> None:
        if message["type"] == "beat":
            return
        if message["type"] in ("over", "called_off"):
            self._is_over = True
        self._inbox.post(message)

    def _greet(self, connection: Connection, own_address: str, body: bytes) -> None:
        said = read_hello(body)
        if said is None:
            raise ValueError("it does not say hello")
        protocol, nonce = said
        if protocol != PROTOCOL:
            remedy = "install the same version on all hosts"
            self._finish("refused", f"the scheduler's msrun speaks protocol {protocol}, this one {PROTOCOL}: {remedy}")
            return
        self._is_greeted = True
        connection.agree(Seal(self._token, nonce, self._nonce, is_scheduler=False))
        connection.send({"type": "register", "request": encode_record(self._request(own_address))})

    def _begin(self, connection: Connection, body: bytes) -> None:
        try:
            message = connection.open(body)
        except NotProved:
            self._finish("refused", "the scheduler does not know this job's token: is it another job's?")
            return
        connection.trust()
        self._beat_s, self._silence_s = float(message["beat_s"]), float(message["silence_s"])
        self._is_registered = True
        self._inbox.post({"type": "registered", "tls": connection.tls_version})

    def _lose(self, reason: str) -> None:
        where = f"the scheduler at {self._place[0]}:{self._place[1]}"
        if self._is_registered:
            self._finish("lost", f"lost {where}, which {reason}")
        else:
            self._finish("refused", f"{where} does not answer: is it another program?")

    def _finish(self, kind: str, reason: str) -> None:
        self._is_over = True
        self._inbox.post({"type": kind, "reason": reason})


def _plain(value: object) -> str:
    """Return what somebody unknown has sent as text that cannot do anything to a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value)[:MAX_REASON])
