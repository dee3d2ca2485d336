"""The kinds that a job can be rendered for: one module builds each."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from launch_templates.errors import UnknownName
from launch_templates.kinds import (
    ascendjob,
    compose,
    indexed_job,
    jobset,
    leaderworkerset,
    mpijob,
    pytorchjob,
    rayjob,
    scripts,
    trainjob,
    volcano,
)
from launch_templates.spec import JobSpec, settings_of_spec


@dataclass
class Kind:
    """One kind of job."""

    comment: str
    """What it is; the first line is `NAME: summary`."""
    takes: tuple[str, ...]
    """Fields of JobSpec that it has a place for."""
    build: Callable[[JobSpec], list[dict[str, Any]] | str]
    """The objects of a manifest, the documents of another YAML file, or the text of a script."""
    is_manifest: bool = True
    """Whether its objects are those of Kubernetes."""
    device_targets: tuple[str, ...] = ("CPU", "GPU", "Ascend")

    def __post_init__(self) -> None:
        self.name, _, self.summary = self.comment.partition("\n")[0].partition(": ")
        self.settings = tuple(one for name, one in settings_of_spec().items() if name in self.takes)
        """What can be set, in the order of JobSpec."""


def _module(module: Any, **more: Any) -> Kind:
    return Kind(inspect.cleandoc(module.__doc__), module.TAKES, module.build, **more)


def _function(build: Callable[[JobSpec], Any], takes: Iterable[str], **more: Any) -> Kind:
    return Kind(inspect.getdoc(build) or "", tuple(takes), build, **more)


_NO_ASCEND: dict[str, Any] = {"is_manifest": False, "device_targets": ("CPU", "GPU")}
_KINDS = (
    *map(_module, (indexed_job, jobset, leaderworkerset, mpijob, pytorchjob, rayjob, volcano)),
    _function(trainjob.build_job, trainjob.JOB_TAKES),
    _function(trainjob.build_runtime, trainjob.RUNTIME_TAKES),
    _module(ascendjob, device_targets=("Ascend",)),
    _module(compose, **_NO_ASCEND),
    _function(scripts.write_run, scripts.BY_MSRUN, is_manifest=False),
    _function(scripts.write_run_cluster, scripts.CLUSTER_TAKES, is_manifest=False),
    _function(scripts.build_skypilot, scripts.SKYPILOT_TAKES, **_NO_ASCEND),
    _function(scripts.write_slurm, (*scripts.BATCH_TAKES, "priority", "sbatch", "srun"), **_NO_ASCEND),
    _function(scripts.write_pbs, (*scripts.BATCH_TAKES, "qsub"), **_NO_ASCEND),
    _function(scripts.write_lsf, (*scripts.BATCH_TAKES, "bsub"), **_NO_ASCEND),
)
_BY_NAME = {kind.name: kind for kind in sorted(_KINDS, key=lambda kind: kind.name)}

_OPERATOR = "its operator ends the job with the first pod that fails"
NO_SPARES = {
    "ascendjob": _OPERATOR,
    "pytorchjob": _OPERATOR,
    "mpijob": "mpirun ends all hosts with the first that is lost",
    "leaderworkerset": "any pod that ends starts the whole group again",
    "rayjob": "its entrypoint ends with the first node that is lost",
    "skypilot": "SkyPilot ends the task with the first machine that is lost",
    "clustertrainingruntime": "spare pods are those of a TrainJob with a runtime of its own",
}
"""Why kinds have no spare hosts."""


def list_kinds() -> list[str]:
    """Names of all kinds, sorted."""
    return list(_BY_NAME)


def load_kind(name: str) -> Kind:
    """The kind of that name; raises UnknownName when there is none."""
    if name not in _BY_NAME:
        raise UnknownName("kind", name, _BY_NAME)
    return _BY_NAME[name]


def takers(name: str) -> Iterator[str]:
    """Kinds that take a field."""
    return (kind.name for kind in _BY_NAME.values() if name in kind.takes)
