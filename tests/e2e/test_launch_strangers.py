"""What somebody without the job's token sends, holds open or floods costs the running job nothing."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_net import HostNet
from job_runner import JobRunner, Running, wait_until

PORT = 8118


@pytest.fixture(scope="module")
def net() -> Iterator[HostNet]:
    """Two hosts of a job, and the second is also the stranger's."""
    with HostNet(2) as hosts:
        yield hosts


@pytest.fixture
def job(msrun: JobRunner, net: HostNet, workers: Path, tmp_path: Path) -> Iterator[list[Running]]:
    """A job of two hosts that runs; at the end both of its halves still do, and hear an interrupt."""
    (tmp_path / "token").write_text("between us\n")
    (tmp_path / "token").chmod(0o600)
    words = ("--worker_num=2", "--local_worker_num=1", "--token_file=token", f"--master_addr={net.address(0)}")
    jobs = [
        msrun.start(
            *words,
            f"--node_rank={node}",
            workers / "wait.py",
            cwd=tmp_path,
            prefix=net.prefix(node),
            log_dir="log_output" if node == 0 else "log_output/node_1",
        )
        for node in range(2)
    ]
    jobs[0].wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    yield jobs
    assert [running.process.poll() for running in jobs] == [None, None], [running.stderr for running in jobs]
    jobs[1].send(signal.SIGINT)
    assert [running.finish().code for running in jobs] == [130, 130]


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


def register(said: str) -> bytes:
    """Return what a host of an earlier protocol says of itself, all of it in the clear."""
    return framed(b'{"type":"register","nonce":"00","proof":"00","request":%s}' % said.encode())


def say(net: HostNet, *pieces: bytes) -> None:
    """Connect from the second host, speak, and listen until the scheduler hangs up or has nothing more to say."""
    place = (net.address(0), PORT)
    with net.inside(1), socket.create_connection(place, timeout=0.5) as stream, contextlib.suppress(OSError):
        for piece in pieces:
            stream.sendall(piece)
        while stream.recv(1 << 16):
            pass


def hello() -> bytes:
    return framed(b'{"type":"hello","protocol":3,"nonce":"%s"}' % (b"0" * 64))


def test_nothing_that_a_stranger_sends_ends_the_job(net: HostNet, job: list[Running]) -> None:
    for depth in range(
        960, 1000, 3
    ):  # what json.loads still takes and json.dumps, a little deeper in the stack, does not
        say(net, register('{"protocol":2,"a":' + "[" * depth + "]" * depth + "}"))
        say(net, register('{"protocol":' + "[" * depth + "]" * depth + "}"))
    say(net, register('{"protocol":2,"a":%s}' % ("9" * 4000)))
    for body in (
        b'{"a":' + b"[" * 980 + b"]" * 980 + b"}",
        b"[" * 4000,
        b'{"type":"failed","attempt":0}',
        random.Random(1).randbytes(4000),
    ):
        say(net, hello(), framed(body), framed(body))
    say(net, b"\x16\x03\x01" + bytes(200))
    say(net, struct.pack("!I", 0), struct.pack("!I", 1 << 31))
    assert "refused" in job[0].stderr


@pytest.mark.slow
def test_flood_of_silent_connections_leaves_descriptors_and_the_port(net: HostNet, job: list[Running]) -> None:
    with contextlib.ExitStack() as held:
        with net.inside(1):
            for _ in range(600):
                held.enter_context(socket.create_connection((net.address(0), PORT), timeout=5))
        descriptors = Path("/proc", str(job[0].pid), "fd")
        wait_until(lambda: len(list(descriptors.iterdir())) < 200, "most of the silent ones are sent away", 10)
        with net.inside(1), socket.create_connection((net.address(0), PORT), timeout=5) as stream:
            assert b'"hello"' in stream.recv(4096), "somebody new is still heard"


STORE_HELLO, SET = b"\0" + struct.pack("<I", 0x3C85F7CE), b"\1"
"""How a client of torch's TCPStore begins, and how it begins to set a key."""


def store_port(job: Running) -> int:
    plan = json.loads((job.log_dir / "plan.json").read_text())
    return int(plan["hosts"][0]["env"]["MASTER_PORT"])


@pytest.mark.slow
def test_workers_that_meet_in_the_folder_of_the_job_do_not_depend_on_the_store(
    msrun: JobRunner, tmp_path: Path
) -> None:
    """Another user of the host holds the store up with half a message; he has no way into the folder."""
    (tmp_path / "train.py").write_text(
        "import os, stat, time\nfrom pathlib import Path\nimport torch, torch.distributed as dist\n"
        "from msrun.runtime import init\nPath('ready_' + os.environ['RANK']).touch()\n"
        "while not Path('go').exists():\n    time.sleep(0.01)\n"
        "init()\nvalue = torch.ones(1)\ndist.all_reduce(value)\n"
        "store = Path(os.environ['MSRUN_RENDEZVOUS'].removeprefix('file://'))\n"
        "print(value.item(), oct(stat.S_IMODE(store.parent.stat().st_mode)), flush=True)\n"
    )
    job = msrun.start("--worker_num=2", "train.py", cwd=tmp_path)
    job.wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    with socket.create_connection(("127.0.0.1", store_port(job)), timeout=30) as stream:
        stream.sendall(STORE_HELLO + SET + struct.pack("<Q", 8))
        (tmp_path / "go").touch()
        ended = job.finish()
    assert ended.code == 0, ended.stderr
    assert ended.log(0).endswith(b"2.0 0o700\n")


@pytest.mark.slow
def test_one_who_reaches_the_store_cannot_take_the_memory_of_the_host(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    """torch's store takes memory for a value as soon as its length has come, and asks nobody who he is."""
    job = msrun.start("--worker_num=1", workers / "wait.py", cwd=tmp_path)
    job.wait_for(tmp_path / "ready_0")
    scheduler = job.pid_of("scheduler")
    with socket.create_connection(("127.0.0.1", store_port(job)), timeout=30) as stream:
        stream.sendall(STORE_HELLO + SET + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 3 << 30))
        with contextlib.suppress(ConnectionResetError):
            assert stream.recv(1) == b"", "it is sent away"
    peak = next(line for line in Path(f"/proc/{scheduler}/status").read_text().splitlines() if "VmHWM" in line)
    assert int(peak.split()[1]) < 2 << 20
    job.send(signal.SIGTERM)
    assert job.finish().code == 143
