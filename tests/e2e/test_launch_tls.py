"""Jobs of several hosts with --tls_config: the documented commands make the files, and everything works through TLS."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_net import HostNet
from job_runner import REPOSITORY, Finished, JobRunner, Running, wait_until
from tls_files import PASSWORDS, Authority, TlsFolder

DOCUMENT = REPOSITORY / "docs" / "how-to" / "security.md"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands of the document make."""
    folder = tmp_path_factory.mktemp("documented")
    commands = "\n".join(re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
    done = subprocess.run(["sh", "-ec", commands], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    revoking = json.loads((folder / "tls.json").read_text()) | {"crl_path": "ca.crl"}
    (folder / "revoking.json").write_text(json.dumps(revoking))
    return folder


@pytest.fixture(scope="module")
def net() -> Iterator[HostNet]:
    with HostNet(3) as hosts:
        yield hosts


class Cluster:
    """Starts msrun on the hosts of a network, two workers in all."""

    def __init__(self, runner: JobRunner, net: HostNet, cwd: Path) -> None:
        self.runner, self.net, self.cwd = runner, net, cwd

    def start(self, host: int, *words: str | Path, node: int, **env: str) -> Running:
        job = ("--worker_num=2", "--local_worker_num=1", f"--master_addr={self.net.address(0)}", f"--node_rank={node}")
        log_dir = "log_output" if node == 0 else f"log_output/node_{node}"
        prefix = self.net.prefix(host)
        return self.runner.start(*job, *words, cwd=self.cwd, prefix=prefix, log_dir=log_dir, env=env)


@pytest.fixture
def cluster(msrun: JobRunner, net: HostNet, tmp_path: Path) -> Cluster:
    return Cluster(msrun, net, tmp_path)


@pytest.mark.slow
def test_strangers_are_refused_and_the_job_starts_again_through_tls(
    cluster: Cluster, files: Path, workers: Path, tmp_path: Path
) -> None:
    """Strangers without TLS and with another CA's files; then rank 1 fails, and the second attempt ends well."""
    words = (f"--tls_config={files}/tls.json", "--max_restarts=1", "--heartbeat_time_out=3")
    script = (workers / "attempt.py", "code=7")
    jobs = [cluster.start(0, *words, *script, node=0, MSRUN_TLS_SERVER_PASSWORD="")]
    wait_until(lambda: "registered with 1 worker" in jobs[0].stderr, "the first host has come")
    plain = cluster.start(2, "--max_restarts=1", *script, node=1, MSRUN_TOKEN="of no TLS")
    other = TlsFolder(tmp_path / "other", Authority("another CA")).config()
    foreign = cluster.start(2, f"--tls_config={other}", "--max_restarts=1", *script, node=1, **PASSWORDS)
    ends: list[Finished] = [plain.finish(), foreign.finish()]
    jobs.append(cluster.start(1, *words, *script, node=1))
    ends += [job.finish() for job in jobs]
    assert [ended.code for ended in ends] == [3, 3, 0, 0], ends
    assert "the scheduler has refused this host: it does not speak TLS; give --tls_config on" in ends[0].errors[0]
    assert f"no connection with the scheduler at {cluster.net.address(0)}:8118: TLS: its certi" in ends[1].errors[0]
    assert "registered with the scheduler through TLSv1.3" in ends[3].stderr
    for ended in ends[2:]:
        assert "all 2 workers on 2 hosts finished successfully after restart 1" in ended.stderr
    for reason in ("it does not speak TLS; give", "TLS: it refuses our certificate: another CA has signed it"):
        assert f"refused {cluster.net.address(2)}:" in ends[2].stderr and reason in ends[2].stderr


def test_failure_is_named_on_every_host_and_passwords_stay_with_msrun(
    cluster: Cluster, workers: Path, tmp_path: Path
) -> None:
    config = TlsFolder(tmp_path / "tls", Authority(days=30)).config()
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nassert not [name for name in os.environ if 'TLS' in name]\n"
        "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)\n"
    )
    jobs = [cluster.start(node, f"--tls_config={config}", "train.py", node=node, **PASSWORDS) for node in (0, 1)]
    for ended in [job.finish() for job in jobs]:
        assert ended.code == 7
        assert "msrun: error: rank 1 on node 1 (" in ended.errors[0] and "failed first: exit code 7" in ended.errors[0]
        assert len(re.findall(r"ca_cert_path \S+: CN=test CA expires on \S+, in 29 days", ended.stderr)) == 1
    for path in (tmp_path / "log_output").rglob("*.*"):
        assert path.is_dir() or not any(password.encode() in path.read_bytes() for password in PASSWORDS.values())


@pytest.mark.slow
def test_killed_scheduler_ends_the_job_on_the_other_host(
    cluster: Cluster, files: Path, workers: Path, tmp_path: Path
) -> None:
    script = (f"--tls_config={files}/tls.json", workers / "wait.py")
    jobs = [cluster.start(node, *script, node=node) for node in (0, 1)]
    jobs[0].wait_for(*(tmp_path / f"ready_{rank}" for rank in range(2)))
    jobs[0].send(signal.SIGKILL)
    ended = jobs[1].finish()
    assert ended.code == 3
    assert "lost the scheduler at" in ended.errors[0] and "has closed its connection" in ended.errors[0]
    jobs[0].finish()


@pytest.mark.slow
def test_check_looks_at_the_files_of_this_host(cluster: Cluster, files: Path, workers: Path) -> None:
    checks = {
        (0, "tls.json", ""): (
            0,
            r"ok    tls            client CN=training client until \S+, server CN=training server un",
        ),
        (1, "tls.json", ""): (0, r"ok    tls            client CN=training client until [-\d]+\n"),
        (1, "tls.json", "no"): (
            2,
            r"fail  tls            --tls_config \S+: client_cert_path \S+: wrong password; set M",
        ),
        (1, "revoking.json", ""): (
            2,
            r"fail  tls            --tls_config \S+: client_cert_path \S+: was revoked, says ",
        ),
    }
    jobs = [
        cluster.start(
            node,
            f"--tls_config={files / name}",
            "--check",
            workers / "wait.py",
            node=node,
            MSRUN_TLS_CLIENT_PASSWORD=password,
        )
        for node, name, password in checks
    ]
    for job, (code, line) in zip(jobs, checks.values(), strict=True):
        ended = job.finish()
        assert ended.code == code and re.search(f"^{line}", ended.stdout.decode(), re.MULTILINE), ended


def test_wrong_file_ends_msrun_before_anything_starts(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    (tmp_path / "tls.json").write_text('{"client_cert_path": "a", "ca_cert_path": "b"}')
    words = ("--worker_num=2", "--local_worker_num=1", "--master_addr=192.0.2.1", workers / "wait.py")
    ended = msrun.run("--tls_config=tls.json", *words, cwd=tmp_path)
    assert ended.code == 2
    assert ended.errors[0].startswith("msrun: error: --tls_config tls.json: ca_cert_path /")
    assert "/b: cannot be read (No such file or directory)" in ended.errors[0]
    assert not (tmp_path / "log_output").exists()
