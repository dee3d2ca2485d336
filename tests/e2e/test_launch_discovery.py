"""msrun started once per host by a cluster manager or another launcher, with nothing said about hosts."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from host_net import HostNet
from job_runner import Finished, JobRunner, Running

from msrun.planning.ranks import count_workers

NAMES = ("train-0", "train-1")
DOMAIN = "train.default.svc.cluster.local"
BECOME = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'

ALL_REDUCE = """
import json, os, torch
import torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.tensor([float(dist.get_rank())])
dist.all_reduce(ranks)
with open(f"record_{dist.get_rank()}.json", "w") as file:
    json.dump({"env": dict(os.environ), "sum": ranks.item()}, file)
dist.destroy_process_group()
"""
"""Plain torch: it finds its world by itself."""


class NamedHosts:
    """Two hosts with names of their own, which are in /etc/hosts of both."""

    def __init__(self, runner: JobRunner, net: HostNet, cwd: Path) -> None:
        self.runner = runner
        self.net = net
        self.cwd = cwd
        lines = [f"{net.address(host)}\t{name}.{DOMAIN}\t{name}" for host, name in enumerate(NAMES)]
        (cwd / "hosts").write_text("\n".join(["127.0.0.1\tlocalhost", *lines, ""]))

    def prefix(self, host: int) -> list[str]:
        """Return the words that run a command on a host."""
        become = ["unshare", "--uts", "--mount", "sh", "-c", BECOME, "sh"]
        return [*self.net.prefix(host), *become, NAMES[host], str(self.cwd / "hosts")]

    def start_all(self, environs: Sequence[Mapping[str, str]], *words: str | Path) -> list[Running]:
        """Start the same command on both hosts. The last comes first: it has to wait for the other."""
        jobs = [
            self.runner.start(*words, cwd=self.cwd, prefix=self.prefix(host), env=environs[host], log_dir=log_dir(host))
            for host in (1, 0)
        ]
        return jobs[::-1]


@pytest.fixture(scope="module")
def net() -> Iterator[HostNet]:
    with HostNet(2) as hosts:
        yield hosts


@pytest.fixture
def hosts(msrun: JobRunner, net: HostNet, tmp_path: Path) -> NamedHosts:
    return NamedHosts(msrun, net, tmp_path)


def log_dir(node: int) -> str:
    return f"log_output/node_{node}" if node else "log_output"


def record(folder: Path, rank: int) -> dict[str, Any]:
    env: dict[str, Any] = json.loads((folder / f"record_{rank}.json").read_text())["env"]
    return env


def places(folder: Path, count: int) -> list[tuple[str, str]]:
    return [(env["GROUP_RANK"], env["LOCAL_RANK"]) for env in (record(folder, rank) for rank in range(count))]


def slurm_step(node: int, nodes: int = 2, **more: str) -> dict[str, str]:
    """The variables of one task of a step, as far as they matter."""
    return {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "train-[0-1]", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "train-[0-1]" if nodes == 2 else f"train-{node}", "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(nodes), "SLURM_NODEID": str(node), "SLURM_PROCID": str(node), "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": NAMES[node], **more,
    }  # fmt: skip


@pytest.mark.slow
def test_step_of_slurm_needs_no_option(hosts: NamedHosts, workers: Path, tmp_path: Path) -> None:
    environs = [slurm_step(node, SLURM_GPUS_ON_NODE="2") for node in (0, 1)]
    jobs = hosts.start_all(environs, "--device_target=cpu", workers / "record.py")
    ended = [job.finish() for job in jobs]
    assert [job.code for job in ended] == [0, 0], ended
    assert places(tmp_path, 4) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    line = "msrun: Slurm job 4711: node 1 of 2, 2 workers here, master train-0:"
    assert line in ended[1].stderr and "SLURM_STEP_NODELIST" in ended[1].stderr
    assert "settings:" not in ended[1].stderr, "the line has said it"
    sources = {setting["name"]: setting["source"] for setting in ended[1].read_json("plan.json")["settings"]}
    assert sources["node_rank"] == "SLURM_NODEID" and sources["local_worker_num"] == "SLURM_GPUS_ON_NODE"
    assert record(tmp_path, 3)["SLURM_JOB_ID"] == "4711"


@pytest.mark.slow
def test_rendezvous_of_torchrun_is_the_meeting_and_hosts_are_numbered_by_address(
    hosts: NamedHosts, workers: Path, tmp_path: Path
) -> None:
    pet = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "train-0:2940",
    }
    ended = [job.finish() for job in hosts.start_all([pet, pet], workers / "record.py")]
    assert [job.code for job in ended] == [0, 0], ended
    assert places(tmp_path, 2) == [("0", "0"), ("1", "0")]
    assert not [name for name in record(tmp_path, 1) if name.startswith("PET_")], "of msrun, not of its workers"
    line = "msrun: torchrun's variables: one of 2, 1 worker here, master train-0:2940 (PET_NNODES, "
    assert all(line in job.stderr for job in ended)


@pytest.mark.slow
def test_an_elastic_job_begins_with_the_hosts_that_come(hosts: NamedHosts, workers: Path, tmp_path: Path) -> None:
    pet = {"PET_NNODES": "2:3", "PET_NPROC_PER_NODE": "1", "PET_RDZV_BACKEND": "c10d"}
    pet["PET_RDZV_ENDPOINT"] = "train-0:2940"
    ended = [job.finish() for job in hosts.start_all([pet, pet], "--join_window=1", workers / "record.py")]
    assert [job.code for job in ended] == [0, 0], ended
    assert places(tmp_path, 2) == [("0", "0"), ("1", "0")]
    assert {record(tmp_path, rank)["WORLD_SIZE"] for rank in (0, 1)} == {"2"}


@pytest.mark.slow
def test_pods_of_an_indexed_job_find_pod_0_by_their_service(hosts: NamedHosts, workers: Path, tmp_path: Path) -> None:
    environs = [{"JOB_COMPLETION_INDEX": str(node), "KUBERNETES_SERVICE_HOST": "10.96.0.1"} for node in (0, 1)]
    words = ("--worker_num=3", workers / "record.py")
    environs[0]["MSRUN_LOCAL_WORKER_NUM"], environs[1]["MSRUN_LOCAL_WORKER_NUM"] = "2", "1"
    ended = [job.finish() for job in hosts.start_all(environs, *words)]
    assert [job.code for job in ended] == [0, 0], ended
    assert places(tmp_path, 3) == [("0", "0"), ("0", "1"), ("1", "0")]
    assert f"Kubernetes pod train-1: node 1 of 3, 1 worker here, master train-0.{DOMAIN}:8118" in ended[1].stderr


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun; apt-get install openmpi-bin")
def test_mpirun_starts_one_msrun_per_host(hosts: NamedHosts, tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    lines = ["#!/bin/sh", 'host=$1; shift; case "$host" in']
    for host in (0, 1):
        lines.append(f"""{hosts.net.address(host)}) exec {shlex.join(hosts.prefix(host))} sh -c "$*";;""")
    agent.write_text("\n".join([*lines, "esac", ""]))
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    command = [
        *("mpirun", "--allow-run-as-root", "--mca", "plm_rsh_agent", str(agent), "-x", "PYTHONPATH", "-x", "TMPDIR"),
        *("-x", "JOB_RUNNER_MARK", "-H", f"{hosts.net.address(0)}:8,{hosts.net.address(1)}:8", "-npernode", "1"),
        *(sys.executable, "-m", "msrun"),
    ]
    (tmp_path / "train.py").write_text(ALL_REDUCE)
    job = hosts.runner.start("--worker_num=4", "train.py", cwd=tmp_path, prefix=hosts.prefix(0), command=command)
    ended = job.finish()
    assert ended.code == 0, ended
    assert places(tmp_path, 4) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert f"mpirun: node 1 of 2, 2 workers here, master {hosts.net.address(0)}:" in ended.stderr
    seen = record(tmp_path, 3)
    assert [name for name in seen if name.startswith(("OMPI_COMM", "PMIX_RANK", "PMIX_SERVER"))] == []
    assert seen["MS_ROLE"] == "MS_WORKER", "by which MindSpore knows that no mpirun has started it"
    assert json.loads((tmp_path / "record_0.json").read_text())["sum"] == 6.0


@pytest.mark.slow
def test_one_task_of_an_allocation_is_a_job_on_one_host(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    ended = msrun.run("--worker_num=2", workers / "record.py", cwd=tmp_path, env=slurm_step(0, 1))
    assert ended.code == 0
    assert record(tmp_path, 1)["GROUP_WORLD_SIZE"] == "1"
    assert "Slurm job 4711 has 2 nodes (SLURM_JOB_NUM_NODES), but msrun was started once" in ended.stderr


def test_what_a_cluster_tells_is_shown_given_up_and_overruled(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    words = ("--dry_run", workers / "record.py")
    shown = msrun.run("--node_rank=0", *words, cwd=tmp_path, env={**slurm_step(1), "MSRUN_LOCAL_WORKER_NUM": "4"})
    assert shown.code == 0
    lines = [" ".join(line.split()) for line in shown.stdout.decode().splitlines()]
    for line in (
        "node_rank=0 command line",
        "local_worker_num=4 MSRUN_LOCAL_WORKER_NUM",
        "worker_num=8 SLURM_STEP_NUM_NODES x --local_worker_num",
        "master_addr=train-0 SLURM_STEP_NODELIST",
    ):
        assert line in lines
    off = msrun.run("--discover=False", *words, cwd=tmp_path, env=slurm_step(1))
    assert b"1 worker on 1 host" in off.stdout
    quiet = msrun.run("--quiet", *words, cwd=tmp_path, env=slurm_step(1))
    assert quiet.stderr == ""


def test_once_per_worker_is_refused_before_anything_starts(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    environ = slurm_step(1, SLURM_STEP_NUM_TASKS="16", SLURM_PROCID="9", SLURM_LOCALID="1")
    ended = msrun.run(workers / "record.py", cwd=tmp_path, env=environ)
    assert ended.code == 2 and not ended.log_dir.exists()
    (error,) = ended.errors
    assert error == (
        "msrun: error: SLURM_STEP_NUM_TASKS=16 on 2 hosts: srun starts msrun once per worker; start it once per host "
        "(srun --ntasks-per-node=1 msrun ...), or give --discover=False for 16 jobs, each on one host"
    )


def test_found_value_that_a_job_cannot_have_is_refused_with_its_variable(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    environ = slurm_step(0, 1, SLURM_GPUS_ON_NODE="4")
    ended = msrun.run("--device_target=gpu", workers / "record.py", cwd=tmp_path, env=environ)
    assert ended.code == 2
    assert "4 workers but 0 gpu devices visible" in ended.errors[0]
    address = msrun.run(workers / "record.py", cwd=tmp_path, env={"PET_NNODES": "2", "PET_MASTER_ADDR": "-x"})
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
def test_a_job_has_as_many_workers_as_the_host_or_its_script_wants(
    msrun_here: Callable[..., Finished], tmp_path: Path, words: tuple[str, ...], script: str, workers: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    shown = msrun_here(*words, "--dry_run", "train.py", cwd=tmp_path)
    assert workers in shown.stdout.decode(), shown.stderr
    assert ("8 workers, as of MindSpore's msrun" in shown.stderr) == (workers[0] == "8")
