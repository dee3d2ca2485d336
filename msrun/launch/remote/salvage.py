"""What a lost agent has left on its host: a stopped one is ended, its logs go home, then its folder goes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from msrun.agent.logs.own_file import open_own_file
from msrun.agent.logs.rotated_log import rotated_path
from msrun.agent.processes.job_mark import SERVER_END_S, marked_processes
from msrun.agent.processes.process_control import POLL_S
from msrun.cluster.messages import Message, encode_message
from msrun.launch.remote.log_sender import PIECE_BYTES, pack_piece
from msrun.launch.remote.spool import kill_agent, remove_spool, spool_path
from msrun.launch.transport.pipe import MARKER


def main(job_id: str, number: int, offsets: Mapping[str, int]) -> None:
    """Write what is missing to stdout.

    A log that is rotated is left where it is: how much of it has gone home cannot be told any more.

    Args:
        offsets: names of the logs, and how many bytes of each are at home.
    """
    spool = spool_path(job_id, number)
    if kill_agent(spool):
        end = time.monotonic() + SERVER_END_S
        while marked_processes(job_id) and time.monotonic() < end:  # its fork server ends what is below it
            time.sleep(POLL_S)
    with contextlib.suppress(BrokenPipeError):  # the launcher has gone: the logs stay for another one
        _write(MARKER)
        is_whole = [_send_log(spool / name, offset) for name, offset in offsets.items()]
        if all(is_whole):
            remove_spool(spool)
    os._exit(0)


def _send_log(path: Path, offset: int) -> bool:
    """Send what is missing; return whether all of the log is at home then."""
    if os.path.lexists(rotated_path(str(path), 1)):
        return False
    _send(path, offset)
    return True


def _send(path: Path, offset: int) -> None:
    try:
        file = os.fdopen(open_own_file(path, os.O_RDONLY), "rb")
    except OSError:  # it was never made
        return
    with file:
        file.seek(offset)
        while data := file.read(PIECE_BYTES):
            message: Message = pack_piece(path.name, None, data)
            _write(encode_message(message))


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
