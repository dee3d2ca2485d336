"""SshConnector: one SSH connection and one command for each host of a job.

The system's ssh is a child; its standard streams are the way to the agent. What it wants to know is asked at the
terminal, each thing once for all hosts: SSH_ASKPASS of its processes.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import pwd
import random
import shutil
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msrun.errors import ClusterError, UsageError
from msrun.launch.transport.pipe import AgentPipe, ChildPipe
from msrun.launch.transport.ssh.login import HOST_KEYS, Ask, Questions, SshFault, address_of, explain_end, split_log
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.spec import NO_CONFIG, SshSettings
from ranktable.files import read_at_most

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 3.0
UNCHECKED = (
    "host keys are not checked (--ssh_host_keys off, or StrictHostKeyChecking no in ssh_config): "
    "another host could pass itself off as one of the job's"
)
MAX_KEY_BYTES = 1 << 20
END_S = 2.0
FAILED = 255  # exit status of an ssh that has not logged in, or whose connection broke
CHECK_S = 30.0  # for reading ssh_config, whose Match exec may run commands


class SshConnector:
    """Opens pipes to agents, one ssh for each host; `open` may be called by many threads at a time."""

    def __init__(self, settings: SshSettings, *, warn: Callable[[str], None], ask: Ask | None = None) -> None:
        """Connect to nothing yet.

        Args:
            warn: told, in one line, what is not refused but should be known.
            ask: asks for a passphrase; None = nobody is asked.

        Raises:
            UsageError: there is no ssh, or a file that is named is none of its kind.
        """
        self._settings, self._warn = settings, warn
        self._program = shutil.which("ssh") or ""
        if not self._program:
            raise UsageError("there is no ssh on PATH, which other hosts are reached by; install OpenSSH's client")
        if own_home() is None:
            raise UsageError(f"ssh needs a name for user {os.getuid()}, who has none here; add one to /etc/passwd")
        for path in settings.identity_files:
            _check_key(path)
        config = settings.config_file
        if config is not None and str(config) != NO_CONFIG and not (config.is_file() and os.access(config, os.R_OK)):
            raise UsageError(f"--ssh_config {config}: is no file that can be read; give an ssh_config, or none")
        self._end, self._lock = threading.Event(), threading.Lock()
        self._pipes: weakref.WeakSet[SshPipe] = weakref.WeakSet()
        self._questions = Questions(ask, warn)
        self._config = os.memfd_create("ssh_config", os.MFD_CLOEXEC)  # a file that is gone with the launcher
        self._write_config()

    def prepare(self, entries: Iterable[HostEntry]) -> None:
        """Have the configuration read first. Raises UsageError: it cannot be, or says what cannot be done."""
        for entry in list(entries)[:1]:
            if not self._check(entry):
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
                return self._connect(entry, command, lambda: deadline - time.monotonic())
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
        with self._lock:
            if self._end.is_set():
                return
            self._end.set()
            pipes = list(self._pipes)
        self._questions.close()
        for pipe in pipes:
            pipe.kill()  # all at once
        for pipe in pipes:
            pipe.close()
        os.close(self._config)

    def _check(self, entry: HostEntry) -> bool:
        """Return whether host keys are checked. Raises UsageError: ssh cannot read its configuration."""
        words = [*self._words(entry), "-G", "--", entry.name]
        try:
            done = subprocess.run(
                words, input=b"", capture_output=True, timeout=CHECK_S, check=False, env=self._environment()
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"ssh_config: reading it takes more than {CHECK_S:g} s; see its Match exec") from None
        if done.returncode:
            said = split_log(done.stderr.decode(errors="backslashreplace"))[1].splitlines() or ["ssh cannot read it"]
            raise UsageError(f"ssh_config: {said[0]}; correct it, or name another file by --ssh_config")
        found = dict(line.split(" ", 1) for line in done.stdout.decode(errors="replace").splitlines() if " " in line)
        last = []
        if found.get("kexalgorithms", "").startswith("sntrup761"):  # 60 ms of a processor for each host
            last.append("KexAlgorithms ^curve25519-sha256")
        home = Path("~/.ssh").expanduser()
        if found.get("identityfile", "").startswith("~/.ssh/id_") and home.parent != own_home():  # the usual ones
            keys = (home / f"id_{kind}" for kind in ("rsa", "ecdsa", "ed25519"))
            last += [f"IdentityFile {_quoted(path)}" for path in keys if path.exists()]
        self._write_config(*last)
        return found.get("stricthostkeychecking") not in ("no", "off", "false")

    def _connect(self, entry: HostEntry, command: str, time_left: Callable[[], float]) -> SshPipe:
        """Log in and start a command; what the user is asked takes none of the time. Raises SshFault: that failed."""
        seconds, waited = time_left(), self._questions.waited_s()
        pipe = self._start(entry, command)
        end = os.pidfd_open(pipe.process.pid)
        try:
            has_begun = pipe.wait_for_login(lambda: time_left() + self._questions.waited_s() - waited, end)
            if has_begun is None:
                raise explain_end(pipe.log(), max(0.0, seconds))
            if not has_begun and pipe.exit_status is None:
                raise explain_end(pipe.log())
        except BaseException:
            pipe.close()
            raise
        finally:
            os.close(end)
        pipe.address = address_of(pipe.log())
        return pipe

    def _start(self, entry: HostEntry, command: str) -> SshPipe:
        try:
            pipe = SshPipe([*self._words(entry), "--", entry.name, command], self._environment())
        except OSError as error:
            raise SshFault(f"{self._program} cannot be started ({error.strerror})") from None
        with self._lock:
            self._pipes.add(pipe)
            if not self._end.is_set():
                return pipe
        pipe.close()
        raise SshFault("called off")

    def _environment(self) -> Mapping[str, str] | None:
        return {**os.environ, **more} if (more := self._questions.environment()) else None

    def _words(self, entry: HostEntry) -> list[str]:
        """Return the command, but for host and command; what holds for jump hosts, too, is in the file."""
        user, port = entry.user or self._settings.user, entry.port or self._settings.port
        given = [*(["-l", user] if user else []), *(["-p", str(port)] if port else [])]
        options = ("ControlMaster=no", "ClearAllForwardings=yes", "PermitLocalCommand=no", "RemoteCommand=none")
        words = [self._program, "-F", f"/proc/{os.getpid()}/fd/{self._config}", "-v", "-T", "-a", "-x"]
        return [*words, *(f"-o{option}" for option in options), *given]

    def _write_config(self, *last: str) -> None:
        """Write what ssh reads: our own first, then the user's, then defaults, for what is said first holds."""
        settings, home = self._settings, Path("~").expanduser()
        first = ["PasswordAuthentication no", "KbdInteractiveAuthentication no"]
        first += [] if self._questions.environment() else ["BatchMode yes"]
        if settings.host_keys:
            first.append(f"StrictHostKeyChecking {HOST_KEYS[settings.host_keys]}")
        if settings.host_keys == "off":
            first.append("UserKnownHostsFile /dev/null")
        first += [f"IdentityFile {_quoted(path)}" for path in settings.identity_files]
        first += ["IdentitiesOnly yes"] if settings.identity_files else []
        files = [home / ".ssh" / "config", Path("/etc/ssh/ssh_config")]
        if settings.config_file is not None:
            files = [] if str(settings.config_file) == NO_CONFIG else [settings.config_file]
        user = [f"Include {_quoted(glob.escape(str(path.absolute())))}\nMatch all" for path in files]
        defaults = ["StrictHostKeyChecking yes", "ServerAliveInterval 5", *last]
        if home != own_home():
            own = home / ".ssh"
            if settings.host_keys == "accept-new":  # ssh makes its own folder only
                own.mkdir(mode=0o700, parents=True, exist_ok=True)
            defaults.append(f"UserKnownHostsFile {_quoted(own / 'known_hosts')} {_quoted(own / 'known_hosts2')}")
        os.truncate(self._config, 0)
        os.pwrite(self._config, "\n".join([*first, *user, *defaults, ""]).encode(errors="surrogateescape"), 0)


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


class SshPipe(ChildPipe):
    """A running ssh; see `AgentPipe`."""

    _last_log = ""

    @property
    def exit_status(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(END_S)
            return status if 0 <= status < FAILED else None
        return None

    def stderr_text(self) -> str:
        return split_log(self.log())[1]

    def log(self) -> str:
        return super().stderr_text() or self._last_log

    def kill(self) -> None:
        """End it at once, with what it has started as a way to the host; from any thread, `close` has to follow."""
        with contextlib.suppress(OSError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGTERM)

    def close(self) -> None:
        self.kill()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._socket.close()
        self._last_log = self.log()
        self._stderr.close()


def own_home() -> Path | None:
    """Return the home directory that ssh goes by; None where this user has no name, without which ssh does nothing."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def _quoted(path: Path | str) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'
