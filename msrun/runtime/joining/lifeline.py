"""A connection to the scheduler of MS_ROLE: each side learns at once when the other ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import suppress

from msrun.runtime.joining.lines import LineStream


class Lifeline:
    """Watches the scheduler in a thread: when it, or another process, fails, this one gets SIGTERM; so does a parameter
    server when all workers have left.

    Source: MindSpore's workers send themselves SIGTERM when the scheduler is lost or reports a lost worker.
    """

    def __init__(self, stream: LineStream, place: str) -> None:
        """Take over the stream; `place` says where the scheduler is, for people."""
        self._stream = stream
        self._place = place
        self._has_left = False
        self.has_failed = False
        """The job has, elsewhere."""
        stream.socket.settimeout(None)
        os.register_at_fork(after_in_child=stream.close)  # else a forked child would hold the line of a dead parent
        threading.Thread(target=self._watch, name="msrun-lifeline", daemon=True).start()

    def leave(self) -> None:
        """Say that this process has done its part; after that nobody cares how it ends."""
        self._has_left = True
        self._stream.send({"left": True})
        with suppress(OSError):  # the scheduler may have closed first
            self._stream.socket.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        try:
            messages = self._stream.receive()
        except ValueError as error:
            messages = [{"failed": f"it has sent {error}"}]
        if self._has_left:
            return
        if messages and "over" in messages[0]:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.has_failed = True
        if messages is None:
            told = f"lost the scheduler at {self._place}"
        else:
            told = f"the scheduler at {self._place} ends the job: {messages[0].get('failed', messages[0])}"
        sys.stderr.write(f"msrun: error: {told}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGTERM)
