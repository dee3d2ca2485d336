"""Bring the ranks of a world together where no launcher does, over torch's store: rank 0 keeps it, or the scheduler of
MindSpore's dynamic cluster by hand (MS_ROLE).

Who comes connects to the place that all know, says of which job it is, and is told where the store is: one byte of a
stranger would hold torch's store up for all. In the store each process takes a rank by one atomic operation. The
connection stays, as its line: who closes it without a word has failed, and the keeper sees it at once. What the keeper
has to tell later, that the job has failed or that a server's workers have left, comes on the line too.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import runpy
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # exported, not declared

from msrun import contract
from msrun.errors import ClusterError, MsrunError, RendezvousTimeout, WorldError
from msrun.runtime.joining.launchers import OWN_ADDRESS, TIME_OUT, joining_limit_s, silence_limit_s
from msrun.runtime.joining.spec import (
    Meeting,
    WorldSpec,
    address_of,
    join_place,
    keep_to_interface,
    listen_at,
    listen_beside,
    order_of,
    own_address,
    watch_for_silence,
)

WORKER, SERVER = "worker", "parameter server"
"""Who comes; with a number they are keys of the store: `worker/3`."""
RECOVERY = "MS_ENABLE_RECOVERY"
RECOVERY_NOTE = (
    f"{RECOVERY}=1 recovers nothing here: workers end with their scheduler, so start all of them again, from a "
    "checkpoint; msrun --max_restarts N does so by itself"
)
STORE = "tcp://"
"""Before address and port of the scheduler's store, in MSRUN_RENDEZVOUS."""
SCHEDULER = "the scheduler"
REPORT_EVERY_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_CONNECT_S = 5.0
_PATIENCE_S = 10.0
"""For a store to say whose it is, and for those who are told of a failure to have read it."""
_FOR_EVER_S = 1e8
_MORE_THAN_KEEPER_S = 15.0
"""The keeper's time may have begun later; its answer, which names the missing, is better than a time-out here."""
_GREETING = "msrun joins 2"
"""Before the key of the job."""
_MAX_STRANGERS, _MAX_OF_ONE = 128, 64
"""Connections that have taken no rank yet, and those of them from one address; then the oldest has to go."""
_MAX_BYTES = 4096
_MAX_NOTES = 100
"""Refusals that are told; a flood of them must not fill a disk."""
_NEXT, _REACHED = "next", "reached"
"""Keys: how many have come without a rank; the keeper's address from other hosts."""
_SHOWN_HOSTS = 8
_OVER, _REFUSED = "over", "refused"


@dataclass(frozen=True)
class Joined:
    """A process's place, and what it needs to join the others."""

    rank: int
    local_rank: int
    local_world_size: int
    store: Store
    store_place: str
    """Address and port at which this process reaches the store."""
    own_address: str
    """This host's address for the others."""
    line: socket.socket
    """To the keeper; open."""
    token: str = ""
    """By which workers and parameter servers know each other."""


