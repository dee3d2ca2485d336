"""CUDA_VISIBLE_DEVICES and ASCEND_RT_VISIBLE_DEVICES by the vendors' rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.planning.placement.host import Device, visible_ascend, visible_cuda

UUIDS = ("GPU-8932f937-d72c", "GPU-8931aaaa-0000", "GPU-77777777-1111")
GPUS = tuple(Device(str(number), uuid) for number, uuid in enumerate(UUIDS))
NAMELESS = tuple(Device(str(number)) for number in range(3))
NPUS = tuple(Device(str(number)) for number in (4, 5, 6, 7))
"""Half of a host, as in a container: logical number 0 is the host's 4."""


@pytest.mark.parametrize(
    ("preset", "names", "why"),
    [
        (None, ("0", "1", "2"), ""),
        ("0,1,2", ("0", "1", "2"), ""),
        ("2,1", ("2", "1"), ""),
        (" 2 , +1", ("2", "1"), ""),
        ("1gpu,2x", ("1", "2"), ""),  # read as strtoul does
        ("", (), "CUDA_VISIBLE_DEVICES is empty"),
        ("-1", (), "'-1' is none of the host's 3 devices"),
        ("0,2,-1,1", ("0", "2"), "'-1' is none"),
        ("0,9,1", ("0",), "CUDA_VISIBLE_DEVICES=0,9,1: '9' is none of the host's 3 devices or not allowed there, and "),
        ("0,,1", ("0",), "'' is none"),
        ("none", (), "'none' is none"),
        ("NoDevFiles", (), "'NoDevFiles' is none"),
        ("0,1,0", (), "0 is named twice, and CUDA then shows no device"),
        ("GPU-8932,GPU-777", ("0", "2"), ""),
        ("gpu-8932", (), "'gpu-8932' is none"),
        ("GPU-8932F937", ("0",), ""),
        ("GPU-893", (), "'GPU-893' is none"),  # two GPUs begin so
        ("GPU-777,GPU-abc,GPU-8932", ("2",), "'GPU-abc' is none"),
        ("GPU-777,GPU-7777", (), "GPU-7777 is named twice"),
        ("GPU-777,1", ("2",), "'1' is none"),
        ("1,GPU-777", ("1",), "'GPU-777' is none"),
        ("MIG-1f", ("MIG-1f",), ""),
        ("MIG-1f,MIG-2e", ("MIG-1f",), "CUDA shows a process one MIG device only"),
        ("MIG-1f,MIG-1f", (), "is named twice"),
        ("MIG-GPU-8932/1/0", ("MIG-GPU-8932/1/0",), ""),
    ],
)
def test_cuda_rules(preset: str | None, names: tuple[str, ...], why: str) -> None:
    visible = visible_cuda(preset, GPUS)
    assert visible.names == names
    assert why in visible.reason
    assert bool(why) == bool(visible.reason)


def test_uuids_that_cannot_be_looked_up_are_believed() -> None:
    assert visible_cuda("GPU-8a,GPU-9b", NAMELESS).names == ("GPU-8a", "GPU-9b")


@pytest.mark.parametrize("preset", [None, "", "0,1", "GPU-1", "MIG-1"])
def test_without_devices_there_is_nothing_to_say(preset: str | None) -> None:
    assert visible_cuda(preset, ()) == visible_ascend(preset, ())
    assert visible_cuda(preset, ()).names == ()
    assert visible_cuda(preset, ()).reason == ""


@pytest.mark.parametrize(
    ("preset", "names", "why"),
    [
        (None, ("4", "5", "6", "7"), ""),
        ("1,3", ("5", "7"), ""),
        ("3,1", ("7", "5"), ""),
        ("", (), "ASCEND_RT_VISIBLE_DEVICES is empty"),
        ("0, 1,2", ("4",), "' 1' is none"),
        ("1,3,8", ("5", "7"), "'8' is none"),
        ("1,2,-1,3", ("5", "6"), "'-1' is none"),
        ("1,1", ("5",), "'1' is none of the host's 4 devices or not allowed there"),
        ("1x", (), "'1x' is none"),
    ],
)
def test_ascend_rules(preset: str | None, names: tuple[str, ...], why: str) -> None:
    visible = visible_ascend(preset, NPUS)
    assert visible.names == names
    assert why in visible.reason
    assert bool(why) == bool(visible.reason)


@given(st.text(alphabet="0123456789,- GPUMIGxa", max_size=20))
def test_no_value_shows_a_device_twice_or_one_that_is_not_there(preset: str) -> None:
    for visible, present in ((visible_cuda(preset, GPUS), GPUS), (visible_ascend(preset, NPUS), NPUS)):
        numbers = [name for name in visible.names if name.isdigit()]
        assert len(set(visible.names)) == len(visible.names)
        assert set(numbers) <= {device.number for device in present}
