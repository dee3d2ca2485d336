"""Schedulers and clouds that say a host's place in plain variables: a table, one row each.

The names are those of each one's own documentation: SkyPilot (distributed jobs), dstack (distributed tasks), Amazon
SageMaker (training toolkit), Vertex AI (CLUSTER_SPEC), Azure ML (PyTorch distribution), LeaderWorkerSet, IBM's jsrun,
MPICH's and Intel MPI's hydra; and what people export by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from msrun.errors import UsageError
from msrun.planning.discovery.surroundings import (
    OFF,
    HostView,
    Surroundings,
    Told,
    derived_port,
    read_master,
    read_number,
    read_place,
    read_port,
)

LISTED = "number of hosts in "
BY_HAND = "NODE_RANK and MASTER_ADDR"
"""What people export themselves."""


@dataclass(frozen=True, kw_only=True)
class Variables:
    """The variables of one scheduler; of several names the first that is set counts."""

    name: str
    """In words; `{NAME}` stands for the value of that variable."""
    node_rank: str
    node_num: tuple[str, ...] = ()
    hosts: str = ""
    """Lists all hosts in the order of their ranks, one on a line; the first one is node 0."""
    needed: tuple[str, ...] = ()
    """Must be set, too: what tells this one from others with the same words."""
    worker_num: str = ""
    """Workers of all hosts."""
    local_worker_num: tuple[str, ...] = ()
    """Workers on this host; 0 = it has no devices."""
    tasks_here: str = ""
    """How many processes were started on this host, each of which sees its own rank: must be 1."""
    once: str = ""
    """How to have one a host, where that is not so."""
    master_addr: tuple[str, ...] = ()
    master_port: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    """What tells two jobs of a host apart; a port follows from it where none is said."""
    remedy: str = ""


TABLE = (
    Variables(
        name="SkyPilot task {SKYPILOT_TASK_ID}",
        node_rank="SKYPILOT_NODE_RANK",
        node_num=("SKYPILOT_NUM_NODES",),
        hosts="SKYPILOT_NODE_IPS",
        local_worker_num=("SKYPILOT_NUM_GPUS_PER_NODE",),
        job=("SKYPILOT_TASK_ID",),
    ),
    Variables(
        name="dstack run {DSTACK_RUN_NAME}",
        node_rank="DSTACK_NODE_RANK",
        node_num=("DSTACK_NODES_NUM",),
        local_worker_num=("DSTACK_GPUS_PER_NODE",),
        master_addr=("DSTACK_MASTER_NODE_IP",),
        job=("DSTACK_RUN_NAME",),
    ),
    Variables(
        name="Azure ML run {AZUREML_RUN_ID}",
        node_rank="NODE_RANK",
        needed=("AZUREML_RUN_ID", "MASTER_ADDR", "WORLD_SIZE", "RANK"),
        node_num=("WORLD_SIZE",),
        master_addr=("MASTER_ADDR",),
        master_port=("MASTER_PORT",),
    ),
    Variables(
        name="LeaderWorkerSet pod",
        node_rank="LWS_WORKER_INDEX",
        node_num=("LWS_GROUP_SIZE",),
        master_addr=("LWS_LEADER_ADDRESS",),
    ),
    Variables(
        name="jsrun",
        node_rank="JSM_NAMESPACE_RANK",
        node_num=("JSM_NAMESPACE_SIZE",),
        tasks_here="JSM_NAMESPACE_LOCAL_SIZE",
        once="jsrun -r 1 msrun ...",
        job=("LSB_JOBID",),
        remedy="add --master_addr ADDRESS of the host of rank 0: jsrun -r 1 msrun --master_addr ADDRESS ...",
    ),
    Variables(
        name="mpiexec",
        node_rank="PMI_RANK",
        node_num=("PMI_SIZE",),
        tasks_here="MPI_LOCALNRANKS",
        once="mpiexec -ppn 1 msrun ...",
        remedy="add --master_addr ADDRESS of the host of rank 0: mpiexec -ppn 1 msrun --master_addr ADDRESS ...",
    ),
    Variables(
        name=BY_HAND,
        node_rank="NODE_RANK",
        needed=("MASTER_ADDR",),
        node_num=("NNODES", "NUM_NODES", "NODE_COUNT"),
        worker_num="WORLD_SIZE",
        local_worker_num=("LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "GPUS_PER_NODE"),
        master_addr=("MASTER_ADDR",),
        master_port=("MASTER_PORT",),
    ),
)
"""The more particular first."""


def find_variables(environ: Mapping[str, str], host: HostView) -> Surroundings | None:
    """Return the job of the first row whose variables are set.

    Raises:
        UsageError: several processes on a host, or variables that contradict each other.
    """
    for row in TABLE:
        counts = (*row.node_num, row.hosts, row.worker_num)
        if all(environ.get(name) for name in (row.node_rank, *row.needed)) and any(map(environ.get, counts)):
            return _read(row, environ, host)
    return None


def _read(row: Variables, environ: Mapping[str, str], host: HostView) -> Surroundings:
    _check_tasks(row, environ)
    node_num, hosts = _node_num(row, environ)
    job = Surroundings(name=_name(row.name, environ), node_num=node_num, local_worker_num=_local(row, environ))
    if node_num is not None and node_num.value == 1:
        return job
    node_rank = Told(read_number(environ, row.node_rank), row.node_rank)
    if node_num is not None:
        read_place({**environ, node_num.source: str(node_num.value)}, row.node_rank, node_num.source)
    total = row.worker_num if node_num is None else ""
    key = " ".join(filter(None, map(environ.get, row.job)))
    return replace(
        job,
        node_rank=node_rank,
        worker_num=Told(read_number(environ, total, least=1), total) if total else None,
        master_addr=Told(hosts[0], row.hosts) if hosts else read_master(environ, host, node_rank, *row.master_addr),
        master_port=read_port(environ, *row.master_port) or (derived_port(" and ".join(row.job), key) if key else None),
        remedy=row.remedy,
    )


def _node_num(row: Variables, environ: Mapping[str, str]) -> tuple[Told[int] | None, list[str]]:
    """Return the number of hosts, if a variable says it, and the list of them, if there is one."""
    hosts = environ.get(row.hosts, "").split()
    count = next((name for name in row.node_num if environ.get(name)), "")
    if not count:
        return (Told(len(hosts), LISTED + row.hosts) if hosts else None), hosts
    number = read_number(environ, count, least=1)
    if hosts and len(hosts) != number:
        raise UsageError(f"{count}={number}: but {row.hosts} has {len(hosts)} hosts; give {OFF}")
    return Told(number, count), hosts


def _check_tasks(row: Variables, environ: Mapping[str, str]) -> None:
    tasks = read_number(environ, row.tasks_here, least=1) if environ.get(row.tasks_here) else 1
    if tasks > 1:
        raise UsageError(
            f"{row.tasks_here}={tasks}: {row.name} starts msrun once per worker; start it once per host ({row.once}), "
            f"or give {OFF} for as many jobs, each on one host"
        )
    if "AZUREML_RUN_ID" in row.needed and environ["RANK"] != environ["NODE_RANK"]:
        raise UsageError(
            f"RANK={environ['RANK']} on node {environ['NODE_RANK']}: Azure ML starts msrun once per worker; set "
            f"process_count_per_instance: 1, or give {OFF} for as many jobs, each on one host"
        )


def _local(row: Variables, environ: Mapping[str, str]) -> Told[int] | None:
    name = next((name for name in row.local_worker_num if environ.get(name)), "")
    number = read_number(environ, name) if name else 0
    return Told(number, name) if number else None


def _name(text: str, environ: Mapping[str, str]) -> str:
    before, brace, rest = text.partition("{")
    value = environ.get(rest.rstrip("}"), "") if brace else ""
    return (before + value).strip() if value else before.strip()


SAGEMAKER_HOSTS = "SM_HOSTS"
SAGEMAKER_HOST = "SM_CURRENT_HOST"
SAGEMAKER_GPUS = "SM_NUM_GPUS"
SAGEMAKER_JOB = "TRAINING_JOB_NAME"
VERTEX = "CLUSTER_SPEC"


def find_sagemaker(environ: Mapping[str, str], _host: HostView) -> Surroundings | None:
    """Return the SageMaker training job that this container is of: its hosts are a JSON list.

    Raises:
        UsageError: no such list, or this host is not in it.
    """
    if not environ.get(SAGEMAKER_HOST):
        return None
    hosts, own = _json(environ, SAGEMAKER_HOSTS, list), environ[SAGEMAKER_HOST]
    if own not in hosts:
        raise UsageError(f"{SAGEMAKER_HOST}={own}: is not in {SAGEMAKER_HOSTS}={environ[SAGEMAKER_HOSTS]}; give {OFF}")
    gpus = read_number(environ, SAGEMAKER_GPUS) if environ.get(SAGEMAKER_GPUS) else 0
    job = environ.get(SAGEMAKER_JOB, "")
    return Surroundings(
        name=f"SageMaker job {job}".strip(),
        node_num=Told(len(hosts), LISTED + SAGEMAKER_HOSTS),
        node_rank=Told(hosts.index(own), SAGEMAKER_HOST) if len(hosts) > 1 else None,
        local_worker_num=Told(gpus, SAGEMAKER_GPUS) if gpus else None,
        master_addr=Told(str(hosts[0]), SAGEMAKER_HOSTS) if len(hosts) > 1 else None,
        master_port=derived_port(SAGEMAKER_JOB, job) if job else None,
    )


def find_vertex(environ: Mapping[str, str], _host: HostView) -> Surroundings | None:
    """Return the Vertex AI custom job that this replica is of: pool 0 is its chief, pool 1 the others.

    Raises:
        UsageError: no such specification.
    """
    spec = _json(environ, VERTEX, dict)
    try:
        pools = {name: list(spec["cluster"][name]) for name in sorted(spec["cluster"]) if name in _TRAINING_POOLS}
        kind, index = spec["task"]["type"], int(spec["task"]["index"])
        hosts = [str(host) for pool in pools.values() for host in pool]
        before = sum(len(pool) for name, pool in pools.items() if name < kind)
        is_training = kind in pools and index < len(pools[kind])
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{VERTEX}: cluster with workerpool0 and task are expected in it; give {OFF}") from None
    if not is_training:
        return None  # a parameter server or an evaluator
    address, _, port = hosts[0].rpartition(":")
    is_one = len(hosts) == 1
    return Surroundings(
        name="Vertex AI job",
        node_num=Told(len(hosts), LISTED + VERTEX),
        node_rank=None if is_one else Told(before + index, VERTEX),
        master_addr=None if is_one else Told(address or hosts[0], VERTEX),
        master_port=Told(int(port), VERTEX) if not is_one and address and port.isdigit() else None,
    )


_TRAINING_POOLS = ("workerpool0", "workerpool1")


def _json(environ: Mapping[str, str], name: str, kind: type) -> Any:
    try:
        value = json.loads(environ[name])
    except ValueError:
        value = None
    if not isinstance(value, kind) or not value:
        what = "a list of hosts" if kind is list else "an object"
        raise UsageError(f"{name}={environ[name][:80]!r}: JSON of {what} is expected; correct it, or give {OFF}")
    return value


PMIX_RANK = "PMIX_RANK"


def find_pmix(environ: Mapping[str, str], _host: HostView) -> Surroundings | None:
    """Return the job of a PMIx launcher that is neither mpirun nor srun: of it only the own rank is known.

    Raises:
        UsageError: a rank that is no number.
    """
    rank = Told(read_number(environ, PMIX_RANK), PMIX_RANK)
    return Surroundings(
        name="PMIx", node_rank=rank, are_peers_near=True, remedy="add --master_addr ADDRESS of rank 0's"
    )


LSF_JOB, LSF_HOSTS = "LSB_JOBID", "LSB_MCPU_HOSTS"
PBS_JOB, PBS_HOSTS = "PBS_JOBID", "PBS_NODEFILE"
RAY = ("RAY_JOB_ID", "RAY_ADDRESS")
ALLOCATIONS = (LSF_JOB, PBS_JOB, *RAY)


def find_allocation(environ: Mapping[str, str], host: HostView) -> Surroundings | None:
    """Return the one host on which LSF, PBS or Ray has started msrun, with how to use the others; None elsewhere."""
    name = hint = ""
    if environ.get(LSF_JOB) and environ.get(LSF_HOSTS):
        name, hosts = f"LSF job {environ[LSF_JOB]}", len(set(environ[LSF_HOSTS].split()[::2]))
        hint = _unused(name, hosts, LSF_HOSTS, "msrun --hostfile $LSB_DJOB_HOSTFILE ...")
    elif environ.get(PBS_JOB):
        name = f"PBS job {environ[PBS_JOB]}"
        hint = _unused(name, len(set(host.listed)), PBS_HOSTS, f"msrun --hostfile ${PBS_HOSTS} ...")
    elif any(map(environ.get, RAY)):
        name = "Ray"
        hint = (
            "Ray: no variable says which nodes a job has, so msrun uses this host alone; start it once on each, as a "
            "task of Ray, with --node_rank and --master_addr, or give --hosts"
        )
    return Surroundings(name=name, node_num=Told(1, f"started by {name}"), hint=hint) if name else None


def _unused(name: str, hosts: int, variable: str, how: str) -> str:
    if hosts < 2:
        return ""
    return f"{name} has {hosts} hosts ({variable}), but msrun was started once, for this host: {how} uses all of them"
