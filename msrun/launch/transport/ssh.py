"""Hosts over SSH: one connection and one command for each host of a job; why one was not reached, from `ssh -v`.

The system's ssh is a child; its standard streams are the way to the agent. It asks nothing: keys with a passphrase are
those of ssh-agent.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import pwd
import random
import re
import shutil
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from msrun.errors import ClusterError, UsageError
from msrun.launch.transport.pipe import AgentPipe, ChildPipe
from msrun.planning.hosts import HostEntry
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

    def __init__(self, settings: SshSettings, *, warn: Callable[[str], None]) -> None:
        """`warn`: told, in a line, what should be known (UsageError: there is no ssh, or a file is of another kind)."""
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
        self._config = os.memfd_create("ssh_config", os.MFD_CLOEXEC)  # a file that is gone with the launcher
        self._write_config()

    def prepare(self, entry: HostEntry) -> None:
        """Have the configuration read first, for one host. Raises UsageError: it cannot be, or says what cannot be."""
        if not self._check(entry):
            self._warn(UNCHECKED)

    def open(self, entry: HostEntry, command: str, *, deadline: float) -> AgentPipe:
        """Log in on a host and start a command there; where the server hangs up early, again and again. `command`: read
        by the login shell there; see `agent_command`. `deadline`: of `time.monotonic`; --ssh_connect_time_out may
        end it earlier. Raises ClusterError: one line, with the host, the reason and the remedy."""
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
        for pipe in pipes:
            pipe.kill()  # all at once
        for pipe in pipes:
            pipe.close()
        os.close(self._config)

    def _check(self, entry: HostEntry) -> bool:
        """Return whether host keys are checked. Raises UsageError: ssh cannot read its configuration."""
        words = [*self._words(entry), "-G", "--", entry.name]
        try:
            done = subprocess.run(words, input=b"", capture_output=True, timeout=CHECK_S, check=False)
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
        """Log in and start a command. Raises SshFault: that failed."""
        seconds = time_left()
        pipe = self._start(entry, command)
        end = os.pidfd_open(pipe.process.pid)
        try:
            has_begun = pipe.wait_for_login(time_left, end)
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
            pipe = SshPipe([*self._words(entry), "--", entry.name, command])
        except OSError as error:
            raise SshFault(f"{self._program} cannot be started ({error.strerror})") from None
        with self._lock:
            self._pipes.add(pipe)
            if not self._end.is_set():
                return pipe
        pipe.close()
        raise SshFault("called off")

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
        first = ["PasswordAuthentication no", "KbdInteractiveAuthentication no", "BatchMode yes"]
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


HOST_KEYS = {"strict": "yes", "accept-new": "accept-new", "off": "no"}


class SshFault(Exception):
    """One line without the host's name: what happened, and the remedy."""

    def __init__(self, text: str, *, is_temporary: bool = False, is_late: bool = False) -> None:
        """`is_temporary`: another try a moment later may go well; `is_late`: there is no time for one."""
        super().__init__(text)
        self.text, self.is_temporary, self.is_late = text, is_temporary, is_late
        self.place = ""  # what was connected to, where that is known


DEFAULT_PORT = 22
BUSY = (
    "the server has hung up before it said who it is: too many logins at a time (MaxStartups of sshd), or it refuses "
    "this address"
)
LATE = (
    "no login within {:.1f} s: the host or its sshd hangs, or is slow; log in with ssh -v, or raise "
    "--ssh_connect_time_out"
)
UNKNOWN = (
    "host key {} is unknown: {} is not in known_hosts{}; compare it and log in once with ssh, or give --ssh_host_keys "
    "accept-new"
)
CHANGED = "HOST KEY HAS CHANGED: it is {}, but {}: another host answers, or it was set up anew; if that is so: {}"
TOO_MANY = (
    "the server has hung up; after MaxAuthTries keys it does: name one with --ssh_identity, or by IdentityFile and "
    "IdentitiesOnly yes in ssh_config"
)
NO_SERVER = "what answers there is no SSH server; is it the right port?"
NO_COMMAND = "the server starts no command; see ForceCommand and the shell of the user"
REASONS = {  # by the words of `strerror`
    "Connection refused": "connection refused: nothing listens there; is sshd running, and is it this port?",
    "Connection timed out": "does not answer; is the host up, and does a firewall let SSH through?",
    "No route to host": "no route to the host; is it up, and in a network that this one reaches?",
    "Network is unreachable": "its network is unreachable from here; see ProxyJump in ssh_config",
}
_ENDS = (
    (r"no matching (.*) found\. Their offer: (.*)", "server and ssh have no {} in common; the server's: {}"),
    (
        r"Could not resolve hostname (\S+): (.*)",
        "the name {} cannot be resolved ({}); give an address, or see HostName",
    ),
    (
        r"open failed: (.*)\nstdio forwarding failed",
        "the jump host does not reach it ({}); is it up, and does the jump host forward (AllowTcpForwarding)?",
    ),
    (r"(?:exec|shell) request failed", NO_COMMAND),
    (r"channel \d+: open failed: (.*?):", "the server opens no session ({})"),
)
_HANG_UP = r"Connection (closed|reset) by|Connection to .* closed|_exchange_identification|Broken pipe"
_DEBUG = re.compile(r"debug\d: ")
_CHATTER = re.compile(  # lines of `ssh -v` that are neither an error nor from the host
    r"OpenSSH_|Authenticated |Transferred: sent|Bytes per second|Killed by signal|Warning: Permanently added|\*\* "
    r"|Warning: Identity file"
)


