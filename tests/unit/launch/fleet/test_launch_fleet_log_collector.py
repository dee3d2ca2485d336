"""Pieces of logs: what a host sends and keeps until the launcher has it, and what is put together at home."""

import errno
import os
from unittest import mock

import pytest

from msrun.agent.log_file import LogLimit
from msrun.launch.directory.log_directory import record_fault
from msrun.launch.directory.worker_log import LogReader
from msrun.launch.remote.logs import (
    KEPT_BYTES,
    PIECE_BYTES,
    STEP_BYTES,
    LogCollector,
    LogSender,
    own_logs,
    pack_piece,
    unpack_piece,
)

OWN = own_logs("worker", {0: (0, 1), 1: (2,)})


@pytest.fixture
def home(tmp_path):
    """It expects one log of host 0."""
    made = LogCollector(tmp_path, None, OWN, 1)
    made.expect(0, ["worker_0.log"])
    yield made
    made.close()


def write(home, data, name="worker_0.log"):
    home.write(0, pack_piece(name, 0, data))


def test_rest_of_an_attempt_is_sent_after_its_logs_were_renamed(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    path = there / "worker_0.log"
    sender = LogSender([str(path), str(there / "scheduler.log")])
    home = LogCollector(here, None, OWN, 1)
    home.expect(0, sender.names)
    path.write_bytes(b"first")
    sender.hold()  # nothing was sent of it yet
    path.rename(there / "worker_0.attempt_0.log")
    path.write_bytes(bytes(range(256)) * 2000)
    for message in iter(sender.next, None):
        home.write(0, message)
    assert (here / "worker_0.attempt_0.log").read_bytes() == b"first"
    assert (here / "worker_0.log").read_bytes() == bytes(range(256)) * 2000
    assert home.sizes(0)["worker_0.log"] == 512_000
    sender.close()
    home.close()


def test_log_at_home_keeps_its_newest_bytes(tmp_path):
    home = LogCollector(tmp_path, LogLimit(PIECE_BYTES, 2), OWN)
    home.expect(0, ["worker_0.log"])
    data = os.urandom(9 * PIECE_BYTES)
    for begin in range(0, len(data), PIECE_BYTES):
        write(home, data[begin : begin + PIECE_BYTES])
    found = (tmp_path / "worker_0.log").read_bytes()
    assert found[-2 * PIECE_BYTES :] == data[-2 * PIECE_BYTES :]
    assert 512 * (tmp_path / "worker_0.log").stat().st_blocks <= 3 * PIECE_BYTES and len(found) == len(data)
    home.close()


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (0, {"name": "../../etc/passwd", "attempt": 0, "data": ""}),
        (0, {"name": "worker_9.log", "attempt": 0, "data": ""}),
        (0, {"name": "worker_0.log", "attempt": -1, "data": ""}),
        (0, {"name": "worker_0.log", "attempt": "0", "data": ""}),
        (0, {"name": "worker_0.log", "attempt": 1 << 40, "data": ""}),
        (0, {}),
        (1, pack_piece("worker_0.log", 0, b"not mine")),
    ],
)
def test_piece_of_no_log_of_that_host_is_left(tmp_path, home, node, message):
    home.write(node, message)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("worker_0.log", b"")]
    assert not home.fault


@pytest.mark.parametrize("name", ["worker_2.log", "scheduler.log", "msrun.log", "worker_0.attempt_0.log", "x_0.log"])
def test_host_cannot_name_the_logs_of_another(tmp_path, name):
    home = LogCollector(tmp_path, None, own_logs("worker", {0: (2,), 1: (0,)}))
    home.expect(1, ["worker_0.log", name, "../../etc/passwd"])
    home.write(1, pack_piece(name, 0, b"not mine"))
    home.close()
    assert not (tmp_path / name).exists() and not home.fault


def test_names_are_those_of_the_hosts_own_ranks_and_servers_and_no_earlier_attempt():
    own = own_logs("worker", {0: (0,), 1: (1,)}, servers=3)
    found = [[index for index in range(4) if own[node].fullmatch(f"server_{index}.log")] for node in range(2)]
    assert found == [[0, 2], [1]], "hosts take turns"
    filled_in = own_logs("{hostname}_{ip}", {1: (0, 12)})[1]
    for name in ("h-1.dc_10.0.0.7_0.log", "under_score_fd77::9_12.log"):
        assert filled_in.fullmatch(name), name
    for name in ("h_1_2.log", "h_1_0.attempt_0.log", "../h_1_0.log", "h_1_0.log\n", "scheduler.log", "h_0.log"):
        assert not filled_in.fullmatch(name), name


