"""A parameter server as a process of its own: who knows the token is served, whoever says something else is closed."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from msrun import contract
from msrun.errors import WorldError
from msrun.runtime.server.connection import Connection
from msrun.runtime.server.frames import MAGIC, MAX_BODY_BYTES, PREFIX, Message, encode

DEADLINE_S = 60.0
CREATE = {"shard": [0, 0], "label": "w", "shape": [2, 2], "dtype": "float32", "staleness": 0}


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    token: bytes
    address: str
    port: int

    def connect(self, rank: int, index: int = 0, token: bytes = b"") -> Connection:
        """Connect as a worker."""
        return Connection(index, self.address, self.port, token or self.token, rank)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    token = secrets.token_hex(32)
    env = {
        **os.environ,
        contract.MSRUN_SERVER_TOKEN: token,
        contract.MSRUN_RENDEZVOUS: f"file://{tmp_path}/store",
        contract.MS_NODE_ID: "server_0",
        contract.MSRUN_SERVER_ADDRESS: "127.0.0.1",
        contract.MS_WORKER_NUM: "2",
    }
    command = [sys.executable, "-m", "msrun.runtime.server"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    match = re.search(r"listens on (\S+):(\d+)", process.stdout.readline())
    assert match is not None
    yield Served(process, bytes.fromhex(token), match[1], int(match[2]))
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    process.stdout.close()


def ask(connection: Connection, message: Message) -> Message:
    connection.send(message)
    return connection.receive()


def test_workers_are_served_whatever_others_say(served: Served) -> None:
    first = served.connect(0)
    assert ask(first, Message("create", CREATE)).kind == "done"
    for rank, index, token, words in (
        (1, 0, secrets.token_bytes(32), "closed the connection"),
        (0, 0, b"", "closed the connection"),
        (2, 0, b"", "closed the connection"),
        (1, 1, b"", "it does not know the token of this job"),
    ):
        with pytest.raises(WorldError, match=words):
            served.connect(rank, index, token)
    too_long = PREFIX.pack(MAGIC, 16, MAX_BODY_BYTES + 1)
    lies = b"".join(bytes(piece) for piece in encode(Message("put", {}, [torch.zeros(4)])))[:-8] + b"\0" * 64
    for said in (too_long, b"\xff" * 64, lies):
        wrong = served.connect(1)
        wrong._stream.sendall(said)
        with pytest.raises(WorldError, match=r"parameter server 0 at 127\.0\.0\.1:\d+ is lost"):
            while True:  # what was well formed before it is answered
                wrong.receive()
        wrong.close()
    second = served.connect(1)
    for connection in (first, second):
        assert ask(connection, Message("create", CREATE)).kind == "done"
    values = torch.arange(4.0).reshape(2, 2)
    assert ask(first, Message("put", {"shard": [0, 0], "field": "value", "begin": 0}, [values])).kind == "done"
    assert ask(first, Message("filled", {"shard": [0, 0]})).kind == "done"
    reply = ask(second, Message("rows", {"shard": [0, 0]}, [torch.tensor([1])]))
    assert torch.equal(reply.tensors[0], values[1:])
    for connection in (first, second):
        connection.close()
