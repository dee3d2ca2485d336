"""What an agent says of its host, and that nothing keeps it from saying something."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msrun import __version__
from msrun.cluster.protocol import Finding, HostReport
from msrun.launch.preflight import checks, host_look
from msrun.launch.preflight.host_look import make_host_report, shown_word
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.program import Program
from msrun.planning.record_json import decode_record
from msrun.planning.spec import LaunchSpec

ROOT = Path(__file__).resolve().parents[4]
MAKE = """
import json, os, sys, time
from pathlib import Path
from msrun.launch.preflight.host_look import make_host_report
from msrun.planning.program import Program
from msrun.planning.record_json import decode_record, encode_record
from msrun.planning.spec import LaunchSpec
folder = Path(sys.argv[1])
spec = LaunchSpec(program=Program("script", str(folder / "train.py")), worker_num=4, local_worker_num=2,
                  working_directory=folder, log_dir=folder / "logs", node_rank=0, master_addr="10.0.0.1")
report = make_host_report(spec, os.environ, asked_at=time.time())
print(json.dumps(encode_record(report)))
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""


def spec_for(folder: Path, **changes: Any) -> LaunchSpec:
    spec = LaunchSpec(
        program=Program("script", str(folder / "train.py")),
        worker_num=4,
        local_worker_num=2,
        working_directory=folder,
        log_dir=folder / "logs",
        node_rank=0,
        master_addr="10.0.0.1",
    )
    return replace(spec, **changes)


@pytest.fixture
def folder(odd_path: Path) -> Path:
    """A working directory with a program."""
    (odd_path / "train.py").write_text("import model\n")
    (odd_path / "model.py").write_text("raise SystemExit('was run')\n")
    return odd_path


def look(spec: LaunchSpec, **more: Any) -> HostReport:
    return make_host_report(spec, {}, asked_at=time.time(), **more)


def found(report: HostReport, name: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.name == name]


