"""What a host is asked before anything starts, without writing anything."""

from __future__ import annotations

import importlib.machinery
import os
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msrun.cluster.protocol import Finding
from msrun.errors import ClusterError, MsrunError, UsageError
from msrun.launch.preflight import checks as preflight
from msrun.launch.preflight.checks import CHECKS, GIB, MIB, check_host, check_port, inspect_host
from msrun.launch.preflight.finding import exit_code_of_findings, render_finding
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.program import Program, ProgramKind
from msrun.planning.spec import LaunchSpec


def spec_for(
    folder: Path, *, log_dir: Path | None = None, kind: ProgramKind = "script", target: str = "x.py"
) -> LaunchSpec:
    return LaunchSpec(
        program=Program(kind, target),
        worker_num=1,
        local_worker_num=1,
        working_directory=folder,
        log_dir=log_dir or folder / "logs",
    )


@pytest.mark.parametrize("name", ["logs", "logs/of/today", "."])
def test_log_directory_that_can_be_made_is_taken_and_not_made(tmp_path: Path, name: str) -> None:
    check_host(spec_for(tmp_path, log_dir=tmp_path / name))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/logs", "file/logs/today"])
def test_log_directory_below_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--log_dir .*file is a file; give a directory"):
        check_host(spec_for(tmp_path, log_dir=tmp_path / name))


def test_log_directory_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(UsageError, match="no permission to write"):
        check_host(spec_for(tmp_path))


def test_log_directory_on_a_file_system_that_cannot_be_written_is_no_lack_of_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(UsageError, match=f"{tmp_path} is on a read-only file system; give a directory that you may"):
        check_host(spec_for(tmp_path))


@pytest.mark.parametrize(
    "target", ["json.tool", "sys", "zipimport", "pytest", "msrun", "local_package.job", "local_file"]
)
def test_module_that_exists_is_taken_without_importing_it(tmp_path: Path, target: str) -> None:
    (tmp_path / "local_package").mkdir()
    (tmp_path / "local_package" / "job.py").touch()
    (tmp_path / "local_file.py").write_text("raise SystemExit('imported')")
    check_host(spec_for(tmp_path, kind="module", target=target))


@pytest.mark.parametrize("target", ["no_such_module_here", "no_such_module_here.job", "__main__"])
def test_module_that_does_not_exist_is_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(UsageError, match=f"-m {target}: no module"):
        check_host(spec_for(tmp_path, kind="module", target=target))


