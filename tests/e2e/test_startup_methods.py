"""Every way to start the example of examples/torch/startup_methods: the same losses, and scripts that leave nothing."""

import shutil
import signal
import sys

import numpy as np
import pytest
from asked_cases import one_fast
from commands import command_path
from job_runner import REPOSITORY
from loss_lines import losses

from ranktable import build_table, write_table

DEADLINE_S = 240.0

pytestmark = pytest.mark.timeout(3 * DEADLINE_S)


class Example:
    """A copy of the example, started in a directory of its own, as a user starts it."""

    def __init__(self, runner, folder, data):
        shutil.copytree(
            REPOSITORY / "examples" / "torch" / "startup_methods",
            folder / "startup_methods",
            ignore=shutil.ignore_patterns("log_output"),
        )
        self.home = folder / "startup_methods"
        self.cwd = folder / "where the user is"
        self.cwd.mkdir()
        self.data = data
        self._runner = runner
        self._env = {
            "PATH": command_path(folder, {"msrun": "-m msrun"}),
            "PYTHON": sys.executable,
            "EPOCHS": "1",
            "DATA_PATH": str(data),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, script, *args, prefix=(), **env):
        """Start a script of the example with bash."""
        settings = {"cwd": self.cwd, "prefix": prefix, "env": {**self._env, **env}}
        return self._runner.start(self.home / script, *args, command=("bash",), **settings)


def ended_well(job):
    ended = job.finish(DEADLINE_S)
    assert ended.code == 0, (ended.stdout, ended.stderr)
    return ended


@pytest.fixture
def example(msrun, tmp_path, few_images):
    return Example(msrun, tmp_path, few_images)


@pytest.fixture(scope="module")
def alone(msrun_of_module, few_images):
    """The losses of `python train.py`."""
    program = REPOSITORY / "examples" / "torch" / "startup_methods" / "train.py"
    done = msrun_of_module.run_alone(program, DATA_PATH=str(few_images), EPOCHS="1")
    assert done.stdout.startswith("rank 0 of 1\n")
    found = losses(done.stdout)
    assert len(found) == 2
    return found


def check_equal(alone, *texts):
    """Check what the ranks, in their order, have printed or logged."""
    for rank, source in enumerate(texts):
        text = source if isinstance(source, str) else source.read_text()
        assert f"rank {rank} of 2\n" in text
        np.testing.assert_allclose(losses(text), alone, rtol=1e-5)


@pytest.mark.slow
def test_msrun_on_one_host_and_on_two(example, host_net, alone):
    logs = example.home / "log_output"
    ended_well(example.start("msrun_single.sh", example.data))
    check_equal(alone, logs / "worker_0.log", logs / "worker_1.log")
    words = (host_net.address(0), example.data)
    jobs = [example.start(f"msrun_{host + 1}.sh", *words, prefix=tuple(host_net.prefix(host))) for host in range(2)]
    for job in jobs:
        ended_well(job)
    check_equal(alone, logs / "worker_0.log", logs / "node_1" / "worker_1.log")


@pytest.mark.slow
def test_msrun_over_ssh(example, ssh_net, alone):
    prefix, home = tuple(ssh_net.prefix(ssh_net.control)), str(ssh_net.home)
    ended_well(example.start("run_ssh.sh", "host0:1,host1:1", example.data, prefix=prefix, HOME=home))
    check_equal(alone, *(example.home / "log_output" / f"worker_{rank}.log" for rank in range(2)))


@pytest.mark.slow
def test_dynamic_cluster_on_one_host_and_on_two(example, host_net, alone):
    ended = ended_well(example.start("run_dynamic_cluster.sh"))
    assert ended.stdout.endswith(b"training success\n")
    logs = example.cwd / "log_output"
    check_equal(alone, ended.stdout.decode(), logs / "worker_1" / "worker_1.log")
    scheduler = (logs / "scheduler" / "scheduler.log").read_text()
    assert "all workers have left" in scheduler and "loss" not in scheduler
    jobs = [
        example.start(
            "run_dynamic_cluster.sh", "2", host_net.address(0), str(host), "1", prefix=tuple(host_net.prefix(host))
        )
        for host in (1, 0)
    ]
    check_equal(alone, *(ended_well(job).stdout.decode() for job in jobs[::-1]))


