"""Which device each worker gets, and how many threads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.host import HostFacts, place_devices, threads_per_worker


def host(gpus: int = 0, npus: int = 0) -> HostFacts:
    return HostFacts("h", "127.0.0.1", (0, 1), tuple(map(str, range(gpus))), tuple(map(str, range(npus))))


@pytest.mark.parametrize(
    ("asked", "facts", "target", "reason"),
    [
        ("auto", host(), "cpu", "no accelerator on h"),
        ("auto", host(gpus=4), "gpu", "4 CUDA devices on h"),
        ("auto", host(npus=4), "ascend", "4 Ascend devices on h"),
        ("auto", host(gpus=4, npus=4), "ascend", "4 Ascend devices on h"),
        ("cpu", host(gpus=1), "cpu", "--device_target"),
        ("gpu", host(gpus=4), "gpu", "--device_target"),
    ],
)
def test_device_target_is_what_the_host_has(asked: str, facts: HostFacts, target: str, reason: str) -> None:
    placement = place_devices(asked, 4, facts)  # type: ignore[arg-type]
    assert (placement.target, placement.reason, placement.device_ids) == (target, reason, (0, 1, 2, 3))


@pytest.mark.parametrize(("asked", "facts"), [("auto", host(gpus=3)), ("gpu", host()), ("ascend", host(npus=1))])
def test_more_workers_than_devices_are_refused(asked: str, facts: HostFacts) -> None:
    with pytest.raises(UsageError, match=r"4 workers but . .* devices visible on h: .*--device_target cpu"):
        place_devices(asked, 4, facts)  # type: ignore[arg-type]


@given(st.integers(1, 300), st.integers(1, 300))
def test_threads_share_the_processors_and_are_never_none(workers: int, cpus: int) -> None:
    threads = threads_per_worker(workers, range(cpus))
    assert threads >= 1
    assert threads == 1 or threads * workers <= cpus
