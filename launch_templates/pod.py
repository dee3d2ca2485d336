"""The objects that kinds of Kubernetes have in common: the pod of every kind, metadata, Services, policies. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from launch_templates.names import escape_references
from launch_templates.spec import DEVICE_RESOURCES, JobSpec, settings_of_spec

Body = dict[str, Any]

TABLE_FILE = "/user/serverid/devindex/config/hccl.json"
"""Where MindCluster's programs look for the rank table of their pod."""
ATLAS_LABEL = {"ring-controller.atlas": "ascend-910b"}

RESTART_FIELDS = ("max_restarts", "restart_on", "no_restart_on")
_OF_FEW = (*RESTART_FIELDS, "min_nodes", "rank_table", "spares", "deadline_s", "runtime", "resources", "requeue",
           "sbatch", "srun", "qsub", "bsub")  # fmt: skip
POD_FIELDS = tuple(name for name in settings_of_spec() if name not in _OF_FEW)
"""Fields that every kind of Kubernetes takes."""


def lean(**parts: Any) -> Body:
    """A mapping without what is None, an empty list or an empty mapping."""
    return {name: part for name, part in parts.items() if part is not None and part not in ([], {})}


def own_labels(spec: JobSpec) -> dict[str, str]:
    """The labels by which the objects of a job are found."""
    return {"app.kubernetes.io/name": "msrun", "app.kubernetes.io/instance": spec.name}


def own_object(spec: JobSpec, api_version: str, kind: str, body: Body, *, name: str = "", **head: Body) -> Body:
    """An object of the job; `head` has further labels, and annotations."""
    labels = {**own_labels(spec), **head.get("labels", {}), **spec.labels}
    metadata = lean(name=name or spec.name, namespace=spec.namespace, **{**head, "labels": labels})
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": body}


def kueue_label(spec: JobSpec) -> dict[str, str]:
    """The label that gives a job to a queue of Kueue."""
    return {"kueue.x-k8s.io/queue-name": spec.queue} if spec.queue else {}


def network_policy(spec: JobSpec, labels: Body | None = None) -> list[Body]:
    """Open all ports between the pods of the job, as collective libraries choose theirs, and close them to others."""
    if not spec.network_policy:
        return []
    selector = {"matchLabels": labels or own_labels(spec)}
    rules = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": selector}]}]}
    return [own_object(spec, "networking.k8s.io/v1", "NetworkPolicy", rules)]


def headless_service(spec: JobSpec, name: str, selector: Body) -> Body:
    """The Service under which pods are known before they are ready."""
    port = {"name": "rendezvous", "port": spec.master_port}
    body = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": [port]}
    return own_object(spec, "v1", "Service", body, name=name)


def rank_table_map(spec: JobSpec) -> list[Body]:
    """The ConfigMap that the operator fills in when all pods have their devices; its status is completed then."""
    if not spec.rank_table:
        return []
    labels = {"app.kubernetes.io/instance": spec.name, **ATLAS_LABEL}
    head = lean(name=f"rings-config-{spec.name}", namespace=spec.namespace, labels=labels)
    data = {"hccl.json": '{"status":"initializing"}'}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": head, "data": data}]


