"""Pieces of logs, sent by hosts and put together at home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.agent.logs.rotated_log import LogRotation
from msrun.launch.fleet.log_collector import LogCollector, own_logs
from msrun.launch.remote.log_sender import PIECE_BYTES, LogSender, pack_piece

OWN = own_logs("worker", {0: (0, 1), 1: (2,)})


def send_all(sender: LogSender, home: LogCollector) -> int:
    count = 0
    while (message := sender.next()) is not None:
        home.write(0, message)
        count += 1
    return count


def test_log_grows_at_home_as_it_grows_there(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    sender = LogSender([str(there / "worker_0.log"), str(there / "worker_1.log")], keep=0)
    home = LogCollector(here, None, OWN, 1)
    home.expect(0, sender.names)
    assert send_all(sender, home) == 0
    for text in (b"one\n", b"", bytes(range(256)) * 2000):
        for rank in range(2):
            with (there / f"worker_{rank}.log").open("ab") as file:
                file.write(text)
        send_all(sender, home)
    for rank in range(2):
        assert (here / f"worker_{rank}.log").read_bytes() == (there / f"worker_{rank}.log").read_bytes()
    assert home.sizes(0) == {f"worker_{rank}.log": 4 + 512_000 for rank in range(2)}
    sender.end_attempt()
    assert sender.next() is None, "and it lets go of the logs"
    home.close()


def test_rest_of_an_attempt_is_sent_after_its_logs_were_renamed(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    path = there / "worker_0.log"
    sender = LogSender([str(path), str(there / "scheduler.log")], keep=0)
    home = LogCollector(here, None, OWN, 1)
    home.expect(0, sender.names)
    path.write_bytes(b"first")
    sender.end_attempt()  # nothing was sent of it yet
    path.rename(there / "worker_0.attempt_0.log")
    path.write_bytes(b"second")
    send_all(sender, home)
    sender.begin_attempt()
    send_all(sender, home)
    assert (here / "worker_0.attempt_0.log").read_bytes() == b"first"
    assert (here / "worker_0.log").read_bytes() == b"second"
    sender.end_attempt()
    assert sender.next() is None, "and it lets go of the logs"
    home.close()


@given(st.lists(st.binary(max_size=300), max_size=12))
def test_rotated_log_at_home_holds_what_was_sent(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    here = tmp_path_factory.mktemp("here")
    home = LogCollector(here, LogRotation(200, 100), OWN)
    home.expect(0, ["worker_0.log"])
    for piece in pieces:
        home.write(0, pack_piece("worker_0.log", 0, piece))
    home.close()
    files = [here / "worker_0.log"]
    while (older := here / f"worker_0.log.{len(files)}").exists():
        files.append(older)
    assert b"".join(path.read_bytes() for path in reversed(files)) == b"".join(pieces)


@pytest.mark.parametrize(
    "message",
    [
        {"name": "../../etc/passwd", "attempt": 0, "data": ""},
        {"name": "worker_9.log", "attempt": 0, "data": ""},
        {"name": "worker_0.log", "attempt": -1, "data": ""},
        {"name": "worker_0.log", "attempt": "0", "data": ""},
        {"name": "worker_0.log", "attempt": 1 << 40, "data": ""},
        {},
    ],
)
def test_piece_of_no_log_of_that_host_is_left(tmp_path: Path, message: dict[str, object]) -> None:
    home = LogCollector(tmp_path, None, OWN, 1)
    home.expect(0, ["worker_0.log", "../../etc/passwd"])
    home.write(0, message)
    home.close()
    assert [path.name for path in tmp_path.iterdir()] == ["worker_0.log"] and not home.fault


def test_host_writes_its_own_logs_only(tmp_path: Path) -> None:
    home = LogCollector(tmp_path, None, OWN, 1)
    home.expect(0, ["worker_0.log"])
    home.write(1, pack_piece("worker_0.log", 0, b"not mine"))
    home.close()
    assert (tmp_path / "worker_0.log").read_bytes() == b""


@pytest.mark.parametrize("name", ["worker_2.log", "scheduler.log", "msrun.log", "worker_0.attempt_0.log", "x_0.log"])
def test_host_cannot_name_the_logs_of_another(tmp_path: Path, name: str) -> None:
    home = LogCollector(tmp_path, None, own_logs("worker", {0: (2,), 1: (0,)}))
    home.expect(1, ["worker_0.log", name])
    home.write(1, pack_piece(name, 0, b"not mine"))
    home.close()
    assert not (tmp_path / name).exists() and not home.fault


def test_servers_logs_are_those_of_the_hosts_that_take_turns() -> None:
    own = own_logs("worker", {0: (0,), 1: (1,)}, servers=3)
    for node_rank, indices in ((0, (0, 2)), (1, (1,))):
        found = [index for index in range(4) if own[node_rank].fullmatch(f"server_{index}.log")]
        assert found == list(indices)


def test_names_that_hosts_fill_in_are_their_own_and_no_earlier_attempt() -> None:
    own = own_logs("{hostname}_{ip}", {1: (0, 12)})[1]
    for name in ("h-1.dc_10.0.0.7_0.log", "under_score_fd77::9_12.log"):
        assert own.fullmatch(name), name
    for name in ("h_1_2.log", "h_1_0.attempt_0.log", "../h_1_0.log", "h_1_0.log\n", "scheduler.log", "h_0.log"):
        assert not own.fullmatch(name), name


def test_second_list_of_names_is_not_heeded(tmp_path: Path) -> None:
    """Else a host could open file after file."""
    home = LogCollector(tmp_path, None, OWN)
    home.expect(0, ["worker_0.log"])
    home.write(0, pack_piece("worker_0.log", 0, b"kept"))
    home.expect(0, ["worker_0.log", "worker_1.log"])
    home.close()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("worker_0.log", b"kept")]


def test_piece_that_unpacks_to_more_than_a_piece_is_refused(tmp_path: Path) -> None:
    """64 KiB of it would be 64 MiB of zeros."""
    home = LogCollector(tmp_path, None, OWN)
    home.expect(0, ["worker_0.log"])
    home.write(0, pack_piece("worker_0.log", 0, bytes(64 << 20)))
    assert (tmp_path / "worker_0.log").stat().st_size == 0 and f"more than {PIECE_BYTES} bytes" in home.fault
    home.write(0, pack_piece("worker_0.log", 0, bytes(PIECE_BYTES)))
    home.close()
    assert (tmp_path / "worker_0.log").stat().st_size == PIECE_BYTES


def test_damaged_piece_is_remembered_and_stops_nobody(tmp_path: Path) -> None:
    home = LogCollector(tmp_path, None, OWN, 1)
    home.expect(0, ["worker_0.log"])
    home.write(0, {"name": "worker_0.log", "attempt": 0, "data": "no base64!"})
    home.write(0, pack_piece("worker_0.log", 0, b"after it"))
    home.close()
    assert "damaged" in home.fault or "base64" in home.fault
    assert (tmp_path / "worker_0.log").read_bytes() == b"after it"


def test_full_disk_loses_pieces_and_is_remembered(small_disk: Path) -> None:
    home = LogCollector(small_disk, None, OWN)
    home.expect(0, ["worker_0.log"])
    for _ in range(40):
        home.write(0, pack_piece("worker_0.log", 0, os.urandom(100_000)))
    home.close()
    assert "No space left" in home.fault
