"""Jobs over several hosts, each started by hand on its own; network namespaces stand in for the hosts."""

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import REPOSITORY, WORKERS, latest_job, read_record, wait_until
from tls_files import PASSWORDS, Authority, TlsFolder

TWO = ("--worker_num=2", "--local_worker_num=1")


def test_unequal_hosts_get_ranks_environment_and_table(hosts, tmp_path):
    ended = hosts.run_all([2, 1], WORKERS / "record.py")
    assert [job.code for job in ended] == [0, 0], ended
    assert not list((tmp_path / "log_output").glob(".meeting_*")), "the key goes with the job"
    envs = [read_record(tmp_path, rank)["env"] for rank in range(3)]
    master = hosts.net.address(0)
    for rank, env in enumerate(envs):
        node, local, locals_ = (1, 0, 1) if rank == 2 else (0, rank, 2)
        told = {
            "RANK": str(rank), "RANK_ID": str(rank), "MS_NODE_ID": str(rank), "LOCAL_RANK": str(local),
            "DEVICE_ID": str(local), "LOCAL_WORLD_SIZE": str(locals_), "WORLD_SIZE": "3", "RANK_SIZE": "3",
            "MS_WORKER_NUM": "3", "GROUP_RANK": str(node), "MS_NODE_RANK": str(node), "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": master, "MS_SCHED_HOST": master, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0",
        }  # fmt: skip
        assert {name: env[name] for name in told} == told
        assert "NCCL_SOCKET_IFNAME" not in env
        table = json.loads(Path(env["RANK_TABLE_FILE"]).read_text())
        assert [server["server_id"] for server in table["server_list"]] == [hosts.net.address(0), hosts.net.address(1)]
        assert [[d["rank_id"] for d in server["device"]] for server in table["server_list"]] == [["0", "1"], ["2"]]
    assert len({(env["MASTER_PORT"], env["MSRUN_JOB_ID"], env["MS_SCHED_PORT"]) for env in envs}) == 1


@pytest.mark.slow
def test_without_node_rank_hosts_are_numbered_by_address(hosts, tmp_path):
    """10.77.0.9 comes before 10.77.0.10, which has the scheduler and comes first as text."""
    words = ("--worker_num=2", "--local_worker_num=1", WORKERS / "record.py")
    jobs = [hosts.start(host, *words, master=1) for host in (1, 0)]
    assert [job.finish().code for job in jobs] == [0, 0]
    assert read_record(tmp_path, 0)["env"]["MASTER_ADDR"] == hosts.net.address(1)
    assert "this is node 1 (" in jobs[0].stderr and "this is node 0 (" in jobs[1].stderr
    logs = tmp_path / "log_output"
    assert (logs / "worker_0.log").exists() and (logs / "node_1" / "worker_1.log").exists()


def test_absent_scheduler_is_named(hosts):
    job = hosts.start(1, *TWO, "--cluster_time_out=0", WORKERS / "wait.py", node=1).finish()
    assert job.code == 124
    assert f"--cluster_time_out 0: no scheduler at {hosts.net.address(0)}:8118 (Connection refused)" in job.stderr


@pytest.mark.slow
@pytest.mark.parametrize("killed", one_fast(1, 0))
def test_killed_launcher_ends_the_job_on_the_other_host(hosts, killed):
    jobs = hosts.start_all([2, 2], WORKERS / "wait.py")
    jobs[0].wait_for_workers(4)
    jobs[killed].send(signal.SIGKILL)
    ended = jobs[1 - killed].finish(15)
    assert ended.code == 3
    who = "lost the scheduler at" if killed == 0 else "lost node 1 ("
    assert who in ended.errors[0] and "has closed its connection" in ended.errors[0]
    jobs[killed].finish()


