"""msrun started once per host: by a cluster manager, by another launcher, or typed with `--nnodes MIN:MAX`."""

import os
import shlex
import shutil
import signal
import stat
import sys

import pytest
from job_runner import WORKERS, free_port, read_record, wait_until

from msrun.planning.hosts import count_workers

NAMES = ("train-0", "train-1")
DOMAIN = "train.default.svc.cluster.local"
BECOME = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def places(folder, count):
    envs = [read_record(folder, rank)["env"] for rank in range(count)]
    return [(env["GROUP_RANK"], env["LOCAL_RANK"]) for env in envs]


def slurm_step(node, nodes=2, **more):
    """The variables of one task of a step, as far as they matter."""
    return {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "train-[0-1]", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "train-[0-1]" if nodes == 2 else f"train-{node}", "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(nodes), "SLURM_NODEID": str(node), "SLURM_PROCID": str(node), "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": NAMES[node], **more,
    }  # fmt: skip


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun; apt-get install openmpi-bin")
def test_mpirun_starts_one_msrun_per_host(msrun, host_net, tmp_path):
    """Two hosts with names of their own, which are in /etc/hosts of both."""
    lines = [f"{host_net.address(host)}\t{name}.{DOMAIN}\t{name}" for host, name in enumerate(NAMES)]
    (tmp_path / "hosts").write_text("\n".join(["127.0.0.1\tlocalhost", *lines, ""]))
    become = ["unshare", "--uts", "--mount", "sh", "-c", BECOME, "sh"]
    prefixes = [[*host_net.prefix(host), *become, NAMES[host], str(tmp_path / "hosts")] for host in (0, 1)]
    cases = [f"""{host_net.address(host)}) exec {shlex.join(prefixes[host])} sh -c "$*";;""" for host in (0, 1)]
    agent = tmp_path / "agent"
    agent.write_text("\n".join(["#!/bin/sh", 'host=$1; shift; case "$host" in', *cases, "esac", ""]))
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    command = [
        *("mpirun", "--allow-run-as-root", "--mca", "plm_rsh_agent", str(agent), "-x", "PYTHONPATH", "-x", "TMPDIR"),
        *("-x", "JOB_RUNNER_MARK", "-H", f"{host_net.address(0)}:8,{host_net.address(1)}:8", "-npernode", "1"),
        *(sys.executable, "-m", "msrun"),
    ]
    words = ("--worker_num=2", WORKERS / "record.py")
    ended = msrun.start(*words, cwd=tmp_path, prefix=prefixes[0], command=command).finish()
    assert ended.code == 0, ended
    assert places(tmp_path, 2) == [("0", "0"), ("1", "0")]
    assert f"mpirun: node 1 of 2, 1 worker here, master {host_net.address(0)}:" in ended.stderr
    seen = read_record(tmp_path, 1)["env"]
    assert [name for name in seen if name.startswith(("OMPI_COMM", "PMIX_RANK", "PMIX_SERVER"))] == []
    assert seen["MS_ROLE"] == "MS_WORKER", "by which MindSpore knows that no mpirun has started it"


def test_what_a_cluster_tells_is_shown_and_overruled(msrun_here, tmp_path):
    words = ("--dry_run", WORKERS / "record.py")
    shown = msrun_here("--node_rank=0", *words, cwd=tmp_path, env={**slurm_step(1), "MSRUN_LOCAL_WORKER_NUM": "4"})
    assert shown.code == 0
    lines = [" ".join(line.split()) for line in shown.stdout.decode().splitlines()]
    for line in (
        "node_rank=0 command line",
        "local_worker_num=4 MSRUN_LOCAL_WORKER_NUM",
        "worker_num=8 SLURM_STEP_NUM_NODES x --local_worker_num",
        "master_addr=train-0 SLURM_STEP_NODELIST",
    ):
        assert line in lines
    off = msrun_here("--discover=False", *words, cwd=tmp_path, env=slurm_step(1))
    assert b"1 worker on 1 host" in off.stdout
    quiet = msrun_here("--quiet", *words, cwd=tmp_path, env=slurm_step(1))
    assert quiet.stderr == ""


