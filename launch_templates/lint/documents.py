"""Manifests as the lint reads them: objects, and what each job starts. Pure.

How many pods of which template a job has, how they are called, where their index is: one reader for each kind; the
naming rules are those of the kind's controller, written at its reader.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from launch_templates.errors import BadFile
from launch_templates.msrun_options import read_invocation
from ranktable.bounded_text import TextError, load_yaml_documents

Body = dict[str, Any]
_T = TypeVar("_T")


def dig(node: Any, *path: str) -> Any:
    """Value at a path of keys; None when a step is missing or no mapping."""
    for key in path:
        if not isinstance(node, dict):
            return None
        node = node.get(key)
    return node


def _reader_of(kind: type[_T]) -> Callable[..., _T]:
    def read(node: Any, *path: str) -> _T:
        found = dig(node, *path)
        return found if isinstance(found, kind) else kind()

    return read


mapping: Callable[..., Body] = _reader_of(dict)
sequence: Callable[..., list[Any]] = _reader_of(list)
text = _reader_of(str)
"""What stands at a path of keys below a node; an empty one where there is nothing of this type."""


def number(node: Any, *path: str) -> int | None:
    """Integer at a path; None when there is none."""
    found = dig(node, *path)
    return found if type(found) is int else None


def mappings(node: Any, *path: str) -> list[Body]:
    """The mappings of a list at a path."""
    return [item for item in sequence(node, *path) if isinstance(item, dict)]


class Document:
    """One Kubernetes object."""

    def __init__(self, source: str, body: Body) -> None:
        self.source, self.body = source, body
        """File it comes from, and what stands there."""
        self.spec = mapping(body, "spec")
        self.group = text(body, "apiVersion").rpartition("/")[0]
        """API group; empty for the core group."""
        self.kind, self.name = text(body, "kind"), text(body, "metadata", "name")
        self.namespace = text(body, "metadata", "namespace")
        """Namespace; empty = that of kubectl."""
        self.label = f"{self.kind or '?'}/{self.name or '?'}"
        """Kind/name, as kubectl writes it."""


def read_documents(content: str, source: str) -> list[Document]:
    """All Kubernetes objects in a YAML text, else BadFile; the items of a List count one by one."""
    try:
        bodies = [body for body in load_yaml_documents(content) if body is not None]
    except TextError as error:
        raise BadFile(source, f"{error.place}{error.problem}", error.remedy) from None
    found = []
    while bodies:
        body = bodies.pop(0)
        if not isinstance(body, dict):
            raise BadFile(source, f"a document is {type(body).__name__}, not a mapping", "give Kubernetes manifests")
        if body.get("kind") == "List":
            bodies = [*sequence(body, "items"), *bodies]
        else:
            found.append(Document(source, body))
    return found


@dataclass
class PodSet:
    """Pods of one template."""

    path: str
    """Path of the pod template in the document."""
    template: Body
    replicas: int | None
    """Number of pods; None when the manifest does not say it as an integer."""
    stem: str
    """Pod i is called STEM-i."""
    job_path: str = ""
    """Path of the batch/v1 Job spec around the template; empty when there is none."""
    job_spec: Body | None = None
    copies: int | None = 1
    """Number of Jobs of a JobSet that are made of it; None when it is no integer."""

    def __post_init__(self) -> None:
        self.spec = mapping(self.template, "spec")
        self.containers, init_containers = (
            [
                (f"{self.path}.spec.{key}[{position}]", body)
                for position, body in enumerate(sequence(self.spec, key))
                if isinstance(body, dict)
            ]
            for key in ("containers", "initContainers")
        )
        """Paths and bodies; malformed ones are left out."""
        self.all_containers = [*init_containers, *self.containers]
        calls = [read_invocation(body, path) for path, body in self.containers]
        self.call = next((call for call in calls if call is not None), None)
        """The msrun of its containers."""


@dataclass
class Workload:
    """One training job of a known kind."""

    document: Document
    kind: str
    """Kind of its document; VolcanoJob for that of Volcano."""
    pod_sets: tuple[PodSet, ...]
    """Pods with workers."""
    rank_variable: str
    """Variable in which the controller tells each pod its index; empty where it is not told so."""
    master_name: str
    """DNS name of the pod with index 0, as other pods of the namespace know it; empty when it has none."""
    starter: PodSet | None = None
    """The pods of a launcher that starts msrun in the others, as mpirun does."""
    others: tuple[PodSet, ...] = ()
    """Pods of the job that have no workers."""
    is_partial: bool = False
    """The pods are those of a runtime of the cluster, of which only the command is here."""
    is_elastic: bool = False
    """There may be fewer pods, and no master."""
    plugin: dict[str, str] | None = None
    """What Volcano's plugin pytorch is told: names of the tasks `master` and `worker`, and `port`."""
    services: tuple[Document, ...] = ()
    """The Services given that have the subdomain of a Job as name."""

    def __post_init__(self) -> None:
        self.name, self.spec = self.document.name, self.document.spec
        counts = [pod_set.replicas for pod_set in self.pod_sets]
        self.num_pods = None if None in counts or not counts else sum(count or 0 for count in counts)
        """Pods with workers of the whole job; None when one count is unknown."""
        self.starters = self.pod_sets if self.starter is None else (self.starter,)
        """The pods that start msrun."""
        self.calls = [(one, one.call) for one in self.starters if one.call is not None]
        """Each msrun of the job."""
        self.all_pod_sets = (*(self.starters if self.starter else ()), *self.pod_sets, *self.others)
        names = [f"{pod_set.stem}-{max((pod_set.replicas or 1) - 1, 0)}" for pod_set in self.all_pod_sets]
        self.longest_pod_name = max(names, key=len, default=self.name)
        """Host name of the pod with the longest one."""


