"""The agent's hold on its fork server: start it, talk to it, say which processes it is to start, see it end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrun.cluster.messages import Channel
from msrun.errors import ClusterError
from msrun.planning.environment import SET_LATE
from msrun.planning.program import Program
from msrun.planning.record import Record, encode_record

if TYPE_CHECKING:
    import subprocess  # for the agent alone, not for the server

# -c leaves '' in sys.path[0] (not with PYTHONSAFEPATH); it goes, so that nothing is imported from the directory that
# msrun was typed in. The name msrun is this package's, whatever PYTHONPATH holds of that name.
RUN_PROGRAM = """
try:
    program.take_call()()
except BaseException as error:
    program.error = error
program.leave()
"""
"""Runs `program`, a `main_module.Main`: no frame but that of the text is below the user's, and the text holds nothing
of what the program is to let go."""
BOOT = (
    "import sys; '' in sys.path[:1] and sys.path.pop(0); sys.path.insert(0, sys.argv[1]); import msrun; "
    "sys.path.pop(0); from {module} import main; program = main()"
) + RUN_PROGRAM  # what a process of msrun that forks workers runs with -c; its first argument is ROOT
ROOT = str(Path(__file__).parents[3])

SCHEDULER_ID = -1  # process id within the job of the scheduler; workers have their global rank
MINDSPORE_SCHEDULER_ID = -10  # of MindSpore's own scheduler, which is started anew with the workers
FIRST_SERVER_ID = -11  # process id within the job of parameter server 0; that of server 1 is one less, and so on
_NAMES = {SCHEDULER_ID: "the scheduler", MINDSPORE_SCHEDULER_ID: "MindSpore's scheduler"}


def server_index(process_id: int) -> int | None:
    """Return which parameter server a process id stands for; None when it is none."""
    return FIRST_SERVER_ID - process_id if process_id <= FIRST_SERVER_ID else None


class ProcessSpec(Record):
    """One process that the fork server is asked to start."""

    process_id: int  # global rank, or one of the ids above
    log_path: str  # existing file; stdout and stderr go to its end
    program: Program | None = None  # none for the scheduler
    use_exec: bool = False
    env: Mapping[str, str | None] = field(default_factory=dict)  # over the server's environment; None removes a name
    cpus: tuple[int, ...] = ()  # processors to run on; empty = as the server
    memory_nodes: tuple[int, ...] = ()  # NUMA nodes to take memory from; empty = as the server
    error_log_path: str = ""  # existing file for stderr alone; empty = it goes where stdout goes
    terminal: str = ""  # path of what is its stdin, stdout, stderr and its session's own; empty = none
    has_stdin: bool = False  # whether its stdin is the one that the fork server was given; else it is empty

    @property
    def name(self) -> str:
        index = server_index(self.process_id)
        return _NAMES.get(self.process_id, f"worker {self.process_id}" if index is None else f"server {index}")


def read_spec(value: Mapping[str, Any]) -> ProcessSpec:
    """Return the process that the agent, which has started this server, asks for (TypeError: a wrong field)."""
    program = value["program"] and Program(**{**value["program"], "args": tuple(value["program"]["args"])})
    cpus, nodes = tuple(value["cpus"]), tuple(value["memory_nodes"])
    return ProcessSpec(**{**value, "program": program, "cpus": cpus, "memory_nodes": nodes})


SEND_S = 10.0  # how long a server may leave a request unread; it is stopped then, and of no use to the job


class ServerProcess:
    """A fork server as a process; one that this process has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def wait_status(self) -> int | None:
        """How it has ended, as waitpid gives it; None when that is not known, or it has not."""
        code = self._process.returncode
        return None if code is None else -code if code < 0 else code << 8

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False when it has not come in time."""
        import subprocess

        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Give up the hold on it, once it has ended."""


class ForkServerHandle:
    """A running fork server. Owned by the agent's event loop."""

    def __init__(
        self,
        process: ServerProcess,
        channel: Channel,
        passing: socket.socket,
        env: Mapping[str, str],
        working_directory: str,
    ) -> None:
        """`passing`: takes the descriptors of `begin`."""
        self.process, self.channel, self._passing = process, channel, passing
        self.pid, self.kill, self.wait, self.receive = process.pid, process.kill, process.wait, channel.receive
        self._env, self._working_directory = dict(env), working_directory

    def send(self, kind: str, **fields: Any) -> None:
        """Send one request; a server that has ended, or takes nothing, is noticed by its closed channel."""
        try:
            self.channel.send({"type": kind, **fields})
        except TimeoutError:
            self.kill()

    def import_early(self, names: Sequence[str]) -> None:
        """Let the server import `module` or `module:name` before it has a job."""
        self.send("import", names=list(names))

    def can_serve(self, env: Mapping[str, str], working_directory: str) -> bool:
        """Return whether the server is as good as one that was started with this environment, in this directory."""
        return working_directory == self._working_directory and self._changes(env).keys() <= SET_LATE

    def begin(
        self,
        env: Mapping[str, str],
        *,
        log_fd: int,
        scheduler_fd: int,
        listener_fd: int,
        open_files: int,
        stopped_limit_s: float = 0.0,
        stdin_fd: int = -1,
    ) -> None:
        """Give the server its job, or the next part of it after `rest`, before anything is started; descriptors are
        closed by the caller. `env`: see `can_serve`. `log_fd`: gets what the server and imported libraries print.
        `scheduler_fd`: the scheduler's end of its channel to the agent. `listener_fd`: listening socket of the store.
        `open_files`: how many files each worker may open. `stopped_limit_s`: how long this process may be stopped by a
        signal before the server ends it; 0 = for ever. `stdin_fd`: what workers with `has_stdin` read; -1 = none."""
        changes = self._changes(env)
        self.send("begin", environment=changes, stopped_limit_s=stopped_limit_s, open_files=open_files)
        self._env = dict(env)
        with contextlib.suppress(OSError):  # a server that has ended is noticed by its closed channel
            more = [stdin_fd] if stdin_fd >= 0 else []
            socket.send_fds(self._passing, [b"f"], [log_fd, scheduler_fd, listener_fd, *more])

    def _changes(self, env: Mapping[str, str]) -> dict[str, str | None]:
        old = self._env
        return {name: env.get(name) for name in old.keys() | env.keys() if old.get(name) != env.get(name)}

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Ask for processes; each answers with a `started` message."""
        self.send("start", processes=encode_record(specs))

    def end(self, limit_s: float) -> None:
        """Wait for the server's end, which is forced after the limit, and let go of it."""
        if not self.wait(limit_s):
            self.kill()
            self.wait(limit_s)
        self.process.close()
        self._passing.close()
        self.channel.close()


def start_fork_server(*, env: Mapping[str, str], working_directory: str, log_fd: int) -> ForkServerHandle:
    """Start a fork server, for `begin`; `log_fd`: gets what it says before (ClusterError: it cannot be started)."""
    import subprocess

    ours, theirs = socket.socketpair()
    ours.settimeout(SEND_S)
    passing, taking = socket.socketpair()
    with theirs, taking:
        fds = (theirs.fileno(), taking.fileno())
        boot = BOOT.format(module="msrun.agent.processes.fork_server")
        argv = [sys.executable, "-c", boot, ROOT, str(fds[0]), str(os.getpid()), str(fds[1])]
        try:
            process = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=working_directory,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=fds,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            passing.close()
            raise ClusterError(f"cannot start the fork server ({sys.executable}): {error.strerror}") from None
    return ForkServerHandle(ServerProcess(process), Channel(ours), passing, env, working_directory)
