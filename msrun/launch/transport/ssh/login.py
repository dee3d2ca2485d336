"""Why a host was not reached, in one line, from what `ssh -v` wrote, and what the user is asked for all hosts."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import socket
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

from msrun.cluster.own_thread import OwnThread, print_fault

Ask = Callable[[str, int], str]
"""Asks for what is named, and returns what was typed, unseen; empty when the descriptor is readable before."""
HOST_KEYS = {"strict": "yes", "accept-new": "accept-new", "off": "no"}


class SshFault(Exception):
    """One line without the host's name: what happened, and the remedy."""

    def __init__(self, text: str, *, place: str = "", is_temporary: bool = False, is_late: bool = False) -> None:
        """`place`: what was connected to, where that is known; `is_temporary`: another try a moment later may go well;
        `is_late`: there is no time for one.
        """
        super().__init__(text)
        self.text = text
        self.place = place
        self.is_temporary = is_temporary
        self.is_late = is_late


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
REASONS = {
    "Connection refused": "connection refused: nothing listens there; is sshd running, and is it this port?",
    "Connection timed out": "does not answer; is the host up, and does a firewall let SSH through?",
    "No route to host": "no route to the host; is it up, and in a network that this one reaches?",
    "Network is unreachable": "its network is unreachable from here; see ProxyJump in ssh_config",
}
"""By the words of `strerror`."""
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
_CHATTER = re.compile(
    r"OpenSSH_|Authenticated |Transferred: sent|Bytes per second|Killed by signal|Warning: Permanently added|\*\* "
    r"|Warning: Identity file"
)
"""Lines of `ssh -v` that are neither an error nor from the host."""


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


def ask_at_terminal(what: str, until: int) -> str:
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # in the background, which has left the terminal
        terminal = os.dup(0)
    before = termios.tcgetattr(terminal)
    unseen = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    try:
        termios.tcsetattr(terminal, termios.TCSAFLUSH, unseen)
        os.write(terminal, f"{what}: ".encode())
        watch = select.poll()
        for descriptor in (terminal, until):
            watch.register(descriptor, select.POLLIN)
        is_over = until in dict(watch.poll())
        return "" if is_over else os.read(terminal, 4096).decode(errors="replace").rstrip("\r\n")
    finally:
        termios.tcsetattr(terminal, termios.TCSAFLUSH, before)
        os.write(terminal, b"\n")
        os.close(terminal)


_CLIENT = """\
import socket,sys
s=socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.sendall(chr(0).join(sys.argv[2:]).encode(errors="replace"))
s.shutdown(socket.SHUT_WR)
a=s.makefile("rb").read()
sys.stdout.buffer.write(a)
sys.exit(not a)
"""


class Questions:
    """What all the ssh of a job ask the user: at a terminal, each thing once. The program that they start to ask turns
    to a thread of this process."""

    def __init__(self, ask: Ask | None, warn: Callable[[str], None]) -> None:
        """`ask`: None = nobody is asked; `warn`: told what the user is to do at once, such as to touch a key."""
        self._ask, self._warn, self._lock = ask, warn, threading.Lock()
        self._answers: dict[str, str] = {}
        self._told: dict[tuple[str, str], str] = {}
        self._asked_s = 0.0
        self._since: float | None = None
        self._environment: dict[str, str] = {}
        if ask is not None:
            self._until, self._closer = os.pipe2(os.O_CLOEXEC)
            self._start()

    def _start(self) -> None:
        folder = self._folder = Path(tempfile.mkdtemp(prefix="msrun-ask-"))
        program, place = folder / "ask", folder / "socket"
        (folder / "client.py").write_text(_CLIENT)
        words = f"'{sys.executable}' -IS '{folder}/client.py' '{place}' \"$PPID\" \"$SSH_ASKPASS_PROMPT\" \"$1\""
        program.write_text(f"#!/bin/sh\nexec {words}\n")
        program.chmod(0o700)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(place))
        self._listener.listen(128)
        self._thread = OwnThread("ssh questions", self._serve, print_fault, goes_on=True)
        self._thread.start()
        display = os.environ.get("DISPLAY") or ":none"
        self._environment = {"SSH_ASKPASS": str(program), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": display}

    def environment(self) -> dict[str, str]:
        """Return the variables by which ssh, from 8.4 on or without a terminal, finds the program; none: it may not."""
        return self._environment

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, ValueError, termios.error):
                connection.settimeout(10.0)
                asker, kind, prompt = connection.makefile("rb").read().decode().split("\0", 2)
                answer = self._answer(prompt, asker, kind)
                connection.sendall(f"{answer}\n".encode() if answer else b"")

    def waited_s(self) -> float:
        """Return for how long the user was, and is, being asked: no host is slow for that."""
        since = self._since
        return self._asked_s + (time.monotonic() - since if since is not None else 0.0)

    def _answer(self, prompt: str, asker: str, kind: str) -> str:
        """Return the answer to a prompt of ssh, empty when there is none; `kind` is its SSH_ASKPASS_PROMPT.

        An `asker` who asks the same again was given a wrong answer.
        """
        if kind == "none":
            self._warn(prompt.strip())
            return ""
        file = re.search(r"passphrase for key '(.*)'", prompt)
        what = f"passphrase of {shown(Path(file[1]))}" if file else prompt.strip().rstrip(":")
        with self._lock:
            ask = self._ask
            if ask is None or kind == "confirm" or "yes/no" in prompt:  # such as for each unknown host
                return ""
            wrong = self._told.get((prompt, asker))
            if prompt not in self._answers or (wrong and self._answers[prompt] == wrong):
                self._since = begin = time.monotonic()
                try:
                    self._answers[prompt] = ask(what, self._until)
                finally:
                    self._asked_s, self._since = self._asked_s + time.monotonic() - begin, None
            self._told[prompt, asker] = self._answers[prompt]
            return self._answers[prompt]

    def close(self) -> None:
        if self._ask is None:
            return
        self._ask = None
        os.write(self._closer, b"!")
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for descriptor in (self._until, self._closer):
            os.close(descriptor)
        shutil.rmtree(self._folder, ignore_errors=True)
