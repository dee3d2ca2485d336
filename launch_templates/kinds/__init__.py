"""The kinds that a job can be rendered for: one module builds each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from launch_templates.errors import UnknownName
from launch_templates.kinds import (
    ascendjob,
    batch,
    compose,
    indexed_job,
    jobset,
    leaderworkerset,
    mpijob,
    pytorchjob,
    rayjob,
    run,
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


_ANY_BUT_ASCEND = ("CPU", "GPU")


def _module(module: Any, **more: Any) -> Kind:
    return Kind(inspect.cleandoc(module.__doc__), module.TAKES, module.build, **more)


def _script(comment: str, takes: tuple[str, ...], build: Callable[[JobSpec], Any], *targets: str) -> Kind:
    return Kind(comment, takes, build, is_manifest=False, device_targets=targets or Kind.device_targets)


_KINDS = (
    *map(_module, (indexed_job, jobset, leaderworkerset, mpijob, pytorchjob, rayjob, volcano)),
    Kind(trainjob.JOB, trainjob.JOB_TAKES, trainjob.build_job),
    Kind(trainjob.RUNTIME, trainjob.RUNTIME_TAKES, trainjob.build_runtime),
    _module(ascendjob, device_targets=("Ascend",)),
    _module(compose, is_manifest=False, device_targets=_ANY_BUT_ASCEND),
    _script(run.RUN, run.RUN_TAKES, run.write_run),
    _script(run.CLUSTER, run.CLUSTER_TAKES, run.write_run_cluster),
    _script(run.SKYPILOT, run.SKYPILOT_TAKES, run.build_skypilot, *_ANY_BUT_ASCEND),
    _script(batch.SLURM, batch.SLURM_TAKES, batch.write_slurm, *_ANY_BUT_ASCEND),
    _script(batch.PBS, batch.PBS_TAKES, batch.write_pbs, *_ANY_BUT_ASCEND),
    _script(batch.LSF, batch.LSF_TAKES, batch.write_lsf, *_ANY_BUT_ASCEND),
)

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


_BY_NAME = {kind.name: kind for kind in sorted(_KINDS, key=lambda kind: kind.name)}


def list_kinds() -> list[str]:
    """Names of all kinds, sorted."""
    return list(_BY_NAME)


def load_kind(name: str) -> Kind:
    """The kind of that name.

    Raises:
        UnknownName: there is none.
    """
    if name not in _BY_NAME:
        raise UnknownName("kind", name, _BY_NAME)
    return _BY_NAME[name]


def takers(name: str) -> Iterator[str]:
    """Kinds that take a field."""
    return (kind.name for kind in _BY_NAME.values() if name in kind.takes)
