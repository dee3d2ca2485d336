"""Which processors and which memory each worker gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.placement.bind_options import CoreBinding
from msrun.planning.placement.binding import HostBinding, bind_workers
from msrun.planning.placement.host import Cpu, Topology, flat_topology

AUTO = CoreBinding()


def machine(nodes: int = 1, cores: int = 4, threads: int = 1, **settings: Any) -> Topology:
    """Return a host with so many cores per node; the second threads are numbered after all first ones."""
    count = nodes * cores
    cpus = tuple(
        Cpu(thread * count + core, core // cores, core // cores, core)
        for thread in range(threads)
        for core in range(count)
    )
    defaults = {"allowed": tuple(range(count * threads)), "memory_nodes": tuple(range(nodes))}
    return Topology(cpus, **{**defaults, **settings})


def bind(
    topology: Topology, devices: int | Sequence[str], core: CoreBinding | None = AUTO, *, numa: bool = False
) -> HostBinding:
    names = [str(number) for number in range(devices)] if isinstance(devices, int) else devices
    return bind_workers(topology, names, target="gpu", core=core, numa=numa)


def cpus_of(binding: HostBinding) -> list[tuple[int, ...]]:
    return [worker.cpus for worker in binding.workers]


def named(**lists: tuple[int, ...]) -> CoreBinding:
    scheduler = lists.pop("scheduler", ())
    devices = {int(key.removeprefix("device")): cpus for key, cpus in lists.items()}
    return CoreBinding(is_auto=False, devices=devices, scheduler=scheduler)


def test_nothing_asked_binds_nothing() -> None:
    binding = bind(machine(), 3, None)
    assert cpus_of(binding) == [(), (), ()]
    assert {worker.reason for worker in binding.workers} == {"not bound"}
    assert (binding.scheduler_cpus, binding.notes) == ((), ())


# -- shares ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "workers", "shares"),
    [
        (machine(cores=4), 2, [(0, 1), (2, 3)]),
        (machine(cores=5), 2, [(0, 1), (2, 3, 4)]),
        (machine(cores=4, threads=2), 2, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (machine(cores=3, threads=2), 2, [(0, 3), (1, 2, 4, 5)]),
        (machine(nodes=2, cores=2, threads=2), 4, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (machine(cores=8, allowed=(1, 2, 5, 6)), 2, [(1, 2), (5, 6)]),
        (machine(cores=1), 1, [(0,)]),
    ],
)
def test_cores_are_cut_into_even_neighbouring_pieces(
    topology: Topology, workers: int, shares: list[tuple[int, ...]]
) -> None:
    binding = bind(topology, workers)
    assert cpus_of(binding) == shares
    assert all("an even share of the" in worker.reason for worker in binding.workers)
    assert binding.notes == ()


def test_fewer_cores_than_workers_are_shared_in_turn_and_that_is_said() -> None:
    binding = bind(machine(cores=2, threads=2), 5)
    assert cpus_of(binding) == [(0, 2), (1, 3), (0, 2), (1, 3), (0, 2)]
    assert binding.notes == ("--bind_core: local ranks 0-4 get one core in turn: 2 cores for 5 workers",)


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), st.integers(1, 24), st.randoms(use_true_random=False))
def test_shares_are_whole_cores_fair_and_never_empty(
    nodes: int, cores: int, threads: int, workers: int, random: Any
) -> None:
    everything = machine(nodes, cores, threads)
    allowed = sorted(random.sample(everything.allowed, random.randint(1, len(everything.allowed))))
    homes = {str(i): random.choice([None, 0, nodes - 1, 99]) for i in range(workers)}
    topology = machine(nodes, cores, threads, allowed=tuple(allowed), device_nodes={"gpu": homes})
    shares = [set(cpus) for cpus in cpus_of(bind(topology, workers))]
    whole = [{cpu.number for cpu in core} for core in topology.cores()]
    for share in shares:
        assert share
        assert all(core <= share or not core & share for core in whole), "the threads of a core stay together"
    if len(whole) >= workers:
        assert sum(map(len, shares)) == len(set.union(*shares)), "disjoint"
        assert set.union(*shares) == set(allowed), "nothing left over"
        counts = [sum(core <= share for core in whole) for share in shares]
        assert max(counts) - min(counts) <= 1
    else:
        users = [sum(core <= share for share in shares) for core in whole]
        assert max(users) - min(users) <= 1


# -- near the device ------------------------------------------------------------------------------------------------


def with_devices(nodes: dict[str, int | None], **settings: Any) -> Topology:
    return machine(nodes=2, cores=4, device_nodes={"gpu": nodes, "ascend": {"0": 1}}, **settings)


def test_workers_get_cores_of_the_node_of_their_device() -> None:
    binding = bind(with_devices({"0": 1, "1": 0, "2": 1, "3": 0}), 4)
    assert cpus_of(binding) == [(4, 5), (0, 1), (6, 7), (2, 3)]
    assert [worker.reason for worker in binding.workers][:2] == [
        "an even share near its device: NUMA node 1",
        "an even share near its device: NUMA node 0",
    ]


def test_physical_numbers_decide_not_local_ranks() -> None:
    assert cpus_of(bind(with_devices({"0": 0, "1": 0, "2": 1, "3": 1}), ["3", "0"])) == [(4, 5, 6, 7), (0, 1, 2, 3)]


def test_who_finds_its_node_given_out_gets_what_is_left_over() -> None:
    binding = bind(with_devices({"0": 0, "1": 0, "2": 0, "3": None}), 4)
    assert cpus_of(binding) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert "NUMA node 0 of its device has none left" in binding.workers[2].reason
    assert "is not known" in binding.workers[3].reason


def test_a_share_may_be_filled_up_from_elsewhere() -> None:
    binding = bind(with_devices({"0": 0, "1": 0, "2": 1}), 3)
    assert cpus_of(binding) == [(0, 1, 2), (3, 6, 7), (4, 5)]
    assert binding.workers[1].reason == "an even share near its device: NUMA node 0, and 2 from elsewhere"


def test_a_node_without_allowed_cores_does_not_count() -> None:
    binding = bind(with_devices({"0": 1, "1": 1}, allowed=(0, 1, 2, 3)), 2)
    assert cpus_of(binding) == [(0, 1), (2, 3)]


# -- --bind_numa ----------------------------------------------------------------------------------------------------


def test_numa_puts_blocks_of_workers_on_whole_nodes() -> None:
    binding = bind(machine(nodes=2, cores=2), 4, None, numa=True)
    assert cpus_of(binding) == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [worker.memory_nodes for worker in binding.workers] == [(0,), (0,), (1,), (1,)]
    assert binding.workers[3].reason == "all cores of NUMA node 1"
    assert binding.notes == ()


def test_numa_with_cores_shares_each_node_among_its_workers() -> None:
    binding = bind(machine(nodes=2, cores=2, threads=2), 4, AUTO, numa=True)
    assert cpus_of(binding) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [worker.memory_nodes for worker in binding.workers] == [(0,), (0,), (1,), (1,)]


def test_numa_follows_the_device() -> None:
    binding = bind(with_devices({"0": 1, "1": 0}), 2, None, numa=True)
    assert [worker.memory_nodes for worker in binding.workers] == [(1,), (0,)]
    assert binding.workers[0].reason == "all cores of NUMA node 1, where its device is"


def test_numa_with_more_nodes_than_workers_uses_some() -> None:
    binding = bind(machine(nodes=4, cores=1), 2, None, numa=True)
    assert cpus_of(binding) == [(0,), (2,)]


def test_one_node_changes_nothing_for_memory_and_that_is_said() -> None:
    binding = bind(machine(cores=2), 2, None, numa=True)
    assert [worker.memory_nodes for worker in binding.workers] == [(), ()]
    assert binding.notes == ("--bind_numa changes nothing for memory: NUMA node 0 is the only one with usable CPUs",)


def test_memory_that_may_not_be_used_is_left_alone_and_that_is_said() -> None:
    binding = bind(machine(nodes=2, cores=1, memory_nodes=(0,)), 2, None, numa=True)
    assert [worker.memory_nodes for worker in binding.workers] == [(0,), ()]
    assert binding.notes == ("--bind_numa: no memory of NUMA node 1 may be used; only CPUs are bound",)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), st.booleans())
def test_a_worker_never_leaves_its_node(nodes: int, cores: int, workers: int, is_split: bool) -> None:
    topology = machine(nodes, cores, 2)
    node_of = {cpu.number: cpu.node for cpu in topology.cpus}
    binding = bind(topology, workers, AUTO if is_split else None, numa=True)
    homes = [{node_of[cpu] for cpu in worker.cpus} for worker in binding.workers]
    assert all(len(home) == 1 for home in homes)
    order = [home.pop() for home in homes]
    assert order == sorted(order)
    assert max(map(order.count, order)) - min(map(order.count, order)) <= 1


# -- the dict -------------------------------------------------------------------------------------------------------


def test_dict_binds_by_physical_device() -> None:
    core = named(device3=(0, 1), device1=(2,), scheduler=(3,))
    topology = machine(device_nodes={"gpu": {str(number): None for number in range(8)}})
    binding = bind(topology, ["1", "3"], core)
    assert cpus_of(binding) == [(2,), (0, 1)]
    assert (binding.scheduler_cpus, binding.notes) == ((3,), ())
    assert binding.workers[0].reason == "named by --bind_core for device 1"


def test_devices_without_a_list_stay_unbound_and_are_named() -> None:
    binding = bind(machine(), 4, named(device1=(0,), device2=()))
    assert cpus_of(binding) == [(), (0,), (), ()]
    assert binding.notes == ("--bind_core names no CPUs for device 0 (local rank 0), 3 (local rank 3): not bound",)
    assert binding.workers[2].reason == "not bound: device 2 has an empty list"


def test_dict_of_the_whole_host_serves_a_job_on_a_part_of_it() -> None:
    topology = machine(device_nodes={"gpu": {"0": None, "1": None, "2": None}})
    assert cpus_of(bind(topology, ["2"], named(device0=(0,), device1=(1,), device2=(2,)))) == [(2,)]


def test_dict_with_numa_binds_the_memory_of_the_named_cores() -> None:
    binding = bind(machine(nodes=2, cores=2), 2, named(device0=(2, 3)), numa=True)
    assert cpus_of(binding) == [(2, 3), (2, 3)]
    assert [worker.memory_nodes for worker in binding.workers] == [(1,), (1,)]
    assert binding.notes == ("--bind_core names no CPUs for device 1 (local rank 1): bound to a NUMA node only",)


@pytest.mark.parametrize(
    ("core", "pattern"),
    [
        (named(device2=(0,)), r"'device2' is no device here; there are devices 0-1, by their physical numbers"),
        (named(device0=(4, 7)), r"'device0' names CPU 4,7, which does not exist here; there are 0-3"),
        (named(device0=(0, 3)), r"'device0' names CPU 3, which this process may not use .*; it may use 0-2"),
        (named(scheduler=(9,)), r"'scheduler' names CPU 9, which does not exist here"),
    ],
)
def test_what_the_host_does_not_have_is_refused(core: CoreBinding, pattern: str) -> None:
    with pytest.raises(UsageError, match=pattern):
        bind(machine(cores=4, allowed=(0, 1, 2)), 2, core)


def test_a_device_whose_number_is_not_known_stays_unbound() -> None:
    binding = bind(flat_topology(range(2)), ["MIG-1f"], named(scheduler=(0,)))
    assert cpus_of(binding) == [()]
    assert binding.notes == ("--bind_core names no CPUs for device MIG-1f (local rank 0): not bound",)
