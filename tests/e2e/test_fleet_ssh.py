"""The whole command over SSH: its options, ways with jump hosts, host keys and passphrases."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import FleetRunner
from job_runner import MARK, JobRunner
from ssh_net import SshNet, make_key


@pytest.fixture(scope="module")
def net() -> Iterator[SshNet]:
    """Three hosts, the last with its server on port 2222."""
    with SshNet(3, host_options={2: {"Port": "2222"}}) as hosts:
        yield hosts


@pytest.fixture
def fleet(msrun: JobRunner, net: SshNet, tmp_path: Path) -> FleetRunner:
    return FleetRunner(msrun, net, tmp_path)


@pytest.mark.slow
def test_job_behind_two_jump_hosts_is_one_world(fleet: FleetRunner, workers: Path, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(
        f"Host host2\n ProxyJump host0,host1\n Port 2222\nHost host1\n ProxyJump host0\n"
        f"Host *\n Include {fleet.net.client}/config\n"
    )
    done = fleet.run("host1:1,host2:2", "--ssh_config=config", workers / "all_reduce.py")
    assert done.code == 0, done.stderr
    results = [json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(3)]
    assert [result["sum"] for result in results] == [[0.0, 6.0, 12.0, 18.0]] * 3
    came_from = [line.split()[2] for line in fleet.net.server_log(2).splitlines() if line.startswith("Connection from")]
    assert came_from == [fleet.net.address(1)]


@pytest.mark.slow
def test_options_are_enough_without_any_ssh_config(fleet: FleetRunner, workers: Path, tmp_path: Path) -> None:
    """A home without any files of ssh; the host key is accepted once and known from then on."""
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(fleet.net.client / "id_ed25519", tmp_path / "key")
    words = ("--ssh_config=none", "--ssh_user=root", "--ssh_port=2222", "--ssh_identity=key", workers / "record.py")
    refused = fleet.run("host2:1", *words, HOME=str(home))
    assert refused.code == 3 and "[host2]:2222 is not in known_hosts" in refused.errors[0]
    assert fleet.run("host2:1", "--ssh_host_keys=accept-new", *words, HOME=str(home)).code == 0
    assert (home / ".ssh" / "known_hosts").read_text().startswith("[host2]:2222 ssh-ed25519 ")
    assert fleet.run("host2:1", *words, HOME=str(home)).code == 0


def test_wrong_key_of_one_host_starts_nothing_on_any(fleet: FleetRunner, workers: Path, tmp_path: Path) -> None:
    known = (fleet.net.client / "known_hosts").read_text().splitlines()
    (tmp_path / "known").write_text(f"{known[0]}\n{known[1].split()[0]} {make_key(tmp_path / 'other')}\n")
    (tmp_path / "config").write_text(f"UserKnownHostsFile {tmp_path}/known\nInclude {fleet.net.client}/config\n")
    done = fleet.run([1, 1], "--ssh_config=config", workers / "wait.py")
    assert done.code == 3
    assert done.errors[0].startswith(f"msrun: error: host1 ({fleet.net.address(1)}): HOST KEY HAS CHANGED")
    assert not list(tmp_path.glob("ready_*"))


@pytest.mark.slow
def test_passphrase_is_asked_for_once_at_a_terminal_and_nowhere_else(
    fleet: FleetRunner, workers: Path, tmp_path: Path
) -> None:
    shutil.copy(fleet.net.client / "id_ed25519", tmp_path / "key")
    words = ["ssh-keygen", "-q", "-a", "1", "-p", "-N", "open sesame", "-f", tmp_path / "key"]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    (tmp_path / "config").write_text(
        f"IdentityFile {tmp_path}/key\nMatch !originalhost no\n UserKnownHostsFile {fleet.net.client}/known_hosts\n"
        + "".join(f"Host host{host}\n HostName {fleet.net.address(host)}\n User root\n" for host in (0, 1))
    )
    refused = fleet.run([1, 1], "--ssh_config=config", workers / "record.py", SSH_AUTH_SOCK="")
    assert refused.code == 3 and f"has it a passphrase? ssh-add {tmp_path}/key" in refused.errors[0]
    text = _type_passphrase(fleet, "--ssh_config=config", workers / "record.py")
    assert text.count("passphrase of") == 1 and "open sesame" not in text
    assert "all 2 workers on 2 hosts finished successfully" in text and (tmp_path / "record_1.json").exists()


def _type_passphrase(fleet: FleetRunner, *words: str | Path) -> str:
    """Run a job at a terminal, answer its question, and return all that it has shown."""
    ours, theirs = pty.openpty()
    command = [*fleet.net.prefix(fleet.net.control), sys.executable, "-m", "msrun"]
    job = subprocess.Popen(
        [*command, "--hosts=host0:1,host1:1", f"--forward_env={MARK}", *map(str, words)],
        cwd=fleet.cwd,
        env=fleet.runner.environ({"HOME": str(fleet.net.home), "SSH_AUTH_SOCK": "", "COLUMNS": "200"}),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    text = b""
    try:
        while data := _read(ours):
            has_asked = b"passphrase of" in text
            text += data
            if b"passphrase of" in text and not has_asked:
                os.write(ours, b"open sesame\n")
    finally:
        os.close(ours)
        job.wait(60)
    return text.decode(errors="backslashreplace")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # nobody has the terminal any more
        return b""