def read_workloads(documents: Iterable[Document]) -> list[Workload]:
    """The training jobs among the documents; documents of other kinds are passed over."""
    known = list(documents)
    readers = [(document, _READERS.get((document.group, document.kind))) for document in known]
    return [reader(document, known) for document, reader in readers if reader]


def _split(pod_sets: Sequence[PodSet]) -> tuple[tuple[PodSet, ...], tuple[PodSet, ...]]:
    """Pod sets that run msrun, and the others; all are taken to have workers where none runs it."""
    own = tuple(one for one in pod_sets if one.call is not None) or tuple(pod_sets)
    return own, tuple(one for one in pod_sets if one not in own)


def _count(node: Any, key: str) -> int | None:
    """Number of copies, of which there is one where it is left out; None when it is no integer."""
    return number(node, key) if key in mapping(node) else 1


def _replicated(document: Document, key: str) -> tuple[PodSet, ...]:
    """Pods of the tasks in a list, or of the replica types in a mapping, which are called JOB-NAME-i."""
    tasks = [(f"[{place}]", text(task, "name"), task) for place, task in enumerate(mappings(document.spec, key))]
    types = [(f".{role}", str(role).lower(), one) for role, one in mapping(document.spec, key).items()]
    found = []
    for place, name, one in (*tasks, *types):
        path, stem = f"spec.{key}{place}.template", f"{document.name}-{name}"
        found.append(PodSet(path, mapping(one, "template"), _count(one, "replicas"), stem))
    return tuple(found)


def _read_job(document: Document, documents: list[Document]) -> Workload:
    """Pod i has the host name JOB-i and, with `subdomain`, the DNS name JOB-i.SUBDOMAIN."""
    pod_set = _job_pod_set("spec", document.spec, document.name, 1)
    subdomain = text(pod_set.spec, "subdomain")
    place = ("", "Service", document.namespace, subdomain)
    services = tuple(one for one in documents if (one.group, one.kind, one.namespace, one.name) == place)
    master = f"{document.name}-0.{subdomain}" if subdomain else ""
    return Workload(document, "Job", (pod_set,), "JOB_COMPLETION_INDEX", master, services=services)


def _job_pod_set(path: str, spec: Body, name: str, num_jobs: int | None) -> PodSet:
    pods = number(spec, "completions" if "completions" in spec else "parallelism")
    replicas = None if pods is None or num_jobs is None else pods * num_jobs
    return PodSet(f"{path}.template", mapping(spec, "template"), replicas, name, path, spec, num_jobs)


