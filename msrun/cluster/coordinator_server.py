"""The coordinator over TCP, for hosts on each of which msrun is typed: registration, heartbeats, its messages.

A thread of the launcher whose host has the master address. It decides nothing itself: `hosts.Registry` says who may
take part, `coordinator.Coordinator` what becomes of the job. Its socket is bound to the master address alone, nothing
that a stranger sends is more than a refused greeting, and it waits for no host: a slow one holds up nobody. Whatever
goes wrong with one of them ends that connection alone.

First each side says hello with its nonce; a refusal is plain text. All else is messages, JSON with a length and a proof
in front (`cluster.proof`):
    scheduler -> host   accepted {beat_s, silence_s}
                        waiting {text}              called_off {reason, exit_code}
                        fleet {hosts}               assigned {job_id, store_port, node_rank}
                        beat {}                     and those of `coordinator`
    host -> scheduler   register {request}          beat {}, and those of `coordinator`
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msrun import contract
from msrun.cluster.connection import Connection
from msrun.cluster.coordinator import Coordinator
from msrun.cluster.hosts import HostRequest, Refused, Registry, other_protocol
from msrun.cluster.membership import RestartPolicy
from msrun.cluster.messages import Message, NotUnderstood, encode_body
from msrun.cluster.own_thread import Inbox, OwnThread, describe_fault, print_fault
from msrun.cluster.proof import PROTOCOL, NotProved, Seal, hello, new_nonce, read_hello
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.ranks import count_workers

if TYPE_CHECKING:
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


GREETING_S = 5.0
"""How long somebody who has connected may take to register."""
MAX_STRANGERS = 128
"""Connections of which nobody has registered yet, well under the usual limit of 1024 descriptors."""
MAX_STRANGERS_OF_ONE = 16
"""Of them, from one address. When one more comes, the oldest is closed: a host needs a moment only, and tries again."""
PRESSED_S = 1.0
"""How long each may take where others wait for room: so many hosts may come at a time that they are slow to speak."""
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
MAX_NOTED = 100
"""Addresses whose refusals are told; a flood of them must not fill a disk."""
MAX_NOTES_OF_ONE = 10
"""Refusals of one address that are told. Those who know the token count apart: no stranger takes a host's place."""
WAITING_LINE_S = 5.0
LEAVE_S = 5.0
"""How long hosts may take to close their connection when the job is over."""


