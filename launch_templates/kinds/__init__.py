"""The kinds that a job can be rendered for: one module builds each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from launch_templates.errors import UnknownName
from launch_templates.kinds import (
    ascendjob,
    batch,
    compose,
    indexed_job,
    jobset,
    mpijob,
    pytorchjob,
    run,
    trainjob,
    volcano,
)
from launch_templates.spec import JobSpec, Setting, settings_of_spec


@dataclass(frozen=True)
class Kind:
    """One kind of job."""

    comment: str
    """What it is; the first line is `NAME: summary`."""
    takes: tuple[str, ...]
    """Fields of JobSpec that it has a place for."""
    build: Callable[[JobSpec], list[dict[str, Any]]] | None = None
    """Objects of a manifest; None for a script."""
    write: Callable[[JobSpec], str] | None = None
    """Text of a script; None for a manifest."""
    device_targets: tuple[str, ...] = ("CPU", "GPU", "Ascend")

    @property
    def name(self) -> str:
        return self.comment.partition(": ")[0]

    @property
    def summary(self) -> str:
        """What it is, in one line."""
        return self.comment.partition("\n")[0].partition(": ")[2]

    @property
    def settings(self) -> tuple[Setting, ...]:
        """What can be set, in the order of JobSpec."""
        return tuple(one for name, one in settings_of_spec().items() if name in self.takes)


_ANY_BUT_ASCEND = ("CPU", "GPU")
_MODULES: tuple[Any, ...] = (indexed_job, jobset, mpijob, pytorchjob, trainjob, volcano)
_KINDS = (
    *(Kind(inspect.cleandoc(module.__doc__), module.TAKES, module.build) for module in _MODULES),
    Kind(inspect.cleandoc(ascendjob.__doc__ or ""), ascendjob.TAKES, ascendjob.build, device_targets=("Ascend",)),
    Kind(
        inspect.cleandoc(compose.__doc__ or ""),
        compose.TAKES,
        write=compose.write,
        device_targets=_ANY_BUT_ASCEND,
    ),
    Kind(run.RUN, run.RUN_TAKES, write=run.write_run),
    Kind(run.CLUSTER, run.CLUSTER_TAKES, write=run.write_run_cluster),
    Kind(batch.SLURM, batch.SLURM_TAKES, write=batch.write_slurm, device_targets=_ANY_BUT_ASCEND),
    Kind(batch.PBS, batch.PBS_TAKES, write=batch.write_pbs, device_targets=_ANY_BUT_ASCEND),
    Kind(batch.LSF, batch.LSF_TAKES, write=batch.write_lsf, device_targets=_ANY_BUT_ASCEND),
)


@cache
def _by_name() -> dict[str, Kind]:
    return {kind.name: kind for kind in sorted(_KINDS, key=lambda kind: kind.name)}


def list_kinds() -> list[str]:
    """Names of all kinds, sorted."""
    return list(_by_name())


def load_kind(name: str) -> Kind:
    """The kind of that name.

    Raises:
        UnknownName: there is none.
    """
    if name not in _by_name():
        raise UnknownName("kind", name, list_kinds())
    return _by_name()[name]


def takers(name: str) -> Iterator[str]:
    """Kinds that take a field."""
    return (kind.name for kind in _by_name().values() if name in kind.takes)
