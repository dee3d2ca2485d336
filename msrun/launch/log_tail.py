"""LogTail: one worker's log as it grows, in pieces that can be shown: lines, states of progress bars, or bytes."""

from __future__ import annotations

from collections.abc import Callable

from msrun.launch.directory.worker_log import GrowingFile, RotatedReader

READ_BYTES = 1 << 20
MAX_HELD_BYTES = 1 << 20
"""A line longer than this is shown in pieces."""
STATE_S = 3.0
"""How often a progress bar that cannot be drawn in place becomes a line of its own."""


class Cutter:
    """Cuts what a worker writes into pieces that are shown whole; this one gives the bytes as they come."""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the pieces that are complete now, with their line ends."""
        return [data]

    def end(self) -> list[bytes]:
        """Return what is left; nothing more will come."""
        return []

    @property
    def state(self) -> bytes:
        """The newest state of the line that a progress bar writes again and again; empty when there is none."""
        return b""

    def take_state(self, now: float) -> list[bytes]:  # noqa: ARG002
        """Return that state as a line of its own, when it is time for one; `now`: monotonic seconds."""
        return []


class LineCutter(Cutter):
    """Lines. Of one that carriage returns write again and again, as a progress bar does, only the newest state."""

    def __init__(self) -> None:
        self._held = b""
        self._taken = b""
        """The state of the unfinished line that was shown last."""
        self._due: float | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the lines that are complete now."""
        *whole, self._held = (self._held + data).split(b"\n")
        lines = [_last_state(line) for line in whole]
        if b"\r" in self._held:  # older states are not kept
            self._held = b"\r" + _last_state(self._held) + (b"\r" if self._held.endswith(b"\r") else b"")
        if lines:
            if self._taken and lines[0] == self._taken:
                del lines[0]
            self._taken, self._due = b"", None
        if len(self._held) > MAX_HELD_BYTES:
            lines.append(self._held)
            self._held = b""
        return [line + b"\n" for line in lines]

    def end(self) -> list[bytes]:
        """Return a last unfinished line."""
        return self.feed(b"\n") if self._held else []

    @property
    def state(self) -> bytes:
        """As of `Cutter`."""
        state = _last_state(self._held) if b"\r" in self._held else b""
        return state if state.strip() else b""

    def take_state(self, now: float) -> list[bytes]:
        """Return the state when STATE_S have passed since the bar began or was shown last, and it has changed."""
        state = self.state
        if not state or state == self._taken:
            return []
        if self._due is None:
            self._due = now + STATE_S
        if now < self._due:
            return []
        self._taken, self._due = state, now + STATE_S
        return [state + b"\n"]


class RawLineCutter(Cutter):
    """The bytes, in pieces that end with a line feed or a carriage return: those of other ranks may stand between."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the pieces that are complete now; a carriage return waits, as a line feed may follow."""
        data = self._held + data
        end = 1 + max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1))
        if len(data) - end > MAX_HELD_BYTES:
            end = len(data)
        self._held = data[end:]
        return data[:end].splitlines(keepends=True)

    def end(self) -> list[bytes]:
        """Return a last piece without an end."""
        held, self._held = self._held, b""
        return [held] if held else []


class LogTail:
    """Follows one worker's log and gives back pieces of it."""

    def __init__(
        self,
        global_rank: int,
        path: str,
        *,
        rotated: int = 0,
        after: int | None = None,
        cutter: Callable[[], Cutter] = LineCutter,
    ) -> None:
        """Follow `path`.

        Args:
            rotated: how many older files stay of a log that is rotated, 0 when it is not.
            after: inode of the log of the attempt before, which has the name until it is moved away.
            cutter: makes what decides on the pieces.
        """
        self.global_rank = global_rank
        self.path = path
        self.rotated = rotated
        self.is_over = False
        """Nothing of a next attempt is read."""
        self._is_kept = False
        """It is about to be renamed, and may grow until then."""
        self._reader = RotatedReader(path, rotated, after) if rotated else GrowingFile(path, after)
        self._new_cutter = cutter
        self._cutter = cutter()
        self.has_more = False
        """The last `read` has left something."""

    def end(self) -> None:
        """Nobody writes there any more."""
        self._reader.hold()
        self.is_over, self._is_kept = True, False

    def begin_anew(self) -> LogTail:
        """End with this attempt's log, once it is renamed; return what follows the next one's."""
        self.end()
        self._is_kept = True
        after = self._reader.inode
        return LogTail(self.global_rank, self.path, rotated=self.rotated, after=after, cutter=self._new_cutter)

    def is_complete(self) -> bool:
        """Return whether all that will be there is there."""
        return self.is_over and (not self._is_kept or self._reader.is_renamed())

    def close(self) -> None:
        """Let go of the file."""
        self._reader.close()

    def read(self, *, at_end: bool = False, max_bytes: int | None = None) -> list[bytes]:
        """Return the pieces that are complete now; at the end also a last unfinished one.

        Args:
            max_bytes: stop after about so much, and set `has_more`.
        """
        pieces: list[bytes] = []
        size_bytes = 0
        while True:
            self.has_more = max_bytes is not None and size_bytes >= max_bytes
            if self.has_more:
                return pieces
            data = self._reader.read(max_bytes or READ_BYTES)
            if not data:
                return pieces + self._cutter.end() if at_end else pieces
            size_bytes += len(data)
            pieces += self._cutter.feed(data)

    @property
    def state(self) -> bytes:
        """As of `Cutter`."""
        return self._cutter.state

    def take_state(self, now: float) -> list[bytes]:
        """As of `Cutter`."""
        return self._cutter.take_state(now)


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
