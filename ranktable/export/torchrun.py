"""torchrun: one command per host that gives every process the rank of the table.

Source: the documentation of torchrun. Only its static rendezvous obeys --node-rank (with --rdzv-backend c10d the
hosts are numbered as they come), so the commands name the master's address and port.
"""

from __future__ import annotations

import shlex

from ranktable.export.exporter import Exporter
from ranktable.export.nodes import Job, Node
from ranktable.rules.order import fold_numbers

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
