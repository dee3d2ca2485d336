"""Files and commands per host or rank: torchrun, files of environment variables, Accelerate.

torchrun: one command per host that gives every process the rank of the table.

Source: the documentation of torchrun. Only its static rendezvous obeys --node-rank (with --rdzv-backend c10d the
hosts are numbered as they come), so the commands name the master's address and port.

Files of environment variables, one per host or one per rank, for schedulers and container runtimes.

Sources: the documentation of torch.distributed and torchrun (RANK ... MASTER_PORT, PET_*), of HCCL and MindSpore
(RANK_ID, RANK_SIZE, DEVICE_ID). A line is NAME=value, without quotes, as `docker --env-file` reads it, after a
comment with the name of the host.

Accelerate: a configuration file per host for `accelerate launch --config_file`.

Source: the documentation of Hugging Face Accelerate. Its launcher hands the numbers on to torchrun, so the ranks
count up from host to host, and every host must have as many devices.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from ranktable.errors import BuildError
from ranktable.export.exporter import Exporter
from ranktable.export.nodes import Job, Node
from ranktable.hostlist.ranges import fold_numbers

VISIBLE_DEVICES = {"ascend": "ASCEND_RT_VISIBLE_DEVICES", "gpu": "CUDA_VISIBLE_DEVICES"}
"""The variable that says which devices of the host a process sees, by device target; a CPU has none."""


def visible_devices(job: Job, node: Node) -> dict[str, str]:
    """Return the variable that gives the processes of a host their devices; none when they are 0, 1, 2, ..."""
    variable = VISIBLE_DEVICES.get(job.device_target)
    if variable is None or node.device_ids == tuple(range(len(node.devices))):
        return {}
    return {variable: ",".join(str(device_id) for device_id in node.device_ids)}


def _write_commands(job: Job) -> dict[str, str]:
    return {"": "".join(f"# {_introduce(node)}\n{_command(job, node)}\n" for node in job.nodes)}


def _introduce(node: Node) -> str:
    noun = "rank" if len(node.ranks) == 1 else "ranks"
    return f"on {node.name}: {noun} {fold_numbers(list(node.ranks))}"


def _command(job: Job, node: Node) -> str:
    words = [
        "torchrun",
        f"--nnodes={len(job.nodes)}",
        f"--node-rank={node.node_rank}",
        f"--nproc-per-node={len(node.devices)}",
        f"--master-addr={job.master}",
        f"--master-port={job.master_port}",
        *job.command,
    ]
    assignments = [f"{name}={value} " for name, value in visible_devices(job, node).items()]
    return "".join(assignments) + shlex.join(words)


TORCHRUN = Exporter("torchrun commands, one per host", _write_commands, frozenset({"device_id"}))


def _write_nodes(job: Job) -> dict[str, str]:
    """Return `node_<i>.env` for each host: what torchrun reads in place of its options, and the plain names."""
    return {f"node_{node.node_rank}.env": _lines(node, _node_variables(job, node)) for node in job.nodes}


def _write_ranks(job: Job) -> dict[str, str]:
    """Return `rank_<i>.env` for each rank."""
    files = {
        device.rank_id: _lines(node, _rank_variables(job, node, local_rank))
        for node in job.nodes
        for local_rank, device in enumerate(node.devices)
    }
    return {f"rank_{rank}.env": files[rank] for rank in sorted(files)}


def _node_variables(job: Job, node: Node) -> dict[str, object]:
    return {
        "MASTER_ADDR": job.master,
        "MASTER_PORT": job.master_port,
        "WORLD_SIZE": job.world_size,
        "LOCAL_WORLD_SIZE": len(node.devices),
        "GROUP_RANK": node.node_rank,
        "GROUP_WORLD_SIZE": len(job.nodes),
        "PET_NNODES": len(job.nodes),
        "PET_NODE_RANK": node.node_rank,
        "PET_NPROC_PER_NODE": len(node.devices),
        "PET_MASTER_ADDR": job.master,
        "PET_MASTER_PORT": job.master_port,
        **visible_devices(job, node),
    }


def _rank_variables(job: Job, node: Node, local_rank: int) -> dict[str, object]:
    device = node.devices[local_rank]
    return {
        "MASTER_ADDR": job.master,
        "MASTER_PORT": job.master_port,
        "RANK": device.rank_id,
        "WORLD_SIZE": job.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": len(node.devices),
        "GROUP_RANK": node.node_rank,
        "GROUP_WORLD_SIZE": len(job.nodes),
        "RANK_ID": device.rank_id,
        "RANK_SIZE": job.world_size,
        "DEVICE_ID": device.device_id,
    }


def _lines(node: Node, variables: Mapping[str, object]) -> str:
    return f"# on {node.name}\n" + "".join(f"{name}={value}\n" for name, value in variables.items())


NODES = Exporter("a file of environment variables per host", _write_nodes, frozenset({"device_id"}))
RANKS = Exporter("a file of environment variables per rank", _write_ranks, frozenset({"device_id"}), keeps_ranks=True)


_DISTRIBUTED_TYPES = {"ascend": "MULTI_NPU", "gpu": "MULTI_GPU", "cpu": "MULTI_CPU"}


def _write_configs(job: Job) -> dict[str, str]:
    if len({len(node.devices) for node in job.nodes}) > 1:
        raise BuildError("Accelerate takes equal numbers of devices on every host", "use torchrun for this table")
    return {f"node_{node.node_rank}.yaml": _config(job, node) for node in job.nodes}


def _config(job: Job, node: Node) -> str:
    lines: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _DISTRIBUTED_TYPES[job.device_target],
        "machine_rank": node.node_rank,
        "num_machines": len(job.nodes),
        "num_processes": job.world_size,
        "main_process_ip": f"'{job.master}'",
        "main_process_port": job.master_port,
        "rdzv_backend": "static",
        "same_network": "true",
        "use_cpu": str(job.device_target == "cpu").lower(),
    }
    if job.device_target != "cpu":
        lines["gpu_ids"] = f"'{','.join(str(device_id) for device_id in node.device_ids)}'"
    return f"# on {node.name}\n" + "".join(f"{key}: {value}\n" for key, value in lines.items())


ACCELERATE = Exporter("Accelerate configurations, one per host", _write_configs, frozenset({"device_id"}))
