"""Which device each worker gets."""

from __future__ import annotations

import pytest

from msrun.errors import UsageError
from msrun.planning.placement.host import HostFacts, place_devices


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


def test_a_worker_gets_the_visible_device_at_its_place() -> None:
    facts = HostFacts("h", "127.0.0.1", (0,), gpus=("3", "1", "GPU-8a"))
    placement = place_devices("gpu", 2, facts)
    assert (placement.device_ids, placement.physical) == ((0, 1), ("3", "1"))


def test_the_variable_that_hides_devices_is_named() -> None:
    facts = HostFacts("h", "127.0.0.1", (0,), gpus=("0",), gpus_reason="CUDA_VISIBLE_DEVICES=0,9: '9' is none")
    pattern = r"2 workers but 1 gpu devices visible on h \(CUDA_VISIBLE_DEVICES=0,9: '9' is none\): start fewer"
    with pytest.raises(UsageError, match=pattern):
        place_devices("auto", 2, facts)
    assert place_devices("auto", 1, facts).notes == ("CUDA_VISIBLE_DEVICES=0,9: '9' is none",)


def test_hidden_accelerators_are_said_not_to_be_used_unless_cpu_was_asked_for() -> None:
    facts = HostFacts("h", "127.0.0.1", (0,), gpus_reason="CUDA_VISIBLE_DEVICES is empty")
    placement = place_devices("auto", 1, facts)
    assert (placement.target, placement.reason) == ("cpu", "no accelerator visible on h")
    assert placement.notes == ("CUDA_VISIBLE_DEVICES is empty",)
    assert place_devices("cpu", 1, facts).notes == ()


def test_topology_is_flat_when_only_processors_are_known() -> None:
    assert host().known_topology().allowed == (0, 1)
