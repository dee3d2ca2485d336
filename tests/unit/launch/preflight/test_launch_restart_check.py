"""What keeps a host from starting a job again: its disk, its folders, its devices, processes that do not end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from msrun.errors import ClusterError, MsrunError
from msrun.launch.preflight import checks
from msrun.launch.preflight.checks import check_restart
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec


@pytest.fixture
def spec(tmp_path: Path) -> LaunchSpec:
    (tmp_path / "logs").mkdir()
    (tmp_path / "shared").mkdir()
    return LaunchSpec(
        program=Program("script", "/train.py"),
        worker_num=2,
        local_worker_num=2,
        working_directory=tmp_path,
        log_dir=tmp_path / "logs",
        worker_log_dir=tmp_path / "shared",
        device_target="cpu",
    )


def test_host_that_is_well_starts_again(spec: LaunchSpec) -> None:
    check_restart(spec, {}, [])


@pytest.mark.parametrize("folder", ["logs", "shared"])
def test_full_disk_of_any_logs_is_named(spec: LaunchSpec, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free = lambda path: 0 if path.name == folder else 1 << 30  # noqa: E731
    monkeypatch.setattr(checks, "free_disk_bytes", free)
    with pytest.raises(ClusterError, match=rf"the disk of .*/{folder}, where logs are written, is full; make room"):
        check_restart(spec, {}, [])


def test_folder_that_has_gone_is_named(spec: LaunchSpec) -> None:
    spec.log_dir.rmdir()
    with pytest.raises(ClusterError, match=r"/logs: No such file or directory; logs are written there"):
        check_restart(spec, {}, [])


def test_processes_that_do_not_end_are_named(spec: LaunchSpec) -> None:
    with pytest.raises(ClusterError, match=r"processes \[7, 9\] could not be ended"):
        check_restart(spec, {}, {9, 7})


def test_device_that_has_gone_is_named(spec: LaunchSpec) -> None:
    with pytest.raises(MsrunError, match="gpu"):
        check_restart(replace(spec, device_target="gpu"), {"CUDA_VISIBLE_DEVICES": ""}, [])