def _read_job_set(document: Document, _documents: list[Document]) -> Workload:
    """Pod i of job j of replicated job R is called SET-R-j-i; the subdomain is SET or network.subdomain."""
    found = []
    for position, job in enumerate(mappings(document.spec, "replicatedJobs")):
        copies = _count(job, "replicas")
        stem = f"{document.name}-{text(job, 'name')}-{max((copies or 1) - 1, 0)}"
        path = f"spec.replicatedJobs[{position}].template.spec"
        found.append(_job_pod_set(path, mapping(job, "template", "spec"), stem, copies))
    pod_sets, others = _split(found)
    subdomain = text(document.spec, "network", "subdomain") or document.name
    has_names = dig(document.spec, "network", "enableDNSHostnames") is not False
    stem = re.sub("[0-9]+$", "0", pod_sets[0].stem) if pod_sets else ""
    first = f"{stem}-0.{subdomain}" if stem and has_names else ""
    return Workload(document, "JobSet", pod_sets, "JOB_COMPLETION_INDEX", first, others=others)


def _read_volcano_job(document: Document, _documents: list[Document]) -> Workload:
    """Pod i of task T is called JOB-T-i, in the subdomain JOB that the svc plugin makes.

    The plugin pytorch numbers the pods of its two tasks, first the master's, in RANK.
    """
    pod_sets = _replicated(document, "tasks")
    plugins = mapping(document.spec, "plugins")
    own, others = _split(pod_sets)
    if "pytorch" not in plugins:
        first = f"{own[0].stem}-0.{document.name}" if own else ""
        return Workload(document, "VolcanoJob", own, "VC_TASK_INDEX", first, others=others)
    words = [str(word).lstrip("-").partition("=") for word in sequence(plugins, "pytorch")]
    given = {"master": "master", "worker": "worker", "port": "23456", **{name: value for name, _, value in words}}
    stems = [f"{document.name}-{given[role]}" for role in ("master", "worker")]
    own = tuple(one for stem in stems for one in pod_sets if one.stem == stem)
    others = tuple(one for one in pod_sets if one.stem not in stems)
    return Workload(document, "VolcanoJob", own, "RANK", f"{stems[0]}-0.{document.name}", others=others, plugin=given)


def _read_pytorch_job(document: Document, _documents: list[Document]) -> Workload:
    """Pod i of a replica type is called JOB-TYPE-i and has a Service of that name; an elastic job needs no master."""
    pod_sets = _replicated(document, "pytorchReplicaSpecs")
    is_elastic = bool(mapping(document.spec, "elasticPolicy"))
    first = f"{document.name}-{'worker' if is_elastic and len(pod_sets) == 1 else 'master'}-0"
    return Workload(document, "PyTorchJob", pod_sets, "PET_NODE_RANK", first, is_elastic=is_elastic)


def _read_ascend_job(document: Document, documents: list[Document]) -> Workload:
    """Pod i of a replica type is called JOB-TYPE-i.

    The operator's Service has an address of its own, so the master is known by a headless Service that selects it: the
    first one given whose selector fits no worker.
    """
    pod_sets = _replicated(document, "replicaSpecs")
    masters = [one for one in pod_sets if one.stem != f"{document.name}-worker"][:1]
    for service in documents:
        wanted = mapping(service.body, "spec", "selector").items()
        selected = [one for one in pod_sets if wanted <= mapping(one.template, "metadata", "labels").items()]
        is_headless = service.kind == "Service" and text(service.body, "spec", "clusterIP") == "None"
        if is_headless and wanted and masters and selected == masters:
            return Workload(document, "AscendJob", pod_sets, "RANK", service.name)
    return Workload(document, "AscendJob", pod_sets, "RANK", "")


def _read_mpi_job(document: Document, _documents: list[Document]) -> Workload:
    """Worker pod i is called JOB-worker-i, in the subdomain JOB; msrun stands in the launcher, behind mpirun."""
    pod_sets = _replicated(document, "mpiReplicaSpecs")
    workers = tuple(one for one in pod_sets if one.stem == f"{document.name}-worker")
    starter = next((one for one in pod_sets if one not in workers), None)
    return Workload(document, "MPIJob", workers, "", f"{document.name}-worker-0.{document.name}", starter)


