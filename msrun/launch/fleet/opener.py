"""How each host of a job is reached: over SSH, or as a child process where it is this host, or in a rehearsal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping

from msrun.agent.processes.process_control import raise_open_files, set_open_files
from msrun.launch.job_hosts import is_this_host
from msrun.launch.rehearsal import check_addresses, share_machine
from msrun.launch.transport.agent_code import AgentCode, attach_code, pack_msrun, salvage_code, start_code
from msrun.launch.transport.pipe import AgentPipe, LocalPipe, agent_argv, agent_command
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.spec import LaunchSpec


class HostOpener:
    """Opens pipes to agents, from any thread. `close` it in the end."""

    def __init__(self, spec: LaunchSpec, job_id: str, warn: Callable[[str], None]) -> None:
        """
        Args:
            warn: told what is not refused but should be known.

        Raises:
            UsageError: ssh_config cannot be read, or says what cannot be done; or a rehearsal has too few devices.
            ClusterError: an address of a rehearsal does not answer.
        """
        self._spec = spec
        self._job_id = job_id
        self._shares = share_machine(spec, os.environ) if spec.is_rehearsal else {}
        check_addresses(tuple(self._shares))
        entries = (*spec.host_entries, *spec.spares)
        self._local = {entry for entry in entries if entry.is_rehearsed or entry.has_come or is_this_host(entry)}
        self._shipped = pack_msrun() if spec.ship else ""
        self._connector = None
        if len(self._local) < len(entries):
            from msrun.launch.transport.ssh.askpass import ask_at_terminal
            from msrun.launch.transport.ssh.connector import SshConnector

            self._connector = SshConnector(spec.ssh, warn=warn, ask=ask_at_terminal if sys.stdin.isatty() else None)
            self._connector.prepare(entry for entry in entries if entry not in self._local)
        self._open_files = raise_open_files()

    def can_resume(self, entry: HostEntry) -> bool:
        """Return whether a broken connection may be replaced; the pipe of this host breaks with its agent alone."""
        return entry.is_rehearsed or entry not in self._local

    def open(self, entry: HostEntry, deadline: float | None) -> AgentPipe:
        """Return a pipe to a new process on a host.

        Args:
            deadline: moment of `time.monotonic`; None = the usual time from now.

        Raises:
            ClusterError: it cannot be reached; the message names the host.
        """
        interpreter = entry.python or sys.executable
        if self._connector is None or entry in self._local:
            return LocalPipe(agent_argv(interpreter), "", self._shares.get(entry), self._open_files)
        end = time.monotonic() + self._spec.ssh.connect_time_out_s if deadline is None else deadline
        return self._connector.open(entry, agent_command(interpreter), deadline=end)

    def code(
        self, entry: HostEntry, environment: Mapping[str, str], number: int, sizes: Callable[[], Mapping[str, int]]
    ) -> AgentCode:
        """Return what the interpreter there runs.

        Args:
            number: of the agent among all of the job.
            sizes: how much of its logs is here.
        """
        shipped = "" if entry in self._local else self._shipped
        code = attach_code(environment, self._job_id, number, shipped)
        attach = code if self.can_resume(entry) else b""

        def salvage() -> bytes:
            return salvage_code(environment, self._job_id, number, sizes(), shipped)

        return AgentCode(start_code(environment, shipped), attach, salvage)

    def close(self) -> None:
        """End all connections, those that are being made, too."""
        set_open_files(self._open_files)
        if self._connector is not None:
            self._connector.close()
