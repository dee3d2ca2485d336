"""The world: joining, what a machine must have, and the backend of shared memory."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from job_runner import REPOSITORY

from msrun import contract
from msrun.errors import WorldError
from msrun.runtime import requirements
from msrun.runtime.joining import devices
from msrun.runtime.joining.spec import WorldSpec
from msrun.runtime.requirements import describe_untested, warn_if_untested
from msrun.runtime.shm.registration import register


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
    [
        ("shm", "cpu"),
        ("gloo", "cpu"),
        ("nccl", "cuda"),
        ("hccl", "npu"),
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("cuda:gloo,cpu:gloo", "cuda"),
        ("cpu:gloo,npu:hccl", "npu"),
    ],
)
def test_device_of_a_rank_is_that_of_its_backend(backend: str, kind: str) -> None:
    assert devices.kind_of(backend) == kind


def test_device_of_a_group_that_the_script_made_is_the_one_that_it_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(current_device=lambda: 2))
    monkeypatch.setattr(devices.dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert devices.device_of_group() == torch.device("cuda", 2)
    monkeypatch.setattr(devices.dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    assert devices.device_of_group() == torch.device("cpu")


def test_rank_makes_its_device_the_current_one_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    of_cuda = SimpleNamespace(device_count=lambda: 4, set_device=chosen.append)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: of_cuda if kind == "cuda" else None)
    place = WorldSpec("msrun", 5, 8, 1, 4, "")
    assert devices.use_device(place, "gloo") == torch.device("cpu")
    assert devices.use_device(place, "cpu:gloo,cuda:gloo") == torch.device("cuda", 1)
    monkeypatch.setenv("DEVICE_ID", "3")
    devices.use_device(place, "nccl")
    assert chosen == [1, 3]
    monkeypatch.setenv("DEVICE_ID", "4")
    with pytest.raises(WorldError, match="rank 5 is to use cuda device 4, and this host has 4: start at most one"):
        devices.use_device(place, "nccl")


@pytest.mark.parametrize(
    ("target", "has_cuda", "chosen"),
    [("cpu", True, "gloo"), ("gpu", True, "cpu:gloo,cuda:nccl"), ("", True, "cpu:gloo,cuda:nccl"), ("", False, "gloo")],
)
def test_backend_follows_the_device_of_the_job(
    target: str, has_cuda: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert devices.choose_backend({"MSRUN_DEVICE_TARGET": target}, 1) == chosen


@pytest.mark.slow
def test_ascend_without_torch_npu_is_one_line_with_the_remedy() -> None:
    program = "from msrun.runtime import init\ninit()\n"
    done = run_python(program, {"RANK": "0", "WORLD_SIZE": "2", "MSRUN_DEVICE_TARGET": "ascend"})
    assert done.returncode == WorldError.exit_code
    last = done.stderr.splitlines()[-1]
    assert "--device_target ascend needs torch_npu, and it cannot be imported (No module named 'torch_npu')" in last
    assert last.endswith("or give --device_target cpu")


def test_shm_beside_another_device_is_refused_before_anybody_joins() -> None:
    with pytest.raises(WorldError, match="shm carries tensors of the CPU alone; give cpu:gloo beside other devices"):
        devices.check_backend("cpu:shm,cuda:nccl")
    devices.check_backend("shm")


@pytest.mark.parametrize("version", [*contract.TORCH_VERSIONS, "2.15.0+cpu", "2.12.1", "a build of mine", ""])
def test_tested_version_gives_no_warning(version: str) -> None:
    assert describe_untested(version) == ""


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cu130", "3.0", "1.13"])
def test_other_version_is_named_with_the_tested_ones(version: str) -> None:
    assert describe_untested(version) == f"torch {version} is not tested with msrun.runtime; tested are 2.12 to 2.15"


@pytest.fixture
def new_torch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(requirements, "_has_warned", False)
    monkeypatch.setattr(requirements, "_torch_version", lambda: "2.99.0")
    return monkeypatch


def test_warning_comes_once(new_torch: pytest.MonkeyPatch) -> None:
    with pytest.warns(RuntimeWarning, match="torch 2.99.0 is not tested"):
        warn_if_untested()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested()


@pytest.mark.parametrize("who", [{"MSRUN_JOB_ID": "fork server"}, {"MSRUN_JOB_ID": "j", "RANK": "3"}, {"RANK": "1"}])
def test_fork_server_and_other_ranks_say_nothing(new_torch: pytest.MonkeyPatch, who: dict[str, str]) -> None:
    for name, value in who.items():
        new_torch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested()
    new_torch.setenv("RANK", "0")
    with pytest.warns(RuntimeWarning, match="is not tested"):
        warn_if_untested()


def test_version_is_that_of_the_installed_torch() -> None:
    assert requirements._torch_version() == importlib.metadata.version("torch")


WITHOUT_TORCH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
"""


def run_without_torch(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + program],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_missing_torch_is_one_line_with_the_remedy() -> None:
    done = run_without_torch("from msrun.runtime import init")
    assert done.returncode == 1
    assert done.stderr == (
        f"MissingPackageError: msrun.runtime needs torch, not installed for {sys.executable}; "
        "run: pip install 'msrun[runtime]'\n"
    )


def test_missing_torch_can_be_caught_as_an_import_error_and_other_errors_look_as_ever() -> None:
    done = run_without_torch("try:\n    import msrun.runtime\nexcept ImportError:\n    1 / 0")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_torch_does_not_hook_its_recorder_into_groups_of_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = {"gloo"}
    monkeypatch.setattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", recording, raising=False)
    register()
    assert recording == {"gloo", "shm"}
    assert dist.Backend.backend_capability["shm"] == ["cpu"]
