"""What ssh wants to know is asked at the terminal, each thing once for all hosts: SSH_ASKPASS of its processes."""

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
from msrun.launch.transport.ssh.fault import shown

Ask = Callable[[str, int], str]
"""Asks for what is named, and returns what was typed, unseen; empty when the descriptor is readable before."""
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


def ask_at_terminal(what: str, until: int) -> str:
    """Ask for a secret; see `Ask`."""
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


class Questions:
    """Answers of the user, each kept for all who want to know the same."""

    def __init__(self, ask: Ask | None, warn: Callable[[str], None]) -> None:
        """`warn`: told what the user is to do at once, such as to touch a key."""
        self.ask, self._warn = ask, warn
        self._lock = threading.Lock()
        self._answers: dict[str, str] = {}
        self._told: dict[tuple[str, str], str] = {}
        self._until, self._closer = os.pipe2(os.O_CLOEXEC) if ask else (-1, -1)
        self._asked_s = 0.0
        self._since: float | None = None

    def waited_s(self) -> float:
        """Return for how long the user was, and is, being asked: no host is slow for that."""
        since = self._since
        return self._asked_s + (time.monotonic() - since if since is not None else 0.0)

    def answer(self, prompt: str, asker: str, kind: str = "") -> str:
        """Return the answer to a prompt of ssh; empty when there is none.

        Args:
            asker: who asks; one who asks the same again was given a wrong answer.
            kind: of the prompt, as SSH_ASKPASS_PROMPT has it.
        """
        if kind == "none":
            self._warn(prompt.strip())
            return ""
        file = re.search(r"passphrase for key '(.*)'", prompt)
        what = f"passphrase of {shown(Path(file[1]))}" if file else prompt.strip().rstrip(":")
        with self._lock:
            ask = self.ask
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

    def call_off(self) -> None:
        """End the question that is being asked, and ask no more."""
        if self.ask is not None:
            self.ask = None
            os.write(self._closer, b"!")
            with self._lock:
                os.close(self._until)
                os.close(self._closer)


class AskPass:
    """The program that ssh starts to ask, and the thread that it turns to."""

    def __init__(self, questions: Questions) -> None:
        """Start the thread."""
        self._questions = questions
        self._folder = Path(tempfile.mkdtemp(prefix="msrun-ask-"))
        self._program = self._folder / "ask"
        place = self._folder / "socket"
        (self._folder / "client.py").write_text(_CLIENT)
        self._program.write_text(
            f"#!/bin/sh\nexec '{sys.executable}' -IS '{self._folder}/client.py' '{place}' "
            '"$PPID" "$SSH_ASKPASS_PROMPT" "$1"\n'
        )
        self._program.chmod(0o700)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(place))
        self._listener.listen(128)
        self._thread = OwnThread("ssh questions", self._serve, print_fault, goes_on=True)
        self._thread.start()

    def environment(self) -> dict[str, str]:
        """Return the variables by which ssh, from 8.4 on or without a terminal, finds the program."""
        display = os.environ.get("DISPLAY") or ":none"
        return {"SSH_ASKPASS": str(self._program), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": display}

    def close(self) -> None:
        """End the thread and remove the program."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, ValueError, termios.error):
                connection.settimeout(10.0)
                asker, kind, prompt = connection.makefile("rb").read().decode().split("\0", 2)
                answer = self._questions.answer(prompt, asker, kind)
                connection.sendall(f"{answer}\n".encode() if answer else b"")
