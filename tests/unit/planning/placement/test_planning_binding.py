"""Which processors and which memory each worker gets."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.placement.host import (
    Cpu,
    Topology,
    WorkerBinding,
    bind_workers,
    flat_topology,
    self_binding,
    threads_per_worker,
)
from msrun.planning.spec import CoreBinding, parse_bind_core

AUTO = CoreBinding()


def machine(nodes=1, cores=4, threads=1, **settings):
    """Return a host with so many cores per node; the second threads are numbered after all first ones."""
    count = nodes * cores
    cpus = tuple(
        Cpu(thread * count + core, core // cores, core // cores, core)
        for thread in range(threads)
        for core in range(count)
    )
    defaults = {"allowed": tuple(range(count * threads)), "memory_nodes": tuple(range(nodes))}
    return Topology(cpus, **{**defaults, **settings})


def bind(topology, devices, core=AUTO, *, numa=False):
    names = [str(number) for number in range(devices)] if isinstance(devices, int) else devices
    return bind_workers(topology, names, target="gpu", core=core, numa=numa)


def cpus_of(binding):
    return [worker.cpus for worker in binding.workers]


def named(**lists):
    scheduler = lists.pop("scheduler", ())
    devices = {int(key.removeprefix("device")): cpus for key, cpus in lists.items()}
    return CoreBinding(is_auto=False, devices=devices, scheduler=scheduler)


# -- shares ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "workers", "shares"),
    [
        (machine(cores=4), 2, [(0, 1), (2, 3)]),
        (machine(cores=4, threads=2), 2, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (machine(cores=3, threads=2), 2, [(0, 3), (1, 2, 4, 5)]),
        (machine(nodes=2, cores=2, threads=2), 4, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (machine(cores=8, allowed=(1, 2, 5, 6)), 2, [(1, 2), (5, 6)]),
    ],
)
def test_cores_are_cut_into_even_neighbouring_pieces(topology, workers, shares):
    binding = bind(topology, workers)
    assert cpus_of(binding) == shares
    assert all("an even share of the" in worker.reason for worker in binding.workers)
    assert binding.notes == ()


def test_fewer_cores_than_workers_are_shared_in_turn_and_that_is_said():
    binding = bind(machine(cores=2, threads=2), 5)
    assert cpus_of(binding) == [(0, 2), (1, 3), (0, 2), (1, 3), (0, 2)]
    assert binding.notes == ("--bind_core: local ranks 0-4 get one core in turn: 2 cores for 5 workers",)


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), st.integers(1, 24), st.randoms(use_true_random=False))
def test_shares_are_whole_cores_fair_and_never_empty(nodes, cores, threads, workers, random):
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


def with_devices(nodes, **settings):
    return machine(nodes=2, cores=4, device_nodes={"gpu": nodes, "ascend": {"0": 1}}, **settings)


def test_workers_get_cores_of_the_node_of_their_device():
    binding = bind(with_devices({"0": 1, "1": 0, "2": 1, "3": 0}), 4)
    assert cpus_of(binding) == [(4, 5), (0, 1), (6, 7), (2, 3)]
    assert [worker.reason for worker in binding.workers][:2] == [
        "an even share near its device: NUMA node 1",
        "an even share near its device: NUMA node 0",
    ]


# -- --bind_numa ----------------------------------------------------------------------------------------------------


def test_numa_puts_blocks_of_workers_on_whole_nodes():
    binding = bind(machine(nodes=2, cores=2), 4, None, numa=True)
    assert cpus_of(binding) == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [worker.memory_nodes for worker in binding.workers] == [(0,), (0,), (1,), (1,)]
    assert binding.workers[3].reason == "all cores of NUMA node 1"
    assert binding.notes == ()


def test_one_node_changes_nothing_for_memory_and_that_is_said():
    binding = bind(machine(cores=2), 2, None, numa=True)
    assert [worker.memory_nodes for worker in binding.workers] == [(), ()]
    assert binding.notes == ("--bind_numa changes nothing for memory: NUMA node 0 is the only one with usable CPUs",)


def test_memory_that_may_not_be_used_is_left_alone_and_that_is_said():
    binding = bind(machine(nodes=2, cores=1, memory_nodes=(0,)), 2, None, numa=True)
    assert [worker.memory_nodes for worker in binding.workers] == [(0,), ()]
    assert binding.notes == ("--bind_numa: no memory of NUMA node 1 may be used; only CPUs are bound",)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), st.booleans())
def test_a_worker_never_leaves_its_node(nodes, cores, workers, is_split):
    topology = machine(nodes, cores, 2)
    node_of = {cpu.number: cpu.node for cpu in topology.cpus}
    binding = bind(topology, workers, AUTO if is_split else None, numa=True)
    homes = [{node_of[cpu] for cpu in worker.cpus} for worker in binding.workers]
    assert all(len(home) == 1 for home in homes)
    order = [home.pop() for home in homes]
    assert order == sorted(order)
    assert max(map(order.count, order)) - min(map(order.count, order)) <= 1


# -- the dict -------------------------------------------------------------------------------------------------------


def test_dict_binds_by_physical_device():
    core = named(device3=(0, 1), device1=(2,), scheduler=(3,))
    topology = machine(device_nodes={"gpu": {str(number): None for number in range(8)}})
    binding = bind(topology, ["1", "3"], core)
    assert cpus_of(binding) == [(2,), (0, 1)]
    assert (binding.scheduler_cpus, binding.notes) == ((3,), ())
    assert binding.workers[0].reason == "named by --bind_core for device 1"


def test_devices_without_a_list_stay_unbound_and_are_named():
    binding = bind(machine(), 4, named(device1=(0,), device2=()))
    assert cpus_of(binding) == [(), (0,), (), ()]
    assert binding.notes == ("--bind_core names no CPUs for device 0 (local rank 0), 3 (local rank 3): not bound",)
    assert binding.workers[2].reason == "not bound: device 2 has an empty list"


def test_dict_with_numa_binds_the_memory_of_the_named_cores():
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
def test_what_the_host_does_not_have_is_refused(core, pattern):
    with pytest.raises(UsageError, match=pattern):
        bind(machine(cores=4, allowed=(0, 1, 2)), 2, core)


SMT = Topology(tuple(Cpu(n, 0, 0, n % 4) for n in range(8)), tuple(range(8)))
"""Four cores of two threads."""


def on(*cpus):
    return WorkerBinding(cpus, (), "")


def limited(quota_cores):
    return Topology(SMT.cpus, SMT.allowed, quota_cores)


@pytest.mark.parametrize(
    ("topology", "workers", "threads"),
    [
        (SMT, [on()], (4,)),
        (SMT, [on(), on()], (2, 2)),
        (SMT, [on(0, 4, 1, 5, 2, 6), on(3, 7)], (3, 1)),
        (SMT, [on(0, 1, 2, 3), on(4, 5, 6, 7)], (2, 2)),  # two threads of the same cores
        (SMT, [on(0, 1), on()], (2, 2)),
        (flat_topology(range(6)), [on(*range(6))] * 3, (2, 2, 2)),  # six thirds, added up in floating point
        (limited(2.5), [on()], (2,)),
        (limited(2.5), [on(), on()], (1, 1)),
        (limited(3), [on(0, 4, 1, 5, 2, 6), on(3, 7)], (1, 1)),
    ],
)
def test_threads_are_the_cores_that_a_worker_has_for_itself(topology, workers, threads):
    assert threads_per_worker(topology, workers) == threads


def test_variables_that_let_openmp_bind_processes_are_found():
    env = {"OMP_PROC_BIND": "close", "OMP_PLACES": "", "KMP_AFFINITY": "disabled", "GOMP_CPU_AFFINITY": "0-3"}
    assert self_binding(env) == ["OMP_PROC_BIND", "GOMP_CPU_AFFINITY"]
    assert self_binding({"OMP_PROC_BIND": "FALSE"}) == []


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("nope", r"--bind_core nope: neither True, False nor a JSON object; give e\.g\. --bind_core='\{"),
        ('{"device0": ["0"]', r"neither True, False nor a JSON object"),
        ('{"device0": ["0"], "device0": ["1"]}', r"'device0' is there 2 times"),
        ('{"gpu0": ["0"]}', r"'gpu0' is no device; keys are device0, device1, \.\.\. and scheduler"),
        ('{"device-1": ["0"]}', r"'device-1' is no device"),
        ('{"device0": "0-3"}', r"'device0' has \"0-3\", which is no list; give a list of strings"),
        ('{"device0": [0]}', r"'device0' has 0, which is no string"),
        ('{"device0": [null]}', r"has null, which is no string"),
        ('{"device0": ["0", "3-1"]}', r"'device0': '3-1' runs backwards"),
        ('{"device0": ["0-3,8"]}', r"'0-3,8' is no CPU number or range"),
        ('{"device0": [""]}', r"'' is no CPU number or range"),
    ],
)
def test_wrong_words_are_refused_in_one_line(text, pattern):
    with pytest.raises(UsageError, match=pattern) as error:
        parse_bind_core(text)
    assert "\n" not in str(error.value)


@given(st.dictionaries(st.integers(0, 99), st.sets(st.integers(0, 200)), min_size=1))
def test_any_dict_survives_being_written_and_read(devices):
    text = json.dumps({f"device{number}": [str(cpu) for cpu in cpus] for number, cpus in devices.items()})
    binding = parse_bind_core(text)
    assert binding is not None
    assert binding.devices == {number: tuple(sorted(cpus)) for number, cpus in devices.items()}
