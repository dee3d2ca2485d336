"""Logs on their way to the launcher: what it has takes no disk here, what it lacks stays, and a bad log is left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from msrun.cluster.messages import Message
from msrun.launch.remote.log_sender import KEPT_BYTES, PIECE_BYTES, STEP_BYTES, LogSender, unpack_piece

SIZE = 5 * STEP_BYTES


class Sender:
    """Sends one log of numbered bytes, and another."""

    def __init__(self, folder: Path) -> None:
        self.path, self.other = folder / "worker_0.log", folder / "worker_1.log"
        self.data = os.urandom(SIZE)
        self.path.write_bytes(self.data)
        self.refused: list[str] = []
        self.logs = LogSender([str(self.path), str(self.other)], keep=0, on_refused=self.refused.append)

    def send_all(self) -> list[Message]:
        return list(iter(self.logs.next, None))

    @property
    def disk_bytes(self) -> int:
        return 512 * self.path.stat().st_blocks

    def close(self) -> None:
        for _, _, reader in self.logs._readers:
            reader.close()


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    made = Sender(tmp_path)
    yield made
    made.close()


def test_what_the_launcher_has_takes_no_disk_but_for_the_end_of_the_log(sender: Sender) -> None:
    pieces = sender.send_all()
    assert sender.disk_bytes >= SIZE, "it may lack all of it"
    sender.logs.acknowledge(len(pieces))
    assert sender.disk_bytes <= KEPT_BYTES + STEP_BYTES
    assert sender.path.stat().st_size == SIZE
    with sender.path.open("ab") as file:  # it grows on where it was
        file.write(b"more")
    assert [unpack_piece(piece) for piece in sender.send_all()] == [b"more"]
    assert sender.path.read_bytes()[-KEPT_BYTES:] == (sender.data + b"more")[-KEPT_BYTES:]
    assert not sender.refused


def test_what_the_launcher_may_lack_stays(sender: Sender) -> None:
    sender.send_all()
    come = 3 * STEP_BYTES // PIECE_BYTES
    sender.logs.acknowledge(come)
    assert sender.disk_bytes <= SIZE - 2 * STEP_BYTES
    assert sender.path.read_bytes()[come * PIECE_BYTES - KEPT_BYTES :] == sender.data[come * PIECE_BYTES - KEPT_BYTES :]


def test_log_that_was_renamed_meanwhile_takes_no_disk_either(sender: Sender) -> None:
    pieces = sender.send_all()
    sender.path = sender.path.rename(sender.path.with_name("worker_0.attempt_0.log"))
    sender.logs.acknowledge(len(pieces))
    assert sender.disk_bytes <= KEPT_BYTES + STEP_BYTES
