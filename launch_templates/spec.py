"""What is asked for: one job, whatever it will run on. Pure data.

A field of JobSpec is a setting of the command: `--set nodes=4`, `nodes: 4` in a values file. Each carries its type, its
meaning, and whether there is a default.
"""

# ruff: noqa: RUF009 - _asked makes the fields
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from launch_templates import names
from launch_templates.errors import BadValue
from launch_templates.values import AMOUNT, ARGV, FLAG, STATUSES, ValueType, choice, table, text, tree, whole

DEVICE_RESOURCES: dict[str, str | None] = {"CPU": None, "GPU": "nvidia.com/gpu", "Ascend": "huawei.com/Ascend910"}
"""Extended resource that a pod asks for, by device target; other device plugins: set `device_resource`."""

_REQUIRED: Any = object()


def _are_containers(items: list[Any]) -> bool:
    known = [(str(one.get("name")), one.get("image")) for one in items if isinstance(one, dict)]
    is_each = all(names.fits(names.LABEL, name) and isinstance(image, str) for name, image in known)
    return is_each and len({name for name, _ in known}) == len(items)


_NAME = text(names.SERVICE, "a DNS label: at most 63 of a-z, 0-9 and -, first a letter, last no -")
_SUBDOMAIN = text(names.SUBDOMAIN, "a DNS name of a-z, 0-9, - and .")
_RESOURCE = text(names.RESOURCE, "DOMAIN/NAME")
_LABELS = table(names.FREE_LABEL, names.LABEL_VALUE, "label keys with label values")
_ANNOTATIONS = table(names.QUALIFIED, names.PROCESS_TEXT, "annotation keys with texts")
_CLAIMS = table(names.SUBDOMAIN, names.MOUNT, "names of PersistentVolumeClaims with an absolute path, or PATH:ro")
_DEVICES = table(names.LABEL, names.SUBDOMAIN, "names with names of ResourceClaimTemplates")
_OWN_VARIABLE = f"a variable name of A-Z, a-z, 0-9 and _, none of {', '.join(names.RANK_VARIABLES)}"
_ENV = table(names.OWN_VARIABLE, names.PROCESS_TEXT, f"{_OWN_VARIABLE}, with a text in UTF-8 without NUL")
_SECRET_ENV = table(names.OWN_VARIABLE, names.SECRET_SOURCE, f"{_OWN_VARIABLE}, with SECRET:KEY")
_LINE = "names of options with what stands behind them, on one line; empty = no value"
_LONG_OPTIONS = table(names.LONG_OPTION, names.LINE, _LINE)
_SHORT_OPTIONS = table(names.SHORT_OPTION, names.LINE, _LINE)
_VOLUMES = tree(dict, "a YAML mapping of absolute paths to volume sources, such as {/data: {nfs: {...}}}")
_CONTAINERS = tree(list, "a YAML list of containers, each with a name of its own and an image", _are_containers)
_PULL = choice("Always", "IfNotPresent", "Never")
_LABEL_KEY = text(names.QUALIFIED, "a label key of nodes")
_AMOUNTS = tree(dict, "a YAML mapping, such as {accelerators: H100:8, use_spot: true}")
_LOG_DIR = text(names.NESTED_PATH, "an absolute path below another directory, such as /logs/log_output")


