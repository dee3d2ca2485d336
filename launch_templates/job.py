"""From a checked spec to everything a manifest needs. Pure.

A manifest may use a field of JobSpec or a name of DERIVED. Each derived name says which fields it is made of, so that
`explain` can list what a kind really takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from launch_templates.reference import escape_references
from launch_templates.spec import DEVICE_RESOURCES, JobSpec

POD_LOG_DIR = "/logs/log_output"
TABLE_FILE = "/user/serverid/devindex/config/hccl.json"
"""Where MindCluster's programs look for the rank table of their pod."""


@dataclass(frozen=True)
class Derived:
    """A value made of fields."""

    needs: tuple[str, ...]
    build: Callable[[JobSpec], Any]
    """Value; None, an empty list or an empty mapping = what it stands for is left out."""


FINAL_STATUSES = (2, 93, 126, 127)
"""After which nothing starts again: of msrun for wrong input; of a worker that says so, that cannot be run, or whose
program is not there."""
NO_WORKERS_STATUSES = (3, 124)
"""Of msrun where no worker failed: a host or a process of msrun's own was lost, or not everybody came in time."""


def exit_rules(spec: JobSpec, container: str) -> list[dict[str, Any]]:
    """Rules of a pod failure policy: after which exit statuses the job ends, though it could start again."""
    operator, statuses = "In", {*FINAL_STATUSES, *spec.no_restart_on}
    if spec.restart_on:
        operator, statuses = "NotIn", {*NO_WORKERS_STATUSES, *spec.restart_on}
    codes = {"containerName": container, "operator": operator, "values": sorted(statuses)}
    rules: list[dict[str, Any]] = [{"action": "FailJob", "onExitCodes": codes}]
    if spec.restart_on:  # an evicted pod ends with the status of a signal
        rules.insert(0, {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    return rules


def pod_log_dir(spec: JobSpec) -> str:
    """Where msrun writes its logs in a container."""
    return spec.log_dir or POD_LOG_DIR


def resources(spec: JobSpec) -> dict[str, Any]:
    """What one pod asks for, and its limits."""
    amounts: dict[str, Any] = {"cpu": spec.cpu, "memory": spec.memory}
    device = spec.device_resource or DEVICE_RESOURCES[spec.device_target]
    if device and spec.device_target != "CPU":
        amounts[device] = spec.local_worker_num
    if spec.rdma:
        amounts[spec.rdma] = 1
    return amounts


def _user_env(spec: JobSpec) -> list[dict[str, Any]]:
    literal = [{"name": name, "value": escape_references(value)} for name, value in spec.env.items()]
    return literal + [_secret_variable(name, source) for name, source in spec.secret_env.items()]


def _secret_variable(name: str, source: str) -> dict[str, Any]:
    secret, _, key = source.partition(":")
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _env(spec: JobSpec) -> list[dict[str, Any]]:
    if "PYTHONUNBUFFERED" in spec.env or "PYTHONUNBUFFERED" in spec.secret_env:
        return _user_env(spec)
    return [{"name": "PYTHONUNBUFFERED", "value": "1"}, *_user_env(spec)]


def _ascend_env(spec: JobSpec) -> list[dict[str, Any]]:
    """With the devices that Volcano has chosen, which the Ascend container runtime reads from this variable."""
    resource = spec.device_resource or DEVICE_RESOURCES["Ascend"]
    source = {"fieldRef": {"fieldPath": f"metadata.annotations['{resource}']"}}
    devices = [{"name": "ASCEND_VISIBLE_DEVICES", "valueFrom": source}] if spec.device_target == "Ascend" else []
    return [*devices, *_env(spec)]


def _claim_volumes(spec: JobSpec) -> list[dict[str, Any]]:
    return [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(spec.claims)
    ]


def _claim_mounts(spec: JobSpec) -> list[dict[str, Any]]:
    return [
        {"name": f"claim-{number}", "mountPath": path.removesuffix(":ro"), "readOnly": path.endswith(":ro")}
        for number, path in enumerate(spec.claims.values())
    ]


def log_mount(spec: JobSpec) -> str | None:
    """Where the pod's own log volume goes: the parent, so that msrun itself creates (and owns) the log directory."""
    parent = PurePosixPath(pod_log_dir(spec)).parent
    mounted = {PurePosixPath(path.removesuffix(":ro")) for path in (*spec.claims.values(), *spec.volumes)}
    return None if mounted & {parent, *parent.parents} else str(parent)


def affinity(spec: JobSpec, topology: str | None) -> dict[str, Any]:
    """The affinity asked for, and that of all pods of the job to one value of the label `topology`."""
    if topology is None:
        return dict(spec.affinity)
    selector = {"matchLabels": {"app.kubernetes.io/instance": spec.name}}
    term = {"labelSelector": selector, "topologyKey": topology}
    return {**spec.affinity, "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def msrun_options(spec: JobSpec, *, master_addr: str, node_rank: str | None = None) -> list[str]:
    """Options with which a manifest starts msrun on every host.

    Args:
        node_rank: None = msrun finds it out by itself.
    """
    place = [f"--master_addr={master_addr}", *([f"--node_rank={node_rank}"] if node_rank else [])]
    return [
        f"--worker_num={spec.nodes * spec.local_worker_num}",
        f"--local_worker_num={spec.local_worker_num}",
        *([f"--rank_table_file={TABLE_FILE}"] if spec.rank_table else place),
        f"--master_port={spec.master_port}",
        f"--cluster_time_out={spec.cluster_time_out}",
        *([f"--log_dir={spec.log_dir}"] if spec.log_dir else []),
        f"--grace={grace_s(spec)}",
    ]


def grace_s(spec: JobSpec) -> int:
    """Seconds that msrun leaves its workers after SIGTERM: a tenth, at most 10, stay for msrun's own end."""
    return max(1, spec.grace_s - max(1, min(10, spec.grace_s // 10)))


def pod_args(spec: JobSpec, *, master_addr: str, node_rank: str | None = None) -> list[str]:
    """Arguments of msrun in a pod: its options, then the user's words, as the kubelet turns them back."""
    spec_here = JobSpec(**{**vars(spec), "log_dir": pod_log_dir(spec)})
    options = msrun_options(spec_here, master_addr=master_addr, node_rank=node_rank)
    return [*options, *map(escape_references, spec.script)]


ARGS_NEEDS = ("nodes", "local_worker_num", "master_port", "cluster_time_out", "log_dir", "grace_s", "script")
"""Fields that `pod_args` reads in every kind."""


def mpirun_args(spec: JobSpec, msrun_args: list[str]) -> list[str]:
    """Arguments of mpirun that start one msrun in each worker pod, with the variables that the launcher has."""
    exported = [word for name in ("PATH", "PYTHONUNBUFFERED", *spec.env, *spec.secret_env) for word in ("-x", name)]
    return ["-np", str(spec.nodes), "--map-by", "ppr:1:node", "--bind-to", "none", *exported, "msrun", *msrun_args]


DERIVED: Mapping[str, Derived] = {
    "other_nodes": Derived(("nodes",), lambda spec: spec.nodes - 1),
    "resources": Derived(("cpu", "memory", "device_target", "device_resource", "local_worker_num", "rdma"), resources),
    "capabilities": Derived(("rdma",), lambda spec: ["IPC_LOCK"] if spec.rdma else []),
    "port": Derived(("master_port",), lambda spec: spec.master_port),
    "user_env": Derived(("env", "secret_env"), _user_env),
    "container_env": Derived(("env", "secret_env"), _env),
    "ascend_env": Derived(("env", "secret_env", "device_target", "device_resource"), _ascend_env),
    "claim_volumes": Derived(("claims",), _claim_volumes),
    "claim_mounts": Derived(("claims",), _claim_mounts),
    "other_volumes": Derived(
        ("volumes",),
        lambda spec: [{"name": f"volume-{number}", **source} for number, source in enumerate(spec.volumes.values())],
    ),
    "volume_mounts": Derived(
        ("volumes",),
        lambda spec: [{"name": f"volume-{number}", "mountPath": path} for number, path in enumerate(spec.volumes)],
    ),
    "log_mount": Derived(("log_dir", "claims", "volumes"), log_mount),
    "own_affinity": Derived(("affinity", "topology"), lambda spec: affinity(spec, spec.topology)),
    "queue_affinity": Derived(
        ("affinity", "topology", "queue"), lambda spec: affinity(spec, None if spec.queue else spec.topology)
    ),
    "queue_topology": Derived(("topology", "queue"), lambda spec: spec.topology if spec.queue else None),
    "pull_secrets": Derived(("pull_secret",), lambda spec: [{"name": spec.pull_secret}] if spec.pull_secret else []),
    "volcano_queue": Derived(("queue",), lambda spec: spec.queue or "default"),
    # Volcano fails the job when its retry count, raised before each restart, reaches maxRetry; 0 means its default, 3.
    "max_retry": Derived(("max_restarts",), lambda spec: spec.max_restarts + 1),
    "failure_action": Derived(("max_restarts",), lambda spec: "RestartJob" if spec.max_restarts else "TerminateJob"),
    "msrun_exit_rules": Derived(("restart_on", "no_restart_on"), lambda spec: exit_rules(spec, "msrun")),
    "node_exit_rules": Derived(("restart_on", "no_restart_on"), lambda spec: exit_rules(spec, "node")),
    "no_network_policy": Derived(("network_policy",), lambda spec: not spec.network_policy),
    "atlas_label": Derived(("rank_table",), lambda spec: "ascend-910b" if spec.rank_table else None),
}