def _read_leader_worker_set(document: Document, _documents: list[Document]) -> Workload:
    """Of group g the leader is called SET-g and worker i SET-g-i, in the subdomain SET; a group is a job."""
    group = mapping(document.spec, "leaderWorkerTemplate")
    size, path, stem = _count(group, "size"), "spec.leaderWorkerTemplate", f"{document.name}-0"
    pod_sets = []
    if "leaderTemplate" in group:
        pod_sets = [PodSet(f"{path}.leaderTemplate", mapping(group, "leaderTemplate"), 1, document.name)]
        size = None if size is None else size - 1
    pod_sets.append(PodSet(f"{path}.workerTemplate", mapping(group, "workerTemplate"), size, stem))
    return Workload(document, "LeaderWorkerSet", tuple(pod_sets), "LWS_WORKER_INDEX", f"{stem}.{document.name}")


RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")


def _read_train_job(document: Document, documents: list[Document]) -> Workload:
    """Pod i is called JOB-node-0-i, in the subdomain JOB.

    The trainer makes a JobSet of the runtime that the job names, with the job's numNodes, and with its image, command
    and args in the container `node`.
    """
    reference, trainer = mapping(document.spec, "runtimeRef"), mapping(document.spec, "trainer")
    runtime = next((one for one in documents if one.kind in RUNTIMES and one.name == text(reference, "name")), None)
    about = (document, "TrainJob")
    place = ("PET_NODE_RANK", f"{document.name}-node-0-0.{document.name}")
    if runtime is None:
        template = _with_trainer({"spec": {"containers": [{"name": "node"}]}}, trainer)
        alone = PodSet("spec.trainer", template, number(trainer, "numNodes"), document.name)
        is_partial = text(reference, "kind") != "TrainingRuntime"
        return Workload(*about, (alone,) if is_partial and alone.call else (), *place, is_partial=is_partial)
    nodes = number(trainer, "numNodes") or number(runtime.body, "spec", "mlPolicy", "numNodes")
    pod_sets: list[PodSet] = []
    others: list[PodSet] = []
    for position, job in enumerate(mappings(runtime.body, "spec", "template", "spec", "replicatedJobs")):
        spec = mapping(job, "template", "spec")
        step = text(job, "template", "metadata", "labels", "trainer.kubeflow.org/trainjob-ancestor-step")
        path = f"{runtime.label} spec.template.spec.replicatedJobs[{position}].template.spec"
        count = nodes if nodes is not None else number(spec, "completions")
        template, stem = _with_trainer(mapping(spec, "template"), trainer), f"{document.name}-{text(job, 'name')}-0"
        found = PodSet(f"{path}.template", template, count, stem, path, spec)
        (pod_sets if step in ("", "trainer") else others).append(found)
    return Workload(*about, tuple(pod_sets), *place, others=tuple(others))


def _with_trainer(template: Body, trainer: Body) -> Body:
    own = {key: value for key, value in trainer.items() if key in ("image", "command", "args")}
    containers = [
        {**container, **own} if text(container, "name") == "node" else container
        for container in sequence(template, "spec", "containers")
    ]
    return {**template, "spec": {**mapping(template, "spec"), "containers": containers}} if own else template


_READERS: dict[tuple[str, str], Callable[[Document, list[Document]], Workload]] = {
    ("batch", "Job"): _read_job,
    ("jobset.x-k8s.io", "JobSet"): _read_job_set,
    ("batch.volcano.sh", "Job"): _read_volcano_job,
    ("kubeflow.org", "PyTorchJob"): _read_pytorch_job,
    ("kubeflow.org", "MPIJob"): _read_mpi_job,
    ("mindxdl.gitee.com", "AscendJob"): _read_ascend_job,
    ("trainer.kubeflow.org", "TrainJob"): _read_train_job,
    ("leaderworkerset.x-k8s.io", "LeaderWorkerSet"): _read_leader_worker_set,
}