class CoordinatorServer(OwnThread):
    """Serves one job. `close` it when the launcher is done."""

    def __init__(
        self,
        listener: socket.socket,
        registry: Registry,
        terms: MeetingTerms,
        note: Callable[[str], None],
        on_fault: Callable[[BaseException], None] = print_fault,
    ) -> None:
        """
        Args:
            note: told of what is worth a line in the record; called from this thread.
            on_fault: told what the thread raises, for the record; the hosts are told that the job ends.
        """
        super().__init__("msrun-coordinator", self._serve_all, self._tell_fault, goes_on=True)
        self._record_fault = on_fault
        listener.settimeout(0.0)
        self._listener = listener
        self._registry = registry
        self._terms = terms
        self._note = note
        self._notes: Counter[tuple[str, bool]] = Counter()
        """Refusals by address, and whether the token was known."""
        self._wake = Inbox()
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, Peer] = {}
        """By id of the peer, in the order of their coming."""
        self._strangers: dict[int, Peer] = {}
        """Those among them who have not registered."""
        self._coordinator: Coordinator | None = None
        self._begin = time.monotonic()
        self._next_beat = self._next_line = 0.0
        self._ends_at: float | None = None
        self._is_listening = True

    # -- loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the job is over and everybody has left, or `close` is called."""
        self._next_line = self._begin + WAITING_LINE_S
        try:
            with self._selector:
                self._selector.register(self._listener, selectors.EVENT_READ)
                self._selector.register(self._wake, selectors.EVENT_READ)
                super().run()
        finally:  # nobody must wait for one that has gone
            for peer in self._peers.values():
                peer.connection.close()
            self._listener.close()

    def _tell_fault(self, error: BaseException) -> None:
        self._record_fault(error)
        reason = f"the scheduler's host: {describe_fault(error)}"
        if self._coordinator is None:
            self._call_off(reason, contract.EXIT_CLUSTER)
        else:
            self._order(self._coordinator.fail(reason))

    def _serve_all(self) -> None:
        while not self._is_done():
            for key, _ in self._selector.select(self._time_left()):
                if key.fileobj is self._listener:
                    self._welcome()
                elif key.fileobj is self._wake:
                    for wish in self._wake.take():
                        self._leave(wish)
                else:
                    self._serve(key.data)
            self._look_at_clock()

    def close(self, reason: str = "", exit_code: int = 0) -> None:
        """Let the hosts leave, if the job is over, and end the thread.

        Args:
            reason: why a job that has not begun will not; told to the hosts that have come.
        """
        self._wake.post({"reason": reason, "exit_code": exit_code})
        self.join(LEAVE_S + 1.0)
        self._wake.close()

    def _leave(self, wish: Message) -> None:
        if self._coordinator is None and wish["reason"]:
            self._call_off(wish["reason"], wish["exit_code"])
        else:
            is_over = self._coordinator is not None and self._coordinator.is_over
            self._ends_at = time.monotonic() + (LEAVE_S if is_over else 0.0)

    def _is_done(self) -> bool:
        if self._ends_at is None:
            return False
        return time.monotonic() >= self._ends_at or not any(peer.request for peer in self._peers.values())

    def _time_left(self) -> float:
        moments = [self._next_beat]
        if self._coordinator is None:
            moments.append(self._next_line)
            if self._terms.cluster_time_out_s >= 0:
                moments.append(self._begin + self._terms.cluster_time_out_s)
        if self._ends_at is not None:
            moments.append(self._ends_at)
        return max(0.0, min(moments) - time.monotonic())

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._terms.beat_s
            self._beat(now)
            self._listen(is_wanted=True)
        if self._coordinator is not None or self._ends_at is not None:
            return
        if now >= self._next_line:
            self._next_line = now + WAITING_LINE_S
            self._tell_all({"type": "waiting", "text": self._registry.describe()})
        limit_s = self._terms.cluster_time_out_s
        if 0 <= limit_s <= now - self._begin:
            came = self._registry.describe_present()
            reason = f"--cluster_time_out {limit_s:g}: {self._registry.describe()}; came: {came}"
            self._call_off(reason, contract.EXIT_TIMEOUT)

    def _call_off(self, reason: str, exit_code: int) -> None:
        """End a job that has not begun."""
        self._tell_all({"type": "called_off", "reason": reason, "exit_code": exit_code})
        self._ends_at = time.monotonic() + LEAVE_S

    def _beat(self, now: float) -> None:
        beat = encode_body({"type": "beat"})
        for peer in list(self._peers.values()):
            silent_s = now - peer.connection.heard_at
            if peer.request is None and now - peer.since > GREETING_S:
                self._forget(peer)  # without a word: a host that was only slow tries again
                self._note_refusal(peer, f"nothing that makes it a host of this job within {GREETING_S:g} s")
            elif peer.request is not None and silent_s > self._terms.silence_s:
                self._part(peer, f"has given no sign of life for {silent_s:.0f} s: the host or the network is down")
            elif peer.request is not None:
                self._tell(peer, beat)

    # -- peers ---------------------------------------------------------------------------------------------------

    def _welcome(self) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers.values()))
            if time.monotonic() - oldest.since < PRESSED_S:
                self._listen(is_wanted=False)
                return
            self._forget(oldest)
        try:
            stream, address = self._listener.accept()
        except OSError as error:
            if error.errno in NO_ROOM:  # whoever waits has to wait for the next beat
                self._listen(is_wanted=False)
            return
        self._make_room(address[0])
        tls = self._terms.tls.open_session() if self._terms.tls else None
        peer = Peer(Connection(stream, tls), f"{address[0]}:{address[1]}", address[0])
        self._peers[id(peer)] = self._strangers[id(peer)] = peer
        self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        peer.greet()

    def _make_room(self, host: str) -> None:
        """Close the oldest of those of one address who hold a connection and say nothing, where they are too many."""
        same = [peer for peer in self._strangers.values() if peer.host == host]
        if len(same) >= MAX_STRANGERS_OF_ONE:
            self._forget(same[0])

    def _listen(self, *, is_wanted: bool) -> None:
        """Take connections, or leave those who come in the listener's queue."""
        if is_wanted and not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif not is_wanted and self._is_listening:
            self._selector.unregister(self._listener)
        self._is_listening = is_wanted

    def _settle(self, peer: Peer) -> None:
        """Somebody is no stranger any more, or has gone."""
        if self._strangers.pop(id(peer), None) is not None and len(self._strangers) < MAX_STRANGERS:
            self._listen(is_wanted=True)

    def _serve(self, peer: Peer) -> None:
        if id(peer) not in self._peers:  # parted from a moment ago
            return
        try:
            peer.connection.flush()
            for body in peer.connection.receive():
                if id(peer) not in self._peers:
                    return
                self._take(peer, body)
        except Exception as error:  # noqa: BLE001 - whatever it has sent, it must not end the job of the others
            self._misunderstand(peer, error)
            return
        if peer.connection.is_closed:
            self._part(peer, "has closed its connection: msrun was killed there, or the host went down")
        else:
            self._watch(peer)

    def _take(self, peer: Peer, body: bytes) -> None:
        if peer.request is not None:
            self._hear(peer, peer.connection.open(body))
        elif peer.is_greeted:
            self._register(peer, body)
        else:
            peer.hear_greeting(body, self._terms.token)

    def _misunderstand(self, peer: Peer, error: Exception) -> None:
        said = str(error) if isinstance(error, ValueError | Refused) else f"{type(error).__name__}: {error}"
        if peer.request is not None:  # its connection is of no use any more
            self._part(peer, f"has sent what cannot be read ({said}): something between the hosts changes it")
        else:
            self._refuse(peer, said if isinstance(error, NotUnderstood | Refused) else f"no msrun host: {said}")

    def _watch(self, peer: Peer) -> None:
        if id(peer) in self._peers:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.connection.has_unsent else 0)
            self._selector.modify(peer.connection, wanted, peer)

    def _register(self, peer: Peer, body: bytes) -> None:
        request = peer.read_request(body)
        self._registry.add(id(peer), request)
        self._settle(peer)
        peer.accept(request, self._terms)
        self._note(f"{request.describe()} registered with {count_workers(request.local_worker_num)}")
        if self._registry.is_complete:
            self._assign_all()

    def _refuse(self, peer: Peer, reason: str) -> None:
        """Send somebody away, and say so."""
        peer.refuse(reason)
        self._forget(peer)
        self._note_refusal(peer, reason)

    def _note_refusal(self, peer: Peer, reason: str) -> None:
        key = peer.host, peer.knows_token
        if key not in self._notes and sum(knows == peer.knows_token for _, knows in self._notes) >= MAX_NOTED:
            return
        self._notes[key] += 1
        if self._notes[key] <= MAX_NOTES_OF_ONE:
            self._note(f"refused {peer.address}: {reason}")
        if self._notes[key] == MAX_NOTES_OF_ONE:
            self._note(f"{peer.host} was refused {MAX_NOTES_OF_ONE} times; no more of it is told")

    def _part(self, peer: Peer, reason: str) -> None:
        """A connection has ended."""
        request, assignment = peer.request, peer.assignment
        self._forget(peer)
        if request is None or self._ends_at is not None:
            return
        if assignment is None or self._coordinator is None:
            self._registry.remove(id(peer))
            self._note(f"{request.describe()} {reason}; it may register again")
            return
        if not self._coordinator.is_over:
            self._note(f"{assignment.describe()} {reason}")
        self._order(self._coordinator.lost(assignment.node_rank, f"lost {assignment.describe()}, which {reason}"))

    def _forget(self, peer: Peer) -> None:
        if self._peers.pop(id(peer), None) is not None:
            self._settle(peer)
            self._selector.unregister(peer.connection)
            peer.connection.close()

    # -- the job --------------------------------------------------------------------------------------------------

    def _assign_all(self) -> None:
        assignments = self._registry.assignments()
        hosts = [
            assignment.to_json()
            for assignment in sorted(assignments.values(), key=lambda assignment: assignment.node_rank)
        ]
        ranks = {assignment.node_rank: assignment.ranks for assignment in assignments.values()}
        self._coordinator = Coordinator(self._terms.job_id, ranks, self._terms.restarts)
        common = {"type": "assigned", "job_id": self._terms.job_id, "store_port": self._terms.store_port}
        fleet = encode_body({"type": "fleet", "hosts": hosts})  # long, and the same for all
        for peer in list(self._peers.values()):
            if peer.request is not None:
                peer.assignment = assignments[id(peer)]
                self._tell(peer, fleet)
                self._tell(peer, encode_body({**common, "node_rank": peer.assignment.node_rank}))

    def _hear(self, peer: Peer, message: Message) -> None:
        if self._coordinator is not None and peer.assignment is not None:
            self._order(self._coordinator.hear(peer.assignment.node_rank, message))

    def _order(self, orders: list[Message]) -> None:
        for order in orders:
            self._tell_all(order)
            if order["type"] == "over":
                self._ends_at = time.monotonic() + LEAVE_S

    def _tell_all(self, message: Message) -> None:
        body = encode_body(message)
        for peer in list(self._peers.values()):
            if peer.request is not None:
                self._tell(peer, body)

    def _tell(self, peer: Peer, body: bytes) -> None:
        peer.connection.send_body(body)
        self._watch(peer)
