"""Dialer: makes connections, again and again where a server was too busy, and shares those to jump hosts."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from msrun.cluster.own_thread import OwnThread
from msrun.launch.transport.ssh.login import Login, end_transport
from msrun.launch.transport.ssh.paramiko_names import Transport
from msrun.launch.transport.ssh.stream import Stream, channel_stream, open_proxy_command, open_tcp
from msrun.launch.transport.ssh.target import SshFault, SshTarget, reason_of


class Guard:
    """What is to be ended in time."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.seconds = max(0.0, deadline - time.monotonic())
        """How much time there was."""
        self.has_fired = False
        self.fault: BaseException | None = None
        """What ended it in place of the time: a fault of msrun itself, raised where the guard is left."""
        self._lock = threading.Lock()
        self._end: Callable[[], None] | None = None

    def watch(self, end: Callable[[], None]) -> None:
        """Say what ends the wait; in place of what was said before. When it is late already, it is ended now."""
        with self._lock:
            self._end = end
            is_late = self.has_fired
        if is_late:
            end()

    def fire(self) -> None:
        """End it."""
        with self._lock:
            self.has_fired = True
            end = self._end
        if end:
            end()


class Watchdog:
    """One thread that looks after the guards of all connections while they are being made."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._changed = threading.Condition()
        self._guards: set[Guard] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether everything is to end."""
        return self._is_closed

    @contextlib.contextmanager
    def guard(self, deadline: float) -> Iterator[Guard]:
        """Look after a piece of work until it is left.

        Args:
            deadline: of `time.monotonic`.
        """
        guard = Guard(deadline)
        with self._changed:
            self._guards.add(guard)
            if self._is_closed:
                guard.fire()
            elif self._thread is None:
                self._thread = OwnThread("ssh watchdog", self._run, self._tell_fault, goes_on=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield guard
        finally:
            with self._changed:
                self._guards.discard(guard)
            if guard.fault is not None:
                raise guard.fault

    def pause(self, seconds: float, deadline: float) -> bool:
        """Wait; return whether there is time left and `close` was not called."""
        end = min(time.monotonic() + seconds, deadline)
        with self._changed:
            while not self._is_closed and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
        return not self._is_closed and end < deadline

    def close(self) -> None:
        """End all work that is looked after, and the thread."""
        with self._changed:
            self._is_closed = True
            guards = list(self._guards)
            self._changed.notify_all()
        for guard in guards:
            guard.fire()
        if self._thread is not None:
            self._thread.join()

    def _tell_fault(self, error: BaseException) -> None:
        """Let those learn of it whose work is looked after."""
        with self._changed:
            guards = list(self._guards)
        for guard in guards:
            guard.fault = error
            with contextlib.suppress(Exception):  # what has failed just now
                guard.fire()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                now = time.monotonic()
                late = [guard for guard in self._guards if guard.deadline <= now and not guard.has_fired]
                if not late:
                    waiting = [guard.deadline for guard in self._guards if not guard.has_fired]
                    self._changed.wait(min(waiting) - now if waiting else None)
                    continue
            for guard in late:
                guard.fire()


LOGINS_AT_A_TIME = 8
"""With one server: of more than ten that have not logged in yet, sshd drops some at random (MaxStartups 10:30:100)."""
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 3.0


@dataclass(frozen=True, eq=False)
class Connection:
    """A login on a host."""

    transport: Transport
    stream: Stream

    def end(self) -> None:
        """End it; from any thread."""
        end_transport(self.transport, self.stream)


class Dialer:
    """Makes connections, for many threads at a time; those that are not ended one by one end with `close`."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._watchdog = Watchdog()
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._jumps: dict[object, Future[Connection]] = {}
        self._doors: dict[object, threading.Semaphore] = {}

    def connect(self, target: SshTarget, deadline: float) -> Connection:
        """Log in; where the server hangs up early, try again, with pauses that differ from thread to thread.

        Args:
            deadline: of `time.monotonic`.

        Raises:
            SshFault: it cannot be done, or not in time.
            UsageError: a name that may not be given to a ProxyCommand.
        """
        pause = FIRST_PAUSE_S
        tries = 0
        before: SshFault | None = None
        while True:
            tries += 1
            try:
                return self._try(target, deadline)
            except SshFault as fault:
                if self._watchdog.is_closed:
                    raise SshFault("called off") from None
                if fault.is_late and before:  # the time ran out in the midst of another try: what went wrong is known
                    raise SshFault(f"{before.text} (in {tries} tries)") from None
                if not fault.is_temporary:
                    raise
                before = fault
                wait = random.uniform(pause / 2, pause)  # noqa: S311 - those who were dropped together have to part
                if not self._watchdog.pause(wait, deadline):
                    raise SshFault(f"{fault.text} (in {tries} {'try' if tries == 1 else 'tries'})") from None
            pause = min(2 * pause, LAST_PAUSE_S)

    def within(self, connection: Connection, deadline: float, work: Callable[[], object]) -> None:
        """Do something with a connection, which is ended when it takes too long.

        Raises:
            SshFault: it took too long, or was called off; in place of what the work raised.
        """
        with self._watchdog.guard(deadline) as guard:
            guard.watch(connection.stream.kill)
            try:
                work()
            except Exception:
                if late := self._late(guard):
                    raise late from None
                raise

    def end(self, connection: Connection) -> None:
        """End one connection."""
        with self._lock:
            self._connections.discard(connection)
        connection.end()

    def close(self) -> None:
        """End all connections, and what is being made."""
        self._watchdog.close()
        with self._lock:
            connections = list(self._connections)
            self._connections.clear()
        for connection in connections:
            connection.stream.kill()  # all at once; then wait for their threads, one after the other
        for connection in connections:
            connection.end()

    def _try(self, target: SshTarget, deadline: float) -> Connection:
        via = self._jump(target.via, deadline) if target.via else None
        door = self._door(target)
        if not door.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise SshFault("other logins on the same server took all the time; raise --ssh_connect_time_out")
        try:
            with self._watchdog.guard(deadline) as guard:
                stream = self._open_stream(target, via, guard, deadline)
                guard.watch(stream.kill)
                try:
                    transport = self._login.run(target, stream, deadline)
                except SshFault as fault:
                    raise self._late(guard) or fault from None
        finally:
            door.release()
        return self._keep(Connection(transport, stream))

    @staticmethod
    def _open_stream(target: SshTarget, via: Connection | None, guard: Guard, deadline: float) -> Stream:
        if via is None:
            return open_proxy_command(target) if target.proxy_command else open_tcp(target, deadline, guard.watch)
        left = max(0.01, deadline - time.monotonic())
        place = (target.host_name, target.port)
        try:
            channel = via.transport.open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=left)
        except Exception as error:  # noqa: BLE001 - paramiko raises whatever its thread has met
            assert target.via is not None
            raise SshFault(
                f"jump host {target.via.label} does not reach {target.host_name} port {target.port} "
                f"({reason_of(error)}); is it up, and does the jump host forward (AllowTcpForwarding)?"
            ) from None
        return channel_stream(channel)

    def _jump(self, target: SshTarget, deadline: float) -> Connection:
        """Return the connection to a jump host, which all behind it share; the first who comes makes it."""
        with self._lock:
            shared = self._jumps.get(target.server)
            is_first = shared is None or _is_broken(shared)
            if shared is None or is_first:
                shared = self._jumps[target.server] = Future()
        if is_first:
            try:
                shared.set_result(self.connect(target, deadline))
            except BaseException as error:  # noqa: BLE001 - for all who wait for it
                shared.set_exception(error)
        try:
            return shared.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise SshFault(f"jump host {target.label}: no login in time") from None
        except SshFault as fault:
            text = fault.text if fault.text.startswith("jump host ") else f"jump host {target.label}: {fault.text}"
            raise SshFault(text) from None

    def _door(self, target: SshTarget) -> threading.Semaphore:
        place = (target.host_name.lower(), target.port, target.via.server if target.via else ())
        with self._lock:
            return self._doors.setdefault(place, threading.Semaphore(LOGINS_AT_A_TIME))

    def _keep(self, connection: Connection) -> Connection:
        with self._lock:
            is_closed = self._watchdog.is_closed
            if not is_closed:
                self._connections.add(connection)
        if is_closed:
            connection.end()
            raise SshFault("called off")
        return connection

    def _late(self, guard: Guard) -> SshFault | None:
        if self._watchdog.is_closed:
            return SshFault("called off")
        if guard.has_fired or time.monotonic() >= guard.deadline:
            return SshFault(
                f"no login within {guard.seconds:.1f} s: the host or its sshd hangs, or is slow; "
                "log in with ssh -v, or raise --ssh_connect_time_out",
                is_late=True,
            )
        return None


def _is_broken(shared: Future[Connection]) -> bool:
    return shared.done() and shared.exception() is None and not shared.result().transport.is_active()