def test_agent_of_its_own_process_says_what_its_host_is(folder: Path) -> None:
    begin = time.time()
    done = subprocess.run(
        [sys.executable, "-c", MAKE, str(folder)],
        cwd="/",
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "SSH_CONNECTION": "10.0.0.1 50000 10.0.0.7 22"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    text, imported = done.stdout.splitlines()
    assert imported == "[]"
    report = decode_record(HostReport, json.loads(text))
    assert report.host_name == socket.gethostname()
    assert report.python_version == ".".join(map(str, sys.version_info[:3]))
    assert report.msrun_version == __version__
    assert report.torch_version and report.numpy_version and report.boot_id and report.architecture
    assert report.device_target == "cpu" or report.device_target in ("gpu", "ascend")
    assert (report.ssh_client, report.ssh_server) == ("10.0.0.1", "10.0.0.7")
    assert [name for name, _ in report.sources] == ["train.py", "model.py"]
    assert begin <= report.received_at <= report.made_at <= time.time()
    assert not report.sees_log_dir and not [finding for finding in report.findings if finding.status == "fail"]
    assert {finding.name for finding in report.findings} >= {"disk", "temporary", "devices", "memory", "open_files"}
    assert not {finding.name for finding in report.findings} & {"master_port", "rank_table", "python", "log_dir"}
    assert not [finding for finding in report.findings if finding.name == "program"]  # compared by the launcher
    assert sorted(os.listdir(folder)) == ["model.py", "train.py"]


def test_addresses_are_those_of_the_interfaces_without_loopback(folder: Path) -> None:
    import psutil

    entries = {(entry.address, name) for name, list_ in psutil.net_if_addrs().items() for entry in list_}
    addresses = look(spec_for(folder)).addresses
    assert {(entry.address, entry.interface) for entry in addresses} <= entries
    assert not [entry for entry in addresses if entry.interface == "lo"]
    assert all(entry.network is not None for entry in addresses)


MISSING = [
    # how the host differs; finding; its text; exit code
    (("remove", "train.py"), "program", "train.py: No such file or directory; copy it there, or use a disk", 2),
    (("folder", "train.py"), "program", "train.py: Is a directory; copy it there", 2),
    (("module", "no_such_module_here"), "program", "-m no_such_module_here: no module no_such_module_here in ", 2),
    (("executable", "train.py"), "program", "train.py: is not executable there; run chmod +x ", 2),
    (("cwd", "none"), "working_dir", "none: no such directory there, or no permission; make it, or give --chdir", 2),
    (("workers", "4096"), "devices", "4096 workers but ", 2),
]


@pytest.mark.parametrize(("change", "name", "text", "code"), MISSING)
def test_what_is_missing_on_a_host_is_a_finding(
    folder: Path, change: tuple[str, str], name: str, text: str, code: int
) -> None:
    spec = spec_for(folder)
    assert not [finding for finding in found(look(spec), name) if finding.status != "ok"]
    match change:
        case ("remove", file):
            (folder / file).unlink()
        case ("folder", file):
            (folder / file).unlink()
            (folder / file).mkdir()
        case ("module", module):
            spec = replace(spec, program=Program("module", module))
        case ("executable", file):
            (folder / file).chmod(0o600)
            spec = replace(spec, program=Program("executable", str(folder / file)))
        case ("cwd", other):
            spec = replace(spec, working_directory=folder / other)
        case ("workers", number):
            spec = replace(spec, local_worker_num=int(number), worker_num=int(number) + 1, device_target="gpu")
    (finding,) = found(look(spec), name)
    assert (finding.status, finding.exit_code) == ("fail", code)
    assert text in finding.text


def test_device_of_the_host_list_that_is_not_there_is_found(folder: Path) -> None:
    assignment = HostAssignment(0, "h1", "", (0, 1), (0, 77))
    report = look(spec_for(folder, table_hosts=(assignment,), device_target="gpu"))
    (finding,) = found(report, "devices")
    assert finding.status == "fail" and "77" in finding.text
    assert report.device_target == ""


def test_host_that_shares_the_log_directory_looks_at_it_and_another_at_its_own_disk(folder: Path) -> None:
    (folder / "file").touch()
    apart = spec_for(folder, log_dir=folder / "file" / "logs")  # would fail, but nothing is written to it
    assert not found(look(apart), "log_dir")
    assert tempfile.gettempdir() in found(look(apart), "disk")[0].text
    with shown_word(folder / "logs") as shown:
        report = look(spec_for(folder), shown=shown)
        assert report.sees_log_dir and found(report, "log_dir")[0].status == "ok"
        assert str(folder) in found(report, "disk")[0].text
        assert found(look(apart, shown=shown), "log_dir")[0].status == "fail"


def test_full_disk_where_logs_would_wait_is_found(
    folder: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    assert found(look(spec_for(folder)), "disk")[0].status == "warn"
    (small_disk / "filled").write_bytes(bytes(1 << 19))
    (finding,) = found(look(spec_for(folder)), "disk")
    assert (finding.status, finding.exit_code) == ("fail", 3)
    assert finding.text.startswith(f"the disk of {small_disk}, where logs wait to be sent, is full; ")


def test_name_of_the_scheduler_is_resolved_where_it_was_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str, *_: object, **__: object) -> list[Any]:
        if name != "head":
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.9", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert look(spec_for(folder), master_name="head").master_address == "10.0.0.9"
    assert look(spec_for(folder), master_name="10.0.0.8").master_address == "10.0.0.8"
    assert look(spec_for(folder)).master_address == ""
    report = look(spec_for(folder), master_name="nobody")
    (finding,) = found(report, "master_addr")
    assert finding.status == "fail" and "--master_addr nobody: cannot be resolved" in finding.text


CONNECTIONS = [
    ("10.0.0.1 50000 10.0.0.7 22", ("10.0.0.1", "10.0.0.7")),
    ("::ffff:10.0.0.1 50000 ::ffff:10.0.0.7 22", ("10.0.0.1", "10.0.0.7")),
    ("fd77::1 50000 fd77::7 22", ("fd77::1", "fd77::7")),
    ("fe80::1%eth0 50000 fe80::7%eth0 22", ("fe80::1", "fe80::7")),
    ("", ("", "")),
    ("UNKNOWN 65535 UNKNOWN 65535", ("", "")),  # what sshd says when it does not know
    ("10.0.0.1 50000", ("", "")),
]


@pytest.mark.parametrize(("text", "ends"), CONNECTIONS)
def test_ends_of_the_ssh_connection_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, ends: tuple[str, str]
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", text)
    report = look(spec_for(folder))
    assert (report.ssh_client, report.ssh_server) == ends


def test_check_that_breaks_is_told_and_the_others_are_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Finding:
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    checks = [replace(check, look=broken) if check.name == "memory" else check for check in host_look.CHECKS]
    monkeypatch.setattr(host_look, "CHECKS", checks)
    report = look(spec_for(folder))
    assert found(report, "memory") == [
        Finding(
            "warn", "memory", "cannot be looked at (PermissionError: [Errno 13] Permission denied: '/proc/meminfo')"
        )
    ]
    assert found(report, "open_files")[0].status == "ok"


def test_missing_packages_are_empty_versions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_look, checks):
        monkeypatch.setattr(module, "installed_version", lambda _: "")
    report = look(spec_for(folder))
    assert (report.torch_version, report.numpy_version) == ("", "")
    assert found(report, "torch")[0].status == "warn"


def test_python_without_what_an_agent_needs_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not found(look(spec_for(folder)), "packages")
    monkeypatch.setattr(host_look, "NEEDED_PACKAGES", ("psutil", "no_such_package_here"))
    report = look(spec_for(folder))
    (finding,) = found(report, "packages")
    assert (finding.status, finding.exit_code, report.addresses) == ("fail", 3, ())
    assert finding.text.startswith(
        f"no_such_package_here not installed for {sys.executable}, and msrun needs it there; "
    )
