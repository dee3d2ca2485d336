"""What a manifest starts: how many pods of which template, how they are called, where their index is. Pure.

One reader for each kind; the naming rules are those of the kind's controller, written at its reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from launch_templates.lint.document import Document, dig, mapping, number, sequence, text


@dataclass(frozen=True)
class Container:
    """One container and where it stands in the document."""

    path: str
    body: dict[str, Any]
    is_init: bool = False


@dataclass(frozen=True)
class PodSet:
    """Pods of one template."""

    path: str
    """Path of the pod template in the document."""
    template: dict[str, Any]
    replicas: int | None
    """Number of pods; None when the manifest does not say it as an integer."""
    stem: str
    """Pod i is called STEM-i."""
    job_path: str = ""
    """Path of the batch/v1 Job spec around the template; empty when there is none."""
    job_spec: dict[str, Any] | None = None

    @property
    def spec(self) -> dict[str, Any]:
        return mapping(self.template, "spec")

    @property
    def containers(self) -> list[Container]:
        """Init containers and containers, malformed ones left out."""
        return [
            Container(f"{self.path}.spec.{key}[{position}]", body, key == "initContainers")
            for key in ("initContainers", "containers")
            for position, body in enumerate(sequence(self.spec, key))
            if isinstance(body, dict)
        ]


@dataclass(frozen=True)
class Workload:
    """One training job of a known kind."""

    document: Document
    kind: str
    """Job, JobSet, VolcanoJob, PyTorchJob, TrainJob, AscendJob or MPIJob."""
    pod_sets: tuple[PodSet, ...]
    rank_variable: str
    """Variable in which the controller tells each pod its index; empty where mpirun tells it."""
    master_name: str
    """DNS name of the pod with index 0, as other pods of the namespace know it; empty when it has none."""

    @property
    def num_pods(self) -> int | None:
        """Pods with workers of the whole job; None when one count is unknown."""
        counts = [pod_set.replicas for pod_set in self.host_sets.values()]
        return None if None in counts or not counts else sum(count for count in counts if count)

    @property
    def host_sets(self) -> dict[int, PodSet]:
        """Pods that workers run in, by position: of an MPIJob not those of the launcher."""
        is_mpi = self.kind == "MPIJob"
        return {
            position: pod_set
            for position, pod_set in enumerate(self.pod_sets)
            if not is_mpi or pod_set.stem == f"{self.document.name}-worker"
        }

    @property
    def has_ranks_from_mpi(self) -> bool:
        """Whether mpirun starts msrun, from a pod of its own, and tells it its node rank."""
        return self.kind == "MPIJob"

    @property
    def longest_pod_name(self) -> str:
        """Host name of the pod with the longest one."""
        names = [f"{pod_set.stem}-{max((pod_set.replicas or 1) - 1, 0)}" for pod_set in self.pod_sets]
        return max(names, key=len, default=self.document.name)


def read_workloads(documents: Iterable[Document]) -> list[Workload]:
    """The training jobs among the documents; documents of other kinds are passed over."""
    known = list(documents)
    return [
        _READERS[document.group, document.kind](document, known)
        for document in known
        if (document.group, document.kind) in _READERS
    ]


def _read_job(document: Document, _documents: list[Document]) -> Workload:
    """Pod i has the host name JOB-i and, with `subdomain`, the DNS name JOB-i.SUBDOMAIN."""
    spec = mapping(document.body, "spec")
    pod_set = _job_pod_set("spec", spec, document.name, 1)
    subdomain = text(pod_set.spec, "subdomain")
    master = f"{document.name}-0.{subdomain}" if subdomain else ""
    return Workload(document, "Job", (pod_set,), "JOB_COMPLETION_INDEX", master)


def _job_pod_set(path: str, spec: dict[str, Any], name: str, num_jobs: int | None) -> PodSet:
    pods = number(spec, "completions") if "completions" in spec else number(spec, "parallelism")
    replicas = None if pods is None or num_jobs is None else pods * num_jobs
    return PodSet(f"{path}.template", mapping(spec, "template"), replicas, name, path, spec)


def _read_job_set(document: Document, _documents: list[Document]) -> Workload:
    """Pod i of job j of replicated job R is called SET-R-j-i; the subdomain is SET or network.subdomain."""
    jobs = [job for job in sequence(document.body, "spec", "replicatedJobs") if isinstance(job, dict)]
    subdomain = text(document.body, "spec", "network", "subdomain") or document.name
    has_names = dig(document.body, "spec", "network", "enableDNSHostnames") is not False
    first = f"{document.name}-{text(jobs[0], 'name')}-0-0.{subdomain}" if jobs and has_names else ""
    pod_sets = tuple(_replicated_job(document, position, job) for position, job in enumerate(jobs))
    return Workload(document, "JobSet", pod_sets, "JOB_COMPLETION_INDEX", first)


def _replicated_job(document: Document, position: int, job: dict[str, Any]) -> PodSet:
    num_jobs = number(job, "replicas") if "replicas" in job else 1
    stem = f"{document.name}-{text(job, 'name')}-{max((num_jobs or 1) - 1, 0)}"
    path = f"spec.replicatedJobs[{position}].template.spec"
    return _job_pod_set(path, mapping(job, "template", "spec"), stem, num_jobs)


def _read_volcano_job(document: Document, _documents: list[Document]) -> Workload:
    """Pod i of task T is called JOB-T-i, in the subdomain JOB that the svc plugin makes."""
    tasks = [task for task in sequence(document.body, "spec", "tasks") if isinstance(task, dict)]
    first = f"{document.name}-{text(tasks[0], 'name')}-0.{document.name}" if tasks else ""
    pod_sets = tuple(
        PodSet(
            f"spec.tasks[{position}].template",
            mapping(task, "template"),
            number(task, "replicas"),
            f"{document.name}-{text(task, 'name')}",
        )
        for position, task in enumerate(tasks)
    )
    return Workload(document, "VolcanoJob", pod_sets, "VC_TASK_INDEX", first)


def _read_pytorch_job(document: Document, _documents: list[Document]) -> Workload:
    """Pod i of a replica type is called JOB-TYPE-i and has a Service of that name; the master is the type Master."""
    pod_sets = tuple(_replica_specs(document, "pytorchReplicaSpecs"))
    return Workload(document, "PyTorchJob", pod_sets, "PET_NODE_RANK", f"{document.name}-master-0")


def _replica_specs(document: Document, key: str) -> Iterator[PodSet]:
    for role, spec in mapping(document.body, "spec", key).items():
        replicas = number(spec, "replicas") if "replicas" in mapping(spec) else 1
        path = f"spec.{key}.{role}.template"
        yield PodSet(path, mapping(spec, "template"), replicas, f"{document.name}-{str(role).lower()}")


def _read_ascend_job(document: Document, documents: list[Document]) -> Workload:
    """Pod i of a replica type is called JOB-TYPE-i.

    The operator's Service has an address of its own, so the master is known by a headless Service that selects it: the
    first one given whose selector fits no worker.
    """
    pod_sets = tuple(_replica_specs(document, "replicaSpecs"))
    master = next((pod_set for pod_set in pod_sets if pod_set.stem != f"{document.name}-worker"), None)
    labels = [mapping(pod_set.template, "metadata", "labels").items() for pod_set in pod_sets if pod_set is not master]
    own = mapping(master.template if master else {}, "metadata", "labels").items()
    for service in documents:
        wanted = mapping(service.body, "spec", "selector").items()
        is_headless = service.kind == "Service" and text(service.body, "spec", "clusterIP") == "None"
        if is_headless and wanted and wanted <= own and not any(wanted <= other for other in labels):
            return Workload(document, "AscendJob", pod_sets, "RANK", service.name)
    return Workload(document, "AscendJob", pod_sets, "RANK", "")


def _read_mpi_job(document: Document, _documents: list[Document]) -> Workload:
    """Worker pod i is called JOB-worker-i, in the subdomain JOB; msrun stands in the launcher, behind mpirun."""
    pod_sets = tuple(_replica_specs(document, "mpiReplicaSpecs"))
    return Workload(document, "MPIJob", pod_sets, "", f"{document.name}-worker-0.{document.name}")


def _read_train_job(document: Document, documents: list[Document]) -> Workload:
    """Pod i is called JOB-node-0-i, in the subdomain JOB.

    The trainer makes a JobSet of the runtime that the job names, with the job's numNodes, and with its image, command
    and args in the container `node`.
    """
    name = text(document.body, "spec", "runtimeRef", "name")
    runtime = next((one for one in documents if one.kind in _RUNTIMES and one.name == name), None)
    master = f"{document.name}-node-0-0.{document.name}"
    if runtime is None:
        return Workload(document, "TrainJob", (), "PET_NODE_RANK", master)
    trainer = mapping(document.body, "spec", "trainer")
    nodes = number(trainer, "numNodes") or number(runtime.body, "spec", "mlPolicy", "numNodes")
    jobs = [
        job for job in sequence(runtime.body, "spec", "template", "spec", "replicatedJobs") if isinstance(job, dict)
    ]
    pod_sets = []
    for position, job in enumerate(jobs):
        spec = mapping(job, "template", "spec")
        count = nodes if nodes is not None else number(spec, "completions")
        path = f"{runtime.label} spec.template.spec.replicatedJobs[{position}].template.spec"
        template = _with_trainer(mapping(spec, "template"), trainer)
        pod_sets.append(
            PodSet(f"{path}.template", template, count, f"{document.name}-{text(job, 'name')}-0", path, spec)
        )
    return Workload(document, "TrainJob", tuple(pod_sets), "PET_NODE_RANK", master)


_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")


def _with_trainer(template: dict[str, Any], trainer: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in trainer.items() if key in ("image", "command", "args")}
    if not own:
        return template
    containers = [
        {**container, **own} if isinstance(container, dict) and text(container, "name") == "node" else container
        for container in sequence(template, "spec", "containers")
    ]
    return {**template, "spec": {**mapping(template, "spec"), "containers": containers}}


Reader = Callable[[Document, list[Document]], Workload]

_READERS: dict[tuple[str, str], Reader] = {
    ("batch", "Job"): _read_job,
    ("jobset.x-k8s.io", "JobSet"): _read_job_set,
    ("batch.volcano.sh", "Job"): _read_volcano_job,
    ("kubeflow.org", "PyTorchJob"): _read_pytorch_job,
    ("kubeflow.org", "MPIJob"): _read_mpi_job,
    ("mindxdl.gitee.com", "AscendJob"): _read_ascend_job,
    ("trainer.kubeflow.org", "TrainJob"): _read_train_job,
}
