"""An agent's own folder on its host: logs on their way to the launcher, the job's records there, its socket.

Who comes to that host again runs `attach` where the agent lives, and `salvage` where it is lost."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from msrun import contract
from msrun.agent.own_file import open_own_file, socket_address
from msrun.agent.processes.process_control import (
    POLL_S,
    SERVER_END_S,
    Pid,
    marked_processes,
    signal_processes,
    start_time,
)
from msrun.cluster.messages import encode_message
from msrun.errors import ClusterError
from msrun.launch.directory.log_directory import write_private
from msrun.launch.remote.logs import PIECE_BYTES, pack_piece
from msrun.launch.transport.pipe import MARKER, READ_BYTES

SOCKET = "agent.sock"
AGENT = "agent.pid"  # process id and start time of the agent, so that nobody else is taken for it
GIVEN_TABLE = "given_rank_table.json"
KEEP_S = 86400.0  # how long logs that nobody has fetched stay after the end of their agent
_NAME = re.compile(r"msrun-spool-[0-9a-f-]+-\d+")


def spool_path(job_id: str, number: int) -> Path:
    """Return where the folder is; another process of the same user and host finds it by the job alone."""
    return Path(tempfile.gettempdir(), f"msrun-spool-{job_id}-{number}")


def make_spool(job_id: str, number: int) -> tuple[Path, int]:
    """Make the folder, for its owner alone, and return it with a descriptor that marks it as in use, in all PID
    namespaces, until that or its process ends. Raises ClusterError: it cannot be made, or is there already, which a
    stranger may have done."""
    path = spool_path(job_id, number)
    try:
        path.mkdir(mode=contract.DIRECTORY_MODE)
        write_private(path / AGENT, f"{os.getpid()} {start_time(os.getpid())}\n")
        folder = _open_folder(path)
    except OSError as error:
        raise ClusterError(f"cannot make {path} ({error.strerror}); set TMPDIR there to another folder") from None
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return path, folder


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def remove_old_spools(now_s: float) -> None:
    """Remove the user's own spools that agents left behind, once nothing in them has changed for KEEP_S."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for path in [Path(entry.path) for entry in entries if _NAME.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                if _is_left_behind(path, now_s):
                    remove_spool(path)


def _is_left_behind(path: Path, now_s: float) -> bool:
    folder = _open_folder(path)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return False
        changed = [os.fstat(folder), *(entry.stat(follow_symlinks=False) for entry in os.scandir(folder))]
        if now_s - max(found.st_mtime for found in changed) < KEEP_S:
            return False
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    finally:
        os.close(folder)


def listen_in(spool: Path) -> socket.socket:
    """Return the listening socket of a folder. Raises ClusterError: it cannot be made."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.settimeout(0.0)
    try:
        with contextlib.suppress(FileNotFoundError):
            (spool / SOCKET).unlink()
        with socket_address(spool / SOCKET) as name:
            listener.bind(name)
        listener.listen(4)
    except OSError as error:
        listener.close()
        raise ClusterError(f"cannot listen in {spool} ({error.strerror}); set TMPDIR there to another folder") from None
    return listener


def connect_in(spool: Path) -> socket.socket:
    """Return a connection to whoever listens in a folder. Raises OSError: nobody does."""
    stream = socket.socket(socket.AF_UNIX)
    try:
        with socket_address(spool / SOCKET) as name:
            stream.connect(name)
    except OSError:
        stream.close()
        raise
    return stream


def kill_agent(spool: Path) -> bool:
    """Kill the agent of a folder, which may be stopped, or hang; whether it ran. What was below it ends itself."""
    try:
        pid, started = (int(word) for word in (spool / AGENT).read_text().split())
    except (OSError, ValueError):
        return False
    if not started or start_time(pid) != started:
        return False
    signal_processes([Pid(pid, started)], signal.SIGKILL)
    return True


def remove_spool(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


NO_AGENT = 69  # exit status when there is nothing to connect to; EX_UNAVAILABLE of sysexits.h


def attach(job_id: str, number: int) -> None:
    """Pass bytes between stdin and stdout and the socket of an agent that runs, until one side closes."""
    try:
        agent = connect_in(spool_path(job_id, number))
    except OSError as error:
        sys.stderr.write(f"msrun agent: no agent of this job runs here any more ({error.strerror})\n")
        os._exit(NO_AGENT)
    with selectors.PollSelector() as selector:  # epoll refuses a stdin that is a plain file
        for source in (0, agent):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = agent.recv(READ_BYTES) if key.fileobj is agent else os.read(0, READ_BYTES)
                if not data:
                    os._exit(0)
                _write(data) if key.fileobj is agent else agent.sendall(data)


def salvage(job_id: str, number: int, offsets: Mapping[str, int]) -> None:
    """End a lost agent that is only stopped, write what is missing of its logs to stdout, and remove its folder.
    `offsets` are how many bytes of each log are at home."""
    spool = spool_path(job_id, number)
    if kill_agent(spool):
        end = time.monotonic() + SERVER_END_S
        while marked_processes(job_id) and time.monotonic() < end:  # its fork server ends what is below it
            time.sleep(POLL_S)
    with contextlib.suppress(BrokenPipeError):  # the launcher has gone: the logs stay for another one
        _write(MARKER)
        for name, offset in offsets.items():
            _send_log(spool / name, offset)
        remove_spool(spool)
    os._exit(0)


def _send_log(path: Path, offset: int) -> None:
    try:
        file = os.fdopen(open_own_file(path, os.O_RDONLY), "rb")
    except OSError:  # it was never made
        return
    with file:
        file.seek(offset)
        while data := file.read(PIECE_BYTES):
            _write(encode_message(pack_piece(path.name, None, data)))


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
