"""A pipe to an agent on a host, and the command line that starts one: the same whatever the job is."""

from __future__ import annotations

import hashlib
import shlex
from typing import Protocol

# Run by the agent's interpreter. It takes a line "<bytes> <sha256>", then that many bytes of Python, and runs them:
# whatever belongs to the job comes through the pipe, so that no shell ever reads it and no `ps` shows it.
_STEPS = """\
import sys,hashlib
sys.path[:1]==[""] and sys.path.pop(0)
f=open(0,"rb",0,closefd=False)
n,h=(f.readline().split()+[b"0",b""])[:2]
s=b""
while len(s)<int(n):
    d=f.read(int(n)-len(s))
    if not d: sys.exit("msrun agent: the launcher has gone")
    s+=d
if hashlib.sha256(s).hexdigest()==h.decode(): exec(s)
else: sys.exit("msrun agent: what came through the pipe is damaged")
"""
_BOOTSTRAP = f"exec({_STEPS!r})"
"""On one line and without an exclamation mark, which a csh would read."""

MARKER = b"\x00msrun agent 1\x00\n"
"""What an agent writes first; anything before it is noise of a login shell."""
MAX_NOISE_BYTES = 1 << 20


class AgentPipe(Protocol):
    """A running agent's stdin and stdout. Reading and writing never wait, and belong to one thread."""

    address: str
    """Numeric address of the host as it is reached from here; empty when that is not known."""
    tells_room: bool
    """Whether a selector tells when `write` has room again; where not, it is to be tried again."""

    def fileno(self) -> int:
        """Return a descriptor that a selector finds readable when `read` is to be called."""

    def read(self) -> bytes | None:
        """Return the next bytes that the agent wrote; empty at the end, None when there are none now."""

    def write(self, data: bytes | memoryview) -> int:
        """Send as many of the bytes as there is room for now, and return how many.

        Raises:
            OSError: the other side has gone.
        """

    def close(self) -> None:
        """End the pipe, which no selector has any more; may wait a moment."""

    @property
    def exit_status(self) -> int | None:
        """After the end: the agent's exit status, 128 + N for signal N; None when the connection broke. May wait."""

    def stderr_text(self) -> str:
        """Return the last lines that the agent, or its shell, wrote to stderr."""


def agent_argv(interpreter: str) -> list[str]:
    """Return the command that starts an agent."""
    return [interpreter, "-c", _BOOTSTRAP]


def agent_command(interpreter: str) -> str:
    """Return the same for a login shell: a constant, but for the interpreter."""
    return f"exec {shlex.join(agent_argv(interpreter))}"


def opening(code: bytes) -> bytes:
    """Return what has to go through a new pipe first: the code that the interpreter is to run."""
    return f"{len(code)} {hashlib.sha256(code).hexdigest()}\n".encode() + code
