"""How many compute threads each worker gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.planning.placement.binding import WorkerBinding, self_binding, thread_note, threads_per_worker
from msrun.planning.placement.host import Cpu, Topology, flat_topology

SMT = Topology(tuple(Cpu(n, 0, 0, n % 4) for n in range(8)), tuple(range(8)))
"""Four cores of two threads."""


def on(*cpus: int) -> WorkerBinding:
    return WorkerBinding(cpus, (), "")


def limited(quota_cores: float) -> Topology:
    return Topology(SMT.cpus, SMT.allowed, quota_cores)


@pytest.mark.parametrize(
    ("topology", "workers", "threads"),
    [
        (SMT, [on()], (4,)),
        (SMT, [on(), on()], (2, 2)),
        (SMT, [on()] * 3, (1, 1, 1)),
        (SMT, [on()] * 9, (1,) * 9),
        (SMT, [on(0, 4, 1, 5, 2, 6), on(3, 7)], (3, 1)),
        (SMT, [on(0, 1, 2, 3), on(4, 5, 6, 7)], (2, 2)),  # two threads of the same cores
        (SMT, [on(0, 1), on()], (2, 2)),
        (SMT, [on(0, 4)] * 5, (1,) * 5),
        (SMT, [on(0, 1, 2)] * 3, (1, 1, 1)),
        (flat_topology(range(6)), [on(*range(6))] * 3, (2, 2, 2)),  # six thirds, added up in floating point
        (limited(2.5), [on()], (2,)),
        (limited(2.5), [on(), on()], (1, 1)),
        (limited(0.5), [on()], (1,)),
        (limited(64), [on()], (4,)),
        (limited(3), [on(0, 4, 1, 5, 2, 6), on(3, 7)], (1, 1)),
    ],
)
def test_threads_are_the_cores_that_a_worker_has_for_itself(
    topology: Topology, workers: list[WorkerBinding], threads: tuple[int, ...]
) -> None:
    assert threads_per_worker(topology, workers) == threads


@given(st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=12), st.none() | st.floats(0.1, 20))
def test_threads_never_ask_for_more_than_there_is(sets: list[set[int]], quota_cores: float | None) -> None:
    topology = Topology(SMT.cpus, SMT.allowed, quota_cores)
    bound = [cpus for cpus in sets if cpus]
    for workers in ([on(*cpus) for cpus in bound] or [on()], [on()] * len(sets)):
        threads = threads_per_worker(topology, workers)
        assert all(count >= 1 for count in threads)
        spare = sum(count for count in threads if count > 1)
        assert spare <= 4
        assert quota_cores is None or spare <= quota_cores


@pytest.mark.parametrize(
    ("topology", "workers", "text"),
    [
        (SMT, [on(), on()], "OMP_NUM_THREADS=2 for each worker (cores shared evenly; set it to change)"),
        (SMT, [on(0, 1), on(2)], "OMP_NUM_THREADS=1 to 2 for each worker (its own cores; set it to change)"),
        (
            limited(1.5),
            [on()],
            "OMP_NUM_THREADS=1 for each worker (its part of the cgroup's limit of 1.5 CPUs; set it to change)",
        ),
        (limited(64), [on()], "OMP_NUM_THREADS=4 for each worker (cores shared evenly; set it to change)"),
    ],
)
def test_note_says_the_number_and_why(topology: Topology, workers: list[WorkerBinding], text: str) -> None:
    assert thread_note(topology, workers) == text


def test_variables_that_let_openmp_bind_processes_are_found() -> None:
    env = {"OMP_PROC_BIND": "close", "OMP_PLACES": "", "KMP_AFFINITY": "disabled", "GOMP_CPU_AFFINITY": "0-3"}
    assert self_binding(env) == ["OMP_PROC_BIND", "GOMP_CPU_AFFINITY"]
    assert self_binding({"OMP_PROC_BIND": "FALSE"}) == []
