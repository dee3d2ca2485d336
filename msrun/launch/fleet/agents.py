"""All agents of one job, the launcher's end of the connection to each, and the wait for what they say: its loop."""

from __future__ import annotations

import contextlib
import itertools
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TypeVar

from msrun import contract
from msrun.agent.signals import SignalPipe, stop_this_process
from msrun.cluster.messages import Message, NotUnderstood, describe_fault, encode_message, traceback_of
from msrun.cluster.protocol import HostJob, check_said
from msrun.errors import ClusterError, Interrupted, MsrunError, UsageError, interruption
from msrun.launch.directory.log_directory import record_fault
from msrun.launch.preflight.fleet_checks import MAX_QUOTED_CHARS, HostAnswer, explain_agent_end, quote
from msrun.launch.remote.logs import LogCollector
from msrun.launch.transport.link import CLOSED, ByteChannel, EventLoop, Link, TaskThreads
from msrun.launch.transport.opener import Way
from msrun.launch.transport.pipe import AgentPipe, opening
from msrun.planning.hosts import HostEntry
from msrun.planning.record import encode_record

NO_NODE = -1  # in place of a host's node_rank: it is none of this start, or a `fault` is the launcher's own
MAX_BEAT_S = 2.0
SALVAGE_S = 10.0  # how long the host of a lost agent may take to let somebody else in
NOT_UNDERSTOOD = "its agent says what cannot be understood ({}); install the same msrun there"
RETRY_S = 0.5
CUT_REMEDY = "start it again, and if that does not help, look for the reason in the log of its sshd"
ACKNOWLEDGE_BYTES = 1 << 19  # after so many bytes of logs the agent is told that they have come, so that it sends more


Done = TypeVar("Done")


class State(Enum):
    """Of a host."""

    OPENING = "it is reached for the first time"
    OPEN = "there is a connection to its agent"
    CUT = "the connection broke, and another one is being made"
    OVER = "nothing more will come"