def test_second_list_of_names_is_not_heeded(tmp_path, home):
    """Else a host could open file after file."""
    write(home, b"kept")
    home.expect(0, ["worker_0.log", "worker_1.log"])
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("worker_0.log", b"kept")]


def test_piece_that_unpacks_to_more_than_a_piece_or_is_damaged_is_remembered_and_stops_nobody(tmp_path, home):
    """64 KiB of it would be 64 MiB of zeros."""
    write(home, bytes(64 << 20))
    assert (tmp_path / "worker_0.log").stat().st_size == 0 and f"more than {PIECE_BYTES} bytes" in home.fault
    home.fault = ""
    home.write(0, {"name": "worker_0.log", "attempt": 0, "data": "no base64!"})
    assert "damaged" in home.fault or "base64" in home.fault
    write(home, bytes(PIECE_BYTES))
    assert (tmp_path / "worker_0.log").stat().st_size == PIECE_BYTES


def test_full_disk_loses_pieces_and_is_remembered(small_disk):
    home = LogCollector(small_disk, None, OWN)
    home.expect(0, ["worker_0.log"])
    for _ in range(40):
        write(home, os.urandom(100_000))
    home.close()
    assert "No space left" in home.fault


SIZE = 5 * STEP_BYTES


def test_fault_that_was_recorded_before_a_host_has_named_its_logs_stays(tmp_path):
    home = LogCollector(tmp_path, LogLimit(4096, 3), own_logs("worker", {0: (0,)}))
    record_fault(tmp_path, "host0: it failed", "Traceback")
    home.expect(0, ["scheduler.log"])
    home.write(0, pack_piece("scheduler.log", None, b"more\n"))
    home.close()
    text = (tmp_path / "scheduler.log").read_text()
    assert "host0: it failed" in text and text.endswith("more\n")


class Sender:
    """Sends one log of numbered bytes, and another."""

    def __init__(self, folder):
        self.path, self.other = folder / "worker_0.log", folder / "worker_1.log"
        self.data = os.urandom(SIZE)
        self.path.write_bytes(self.data)
        self.refused = []
        self.logs = LogSender([str(self.path), str(self.other)], on_refused=self.refused.append)

    def send_all(self):
        return list(iter(self.logs.next, None))

    @property
    def disk_bytes(self):
        return 512 * self.path.stat().st_blocks

    def close(self):
        self.logs.close()


@pytest.fixture
def sender(tmp_path):
    made = Sender(tmp_path)
    yield made
    made.close()


def test_what_the_launcher_has_takes_no_disk_but_for_the_end_of_the_log(sender):
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


def test_what_the_launcher_may_lack_stays(sender):
    sender.send_all()
    come = 3 * STEP_BYTES // PIECE_BYTES
    sender.logs.acknowledge(come)
    assert sender.disk_bytes <= SIZE - 2 * STEP_BYTES
    assert sender.path.read_bytes()[come * PIECE_BYTES - KEPT_BYTES :] == sender.data[come * PIECE_BYTES - KEPT_BYTES :]


def test_log_that_was_renamed_meanwhile_takes_no_disk_either(sender):
    pieces = sender.send_all()
    sender.path = sender.path.rename(sender.path.with_name("worker_0.attempt_0.log"))
    sender.logs.acknowledge(len(pieces))
    assert sender.disk_bytes <= KEPT_BYTES + STEP_BYTES


def test_log_that_cannot_be_freed_stays_and_one_that_cannot_be_read_is_left_out(sender, monkeypatch):
    monkeypatch.setattr(LogReader, "free", mock.Mock(side_effect=OSError(errno.EOPNOTSUPP, "not here")))
    for piece in sender.send_all():
        sender.logs.acknowledge(bool(piece))
    assert sender.refused == ["not here"]
    monkeypatch.setattr(LogReader, "read", mock.Mock(side_effect=OSError(errno.EIO, "broken")))
    for _ in range(2):
        with pytest.raises(OSError, match="broken") as caught:
            sender.logs.next()
        assert "while it read worker_" in caught.value.__notes__[0]
    assert sender.logs.next() is None and sender.logs.unreadable == {"worker_0.log", "worker_1.log"}
