"""What a host is asked before anything starts, without writing anything."""

import importlib.machinery
import os
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from plans import small_spec

from msrun.errors import ClusterError, MsrunError, UsageError
from msrun.launch.preflight import checks
from msrun.launch.preflight import checks as preflight
from msrun.launch.preflight.checks import GIB, MIB, check_host, check_port, check_restart, inspect_host
from msrun.planning.hosts import HostEntry
from msrun.planning.program import Program


def spec_for(folder, *, log_dir=None, kind="script", **changes):
    target = changes.pop("target", "x.py")
    return small_spec(folder, log_dir=log_dir or folder / "logs", program=Program(kind, target), **changes)


@pytest.mark.parametrize("name", ["logs", "logs/of/today", "."])
def test_log_directory_that_can_be_made_is_taken_and_not_made(tmp_path, name):
    check_host(spec_for(tmp_path, log_dir=tmp_path / name))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/logs", "file/logs/today"])
def test_log_directory_below_a_file_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--log_dir .*file is a file; give a directory"):
        check_host(spec_for(tmp_path, log_dir=tmp_path / name))


@pytest.mark.parametrize(
    ("flags", "text"),
    [(0, "no permission to write"), (os.ST_RDONLY, "is on a read-only file system; give a directory that you may")],
)
def test_log_directory_that_may_not_be_written_is_refused(tmp_path, monkeypatch, flags, text):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    with pytest.raises(UsageError, match=text):
        check_host(spec_for(tmp_path))


@pytest.mark.parametrize(
    "target", ["json.tool", "sys", "zipimport", "pytest", "msrun", "local_package.job", "local_file"]
)
def test_module_that_exists_is_taken_without_importing_it(tmp_path, target):
    (tmp_path / "local_package").mkdir()
    (tmp_path / "local_package" / "job.py").touch()
    (tmp_path / "local_file.py").write_text("raise SystemExit('imported')")
    check_host(spec_for(tmp_path, kind="module", target=target))


@pytest.mark.parametrize("target", ["no_such_module_here", "no_such_module_here.job", "__main__"])
def test_module_that_does_not_exist_is_refused(tmp_path, target):
    with pytest.raises(UsageError, match=f"-m {target}: no module"):
        check_host(spec_for(tmp_path, kind="module", target=target))


def test_module_that_an_import_hook_provides_is_taken(tmp_path, monkeypatch):
    """As an editable installation does."""

    class Hook:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, None) if name == "editable_package" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook])
    check_host(spec_for(tmp_path, kind="module", target="editable_package.train"))


def finding_of(name, spec, caller=None):
    return next(finding for finding in inspect_host(spec, caller or {}) if finding.name == name)


FAKES = [
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


@pytest.mark.parametrize(
    ("node_rank", "address", "found"),
    [(0, "10.0.0.7", ("warn", "old")), (0, "10.0.0.8", ("warn", "old")), (1, "10.0.0.8", ("ok", "as client"))],
)
def test_certificates_are_tried_for_all_that_this_host_is(tmp_path, monkeypatch, node_rank, address, found):
    def open_identity(_, side):
        return SimpleNamespace(warnings=["old"] * (side == "server"), describe=lambda: f"as {side}")

    monkeypatch.setattr("msrun.cluster.tls.open_identity", open_identity)
    monkeypatch.setattr("msrun.launch.rendezvous.own_addresses", lambda: {"10.0.0.7": "eth0"})
    place = {"local_worker_num": 1, "node_rank": node_rank, "master_addr": address}
    tls = finding_of("tls", replace(spec_for(tmp_path, workers=2, **place), tls=SimpleNamespace()))
    assert (tls.status, tls.text) == found


def test_launcher_has_room_for_a_connection_to_each_host_and_the_logs_of_all(tmp_path, monkeypatch):
    entries = tuple(HostEntry(f"h{node}", 8, tuple(range(8))) for node in range(100))
    spec = replace(spec_for(tmp_path), worker_num=800, local_worker_num=0, host_entries=entries)
    monkeypatch.setattr(preflight, "open_file_limits", lambda: (64, 1232))
    check_host(spec)
    monkeypatch.setattr(preflight, "open_file_limits", lambda: (64, 1231))
    with pytest.raises(ClusterError, match=r"1231 open files .*, 100 hosts with 800 workers need 1232; raise the hard"):
        check_host(spec)


@pytest.mark.parametrize(("name", "fakes", "status", "text", "error"), FAKES)
def test_room_of_the_host_is_judged_and_a_run_is_refused_only_where_it_must_fail(
    tmp_path, monkeypatch, name, fakes, status, text, error
):
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


def test_port_whose_owner_is_not_visible_is_refused_all_the_same(monkeypatch):
    monkeypatch.setattr("msrun.launch.preflight.checks.describe_port_owner", lambda _: "")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match=r"in use\); leave it out"):
        check_port(taken.getsockname()[1])


def test_temporary_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    found = finding_of("temporary", spec_for(tmp_path), {"TMPDIR": "/no/such/folder"})
    assert found.status == "warn" and "TMPDIR=/no/such/folder cannot be written" in found.text

    def none_is_left():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_is_left)
    assert finding_of("temporary", spec_for(tmp_path)).exit_code == 3
    with pytest.raises(ClusterError, match="set TMPDIR to one that can"):
        check_host(spec_for(tmp_path))


def test_shared_memory_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/dev/shm" and access(path, mode))
    assert finding_of("shared_memory", spec_for(tmp_path)).status == "warn"


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.12.1", "ok"), ("2.11.1", "warn"), ("2.14.0a0", "ok"), ("2.16.0a0", "warn"), ("?", "ok"), ("", "warn")],
)
def test_version_of_torch_is_read_and_compared(tmp_path, monkeypatch, version, status):
    monkeypatch.setattr(preflight, "installed_version", lambda _: version)
    found = finding_of("torch", spec_for(tmp_path))
    assert (found.status, found.text.startswith(version)) == (status, True)


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "shared").mkdir()
    return small_spec(tmp_path, 2, log_dir=tmp_path / "logs", worker_log_dir=tmp_path / "shared", device_target="cpu")


def test_host_that_is_well_starts_again(spec):
    check_restart(spec, {}, [])


@pytest.mark.parametrize("folder", ["logs", "shared"])
def test_full_disk_of_any_logs_is_named(spec, folder, monkeypatch):
    free = lambda path: 0 if path.name == folder else 1 << 30  # noqa: E731
    monkeypatch.setattr(checks, "free_disk_bytes", free)
    with pytest.raises(ClusterError, match=rf"the disk of .*/{folder}, where logs are written, is full; make room"):
        check_restart(spec, {}, [])


def test_folder_that_has_gone_is_named(spec):
    spec.log_dir.rmdir()
    with pytest.raises(ClusterError, match=r"/logs: No such file or directory; logs are written there"):
        check_restart(spec, {}, [])


def test_processes_that_do_not_end_are_named(spec):
    with pytest.raises(ClusterError, match=r"processes \[7, 9\] could not be ended"):
        check_restart(spec, {}, {9, 7})


def test_device_that_has_gone_is_named(spec):
    with pytest.raises(MsrunError, match="gpu"):
        check_restart(replace(spec, device_target="gpu"), {"CUDA_VISIBLE_DEVICES": ""}, [])
