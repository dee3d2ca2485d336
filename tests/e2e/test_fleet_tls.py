"""One command for many hosts with --tls_config: they talk over SSH, and no password goes anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import FleetRunner
from job_runner import JobRunner
from ssh_net import SshNet
from tls_files import PASSWORDS, Authority, TlsFolder


@pytest.fixture(scope="module")
def net() -> Iterator[SshNet]:
    with SshNet(2) as hosts:
        yield hosts


@pytest.fixture
def fleet(msrun: JobRunner, net: SshNet, tmp_path: Path) -> FleetRunner:
    return FleetRunner(msrun, net, tmp_path)


@pytest.mark.slow
def test_files_for_tls_are_not_used_and_no_password_leaves_the_launcher(
    fleet: FleetRunner, workers: Path, tmp_path: Path
) -> None:
    """One of the hosts is the launcher's own, whose agent is a child of it."""
    config = TlsFolder(tmp_path / "tls", Authority(days=20)).config()
    secrets = {**PASSWORDS, "MSRUN_TOKEN": "secret"}
    job = fleet.run("control:1,host0:1", f"--tls_config={config}", workers / "record.py", **secrets)
    assert job.code == 0, job.stderr
    assert f"--tls_config {config}: not used: hosts and launcher talk over SSH" in job.stderr
    for rank in range(2):
        assert not set(secrets) & set(fleet.record(rank)["env"])
    for path in job.log_dir.iterdir():
        assert not any(password.encode() in path.read_bytes() for password in PASSWORDS.values()), path


def test_check_says_that_files_for_tls_are_not_used(fleet: FleetRunner, workers: Path, tmp_path: Path) -> None:
    config = TlsFolder(tmp_path / "tls", Authority()).config(server_cert_path="gone.p12")
    job = fleet.run([1, 1], f"--tls_config={config}", "--check", workers / "record.py", **PASSWORDS)
    assert job.code == 0, job.stdout
    (line,) = [line for line in job.stdout.decode().splitlines() if line.split()[1:2] == ["tls"]]
    assert line.startswith("warn") and "not used" in line