def test_once_per_worker_is_refused_before_anything_starts(msrun_here, tmp_path):
    environ = slurm_step(1, SLURM_STEP_NUM_TASKS="16", SLURM_PROCID="9", SLURM_LOCALID="1")
    ended = msrun_here(WORKERS / "record.py", cwd=tmp_path, env=environ)
    assert ended.code == 2 and not ended.log_dir.exists()
    (error,) = ended.errors
    assert "SLURM_STEP_NUM_TASKS=16 on 2 hosts: srun starts msrun once per worker; start it once per host" in error


def test_found_value_that_cannot_be_is_refused_with_its_variable(msrun_here, tmp_path):
    environ = slurm_step(0, 1, SLURM_GPUS_ON_NODE="4")
    ended = msrun_here("--device_target=gpu", WORKERS / "record.py", cwd=tmp_path, env=environ)
    assert ended.code == 2
    assert "4 workers but 0 gpu devices visible" in ended.errors[0]
    address = msrun_here(WORKERS / "record.py", cwd=tmp_path, env={"PET_NNODES": "2", "PET_MASTER_ADDR": "-x"})
    assert address.code == 2
    assert "--master_addr '-x': not an address" in address.errors[0]
    assert "(master_addr is set by PET_MASTER_ADDR)" in address.errors[0]


@pytest.mark.parametrize(
    ("words", "script", "workers"),
    [
        ((), "import torch", "1 worker on 1 host"),
        ((), "import mindspore", "8 workers on 1 host"),
        (("--local_worker_num=3",), "import mindspore", "3 workers on 1 host"),
        (("--worker_num=cpu",), "", f"{count_workers(len(os.sched_getaffinity(0)))} on 1 host"),
        (("--worker_num=auto",), "", f"{count_workers(len(os.sched_getaffinity(0)))} on 1 host"),
    ],
)
def test_a_job_has_as_many_workers_as_the_host_or_its_script_wants(msrun_here, tmp_path, words, script, workers):
    (tmp_path / "train.py").write_text(script)
    shown = msrun_here(*words, "--dry_run", "train.py", cwd=tmp_path)
    assert workers in shown.stdout.decode(), shown.stderr
    assert ("8 workers, as of MindSpore's msrun" in shown.stderr) == (workers[0] == "8")


# -- hosts that come late, are lost, leave and come again --------------------------------------------------------------

FRONT_END = (sys.executable, "-m", "msrun.torchrun")
ELASTIC_PROGRAM = """\
import os, time
from pathlib import Path
names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE')
attempt, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK']
Path(f'new_{attempt}_{rank}').write_text(' '.join([*(os.environ[name] for name in names), str(os.getpid())]))
os.rename(f'new_{attempt}_{rank}', f'ran_{attempt}_{rank}')
while not Path(f'go_{attempt}').exists():
    time.sleep(0.01)
"""


class Elastic:
    """Hosts of one job with --nnodes MIN:MAX, each an msrun of its own that is typed with the same words."""

    def __init__(self, msrun, cwd):
        self.msrun, self.cwd, self.port = msrun, cwd, free_port()
        (cwd / "train.py").write_text(ELASTIC_PROGRAM)

    def start(self, nnodes, *words, window="30", workers=1):
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self.port}"]
        given = [f"--nnodes={nnodes}", f"--nproc-per-node={workers}", *rendezvous]
        conf = f"--rdzv-conf=last_call_timeout={window}"
        return self.msrun.start(*given, conf, *words, "train.py", cwd=self.cwd, command=FRONT_END)

    def ran(self, job, attempt, count):
        """Return what the workers of an attempt see, once all of them run."""
        paths = [self.cwd / f"ran_{attempt}_{rank}" for rank in range(count)]
        job.wait_for(*paths)
        return [path.read_text().rpartition(" ")[0] for path in paths]

    def pid(self, attempt, rank):
        return int((self.cwd / f"ran_{attempt}_{rank}").read_text().split()[-1])

    def go(self, attempt):
        (self.cwd / f"go_{attempt}").touch()


