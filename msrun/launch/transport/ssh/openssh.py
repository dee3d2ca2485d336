"""OpenSsh: the system's ssh as a child; its standard streams are the way to the agent."""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from msrun.errors import UsageError
from msrun.launch.transport.pipe import ChildPipe
from msrun.launch.transport.ssh.askpass import AskPass, Questions
from msrun.launch.transport.ssh.fault import SshFault, address_of, explain_end, split_log
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.spec import NO_CONFIG, SshSettings

END_S = 2.0
FAILED = 255
"""Exit status of an ssh that has not logged in, or whose connection broke."""
CHECK_S = 30.0
"""For reading ssh_config, whose Match exec may run commands."""
HOST_KEYS = {"strict": "yes", "accept-new": "accept-new", "off": "no"}


class SshPipe(ChildPipe):
    """A running ssh; see `AgentPipe`."""

    _last_log = ""

    @property
    def exit_status(self) -> int | None:
        """The agent's exit status, 128 + N for signal N; None while it runs, or when the connection broke."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(END_S)
            return status if 0 <= status < FAILED else None
        return None

    def stderr_text(self) -> str:
        """Return the end of what agent and shell wrote to stderr."""
        return split_log(self.log())[1]

    def log(self) -> str:
        """Return the end of stderr, with what ssh itself wrote."""
        return super().stderr_text() or self._last_log

    def kill(self) -> None:
        """End it at once, with what it has started as a way to the host; from any thread, `close` has to follow."""
        with contextlib.suppress(OSError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGTERM)

    def close(self) -> None:
        """End the connection; on that, the agent ends."""
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


class OpenSsh:
    """Starts one ssh for each host; `connect` is for many threads at a time."""

    def __init__(self, program: str, settings: SshSettings, questions: Questions) -> None:
        """Start nothing yet."""
        self._program, self._settings, self._questions = program, settings, questions
        self._lock = threading.Lock()
        self._pipes: weakref.WeakSet[SshPipe] = weakref.WeakSet()
        self._is_closed = False
        self._ask_pass = AskPass(questions) if questions.ask else None
        self._config = os.memfd_create("ssh_config", os.MFD_CLOEXEC)  # a file that is gone with the launcher
        self._write_config()

    def check(self, entry: HostEntry) -> bool:
        """Have ssh read its configuration for a host, and return whether host keys are checked.

        Raises:
            UsageError: it cannot be read or understood.
        """
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

    def connect(self, entry: HostEntry, command: str, time_left: Callable[[], float]) -> SshPipe:
        """Log in and start a command.

        Args:
            time_left: seconds; what the user is asked takes none of them.

        Raises:
            SshFault: that failed.
        """
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

    def close(self) -> None:
        """End all; once."""
        with self._lock:
            self._is_closed = True
            pipes = list(self._pipes)
        if self._ask_pass:
            self._ask_pass.close()
        for pipe in pipes:
            pipe.kill()  # all at once
        for pipe in pipes:
            pipe.close()
        os.close(self._config)

    def _start(self, entry: HostEntry, command: str) -> SshPipe:
        try:
            pipe = SshPipe([*self._words(entry), "--", entry.name, command], self._environment())
        except OSError as error:
            raise SshFault(f"{self._program} cannot be started ({error.strerror})") from None
        with self._lock:
            self._pipes.add(pipe)
            is_late = self._is_closed
        if is_late:
            pipe.close()
            raise SshFault("called off")
        return pipe

    def _environment(self) -> Mapping[str, str] | None:
        return {**os.environ, **self._ask_pass.environment()} if self._ask_pass else None

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
        first += [] if self._ask_pass else ["BatchMode yes"]
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


def own_home() -> Path | None:
    """Return the home directory that ssh goes by; None where this user has no name, without which ssh does nothing."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def _quoted(path: Path | str) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'