class AgentLink(Link):
    """The launcher's end of the connection to one host. `start` it, `send`, and `close` it in the end.

    What has to wait is done by the loop's other threads, so that a slow or dead host holds up nobody. `post` gets what
    the agent says, and of the link's own
        opened {seconds}              the host is reached
        cut {reason} / resumed {}     the connection broke; a new one was made
        lost {reason, exit_status, stderr}    the agent has ended without a result, or cannot be reached any more; while
                                              `is_salvaging`, what it has left is being fetched"""

    _not_said = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)

    def __init__(
        self,
        number: int,
        entry: HostEntry,
        way: Way,
        job: Message | None,
        post: Callable[[AgentLink, Message], object],
        take_first: Callable[[Message], bool],
        loop: EventLoop,
        *,
        silence_s: float,
        has_dialled: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`number`: of the agent among all of the job. `job`: what it is told first; None where it waits for whatever
        comes. `take_first`: called with every message; True when it is done with. A ValueError: no agent says this.
        `silence_s`: how long nothing may be heard. `has_dialled`: the agent runs already, and is msrun on a host where
        it was typed."""
        super().__init__(loop, clock)
        self.number, self.entry = number, entry
        self.address = ""  # numeric, as it is reached from here; empty until it is known
        self.opened_at = 0.0  # when that was (s since the epoch); 0 until then
        self.answer: HostAnswer | None = None  # what it has said of its host
        self.state = State.OPENING
        self.is_salvaging = False  # it is lost, and what it has left is being fetched
        self.node = NO_NODE  # the node_rank of the host in this start
        self.sizes: Callable[[], Mapping[str, int]] = dict  # how many bytes of each of its logs are here
        self._way, self.has_dialled = way, has_dialled
        self._post_to, self._take_first, self._silence_s = post, take_first, silence_s
        self._beat_s = min(silence_s / 6, MAX_BEAT_S)
        self._broken: ByteChannel | None = None  # the connection that was ended here, if one was
        self.silent_s = 0.0  # how long nothing was heard while the launcher, which may be stopped, listened
        self._attached_at_s = 0.0  # `silent_s` when the connection was made, whose own silence begins there
        self._has_begun = self._can_resume = False  # the agent has a job; another connection to it can be made
        self._was_replaced = self._is_closed = self._is_reopening = False
        """The connection is not the first; the launcher is done with the host; another one is being made."""
        if job is not None:
            self._say(job)

    # -- for the launcher ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        opened = partial(self._on_opened, self._clock())
        if self.has_dialled:  # there is nothing to wait for, and what is said next has to arrive
            opened(self._way.open(None))
        else:
            self._open(None, opened)

    def send(self, kind: str, **fields: object) -> None:
        self._say({"type": kind, **fields})

    def _beat_again(self) -> None:
        if not (self._is_closed or self.is_over):
            self.loop.call_later(self._beat_s, self._beat_again)
            self.beat(self._beat_s)

    def beat(self, listened_s: float = 0.0) -> None:
        """Give a sign of life and look for one, after so long; where there is none, try another connection."""
        if self.state in (State.OPENING, State.OVER):
            return
        self.silent_s += listened_s
        channel = self._channel
        if self.state is not State.OPEN or channel is None:
            return
        if not channel.has_unsent:
            self._put_seen("beat")
        is_too_silent = self.silent_s > self._silence_s
        if self._can_resume:
            if is_too_silent:
                self._break(channel)
            elif self._is_quiet:
                self._reopen()
        elif is_too_silent and self._incoming.has_begun:  # it is stopped, or worse, and can be reached in no other way
            channel.stop(partial(self._let_go, channel.pipe, self._end_silent))

    def begin(self) -> None:
        self._has_begun = True
        self._can_resume = bool(self._way.attach)

    @property
    def has_unseen(self) -> bool:
        return self.is_open and bool(self._kept)

    @property
    def _is_quiet(self) -> bool:
        return self.silent_s - self._attached_at_s > self._silence_s / 3

    @property
    def is_open(self) -> bool:
        return self.state is State.OPEN

    @property
    def is_over(self) -> bool:
        return self.state is State.OVER

    def dismiss(self) -> None:
        """Let the agent go: it has nothing more to do. A host that is not reached yet is given up."""
        self._can_resume = False
        if self._channel is None and not self.is_salvaging:
            self._is_closed = True
        self._put_seen("beat")  # so that it knows that everything has arrived
        self.send("bye")

    def close(self) -> None:
        self._is_closed = True
        if self._channel is not None:
            self._leave(self._channel)

    def give_up(self, reason: str) -> None:
        self._end(reason, None)
        self.close()

    # -- connections --------------------------------------------------------------------------------------------------

    def _do(self, threads: TaskThreads, work: Callable[[], Done], then: Callable[[Done], object]) -> None:
        """Have something done that has to wait, and `then` called with what that returns."""
        threads.run(
            lambda: self.loop.call(partial(then, work())), lambda error: self.loop.call(partial(self._fail, error))
        )

    def _open(self, deadline: float | None, then: Callable[[AgentPipe | Exception], None]) -> None:
        """Open a pipe; `then` is called with it, or with why there is none."""

        def work() -> AgentPipe | Exception:
            try:
                return self._way.open(deadline)
            except (ClusterError, OSError) as error:
                return error

        self._do(self.loop.opening, work, then)

    def _let_go(self, pipe: AgentPipe, then: Callable[[], None] = lambda: None) -> None:
        self._do(self.loop.ending, pipe.close, lambda _: then())

    def _leave(self, channel: ByteChannel) -> None:
        channel.stop(partial(self._let_go, channel.pipe))

    def _fail(self, error: Exception) -> None:
        """End the host: whatever it was, the launcher must not wait for ever."""
        self.is_salvaging = False
        reason = str(error) if isinstance(error, ClusterError) else f"{self.entry.name}: {describe_fault(error)}"
        if not isinstance(error, ClusterError):
            self._take_first({"type": "fault", "text": describe_fault(error), "traceback": traceback_of(error)})
        self.give_up(reason)

    def _break(self, channel: ByteChannel) -> None:
        self._broken = channel
        channel.stop(partial(channel.on_end, channel))

    def _post(self, kind: str, **fields: object) -> None:
        self._post_to(self, {"type": kind, **fields})

    def _end(self, reason: str, exit_status: int | None, stderr: str = "") -> None:
        if not self.is_over:
            self.state = State.OVER
            self._post("lost", reason=reason, exit_status=exit_status, stderr=stderr)

    def _on_opened(self, begin: float, pipe: AgentPipe | Exception) -> None:
        if isinstance(pipe, Exception):
            self._fail(pipe)
        elif self._is_closed:
            self._let_go(pipe)
        else:
            self.address, self.opened_at, self.state = pipe.address, time.time(), State.OPEN
            self._post("opened", seconds=round(self._clock() - begin, 3))
            self._talk(pipe, b"" if self.has_dialled else opening(self._way.start), self._judge)
            self._send_unseen()  # the job is the first of it
            self.loop.call_later(self._beat_s, self._beat_again)

    def _judge(self, channel: ByteChannel) -> None:
        """See why a connection has ended: its agent did, or another one is made."""
        pipe, is_broken = channel.pipe, channel is self._broken

        def work() -> tuple[int | None, str]:
            if is_broken:
                pipe.close()
            return pipe.exit_status, pipe.stderr_text()

        self._do(self.loop.ending, work, lambda found: self._judged(channel, *found))

    def _judged(self, channel: ByteChannel, status: int | None, stderr: str) -> None:
        self._let_go(channel.pipe)
        if self._is_closed or self.is_over or channel is not self._channel:
            return
        if status is None and self._can_resume:
            self.state, self._is_attached, self._channel = State.CUT, False, None
            self._post("cut", reason=f"the connection to {self.entry.name} broke")
            self._reopen()
            return
        name, noise = self.entry.name, self._incoming.noise
        has_left_something = self._has_begun and bool(status or self._was_replaced)
        if self._was_replaced:  # such a pipe tells no more of the agent's end than that
            noise, status, stderr = f"{name}: its agent ended without a report; see dmesg there", None, ""
        elif self.has_dialled:
            fault = f"has sent what cannot be read ({stderr}): something between the hosts changes it" if stderr else ""
            noise, stderr = f"lost {name}, which {fault or CLOSED}", ""
        elif status is None:
            said = f" ({quote(noise, MAX_QUOTED_CHARS)})" if noise.strip() else ""
            moment = f"{'' if self._has_begun else ' before the job began'}{said}"
            noise, stderr = f"{name}: the connection to it broke{moment}; {CUT_REMEDY}", ""
        self._end(noise, status, stderr)
        if has_left_something:
            self._salvage()

    def _end_silent(self) -> None:
        if self._is_closed or self.is_over:
            return
        name, down = self.entry.name, f"no sign of life for {self.silent_s:.0f} s: the host or the network is down"
        said = f"lost {name}, which has given {down}"
        self._end(said if self.has_dialled else f"{name}: {down}, or its agent is stopped", None)
        if not self.has_dialled:
            self._salvage()

    def _salvage(self) -> None:
        """End a lost agent if it is there still, fetch what it has left of its logs, and let that be cleared away."""
        self.is_salvaging = True

        def end(pipe: AgentPipe) -> None:
            self.is_salvaging = False
            self._let_go(pipe)

        def fetch(pipe: AgentPipe | Exception) -> None:
            if isinstance(pipe, Exception):
                self.is_salvaging = False
            elif self._is_closed:
                end(pipe)
            else:
                self._talk(pipe, opening(self._way.salvage(self.sizes())), lambda channel: end(channel.pipe))

        self._open(self._clock() + SALVAGE_S, fetch)

    def _reopen(self) -> None:
        """Try to make another connection, in the place of one that broke or is quiet; one try at a time."""
        if self._is_reopening:
            return
        self._is_reopening = True
        if self._is_closed or self.silent_s > self._silence_s:
            self._on_reopened(ClusterError("too late"))
        else:
            self._open(self._clock() + self._silence_s - self.silent_s, self._on_reopened)

    def _on_reopened(self, pipe: AgentPipe | Exception) -> None:
        self._is_reopening = False
        is_cut = self.state is State.CUT and not self._is_closed
        is_slow = self.state is State.OPEN and not self._is_closed and self._is_quiet  # and not only for a moment
        if not isinstance(pipe, Exception):
            (self._attach if is_cut or is_slow else self._let_go)(pipe)
        elif is_cut and self.silent_s > self._silence_s:
            self._end_silent()
        elif is_cut:
            self.loop.call_later(RETRY_S, self._reopen)

    def _attach(self, pipe: AgentPipe) -> None:
        """Let a new pipe go to the agent that runs; it then leaves the old one."""
        old = self._channel
        self.state, self._is_attached, self._was_replaced = State.OPEN, False, True
        self._attached_at_s = self.silent_s
        attach = encode_message({"type": "attach", "seen": self._seen})
        self._talk(pipe, opening(self._way.attach) + attach, self._judge)
        if old is not None:
            self._post("cut", reason=f"the connection to {self.entry.name} broke")
            self._leave(old)

    # -- what the agent says ------------------------------------------------------------------------------------------

    def _on_bytes(self, channel: ByteChannel, data: bytes) -> None:
        try:
            super()._on_bytes(channel, data)
        except Exception as error:  # noqa: BLE001 - one host, and not the loop of all
            self._fail(error)

    def _on_garbled(self, error: Exception) -> None:
        self.give_up(f"{self.entry.name}: {NOT_UNDERSTOOD.format(error)}")

    def _on_heard(self, channel: ByteChannel) -> None:
        incoming = self._incoming
        if incoming.has_begun:
            self.silent_s = self._attached_at_s = 0.0
        elif incoming.is_noise:
            self._break(channel)
        if incoming.unacknowledged > ACKNOWLEDGE_BYTES:
            incoming.unacknowledged = 0
            self._put_seen("beat")

    def _on_message(self, message: Message) -> None:
        if not self._take_first(message):
            self._post_to(self, message)

    def _on_attached(self) -> None:
        self._post("resumed")


CLOSE_S = 3.0
ANSWER_S = 60.0  # how long hosts may take to answer once one has
LOOK_S = 2.0  # how often to look for signals that came in no other way
PAUSE_WAIT_S = 1.0  # how long agents may take to hear that the launcher is about to be stopped
POLL_S = 0.01
LOSSES = frozenset({"lost", "error", "fault"})  # what says that nothing good is to be expected of a host any more


class Agents:
    """Owns the links; `close` ends every connection, and with it every agent."""

    def __init__(
        self,
        signals: SignalPipe,
        forward: tuple[int, ...],
        silence_s: float,
        connects_at_a_time: int = 1,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`forward`: signals that workers get; the others end the job. `silence_s`: how long launcher and host may hear
        nothing of each other. `folder`: where a fault of this process is kept as long as there are no `logs`; None =
        nowhere."""
        self._signals, self._forward = signals, forward
        self._silence_s, self._clock = silence_s, clock
        self._posts: deque[tuple[AgentLink | None, Message]] = deque()
        self.loop = EventLoop(connects_at_a_time, self._tell_fault, clock=clock)
        self.numbers = itertools.count()  # of links, in the order in which they are made
        self.logs: LogCollector | None = None  # where the logs of the hosts of this start go
        self.folder = folder
        self.on_other: Callable[[AgentLink, Message], object] = lambda _link, _message: None
        """Called with what a host says that is none of this start."""
        self.others: list[AgentLink] = []  # of hosts that were of an earlier start, or wait for a later one
        self.has_begun = False  # agents have been told to start; a signal then is theirs to obey
        self.is_abandoned = False  # the user does not want to wait for hosts any more
        self.interrupt: Interrupted | None = None  # the first signal that is to end the job
        self.stop_self: Callable[[], None] = stop_this_process  # what Ctrl-Z does to this process
        self._links: list[AgentLink] = []
        self._has_fault = False
        self._interrupts = 0

    @property
    def links(self) -> list[AgentLink]:
        """Those of the hosts of this start, in the order of their node_rank."""
        return self._links

    @links.setter
    def links(self, links: list[AgentLink]) -> None:
        for link in self._links:
            link.node = NO_NODE
        self._links = links
        for node, link in enumerate(links):
            link.node = node

    def post(self, link: AgentLink | None, message: Message) -> None:
        """Have a message delivered; of the loop's thread. `link`: None = of the launcher itself."""
        self._posts.append((link, message))

    def make_link(
        self, entry: HostEntry, way: Way, job: HostJob | None, number: int, *, has_dialled: bool = False
    ) -> AgentLink:
        """Return a link to a host, whose logs go where those of its start go; arguments as `AgentLink`."""

        def take_first(message: Message) -> bool:
            check_said(message)
            node = link.node
            return self.logs is not None and node != NO_NODE and self.logs.take(node, link.entry.name, message)

        told = None if job is None else {"type": "job", "job": encode_record(job)}
        given = entry, way, told, self.post, take_first, self.loop
        link = AgentLink(number, *given, silence_s=self._silence_s, has_dialled=has_dialled, clock=self._clock)
        link.sizes = lambda: self.logs.sizes(link.node) if self.logs else {}
        return link

    def _tell_fault(self, error: BaseException) -> None:
        """Something of the launcher's own has failed; the first counts. For any thread."""
        if self._has_fault:
            return
        self._has_fault, text, trace = True, describe_fault(error), traceback_of(error)
        if (folder := self.logs.folder if self.logs is not None else self.folder) is not None:
            record_fault(folder, text, trace)
        self.loop.call(partial(self.post, None, {"type": "fault", "text": text}))

    def open_store(
        self,
        node: int,
        address: str,
        port: int,
        on_loss: Callable[[int, MsrunError], None],
        has_failed: Callable[[], bool],
    ) -> Message:
        """Have a host listen for the workers' store; return what it says, nothing when it says nothing in time."""
        heard = Message()
        handlers = {"listening": lambda who, message: heard.update(message if who == node else {})}
        self.links[node].send("listen", address=address, port=port)
        self.hear(lambda: bool(heard) or has_failed(), handlers, deadline=self._clock() + ANSWER_S, on_loss=on_loss)
        return heard

    def close(self) -> None:
        deadline, links = time.monotonic() + CLOSE_S, [*self.links, *self.others]
        for link in links:
            link.dismiss()
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < deadline and any(link.is_open for link in links):
                self._take_turn(max(0.0, deadline - time.monotonic()))
            while time.monotonic() < deadline + 2 * SALVAGE_S and any(link.is_salvaging for link in links):
                self._take_turn(POLL_S)
        for link in links:
            link.close()
        self.loop.close(deadline + CLOSE_S)

    def tell_all(self, kind: str, **fields: object) -> None:
        for link in self.links:
            if not link.is_over:
                link.send(kind, **fields)

    def hear(
        self,
        is_done: Callable[[], bool],
        handlers: Mapping[str, Callable[[int, Message], object]],
        *,
        deadline: float | None = None,
        every: tuple[float, Callable[[], None]] | None = None,
        on_loss: Callable[[int, MsrunError], None] | None = None,
        on_fault: Callable[[Exception], None] | None = None,
    ) -> bool:
        """Take what agents say until `is_done`; False when the deadline has passed before that. `handlers`: message
        type -> called with node_rank and message; what is not named is left out. `deadline`: moment of `clock`.
        `every`: seconds, and what to call that often. `on_loss`: called with node_rank and why, for those of `LOSSES`
        that `handlers` does not name. `on_fault`: gets what a handler of msrun's own has raised, which is no fault of
        the host; None = it is raised. Raises Interrupted: a signal came before the job had begun. Raises MsrunError: a
        thread of the launcher has failed, and no handler is for that."""
        tick_s, tick = every or (LOOK_S, lambda: None)
        next_tick = self._clock() + tick_s
        while not is_done() and not self.is_abandoned:
            now = self._clock()
            if deadline is not None and now >= deadline:
                return False
            self._take_turn(0.0 if self._posts else max(0.0, min(next_tick, deadline or next_tick) - now))
            for _ in range(len(self._posts)):
                self._deliver(*self._posts.popleft(), handlers, on_loss, on_fault)
            self._heed_signals()
            if (now := self._clock()) >= next_tick:
                next_tick = now + tick_s
                tick()
        return True

    def _take_turn(self, limit_s: float) -> None:
        """Move the bytes of all hosts, or wait until there are some, a message or a signal."""
        if self._signals.fileno() not in self.loop.selector.get_map():
            self.loop.selector.register(self._signals, selectors.EVENT_READ)
        try:
            self.loop.turn(limit_s)
        except Exception as error:  # noqa: BLE001 - it carries out the end of the job
            self._tell_fault(error)
            time.sleep(POLL_S)

    def _deliver(
        self,
        link: AgentLink | None,
        message: Message,
        handlers: Mapping[str, Callable[[int, Message], object]],
        on_loss: Callable[[int, MsrunError], None] | None,
        on_fault: Callable[[Exception], None] | None,
    ) -> None:
        """Pass a message on; a host whose words cannot be understood is given up, and the others go on."""
        kind, node = message["type"], link.node if link else NO_NODE
        try:
            if link is not None and node == NO_NODE:
                self.on_other(link, message)
            elif handler := handlers.get(kind):
                handler(node, message)
            elif kind in LOSSES and link is None:
                raise self.explain_loss(message, link)
            elif kind in LOSSES and on_loss:
                on_loss(node, self.explain_loss(message, link))
        except MsrunError:
            raise
        except NotUnderstood as error:
            assert link is not None, "the launcher understands itself"
            link.give_up(f"{link.entry.name}: {NOT_UNDERSTOOD.format(error)}")
        except Exception as error:
            if on_fault is None:
                raise
            on_fault(error)

    def explain_loss(self, message: Message, link: AgentLink | None) -> MsrunError:
        """Return why a host cannot take part: what its agent says, or how it has ended of which more was expected."""
        if message["type"] in ("error", "fault"):
            kind = UsageError if message.get("exit_code") == contract.EXIT_USAGE else ClusterError
            return kind(str(message.get("text")))
        status = message.get("exit_status")
        if status is None:
            return ClusterError(str(message["reason"]))
        assert link is not None, "the launcher itself does not end so"
        return explain_agent_end(status, message.get("stderr", ""), link.entry)

    def _heed_signals(self) -> None:
        for signum in self._signals.read():
            if signum == signal.SIGTSTP:
                self._pause()
                continue
            if signum not in self._forward:
                if signum == signal.SIGCONT:
                    continue
                self._interrupts += 1
                self.interrupt = self.interrupt or interruption(signum, self._signals.time_limit_s)
                if not self.has_begun:
                    raise self.interrupt
            if self._interrupts > 2 and signum == signal.SIGINT:  # whoever insists is not kept waiting by a dead host
                self.is_abandoned = True
            self.tell_all("signal", signum=signum)

    def _pause(self) -> None:
        """Stop as Ctrl-Z wants, once the agents know why they will hear nothing, and to stop their workers."""
        self.tell_all("pause")
        deadline = time.monotonic() + PAUSE_WAIT_S
        for link in self.links:
            link.beat()
        while any(link.has_unseen for link in self.links) and time.monotonic() < deadline:
            self._take_turn(POLL_S)
        self.stop_self()
        self.tell_all("resume")