@pytest.fixture
def elastic(msrun, tmp_path):
    return Elastic(msrun, tmp_path)


@pytest.mark.slow
def test_those_that_have_come_run_the_job_and_a_later_one_waits_until_it_is_needed(elastic):
    first = elastic.start("1:3", window="0.5", workers=2)
    assert elastic.ran(first, 0, 2) == ["0 0 2 0 1", "1 1 2 0 1"]
    late = elastic.start("1:3", workers=2)
    wait_until(lambda: "this host is used from its next start on" in late.stderr, "it waits")
    elastic.go(0)
    ended, unused = first.finish(), late.finish()
    assert ended.code == 0, ended.stderr
    assert ended.read_json("plan.json")["world_size"] == 2
    assert unused.code == 0 and "the job has ended without this host" in unused.stderr


@pytest.mark.slow
def test_the_most_begin_at_once_also_on_one_machine(elastic):
    elastic.go(0)
    jobs = [elastic.start("1:2", window="600", workers=2) for _ in range(2)]
    ended = [job.finish() for job in jobs]
    assert [job.code for job in ended] == [0, 0], ended
    assert elastic.ran(jobs[0], 0, 4) == ["0 0 4 0 2", "1 1 4 0 2", "2 0 4 1 2", "3 1 4 1 2"]


def test_fewer_than_are_enough_wait(elastic):
    job = elastic.start("2:3", window="0")
    wait_until(lambda: "1 of 3 registered, missing" in job.stderr, "it has waited for a while")
    job.send(signal.SIGTERM)
    assert job.finish().code == 143


@pytest.mark.slow
def test_job_goes_on_with_fewer_hosts_and_with_one_that_comes_again(elastic):
    """Loss, TERM and a late host, each of which starts the job again on those that are there."""
    first = elastic.start("1:3", "--max-restarts=3")
    wait_until(lambda: "registered with 1 worker" in first.stderr, "the scheduler is there")
    others = [elastic.start("1:3", "--max-restarts=3") for _ in range(2)]
    elastic.ran(first, 0, 3)
    others[1].send(signal.SIGKILL)
    others[1].finish()
    assert elastic.ran(first, 1, 2) == ["0 0 2 0 2", "1 0 2 1 2"]
    again = elastic.start("1:3", "--max-restarts=3")
    wait_until(lambda: "this host is used from its next start on" in again.stderr, "it waits")
    os.kill(elastic.pid(1, 0), signal.SIGKILL)
    assert elastic.ran(first, 2, 3) == ["0 0 3 0 3", "1 0 3 1 3", "2 0 3 2 3"]
    again.send(signal.SIGTERM)
    assert elastic.ran(first, 3, 2) == ["0 0 2 0 2", "1 0 2 1 2"]
    left = again.finish()
    assert left.code == 143 and "stopped by SIGTERM" in left.stderr
    elastic.go(3)
    ended = [job.finish() for job in (first, others[0])]
    assert [job.code for job in ended] == [0, 0], ended
    assert "left by a signal: host 3" in ended[0].stderr
    assert ended[0].read_json("plan.json")["world_size"] == 2
    elastic.msrun.prove_nothing_left()


def test_host_that_comes_is_used_at_once_where_that_is_wanted(elastic):
    first = elastic.start("1:2", "--max-restarts=1", "--rescale=now", window="0")
    assert elastic.ran(first, 0, 1) == ["0 0 1 0 1"]
    late = elastic.start("1:2", "--max-restarts=1", "--rescale=now")
    assert elastic.ran(first, 1, 2) == ["0 0 2 0 2", "1 0 2 1 2"]
    elastic.go(1)
    ended = [job.finish() for job in (first, late)]
    assert [job.code for job in ended] == [0, 0], ended
    elastic.msrun.prove_nothing_left()
