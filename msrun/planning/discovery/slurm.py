"""Slurm: `srun --ntasks-per-node=1 msrun train.py`.

Source: "output environment variables" of srun(1) and sbatch(1). A batch script and a shell of salloc carry the
variables of the whole allocation but none of a step: msrun started there runs once, on that host. A task gets one
processor unless --cpus-per-task says more.
"""

from __future__ import annotations

from collections.abc import Mapping

from msrun.errors import UsageError
from msrun.planning.discovery.surroundings import (
    OFF,
    HostView,
    Surroundings,
    Told,
    derived_port,
    read_number,
    read_place,
)
from msrun.planning.hosts.fault import blamed_on
from ranktable.hostlist.brackets import expand

JOB = "SLURM_JOB_ID"
STEP = "SLURM_STEP_ID"
STEP_NODES = "SLURM_STEP_NUM_NODES"
STEP_TASKS = "SLURM_STEP_NUM_TASKS"
STEP_LIST = "SLURM_STEP_NODELIST"
JOB_NODES = "SLURM_JOB_NUM_NODES"
NODE = "SLURM_NODEID"
NODE_NAME = "SLURMD_NODENAME"
GPUS = "SLURM_GPUS_ON_NODE"


def find_slurm(environ: Mapping[str, str], host: HostView) -> Surroundings | None:
    """Return the job step that this process is a task of, or the host of a batch script; None outside Slurm.

    Raises:
        UsageError: several tasks on a host, or variables that contradict each other.
    """
    if not environ.get(JOB):
        return None
    name = f"Slurm job {environ[JOB]}"
    gpus = Told(read_number(environ, GPUS), GPUS) if environ.get(GPUS) else None
    local = gpus if gpus and gpus.value else None
    if not environ.get(STEP_LIST) or not environ.get(STEP_NODES):
        alone = Told(1, f"no {STEP_NODES}")
        return Surroundings(name=name, node_num=alone, local_worker_num=local, hint=_hint(environ, name))
    _check_tasks(environ)
    node_rank, node_num = read_place(environ, NODE, STEP_NODES)
    if node_num.value == 1:
        return Surroundings(name=name, node_num=node_num, local_worker_num=local, hint=_hint(environ, name))
    nodes = _nodes(environ, node_rank.value, node_num.value)
    return Surroundings(
        name=name,
        node_num=node_num,
        node_rank=node_rank,
        local_worker_num=local,
        master_addr=Told(nodes[0], STEP_LIST),
        master_port=derived_port(JOB, f"slurm {environ[JOB]}.{environ.get(STEP, '')}"),
        cpu_count=host.cpu_count,
        cpu_remedy="srun --cpus-per-task=N gives more",
    )


def _hint(environ: Mapping[str, str], name: str) -> str:
    count = read_number(environ, JOB_NODES) if environ.get(JOB_NODES) else 1
    if count <= 1:
        return ""
    how = "srun --ntasks-per-node=1 msrun ..."
    return f"{name} has {count} nodes ({JOB_NODES}), but msrun was started once, for this host: {how} uses all of them"


def _check_tasks(environ: Mapping[str, str]) -> None:
    tasks = read_number(environ, STEP_TASKS, least=1) if environ.get(STEP_TASKS) else 1
    if tasks > read_number(environ, STEP_NODES, least=1):
        raise UsageError(
            f"{STEP_TASKS}={tasks} on {environ[STEP_NODES]} hosts: srun starts msrun once per worker; start it once "
            f"per host (srun --ntasks-per-node=1 msrun ...), or give {OFF} for {tasks} jobs, each on one host"
        )


def _nodes(environ: Mapping[str, str], node_rank: int, node_num: int) -> list[str]:
    with blamed_on(STEP_LIST):
        nodes = expand(environ[STEP_LIST])
    if len(nodes) != node_num:
        raise UsageError(
            f"{STEP_LIST}={environ[STEP_LIST]}: {len(nodes)} nodes, but {STEP_NODES}={node_num}; are these variables "
            f"of another step? unset them, or give {OFF}"
        )
    own = environ.get(NODE_NAME)
    if own and nodes[node_rank] != own:
        raise UsageError(
            f"{NODE}={node_rank}: is {nodes[node_rank]} in {STEP_LIST}={environ[STEP_LIST]}, but {NODE_NAME}={own}; "
            f"give --node_rank and --master_addr, or {OFF}"
        )
    return nodes