def split_log(text: str) -> tuple[str, str]:
    """Return what ssh wrote to stderr as its messages of -v, and all else: errors, and what the host wrote."""
    text = re.sub(r"(?<=[^\n])(debug\d: )", r"\n\1", text)  # what the host wrote may end within a line
    lines = [line.rstrip("\r") for line in text.split("\n")]
    debug = [_DEBUG.sub("", line, count=1) for line in lines if _DEBUG.match(line) or _CHATTER.match(line)]
    said = [line for line in lines if line.strip() and not _DEBUG.match(line) and not _CHATTER.match(line)]
    return "\n".join(debug), "\n".join(said)


def address_of(text: str) -> str:
    """Return the numeric address that a login of `ssh -v` went to; empty when a jump host or a command led there."""
    found = re.findall(r"^Authenticated to .*?\((?:\[(.*?)\]:\d+|via proxy)\)", text, re.MULTILINE)
    return found[-1].partition("%")[0].removeprefix("::ffff:") if found else ""


def explain_end(text: str, late_s: float | None = None) -> SshFault:
    """Return why ssh did not log in, from the stderr of `ssh -v`; `late_s`: it was ended after so long."""
    log, said = split_log(text)
    connected = re.findall(r"^Connecting to (\S+) .*port (\d+)\.", log, re.MULTILINE)
    behind = re.search(r"^Executing proxy command: .*-W '?\[(.*?)\]:(\d+)", log, re.MULTILINE)
    host, port = behind.groups() if behind else connected[-1] if connected else ("", "")
    fault = _explain(log, said) if late_s is None else SshFault(_explain_delay(log, late_s), is_late=True)
    if behind and "stdio forwarding failed" not in said:
        jump = _authenticating(_stage(log))[0] or ("" if _stage(log) != log or not connected else connected[-1][0])
        if jump not in ("", host):
            fault.text = f"jump host {jump}: {fault.text}"
    fault.place = host if port in ("", str(DEFAULT_PORT)) else f"{host} port {port}"
    return fault


def _stage(log: str) -> str:
    """Return what was said since the last login that went well: of this one, and not of a jump host before."""
    return log.rpartition("\nAuthenticated to ")[2]


def _authenticating(log: str) -> tuple[str, str]:
    found = re.findall(r"^Authenticating to (\S+):\d+ as '(.*)'", log, re.MULTILINE)
    return found[-1] if found else ("", "")


def _explain_delay(log: str, seconds: float) -> str:
    if not re.search("Executing proxy command|Connecting to |mux", log):
        return "its name is not resolved in time; is the name server well?"
    if not re.search("Executing proxy command|Connection established|mux", log):
        return f"does not answer within {seconds:.1f} s; is the host up, and does a firewall let SSH through?"
    return LATE.format(seconds)


def _explain(log: str, said: str) -> SshFault:
    if "Host key verification failed" in said:
        return SshFault(_explain_host_key(log, said))
    if match := re.search(r"Permission denied \((.*)\)|Too many authentication failures", said):
        return SshFault(_explain_refusal(log, match[1] or ""))
    if match := re.search(r"connect to (?:host|address) .* port \d+: (.*)", said):
        return SshFault(REASONS.get(match[1], f"cannot be connected to ({match[1]})"))
    for pattern, text in _ENDS:
        if match := re.search(pattern, said):
            return SshFault(text.format(*match.groups()))
    if re.search(_HANG_UP, said):
        return _explain_hang_up(log, said)
    return SshFault(said.splitlines()[-1] if said else "ssh has ended without a word")


