"""A process joins its world, alone or not; tests/unit/runtime/joining has the ways to find it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from job_runner import REPOSITORY

from msrun.errors import WorldError
from msrun.runtime import world
from msrun.runtime.joining.spec import WorldSpec


def run_python(program: str, environ: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(REPOSITORY), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_process_alone_opens_nothing_and_has_rank_0() -> None:
    program = (
        "import torch.distributed as dist\n"
        "from msrun.errors import WorldError\n"
        "from msrun.runtime import *\n"
        "from msrun.runtime import init\n"
        "assert not is_initialized()\n"
        "init()\n"
        "assert is_initialized() and not dist.is_initialized()\n"
        "assert (get_rank(), get_group_size(), get_local_rank(), get_local_rank_size()) == (0, 1, 0, 1)\n"
        "try:\n    init()\nexcept WorldError as error:\n    assert 'release() first' in str(error)\n"
        "else:\n    assert False\n"
        "release(); release()\n"
        "assert not is_initialized()\n"
        "init(); release()\n"
    )
    done = run_python(program)
    assert done.returncode == 0, done.stderr


def test_world_that_nobody_else_joins_is_an_error_within_the_time_limit() -> None:
    program = (
        "from msrun.errors import WorldError\n"
        "from msrun.runtime import init\n"
        "try:\n    init(timeout_s=1)\nexcept WorldError as error:\n    print(error)\n"
    )
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = run_python(program, environ)
    assert "rank 1 of 2 could not join at env:// with shm" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("shm", "cpu"), ("gloo", "cpu"), ("nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda")],
)
def test_device_of_a_rank_is_that_of_its_backend(backend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(world.dist, "get_backend", lambda: backend)
    monkeypatch.setenv("DEVICE_ID", "3")
    assert world.device() == torch.device(kind, *([3] if kind != "cpu" else []))


def test_rank_makes_its_device_the_current_one_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    devices = SimpleNamespace(device_count=lambda: 4, set_device=chosen.append)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: devices if kind == "cuda" else None)
    place = WorldSpec("msrun", 5, 8, 1, 4, "")
    world._set_device(place, "gloo")
    assert chosen == []
    world._set_device(place, "cpu:gloo,cuda:nccl")
    monkeypatch.setenv("DEVICE_ID", "3")
    world._set_device(place, "nccl")
    assert chosen == [1, 3]
    monkeypatch.setenv("DEVICE_ID", "4")
    with pytest.raises(WorldError, match="rank 5 is to use cuda device 4, and this host has 4: start at most one"):
        world._set_device(place, "nccl")
