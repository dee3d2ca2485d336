"""compose: compose.yaml with one container for each host; for a machine with Docker

Ranks: container nodeI has node rank I; node0 is the master, known by its name on the file's network.
msrun restarts workers itself. Volumes of claims must exist: docker volume create CLAIM.
"""

from typing import Any

from launch_templates.kinds.scripts import BY_MSRUN
from launch_templates.pod import in_container, log_mount, msrun_options
from launch_templates.spec import JobSpec
from launch_templates.values import parse_quantity

TAKES = (*BY_MSRUN, "name", "image", "nodes", "device_target", "cpu", "memory", "shm_size", "master_port",
         "cluster_time_out", "user_id", "claims")  # fmt: skip


def build(spec: JobSpec) -> list[dict[str, Any]]:
    """Return the one document of the file."""
    mount, memory = log_mount(spec), str(int(parse_quantity(spec.memory)))
    volumes = [f"{claim}:{path}" for claim, path in spec.claims.items()]
    amounts: dict[str, Any] = {"limits": {"cpus": str(parse_quantity(spec.cpu)), "memory": memory}}
    if spec.device_target == "GPU":
        device = {"driver": "nvidia", "count": spec.local_worker_num, "capabilities": ["gpu"]}
        amounts["reservations"] = {"devices": [device]}
    service: dict[str, Any] = {
        "image": spec.image,
        "user": f"{spec.user_id}:{spec.user_id}",
        "shm_size": str(int(parse_quantity(spec.shm_size))),
        "stop_grace_period": f"{spec.grace_s}s",
        "restart": "no",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        # compose replaces $NAME and ${NAME}, and makes $ of $$
        "environment": {
            "PYTHONUNBUFFERED": "1",
            **{name: value.replace("$", "$$") for name, value in spec.env.items()},
        },
        **({"volumes": volumes} if volumes else {}),
        # mode 1777: the process is not root and makes its log directory there
        **({"tmpfs": [f"{mount}:mode=1777"]} if mount else {}),
        "deploy": {"resources": amounts},
    }
    services = {}
    for rank in range(spec.nodes):
        options = msrun_options(in_container(spec), "--master_addr=node0", f"--node_rank={rank}", restarts=True)
        command = [word.replace("$", "$$") for word in ("msrun", *options, *spec.script)]
        services[f"node{rank}"] = {**service, "hostname": f"node{rank}", "command": command}
    document: dict[str, Any] = {"name": spec.name, "services": services}
    if spec.claims:
        document["volumes"] = {claim: {"external": True} for claim in spec.claims}
    return [document]
