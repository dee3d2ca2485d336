"""--check over real SSH: everything that is wrong with any host is said at once, and nothing is started or written."""

import re
import subprocess
import sys

import pytest
from fleet import FleetRunner
from ssh_net import SshNet

WRAPPER = """#!/bin/sh
export {settings}
exec {python} "$@"
"""
SKEWED = "import time\n_time = time.time\ntime.time = lambda: _time() + 90\n"


@pytest.fixture(scope="module")
def ssh_net(own_disk):
    """Five hosts, each with the same program on its own disk, and one to start from."""
    with SshNet(5, private=[own_disk]) as hosts:
        for host in range(6):
            write(hosts, host, own_disk / "train.py", "import model\nopen('started', 'w').close()\n")
            write(hosts, host, own_disk / "model.py", "")
        yield hosts


@pytest.fixture
def fleet(msrun, ssh_net, own_disk):
    return FleetRunner(msrun, ssh_net, own_disk)


def write(net, host, path, text):
    net.path(host, path).write_text(text)


def files(fleet):
    """Return what is on the disk of each host."""
    return {host: {path.name for path in fleet.net.path(host, fleet.cwd).iterdir()} for host in range(6)}


def lines_of(finished):
    return [re.sub(" +", " ", line) for line in finished.stdout.decode().splitlines()]


def make_python(folder, **settings):
    """Write an interpreter that is this one with variables set."""
    path = folder / "python"
    folder.mkdir(exist_ok=True)
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    path.write_text(WRAPPER.format(settings=words, python=sys.executable))
    path.chmod(0o755)
    return path


def test_everything_that_is_wrong_with_five_hosts_is_one_answer(fleet, tmp_path):
    net, own = fleet.net, fleet.cwd
    other = tmp_path / "other"
    (other / "torch-2.12.0.dist-info").mkdir(parents=True)
    (other / "torch-2.12.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n")
    (other / "sitecustomize.py").write_text(SKEWED)
    full = own / "full"
    net.path(2, full).mkdir()
    subprocess.run([*net.prefix(2), "mount", "-t", "tmpfs", "-o", "size=1m", "none", full], check=True, timeout=30)
    net.path(2, full / "filled").write_bytes(bytes(1 << 19))
    hosts = f"""
        host0 slots=1
        host1 slots=1 python={make_python(other, PYTHONPATH=str(other))}
        host2 slots=1 python={make_python(tmp_path / "small", TMPDIR=str(full))}
        host3 slots=1 python=/no/such/python
        host4 slots=1 port=23
    """
    (tmp_path / "hosts").write_text(hosts)
    write(net, 1, own / "train.py", "import model\nopen('started', 'w').close()  # older\n")
    net.path(2, own / "model.py").unlink()
    before = files(fleet)
    try:
        finished = fleet.run("", f"--hostfile={tmp_path / 'hosts'}", "--check", "train.py")
    finally:
        write(net, 1, own / "train.py", net.path(0, own / "train.py").read_text())
        write(net, 2, own / "model.py", "")
    lines = lines_of(finished)
    assert finished.code == 2
    for pattern in (
        r"fail host host3: there is no /no/such/python: .*(not found|No such file.*); install it there, or .*",
        r"fail host host4 \(.* port 23\): connection refused.*",
        rf"fail disk host2: the disk of {full}, where logs wait to be sent, is full; make room, or set TMPDIR there",
        r"fail torch host1 has 2\.12\.0, the other 2 hosts .*; install the same on all hosts",
        r"fail program host1 has another train\.py \(sha256 \w{8}\) than the other 2 hosts .*; copy one to all.*",
        r"warn program host2 has no model\.py, the other 2 hosts one; copy one to all, or use a disk that they share",
        r"warn clock host1: clock (8|9)\d\.\d s ahead of the one here: .*",
        r"ok host host\[0-2\]: reached",
        r"ok logs host\[0-2\]: logs are sent here while the job runs",
    ):
        assert [line for line in lines if re.fullmatch(pattern, line)], pattern
    states = [line.split()[0] for line in lines]
    assert states == sorted(states, key=("fail", "warn", "ok").index)
    assert files(fleet) == {**before, 2: before[2] | {"model.py"}}


@pytest.mark.slow
def test_good_hosts_are_said_to_be_good_and_nothing_is_started_or_written(fleet):
    net = fleet.net
    before = files(fleet)
    finished = fleet.run([1, 1, 1], "--check", "train.py")
    assert finished.code == 0, finished.stdout
    lines = lines_of(finished)
    assert (
        f"ok master_addr the scheduler is to listen at {net.address(0)} of host0 (by which it was reached from here)"
        in lines
    )
    assert [
        line for line in lines if re.fullmatch(rf"ok scheduler host\[1-2\]: can reach .* {net.address(0)}:\d+", line)
    ]
    assert [line for line in lines if re.fullmatch(r"ok program all 3 hosts: script .*train\.py and 1 module .*", line)]
    assert "fail" not in {line.split()[0] for line in lines}
    assert files(fleet) == before
