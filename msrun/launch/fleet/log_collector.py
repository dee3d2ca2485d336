"""Logs of all hosts in the launcher's log directory: pieces that come over the network, appended to their files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from msrun import contract
from msrun.agent.logs.own_file import create_own_file, open_own_file
from msrun.agent.logs.rotated_log import LogRotation, RotatedLog, rename_log
from msrun.cluster.messages import Message
from msrun.errors import ClusterError, describe_limit
from msrun.launch.directory.log_directory import record_fault
from msrun.launch.remote.log_sender import is_of_job, unpack_piece

_FILLED_IN = r"[A-Za-z0-9._:-]+(?<!\.attempt)"
"""What a host may put in the place of {ip} or {hostname}; never the name of another rank's earlier attempt."""


def own_logs(
    stem: str, ranks: Mapping[int, Collection[int]], servers: int = 0, home: int = 0
) -> dict[int, re.Pattern[str]]:
    """Return what logs each host may write are called.

    Args:
        stem: of --worker_log_name.
        ranks: node_rank -> global ranks there.
        servers: parameter servers of the job; the hosts take turns.
        home: the node rank of the host with the scheduler.
    """
    words = re.split(r"\{ip\}|\{hostname\}", stem)
    start = _FILLED_IN.join(re.escape(word) for word in words)
    found = {}
    for node_rank, own in ranks.items():
        parts = (contract.trace_file_name, contract.flight_recorder_name)
        traces = (re.escape(name(rank)) for rank in own for name in parts)
        of_servers = (re.escape(f"{contract.server_name(i)}.log") for i in range(node_rank, servers, len(ranks)))
        names = "|".join([f"{start}_(?:{'|'.join(map(str, own))})(?:\\.stderr)?\\.log", *traces, *of_servers])
        found[node_rank] = re.compile(names if node_rank != home else f"{names}|{re.escape(contract.SCHEDULER_LOG)}")
    return found


class PlainLog:
    """One log that is not rotated."""

    def __init__(self, path: Path, *, goes_on: bool = False) -> None:
        """`goes_on`: what is in the file stays."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._descriptor = open_own_file(path, flags) if goes_on else create_own_file(path)

    def write(self, data: bytearray, count: int) -> None:
        """Append the first `count` bytes."""
        left = memoryview(data)[:count]
        while left:
            left = left[os.write(self._descriptor, left) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class LogCollector:
    """Of one thread; each log comes from one host."""

    def __init__(
        self,
        folder: Path,
        rotation: LogRotation | None,
        own: Mapping[int, re.Pattern[str]],
        max_restarts: int = 0,
        first_attempt: int = 0,
    ) -> None:
        """`rotation`: None = logs are not rotated; `own`: from `own_logs`."""
        self._folder = folder
        self._own = own
        self._max_attempt = max_restarts
        self._first_attempt = first_attempt
        self._rotation = rotation
        self._logs: dict[str, tuple[int, PlainLog | RotatedLog]] = {}  # name -> attempt and file
        self._sizes: dict[str, int] = {}
        self._names: dict[int, frozenset[str]] = {}
        self._has_recorded = False
        """`scheduler.log` holds a fault already, which may come before its host has said what it will run."""
        self.fault = ""
        """Why logs are not complete: the first error of the disk; empty when they are."""

    def take(self, node_rank: int, host: str, message: Message) -> bool:
        """Take what a message of a host has for the log directory; whether that is all of it. `host`: its name, for
        errors. Raises ClusterError: its logs cannot be opened here.
        """
        if message.get("traceback"):
            self.record_fault(f"{host}: {message.get('text')}", str(message["traceback"]))
        if message["type"] == "log":
            self.write(node_rank, message)
            return True
        if message["type"] == "planned":
            try:
                self.expect(node_rank, [str(name) for name in message["logs"]])
            except OSError as error:
                raise ClusterError(f"cannot open the logs of {host} here: {describe_limit(error)}") from None
        return False

    def is_own(self, node_rank: int, name: str) -> bool:
        """Return whether a host may write, and speak of, a log of this name."""
        return self._own[node_rank].fullmatch(name) is not None

    def expect(self, node_rank: int, names: Collection[str]) -> None:
        """Make empty logs of these names, as far as they are of this host; what it names later does not count.

        Raises:
            OSError: a file cannot be made.
        """
        if node_rank in self._names:
            return
        self._names[node_rank] = frozenset(name for name in names if self.is_own(node_rank, name))
        for name in self._names[node_rank]:
            self._logs[name], self._sizes[name] = (0, self._open(name)), 0

    def sizes(self, node_rank: int) -> dict[str, int]:
        """Return how many bytes of the newest log of each name have come from a host."""
        return {name: self._sizes[name] for name in self._names.get(node_rank, ())}

    def _open(self, name: str) -> PlainLog | RotatedLog:
        path = self._folder / name
        if self._rotation is None or is_of_job(name):
            return PlainLog(path, goes_on=self._has_recorded and name == contract.SCHEDULER_LOG)
        os.close(create_own_file(path))
        return RotatedLog(str(path), self._rotation)

    def write(self, node_rank: int, message: Message) -> None:
        """Append a piece. A full disk loses what does not fit, is remembered in `fault`, and stops nobody."""
        name, attempt = str(message.get("name")), message.get("attempt")
        if name not in self._names.get(node_rank, ()):
            return
        attempt = self._logs[name][0] if attempt is None else attempt
        if type(attempt) is not int or not 0 <= attempt <= self._max_attempt:
            return
        try:
            data = bytearray(unpack_piece(message))
            self._log(name, attempt).write(data, len(data))
            self._sizes[name] += len(data)
        except OSError as error:
            self.fault = self.fault or f"{self._folder / name}: {error.strerror}"
        except ValueError as error:
            self.fault = self.fault or f"{self._folder / name}: {error}"

    def _log(self, name: str, attempt: int) -> PlainLog | RotatedLog:
        """Return the file of an attempt; the logs of the one before are renamed as on the host."""
        current, log = self._logs[name]
        if attempt > current and not is_of_job(name):
            path = self._folder / name
            log.close()
            rename_log(str(path), str(path.with_name(contract.attempt_log_name(name, self._first_attempt + current))))
            log = self._open(name)
            self._logs[name], self._sizes[name] = (attempt, log), 0
        return log

    def record_fault(self, what: str, trace: str) -> None:
        """Keep the traceback of a fault of msrun itself, here or on a host; `what` is one line. For any thread."""
        self._has_recorded = True
        record_fault(self._folder, what, trace)

    def close(self) -> None:
        """Close all files."""
        for _, log in self._logs.values():
            log.close()
        self._logs.clear()
        self._names.clear()
