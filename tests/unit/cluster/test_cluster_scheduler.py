"""The record of a job, and a scheduler that ends with its agent."""

import errno
import io
import os
import re
import resource
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from msrun import contract
from msrun.cluster import rendezvous as scheduler
from msrun.cluster.messages import Channel, encode_message
from msrun.cluster.rendezvous import Record, StoreHost, forget_waiting, limit_memory, listen, run_scheduler

REPOSITORY = Path(__file__).resolve().parents[3]


def test_record_has_one_stamped_line_for_each_moment():
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
        assert not record.is_over
        record.note(message)
    assert record.is_over
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


def test_record_on_a_full_disk_is_no_error(monkeypatch):
    def write(text):
        raise OSError(28, "No space left on device")

    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", write)
    Record(stream).note({"type": "over", "reason": "r"})


def test_store_is_empty_for_the_next_attempt_and_at_the_same_address(monkeypatch):
    monkeypatch.setattr(scheduler, "limit_memory", limited := mock.Mock())
    open_store = pytest.importorskip("torch.distributed").TCPStore
    with listen("127.0.0.1", 0) as listener:
        address, port = listener.getsockname()
        host = StoreHost(listener, Record(said := io.StringIO()))
        host.open()
        limited.assert_called_once_with(scheduler.STORE_BYTES)
        assert said.getvalue().endswith(f" scheduler pid {os.getpid()}: store listens on {address}:{port}\n")
        client = open_store(address, port, is_master=False, timeout=timedelta(seconds=20))
        client.set("address of rank 1", "of the last attempt")
        host.renew()
        anew = open_store(address, port, is_master=False, timeout=timedelta(seconds=20))
        assert not anew.check(["address of rank 1"])
        anew.set("address of rank 1", "of this attempt")
        assert anew.get("address of rank 1") == b"of this attempt"


def test_without_torch_a_worker_that_needs_the_store_ends_the_scheduler_with_a_word():
    with listen("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        program = (
            "import socket, sys, threading; from msrun.cluster.rendezvous import Record, StoreHost\n"
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


def test_store_that_nobody_needs_leaves_its_address_to_whoever_opens_one():
    """Although another process may hold the socket, too."""
    with listen("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with listener.dup():
            StoreHost(listener, Record(io.StringIO())).do_without(is_store_needed=False)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, timeout=10)
            listen(*address).close()


@pytest.mark.parametrize(
    ("told", "start_method", "has_torch", "is_loaded", "asked", "is_late"),
    [
        ({}, "fork", True, False, [mock.call.open()], True),
        ({}, "fork", True, True, [mock.call.open()], False),
        ({}, "exec", True, False, [mock.call.open()], False),
        ({"has_store": False}, "fork", True, False, [], False),
        ({"has_store": False}, "fork", False, False, [], False),
        ({}, "fork", False, False, [mock.call.do_without(is_store_needed=True)], False),
        ({"is_store_needed": False}, "fork", False, False, [mock.call.do_without(is_store_needed=False)], False),
    ],
)
def test_store_is_opened_late_where_workers_may_never_ask_and_by_rank_0_where_there_is_no_torch(
    monkeypatch, capsys, told, start_method, has_torch, is_loaded, asked, is_late
):
    host, said = mock.Mock(is_wanted_late=False), io.StringIO()
    modules = {"torch": None} if is_loaded else {}
    monkeypatch.setattr(scheduler, "sys", SimpleNamespace(modules=modules, stdout=said))
    monkeypatch.setattr(scheduler, "find_spec", lambda name: object() if has_torch else None)
    monkeypatch.setattr(scheduler, "StoreHost", lambda listener, *_: (listener.close(), host)[1])
    on_faults, ended = [], mock.Mock()

    def at_once(_name, work, on_fault):
        on_faults.append(on_fault)
        return SimpleNamespace(start=work)

    monkeypatch.setattr(scheduler, "OwnThread", at_once)
    monkeypatch.setattr(os, "_exit", ended)
    job = {"type": "job", "job_id": "j", "world_size": 1, "host": "h", **told}
    ours, theirs = socket.socketpair()
    with ours, socket.socket() as listener:
        again = {"type": "restarting", "attempt": 1, "delay_s": 0.0, "reason": "x"}
        ours.sendall(b"".join(map(encode_message, [job, {"type": "ready", "start_method": start_method}, again])))
        ours.shutdown(socket.SHUT_WR)
        assert run_scheduler(theirs.detach(), listener.detach()) == contract.EXIT_CLUSTER, "nobody said that it is over"
        assert Channel(ours).receive() == [{"type": "store_ready", "attempt": 1}]
    assert (host.method_calls, host.is_wanted_late) == ([*asked, mock.call.renew()], is_late)
    assert said.getvalue().endswith(" agent has gone: scheduler ends\n")
    for on_fault in on_faults:
        on_fault(OSError("no store"))
        assert ended.call_args_list == [mock.call(1)] and capsys.readouterr().err == "OSError: no store\n"
    assert len(on_faults) == asked.count(mock.call.open())


def test_memory_is_limited_to_so_much_more_than_there_is_now(monkeypatch):
    limits = {"now": (resource.RLIM_INFINITY, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: limits.update(now=values))
    status = Path("/proc/self/status").read_text()
    held = int(re.findall(r"VmData:\s*(\d+) kB", status)[0]) << 10
    limit_memory(1 << 40)
    soft, hard = limits["now"]
    assert abs(soft - held - (1 << 40)) < 1 << 30 and hard == resource.RLIM_INFINITY
    limits["now"] = (1 << 50, 1 << 30)
    limit_memory(1 << 40)
    assert limits["now"] == (1 << 30, 1 << 30), "what was allowed before is not exceeded"


@pytest.mark.parametrize(("has_neighbour", "tries"), [(True, 1), (False, 20)])
def test_free_port_has_a_free_neighbour_where_there_is_one(monkeypatch, has_neighbour, tries):
    tried = []

    class Socket(socket.socket):
        def bind(self, address):
            tried.append(address[1])
            if address[1] and not has_neighbour:
                raise OSError(errno.EADDRINUSE, "in use")
            super().bind((address[0], 0))

    monkeypatch.setattr(socket, "socket", Socket)
    before = os.listdir("/proc/self/fd")
    with listen("127.0.0.1", 0) as listener:
        assert tried[::2] == [0] * (tries + (not has_neighbour)) and len(tried[1::2]) == tries
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1
        assert not has_neighbour or tried[1] == listener.getsockname()[1] + 1
        with socket.create_connection(listener.getsockname(), timeout=5):
            pass


def test_port_is_free_again_right_after_a_job_used_it():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            forget_waiting(listener)
            assert client.recv(1) == b"" and listener.getblocking()
    listen("127.0.0.1", port).close()
