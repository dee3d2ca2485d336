"""Which device each worker gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.placement.host import (
    Cpu,
    Device,
    HostFacts,
    Topology,
    parse_cpu_list,
    place_devices,
    visible_ascend,
    visible_cuda,
)
from msrun.planning.spec import parse_cpu_range
from ranktable.hosts.ranges import fold_numbers


def host(gpus=0, npus=0):
    return HostFacts("h", "127.0.0.1", (0, 1), tuple(map(str, range(gpus))), tuple(map(str, range(npus))))


@pytest.mark.parametrize(
    ("asked", "facts", "target", "reason"),
    [
        ("auto", host(), "cpu", "no accelerator on h"),
        ("auto", host(npus=4), "ascend", "4 Ascend devices on h"),
        ("auto", host(gpus=4, npus=4), "ascend", "4 Ascend devices on h"),
        ("cpu", host(gpus=1), "cpu", "--device_target"),
    ],
)
def test_device_target_is_what_the_host_has(asked, facts, target, reason):
    placement = place_devices(asked, 4, facts)
    assert (placement.target, placement.reason, placement.device_ids) == (target, reason, (0, 1, 2, 3))


@pytest.mark.parametrize(("asked", "facts"), [("auto", host(gpus=3)), ("gpu", host()), ("ascend", host(npus=1))])
def test_more_workers_than_devices_are_refused(asked, facts):
    with pytest.raises(UsageError, match=r"4 workers but . .* devices visible on h: .*--device_target cpu"):
        place_devices(asked, 4, facts)


def test_the_variable_that_hides_devices_is_named():
    facts = HostFacts("h", "127.0.0.1", (0,), gpus=("0",), gpus_reason="CUDA_VISIBLE_DEVICES=0,9: '9' is none")
    pattern = r"2 workers but 1 gpu devices visible on h \(CUDA_VISIBLE_DEVICES=0,9: '9' is none\): start fewer"
    with pytest.raises(UsageError, match=pattern):
        place_devices("auto", 2, facts)
    assert place_devices("auto", 1, facts).notes == ("CUDA_VISIBLE_DEVICES=0,9: '9' is none",)


def test_hidden_accelerators_are_said_not_to_be_used_unless_cpu_was_asked_for():
    facts = HostFacts("h", "127.0.0.1", (0,), gpus_reason="CUDA_VISIBLE_DEVICES is empty")
    placement = place_devices("auto", 1, facts)
    assert (placement.target, placement.reason) == ("cpu", "no accelerator visible on h")
    assert placement.notes == ("CUDA_VISIBLE_DEVICES is empty",)
    assert place_devices("cpu", 1, facts).notes == ()


UUIDS = ("GPU-8932f937-d72c", "GPU-8931aaaa-0000", "GPU-77777777-1111")
GPUS = tuple(Device(str(number), uuid) for number, uuid in enumerate(UUIDS))
NPUS = tuple(Device(str(number)) for number in (4, 5, 6, 7))
"""Half of a host, as in a container: logical number 0 is the host's 4."""


CUDA_RULES = [
    (None, ("0", "1", "2"), ""),
    (" 2 , +1", ("2", "1"), ""),
    ("1gpu,2x", ("1", "2"), ""),  # read as strtoul does
    ("", (), "CUDA_VISIBLE_DEVICES is empty"),
    ("0,2,-1,1", ("0", "2"), "'-1' is none"),
    ("0,9,1", ("0",), "CUDA_VISIBLE_DEVICES=0,9,1: '9' is none of the host's 3 devices or not allowed there, and "),
    ("NoDevFiles", (), "'NoDevFiles' is none"),
    ("0,1,0", (), "0 is named twice, and CUDA then shows no device"),
    ("GPU-8932,GPU-777", ("0", "2"), ""),
    ("GPU-8932F937", ("0",), ""),
    ("GPU-893", (), "'GPU-893' is none"),  # two GPUs begin so
    ("GPU-777,GPU-abc,GPU-8932", ("2",), "'GPU-abc' is none"),
    ("GPU-777,1", ("2",), "'1' is none"),
    ("MIG-1f,MIG-2e", ("MIG-1f",), "CUDA shows a process one MIG device only"),
    ("MIG-GPU-8932/1/0", ("MIG-GPU-8932/1/0",), ""),
]
ASCEND_RULES = [
    (None, ("4", "5", "6", "7"), ""),
    ("3,1", ("7", "5"), ""),
    ("", (), "ASCEND_RT_VISIBLE_DEVICES is empty"),
    ("0, 1,2", ("4",), "' 1' is none"),
    ("1,2,-1,3", ("5", "6"), "'-1' is none"),
    ("1,1", ("5",), "'1' is none of the host's 4 devices or not allowed there"),
]


@pytest.mark.parametrize(
    ("visible", "names", "why"),
    [
        *((visible_cuda(preset, GPUS), *expected) for preset, *expected in CUDA_RULES),
        *((visible_ascend(preset, NPUS), *expected) for preset, *expected in ASCEND_RULES),
    ],
)
def test_variable_shows_what_the_vendors_rules_say(visible, names, why):
    assert visible.names == names
    assert why in visible.reason and bool(why) == bool(visible.reason)


@given(st.text(alphabet="0123456789,- GPUMIGxa", max_size=20))
def test_no_value_shows_a_device_twice_or_one_that_is_not_there(preset):
    for visible, present in ((visible_cuda(preset, GPUS), GPUS), (visible_ascend(preset, NPUS), NPUS)):
        numbers = [name for name in visible.names if name.isdigit()]
        assert len(set(visible.names)) == len(visible.names)
        assert set(numbers) <= {device.number for device in present}


@pytest.mark.parametrize(
    ("text", "numbers"), [("", ()), ("\n", ()), ("0-3,8\n", (0, 1, 2, 3, 8)), (" 4 , 6-7 ", (4, 6, 7))]
)
def test_cpu_lists_are_read_as_the_kernel_writes_them(text, numbers):
    assert parse_cpu_list(text) == numbers


@pytest.mark.parametrize("text", ["x", "1-", "-1", "3-1", "1--2", "0x1", "1.5", "999999999", "0-65537", "²", "1 2"])
def test_what_is_no_cpu_range_is_refused(text):
    with pytest.raises(ValueError, match=r"CPU number|backwards"):
        parse_cpu_range(text)


@given(st.sets(st.integers(0, 300)))
def test_any_set_survives_being_written_and_read(numbers):
    assert set(parse_cpu_list(fold_numbers(numbers, ","))) == numbers


def test_cores_hold_their_allowed_threads_with_neighbours_together():
    # Two packages numbered in turn, threads 4-7 on the cores of 0-3: as many servers number them.
    cpus = tuple(Cpu(n, n % 2, n % 2, n % 4) for n in range(8))
    topology = Topology(cpus, allowed=(0, 1, 2, 3, 4, 7))
    assert [[cpu.number for cpu in core] for core in topology.cores()] == [[0, 4], [2], [1], [3, 7]]
    assert topology.nodes() == (0, 1)
    assert Topology(cpus, allowed=(1, 3)).nodes() == (1,)
