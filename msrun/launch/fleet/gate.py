"""The port at which hosts of a job come in, on each of which msrun is typed.

The loop of all hosts serves it, for as long as the job lasts. Nothing that a stranger sends is more than a refused
greeting, and whatever goes wrong with one of them ends that connection alone. Whoever proves that he knows the token is
passed on to the launcher, which decides whether he is a host of the job.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from msrun.cluster.connection import Connection, Guest
from msrun.cluster.hosts import HostRequest, Refused
from msrun.cluster.messages import NotUnderstood
from msrun.launch.transport.event_loop import EventLoop

if TYPE_CHECKING:  # loaded for jobs with --tls_config
    from msrun.cluster.tls import TlsIdentity

GREETING_S = 5.0
"""How long somebody who has connected may take to register."""
MAX_STRANGERS = 128
"""Connections of which nobody has registered yet, well under the usual limit of 1024 descriptors."""
MAX_STRANGERS_OF_ONE = 16
"""Of them, from one address. When one more comes, the oldest is closed: a host needs a moment only, and tries again."""
PRESSED_S = 1.0
"""How long each may take where others wait for room: so many hosts may come at a time that they are slow to speak."""
LOOK_S = 1.0
"""How often to look whose time is over, and whether there is room again."""
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
MAX_NOTED = 100
"""Addresses whose refusals are told; a flood of them must not fill a disk."""
MAX_NOTES_OF_ONE = 10
"""Refusals of one address that are told. Those who know the token count apart: no stranger takes a host's place."""


class Gate:
    """Of the loop's thread."""

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket,
        token: bytes,
        tls: TlsIdentity | None,
        knock: Callable[[Stranger, HostRequest], None],
        note: Callable[[str], None],
    ) -> None:
        """
        Args:
            listener: this object's from now on.
            knock: called with each who knows the token, and with what he asks for; has to `let in` or `refuse` him.
            note: told whom was refused, and why.
        """
        listener.settimeout(0.0)
        self._loop, self._listener = loop, listener
        self._token, self._tls = token, tls
        self.knock, self._note = knock, note
        self._strangers: dict[int, Stranger] = {}
        """By id, in the order of their coming."""
        self._notes: Counter[tuple[str, bool]] = Counter()
        """Refusals by address, and whether the token was known."""
        self._is_listening = self._is_closed = False

    def open(self) -> None:
        """Begin to let hosts in."""
        self._loop.call(self._look)

    def close(self) -> None:
        """Send away all who have not been let in, and give up the port."""
        self._loop.call(self._end)

    def _end(self) -> None:
        self._is_closed = True
        self._listen(is_wanted=False)
        for stranger in list(self._strangers.values()):
            self.forget(stranger)
        self._listener.close()

    def _look(self) -> None:
        if self._is_closed:
            return
        now = time.monotonic()
        for stranger in [one for one in self._strangers.values() if now - one.since > GREETING_S]:
            self.forget(stranger)  # without a word: a host that was only slow tries again
            self.note_refusal(stranger, f"nothing that makes it a host of this job within {GREETING_S:g} s")
        self._listen(is_wanted=True)
        self._loop.call_later(LOOK_S, self._look)

    def handle(self, _mask: int) -> None:
        """Take a connection."""
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers.values()))
            if time.monotonic() - oldest.since < PRESSED_S:
                self._listen(is_wanted=False)
                return
            self.forget(oldest)
        try:
            stream, address = self._listener.accept()
        except OSError as error:
            if error.errno in NO_ROOM:  # whoever waits has to wait for the next look
                self._listen(is_wanted=False)
            return
        same = [one for one in self._strangers.values() if one.host == address[0]]
        if len(same) >= MAX_STRANGERS_OF_ONE:
            self.forget(same[0])
        connection = Connection(stream, self._tls.open_session() if self._tls else None)
        stranger = Stranger(self, Guest(connection, self._token), address[0], address[1])
        self._strangers[id(stranger)] = stranger
        self._loop.selector.register(connection, selectors.EVENT_READ, stranger)

    def _listen(self, *, is_wanted: bool) -> None:
        """Take connections, or leave those who come in the listener's queue."""
        if is_wanted and not self._is_listening:
            self._loop.selector.register(self._listener, selectors.EVENT_READ, self)
        elif not is_wanted and self._is_listening:
            self._loop.selector.unregister(self._listener)
        self._is_listening = is_wanted

    def release(self, stranger: Stranger) -> bool:
        """Leave a connection to somebody else; False when it is over."""
        if self._strangers.pop(id(stranger), None) is None:
            return False
        self._loop.selector.unregister(stranger.guest.connection)
        if len(self._strangers) < MAX_STRANGERS and not self._is_closed:
            self._listen(is_wanted=True)
        return True

    def forget(self, stranger: Stranger) -> None:
        """Close a connection."""
        if self.release(stranger):
            stranger.guest.connection.close()

    def refuse(self, stranger: Stranger, reason: str) -> None:
        """Send somebody away who was passed on, and say so."""
        stranger.guest.refuse(reason)
        self.note_refusal(stranger, reason)

    def note_refusal(self, stranger: Stranger, reason: str) -> None:
        """Say whom was refused, as far as that is worth a line."""
        key = stranger.host, stranger.guest.knows_token
        if key not in self._notes and sum(knows == key[1] for _, knows in self._notes) >= MAX_NOTED:
            return
        self._notes[key] += 1
        if self._notes[key] <= MAX_NOTES_OF_ONE:
            self._note(f"refused {stranger.host}:{stranger.port}: {reason}")
        if self._notes[key] == MAX_NOTES_OF_ONE:
            self._note(f"{stranger.host} was refused {MAX_NOTES_OF_ONE} times; no more of it is told")


class Stranger:
    """Somebody who has connected and has not registered yet."""

    def __init__(self, gate: Gate, guest: Guest, host: str, port: int) -> None:
        """`host`: numeric address."""
        self._gate = gate
        self.guest, self.host, self.port = guest, host, port
        self.since = time.monotonic()

    def handle(self, _mask: int) -> None:
        """Take what has come."""
        connection = self.guest.connection
        try:
            connection.flush()
            request = None
            while request is None and (bodies := connection.receive()):
                request = self.guest.take(bodies[0])
        except Exception as error:  # noqa: BLE001 - whatever it has sent, it must not end the job of the others
            self._misunderstand(error)
            return
        if request is not None:
            if self._gate.release(self):
                self._gate.knock(self, request)
        elif connection.is_closed:
            self._gate.forget(self)

    def _misunderstand(self, error: Exception) -> None:
        said = str(error) if isinstance(error, ValueError | Refused) else f"{type(error).__name__}: {error}"
        reason = said if isinstance(error, NotUnderstood | Refused) else f"no msrun host: {said}"
        if self._gate.release(self):
            self.guest.refuse(reason)
            self._gate.note_refusal(self, reason)
