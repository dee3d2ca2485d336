"""Kinds that are no Kubernetes objects: shell scripts and a compose file. Pure.

Every word of the user is quoted for the shell; what stands in a directive of Slurm has been checked to be one plain
word.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from launch_templates.emit import dump_documents
from launch_templates.errors import BadValue
from launch_templates.job import grace_s, log_mount, msrun_options, pod_log_dir
from launch_templates.quantity import parse_quantity
from launch_templates.spec import JobSpec
from launch_templates.spec_checks import join_statuses

_SHELL = "#!/usr/bin/env bash\n"


@dataclass(frozen=True)
class Script:
    """A kind of this module."""

    comment: str
    takes: tuple[str, ...]
    """Fields of JobSpec that it has a place for."""
    write: Callable[[JobSpec], str]
    """Text without the comment."""


def _run(spec: JobSpec) -> str:
    return f"{_SHELL}{_exports(spec)}exec {shlex.join(_local_msrun(spec))}\n"


def _local_msrun(spec: JobSpec) -> list[str]:
    count = spec.local_worker_num
    return ["msrun", f"--worker_num={count}", f"--local_worker_num={count}", *_own_options(spec), *spec.script]


def _run_cluster(spec: JobSpec) -> str:
    usage = "master_addr=${1:?usage: run_cluster.sh MASTER_ADDR NODE_RANK} node_rank=${2:?give NODE_RANK, from 0}\n"
    first, *rest = msrun_options(spec, master_addr="", node_rank=None)
    others = [word for word in rest if not word.startswith(("--master_addr", "--log_dir", "--grace"))]
    place = '"--master_addr=$master_addr" "--node_rank=$node_rank"'
    words = shlex.join([*others, *_own_options(spec), *spec.script])
    return f"{_SHELL}{usage}{_exports(spec)}exec msrun {first} {place} {words}\n"


def _own_options(spec: JobSpec) -> list[str]:
    """What msrun itself does, where no cluster does it."""
    return [
        *([f"--log_dir={spec.log_dir}"] if spec.log_dir else []),
        *_restart_options(spec),
        f"--grace={grace_s(spec)}",
    ]


def _restart_options(spec: JobSpec) -> list[str]:
    lists = {"restart_on": spec.restart_on, "no_restart_on": spec.no_restart_on}
    given = [f"--{name}={join_statuses(statuses)}" for name, statuses in lists.items() if statuses]
    return [f"--max_restarts={spec.max_restarts}", *given]


def _exports(spec: JobSpec) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in spec.env.items())


def _slurm(spec: JobSpec) -> str:
    if spec.device_target == "Ascend":
        raise BadValue("device_target", spec.device_target, "CPU or GPU with slurm", "ask for --gres by hand")
    cpus, memory = math.ceil(parse_quantity(spec.cpu)), math.ceil(parse_quantity(spec.memory) / 2**20)
    directives = {
        "job-name": spec.name,
        "nodes": spec.nodes + spec.spares,
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "mem": f"{memory}M",
        "gpus-per-node": spec.local_worker_num if spec.device_target == "GPU" else None,
        "partition": spec.queue,
        "qos": spec.priority,
        "time": f"{spec.deadline_s // 60}:{spec.deadline_s % 60:02}" if spec.deadline_s else None,
        # steps get it; msrun in place of the batch script is no step
        "signal": f"{'B:' if spec.spares else ''}TERM@{spec.grace_s}" if spec.deadline_s else None,
    }
    lines = [f"#SBATCH --{name}={value}\n" for name, value in directives.items() if value is not None]
    lines += ["#SBATCH --no-requeue\n", *(["#SBATCH --no-kill\n"] if spec.spares else [])]
    count = f"--local_worker_num={spec.local_worker_num}"
    options = [count, f"--cluster_time_out={spec.cluster_time_out}", *_own_options(spec)]
    if spec.spares:
        words = shlex.join([*options, f"--spares={spec.spares}", *(f"--env={name}" for name in spec.env), *spec.script])
        command = f'msrun "--hosts=$SLURM_JOB_NODELIST" {words}'
    else:
        srun = ["srun", "--ntasks-per-node=1", f"--cpus-per-task={cpus}", "--kill-on-bad-exit=1"]
        command = shlex.join([*srun, "msrun", *options, *spec.script])
    return f"{_SHELL}{''.join(lines)}{_exports(spec)}exec {command}\n"


def _compose(spec: JobSpec) -> str:
    if spec.device_target == "Ascend":
        raise BadValue("device_target", spec.device_target, "CPU or GPU with compose", "use a kind of Kubernetes")
    mount = log_mount(spec)
    volumes = [f"{claim}:{path}" for claim, path in spec.claims.items()]
    service: dict[str, Any] = {
        "image": spec.image,
        "user": f"{spec.user_id}:{spec.user_id}",
        "shm_size": str(int(parse_quantity(spec.shm_size))),
        "stop_grace_period": f"{spec.grace_s}s",
        "restart": "no",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "environment": {"PYTHONUNBUFFERED": "1", **{name: _literal(value) for name, value in spec.env.items()}},
        **({"volumes": volumes} if volumes else {}),
        # mode 1777: the process is not root and makes its log directory there
        **({"tmpfs": [f"{mount}:mode=1777"]} if mount else {}),
        "deploy": {"resources": _compose_resources(spec)},
    }
    services = {f"node{rank}": {**service, **_compose_node(spec, rank)} for rank in range(spec.nodes)}
    document: dict[str, Any] = {"name": spec.name, "services": services}
    if spec.claims:
        document["volumes"] = {claim: {"external": True} for claim in spec.claims}
    return dump_documents([document])


def _compose_node(spec: JobSpec, rank: int) -> dict[str, Any]:
    here = JobSpec(**{**vars(spec), "log_dir": pod_log_dir(spec)})
    options = msrun_options(here, master_addr="node0", node_rank=str(rank))
    words = ["msrun", *options, *_restart_options(spec), *spec.script]
    return {"hostname": f"node{rank}", "command": [_literal(word) for word in words]}


def _compose_resources(spec: JobSpec) -> dict[str, Any]:
    memory = str(int(parse_quantity(spec.memory)))
    found: dict[str, Any] = {"limits": {"cpus": str(parse_quantity(spec.cpu)), "memory": memory}}
    if spec.device_target == "GPU":
        device = {"driver": "nvidia", "count": spec.local_worker_num, "capabilities": ["gpu"]}
        found["reservations"] = {"devices": [device]}
    return found


def _literal(text: str) -> str:
    """Text that compose turns back: it replaces `$NAME` and `${NAME}`, and makes `$` of `$$`."""
    return text.replace("$", "$$")


_BY_MSRUN = (
    "script", "local_worker_num", "log_dir", "max_restarts", "restart_on", "no_restart_on", "grace_s", "env"
)  # fmt: skip

SCRIPTS: Mapping[str, Script] = {
    "compose": Script(
        "compose: compose.yaml with one container for each host; for a machine with Docker\n\n"
        "Ranks: container nodeI has node rank I; node0 is the master, known by its name on the file's network.\n"
        "msrun restarts workers itself. Volumes of claims must exist: docker volume create CLAIM.",
        (*_BY_MSRUN, "name", "image", "nodes", "device_target", "cpu", "memory", "shm_size", "master_port",
         "cluster_time_out", "user_id", "claims"),
        _compose,
    ),
    "run": Script(
        "run: shell script for one host\n\nRanks: msrun numbers the workers of this host. It restarts them itself.",
        _BY_MSRUN,
        _run,
    ),
    "run-cluster": Script(
        "run-cluster: shell script to start by hand on every host, with MASTER_ADDR and NODE_RANK\n\n"
        "Ranks: bash run_cluster.sh MASTER_ADDR NODE_RANK, where MASTER_ADDR is an address of the host with\n"
        "NODE_RANK 0 that all others reach. msrun restarts workers itself.",
        (*_BY_MSRUN, "nodes", "master_port", "cluster_time_out"),
        _run_cluster,
    ),
    "slurm": Script(
        "slurm: batch script of Slurm; srun starts one msrun on each node\n\n"
        "Ranks: msrun takes node rank, nodes, master and port from the variables of the job step.\n"
        "A failed node ends the step (kill-on-bad-exit), with its exit status. msrun restarts workers itself. With a\n"
        "deadline, processes get SIGTERM grace_s seconds before it.\n"
        "With spares, one msrun on the first node starts the workers of all by SSH, which the cluster must allow in\n"
        "an allocation (pam_slurm_adopt). A lost node then costs a restart; the first node cannot be replaced.",
        (*_BY_MSRUN, "name", "nodes", "device_target", "cpu", "memory", "cluster_time_out", "spares", "deadline_s",
         "queue", "priority"),
        _slurm,
    ),
}  # fmt: skip