def pod_template(
    spec: JobSpec,
    args: Sequence[str],
    *,
    container: str = "msrun",
    command: Sequence[str] = ("msrun",),
    port_name: str = "rendezvous",
    env: list[Body] | None = None,
    labels: Body | None = None,
    amounts: Body | None = None,
    topology: str = "kueue",
    **fields: str,
) -> Body:
    """The pod of every kind.

    Args:
        env: variables; None = those of the user, unbuffered.
        amounts: what the container asks for; None = what the workers of a host need.
        topology: how pods come to one value of the label `topology`: "kueue" by Kueue where the job has a queue and by
            affinity elsewhere; "affinity" always so; "controller" by Kueue or by the kind itself.
        fields: subdomain, restartPolicy and schedulerName of the pod, where it needs others.
    """
    by_kueue = topology != "affinity" and spec.queue is not None
    by_affinity = spec.topology if topology != "controller" and not by_kueue else None
    annotations = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    if by_kueue and spec.topology:
        annotations["kueue.x-k8s.io/podset-required-topology"] = spec.topology
    asked = resources(spec) if amounts is None else amounts
    storage = _storage(spec)
    own = lean(
        name=container,
        image=spec.image,
        imagePullPolicy=spec.pull_policy,
        command=list(command),
        args=list(args),
        ports=[{"name": port_name, "containerPort": spec.master_port}],
        env=unbuffered_env(spec) if env is None else env,
        resources=lean(requests=asked, limits=asked, claims=[{"name": name} for name in spec.resource_claims]),
        securityContext={
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "capabilities": lean(drop=["ALL"], add=["IPC_LOCK"] if spec.rdma else []),
        },
        volumeMounts=[{"name": name, **mount} for name, mount, _ in storage],
    )
    body = lean(
        **{"subdomain": None, "restartPolicy": "Never", "schedulerName": None, **fields},
        serviceAccountName=spec.service_account,
        automountServiceAccountToken=False,
        enableServiceLinks=False,
        terminationGracePeriodSeconds=spec.grace_s,
        priorityClassName=spec.priority,
        nodeSelector=spec.node_selector,
        tolerations=spec.tolerations,
        affinity=affinity(spec, by_affinity),
        imagePullSecrets=[{"name": spec.pull_secret}] if spec.pull_secret else [],
        resourceClaims=[
            {"name": name, "resourceClaimTemplateName": template} for name, template in spec.resource_claims.items()
        ],
        securityContext={
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), spec.user_id),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # a container that restarts by itself is a sidecar: it ends with the pod's last other container
        initContainers=[*spec.init_containers, *({**one, "restartPolicy": "Always"} for one in spec.sidecars)],
        containers=[own],
        volumes=[{"name": name, **source} for name, _, source in storage],
    )
    head = {
        "labels": {**own_labels(spec), **(labels or {}), **spec.labels},
        "annotations": {**annotations, **spec.annotations},
    }
    return {"metadata": head, "spec": body}


def _storage(spec: JobSpec) -> list[tuple[str, Body, Body]]:
    """Volumes: name, where it is mounted and how, and what it is."""
    found: list[tuple[str, Body, Body]] = []

    def add(name: str, path: str, *, read_only: bool | None = None, **source: Any) -> None:
        found.append((name, lean(mountPath=path, readOnly=read_only), source))

    add("shm", "/dev/shm", emptyDir={"medium": "Memory", "sizeLimit": spec.shm_size})  # noqa: S108 - inside the pod
    if place := log_mount(spec):
        add("logs", place, emptyDir={})
    if spec.rank_table:
        folder = str(PurePosixPath(TABLE_FILE).parent)
        add("ranktable", folder, read_only=True, configMap={"name": f"rings-config-{spec.name}"})
    for number, (claim, path) in enumerate(spec.claims.items()):
        where = path.removesuffix(":ro")
        add(f"claim-{number}", where, read_only=path != where, persistentVolumeClaim={"claimName": claim})
    for number, (path, source) in enumerate(spec.volumes.items()):
        add(f"volume-{number}", path, **source)
    return found


def log_dir(spec: JobSpec) -> str:
    """Where msrun writes its logs in a container."""
    return spec.log_dir or "/logs/log_output"


def log_mount(spec: JobSpec) -> str | None:
    """Where the pod's own log volume goes: the parent, so that msrun itself creates (and owns) the log directory."""
    parent = PurePosixPath(log_dir(spec)).parent
    mounted = {PurePosixPath(path.removesuffix(":ro")) for path in (*spec.claims.values(), *spec.volumes)}
    return None if mounted & {parent, *parent.parents} else str(parent)


def resources(spec: JobSpec) -> Body:
    """What the workers of one host ask for, and their limits."""
    amounts: Body = {"cpu": spec.cpu, "memory": spec.memory}
    device = spec.device_resource or DEVICE_RESOURCES[spec.device_target]
    if device and spec.device_target != "CPU" and not spec.resource_claims:
        amounts[device] = spec.local_worker_num
    if spec.rdma:
        amounts[spec.rdma] = 1
    return amounts


