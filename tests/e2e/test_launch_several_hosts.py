"""Jobs over several hosts, each started by hand on its own; network namespaces stand in for the hosts."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import WORKERS, latest_job, read_record, wait_until

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