def _asked(value_type: ValueType, meaning: str, default: Any = _REQUIRED) -> Any:
    metadata = {"value_type": value_type, "meaning": meaning, "is_required": default is _REQUIRED}
    if isinstance(default, dict | list):
        return field(default_factory=default.copy, metadata=metadata)
    empty: Any = () if value_type is ARGV else ""
    return field(default=empty if default is _REQUIRED else default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job. Every kind takes the fields that it has a place for; None and empty = left out."""

    name: str = _asked(_NAME, "name of the job; pods and the Service are named after it")
    image: str = _asked(text(names.IMAGE, "an image reference"), "image with Python, msrun and the script")
    script: tuple[str, ...] = _asked(ARGV, "what msrun starts: [OPTIONS] SCRIPT ARGS, given after --")
    namespace: str | None = _asked(text(names.LABEL, "a DNS label"), "namespace; left out: that of kubectl", None)
    nodes: int = _asked(whole(1, 100_000), "number of hosts: pods, containers or nodes, one msrun each", 2)
    min_nodes: int | None = _asked(whole(1, 100_000), "hosts enough to begin an elastic job; left out: all", None)
    local_worker_num: int = _asked(whole(1, 1024), "workers on one host; with a device target also devices", 8)
    device_target: str = _asked(choice(*DEVICE_RESOURCES), "which device each worker gets", "CPU")
    device_resource: str | None = _asked(
        _RESOURCE,
        "extended resource of a device; left out: nvidia.com/gpu for GPU, huawei.com/Ascend910 for Ascend",
        None,
    )
    rdma: str | None = _asked(_RESOURCE, "extended resource of the RDMA plugin, one for each pod, with IPC_LOCK", None)
    cpu: str = _asked(AMOUNT, "cores of one host, request and limit", "8")
    memory: str = _asked(AMOUNT, "memory of one host, request and limit; /dev/shm counts against it", "32Gi")
    shm_size: str = _asked(AMOUNT, "limit of the memory volume at /dev/shm", "8Gi")
    master_port: int = _asked(whole(1024, 65535), "rendezvous port of the host with node rank 0", 8118)
    cluster_time_out: int = _asked(whole(1), "seconds that msrun waits for all hosts to register", 600)
    log_dir: str | None = _asked(
        _LOG_DIR,
        "log directory; its parent is a volume of the pod unless it lies on a claim or volume; left out: "
        "/logs/log_output in containers, log_output elsewhere",
        None,
    )
    rank_table: bool = _asked(FLAG, "ConfigMap with the operator's rank table, which msrun waits for", default=False)
    max_restarts: int = _asked(whole(0, 1000), "how often the whole job starts again after a failure", 0)
    restart_on: tuple[int, ...] = _asked(
        STATUSES, "start again after these exit statuses or signals of the first failed worker alone", ()
    )
    no_restart_on: tuple[int, ...] = _asked(STATUSES, "never start again after these", ())
    spares: int = _asked(whole(0, 100_000), "hosts beyond nodes that wait; each takes the place of a lost one", 0)
    deadline_s: int | None = _asked(whole(1), "seconds after which the job is ended; left out: never", None)
    grace_s: int = _asked(whole(2), "seconds between SIGTERM and SIGKILL: time to save a checkpoint", 120)
    ttl_s: int = _asked(whole(60), "seconds that the finished job, and so its logs, stay", 86400)
    queue: str | None = _asked(_SUBDOMAIN, "queue: Kueue LocalQueue, queue of Volcano, or partition of Slurm", None)
    priority: str | None = _asked(_SUBDOMAIN, "priority class of the pods, or QOS of Slurm", None)
    network_policy: bool = _asked(FLAG, "only pods of this job may connect to its pods", default=True)
    user_id: int = _asked(whole(1), "user and group of the process; 0 (root) is not possible", 1000)
    service_account: str | None = _asked(_SUBDOMAIN, "service account of the pods; its token is not mounted", None)
    pull_secret: str | None = _asked(_SUBDOMAIN, "Secret with which to pull the image", None)
    pull_policy: str | None = _asked(_PULL, "when the image is pulled; left out: as Kubernetes has it", None)
    labels: dict[str, str] = _asked(_LABELS, "labels of the job and of its pods", {})
    annotations: dict[str, str] = _asked(_ANNOTATIONS, "annotations of the pods, such as networks of Multus", {})
    node_selector: dict[str, str] = _asked(_LABELS, "labels that a node must have", {})
    tolerations: list[Any] = _asked(tree(list, "a YAML list of tolerations"), "taints of nodes that are accepted", [])
    affinity: dict[str, Any] = _asked(tree(dict, "a YAML mapping as in a pod's affinity"), "affinity of the pods", {})
    topology: str | None = _asked(_LABEL_KEY, "label, as of a rack, that is equal on the nodes of all pods", None)
    env: dict[str, str] = _asked(_ENV, "environment, literally", {})
    secret_env: dict[str, str] = _asked(_SECRET_ENV, "environment from Secrets", {})
    claims: dict[str, str] = _asked(_CLAIMS, "volumes that exist already, for data and checkpoints", {})
    volumes: dict[str, Any] = _asked(_VOLUMES, "other volumes, as a pod has them, but for their names", {})
    resource_claims: dict[str, str] = _asked(_DEVICES, "devices by dynamic resource allocation", {})
    init_containers: list[Any] = _asked(_CONTAINERS, "containers that end before msrun starts", [])
    sidecars: list[Any] = _asked(_CONTAINERS, "containers that run beside msrun and end with it (Kubernetes 1.29)", [])
    runtime: str | None = _asked(_SUBDOMAIN, "ClusterTrainingRuntime; left out: the job brings one of its own", None)
    resources: dict[str, Any] = _asked(_AMOUNTS, "resources as SkyPilot has them", {})
    requeue: bool = _asked(
        FLAG,
        "the scheduler runs the job again after a preemption, a lost node or, with Slurm, "
        "the deadline; the program continues from its checkpoint",
        default=False,
    )
    sbatch: dict[str, str] = _asked(_LONG_OPTIONS, "lines of #SBATCH: --set sbatch.account=x", {})
    srun: dict[str, str] = _asked(_LONG_OPTIONS, "options of srun: --set srun.container-image=x", {})
    qsub: dict[str, str] = _asked(_SHORT_OPTIONS, "lines of #PBS: --set qsub.A=x", {})
    bsub: dict[str, str] = _asked(_SHORT_OPTIONS, "lines of #BSUB: --set bsub.P=x", {})


@dataclass(frozen=True)
class Setting:
    """One field of JobSpec, as a user sees it."""

    name: str
    value_type: ValueType
    meaning: str
    is_required: bool
    default: Any

    def read(self, given: Any) -> Any:
        """The checked value; raises BadValue when `given` breaks the constraint."""
        if self.default is None and given in (None, ""):
            return None
        try:
            return self.value_type.read(given)
        except ValueError:
            remedy = f"write --set {self.name}.KEY=VALUE" if self.value_type.type_name == "table" else ""
            raise BadValue(self.name, given, self.value_type.constraint, remedy) from None


@cache
def settings_of_spec() -> Mapping[str, Setting]:
    """All fields of JobSpec by name, in order."""
    blank = JobSpec()
    return {one.name: Setting(one.name, default=getattr(blank, one.name), **one.metadata) for one in fields(JobSpec)}
