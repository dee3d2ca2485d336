"""The record of a job, and a scheduler that ends with its agent."""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from msrun.cluster.messages import Channel
from msrun.cluster.rendezvous import listen
from msrun.cluster.scheduler import Record, StoreHost

REPOSITORY = Path(__file__).resolve().parents[3]


def test_record_has_one_stamped_line_for_each_moment() -> None:
    stream = io.StringIO()
    record = Record(stream)
    for message in (
        {"type": "job", "job_id": "j", "world_size": 2, "host": "h"},
        {"type": "started", "global_rank": 1, "pid": 10},
        {"type": "started", "global_rank": 0, "pid": 11},
        {"type": "exited", "global_rank": 0, "how": "exit code 3"},
        {"type": "stopping", "reason": "rank 0 ended with exit code 3"},
        {"type": "hang", "reason": "no progress"},
        {"type": "signal", "name": "SIGUSR1", "global_ranks": [0, 1]},
        {"type": "restarting", "attempt": 1, "delay_s": 1.0, "reason": "rank 0 failed first: exit code 3"},
        {"type": "started", "global_rank": 1, "pid": 20},
        {"type": "unknown to it"},
        {"type": "over", "reason": "rank 0 failed first: exit code 3"},
    ):
        record.note(message)
    lines = stream.getvalue().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ", line) for line in lines)
    assert [line[24:] for line in lines] == [
        "job j: 2 workers on h",
        "rank 1 registered: pid 10, 1 of 2",
        "rank 0 registered: pid 11, 2 of 2",
        "rank 0 ended: exit code 3",
        "stopping the job: rank 0 ended with exit code 3",
        "the job is stuck: no progress",
        "signal SIGUSR1 passed on to 2 workers",
        "starting again in 1 s, attempt 1: rank 0 failed first: exit code 3",
        "rank 1 registered: pid 20, 1 of 2",
        "job over: rank 0 failed first: exit code 3",
    ]


class FullDisk(io.StringIO):
    """A stream on which no write succeeds."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_record_on_a_full_disk_is_no_error() -> None:
    Record(FullDisk()).note({"type": "over", "reason": "r"})


def test_store_is_empty_for_the_next_attempt_and_at_the_same_address() -> None:
    with listen("127.0.0.1", 0) as listener:
        address, port = listener.getsockname()
        host = StoreHost(listener, Record(io.StringIO()))
        host.open()
        client = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=20))
        client.set("address of rank 1", "of the last attempt")
        host.renew()
        anew = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=20))
        assert not anew.check(["address of rank 1"])
        anew.set("address of rank 1", "of this attempt")
        assert anew.get("address of rank 1") == b"of this attempt"


def test_store_that_was_never_started_needs_no_renewal() -> None:
    with listen("127.0.0.1", 0) as listener:
        StoreHost(listener, Record(io.StringIO())).renew()


def test_without_torch_the_address_is_left_to_rank_0_also_where_another_process_holds_the_socket() -> None:
    with listen("127.0.0.1", 0) as listener:
        held_elsewhere = listener.dup()
        StoreHost(listener.dup(), Record(io.StringIO())).do_without(is_store_needed=False)
        with held_elsewhere:
            port = held_elsewhere.getsockname()[1]
            store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            store.set("a", "b")


def test_without_torch_a_worker_that_needs_the_store_ends_the_scheduler_with_a_word() -> None:
    with listen("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        program = (
            "import socket, sys, threading; from msrun.cluster.scheduler import Record, StoreHost\n"
            f"host = StoreHost(socket.socket(fileno={listener.fileno()}), Record(sys.stdout))\n"
            "host.do_without(is_store_needed=True)\n"
            "threading.Event().wait()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[listener.fileno()],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
        )
    with socket.create_connection(address):
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert text[24:] == (
        f"a worker asks for torch's store, which needs torch for {sys.executable}: pip install 'msrun[runtime]'\n"
    )


def test_scheduler_keeps_the_record_without_waiting_for_the_store_and_ends_with_its_agent() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with listen("127.0.0.1", 0) as listener, theirs:
        fds = (theirs.fileno(), listener.fileno())
        process = subprocess.Popen(
            [sys.executable, "-c", f"from msrun.cluster.scheduler import run_scheduler as r; raise SystemExit(r{fds})"],
            pass_fds=fds,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
        )
    channel.send({"type": "job", "job_id": "j", "world_size": 1, "host": "h"})
    channel.send({"type": "over", "reason": "done"})
    channel.close()
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert [line[24:] for line in text.splitlines() if "store listens" not in line] == [
        "job j: 1 worker on h",
        "job over: done",
        "agent has gone: scheduler ends",
    ]


def test_store_that_nobody_needs_leaves_its_address_to_whoever_opens_one() -> None:
    """Although another process may hold the socket, too."""
    with listen("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with listener.dup():
            StoreHost(listener, Record(io.StringIO())).do_without(is_store_needed=False)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, timeout=10)
            listen(*address).close()
