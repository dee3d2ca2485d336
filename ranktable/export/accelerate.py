"""Accelerate: a configuration file per host for `accelerate launch --config_file`.

Source: the documentation of Hugging Face Accelerate. Its launcher hands the numbers on to torchrun, so the ranks
count up from host to host, and every host must have as many devices.
"""

from __future__ import annotations

from ranktable.errors import BuildError
from ranktable.export.exporter import Exporter
from ranktable.export.nodes import Job, Node

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
