"""A warm server: imports once, then forks the fork server of every job that asks, until nobody has for a while.

It holds nothing of a job. What it forks gets the job's environment, directory and descriptors, and answers to the
job's agent as a fork server that the agent has started itself. It adopts what a killed fork server leaves behind.

Protocol, over its socket, one connection a job:
    agent -> warm server   one byte, with the descriptors of the fork server's two channels and its directory; then
                           start {job_id, agent_pid, environment, imports}, or stop {}
    warm server -> agent   started {pid}, later ended {};   stale {path};   stopping {}
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msrun.agent.processes import process_control
from msrun.agent.processes.child import name_process, set_environment
from msrun.agent.processes.fork_server import collection_paused, forget_finalizers, fork_safety, preload, serve_job
from msrun.agent.processes.job_mark import end_job
from msrun.agent.warm.warm_start import changed_file, importing, loaded_files, locked
from msrun.cluster.messages import Channel, Message

if TYPE_CHECKING:
    from msrun.agent.processes.main_module import Main

ASK_S = 5.0  # how long who has connected may take to say what it wants
DESCRIPTORS = 3
_CREDENTIALS = struct.Struct("3i")


class WarmServer:
    """Event loop of a warm server. `serve` returns in a forked child, as `Asked`, and ends as None in the server."""

    def __init__(self, listener: socket.socket, path: Path, idle_s: float, imports: Sequence[str]) -> None:
        """`imports`: what it has imported already."""
        self._listener = listener
        self._path = path
        self._idle_s = idle_s
        self._imported = set(imports)
        self._files = loaded_files()
        self._jobs: dict[int, tuple[Channel, str]] = {}
        """pid of a fork server -> the agent's connection and the job's id"""
        self._sweepers: dict[int, Channel] = {}
        """pid of a process that ends what a killed fork server has left -> the agent's connection"""
        self._ends_at = time.monotonic() + idle_s
        self._is_ending = False

    def serve(self) -> Asked | None:
        """Work through requests and ends until stopped, stale or idle for long; a job that runs holds it."""
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(wake_reader, selectors.EVENT_READ)
            while not (self._is_ending and not self._jobs and not self._sweepers):
                for key, _ in selector.select(self._time_left()):
                    if key.fileobj == wake_reader:
                        os.read(wake_reader, 4096)
                    else:
                        asked = self._accept()
                        if asked is not None:
                            os.close(wake_reader)
                            os.close(wake_writer)
                            return asked
                self._reap()
                self._end_when_idle(selector)
        return None

    def _time_left(self) -> float | None:
        if self._jobs or self._sweepers or self._is_ending:
            return None
        return max(0.0, self._ends_at - time.monotonic())

    def _end_when_idle(self, selector: selectors.BaseSelector) -> None:
        if self._is_ending:
            if self._listener in selector.get_map():
                selector.unregister(self._listener)
            return
        if self._jobs or self._sweepers:
            self._ends_at = time.monotonic() + self._idle_s
        elif time.monotonic() >= self._ends_at:
            with locked(self._path, waits=False) as is_held:  # else somebody is about to ask
                if is_held:
                    self._leave()

    def _leave(self) -> None:
        """Take no more jobs. Whoever asks next starts another one."""
        self._is_ending = True
        self._path.unlink(missing_ok=True)
        self._listener.close()

    def _accept(self) -> Asked | None:
        connection, _ = self._listener.accept()
        connection.settimeout(ASK_S)
        size = _CREDENTIALS.size
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if uid != os.geteuid():
            connection.close()
            return None
        descriptors: list[int] = []
        try:
            _, descriptors, _, _ = socket.recv_fds(connection, 1, DESCRIPTORS)
            channel = Channel(connection)
            messages: list[Message] = []
            while not messages and not channel.is_closed:
                messages = channel.receive()
            return self._answer(messages[0], channel, descriptors) if messages else None
        except (OSError, ValueError, LookupError) as error:  # it has gone, or is no msrun
            print(f"a request was not understood: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log
            return None
        finally:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):  # in the child they are in use
                    os.close(descriptor)

    def _answer(self, message: Message, channel: Channel, descriptors: list[int]) -> Asked | None:
        if message["type"] == "stop":
            self._leave()
            channel.send({"type": "stopping"})
            channel.close()
            return None
        changed = changed_file(self._files)
        if changed or self._is_ending:
            channel.send({"type": "stale", "path": changed})
            channel.close()
            self._leave()
            return None
        # What is wrong with the request shows here, and not in another process.
        asked, imports = Asked(message, descriptors), message["imports"]
        pid = os.fork()
        if pid == 0:
            asked.keep_descriptors()
            channel.close()
            for other, _ in self._jobs.values():
                other.close()
            for other in self._sweepers.values():
                other.close()
            self._listener.close()
            return asked
        self._jobs[pid] = channel, asked.job_id
        channel.send({"type": "started", "pid": pid})
        self._import_more(imports)
        return None

    def _import_more(self, names: Sequence[str]) -> None:
        """Import what this job had to import itself, for the next one."""
        more = [name for name in names if name not in self._imported]
        if not more:
            return
        self._imported.update(more)
        if not import_all(more):
            self._leave()
        self._files = loaded_files()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._sweepers:
                self._tell_end(self._sweepers.pop(pid))
            elif pid in self._jobs:
                channel, job_id = self._jobs.pop(pid)
                if status == 0:
                    self._tell_end(channel)
                else:
                    self._sweep(channel, job_id)

    def _sweep(self, channel: Channel, job_id: str) -> None:
        """End what a fork server that was killed has left, in a process of its own: others may ask meanwhile."""
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                end_job(job_id)
            os._exit(0)
        self._sweepers[pid] = channel

    def _tell_end(self, channel: Channel) -> None:
        channel.send({"type": "ended"})
        channel.close()