def user_env(spec: JobSpec) -> list[Body]:
    """The variables of env and secret_env."""
    found: list[Body] = [{"name": name, "value": escape_references(value)} for name, value in spec.env.items()]
    for name, source in spec.secret_env.items():
        secret, _, key = source.partition(":")
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return found


def unbuffered_env(spec: JobSpec) -> list[Body]:
    """The variables of the user, and one with which Python's output is seen at once."""
    is_set = "PYTHONUNBUFFERED" in spec.env or "PYTHONUNBUFFERED" in spec.secret_env
    return [*([] if is_set else [{"name": "PYTHONUNBUFFERED", "value": "1"}]), *user_env(spec)]


def ascend_env(spec: JobSpec) -> list[Body]:
    """With the devices that Volcano has chosen, which the Ascend container runtime reads from this variable."""
    resource = spec.device_resource or DEVICE_RESOURCES["Ascend"]
    source = {"fieldRef": {"fieldPath": f"metadata.annotations['{resource}']"}}
    devices = [{"name": "ASCEND_VISIBLE_DEVICES", "valueFrom": source}] if spec.device_target == "Ascend" else []
    return [*devices, *unbuffered_env(spec)]


def affinity(spec: JobSpec, topology: str | None) -> Body:
    """The affinity asked for, and that of all pods of the job to one value of the label `topology`."""
    if topology is None:
        return dict(spec.affinity)
    term = {"labelSelector": {"matchLabels": {"app.kubernetes.io/instance": spec.name}}, "topologyKey": topology}
    return {**spec.affinity, "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def grace_s(spec: JobSpec) -> int:
    """Seconds that msrun leaves its workers after SIGTERM: a tenth, at most 10, stay for msrun's own end."""
    return max(1, spec.grace_s - max(1, min(10, spec.grace_s // 10)))


def restart_options(spec: JobSpec) -> list[str]:
    """The options by which msrun itself starts a job again."""
    lists = {"restart_on": spec.restart_on, "no_restart_on": spec.no_restart_on}
    given = [f"--{name}={','.join(map(str, statuses))}" for name, statuses in lists.items() if statuses]
    return [f"--max_restarts={spec.max_restarts}", *given]


def msrun_options(spec: JobSpec, *place: str, restarts: bool = False) -> list[str]:
    """Options with which a job starts msrun on every host.

    Args:
        place: those that say where the host is; none = msrun finds it out by itself.
        restarts: msrun itself starts the job again, as it does with spares.
    """
    return [
        f"--worker_num={spec.nodes * spec.local_worker_num}",
        f"--local_worker_num={spec.local_worker_num}",
        *([f"--rank_table_file={TABLE_FILE}"] if spec.rank_table else place),
        f"--master_port={spec.master_port}",
        f"--cluster_time_out={spec.cluster_time_out}",
        *([f"--log_dir={spec.log_dir}"] if spec.log_dir else []),
        f"--grace={grace_s(spec)}",
        *([f"--min_hosts={spec.nodes}"] if spec.spares else []),
        *(restart_options(spec) if spec.spares or restarts else []),
    ]


def pod_args(spec: JobSpec, master_addr: str, node_rank: str | None = None, *, restarts: bool = False) -> list[str]:
    """Arguments of msrun in a pod: its options, then the user's words, as the kubelet turns them back.

    Args:
        node_rank: None = msrun finds it out by itself. With spares pods have none, as any but the first may be spare.
    """
    rank = [f"--node_rank={-1 if spec.spares else node_rank}"] if node_rank else []
    options = msrun_options(in_container(spec), f"--master_addr={master_addr}", *rank, restarts=restarts)
    return [*options, *map(escape_references, spec.script)]


def in_container(spec: JobSpec) -> JobSpec:
    """The same with the log directory of a container."""
    return replace(spec, log_dir=log_dir(spec))
