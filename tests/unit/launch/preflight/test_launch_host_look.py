"""What an agent says of its host, and that nothing keeps it from saying something."""

import os
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from plans import small_spec

from msrun.launch.preflight import checks as host_look
from msrun.launch.preflight.checks import make_host_report, sees_word, shown_word
from msrun.planning.hosts import HostAssignment
from msrun.planning.program import Program

ROOT = Path(__file__).resolve().parents[4]


def spec_for(folder, **changes):
    program = Program("script", str(folder / "train.py"))
    place = {"log_dir": folder / "logs", "node_rank": 0, "master_addr": "10.0.0.1"}
    return small_spec(folder, 4, **{"local_worker_num": 2, "program": program, **place, **changes})


@pytest.fixture
def folder(odd_path):
    """A working directory with a program."""
    (odd_path / "train.py").write_text("import model\n")
    (odd_path / "model.py").write_text("raise SystemExit('was run')\n")
    return odd_path


def look(spec, **more):
    return make_host_report(spec, {}, asked_at=time.time(), **more)


def found(report, name):
    return [finding for finding in report.findings if finding.name == name]


def test_addresses_are_those_of_the_interfaces_without_loopback(folder):
    import psutil

    entries = {(entry.address, name) for name, list_ in psutil.net_if_addrs().items() for entry in list_}
    addresses = look(spec_for(folder)).addresses
    assert {(entry.address, entry.interface) for entry in addresses} <= entries
    assert not [entry for entry in addresses if entry.interface == "lo"]
    assert all(entry.network is not None for entry in addresses)


def test_what_the_launcher_compares_between_hosts_is_told_only_when_something_is_wrong(folder):
    report = look(spec_for(folder))
    assert [one for one in report.findings if one.name in ("program", "torch") and one.status == "ok"] == []
    assert {one.name for one in report.findings} >= {"memory", "devices"}


MISSING = [
    # what the job asks for; finding; its text
    ({"program": Program("script", "none.py")}, "program", "none.py: No such file or directory; copy it there, or use"),
    ({"program": Program("script", "below")}, "program", "below: Is a directory; copy it there"),
    ({"program": Program("module", "no_such_module")}, "program", "-m no_such_module: no module no_such_module in "),
    ({"program": Program("executable", "train.py")}, "program", "train.py: is not executable there; run chmod +x "),
    ({"working_directory": Path("none")}, "working_dir", "none: no such directory there, or no permission; "),
    ({"local_worker_num": 4096, "worker_num": 4097, "device_target": "gpu"}, "devices", "4096 workers but "),
]


@pytest.mark.parametrize(("changes", "name", "text"), MISSING)
def test_what_is_missing_on_a_host_is_a_finding(folder, changes, name, text):
    (folder / "below").mkdir()
    assert not [finding for finding in found(look(spec_for(folder)), name) if finding.status != "ok"]
    spec = spec_for(folder, **changes)
    if spec.program.kind != "module":
        spec = replace(spec, program=replace(spec.program, target=str(folder / spec.program.target)))
    (finding,) = found(look(replace(spec, working_directory=folder / spec.working_directory)), name)
    assert (finding.status, finding.exit_code) == ("fail", 2)
    assert text in finding.text


def test_device_of_the_host_list_that_is_not_there_is_found(folder):
    assignment = HostAssignment(0, "h1", "", (0, 1), (0, 77))
    report = look(spec_for(folder, table_hosts=(assignment,), device_target="gpu"))
    (finding,) = found(report, "devices")
    assert finding.status == "fail" and "77" in finding.text
    assert report.device_target == ""


def test_host_that_shares_the_log_directory_looks_at_it_and_another_at_its_own_disk(folder):
    (folder / "file").touch()
    apart = spec_for(folder, log_dir=folder / "file" / "logs")  # would fail, but nothing is written to it
    assert not found(look(apart), "log_dir")
    assert tempfile.gettempdir() in found(look(apart), "disk")[0].text
    with shown_word(folder / "logs") as shown:
        report = look(spec_for(folder), shown=shown)
        assert report.sees_log_dir and found(report, "log_dir")[0].status == "ok"
        assert str(folder) in found(report, "disk")[0].text
        assert found(look(apart, shown=shown), "log_dir")[0].status == "fail"


def test_full_disk_where_logs_would_wait_is_found(folder, small_disk, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    assert found(look(spec_for(folder)), "disk")[0].status == "warn"
    (small_disk / "filled").write_bytes(bytes(1 << 19))
    (finding,) = found(look(spec_for(folder)), "disk")
    assert (finding.status, finding.exit_code) == ("fail", 3)
    assert finding.text.startswith(f"the disk of {small_disk}, where logs wait to be sent, is full; ")


def test_name_of_the_scheduler_is_resolved_where_it_was_asked(folder, monkeypatch):
    def resolve(name, *_, **__):
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
def test_ends_of_the_ssh_connection_are_read(folder, monkeypatch, text, ends):
    monkeypatch.setenv("SSH_CONNECTION", text)
    report = look(spec_for(folder))
    assert (report.ssh_client, report.ssh_server) == ends


def test_check_that_breaks_is_told_and_the_others_are_made(folder, monkeypatch):
    def broken(*_):
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    checks = [replace(check, look=broken) if check.name == "memory" else check for check in host_look.CHECKS]
    monkeypatch.setattr(host_look, "CHECKS", checks)
    report = look(spec_for(folder))
    (memory,) = found(report, "memory")
    assert memory.status == "warn" and memory.text.startswith("cannot be looked at (PermissionError: [Errno 13] Perm")
    assert found(report, "open_files")[0].status == "ok"


def test_python_without_what_an_agent_needs_is_named(folder, monkeypatch):
    assert not found(look(spec_for(folder)), "packages")
    monkeypatch.setattr(host_look, "NEEDED_PACKAGES", ("psutil", "no_such_package_here"))
    report = look(spec_for(folder))
    (finding,) = found(report, "packages")
    assert (finding.status, finding.exit_code, report.addresses) == ("fail", 3, ())
    assert finding.text.startswith(
        f"no_such_package_here not installed for {sys.executable}, and msrun needs it there; "
    )


@pytest.mark.parametrize("name", [".", "logs", "logs/of/today"])
def test_host_that_reads_the_word_shares_the_directory(tmp_path, name):
    with shown_word(tmp_path / name) as shown:
        assert sees_word(shown)
        (file,) = list(tmp_path.iterdir())
        assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == []
    assert not sees_word(shown)


def test_host_with_a_directory_of_that_name_and_another_word_does_not(tmp_path):
    with shown_word(tmp_path) as first, shown_word(tmp_path) as second:
        assert not sees_word({**first, "path": second["path"]})


def test_launcher_that_cannot_write_there_shows_nothing(tmp_path):
    (tmp_path / "file").touch()
    with shown_word(tmp_path / "file") as shown:
        assert shown == {}
    assert not sees_word({})


def test_word_is_taken_away_after_a_failure_even_if_somebody_has_removed_it(tmp_path):
    for is_removed in (False, True):
        with pytest.raises(ZeroDivisionError), shown_word(tmp_path) as shown:
            if is_removed:
                Path(shown["path"]).unlink()
            raise ZeroDivisionError
        assert os.listdir(tmp_path) == []


def test_what_is_no_file_shows_nothing(tmp_path):
    assert not sees_word({"path": str(tmp_path / "none"), "word": "x"})
    assert not sees_word({"path": str(tmp_path), "word": "x"})