@pytest.mark.slow
def test_rank_table_on_one_host_and_of_two(example, host_net, alone):
    ended = ended_well(example.start("run.sh", example.data, "2"))
    assert ended.stdout.endswith(b"training success\n")
    check_equal(alone, ended.stdout.decode(), example.cwd / "device1" / "train.log1")
    assert "DEVICE_ID=1\n" in (example.cwd / "device1" / "env.log").read_text()
    assert sorted(path.name for path in example.cwd.iterdir()) == ["device0", "device1"]
    table = example.cwd / "table.json"
    write_table(table, build_table([(host_net.address(host), [4 + host]) for host in range(2)], order="given"))
    words = ("run_cluster.sh", example.data, table.name, "2")
    jobs = [example.start(*words, str(rank), prefix=tuple(host_net.prefix(rank))) for rank in (1, 0)]
    check_equal(alone, *(ended_well(job).stdout.decode() for job in jobs[::-1]))
    assert "DEVICE_ID=5\n" in (example.cwd / "device_1" / "env.log").read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun; apt-get install openmpi-bin")
def test_mpirun_on_one_host_and_on_two(example, host_net, alone):
    """A shell takes the place of ssh."""
    logs = [example.home / "log_output" / "1" / f"rank.{rank}" / "stdout" for rank in range(2)]
    ended_well(example.start("run_mpirun.sh"))
    check_equal(alone, *logs)
    spaces = {host_net.address(host): host_net.namespace(host) for host in range(2)}
    lines = [f'{address}) exec ip netns exec {space} bash -c "$*";;' for address, space in spaces.items()]
    agent = example.home.parent / "rsh"
    agent.write_text("\n".join(["#!/bin/bash", "host=$1", "shift", "case $host in", *lines, "esac"]) + "\n")
    agent.chmod(0o755)
    (example.cwd / "hosts").write_text("".join(f"{address} slots=1\n" for address in spaces))
    agent_of_mpirun = {"OMPI_MCA_plm_rsh_agent": str(agent)}
    ended_well(example.start("run_mpirun.sh", "2", "hosts", prefix=tuple(host_net.prefix(0)), **agent_of_mpirun))
    check_equal(alone, *logs)


NO_TRAINING = """
import os, pathlib, sys, time
who = os.environ.get("RANK_ID") or os.environ.get("MS_NODE_ID") or "scheduler"
pathlib.Path("begun").touch()
while who != "1" or not pathlib.Path("fail").exists():
    time.sleep(0.01)
sys.exit(7)
"""
METHODS = {
    # name: script, words, folders of its processes, what it calls the second, its log
    "table": ("run.sh", ["", "2"], ["device0", "device1"], "rank 1", "train.log1"),
    "dynamic": (
        "run_dynamic_cluster.sh",
        [],
        [f"log_output/{name}" for name in ("worker_0", "worker_1", "scheduler")],
        "worker 1",
        "worker_1.log",
    ),
}


@pytest.mark.parametrize(
    ("method", "signum"),
    [("dynamic", signal.SIGTERM), *one_fast(("table", 0), ("dynamic", 0), ("table", signal.SIGINT))],
)
def test_failed_rank_or_a_signal_ends_all_and_gives_the_status(example, method, signum):
    script, words, folders, name, log = METHODS[method]
    (example.home / "train.py").write_text(NO_TRAINING)
    job = example.start(script, *words)
    job.wait_for(*(example.cwd / folder / "begun" for folder in folders))
    if signum:
        job.send(signum)
        assert job.finish(DEADLINE_S).code == 128 + signum
        return
    (example.cwd / folders[1] / "fail").touch()
    ended = job.finish(DEADLINE_S)
    assert ended.code == 7
    assert f"{name} failed with exit code 7, see {example.cwd}/{folders[1]}/{log}\n" in ended.stderr
    assert ended.stdout.endswith(b"training failed\n")


def test_wrong_words_are_told(example):
    for script, words, text in (
        ("run.sh", ["", "3"], "RANK_SIZE is 2 or 8"),
        ("run_cluster.sh", [""], "bash run_cluster.sh DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START"),
        ("run_cluster.sh", ["", example.home / "rank_table_2pcs.json", "2", "1"], "server 10.0.0.1 begins with rank 0"),
        ("run_cluster.sh", ["", "no.json", "2", "0"], "run_cluster.sh: cannot read"),
    ):
        ended = example.start(script, *words).finish(DEADLINE_S)
        assert ended.code == 2 and text in ended.stderr, ended
