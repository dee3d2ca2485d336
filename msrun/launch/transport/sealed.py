"""A stream of bytes over a connection that an agent has dialled: see `AgentPipe`. Either end of it."""

from __future__ import annotations

from msrun.cluster.connection import Connection
from msrun.launch.transport.pipe import AgentPipe

RECORD_BYTES = 1 << 17


class SealedPipe(AgentPipe):
    """Bytes go as sealed records. A `write` that was held up has to be given the same bytes again, as TLS has it."""

    def __init__(self, connection: Connection, address: str) -> None:
        """`connection`: past its handshake; this object's from now on. `address`: numeric, of the other side."""
        self.address = address
        self.fault = ""
        """Why what has come cannot be read; empty while it can."""
        self._connection = connection
        self._in_flight = 0
        """So many bytes of what is to be written are in a record that is not all sent."""

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._connection.fileno()

    def read(self) -> bytes | None:
        """Return the next bytes; empty at the end, None when there are none now."""
        connection = self._connection
        try:
            data = b"".join(connection.unseal(body) for body in connection.receive())
        except ValueError as error:
            self.fault = str(error)
            return b""
        return data or (b"" if connection.is_closed else None)

    def write(self, data: bytes | memoryview) -> int:
        """Send as many bytes as there is room for.

        Raises:
            OSError: the other side has gone.
        """
        connection = self._connection
        if not self._in_flight:
            piece = bytes(data[:RECORD_BYTES])
            connection.send_body(piece)
            self._in_flight = len(piece)
        else:
            connection.flush()
        if connection.is_closed:
            raise BrokenPipeError("the other side has gone")
        if connection.has_unsent:
            return 0
        count, self._in_flight = self._in_flight, 0
        return count

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def stderr_text(self) -> str:
        """Return why what it has sent cannot be read; empty where it can."""
        return self.fault