def join(
    meeting: Meeting, world_size: int, role: str, rank: int, name: str, limit_s: float, silence_s: int, source: str = ""
) -> Joined:
    """Take a rank where others meet; the keeper may not be there yet.

    Args:
        rank: -1 to be given one.
        silence_s: after how long without a sign of life the keeper's host counts as lost.
        source: which of this host's addresses to use; empty leaves it to the system.
    """
    end = time.monotonic() + limit_s
    line = _reach(meeting, f"rank {rank}" if rank >= 0 else f"a {role}", end, limit_s, source)
    watch_for_silence(line, silence_s)
    own, keeper = address_of(line.getsockname()), address_of(line.getpeername())

    def refuse(reason: str, *, is_here: bool = True) -> NoReturn:
        with line, suppress(OSError):
            line.sendall(f"{_REFUSED} {reason}\n".encode() if is_here else b"")
        raise WorldError(f"{meeting.keeper} at {meeting.place} has refused this process: {reason}")

    try:
        line.settimeout(_PATIENCE_S)
        line.sendall(f"{_GREETING} {_digest(meeting.key)}\n".encode())
        said = _read_line(line)
        if said.startswith(_REFUSED):
            refuse(said.removeprefix(_REFUSED).strip(), is_here=False)
        told = json.loads(said)
        port, sizes = int(told["store"]), {WORKER: int(told[WORKER]), SERVER: int(told[SERVER])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        line.close()
        reason = str(error).splitlines()[0][:200]
        raise WorldError(
            f"{meeting.keeper} at {meeting.place} ({meeting.named_by}) does not answer as one ({reason}): another "
            "program listens there"
        ) from None
    try:
        if world_size != sizes[WORKER]:
            refuse(f"it says that the world has {world_size} ranks, but here it has {sizes[WORKER]}")
        if rank >= sizes[role]:
            refuse(f"its rank is {rank}, but here ranks are 0 to {sizes[role] - 1}")
        store = connect_store(keeper, port)
        if own != keeper:
            store.set(_REACHED, keeper)
        key = _take(
            store, role, rank, json.dumps([name, own, "" if own == keeper else own, secrets.token_hex(8)]), refuse
        )
        line.sendall(f"{key}\n".encode())
        line.settimeout(min(max(0.1, end + _MORE_THAN_KEEPER_S - time.monotonic()), _FOR_EVER_S))
        said = _read_line(line)
        if not said:
            raise EOFError("it has closed the connection")
    except (OSError, RuntimeError, EOFError) as error:
        line.close()
        reason = str(error).splitlines()[0][:200]
        raise WorldError(
            f"{meeting.keeper} at {meeting.place} ({meeting.named_by}) has gone, or not everybody came within "
            f"{limit_s:g} s ({reason})"
        ) from None
    if said.startswith(_REFUSED):
        refuse(said.removeprefix(_REFUSED).strip(), is_here=False)
    if not said.startswith("{"):
        line.close()
        raise WorldError(f"{meeting.keeper} at {meeting.place} ends the job: {said}")
    answer = json.loads(said)
    if own == keeper and store.check([_REACHED]):
        own = store.get(_REACHED).decode()
    line.settimeout(None)
    number, local_rank, local_size = answer["seat"]
    return Joined(number, local_rank, local_size, store, join_place(keeper, port), own, line, answer["token"])


def _read_line(line: socket.socket) -> str:
    said = b""
    while not said.endswith(b"\n") and len(said) < _MAX_BYTES and (byte := line.recv(1)):
        said += byte  # what comes later is the lifeline's
    return said.decode(errors="replace").strip()


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _take(store: Store, role: str, rank: int, value: str, refuse: Callable[[str], NoReturn]) -> str:
    """Take a rank, or a number in the order of coming by which the keeper gives one; returns its key."""
    key = f"{role}/{rank}" if rank >= 0 else f"{role}/+{store.add(f'{_NEXT} {role}', 1)}"
    found = store.compare_set(key, "", value).decode()  # it answers: the keeper sees the key before its line is there
    if found != value:
        name, address, *_ = json.loads(found)
        refuse(f"rank {rank} is taken by rank {rank} ({name}, {address})")
    return key


class Keeper:
    """Keeps the store where others meet, and their lines; one thread uses it.

    Args:
        role: who keeps the meeting, for what is written to stderr: "scheduler" or "rank 0".
        silence_s: after how long without a sign of life a member's host counts as lost.
    """

    def __init__(self, meeting: Meeting, workers: int, servers: int, role: str, silence_s: int) -> None:
        self._listener = listen_at(meeting)
        self.place = join_place(*self._listener.getsockname()[:2])
        self.own_address = own_address(self._listener)
        self._role, self._silence_s = role, silence_s
        self._sizes = {WORKER: workers, SERVER: servers}
        self._greeting = f"{_GREETING} {_digest(meeting.key)}"
        store_listener = listen_beside(self._listener)
        self._door = json.dumps({"store": store_listener.getsockname()[1], **self._sizes})
        self.store = serve_store(store_listener)
        self._listener.settimeout(0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lines: dict[socket.socket, str | None] = {}
        """Connection -> the key of its process; empty when it has not taken one yet, None of a stranger."""
        self._addresses: dict[socket.socket, str] = {}
        self._begun: dict[socket.socket, bytes] = {}
        """What has no end yet of what has been said."""
        self._own: list[str] = []
        self._without_line: set[str] = set()
        self._ranks: dict[str, int] = {}
        """Of all, when they have come."""
        self._notes: Counter[bool] = Counter()
        """Whether they knew the job -> how many were refused: no stranger takes the place of an own process."""

    def say(self, text: str) -> None:
        """Write a line to stderr."""
        sys.stderr.write(f"msrun: {self._role} at {self.place}: {text}\n")
        sys.stderr.flush()

    def take_rank_0(self, name: str) -> None:
        """Take part as rank 0."""
        self.store.set(f"{WORKER}/0", json.dumps([name, self.own_address, ""]))
        self._own = [f"{WORKER}/0"]

    def gather(self, limit_s: float) -> str:
        """Wait until all have come. Returns who is missing at the limit, else nothing; a line tells it now and then."""
        end = time.monotonic() + limit_s
        report_at = time.monotonic() + REPORT_EVERY_S
        while any(len(self._of_role(role)) < size for role, size in self._sizes.items()):
            now = time.monotonic()
            if now >= end:
                return self._describe_missing()
            if now >= report_at:
                self.say(self._describe_missing())
                report_at = now + REPORT_EVERY_S
                self._give_back()
            for key in self._handle(min(end, report_at) - now):
                self.say(f"{self._describe(key)} has gone again")
                self.store.delete_key(key)
        return ""

    def _give_back(self) -> None:
        """Give ranks back whose processes have died before their lines were there: the look before found them, too."""
        ranks = {f"{WORKER}/{number}" for number in range(self._sizes[WORKER])} - {*self._present()}
        taken = {key for key in ranks if self.store.check([key])}
        for key in taken & self._without_line:
            self.store.delete_key(key)
        self._without_line = taken

    def answer(self, token: str = "") -> None:
        """Tell everybody its place, when all have come.

        Args:
            token: by which workers and parameter servers are to know each other.
        """
        seats = self.assign()
        for connection, key in self._lines.items():
            if key:
                with suppress(OSError):
                    connection.sendall(f"{json.dumps({'seat': seats[key], 'token': token})}\n".encode())

    def assign(self) -> dict[str, tuple[int, int, int]]:
        """Return rank, local rank and local world size of everybody.

        Who asked for a rank has it. The others get those that are left, by the numeric address of their host and there
        in the order of their coming, so that the ranks of a host stand together (MindSpore sorts hosts in that way).
        """
        seats: dict[str, tuple[int, int, int]] = {}
        for role, size in self._sizes.items():
            said = {key: json.loads(self.store.get(key)) for key in self._of_role(role)}
            ranks = {key: int(key.partition("/")[2]) for key in said if "+" not in key}
            free = iter(sorted(set(range(size)) - {*ranks.values()}))
            late = (key for key in said if key not in ranks)
            for key in sorted(late, key=lambda key: (order_of(said[key][1]), int(key.partition("+")[2]))):
                ranks[key] = next(free)
            for key, rank in ranks.items():
                same = sorted(ranks[other] for other in said if said[other][2] == said[key][2])
                seats[key] = rank, same.index(rank), len(same)
            self._ranks |= ranks
        return seats

    def watch(self) -> str:
        """Wait until all workers have left, and tell the servers.

        Returns:
            Who ended without leaving, at once; empty when all went well.
        """
        while any(key.startswith(WORKER) for key in self._present()):
            gone = self._handle(None)
            if gone:
                return self._describe(gone[0])
        self._send(_OVER)
        return ""

    def fail(self, reason: str) -> None:
        """Tell all members that the job has failed."""
        self._send(reason)
        end = time.monotonic() + _PATIENCE_S
        while any(self._lines.values()) and time.monotonic() < end:  # they read it before they close their lines
            self._handle(end - time.monotonic())

    def close(self) -> None:
        """Close all lines. The store lives as long as somebody refers to it."""
        for connection in [*self._lines]:
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def _present(self) -> list[str]:
        return [*self._own, *filter(None, self._lines.values())]

    def _of_role(self, role: str) -> list[str]:
        return [key for key in self._present() if key.startswith(f"{role}/")]

    def _send(self, text: str) -> None:
        for connection in self._lines:
            with suppress(OSError):
                connection.sendall(f"{text}\n".encode())

    def _handle(self, timeout_s: float | None) -> list[str]:
        """Handle what comes within `timeout_s` at most; returns who has gone without a word."""
        gone: list[str] = []
        for found, _ in self._selector.select(timeout_s):
            connection = found.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._listener:
                self._accept()
            elif connection in self._lines:
                gone += filter(None, [self._read(connection)])
        return gone

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError:
            return
        address = address_of(peer)
        strangers = [other for other, key in self._lines.items() if not key]
        same = [other for other in strangers if self._addresses[other] == address]
        if len(same) >= _MAX_OF_ONE or len(strangers) >= _MAX_STRANGERS:
            self._drop((same if len(same) >= _MAX_OF_ONE else strangers)[0])
        connection.settimeout(0)
        watch_for_silence(connection, self._silence_s)
        self._lines[connection], self._addresses[connection] = None, address
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> str:
        """Read from a line; returns whose it was when it has been closed without a word."""
        key = self._lines[connection]
        try:
            said = connection.recv(_MAX_BYTES)
        except BlockingIOError:
            return ""
        except OSError:
            said = b""
        *words, rest = (self._begun.pop(connection, b"") + said).split(b"\n")
        if rest:
            self._begun[connection] = rest
        if len(rest) >= _MAX_BYTES and not key:
            words.append(rest)
        for word in (found.decode(errors="replace") for found in words if not key):
            if word == self._greeting:
                self._lines[connection] = ""
                with suppress(OSError):
                    connection.sendall(f"{self._door}\n".encode())
            elif self._lines[connection] == "" and self._is_taken(word):
                self._lines[connection] = word
            else:
                self._refuse(connection, word)
                break
        if said and not key:
            return ""
        self._drop(connection)
        return "" if said or not key else key

    def _refuse(self, connection: socket.socket, word: str) -> None:
        is_known = self._lines[connection] is not None or word.startswith(_GREETING)
        if is_known and word.startswith(_REFUSED):  # by what the store says
            reason = word.removeprefix(_REFUSED).strip()
        elif is_known and (role := word.partition("/")[0]) in self._sizes:
            reason = f"an extra {role}: all {self._sizes[role]} have come"
        elif word.startswith(_GREETING):
            reason = "it belongs to another job, which should have a port of its own"
        else:
            reason = "no process of msrun's runtime, or of another version"
        self._notes[is_known] += 1
        if self._notes[is_known] <= _MAX_NOTES:
            shown = "".join(c if c.isprintable() else "?" for c in reason[:500])
            self.say(f"refused {self._addresses[connection]}: {shown}")
        with suppress(OSError):
            connection.sendall(f"{_REFUSED} {reason}\n".encode())
        self._drop(connection)

    def _is_taken(self, key: str) -> bool:
        """Return whether somebody has taken this key, whose line is not here yet."""
        role, _, number = key.partition("/")
        has_room = len(self._of_role(role)) < self._sizes.get(role, 0)
        is_one = has_room and number.removeprefix("+").isdecimal() and key not in self._present()
        return is_one and self.store.check([key])

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._begun.pop(connection, None)
        del self._lines[connection], self._addresses[connection]
        connection.close()

    def _describe(self, key: str) -> str:
        role, _, number = key.partition("/")
        rank = self._ranks.get(key, -1 if "+" in number else int(number))
        name, address, *_ = json.loads(self.store.get(key))
        known = f"rank {rank}" if role == WORKER else f"{role} {rank}"
        return f"{known if rank >= 0 else f'a {role}'} ({name}, {address})"

    def _describe_missing(self) -> str:
        """Return "2 of 4 registered, missing: ranks 2-3; came: 10.0.0.1 with 2"."""
        present, missing = self._present(), []
        for role, size in self._sizes.items():
            numbers = [key.partition("/")[2] for key in self._of_role(role)]
            count = size - len(numbers)
            if count and role == WORKER and numbers and not any("+" in number for number in numbers):
                missing.append(describe_ranks(set(range(size)) - {*map(int, numbers)}))
            elif count:
                missing.append(f"{count} more {role}{'s' if count > 1 else ''}")
        counts = Counter(json.loads(self.store.get(key))[1] for key in present)
        came = [f"{address} with {counts[address]}" for address in sorted(counts, key=order_of)]
        more = f" and {len(came) - _SHOWN_HOSTS} more" if len(came) > _SHOWN_HOSTS else ""
        told = f"; came: {', '.join(came[:_SHOWN_HOSTS])}{more}" if came else ""
        return f"{len(present)} of {sum(self._sizes.values())} registered, missing: {' and '.join(missing)}{told}"


def describe_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0, 4-7"."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"{'rank' if words and words[0].isdecimal() and len(words) == 1 else 'ranks'} {', '.join(words)}"


class Lifeline:
    """Watches the scheduler in a thread: when it, or another process, fails, this one gets SIGTERM; so does a parameter
    server when all workers have left.

    Source: MindSpore's workers send themselves SIGTERM when the scheduler is lost or reports a lost worker.
    """

    def __init__(self, line: socket.socket, place: str) -> None:
        """Take over the line; `place` says where the scheduler is, for people."""
        self._line, self._place = line, place
        self._has_left = False
        self.has_failed = False
        """The job has, elsewhere."""
        os.register_at_fork(after_in_child=line.close)  # else a forked child would hold the line of a dead parent
        threading.Thread(target=self._watch, name="msrun-lifeline", daemon=True).start()

    def leave(self) -> None:
        """Say that this process has done its part; after that nobody cares how it ends."""
        self._has_left = True
        with suppress(OSError):  # the scheduler may have closed first
            self._line.sendall(b"left\n")
            self._line.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        try:
            said = self._line.recv(1 << 16).decode(errors="replace").strip()
        except OSError:
            said = ""
        if self._has_left:
            return
        if said != _OVER:
            self.has_failed = True
            told = f"the scheduler at {self._place} ends the job: {said}"
            sys.stderr.write(f"msrun: error: {told if said else f'lost the scheduler at {self._place}'}\n")
            sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Met:
    """A world whose ranks have met."""

    spec: WorldSpec
    """Complete: with the rank that was assigned."""
    store: Store
    lifeline: Lifeline | None
    """To the scheduler of MS_ROLE, which is to know how this process ends."""


def meet(spec: WorldSpec, meeting: Meeting, environ: MutableMapping[str, str], timeout_s: float) -> Met:
    """Wait until all ranks have come, and return the store that they share.

    Writes the interface towards the others into `environ`, unless the user chose one.
    """
    limit_s, silence_s = joining_limit_s(environ, timeout_s), silence_limit_s(environ)
    name, is_by_hand = describe_process(environ), meeting.keeper == SCHEDULER
    if spec.global_rank == 0 and not is_by_hand:
        store, address = _keep(meeting, spec.world_size, name, limit_s, silence_s)
        keep_to_interface(environ, address)
        return Met(spec, store, None)
    source = environ.get(OWN_ADDRESS, "") if is_by_hand else ""
    joined = join(meeting, spec.world_size, WORKER, spec.global_rank, name, limit_s, silence_s, source)
    keep_to_interface(environ, joined.own_address)
    if not is_by_hand:
        joined.line.close()
        return Met(spec, joined.store, None)
    if joined.token:
        tell_server_places(environ, joined)
    found = replace(
        spec,
        global_rank=joined.rank,
        local_rank=joined.local_rank,
        local_world_size=joined.local_world_size,
        device_id=joined.local_rank if spec.device_id is None else spec.device_id,
    )
    return Met(found, joined.store, Lifeline(joined.line, meeting.place))


def _keep(meeting: Meeting, world_size: int, name: str, limit_s: float, silence_s: int) -> tuple[Store, str]:
    """Keep the meeting as rank 0; returns the store and this host's address."""
    keeper = Keeper(meeting, world_size, 0, "rank 0", silence_s)
    try:
        keeper.take_rank_0(name)
        missing = keeper.gather(limit_s)
        if missing:
            reason = f"after {limit_s:g} s {missing}"
            keeper.fail(reason)
            raise WorldError(f"rank 0 at {keeper.place} ({meeting.named_by}): {reason}")
        keeper.answer()
    finally:
        keeper.close()
    reached = keeper.store.check([_REACHED])
    return keeper.store, keeper.store.get(_REACHED).decode() if reached else keeper.own_address


def tell_server_places(environ: MutableMapping[str, str], joined: Joined) -> None:
    """Write down for this process where workers and parameter servers find each other, and by what they are known."""
    environ[contract.MSRUN_RENDEZVOUS] = f"{STORE}{joined.store_place}"
    environ[contract.MSRUN_SERVER_TOKEN] = joined.token


def _reach(meeting: Meeting, who: str, end: float, limit_s: float, source_address: str) -> socket.socket:
    """Wait until somebody listens at the place, and connect."""
    pause_s = _FIRST_PAUSE_S
    report_at = time.monotonic() + REPORT_EVERY_S
    while True:
        reason = ""
        for address in meeting.addresses:
            try:
                wait_s = max(0.1, min(_CONNECT_S / len(meeting.addresses), end - time.monotonic()))
                source = (source_address, 0) if source_address else None
                connection = socket.create_connection((address, meeting.port), wait_s, source)
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                continue
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()  # a free port of the own host may be given to the very socket that asks for it
        now = time.monotonic()
        if now >= end:
            raise WorldError(
                f"{meeting.keeper} was not at {meeting.place} ({meeting.named_by}) within {limit_s:g} s ({reason}): "
                "start it, or correct the address and port"
            )
        if now >= report_at:
            sys.stderr.write(f"msrun: {who} waits for {meeting.keeper} at {meeting.place} ({reason})\n")
            report_at = now + REPORT_EVERY_S
        time.sleep(min(pause_s * random.uniform(0.5, 1.0), max(0.0, end - now)))  # noqa: S311
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def describe_process(environ: MutableMapping[str, str]) -> str:
    """Return who this process is, for people."""
    node = environ.get("MS_NODE_ID", "")
    return f"{node + ', ' if node else ''}pid {os.getpid()} on {socket.gethostname()}"


def serve_store(listener: socket.socket) -> TCPStore:
    """Start torch's store on a socket that listens already; the libuv server of torch cannot take one over."""
    address, port = own_address(listener), int(listener.getsockname()[1])
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=False
    )


def connect_store(address: str, port: int) -> TCPStore:
    """Connect to a store that is served."""
    try:
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
    except RuntimeError as error:
        raise WorldError(
            f"the store at {address}, port {port}, cannot be reached ({str(error).splitlines()[0]}); is it behind a "
            "firewall?"
        ) from None


TOKEN_BYTES = 32
INTERRUPTED = contract.EXIT_SIGNAL_BASE + 2
SERVER_PROGRAM = "msrun.server"
"""What msrun starts, too; run by its name, for it stands above this module."""


def run_scheduler(
    meeting: Meeting, world_size: int, servers: int, environ: Mapping[str, str], timeout_s: float
) -> NoReturn:
    """Serve the workers until all have left, then end this process, with 0 when all went well.

    The process ends here, whatever it was started by: pytest, which the documents start scripts with, would take a
    SystemExit for an error of its own. Functions registered with atexit run. Source: MindSpore's scheduler calls exit.
    """
    if environ.get(RECOVERY) == "1":
        sys.stderr.write(f"msrun: scheduler: {RECOVERY_NOTE}\n")
    try:
        serve(meeting, world_size, joining_limit_s(environ, timeout_s), silence_limit_s(environ), servers)
        status = contract.EXIT_OK
    except MsrunError as error:
        sys.stderr.write(f"msrun: error: {error}\n")
        status = error.exit_code
    except KeyboardInterrupt:
        status = INTERRUPTED
    _end_program(status)


def run_server() -> NoReturn:
    """Be a parameter server until all workers have left, then end this process, as `run_scheduler` does."""
    try:
        runpy.run_module(SERVER_PROGRAM, run_name="__main__")
        status = contract.EXIT_OK
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else contract.EXIT_OK
    except KeyboardInterrupt:
        status = INTERRUPTED
    _end_program(status)


def _end_program(status: int) -> NoReturn:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def serve(meeting: Meeting, world_size: int, limit_s: float, silence_s: int, servers: int = 0) -> None:
    """Keep the store of workers and parameter servers, and wait until all workers have left."""
    keeper = Keeper(meeting, world_size, servers, "scheduler", silence_s)
    try:
        also = f" and {servers} parameter servers" if servers else ""
        keeper.say(f"waiting for {world_size} workers{also}")
        missing = keeper.gather(limit_s)
        if missing:
            reason = f"{TIME_OUT} {limit_s:g}: {missing}"
            keeper.fail(reason)
            raise RendezvousTimeout(reason)
        keeper.answer(secrets.token_hex(TOKEN_BYTES) if servers else "")
        keeper.say(f"all {world_size} workers{also} have come")
        lost = keeper.watch()
        if lost:
            reason = f"{lost} ended without release(): it failed, or its host is lost"
            keeper.fail(reason)
            raise ClusterError(reason)
        keeper.say("all workers have left")
    finally:
        keeper.close()
