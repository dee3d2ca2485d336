"""Files of environment variables, one per host or one per rank, for schedulers and container runtimes.

Sources: the documentation of torch.distributed and torchrun (RANK ... MASTER_PORT, PET_*), of HCCL and MindSpore
(RANK_ID, RANK_SIZE, DEVICE_ID). A line is NAME=value, without quotes, as `docker --env-file` reads it, after a
comment with the name of the host.
"""

from __future__ import annotations

from collections.abc import Mapping

from ranktable.export.exporter import Exporter
from ranktable.export.nodes import Job, Node
from ranktable.export.torchrun import visible_devices


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
