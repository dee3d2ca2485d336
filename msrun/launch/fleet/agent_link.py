"""The launcher's end of its connection to one agent: opens it, opens it again when it breaks, and loses no message.

All of it belongs to the thread of the event loop, which moves the bytes of all hosts; what has to wait is done by the
loop's other threads, so that a slow or dead host holds up nobody. What the agent says goes into the launcher's inbox as
`{"node": number, ...message}`. Of its own a link posts
    opened {seconds, at}          the host is reached; `at` is this clock's time
    cut {reason} / resumed {}     the connection broke; a new one was made
    broken / lost {reason, exit_status, stderr}    the agent has ended without a result, or cannot be reached any more;
                                  broken: lost follows when what it has left has been fetched
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from msrun.cluster.messages import Ledger, Message, MessageMissing, encode_message
from msrun.cluster.own_thread import Inbox, describe_fault, traceback_of
from msrun.errors import ClusterError
from msrun.launch.preflight.fleet_checks import MAX_QUOTED_CHARS, quote
from msrun.launch.transport.agent_code import AgentCode
from msrun.launch.transport.event_loop import ByteChannel, EventLoop, Incoming
from msrun.launch.transport.pipe import AgentPipe, opening
from msrun.planning.hosts.host_entry import HostEntry

NOT_UNDERSTOOD = "its agent says what cannot be understood ({}); install the same msrun there"
RETRY_S = 0.5
SALVAGE_S = 10.0
"""How long the host of a lost agent may take to let somebody else in."""
CLOSED = "has closed its connection: msrun was killed there, or the host went down"
"""Of a host that has dialled in."""
CUT_REMEDY = "start it again, and if that does not help, look for the reason in the log of its sshd"
ACKNOWLEDGE_BYTES = 1 << 19
"""After so many bytes of logs the agent is told that they have come, so that it sends more."""


class AgentLink:
    """One host. `start` it, `send`, and `close` it in the end."""

    def __init__(
        self,
        number: int,
        entry: HostEntry,
        open_pipe: Callable[[float | None], AgentPipe],
        code: AgentCode,
        job: Message | None,
        inbox: Inbox,
        take_first: Callable[[Message], bool],
        loop: EventLoop,
        *,
        silence_s: float,
        has_dialled: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            number: of this connection among all that the job makes.
            open_pipe: opens a pipe before a moment of `clock`, None = in the usual time; raises ClusterError. Called by
                another thread.
            job: what the agent is told first; None where it waits for whatever comes.
            take_first: called with every message; True when it is done with. A ValueError: no agent says this.
            silence_s: how long nothing may be heard.
            has_dialled: the agent runs already, and is msrun on a host where it was typed.
        """
        self._has_dialled = has_dialled
        self._clock = clock
        self.number = number
        self.entry = entry
        self.address = ""
        """Numeric, as it is reached from here; empty until it is known."""
        self.is_over = self.is_salvaging = False
        """Nothing more will come; what a lost agent has left is being fetched and ended."""
        self._open_pipe, self._code = open_pipe, code
        self._inbox = inbox
        self._take_first = take_first
        self._loop = loop
        self._silence_s = silence_s
        self._ledger = Ledger()
        if job is not None:
            self._ledger.stamp(job)
        self._channel: ByteChannel | None = None
        """The connection; None while one is being made."""
        self._broken: ByteChannel | None = None  # the connection that was ended here, if one was
        self._incoming = Incoming()
        self.silent_s = 0.0
        """How long nothing was heard while the launcher, which may be stopped, listened: the sum of what `beat` got."""
        self._attached_at_s = 0.0
        """`silent_s` when the connection was made, whose own silence begins there."""
        self._has_begun = self._can_resume = self._was_replaced = self._is_closed = False
        self._has_opened = self._has_spoken = self._is_silent = False
        """It was reached; it has said something; it has not for too long, and no other connection to it can be made."""
        self._is_reopening = False
        """Another connection is being made."""
        self._is_attached = True
        """Whether the agent has said what it has seen; until then numbered messages wait in the ledger."""

    # -- for the launcher ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect."""
        opened = partial(self._on_opened, self._clock())
        if self._has_dialled:  # there is nothing to wait for, and what is said next has to arrive
            opened(self._open_pipe(None), None)
        else:
            self._open(None, opened)

    def send(self, kind: str, **fields: object) -> None:
        """Tell the agent, as soon as that can be done."""
        message = self._ledger.stamp({"type": kind, **fields})
        if self._channel is not None and self._is_attached:
            self._channel.send(encode_message(message))

    def beat(self, listened_s: float) -> None:
        """Give a sign of life, and look for one; where there is none for long, another connection is tried.

        Args:
            listened_s: for how long an answer could have been heard since the last beat.
        """
        if not self._has_opened or self.is_over:
            return
        self.silent_s += listened_s
        channel = self._channel
        if channel is None:  # another connection is being made
            return
        if not channel.has_unsent:
            self._put_beat()
        is_too_silent = self.silent_s > self._silence_s
        if not self._can_resume:
            if self._has_spoken and is_too_silent:  # it is stopped, or worse, and cannot be reached in another way
                self._is_silent = True
                self._break(channel)
        elif is_too_silent:
            self._break(channel)
        elif self._is_quiet:
            self._reopen()

    def _put_beat(self) -> None:
        if self._channel is not None:
            self._channel.send(encode_message({"type": "beat", "seen": self._ledger.seen}))

    def begin(self) -> None:
        """From now on the agent has something to come back for."""
        self._has_begun = True
        self._can_resume = bool(self._code.attach)

    @property
    def has_unseen(self) -> bool:
        """Whether the agent has not acknowledged everything."""
        return self.is_open and bool(self._ledger.unseen())

    @property
    def _is_quiet(self) -> bool:
        return self.silent_s - self._attached_at_s > self._silence_s / 3

    @property
    def is_open(self) -> bool:
        """Whether there is a connection to an agent."""
        return self._channel is not None and not self.is_over

    def dismiss(self) -> None:
        """Let the agent go: it has nothing more to do. A host that is not reached yet is given up."""
        self._can_resume = False
        if self._channel is None and not self.is_salvaging:
            self._is_closed = True
        self._put_beat()  # so that it knows that everything has arrived
        self.send("bye")

    def close(self) -> None:
        """End the connection; the agent ends with it."""
        self._is_closed = True
        if self._channel is not None:
            self._leave(self._channel)

    def give_up(self, reason: str) -> None:
        """End the connection to an agent that cannot be worked with."""
        self._end(reason, None)
        self.close()

    # -- connections --------------------------------------------------------------------------------------------------

    def _open(self, deadline: float | None, then: Callable[[AgentPipe | None, Exception | None], None]) -> None:
        """Open a pipe in the background; `then` is called with it, or with why there is none."""

        def work() -> None:
            try:
                pipe = self._open_pipe(deadline)
            except (ClusterError, OSError) as error:
                self._loop.call(partial(then, None, error))
            else:
                self._loop.call(partial(then, pipe, None))

        self._loop.opening.run(work, self._fail_later)

    def _let_go(self, pipe: AgentPipe) -> None:
        self._loop.ending.run(pipe.close, self._fail_later)

    def _fail_later(self, error: Exception) -> None:
        self._loop.call(partial(self._fail, error))

    def _fail(self, error: Exception) -> None:
        """End the host: whatever it was, the launcher must not wait for ever."""
        self.is_salvaging = False
        reason = str(error) if isinstance(error, ClusterError) else f"{self.entry.name}: {describe_fault(error)}"
        if not isinstance(error, ClusterError):
            self._take_first({"type": "fault", "text": describe_fault(error), "traceback": traceback_of(error)})
        self.give_up(reason)

    def _leave(self, channel: ByteChannel) -> None:
        channel.stop(partial(self._let_go, channel.pipe))

    def _break(self, channel: ByteChannel) -> None:
        """End a connection that is of no use, and see what follows."""
        self._broken = channel
        channel.stop(partial(channel.on_end, channel))

    def _post(self, kind: str, **fields: object) -> None:
        self._inbox.post({"type": kind, "node": self.number, **fields})

    def _end(self, reason: str, exit_status: int | None, stderr: str = "") -> None:
        if not self.is_over:
            self.is_over = True
            self._post("lost", reason=reason, exit_status=exit_status, stderr=stderr)

    def _on_opened(self, begin: float, pipe: AgentPipe | None, error: Exception | None) -> None:
        if pipe is None:
            self._fail(error or ClusterError(self.entry.name))
        elif self._is_closed:
            self._let_go(pipe)
        else:
            self.address, self._has_opened = pipe.address, True
            self._post("opened", seconds=round(self._clock() - begin, 3), at=time.time())
            self._talk(pipe, b"" if self._has_dialled else opening(self._code.start))
            self._send_unseen()  # the job is the first of it

    def _talk(self, pipe: AgentPipe, first: bytes, on_end: Callable[[ByteChannel], None] | None = None) -> None:
        self._incoming = Incoming()
        self._channel = ByteChannel(self._loop, pipe, self._on_bytes, on_end or self._judge)
        self._channel.send(first)
        self._channel.start()

    def _judge(self, channel: ByteChannel) -> None:
        """See why a connection has ended: its agent did, or another one is made."""
        pipe, is_broken, is_silent = channel.pipe, channel is self._broken, self._is_silent

        def work() -> None:
            if is_broken:
                pipe.close()
            status = None if is_silent else pipe.exit_status
            self._loop.call(partial(self._judged, channel, status, pipe.stderr_text()))
            pipe.close()

        self._loop.ending.run(work, self._fail_later)

    def _judged(self, channel: ByteChannel, status: int | None, stderr: str) -> None:
        if self._is_closed or self.is_over or channel is not self._channel:
            return
        if status is None and self._can_resume:
            self._is_attached, self._channel = False, None
            self._post("cut", reason=f"the connection to {self.entry.name} broke")
            self._reopen()
        elif self._is_silent:
            self._end_silent()
        else:
            self._end_with(status, stderr, self._incoming.noise)

    def _end_with(self, status: int | None, stderr: str, noise: str) -> None:
        """The agent has ended before its time; an attached pipe tells no more of its end than that."""
        has_left_something = self._has_begun and bool(status or self._was_replaced)
        if self._was_replaced:
            noise, status, stderr = f"{self.entry.name}: its agent ended without a report; see dmesg there", None, ""
        elif self._has_dialled:
            fault = f"has sent what cannot be read ({stderr}): something between the hosts changes it" if stderr else ""
            noise = f"lost {self.entry.name}, which {fault or CLOSED}"
            stderr = ""
        elif status is None:
            said = f" ({quote(noise, MAX_QUOTED_CHARS)})" if noise.strip() else ""
            moment = f"{'' if self._has_begun else ' before the job began'}{said}"
            noise, stderr = f"{self.entry.name}: the connection to it broke{moment}; {CUT_REMEDY}", ""
        end = partial(self._end, noise, status, stderr)
        if has_left_something:
            self._post("broken", reason=noise, exit_status=status, stderr=stderr)
            self._salvage(end)
        else:
            end()

    def _end_silent(self) -> None:
        """Say it first: the host may be slow to let somebody in who ends what is left there, or never does."""
        down = f"no sign of life for {self.silent_s:.0f} s: the host or the network is down"
        if self._has_dialled:
            self._end(f"lost {self.entry.name}, which has given {down}", None)
            return
        self.is_salvaging = not self._is_closed
        self._end(f"{self.entry.name}: {down}, or its agent is stopped", None)
        if self.is_salvaging:
            self._salvage(lambda: setattr(self, "is_salvaging", False))

    def _reopen(self) -> None:
        """Try to make another connection, in the place of one that broke or is quiet; one try at a time."""
        if self._is_reopening:
            return
        self._is_reopening = True
        if self._is_closed or self.silent_s > self._silence_s:
            self._on_reopened(None)
        else:
            self._open(self._clock() + self._silence_s - self.silent_s, self._on_reopened)

    def _on_reopened(self, pipe: AgentPipe | None, _error: Exception | None = None) -> None:
        self._is_reopening = False
        is_cut = self._channel is None
        is_wanted = not (self._is_closed or self.is_over) and (is_cut or self._is_quiet)  # else it was only slow
        if pipe is not None:
            (self._attach if is_wanted else self._let_go)(pipe)
        elif is_wanted and is_cut and self.silent_s > self._silence_s:
            self._end_silent()
        elif is_wanted and is_cut:
            self._loop.call_later(RETRY_S, self._reopen)

    def _attach(self, pipe: AgentPipe) -> None:
        """Let a new pipe go to the agent that runs; it then leaves the old one."""
        old = self._channel
        self._is_attached, self._was_replaced, self._attached_at_s = False, True, self.silent_s
        attach = encode_message({"type": "attach", "seen": self._ledger.seen})
        self._talk(pipe, opening(self._code.attach) + attach)
        if old is not None:
            self._post("cut", reason=f"the connection to {self.entry.name} broke")
            self._leave(old)

    def _salvage(self, then: Callable[[], None]) -> None:
        """End a lost agent if it is there still, fetch what it has left of its logs, and let that be cleared away."""

        def end(channel: ByteChannel) -> None:
            self._let_go(channel.pipe)
            then()

        def fetch(pipe: AgentPipe | None, _error: Exception | None) -> None:
            if pipe is not None and not self._is_closed:
                self._talk(pipe, opening(self._code.salvage()), end)
                return
            if pipe is not None:
                self._let_go(pipe)
            then()

        self._open(self._clock() + SALVAGE_S, fetch)

    # -- what the agent says ------------------------------------------------------------------------------------------

    def _on_bytes(self, channel: ByteChannel, data: bytes) -> None:
        if channel is self._channel:
            try:
                self._take_bytes(channel, data)
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
                self.give_up(f"{self.entry.name}: {NOT_UNDERSTOOD.format(error)}")
            except Exception as error:  # noqa: BLE001 - one host, and not the loop of all
                self._fail(error)

    def _take_bytes(self, channel: ByteChannel, data: bytes) -> None:
        incoming = self._incoming
        try:
            for message in incoming.feed(data):
                self._has_spoken = True
                self._take(message)
        except MessageMissing:  # the agent sends it again on another connection
            self._break(channel)
        if incoming.has_begun:
            self.silent_s = self._attached_at_s = 0.0
        elif incoming.is_noise:
            self._break(channel)
        if incoming.unacknowledged > ACKNOWLEDGE_BYTES:
            incoming.unacknowledged = 0
            self._put_beat()

    def _take(self, message: Message) -> None:
        kind = message.get("type")
        if kind in ("beat", "attached"):
            self._ledger.acknowledge(message.get("seen"))
            if kind == "attached":
                self._is_attached = True
                self._send_unseen()
                self._post("resumed")
        elif self._ledger.take(message) and not self._take_first(message):
            self._inbox.post({**message, "node": self.number})

    def _send_unseen(self) -> None:
        """Send what the agent has not seen, before anything newer."""
        if self._channel is not None:
            for kept in self._ledger.unseen():
                self._channel.send(encode_message(kept))
