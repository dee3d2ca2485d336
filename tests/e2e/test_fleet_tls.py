"""One command for many hosts with --tls_config: the hosts read the files, the launcher's passwords reach them alone."""

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


def test_hosts_of_one_command_talk_through_tls_and_workers_see_no_password(
    fleet: FleetRunner, workers: Path, tmp_path: Path
) -> None:
    """One of the hosts is the launcher's own, whose agent is a child of it."""
    config = TlsFolder(tmp_path / "tls", Authority(days=20)).config()
    secrets = {**PASSWORDS, "MSRUN_TOKEN": "secret"}
    job = fleet.run("control:1,host0:1", f"--tls_config={config}", workers / "record.py", **secrets)
    assert job.code == 0 and "CN=test CA expires on" in job.stderr, job.stderr
    registered = {event["node_rank"]: event["text"] for event in job.events if event["event"] == "registered"}
    assert registered == dict.fromkeys(range(2), "registered with the scheduler through TLSv1.3")
    for rank in range(2):
        assert not set(secrets) & set(fleet.record(rank)["env"])
    for path in job.log_dir.iterdir():
        assert not any(password.encode() in path.read_bytes() for password in PASSWORDS.values()), path


def test_check_names_the_host_whose_files_are_wrong(fleet: FleetRunner, workers: Path, tmp_path: Path) -> None:
    """Only the host with the scheduler needs the server's certificate."""
    config = TlsFolder(tmp_path / "tls", Authority()).config(server_cert_path="gone.p12")
    job = fleet.run([1, 1], f"--tls_config={config}", "--check", workers / "record.py", **PASSWORDS)
    assert job.code == 2, job.stdout
    failed = [line for line in job.stdout.decode().splitlines() if line.startswith("fail")]
    assert len(failed) == 1 and "host0" in failed[0] and "gone.p12: cannot be read (No such file" in failed[0], failed
