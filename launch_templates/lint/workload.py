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
    """Job, JobSet, VolcanoJob or PyTorchJob."""
    pod_sets: tuple[PodSet, ...]
    rank_variable: str
    """Variable in which the controller tells each pod its index."""
    master_name: str
    """DNS name of the pod with index 0, as other pods of the namespace know it; empty when it has none."""

    @property
    def num_pods(self) -> int | None:
        """Pods of the whole job; None when one count is unknown."""
        counts = [pod_set.replicas for pod_set in self.pod_sets]
        return None if None in counts or not counts else sum(count for count in counts if count)

    @property
    def longest_pod_name(self) -> str:
        """Host name of the pod with the longest one."""
        names = [f"{pod_set.stem}-{max((pod_set.replicas or 1) - 1, 0)}" for pod_set in self.pod_sets]
        return max(names, key=len, default=self.document.name)


def read_workloads(documents: Iterable[Document]) -> list[Workload]:
    """The training jobs among the documents; documents of other kinds are passed over."""
    return [
        _READERS[document.group, document.kind](document)
        for document in documents
        if (document.group, document.kind) in _READERS
    ]


def _read_job(document: Document) -> Workload:
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


def _read_job_set(document: Document) -> Workload:
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


def _read_volcano_job(document: Document) -> Workload:
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


def _read_pytorch_job(document: Document) -> Workload:
    """Pod i of a replica type is called JOB-TYPE-i and has a Service of that name; the master is the type Master."""
    pod_sets = tuple(_replica_specs(document))
    return Workload(document, "PyTorchJob", pod_sets, "PET_NODE_RANK", f"{document.name}-master-0")


def _replica_specs(document: Document) -> Iterator[PodSet]:
    for role, spec in mapping(document.body, "spec", "pytorchReplicaSpecs").items():
        replicas = number(spec, "replicas") if "replicas" in mapping(spec) else 1
        path = f"spec.pytorchReplicaSpecs.{role}.template"
        yield PodSet(path, mapping(spec, "template"), replicas, f"{document.name}-{str(role).lower()}")


_READERS: dict[tuple[str, str], Callable[[Document], Workload]] = {
    ("batch", "Job"): _read_job,
    ("jobset.x-k8s.io", "JobSet"): _read_job_set,
    ("batch.volcano.sh", "Job"): _read_volcano_job,
    ("kubeflow.org", "PyTorchJob"): _read_pytorch_job,
}
