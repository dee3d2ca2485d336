"""The launcher's end of its connection to one agent: opens it, opens it again when it breaks, and loses no message.

Two threads per host, so that a slow or dead host holds up nobody. What the agent says goes into the launcher's inbox as
`{"node": node_rank, ...message}`. Of its own it posts
    opened {seconds, at}          the host is reached; `at` is this clock's time
    cut {reason} / resumed {}     the connection broke; a new one was made
    broken / lost {reason, exit_status, stderr}    the agent has ended without a result, or cannot be reached any more;
                                  broken: lost follows when what it has left has been fetched
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from msrun.cluster.inbox import Inbox
from msrun.cluster.ledger import Ledger, MessageMissing
from msrun.cluster.messages import Message, MessageBuffer, encode_message
from msrun.errors import ClusterError
from msrun.launch.preflight.agent_end import MAX_QUOTED_CHARS
from msrun.launch.preflight.host_report import printable
from msrun.launch.transport.pipe import MARKER, MAX_NOISE_BYTES, AgentPipe, opening
from msrun.planning.hosts.host_entry import HostEntry

OF_LINKS = ("opened", "cut", "resumed", "broken", "lost")
"""What a link posts of its own."""
RETRY_S = 0.5
SALVAGE_S = 10.0
"""How long the host of a lost agent may take to let somebody else in."""
CUT_REMEDY = "start it again, and if that does not help, look for the reason in the log of its sshd"
ACKNOWLEDGE_BYTES = 1 << 19
"""After so many bytes of logs the agent is told that they have come, so that it sends more."""


@dataclass(frozen=True)
class AgentCode:
    """What an interpreter on the host has to run."""

    start: bytes
    attach: bytes
    """Connects to the agent of a broken connection; empty where that cannot be."""
    salvage: Callable[[], bytes]
    """Sends what a killed agent has left."""


class AgentLink:
    """One host. `start` it, `send`, and `close` it in the end."""

    def __init__(
        self,
        node_rank: int,
        entry: HostEntry,
        open_pipe: Callable[[float | None], AgentPipe],
        code: AgentCode,
        job: Message,
        inbox: Inbox,
        take_first: Callable[[Message], bool],
        *,
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            open_pipe: opens a pipe before a moment of `clock`, None = in the usual time; raises ClusterError.
            job: what the agent is told first.
            take_first: called by the thread that reads, with every message; True when it is done with.
            silence_s: how long nothing may be heard.
        """
        self._clock = clock
        self.node_rank = node_rank
        self.entry = entry
        self.address = ""
        """Numeric, as it is reached from here; empty as long as it is not known."""
        self.is_over = False
        """Nothing more will come."""
        self._open_pipe = open_pipe
        self._code = code
        self._inbox = inbox
        self._job = job
        self._take_first = take_first
        self._silence_s = silence_s
        self._ledger = Ledger()
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[tuple[int, Message] | None] = queue.SimpleQueue()
        """With the number of the resumption before which a message was put there."""
        self._resumptions = 0
        self._pipe: AgentPipe | None = None
        self.silent_s = 0.0
        """How long nothing was heard while the launcher listened: the sum of what `beat` was told. A launcher that was
        stopped for a while has not listened, so that no clock is asked."""
        self._has_begun = self._can_resume = self._was_replaced = self._is_salvaging = False
        self._has_opened = self._has_spoken = self._is_silent = False
        """It was reached; it has said something; it has not for too long, and no other connection to it can be made."""
        self._reopening = threading.Lock()
        """Held while another connection is made."""
        self._spare: AgentPipe | None = None
        """A connection that stands, and is to take the place of the one that is read."""
        self._is_attached = True
        """Whether the agent has said what it has seen; until then numbered messages wait in the ledger."""
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"msrun-host-{node_rank}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"msrun-to-host-{node_rank}", daemon=True)

    # -- for the launcher's main thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect, in the background.

        Raises:
            ClusterError: no more threads can be started here.
        """
        try:
            self._reader.start()
            self._writer.start()
        except RuntimeError as error:
            name = self.entry.name
            raise ClusterError(f"{name}: {error} for it here; raise ulimit -u, or pids.max of the container") from None

    def send(self, kind: str, **fields: object) -> None:
        """Tell the agent, as soon as that can be done."""
        with self._lock:
            self._outbox.put((self._resumptions, self._ledger.stamp({"type": kind, **fields})))

    def beat(self, listened_s: float) -> None:
        """Give a sign of life, and look for one; where there is none for long, another connection is tried.

        Args:
            listened_s: for how long an answer could have been heard since the last beat.
        """
        if not self._has_opened or self.is_over:
            return
        self.silent_s += listened_s
        if self._pipe is None:  # another connection is being made
            return
        self._put_beat()
        if not self._can_resume:
            if self._has_spoken and self.silent_s > self._silence_s:
                self._give_up()
        elif self.silent_s > self._silence_s:
            self._break()
        elif self._is_quiet and not self._reopening.locked():
            threading.Thread(target=self._replace, name=f"msrun-again-{self.node_rank}", daemon=True).start()

    def _put_beat(self) -> None:
        self._outbox.put((0, {"type": "beat", "seen": self._ledger.seen}))

    def _give_up(self) -> None:
        """End the connection to an agent that is stopped, or worse, and cannot be reached in another way."""
        if not self._is_silent:
            self._is_silent = True
            threading.Thread(target=self._break, name=f"msrun-give-up-{self.node_rank}", daemon=True).start()

    def begin(self) -> None:
        """From now on the agent has something to come back for."""
        self._has_begun = True
        self._can_resume = bool(self._code.attach)

    @property
    def has_unseen(self) -> bool:
        """Whether the agent has not acknowledged everything."""
        with self._lock:
            return self.is_open and bool(self._ledger.unseen())

    @property
    def _is_quiet(self) -> bool:
        return self.silent_s > self._silence_s / 3

    @property
    def _too_long_at(self) -> float:
        """The moment of the clock at which nothing has been heard for too long."""
        return self._clock() + max(0.0, self._silence_s - self.silent_s)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection to an agent."""
        return self._pipe is not None and not self.is_over

    @property
    def is_salvaging(self) -> bool:
        """Whether what a lost agent has left is being fetched and ended."""
        return self._is_salvaging

    def dismiss(self) -> None:
        """Let the agent go: it has nothing more to do. A host that is not reached yet is given up."""
        self._can_resume = False
        if self._pipe is None:
            self._closed.set()
        self._put_beat()  # so that it knows that everything has arrived
        self.send("bye")

    def close(self) -> None:
        """End the connection; the agent ends with it."""
        self._closed.set()
        self._outbox.put(None)
        self._break()

    def give_up(self, reason: str) -> None:
        """End the connection to an agent that cannot be worked with."""
        if not self.is_over:
            self._end(reason, None)
            self.close()

    def join(self, deadline: float) -> None:
        """Wait for the threads until a moment of `time.monotonic`."""
        for thread in (self._reader, self._writer):
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _break(self) -> None:
        pipe = self._pipe
        if pipe is not None:
            pipe.close()

    # -- threads ------------------------------------------------------------------------------------------------------

    def _post(self, kind: str, **fields: object) -> None:
        self._inbox.post({"type": kind, "node": self.node_rank, **fields})

    def _read(self) -> None:
        try:
            self._serve()
        except ClusterError as error:
            self._end(str(error), None)
        except Exception as error:  # noqa: BLE001 - whatever it was, the launcher must not wait for ever
            self._end(f"{self.entry.name}: {type(error).__name__} in msrun: {error}", None)

    def _end(self, reason: str, exit_status: int | None, stderr: str = "") -> None:
        self.is_over = True
        self._outbox.put(None)
        self._post("lost", reason=reason, exit_status=exit_status, stderr=stderr)

    def _serve(self) -> None:
        begin = self._clock()
        pipe = self._open_pipe(None)
        if self._closed.is_set():
            pipe.close()
            return
        self.address = pipe.address
        self._has_opened = True
        self._post("opened", seconds=round(self._clock() - begin, 3), at=time.time())
        with contextlib.suppress(OSError), self._lock:  # of one that died at once the end of its pipe tells
            pipe.write(opening(self._code.start) + encode_message(self._ledger.stamp(self._job)))
        self._pipe = pipe
        while not self._closed.is_set():
            noise = self._read_pipe(pipe)
            if self._closed.is_set():
                break
            if self._spare is None and (pipe.exit_status is not None or not self._can_resume):
                self._end_with(pipe, noise)
                return
            again = self._change(pipe)
            if again is None:
                self._end_silent()
                return
            pipe = self._pipe = again
        pipe.close()

    def _end_with(self, pipe: AgentPipe, noise: str) -> None:
        """The agent has ended before its time; an attached pipe tells no more of its end than that."""
        if self._is_silent:
            pipe.close()
            self._end_silent()
            return
        status, stderr = pipe.exit_status, pipe.stderr_text()
        pipe.close()
        why: tuple[str, int | None, str]
        if self._was_replaced:
            why = f"{self.entry.name}: its agent ended without a report; see dmesg there", None, ""
        elif status is None:
            said = f" ({printable(noise, MAX_QUOTED_CHARS)})" if noise.strip() else ""
            moment = f"{'' if self._has_begun else ' before the job began'}{said}"
            why = f"{self.entry.name}: the connection to it broke{moment}; {CUT_REMEDY}", None, ""
        else:
            why = noise, status, stderr
        if self._has_begun and (status or self._was_replaced):
            self._post("broken", **dict(zip(("reason", "exit_status", "stderr"), why, strict=True)))
            self._salvage()
        self._end(*why)

    def _end_silent(self) -> None:
        """Say it first: the host may be slow to let somebody in who ends what is left there, or never does."""
        self._is_salvaging = True
        silence = f"no sign of life for {self.silent_s:.0f} s: the host or the network is down, or its agent is stopped"
        self._end(f"{self.entry.name}: {silence}", None)
        if not self._closed.is_set():
            self._salvage()
        self._is_salvaging = False

    def _change(self, broken: AgentPipe) -> AgentPipe | None:
        """Return the pipe that takes the place of a broken one."""
        self._is_attached, self._pipe = False, None
        broken.close()
        self._post("cut", reason=f"the connection to {self.entry.name} broke")
        with self._reopening:
            again, self._spare = self._spare, None
            while again is None and self.silent_s <= self._silence_s and not self._closed.is_set():
                with contextlib.suppress(ClusterError, OSError):
                    again = self._attach(self._open_pipe(self._too_long_at))
                if again is None:
                    self._closed.wait(RETRY_S)
        self._was_replaced = True
        return again

    def _attach(self, pipe: AgentPipe) -> AgentPipe:
        """Let a new pipe go to the agent that runs; it then leaves the old one."""
        pipe.write(opening(self._code.attach))
        pipe.write(encode_message({"type": "attach", "seen": self._ledger.seen}))
        return pipe

    def _replace(self) -> None:
        """Put a new connection in the place of a quiet one, which is closed only when the new one stands."""
        with self._reopening, contextlib.suppress(ClusterError, OSError):
            if self._spare is not None or not self._is_quiet:
                return
            pipe = self._open_pipe(self._too_long_at)
            if not self._is_quiet or self._closed.is_set():  # it was only slow
                pipe.close()
                return
            self._spare = self._attach(pipe)
            self._break()

    def _salvage(self) -> None:
        """End a lost agent if it is there still, fetch what it has left of its logs, and let that be cleared away."""
        with contextlib.suppress(ClusterError, OSError):
            pipe = self._open_pipe(self._clock() + SALVAGE_S)
            pipe.write(opening(self._code.salvage()))
            self._pipe = pipe  # not earlier: the code comes before anything that is still to be told
            self._read_pipe(pipe)
            pipe.close()

    def _read_pipe(self, pipe: AgentPipe) -> str:
        """Take what the agent says until the connection ends; returns what it said that is no message."""
        buffer, held, has_begun, unacknowledged = MessageBuffer(), b"", False, 0
        while data := pipe.read():
            if not has_begun:
                held += data
                _, marker, data = held.partition(MARKER)
                if not marker:
                    if len(held) > MAX_NOISE_BYTES:
                        break
                    continue
                has_begun = True
            self.silent_s = 0.0
            unacknowledged += len(data)
            try:
                for message in buffer.feed(data):
                    self._has_spoken = True
                    self._take(message)
            except MessageMissing:  # the agent sends it again on another connection
                break
            if unacknowledged > ACKNOWLEDGE_BYTES:
                unacknowledged = 0
                self._put_beat()
        return "" if has_begun else held[-MAX_NOISE_BYTES:].decode("utf-8", "backslashreplace")

    def _take(self, message: Message) -> None:
        kind = message.get("type")
        if kind in ("beat", "attached"):
            with self._lock:
                self._ledger.acknowledge(message.get("seen"))
                if kind == "attached":
                    self._send_again()
                    self._post("resumed")
        elif kind in OF_LINKS:
            raise ValueError(f"its agent says {kind}, which is not for it to say")
        elif self._ledger.take(message) and not self._take_first(message):
            self._inbox.await_room()
            self._inbox.post({**message, "node": self.node_rank})

    def _send_again(self) -> None:
        """Send what the agent has not seen, before anything newer."""
        with contextlib.suppress(queue.Empty):
            while True:
                if self._outbox.get_nowait() is None:
                    self._outbox.put(None)
                    return
        self._resumptions += 1
        for kept in self._ledger.unseen():
            self._outbox.put((self._resumptions, kept))
        self._is_attached = True

    def _write(self) -> None:
        while (entry := self._outbox.get()) is not None:
            resumption, message = entry
            data = encode_message(message)
            while (pipe := self._pipe) is None:  # it is being opened
                if self._closed.wait(0.01) or self.is_over:
                    return
            # After the pipe was taken: what was put before the agent said what it has seen is sent again in its turn.
            if "seq" in message and not (self._is_attached and resumption == self._resumptions):
                continue
            try:
                pipe.write(data)
            except OSError:
                pipe.close()
