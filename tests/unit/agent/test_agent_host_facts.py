"""What the planner is told of this host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from msrun.agent import host_facts


@pytest.mark.parametrize(
    ("preset", "present", "seen"),
    [
        (None, ("0", "1"), ("0", "1")),
        ("", ("0", "1"), ()),
        ("-1", ("0", "1"), ()),
        ("1", ("0", "1"), ("1",)),
        ("1, 0", ("0", "1"), ("1", "0")),
        ("GPU-8a,GPU-9b", ("0", "1"), ("GPU-8a", "GPU-9b")),
        ("0,1", (), ()),
        (None, (), ()),
    ],
)
def test_visible_devices_are_those_present_and_named(
    monkeypatch: pytest.MonkeyPatch, preset: str | None, present: tuple[str, ...], seen: tuple[str, ...]
) -> None:
    monkeypatch.setattr(host_facts, "_device_files", lambda stem: present)
    environ = {} if preset is None else {"CUDA_VISIBLE_DEVICES": preset, "ASCEND_RT_VISIBLE_DEVICES": preset}
    facts = host_facts.read_host_facts(environ)
    assert (facts.gpus, facts.npus) == (seen, seen)


def test_host_is_this_one() -> None:
    facts = host_facts.read_host_facts({})
    assert (facts.name, facts.address) == (socket.gethostname(), "127.0.0.1")
    assert set(facts.cpus) == os.sched_getaffinity(0)


def test_device_files_are_counted_by_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "davinci0", "davinci_manager"):
        (tmp_path / name).touch()
    monkeypatch.setattr(host_facts, "Path", lambda _: tmp_path)
    assert host_facts._device_files("nvidia") == ("2", "10")
    assert host_facts._device_files("davinci") == ("0",)
