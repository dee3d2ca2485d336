"""Commands that start one job on many hosts over SSH: msrun, mpirun, and torchrun by pdsh. For `ssh.py`."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import HERE

JOB = str(HERE / "ssh_job.py")
PORT = 29400
"""Free on every host: its network is its own."""
FANOUT = 64
"""SSH connections that are made at once; pdsh's own default is 32, mpirun's 128."""
WORKER_VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
"""The same for the workers of all; torchrun would set the first one by itself, msrun both."""


@dataclass(frozen=True)
class Job:
    """What a peer has to start."""

    hosts: Sequence[str]
    """Names that SSH knows."""
    workers: int
    """On each host."""
    master: str
    """Address of the first host."""
    ssh_config: Path
    results: Path
    """Folder for the ranks' results, the same on all hosts."""
    logs: Path

    @property
    def world_size(self) -> int:
        """The number of all workers."""
        return len(self.hosts) * self.workers


@dataclass(frozen=True)
class Start:
    """A command and the variables it needs."""

    argv: Sequence[str]
    environ: Mapping[str, str]


Peer = Callable[[Job], Start]


def msrun(job: Job) -> Start:
    """Return msrun's own way: one command."""
    options = [
        "--hosts",
        ",".join(f"{host}:{job.workers}" for host in job.hosts),
        f"--log_dir={job.logs}",
        "--device_target=cpu",
        "--tail_worker_log=none",
    ]
    for name, value in WORKER_VARIABLES.items():
        options += ["--env", f"{name}={value}"]
    return Start([sys.executable, "-m", "msrun", *options, JOB, str(job.results)], {})


def mpirun(job: Job) -> Start:
    """Return mpirun's: one daemon per host, all of them started by mpirun itself.

    Up to its radix of 64 hosts a tree of daemons is flat anyway; without a tree the hosts need no keys of each other.
    """
    options = ["--allow-run-as-root", "-H", ",".join(f"{host}:{job.workers}" for host in job.hosts)]
    for name, value in (
        ("plm_rsh_agent", "ssh"),
        ("plm_rsh_args", f"-F {job.ssh_config}"),
        ("plm_rsh_no_tree_spawn", "1"),
        ("plm_rsh_num_concurrent", "128"),
        ("oob_tcp_if_include", "eth0"),
    ):
        options += ["--mca", name, value]
    # Bound to a core each, the workers of 16 hosts would all share the first ones of this machine.
    options += ["--bind-to", "none"]
    for name, value in {**WORKER_VARIABLES, "MASTER_ADDR": job.master, "MASTER_PORT": str(PORT)}.items():
        options += ["-x", f"{name}={value}"]
    return Start(["mpirun", *options, sys.executable, JOB, str(job.results)], {})


def torchrun_static(job: Job) -> Start:
    """Return torchrun's on every host by pdsh, with ranks that are known before."""
    return _torchrun(job, ["--node-rank", "%n", "--master-addr", job.master, "--master-port", str(PORT)])


def torchrun_c10d(job: Job) -> Start:
    """Return torchrun's on every host by pdsh, with ranks by rendezvous."""
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{job.master}:{PORT}", "--rdzv-id", "benchmark"]
    return _torchrun(job, options)


def _torchrun(job: Job, rendezvous: Sequence[str]) -> Start:
    variables = [f"{name}={value}" for name, value in WORKER_VARIABLES.items()]
    sizes = ["--nnodes", str(len(job.hosts)), "--nproc-per-node", str(job.workers)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *sizes, *rendezvous, JOB, str(job.results)]
    remote = shlex.join(["exec", "env", *variables, *torchrun])
    argv = ["pdsh", "-S", "-R", "ssh", "-f", str(FANOUT), "-w", ",".join(job.hosts), remote]
    return Start(argv, {"PDSH_SSH_ARGS_APPEND": f"-F {job.ssh_config}"})


def find_peers() -> dict[str, Peer]:
    """Return the ways that this machine has, msrun first."""
    peers: dict[str, Peer] = {"msrun": msrun}
    if shutil.which("mpirun"):
        peers["mpirun"] = mpirun
    else:
        print("mpirun is not installed: left out; apt-get install openmpi-bin")
    if shutil.which("pdsh"):
        peers["torchrun-static"] = torchrun_static
        peers["torchrun-c10d"] = torchrun_c10d
    else:
        print("pdsh is not installed: torchrun is left out; apt-get install pdsh")
    return peers
