"""SshConnector: one SSH connection and one command for each host of a job."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from msrun.errors import ClusterError, UsageError
from msrun.launch.transport.pipe import AgentPipe
from msrun.launch.transport.ssh.fault import SshFault
from msrun.launch.transport.ssh.openssh import Ask, OpenSsh, Questions, own_home
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.spec import NO_CONFIG, SshSettings
from ranktable.files import read_at_most

if TYPE_CHECKING:
    from msrun.launch.transport.ssh.paramiko_client import ParamikoClient

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 3.0
UNCHECKED = (
    "host keys are not checked (--ssh_host_keys off, or StrictHostKeyChecking no in ssh_config): "
    "another host could pass itself off as one of the job's"
)
MAX_KEY_BYTES = 1 << 20


class SshConnector:
    """Opens pipes to agents; `open` may be called by many threads at a time, one for each host."""

    def __init__(self, settings: SshSettings, *, warn: Callable[[str], None], ask: Ask | None = None) -> None:
        """Connect to nothing yet.

        Args:
            warn: told, in one line, what is not refused but should be known.
            ask: asks for a passphrase; None = nobody is asked.

        Raises:
            UsageError: there is no such client, or a file that is named is none of its kind.
        """
        self._settings, self._warn = settings, warn
        self._end = threading.Event()
        for path in settings.identity_files:
            _check_key(path)
        config = settings.config_file
        if config is not None and str(config) != NO_CONFIG and not (config.is_file() and os.access(config, os.R_OK)):
            raise UsageError(f"--ssh_config {config}: is no file that can be read; give an ssh_config, or none")
        self._questions = Questions(ask, warn)
        self._client = _choose_client(settings, self._questions)

    def prepare(self, entries: Iterable[HostEntry]) -> None:
        """Have the configuration read first. Raises UsageError: it cannot be, or says what cannot be done."""
        for entry in list(entries)[:1]:
            if not self._client.check(entry):
                self._warn(UNCHECKED)

    def open(self, entry: HostEntry, command: str, *, deadline: float) -> AgentPipe:
        """Log in on a host and start a command there; where the server hangs up early, again and again.

        Args:
            command: read by the login shell there; see `pipe.agent_command`.
            deadline: of `time.monotonic`; --ssh_connect_time_out may end it earlier.

        Raises:
            ClusterError: one line, with the host, the reason and the remedy.
        """
        deadline = min(deadline, time.monotonic() + self._settings.connect_time_out_s)
        pause, before = FIRST_PAUSE_S, ""
        for tries in itertools.count(1):
            try:
                return self._client.connect(entry, command, lambda: deadline - time.monotonic())
            except SshFault as error:
                fault = error.with_traceback(None)  # which holds on to files
            text = fault.text
            if fault.is_late and before:  # the time ran out in the midst of another try: what went wrong is known
                text = f"{before} (in {tries} tries)"
            elif fault.is_temporary:
                # Those who were dropped together have to part.
                wait = random.uniform(pause / 2, pause)  # noqa: S311
                if wait < deadline - time.monotonic() and not self._end.wait(wait):
                    pause, before = min(2 * pause, LAST_PAUSE_S), text
                    continue
                text += f" (in {tries} {'try' if tries == 1 else 'tries'})"
            break
        place = f" ({fault.place})" if fault.place not in ("", entry.name) else ""
        raise ClusterError(f"{entry.name}{place}: {'called off' if self._end.is_set() else text}")

    def close(self) -> None:
        """End all connections, and those that are being made; from any thread."""
        if not self._end.is_set():
            self._end.set()
            self._questions.call_off()
            self._client.close()


def _choose_client(settings: SshSettings, questions: Questions) -> OpenSsh | ParamikoClient:
    program = shutil.which("ssh") or ""
    if settings.client == "openssh" and not program:
        raise UsageError("--ssh_client openssh: there is no ssh on PATH; install OpenSSH's client, or give paramiko")
    if settings.client == "openssh" or (settings.client == "auto" and program and own_home() is not None):
        return OpenSsh(program, settings, questions)
    from msrun.launch.transport.ssh.paramiko_client import ParamikoClient

    return ParamikoClient(settings, questions)


def _check_key(path: Path) -> None:
    try:
        text = read_at_most(path, MAX_KEY_BYTES).decode("ascii", "replace")
        problem = (
            "" if "PRIVATE KEY-----" in text or text.startswith(("ssh-", "ecdsa-", "sk-")) else "is no private key"
        )
    except OSError as error:
        problem = error.strerror or "cannot be read"
    if problem:
        raise UsageError(f"--ssh_identity {path}: {problem}; give the file of a private key")
