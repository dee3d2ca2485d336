"""Volcano's table of a job that spans several clusters (version 1.4), out of the tables of its parts.

Source: the HyperJob controller of volcano-global: parts sorted by cluster id and job name, ranks counted in that order,
lists of servers and super pods put one after the other, `cluster_list` of the super pods of each cluster,
`data_version` one higher, status "completed" only when every part has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ranktable.edit import Edited
from ranktable.edit.merge import DATA_VERSION, merge_tables
from ranktable.errors import MergeError
from ranktable.model import Cluster, RankTable
from ranktable.text import plain

_GLOBAL = "volcano-global"
_PART_DIALECTS = ("1.2", "volcano-job")


@dataclass(frozen=True, slots=True)
class ClusterPart:
    """The table of one job of one cluster; `source` is what messages call it."""

    cluster_id: str
    job: str
    table: RankTable
    source: str


def merge_clusters(parts: Iterable[ClusterPart], *, allow_initializing: bool = False) -> Edited:
    """Return the table of all clusters of `parts`, whatever order they are given in.

    Raises MergeError for a part without super pods, for a super pod id in two clusters, and as `merge_tables` does;
    NotReadyError for a part that is not completed unless `allow_initializing`; EditError when nothing is given.
    """
    ordered = sorted(parts, key=lambda part: (part.cluster_id, part.job))
    conflicts = [*_find_unfit(ordered), *_find_shared_pods(ordered), *_find_doubled_jobs(ordered)]
    if conflicts:
        raise MergeError(conflicts)
    names = [part.source for part in ordered]
    tables = [_place_in_cluster(part) for part in ordered]
    merged = merge_tables(tables, names=names, order="argument", allow_initializing=allow_initializing)
    highest = merged.table.extra.get(DATA_VERSION)
    version = highest + 1 if isinstance(highest, int) else 1  # what is there and no integer has been refused by now
    table = replace(merged.table, extra={**merged.table.extra, DATA_VERSION: version})
    shown = ", ".join(plain(part.source) for part in ordered[:4])
    order = f"clusters and jobs in order: {shown}" + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")
    counted = f"{DATA_VERSION} is {version}, one more than the highest of the parts"
    return Edited(table, (order, counted, *(note for note in merged.notes if not note.startswith(DATA_VERSION))))


def _place_in_cluster(part: ClusterPart) -> RankTable:
    pod_ids = tuple(pod.super_pod_id for pod in part.table.super_pods)
    return replace(part.table, dialect=_GLOBAL, clusters=(Cluster(part.cluster_id, (), pod_ids),))


def _find_unfit(parts: Sequence[ClusterPart]) -> list[str]:
    conflicts = []
    for part in parts:
        if part.table.dialect not in _PART_DIALECTS:
            wanted = " or ".join(_PART_DIALECTS)
            conflicts.append(f"{part.source}: its dialect is {plain(part.table.dialect)}, that of a part is {wanted}")
        elif not part.table.super_pods:
            conflicts.append(f"{part.source}: it has no super pods, which are what a global table lists per cluster")
    return conflicts


def _find_shared_pods(parts: Sequence[ClusterPart]) -> list[str]:
    first_of: dict[str, ClusterPart] = {}
    conflicts = []
    for part in parts:
        for pod in part.table.super_pods:
            first = first_of.setdefault(pod.super_pod_id, part)
            if first.cluster_id != part.cluster_id:
                where = f"cluster {plain(part.cluster_id)} and, in {first.source}, of cluster {plain(first.cluster_id)}"
                conflicts.append(f"{part.source}: super pod {plain(pod.super_pod_id)} is of {where}; rename one")
    return conflicts


def _find_doubled_jobs(parts: Sequence[ClusterPart]) -> list[str]:
    first_of: dict[tuple[str, str], ClusterPart] = {}
    conflicts = []
    for part in parts:
        first = first_of.setdefault((part.cluster_id, part.job), part)
        if first is not part:
            name = f"job {plain(part.job)!r} of cluster {plain(part.cluster_id)}"
            conflicts.append(f"{part.source}: {name} is given as {first.source} too; name them CLUSTER/JOB=FILE")
    return conflicts