@pytest.mark.slow
def test_killed_agent_of_the_host_with_the_scheduler_ends_the_job_on_all(hosts):
    jobs = hosts.start_all([1, 1], WORKERS / "wait.py")
    jobs[0].wait_for_workers(2)
    (agent,) = Path(f"/proc/{jobs[0].pid}/task/{jobs[0].pid}/children").read_text().split()
    os.kill(int(agent), signal.SIGKILL)
    for ended in [job.finish() for job in jobs]:
        assert ended.code == 3
        assert re.match(r"msrun: error: node 0 \(.*\): .*(SIGKILL|killed)", ended.errors[0]), ended.errors


@pytest.mark.slow
def test_cut_host_ends_the_job_on_both_sides(hosts):
    jobs = hosts.start_all([1, 1], "--heartbeat_time_out=1.5", WORKERS / "wait.py")
    jobs[0].wait_for_workers(2)
    hosts.net.cut(1)
    try:
        ended = [job.finish() for job in jobs]
    finally:
        hosts.net.mend(1)
    assert [job.code for job in ended] == [3, 3], ended[0].stderr
    assert "lost node 1 (" in ended[0].errors[0] and "no sign of life" in ended[0].errors[0]
    assert "lost the scheduler at" in ended[1].errors[0] and "no sign of life" in ended[1].errors[0]


@pytest.mark.slow
def test_job_on_several_hosts_is_stopped_from_any_of_them(hosts, tmp_path):
    ended = hosts.run_all([1, 1], "--join=False", WORKERS / "wait.py")
    assert [job.code for job in ended] == [0, 0]
    assert f"logs in {latest_job(tmp_path / 'log_output')}/node_1\n" in ended[1].stderr
    wait_until(lambda: all((tmp_path / f"ready_{rank}").exists() for rank in range(2)), "workers have begun")
    stopped = hosts.runner.start("--stop=log_output/node_1", cwd=tmp_path, prefix=hosts.net.prefix(1)).finish()
    assert stopped.code == 0, stopped.stderr
    failures = [tmp_path / "log_output" / name / "failure.json" for name in ("", "node_1")]
    wait_until(lambda: all(path.exists() for path in failures), "both hosts have told why")
    reasons = {json.loads(path.read_text())["reason"] for path in failures}
    assert len(reasons) == 1 and reasons.pop().endswith(": stopped by SIGTERM")


@pytest.mark.slow
def test_rank_that_holds_up_another_host_is_named_and_all_leave_their_stacks(hosts, tmp_path):
    ended = hosts.run_all([1, 3], "--hang_time_out=3", WORKERS / "runtime" / "stuck.py", "sleep")
    assert [job.code for job in ended] == [124, 124], ended
    for job in ended:
        assert re.search(r"node 1 \(.*\): --hang_time_out 3: no progress for . s; behind: rank 1 ", job.errors[0])
    for name in ("worker_0.log", "node_1/worker_1.log"):
        assert "stacks of all threads:" in (tmp_path / "log_output" / name).read_text()


@pytest.mark.slow
def test_hosts_meet_over_ipv6_too(hosts, tmp_path):
    if not hosts.net.has_ipv6:
        pytest.skip("no IPv6 here")
    master = f"--master_addr={hosts.net.address6(0)}"
    assert [job.code for job in hosts.run_all([1, 1], master, WORKERS / "record.py")] == [0, 0]
    env = read_record(tmp_path, 1)["env"]
    assert (env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"]) == (hosts.net.address6(0), "eth0")


# -- a rank that ends with 0 and never joins the world is named at once: the others would wait for it for ever ---------

RULE = "every rank has to call init() or init_process_group(), or none"


@pytest.mark.slow
@pytest.mark.parametrize(("absent", "how", "code"), [("0", "runtime", 3), ("3", "plain", 3), ("0", "nothing", 0)])
def test_rank_of_another_host_is_named_on_all_hosts(hosts, absent, how, code):
    for ended in hosts.run_all([2, 2], WORKERS / "absent.py", absent, how):
        assert ended.code == code, ended.stderr
        named = [line for line in ended.errors if f"rank {absent} ended with exit code 0 without joining" in line]
        assert bool(named) == bool(code)


# -- strangers without the job's token or certificate cost it nothing; --tls_config makes all pass through TLS

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
