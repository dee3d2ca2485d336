"""Kinds that a person starts: shell scripts for one host and for each of several, and a task of SkyPilot. Pure.

Every word of the user is quoted for the shell.
"""

from __future__ import annotations

import math
import shlex
from typing import Any

from launch_templates.errors import BadValue
from launch_templates.pod import RESTART_FIELDS, grace_s, msrun_options, restart_options
from launch_templates.spec import JobSpec
from launch_templates.values import parse_quantity

SHELL = "#!/usr/bin/env bash\n"
BY_MSRUN = ("script", "local_worker_num", "log_dir", *RESTART_FIELDS, "grace_s", "env")
"""Fields of every kind in which msrun itself restarts workers."""

RUN = "run: shell script for one host\n\nRanks: msrun numbers the workers of this host. It restarts them itself."
RUN_TAKES = BY_MSRUN

CLUSTER = """run-cluster: shell script to start by hand on every host, with MASTER_ADDR and NODE_RANK

Ranks: bash run_cluster.sh MASTER_ADDR NODE_RANK, where MASTER_ADDR is an address of the host with
NODE_RANK 0 that all others reach. msrun restarts workers itself."""
CLUSTER_TAKES = (*BY_MSRUN, "nodes", "master_port", "cluster_time_out")

SKYPILOT = """skypilot: task of SkyPilot; one msrun on each of num_nodes machines of a cloud or cluster

Ranks: msrun takes node rank, nodes, master and port from SkyPilot's variables. It restarts workers itself; machines
that are taken away start the task again where SkyPilot runs it as a managed job (sky jobs launch)."""
SKYPILOT_TAKES = (
    *BY_MSRUN,
    "name",
    "image",
    "nodes",
    "device_target",
    "cpu",
    "memory",
    "cluster_time_out",
    "resources",
)


def write_run(spec: JobSpec) -> str:
    """Return the script for one host."""
    count = spec.local_worker_num
    words = ["msrun", f"--worker_num={count}", f"--local_worker_num={count}", *own_options(spec), *spec.script]
    return f"{SHELL}{exports(spec)}exec {shlex.join(words)}\n"


def write_run_cluster(spec: JobSpec) -> str:
    """Return the script for each of several hosts."""
    usage = "master_addr=${1:?usage: run_cluster.sh MASTER_ADDR NODE_RANK} node_rank=${2:?give NODE_RANK, from 0}\n"
    place = '"--master_addr=$master_addr" "--node_rank=$node_rank"'
    words = shlex.join([*msrun_options(spec, restarts=True), *spec.script])
    return f"{SHELL}{usage}{exports(spec)}exec msrun {place} {words}\n"


def own_options(spec: JobSpec) -> list[str]:
    """Return what msrun itself does, where no cluster does it."""
    log_dir = [f"--log_dir={spec.log_dir}"] if spec.log_dir else []
    return [*log_dir, *restart_options(spec), f"--grace={grace_s(spec)}"]


def host_options(spec: JobSpec) -> list[str]:
    """Return the options of a host that finds its place by itself."""
    count = f"--local_worker_num={spec.local_worker_num}"
    return [count, f"--cluster_time_out={spec.cluster_time_out}", *own_options(spec)]


def exports(spec: JobSpec) -> str:
    """Return the lines of a shell that set the user's variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in spec.env.items())


def build_skypilot(spec: JobSpec) -> list[dict[str, Any]]:
    """Return the task of SkyPilot."""
    if spec.device_target == "GPU" and "accelerators" not in spec.resources:
        remedy = f'add --set resources="{{accelerators: H100:{spec.local_worker_num}}}"'
        raise BadValue("resources", spec.resources, "SkyPilot's, with accelerators, with device_target=GPU", remedy)
    cores, gib = math.ceil(parse_quantity(spec.cpu)), math.ceil(parse_quantity(spec.memory) / 2**30)
    amounts = {"cpus": f"{cores}+", "memory": f"{gib}+", "image_id": f"docker:{spec.image}", **spec.resources}
    run = f"exec {shlex.join(['msrun', *host_options(spec), *spec.script])}\n"
    task = {"name": spec.name, "num_nodes": spec.nodes, "resources": amounts, "run": run}
    return [{**task, "envs": spec.env} if spec.env else task]
