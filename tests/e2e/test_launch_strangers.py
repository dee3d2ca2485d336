"""What somebody without the job's token or certificate sends, holds open or floods costs the running job nothing.

And --tls_config: the documented commands make the files, and everything works through TLS.
"""

import contextlib
import json
import re
import signal
import socket
import struct
import subprocess
from pathlib import Path

import pytest
from job_runner import REPOSITORY, WORKERS, wait_until
from tls_files import PASSWORDS, Authority, TlsFolder

TWO = ("--worker_num=2", "--local_worker_num=1")
DOCUMENT = REPOSITORY / "docs" / "how-to" / "security.md"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the commands of the document make."""
    folder = tmp_path_factory.mktemp("documented")
    commands = "\n".join(re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
    done = subprocess.run(["sh", "-ec", commands], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return folder


STORE_HELLO, SET = b"\0" + struct.pack("<I", 0x3C85F7CE), b"\1"
"""How a client of torch's TCPStore begins, and how it begins to set a key."""


def store_port(job):
    plan = json.loads((job.log_dir / "plan.json").read_text())
    return int(plan["hosts"][0]["env"]["MASTER_PORT"])


@pytest.mark.slow
def test_workers_that_meet_in_the_folder_of_the_job_need_no_store(msrun, tmp_path):
    """Another user of the host holds the store up with half a message; he has no way into the folder."""
    (tmp_path / "train.py").write_text(
        "import os, stat, time\nfrom pathlib import Path\nimport torch, torch.distributed as dist\n"
        "from msrun.runtime import init\nPath('ready_' + os.environ['RANK']).touch()\n"
        "while not Path('go').exists():\n    time.sleep(0.01)\n"
        "init()\nvalue = torch.ones(1)\ndist.all_reduce(value)\n"
        "store = Path(os.environ['MSRUN_RENDEZVOUS'].removeprefix('file://'))\n"
        "print(value.item(), oct(stat.S_IMODE(store.parent.stat().st_mode)), flush=True)\n"
    )
    job = msrun.start("--worker_num=2", "train.py", cwd=tmp_path).wait_for_workers(2)
    with socket.create_connection(("127.0.0.1", store_port(job)), timeout=30) as stream:
        stream.sendall(STORE_HELLO + SET + struct.pack("<Q", 8))
        (tmp_path / "go").touch()
        ended = job.finish()
    assert ended.code == 0, ended.stderr
    assert ended.log(0).endswith(b"2.0 0o700\n")


@pytest.mark.slow
def test_one_who_reaches_the_store_cannot_take_the_memory_of_the_host(msrun, tmp_path):
    """torch's store takes memory for a value as soon as its length has come, and asks nobody who he is."""
    job = msrun.start("--worker_num=1", WORKERS / "wait.py", cwd=tmp_path).wait_for_workers(1)
    scheduler = job.pid_of("scheduler")
    with socket.create_connection(("127.0.0.1", store_port(job)), timeout=30) as stream:
        stream.sendall(STORE_HELLO + SET + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 3 << 30))
        with contextlib.suppress(ConnectionResetError):
            assert stream.recv(1) == b"", "it is sent away"
    peak = next(line for line in Path(f"/proc/{scheduler}/status").read_text().splitlines() if "VmHWM" in line)
    assert int(peak.split()[1]) < 2 << 20
    job.send(signal.SIGTERM)
    assert job.finish().code == 143


@pytest.mark.slow
def test_strangers_are_refused_and_the_job_restarts_through_tls(hosts, files, tmp_path):
    """Strangers without TLS and with another CA's files; then rank 1 fails, and the second attempt ends well."""
    words = (f"--tls_config={files}/tls.json", "--max_restarts=1", "--heartbeat_time_out=3")
    script = (WORKERS / "attempt.py", "code=7")
    jobs = [hosts.start(0, *TWO, *words, *script, node=0, MSRUN_TLS_SERVER_PASSWORD="")]
    wait_until(lambda: "registered with 1 worker" in jobs[0].stderr, "the first host has come")
    plain = hosts.start(2, *TWO, "--max_restarts=1", *script, node=1, MSRUN_TOKEN="of no TLS")
    other = TlsFolder(tmp_path / "other", Authority("another CA")).config()
    foreign = hosts.start(2, *TWO, f"--tls_config={other}", "--max_restarts=1", *script, node=1, **PASSWORDS)
    ends = [plain.finish(), foreign.finish()]
    jobs.append(hosts.start(1, *TWO, *words, *script, node=1))
    ends += [job.finish() for job in jobs]
    assert [ended.code for ended in ends] == [3, 3, 0, 0], ends
    assert "the scheduler has refused this host: it does not speak TLS; give --tls_config on" in ends[0].errors[0]
    assert f"no connection with the scheduler at {hosts.net.address(0)}:8118: TLS: its certi" in ends[1].errors[0]
    assert "registered with the scheduler through TLSv1.3" in ends[3].stderr
    for ended in ends[2:]:
        assert "all 2 workers on 2 hosts finished successfully after restart 1" in ended.stderr
    for reason in ("it does not speak TLS; give", "TLS: it refuses our certificate: another CA has signed it"):
        assert f"refused {hosts.net.address(2)}:" in ends[2].stderr and reason in ends[2].stderr


def test_failure_is_named_on_every_host_and_passwords_stay_with_msrun(hosts, tmp_path):
    config = TlsFolder(tmp_path / "tls", Authority(days=30)).config()
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nassert not [name for name in os.environ if 'TLS' in name]\n"
        "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)\n"
    )
    words = (*TWO, f"--tls_config={config}", "train.py")
    jobs = [hosts.start(node, *words, node=node, **PASSWORDS) for node in (0, 1)]
    for ended in [job.finish() for job in jobs]:
        assert ended.code == 7
        assert "msrun: error: rank 1 on node 1 (" in ended.errors[0] and "failed first: exit code 7" in ended.errors[0]
        assert ended.read_json("failure.json")["first_failure"]["global_rank"] == 1
        assert len(re.findall(r"ca_cert_path \S+: CN=test CA expires on \S+, in 29 days", ended.stderr)) == 1
    for path in (tmp_path / "log_output").rglob("*.*"):
        assert path.is_dir() or not any(password.encode() in path.read_bytes() for password in PASSWORDS.values())
