"""All agents of one job, and the wait for what they say: the launcher's loop."""

from __future__ import annotations

import contextlib
import itertools
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msrun import contract
from msrun.agent.pause import stop_this_process
from msrun.agent.signals import SignalPipe
from msrun.cluster.messages import Message
from msrun.cluster.own_thread import Inbox, describe_fault, traceback_of
from msrun.cluster.protocol import HostJob, check_said
from msrun.errors import ClusterError, Interrupted, MsrunError, UsageError, interruption
from msrun.launch.directory.log_directory import record_fault
from msrun.launch.fleet.agent_link import NOT_UNDERSTOOD, SALVAGE_S, AgentLink
from msrun.launch.fleet.log_collector import LogCollector
from msrun.launch.fleet.record import NotUnderstood
from msrun.launch.preflight.fleet_checks import explain_agent_end
from msrun.launch.transport.agent_code import AgentCode
from msrun.launch.transport.event_loop import EventLoop
from msrun.launch.transport.pipe import AgentPipe
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.record_json import encode_record

CLOSE_S = 3.0
ANSWER_S = 60.0
"""How long hosts may take to answer once one has."""
MAX_BEAT_S = 2.0
SHARE_HOSTS = 64
"""So many hosts get a sign of life at a time, so that their answers do not come all at once."""
PAUSE_WAIT_S = 1.0
"""How long agents may take to hear that the launcher is about to be stopped."""
POLL_S = 0.01
OF_LAUNCHER = -1
"""In place of a host's node_rank, in the message of a `fault` of the launcher's own."""
LOSSES = frozenset({"lost", "error", "fault"})
"""What says that nothing good is to be expected of a host any more."""


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
        """
        Args:
            forward: signals that workers get; the others end the job.
            silence_s: how long launcher and host may hear nothing of each other.
            folder: where a fault of this process is kept as long as there are no `logs`; None = nowhere.
        """
        self._clock, self._silence_s = clock, silence_s
        self.inbox = Inbox()
        self.loop = EventLoop(connects_at_a_time, self._tell_fault)
        self.numbers = itertools.count()
        """Of links, in the order in which they are made."""
        self.logs: LogCollector | None = None
        """Where the logs of the hosts of this start go."""
        self.folder = folder
        self._has_fault = False
        self._links: list[AgentLink] = []
        self._nodes: dict[int, int] = {}
        """Number of a link -> node_rank."""
        self.aside: dict[str, Callable[[int, Message], object]] = {}
        """Message type -> what is called with the number of a link that is none of them."""
        self.others: list[AgentLink] = []
        """Of hosts that were of an earlier start, or wait for a later one."""
        self.has_begun = False
        """Agents have been told to start; a signal then is theirs to obey."""
        self.is_abandoned = False
        """The user does not want to wait for hosts any more."""
        self.interrupt: Interrupted | None = None
        """The first signal that is to end the job."""
        self._signals = signals
        self._forward = forward
        self._beat_s = min(silence_s / 6, MAX_BEAT_S)
        self._next_beat = 0.0
        self._turn = -1
        self._interrupts = 0
        self.stop_self: Callable[[], None] = stop_this_process
        """What Ctrl-Z does to this process."""

    @property
    def links(self) -> list[AgentLink]:
        """Those of the hosts of this start, in the order of their node_rank."""
        return self._links

    @links.setter
    def links(self, links: list[AgentLink]) -> None:
        self._links = links
        self._nodes = {link.number: node for node, link in enumerate(links)}

    def node_of(self, number: int) -> int:
        """Return the node_rank of the host of a link; OF_LAUNCHER: it is none of this start."""
        return self._nodes.get(number, OF_LAUNCHER)

    def make_link(
        self,
        entry: HostEntry,
        open_pipe: Callable[[float | None], AgentPipe],
        code: AgentCode,
        job: HostJob | None,
        number: int,
        *,
        has_dialled: bool = False,
    ) -> AgentLink:
        """Return a link to a host, whose logs go where those of its start go; arguments as `AgentLink`."""

        def take_first(message: Message) -> bool:
            check_said(message)
            node = self.node_of(number)
            return self.logs is not None and node != OF_LAUNCHER and self.logs.take(node, link.entry.name, message)

        link = AgentLink(
            number,
            entry,
            open_pipe,
            code,
            None if job is None else {"type": "job", "job": encode_record(job)},
            self.inbox,
            take_first,
            self.loop,
            silence_s=self._silence_s,
            has_dialled=has_dialled,
        )
        return link

    def sizes_of(self, number: int) -> Mapping[str, int]:
        """Return how much of the logs of a link's host is here."""
        return self.logs.sizes(self.node_of(number)) if self.logs else {}

    def _tell_fault(self, error: BaseException) -> None:
        """Something of the launcher's own has failed; the first counts. For any thread."""
        if self._has_fault:
            return
        self._has_fault, text, trace = True, describe_fault(error), traceback_of(error)
        if self.logs is not None:
            self.logs.record_fault(text, trace)
        elif self.folder is not None:
            record_fault(self.folder, text, trace)
        self.inbox.post({"type": "fault", "node": OF_LAUNCHER, "text": text})

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
        """Let all agents go, and wait a moment for them."""
        deadline = time.monotonic() + CLOSE_S
        links = [*self.links, *self.others]
        for link in links:
            link.dismiss()
        late = deadline + 2 * SALVAGE_S
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < deadline and any(link.is_open for link in links):
                self._take_turn(max(0.0, deadline - time.monotonic()))
            while time.monotonic() < late and any(link.is_salvaging for link in links):
                self._take_turn(POLL_S)
        for link in links:
            link.close()
        self.loop.close(deadline + CLOSE_S)

    def tell_all(self, kind: str, **fields: object) -> None:
        """Tell every agent that runs."""
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
        """Take what agents say until `is_done`; False when the deadline has passed before that.

        Args:
            handlers: message type -> called with node_rank and message; what is not named is left out.
            deadline: moment of `clock`.
            every: seconds, and what to call that often.
            on_loss: called with node_rank and why, for those of `LOSSES` that `handlers` does not name.
            on_fault: gets what a handler of msrun's own has raised, which is no fault of the host; None = it is raised.

        Raises:
            Interrupted: a signal came before the job had begun.
            MsrunError: a thread of the launcher has failed, and no handler is for that.
        """
        tick_s, tick = every or (MAX_BEAT_S, lambda: None)
        next_tick = self._clock() + tick_s
        while not is_done() and not self.is_abandoned:
            now = self._clock()
            if deadline is not None and now >= deadline:
                return False
            moments = [self._next_beat, next_tick, *([deadline] if deadline is not None else [])]
            self._take_turn(max(0.0, min(moments) - now))
            for message in self.inbox.take():
                self._deliver(message, handlers, on_loss, on_fault)
            self._heed_signals()
            now = self._clock()
            self._beat_due(now)
            if now >= next_tick:
                next_tick = now + tick_s
                tick()
        return True

    def _take_turn(self, limit_s: float) -> None:
        """Move the bytes of all hosts, or wait until there are some, a message or a signal."""
        for source in (self.inbox, self._signals):
            if source.fileno() not in self.loop.selector.get_map():
                self.loop.selector.register(source, selectors.EVENT_READ)
        try:
            self.loop.turn(limit_s)
        except Exception as error:  # noqa: BLE001 - it carries out the end of the job
            self._tell_fault(error)
            time.sleep(POLL_S)

    def _beat_due(self, now: float) -> None:
        """Give the shares whose turn has come their sign of life; late ones are made up for, but none twice."""
        every_s = self._beat_s / self.shares
        self._next_beat = max(self._next_beat, now - self._beat_s + every_s)
        while now >= self._next_beat:
            self._next_beat += every_s
            self.beat_share()

    @property
    def shares(self) -> int:
        """In how many shares the hosts get their signs of life."""
        return max(1, -(-(len(self.links) + len(self.others)) // SHARE_HOSTS))

    def beat_share(self) -> None:
        """Give the next share of the hosts a sign of life, and look for theirs."""
        self._turn = (self._turn + 1) % self.shares
        for link in [*self.links, *self.others][self._turn :: self.shares]:
            link.beat(self._beat_s)

    def _deliver(
        self,
        message: Message,
        handlers: Mapping[str, Callable[[int, Message], object]],
        on_loss: Callable[[int, MsrunError], None] | None,
        on_fault: Callable[[Exception], None] | None,
    ) -> None:
        """Pass a message on; a host whose words cannot be understood is given up, and the others go on."""
        kind, number = message["type"], message["node"]
        node = self._nodes.get(number, OF_LAUNCHER)
        if node == OF_LAUNCHER != number:
            if handler := self.aside.get(kind):
                handler(number, message)
            return
        try:
            if handler := handlers.get(kind):
                handler(node, message)
            elif kind in LOSSES and node == OF_LAUNCHER:
                raise self.explain_loss(message, node)
            elif kind in LOSSES and on_loss:
                on_loss(node, self.explain_loss(message, node))
        except MsrunError:
            raise
        except NotUnderstood as error:
            self.links[node].give_up(f"{self.links[node].entry.name}: {NOT_UNDERSTOOD.format(error)}")
        except Exception as error:
            if on_fault is None:
                raise
            on_fault(error)

    def explain_loss(self, message: Message, node: int) -> MsrunError:
        """Return why a host cannot take part: what its agent says, or how it has ended of which more was expected."""
        if message["type"] in ("error", "fault"):
            kind = UsageError if message.get("exit_code") == contract.EXIT_USAGE else ClusterError
            return kind(str(message.get("text")))
        if message.get("exit_status") is None:
            return ClusterError(str(message["reason"]))
        entry = self.links[node].entry
        return explain_agent_end(message["exit_status"], message.get("stderr", ""), entry)

    def _heed_signals(self) -> None:
        for signum in self._signals.read():
            if signum == signal.SIGTSTP:
                self._pause()
                continue
            if signum == signal.SIGCONT and signum not in self._forward:
                continue
            if signum not in self._forward:
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
            link.beat(0.0)
        while any(link.has_unseen for link in self.links) and time.monotonic() < deadline:
            self._take_turn(POLL_S)
        self.stop_self()
        self.tell_all("resume")
