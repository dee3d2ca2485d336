"""Scripts whose processes are started by hand with MS_ROLE: how the scheduler and the workers end."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from host_net import HostNet
from job_runner import free_port

from msrun.errors import ClusterError
from msrun.runtime.joining.meet import WORKER, join, serve
from msrun.runtime.joining.spec import Meeting

DEADLINE_S = 240.0

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def meeting():
    return Meeting(("127.0.0.1",), free_port(), "MS_ROLE", "MS_SCHED_HOST", "the scheduler")


def start(msrun, meeting, role, size, *words, **more):
    env = {"MS_ROLE": role, "MS_WORKER_NUM": str(size), "MS_SCHED_PORT": str(meeting.port), "OMP_NUM_THREADS": "1"}
    env.update(more)
    return subprocess.Popen(
        [sys.executable, *words], env=msrun.environ(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last_words", "is_good"), [("raise ValueError", False), ("dist.destroy_process_group()", True)]
)
def test_scheduler_learns_how_a_worker_ends(msrun, meeting, threads, last_words, is_good):
    scheduler = threads.submit(serve, meeting, 1, DEADLINE_S, 30)
    program = (
        "import os, torch.distributed as dist\nfrom msrun.runtime import init, get_rank\ninit()\n"
        "import sys; assert 'torch.distributed.tensor' not in sys.modules, 'it takes as long as half of torch'\n"
        "print([get_rank(), *(os.environ[n] for n in ('RANK_ID', 'RANK_SIZE', 'DEVICE_ID', 'GLOO_SOCKET_IFNAME'))])\n"
    )
    worker = start(msrun, meeting, "MS_WORKER", 1, "-c", program + last_words)
    out, error = worker.communicate(timeout=DEADLINE_S)
    assert out == "[0, '0', '1', '0', 'lo']\n", error
    if is_good:
        assert worker.returncode == 0, error
        scheduler.result(DEADLINE_S)
    else:
        with pytest.raises(
            ClusterError, match=rf"rank 0 \(pid {worker.pid} on .* ended without release\(\): it failed"
        ):
            scheduler.result(DEADLINE_S)


@pytest.mark.slow
def test_scheduler_ends_with_0_inside_init_under_pytest_too(msrun, meeting, tmp_path):
    script = tmp_path / "test_train.py"
    script.write_text(
        "import atexit\nfrom msrun.runtime import init\n"
        "atexit.register(print, 'at exit')\n"
        "def test_train():\n    init()\n    raise AssertionError('training runs in the scheduler')\n"
    )
    words = ("-m", "pytest", "-s", "-p", "no:cacheprovider", str(script))
    scheduler = start(msrun, meeting, "MS_SCHED", 1, *words, MS_ENABLE_RECOVERY="1")
    came = join(meeting, 1, WORKER, -1, "test", DEADLINE_S, 30)
    came.line.sendall(b"left\n")
    out, error = scheduler.communicate(timeout=DEADLINE_S)
    came.line.close()
    assert scheduler.returncode == 0 and out.endswith("at exit\n"), (out, error)
    assert "training runs" not in out
    assert "MS_ENABLE_RECOVERY=1 recovers nothing here" in error


PARAMETERS_ON_SERVERS = """
import os, sys
import torch
import msrun.mindspore as ms
from msrun.mindspore import nn
from msrun.mindspore.communication import get_rank, init
ms.set_auto_parallel_context(full_batch=True, parallel_mode="data_parallel")
ms.set_ps_context(enable_ps=True)
init()
ms.set_seed(1)
net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 1))
if "MS_ROLE" in os.environ:
    net.set_param_ps()
optimizer = nn.SGD(net.trainable_params(), 0.05)
rows, labels = torch.randn(16, 4), torch.randn(16, 1)
step = ms.value_and_grad(lambda *batch: nn.MSELoss()(net(batch[0]), batch[1]), None, optimizer.parameters)
for _ in range(3):
    loss, gradients = step(rows, labels)
    optimizer(gradients)
    print(float(loss))
if sys.argv[1:] == ["fails"] and get_rank():
    raise ValueError