def _explain_hang_up(log: str, said: str) -> SshFault:
    """Say why there was no key exchange; a server that is too busy hangs up, and may not the next time."""
    stage = _stage(log)
    if "Offering public key" in stage:
        return SshFault(_explain_refusal(log, ""))
    if stage != log and " -W " not in log:
        return SshFault("the connection broke before the agent was started")
    if match := re.findall(r"^Remote protocol version \S+, remote software version (.*)", stage, re.MULTILINE):
        return SshFault(f"the server ({match[-1]}) has hung up during the key exchange", is_temporary=True)
    banner = re.search(r"banner line \d+: (.*)|banner line contains invalid|No banner|invalid format", log + said)
    if banner and not re.search("MaxStartups|Not allowed at this time", log):
        return SshFault(NO_SERVER)
    command = re.search(r"^Executing proxy command: (?:exec )?(.*)", log, re.MULTILINE)
    if command and " -W " not in command[1]:
        others = [line for line in said.splitlines() if not re.search(_HANG_UP, line)]
        complaint = others[-1] if others else "has ended"
        return SshFault(f"ProxyCommand {command[1]}: {complaint}", is_temporary=True)
    return SshFault(BUSY, is_temporary=True)


def _explain_host_key(log: str, said: str) -> str:
    keys = re.findall(r"^Server host (?:key|certificate): (\S+ [^\s,]+)", log, re.MULTILINE) or ["of the server"]
    key = show_key(*keys[-1].split(" ", 1))
    if match := re.search(r"(?:Offending|The) (\S+) (?:host )?key (?:in (\S+:\d+)|for \S+ is marked as revoked)", said):
        if match[2] is None:
            return f"host key {key} is revoked; give the host a new key"
        command = re.search(r"ssh-keygen -f .*", said)
        remedy = command[0] if command else "remove that line"
        return CHANGED.format(key, f"{match[2]} has another {match[1]} key", remedy)
    if match := re.search(r"revoked by file (.*)", said):
        return f"host key {key} is revoked ({match[1]}); give the host a new key"
    name = re.search(r"host key is known for (\S+) and", said)
    doubt = re.search(r"Certificate invalid: .*|No matching CA found", f"{said}\n{log}")
    because = f" and its certificate does not count: {doubt[0].removeprefix('Certificate invalid: ')}" if doubt else ""
    return UNKNOWN.format(key, name[1] if name else "the host", because)


def show_key(kind: str, fingerprint: str) -> str:
    """Return a host key as ssh shows it: ED25519 SHA256:..."""
    found = re.search("ed25519|rsa|ecdsa|dss", kind)
    return f"{found[0].upper() if found else kind} {fingerprint.rstrip('=')}"


def _explain_refusal(log: str, methods: str) -> str:
    begun = log.rpartition("Authenticating to ")[2]
    found = re.findall(r"^(Offering public|Trying private) key: (.*)", begun, re.MULTILINE)
    tried = [_name_key(key) for how, key in found if how == "Offering public" or Path(key).exists()]
    good = [_name_key(key) for key in re.findall(r"^Server accepts key: (.*)", begun, re.MULTILINE)]
    others = methods.replace(",", ", ")
    if good and "partial success" in begun:
        hint = f"beside a key the server wants {others}, which msrun cannot give"
    elif good:
        hint = f"the server knows {good[-1]}, but it cannot sign: has it a passphrase? ssh-add {good[-1].split()[0]}"
    elif "No more authentication methods" not in begun and len(tried) > 1:
        hint = TOO_MANY
    else:
        only = "" if "publickey" in methods else " only"
        hint = f"the server takes {others}{only}" if methods else "the server has hung up"
    keys = f"tried {', '.join(dict.fromkeys(tried))}" if tried else "no key was tried"
    remedy = "" if tried else " (give --ssh_identity FILE, or ssh-add one)"
    return f"login as {_authenticating(log)[1]} refused: {keys}{remedy}; {hint}"


def _name_key(offer: str) -> str:
    """Turn `/home/me/.ssh/id ED25519 SHA256:... agent` into the name of the key."""
    match = re.match(r"(.*?) (?:[A-Z0-9-]+) (?:SHA256|MD5):\S+(.*)", offer)
    name, rest = (match[1], match[2]) if match else (offer, "")
    return shown(Path(name)) + (" (in ssh-agent)" if " agent" in rest else "")


def shown(path: Path) -> str:
    home = Path("~").expanduser()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) and home != Path("/") else str(path)