def test_module_that_an_import_hook_provides_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an editable installation does."""

    class Hook:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            return importlib.machinery.ModuleSpec(name, None) if name == "editable_package" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook])
    check_host(spec_for(tmp_path, kind="module", target="editable_package.train"))


def finding_of(name: str, spec: LaunchSpec, caller: dict[str, str] | None = None) -> Finding:
    return next(finding for finding in inspect_host(spec, caller or {}) if finding.name == name)


FAKES: list[tuple[str, dict[str, Any], str, str, type[MsrunError] | None]] = [
    # (check, what the host says, status, text, error of a run)
    ("disk", {"free_disk_bytes": lambda _: 2 * GIB}, "ok", "2.0 GiB free for logs in ", None),
    ("disk", {"free_disk_bytes": lambda _: GIB - 1}, "warn", "1023 MiB free for logs in ", None),
    ("disk", {"free_disk_bytes": lambda _: MIB - 1}, "fail", "the disk is full; make room", UsageError),
    ("disk", {"free_disk_bytes": lambda _: None}, "ok", "does not count free space", None),
    ("shared_memory", {"free_disk_bytes": lambda _: 64 * MIB}, "warn", "64 MiB free in /dev/shm", None),
    ("shared_memory", {"free_disk_bytes": lambda _: GIB}, "ok", "1.0 GiB free in /dev/shm", None),
    ("memory", {"free_memory_bytes": lambda: 800 * MIB}, "ok", "800 MiB free, 200 MiB for each of 4 workers", None),
    ("memory", {"free_memory_bytes": lambda: 799 * MIB}, "warn", "199 MiB for each of 4 workers: torch alone", None),
    ("memory", {"free_memory_bytes": lambda: None}, "warn", "free memory is not known", None),
    ("open_files", {"open_file_limits": lambda: (1024, 4096)}, "ok", "1024 open files allowed", None),
    ("open_files", {"open_file_limits": lambda: (63, 4096)}, "warn", "ulimit -n 64 leaves the workers more room", None),
    ("open_files", {"open_file_limits": lambda: (8, 36)}, "warn", "8 open files allowed for each process;", None),
    ("open_files", {"open_file_limits": lambda: (8, 35)}, "fail", "4 workers need 36; raise the hard", ClusterError),
    ("processes", {"free_processes": lambda: None}, "ok", "no limit", None),
    ("processes", {"free_processes": lambda: 100}, "ok", "100 more processes and threads allowed", None),
    ("processes", {"free_processes": lambda: 18}, "warn", "workers that start threads need more", None),
    ("processes", {"free_processes": lambda: 6}, "fail", "4 workers need 7 at least; raise ulimit -u", ClusterError),
]


def test_launcher_has_room_for_a_connection_to_each_host_and_the_logs_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = tuple(HostEntry(f"h{node}", 8, tuple(range(8))) for node in range(100))
    spec = replace(spec_for(tmp_path), worker_num=800, local_worker_num=0, host_entries=entries)
    monkeypatch.setattr(preflight, "open_file_limits", lambda: (64, 1232))
    check_host(spec)
    monkeypatch.setattr(preflight, "open_file_limits", lambda: (64, 1231))
    with pytest.raises(ClusterError, match=r"1231 open files .*, 100 hosts with 800 workers need 1232; raise the hard"):
        check_host(spec)


@pytest.mark.parametrize(("name", "fakes", "status", "text", "error"), FAKES)
def test_room_of_the_host_is_judged_and_a_run_is_refused_only_where_it_must_fail(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fakes: dict[str, Any],
    status: str,
    text: str,
    error: type[MsrunError] | None,
) -> None:
    for function, answer in fakes.items():
        monkeypatch.setattr(preflight, function, answer)
    spec = replace(spec_for(tmp_path), worker_num=4, local_worker_num=4)
    found = finding_of(name, spec)
    assert found.status == status and text in found.text
    assert found.exit_code == (error.exit_code if error else 0)
    if error is None:
        check_host(spec)
    else:
        with pytest.raises(error):
            check_host(spec)


def test_port_in_use_names_its_owner(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError) as caught:
            check_port(port)
        found = finding_of("master_port", replace(spec_for(tmp_path), master_port=port))
    expected = f"--master_port {port}: cannot listen on 127.0.0.1:{port} (Address already in use), taken by pid "
    assert str(caught.value).startswith(f"{expected}{os.getpid()} (")
    assert str(caught.value).endswith("; leave it out to take a free port")
    assert (found.status, found.text, found.exit_code) == ("fail", str(caught.value), 2)
    check_port(port)
    assert finding_of("master_port", replace(spec_for(tmp_path), master_port=port)).status == "ok"


def test_port_whose_owner_is_not_visible_is_refused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrun.launch.preflight.checks.describe_port_owner", lambda _: "")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match=r"in use\); leave it out"):
        check_port(taken.getsockname()[1])


def test_dry_run_asks_for_no_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = replace(spec_for(tmp_path), master_port=taken.getsockname()[1])
        check_host(spec, is_dry_run=True)
        with pytest.raises(UsageError):
            check_host(spec)


def test_too_many_workers_for_the_devices_are_named(tmp_path: Path) -> None:
    spec = replace(spec_for(tmp_path), worker_num=4096, local_worker_num=4096, device_target="gpu")
    found = finding_of("devices", spec)
    assert (found.status, found.exit_code) == ("fail", 2)
    assert "4096 workers but " in found.text


def test_temporary_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = finding_of("temporary", spec_for(tmp_path), {"TMPDIR": "/no/such/folder"})
    assert found.status == "warn" and "TMPDIR=/no/such/folder cannot be written" in found.text

    def none_is_left() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_is_left)
    assert finding_of("temporary", spec_for(tmp_path)).exit_code == 3
    with pytest.raises(ClusterError, match="set TMPDIR to one that can"):
        check_host(spec_for(tmp_path))


def test_shared_memory_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/dev/shm" and access(path, mode))
    assert finding_of("shared_memory", spec_for(tmp_path)).status == "warn"


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.13.0+cpu", "ok"),
        ("2.12.1", "ok"),
        ("2.11.1", "warn"),
        ("2.14.0a0", "ok"),
        ("2.16.0a0", "warn"),
        ("1.13.1", "warn"),
        ("?", "ok"),
    ],
)
def test_version_of_torch_is_read_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, status: str
) -> None:
    monkeypatch.setattr(preflight, "installed_version", lambda _: version)
    found = finding_of("torch", spec_for(tmp_path))
    assert (found.status, found.text.startswith(version)) == (status, True)


def test_missing_torch_is_a_warning_for_those_who_need_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "installed_version", lambda _: "")
    assert finding_of("torch", spec_for(tmp_path)).status == "warn"


def test_all_checks_say_something_and_make_nothing(tmp_path: Path) -> None:
    findings = inspect_host(spec_for(tmp_path, log_dir=tmp_path / "a" / "b"), {})
    assert [finding.name for finding in findings] == [check.name for check in CHECKS]
    assert all(finding.text and "\n" not in finding.text for finding in findings)
    assert list(tmp_path.iterdir()) == []


def test_what_the_user_has_to_change_comes_before_the_host() -> None:
    findings = [Finding("ok", "a", "x"), Finding("warn", "b", "x")]
    assert exit_code_of_findings(findings) == 0
    findings.append(Finding("fail", "c", "x", 3))
    assert exit_code_of_findings(findings) == 3
    findings.append(Finding("fail", "d", "x", 2))
    assert exit_code_of_findings(findings) == 2


def test_a_finding_is_one_line() -> None:
    assert render_finding(Finding("ok", "disk", "a\nb\rc")) == "ok    disk           a\\nb\\rc"