"""


@pytest.mark.slow
@pytest.mark.parametrize(("words", "status"), [((), 0), (("fails",), 3)], ids=["all end well", "a worker fails"])
def test_parameter_servers_by_hand_train_as_one_process_and_end_with_the_job(msrun, meeting, words, status):
    program = ("-c", PARAMETERS_ON_SERVERS, *words)
    roles = ("MS_SCHED", "MS_PSERVER", "MS_PSERVER", "MS_WORKER", "MS_WORKER")
    jobs = [start(msrun, meeting, role, 2, *program, MS_SERVER_NUM="2") for role in roles]
    said = [job.communicate(timeout=DEADLINE_S) for job in jobs]
    assert [job.returncode for job in jobs[:3]] == [status] * 3, said
    alone = subprocess.run([sys.executable, *program], env=msrun.environ(), capture_output=True, text=True, check=True)
    losses = [[float(line) for line in out.splitlines()] for out in (alone.stdout, *(out for out, _ in said[3:]))]
    assert len(losses[0]) == 3
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-6)
    assert all("ends: " in out.splitlines()[-1] for out, _ in said[1:3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("says", "text"),
    [
        ("rank 1 has failed", "the scheduler at 127.0.0.1:{port} ends the job: rank 1 has failed"),
        (None, "lost the scheduler at 127.0.0.1:{port}"),
    ],
    ids=["another fails", "scheduler dies"],
)
def test_worker_ends_with_the_scheduler_or_when_another_has_failed(msrun, meeting, says, text):
    """A child that was forked meanwhile does not hold the connection."""
    program = (
        "import os, socket, sys, time\nfrom msrun.runtime.joining.meet import Lifeline\n"
        "place = ('127.0.0.1', int(os.environ['MS_SCHED_PORT']))\n"
        "line = Lifeline(socket.create_connection(place), '%s:%d' % place)\n"
        "child = os.fork()\n"
        "if child == 0:\n    sys.stdin.read()\n    os._exit(0)\n"
        "line._line.sendall(b'ready')\ntime.sleep(600)\n"
    )
    with socket.create_server(("127.0.0.1", meeting.port)) as listener:
        listener.settimeout(DEADLINE_S)
        held, hold = os.pipe()
        worker = subprocess.Popen(
            [sys.executable, "-c", program],
            env=msrun.environ({"MS_SCHED_PORT": str(meeting.port)}),
            stdin=held,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(DEADLINE_S)
            assert connection.recv(100)
            if says is not None:
                connection.sendall(f"{says}\n".encode())
                assert connection.recv(100) == b"", "the worker has gone, though its child lives"
    os.close(held)
    os.close(hold)
    assert worker.wait(DEADLINE_S) == -signal.SIGTERM
    assert worker.stderr is not None
    with worker.stderr as stream:
        assert stream.read() == f"msrun: error: {text.format(port=meeting.port)}\n"


MEETING = """
import sys, time
from msrun.runtime.joining.meet import WORKER, Keeper, Lifeline, join
from msrun.runtime.joining.spec import Meeting
addresses, size = tuple(sys.argv[1].split(",")), int(sys.argv[2])
meeting = Meeting(addresses, 8118, "MS_ROLE", "MS_SCHED_HOST", "the scheduler")
"""
SCHEDULER = """
keeper = Keeper(meeting, size, 0, "scheduler", 2)
keeper.gather(600)
keeper.answer()
print(keeper.watch(), flush=True)
"""
PARTNER = """
found = join(meeting, size, WORKER, -1, "test", 600, 2)
line = Lifeline(found.line, meeting.place)
print(found.rank, found.own_address, found.store_place.rpartition(":")[0], flush=True)
"""


def start_on(net, msrun, host, program, *words):
    return subprocess.Popen(
        [*net.prefix(host), sys.executable, "-c", MEETING + program, *words],
        env=msrun.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def net():
    """Two hosts; one test cuts a cable."""
    with HostNet(2) as hosts:
        yield hosts


@pytest.mark.slow
def test_cut_cable_is_noticed_on_both_sides(msrun, net):
    words = (net.address(0), "1")
    scheduler = start_on(net, msrun, 0, SCHEDULER, *words)
    worker = start_on(net, msrun, 1, PARTNER + "time.sleep(600)", *words)
    assert worker.stdout is not None
    assert worker.stdout.readline() == f"0 {net.address(1)} {net.address(0)}\n"
    net.cut(1)
    told, _ = scheduler.communicate(timeout=DEADLINE_S)
    _, error = worker.communicate(timeout=DEADLINE_S)
    assert told == f"rank 0 (test, {net.address(1)})\n"
    assert error.endswith(f"msrun: error: lost the scheduler at {net.address(0)}:8118\n"), error
    assert worker.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_ranks_on_the_keepers_host_use_the_address_that_other_hosts_reach(msrun, net):
    """Of several addresses, of which the first leads others nowhere, as with the networks of mpirun's host."""
    words = (f"127.0.0.1,{net.address(0)}", "2")
    processes = [start_on(net, msrun, 0, SCHEDULER, *words)]
    processes += [start_on(net, msrun, host, PARTNER + "line.leave()", *words) for host in range(2)]
    told = [process.communicate(timeout=DEADLINE_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], told
    own, keeper = told[1][0].split()[1:]
    assert own == net.address(0)
    assert keeper in ("127.0.0.1", net.address(0))  # which of both answers first
    assert told[2][0].split()[1:] == [net.address(1), net.address(0)]