class Asked:
    """What a job has asked for, in the process that will be its fork server."""

    def __init__(self, message: Message, descriptors: list[int]) -> None:
        self.job_id: str = message["job_id"]
        self.agent_pid: int = message["agent_pid"]
        self.environment: dict[str, str] = message["environment"]
        self.channel, self.passing, self.directory = descriptors

    def keep_descriptors(self) -> None:
        """Have descriptors of its own, which whoever took the request does not close."""
        self.channel, self.passing, self.directory = map(os.dup, (self.channel, self.passing, self.directory))

    def become(self) -> Main:
        """Turn this freshly forked process into the job's fork server, and serve; returns in a worker."""
        os.setsid()
        os.fchdir(self.directory)
        os.close(self.directory)
        set_environment({**dict.fromkeys(os.environ), **self.environment})
        tempfile.tempdir = None  # may be another one for this job
        name_process("msrun: fork server")
        passing = socket.socket(fileno=self.passing)
        return serve_job(Channel(socket.socket(fileno=self.channel)), self.agent_pid, passing)


def import_all(names: Sequence[str]) -> bool:
    """Import, and return whether this process may still fork."""
    with collection_paused():
        preload([*names])
    forget_finalizers()
    method, reason = fork_safety()
    if method != "fork":
        print(f"no warm server: {reason}", file=sys.stderr, flush=True)  # noqa: T201 - the log
    return method == "fork"


def main() -> Main:
    """Entry point, which returns in a worker.

    argv holds the listening descriptor, the socket's path, idle seconds, and what to import.
    """
    listener_fd, path, idle_s, imports = int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]), sys.argv[5:]
    os.setsid()
    name_process("msrun: warm server")
    process_control.adopt_orphans()
    listener = socket.socket(fileno=listener_fd)
    if not import_all(imports):
        importing(path).unlink(missing_ok=True)
        sys.exit(1)
    os.chdir("/")
    importing(path).rename(path)
    asked = WarmServer(listener, path, idle_s, imports).serve()
    if asked is None:
        os._exit(0)
    return asked.become()
