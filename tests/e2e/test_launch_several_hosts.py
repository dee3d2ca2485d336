"""Jobs over several hosts, each started by hand on its own; network namespaces stand in for the hosts."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from asked_cases import one_fast
from host_net import HostNet
from job_runner import Finished, JobRunner, Running, latest_job, wait_until


@pytest.fixture(scope="module")
def net() -> Iterator[HostNet]:
    """Three hosts for all tests of this module."""
    with HostNet(3) as hosts:
        yield hosts


class Hosts:
    """Starts msrun on hosts, all in one directory, as on a shared disk."""

    def __init__(self, runner: JobRunner, net: HostNet, cwd: Path) -> None:
        self.runner = runner
        self.net = net
        self.cwd = cwd

    def start(self, host: int, *words: str | Path, node: int = -1, master: int = 0, **env: str) -> Running:
        """Start msrun on a host. `node`: where its logs will be."""
        log_dir = "log_output" if node <= 0 else f"log_output/node_{node}"
        address = f"--master_addr={self.net.address(master)}"
        return self.runner.start(address, *words, cwd=self.cwd, prefix=self.net.prefix(host), log_dir=log_dir, env=env)

    def start_all(self, locals_: Sequence[int], *words: str | Path) -> list[Running]:
        """Start nodes 0, 1, ... with so many workers each."""
        size = f"--worker_num={sum(locals_)}"
        return [
            self.start(node, size, f"--local_worker_num={count}", f"--node_rank={node}", *words, node=node)
            for node, count in enumerate(locals_)
        ]

    def wait_for_workers(self, jobs: Sequence[Running], count: int) -> None:
        """Wait until workers/wait.py has begun everywhere."""
        jobs[0].wait_for(*(self.cwd / f"ready_{rank}" for rank in range(count)))


@pytest.fixture
def hosts(msrun: JobRunner, net: HostNet, tmp_path: Path) -> Hosts:
    return Hosts(msrun, net, tmp_path)


def finish_all(jobs: Sequence[Running]) -> list[Finished]:
    return [job.finish() for job in jobs]


def process_state(pid: int) -> str:
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


def record(folder: Path, rank: int) -> dict[str, Any]:
    env: dict[str, Any] = json.loads((folder / f"record_{rank}.json").read_text())["env"]
    return env


def test_workers_of_two_hosts_are_one_world(hosts: Hosts, workers: Path, tmp_path: Path) -> None:
    ended = finish_all(hosts.start_all([2, 2], workers / "all_reduce.py"))
    assert [job.code for job in ended] == [0, 0], ended
    assert not list((tmp_path / "log_output").glob(".meeting_*")), "the key goes with the job"
    results = [json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(4)]
    assert [result["sum"] for result in results] == [[0.0, 10.0, 20.0, 30.0]] * 4
    locals_ = [{"rank": rank, "local": str(rank % 2)} for rank in range(4)]
    assert [result["all"] for result in results] == [locals_] * 4
    assert "all 4 workers on 2 hosts finished successfully" in ended[0].stderr
    assert "finished successfully" in ended[1].stderr


@pytest.mark.slow
def test_unequal_hosts_get_ranks_environment_and_table(hosts: Hosts, workers: Path, tmp_path: Path) -> None:
    ended = finish_all(hosts.start_all([3, 1], workers / "record.py"))
    assert [job.code for job in ended] == [0, 0], ended
    envs = [record(tmp_path, rank) for rank in range(4)]
    master = hosts.net.address(0)
    for rank, env in enumerate(envs):
        node, local, locals_ = (1, 0, 1) if rank == 3 else (0, rank, 3)
        told = {
            "RANK": str(rank), "RANK_ID": str(rank), "MS_NODE_ID": str(rank), "LOCAL_RANK": str(local),
            "DEVICE_ID": str(local), "LOCAL_WORLD_SIZE": str(locals_), "WORLD_SIZE": "4", "RANK_SIZE": "4",
            "MS_WORKER_NUM": "4", "GROUP_RANK": str(node), "MS_NODE_RANK": str(node), "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": master, "MS_SCHED_HOST": master, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0",
        }  # fmt: skip
        assert {name: env[name] for name in told} == told
        assert "NCCL_SOCKET_IFNAME" not in env
        table = json.loads(Path(env["RANK_TABLE_FILE"]).read_text())
        assert [server["server_id"] for server in table["server_list"]] == [hosts.net.address(0), hosts.net.address(1)]
        assert [[d["rank_id"] for d in server["device"]] for server in table["server_list"]] == [["0", "1", "2"], ["3"]]
    assert len({(env["MASTER_PORT"], env["MSRUN_JOB_ID"], env["MS_SCHED_PORT"]) for env in envs}) == 1


@pytest.mark.slow
def test_without_node_rank_hosts_are_numbered_by_address(hosts: Hosts, workers: Path, tmp_path: Path) -> None:
    """10.77.0.9 comes before 10.77.0.10, which has the scheduler and comes first as text."""
    words = ("--worker_num=2", "--local_worker_num=1", workers / "record.py")
    jobs = [hosts.start(1, *words, node=1, master=1), hosts.start(0, *words, node=0, master=1)]
    assert [job.code for job in finish_all(jobs)] == [0, 0]
    assert record(tmp_path, 0)["MASTER_ADDR"] == hosts.net.address(1)
    assert "this is node 1 (" in jobs[0].stderr and "this is node 0 (" in jobs[1].stderr
    assert (tmp_path / "log_output" / "worker_0.log").exists() and (
        tmp_path / "log_output" / "node_1" / "worker_1.log"
    ).exists()


def test_missing_host_is_named_on_every_host_that_came(hosts: Hosts, workers: Path) -> None:
    words = ("--worker_num=6", "--local_worker_num=2", "--cluster_time_out=3", workers / "wait.py")
    jobs = [hosts.start(host, f"--node_rank={host}", *words, node=host) for host in (0, 1)]
    for job in finish_all(jobs):
        assert job.code == 124
        (error,) = job.errors
        assert "--cluster_time_out 3: 4 of 6 registered, missing: ranks 4-5, from node 2 on" in error
        assert f", {hosts.net.address(1)}) with 2" in error


def test_absent_scheduler_is_named(hosts: Hosts, workers: Path) -> None:
    words = ("--worker_num=2", "--local_worker_num=1", "--node_rank=1", "--cluster_time_out=0", workers / "wait.py")
    job = hosts.start(1, *words).finish()
    assert job.code == 124
    assert f"--cluster_time_out 0: no scheduler at {hosts.net.address(0)}:8118 (Connection refused)" in job.stderr


@pytest.mark.slow
def test_those_who_do_not_belong_are_refused_and_the_job_goes_on(hosts: Hosts, workers: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right\n")
    (tmp_path / "token").chmod(0o600)
    right = ("--token_file=token", workers / "record.py")
    three = ("--worker_num=3", "--local_worker_num=1")
    master = hosts.start(0, *three, "--node_rank=0", *right, node=0, MSRUN_TOKEN="unused")
    wait_until(lambda: "registered with 1 worker" in master.stderr, "the first host has come")
    stranger = (
        "import socket, sys; s = socket.create_connection((sys.argv[1], 8118)); "
        "s.sendall(b'GET / HTTP/1.1' * 99); print(s.recv(9999)[:0], s.recv(9999))"
    )
    hosts.runner.start(
        "-c", stranger, hosts.net.address(0), cwd=tmp_path, prefix=hosts.net.prefix(2), command=["python3"]
    ).finish()
    wrong = {
        "wrong token": ([*three, "--node_rank=1", right[1]], {"MSRUN_TOKEN": "left"}),
        "--worker_num 4, but 3 at the scheduler": (["--worker_num=4", *three[1:], "--node_rank=1", *right], {}),
        "--max_restarts 1, but 0 at the scheduler": ([*three, "--node_rank=1", "--max_restarts=1", *right], {}),
    }
    refused = {reason: hosts.start(2, *words, node=2, **env) for reason, (words, env) in wrong.items()}
    for reason, job in refused.items():
        ended = job.finish()
        assert ended.code == 3 and f"the scheduler has refused this host: {reason}" in ended.errors[0], ended
    good = [hosts.start(1, *three, "--node_rank=1", *right, node=1)]
    wait_until(lambda: f", {hosts.net.address(1)}) registered" in master.stderr, "the second host has come")
    doubled = hosts.start(2, *three, "--node_rank=1", *right, node=2).finish()
    assert doubled.code == 3 and "--node_rank 1 is taken by node 1 (" in doubled.errors[0], doubled
    good.append(hosts.start(2, *three, "--node_rank=2", *right, node=2))
    ended = master.finish()
    assert [ended.code, *(job.code for job in finish_all(good))] == [0, 0, 0]
    assert f"refused {hosts.net.address(2)}:" in ended.stderr and "no msrun host: message of" in ended.stderr
    for reason in (*refused, "--node_rank 1 is taken by"):
        assert reason in ended.stderr
    assert not {"right", "unused"} & set(record(tmp_path, 0).values())


@pytest.mark.slow
def test_extra_host_is_refused_and_an_interrupt_on_one_host_ends_all(hosts: Hosts, workers: Path) -> None:
    words = ("--worker_num=2", "--local_worker_num=1")
    jobs = [hosts.start(0, *words, "--node_rank=0", workers / "wait.py", node=0)]
    wait_until(lambda: "registered with 1 worker" in jobs[0].stderr, "the first host has come")
    jobs.append(hosts.start(1, *words, "--node_rank=1", workers / "wait.py", node=1))
    hosts.wait_for_workers(jobs, 2)
    extra = hosts.start(2, *words, "--node_rank=1", workers / "wait.py", node=2).finish()
    assert extra.code == 3
    assert "refused this host: an extra host: the job is complete with 2 workers on 2 hosts" in extra.stderr
    jobs[1].send(signal.SIGINT)
    for ended in finish_all(jobs):
        assert ended.code == 130
        assert re.fullmatch(r"msrun: error: node 1 \(.*\): stopped by SIGINT", ended.errors[0])
    assert "an extra host" in jobs[0].stderr


@pytest.mark.slow
def test_first_failure_is_named_on_every_host(hosts: Hosts, workers: Path) -> None:
    jobs = hosts.start_all([1, 2], workers / "end.py", "2", "7")
    for ended in finish_all(jobs):
        assert ended.code == 7, ended.stderr
        assert ended.errors[0].startswith("msrun: error: rank 2 on node 1 (")
        assert f", {hosts.net.address(1)}) failed first: exit code 7, after " in ended.errors[0]
        failure = ended.read_json("failure.json")
        assert failure["exit_code"] == 7
        assert failure["first_failure"]["global_rank"] == 2
        assert failure["first_failure"]["excerpt"] == ["rank 2 begins"]
        assert failure["reason"] == ended.errors[0].removeprefix("msrun: error: ")
    assert jobs[0].log_dir.joinpath("failure.json").exists()


@pytest.mark.parametrize("killed", one_fast(1, 0))
def test_killed_launcher_ends_the_job_on_the_other_host(hosts: Hosts, workers: Path, killed: int) -> None:
    jobs = hosts.start_all([2, 2], workers / "wait.py")
    hosts.wait_for_workers(jobs, 4)
    jobs[killed].send(signal.SIGKILL)
    ended = jobs[1 - killed].finish(15)
    assert ended.code == 3
    who = "lost the scheduler at" if killed == 0 else "lost node 1 ("
    assert who in ended.errors[0] and "has closed its connection" in ended.errors[0]
    jobs[killed].finish()


@pytest.mark.slow
def test_killed_agent_of_the_host_with_the_scheduler_ends_the_job_on_all(hosts: Hosts, workers: Path) -> None:
    jobs = hosts.start_all([1, 1], workers / "wait.py")
    hosts.wait_for_workers(jobs, 2)
    (agent,) = Path(f"/proc/{jobs[0].pid}/task/{jobs[0].pid}/children").read_text().split()
    os.kill(int(agent), signal.SIGKILL)
    for ended in finish_all(jobs):
        assert ended.code == 3
        assert re.match(r"msrun: error: node 0 \(.*\): .*(SIGKILL|killed)", ended.errors[0]), ended.errors


@pytest.mark.slow
def test_cut_host_ends_the_job_on_both_sides(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    with HostNet(2) as net:
        hosts = Hosts(msrun, net, tmp_path)
        jobs = hosts.start_all([1, 1], "--heartbeat_time_out=1.5", workers / "wait.py")
        hosts.wait_for_workers(jobs, 2)
        net.cut(1)
        ended = finish_all(jobs)
    assert [job.code for job in ended] == [3, 3], ended[0].stderr
    assert "lost node 1 (" in ended[0].errors[0] and "no sign of life" in ended[0].errors[0]
    assert "lost the scheduler at" in ended[1].errors[0] and "no sign of life" in ended[1].errors[0]


@pytest.mark.slow
def test_host_that_cannot_begin_ends_the_job_everywhere(hosts: Hosts, workers: Path, tmp_path: Path) -> None:
    program = (
        "from msrun.errors import UsageError\nfrom msrun.launch.directory.lock import JobLock\n"
        "def take(lock):\n    raise UsageError('--log_dir x: cannot lock it')\n"
        "JobLock.take = take\nfrom msrun.cli import main\nmain()\n"
    )
    words = ["--worker_num=2", "--local_worker_num=1", workers / "wait.py"]
    first = hosts.start(0, "--node_rank=0", *words, node=0)
    other = [f"--master_addr={hosts.net.address(0)}", "--node_rank=1", *words]
    command = [sys.executable, "-c", program]
    second = hosts.runner.start(*other, cwd=tmp_path, prefix=hosts.net.prefix(1), command=command)
    ended = finish_all([first, second])
    assert [job.code for job in ended] == [2, 2]
    assert re.match(r"msrun: error: node 1 \(.*\): --log_dir x: cannot lock it", ended[0].errors[0])
    assert not (tmp_path / "ready_1").exists()


@pytest.mark.slow
def test_interrupt_before_all_have_come_calls_the_job_off(hosts: Hosts, workers: Path) -> None:
    words = ("--worker_num=3", "--local_worker_num=1", workers / "wait.py")
    jobs = [hosts.start(host, f"--node_rank={host}", *words, node=host) for host in (0, 1)]
    wait_until(lambda: "registered with the scheduler" in jobs[1].stderr, "node 1 has registered")
    jobs[0].send(signal.SIGTERM)
    ended = finish_all(jobs)
    assert [job.code for job in ended] == [143, 143]
    assert "the scheduler's host gave up: stopped by SIGTERM before all hosts had come" in ended[1].errors[0]


@pytest.mark.slow
def test_job_on_several_hosts_is_stopped_from_any_of_them(hosts: Hosts, workers: Path, tmp_path: Path) -> None:
    jobs = hosts.start_all([1, 1], "--join=False", workers / "wait.py")
    assert [job.code for job in finish_all(jobs)] == [0, 0]
    assert f"logs in {latest_job(tmp_path / 'log_output')}/node_1\n" in jobs[1].stderr
    wait_until(lambda: all((tmp_path / f"ready_{rank}").exists() for rank in range(2)), "workers have begun")
    stopped = hosts.runner.start("--stop=log_output/node_1", cwd=tmp_path, prefix=hosts.net.prefix(1)).finish()
    assert stopped.code == 0, stopped.stderr
    failures = [tmp_path / "log_output" / name / "failure.json" for name in ("", "node_1")]
    wait_until(lambda: all(path.exists() for path in failures), "both hosts have told why")
    reasons = {json.loads(path.read_text())["reason"] for path in failures}
    assert len(reasons) == 1 and reasons.pop().endswith(": stopped by SIGTERM")


@pytest.mark.slow
def test_stuck_job_leaves_the_stacks_of_every_host(hosts: Hosts, workers: Path, tmp_path: Path) -> None:
    ended = finish_all(hosts.start_all([1, 1], "--hang_time_out=1", workers / "wait.py"))
    assert [job.code for job in ended] == [124, 124]
    assert ended[0].errors == ended[1].errors
    assert all("no progress for" in job.errors[0] for job in ended)
    for name in ("worker_0.log", "node_1/worker_1.log"):
        assert "wait.py" in (tmp_path / "log_output" / name).read_text()


@pytest.mark.slow
def test_rank_that_holds_up_the_ranks_of_another_host_is_named(hosts: Hosts, workers: Path) -> None:
    ended = finish_all(hosts.start_all([1, 3], "--hang_time_out=3", workers / "runtime" / "stuck.py", "sleep"))
    assert [job.code for job in ended] == [124, 124], ended
    for job in ended:
        assert re.search(r"node 1 \(.*\): --hang_time_out 3: no progress for . s; behind: rank 1 ", job.errors[0])


@pytest.mark.slow
def test_hosts_meet_over_ipv6_too(hosts: Hosts, workers: Path, tmp_path: Path) -> None:
    if not hosts.net.has_ipv6:
        pytest.skip("no IPv6 here")
    master = f"--master_addr={hosts.net.address6(0)}"
    assert [job.code for job in finish_all(hosts.start_all([1, 1], master, workers / "record.py"))] == [0, 0]
    env = record(tmp_path, 1)
    assert (env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"]) == (hosts.net.address6(0), "eth0")


@pytest.mark.slow
def test_whole_job_starts_again_on_all_hosts(hosts: Hosts, workers: Path, tmp_path: Path) -> None:
    jobs = hosts.start_all([1, 2], "--max_restarts=1", workers / "attempt.py", "code=7")
    for ended in finish_all(jobs):
        assert ended.code == 0, ended.stderr
        assert "failed first: exit code 7" in ended.stderr and "restart 1" in ended.stderr
        assert "all 3 workers on 2 hosts finished successfully after restart 1" in ended.stderr
    assert sorted(path.name for path in tmp_path.glob("record_*")) == [
        f"record_{rank}_{attempt}.json" for rank in range(3) for attempt in range(2)
    ]


@pytest.mark.slow
def test_pause_of_the_host_with_the_scheduler_pauses_all(hosts: Hosts, workers: Path, tmp_path: Path) -> None:
    """The other host's msrun, which is stopped by nobody, waits with its workers, longer than it may hear nothing."""
    jobs = hosts.start_all([1, 1], "--heartbeat_time_out=1", "--hang_time_out=1", workers / "grow.py")
    files = [tmp_path / f"beats_{rank}{which}" for rank in range(2) for which in ("", "_child")]
    jobs[0].wait_for(*files)
    jobs[0].send(signal.SIGTSTP)
    wait_until(lambda: process_state(jobs[0].pid) == "T", "msrun is stopped")
    began, sizes = time.monotonic(), [0]

    def have_been_still() -> bool:
        nonlocal began, sizes
        now = [file.stat().st_size for file in files]
        began, sizes = (began, sizes) if now == sizes else (time.monotonic(), now)
        return time.monotonic() - began > 2.5

    wait_until(have_been_still, "all workers are still", 20)
    (tmp_path / "go").touch()
    jobs[0].send(signal.SIGCONT)
    assert [job.code for job in finish_all(jobs)] == [0, 0]


@pytest.mark.slow
def test_store_is_fresh_after_a_restart(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\nimport torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nvalue = torch.ones(1)\ndist.all_reduce(value)\n"
        "print('sum', value.item(), flush=True)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1':\n    os._exit(5)\n"
        "dist.all_reduce(value)\nprint('sum', value.item())\ndist.destroy_process_group()\n"
    )
    ended = finish_all(hosts.start_all([1, 1], "--max_restarts=1", "train.py"))
    assert [job.code for job in ended] == [0, 0], ended
    assert "rank 1 on node 1 (" in ended[0].stderr
    assert "sum 4.0" in (tmp_path / "log_output" / "worker_0.log").read_text()


@pytest.mark.slow
def test_rank_that_ended_well_before_another_host_needed_it_is_named(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\nimport torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nvalue = torch.ones(1)\ndist.all_reduce(value)\n"
        "if os.environ['RANK'] == '1':\n    sys.exit(0)\n"
        "while 'exited' not in Path('log_output/node_1/events.jsonl').read_text():\n    time.sleep(0.01)\n"
        "dist.all_reduce(value)\n"
    )
    for ended in finish_all(hosts.start_all([1, 1], "train.py")):
        assert ended.code == 1
        assert re.fullmatch(
            r"msrun: error: rank 1 on node 1 exited early \(code 0\); "
            r"rank 0 on node 0 \(.*\) then failed: exit code 1, after \S+ s",
            ended.errors[0],
        ), ended.errors


def write_table(net: HostNet, path: Path, ranks: Sequence[Sequence[int]]) -> None:
    servers = [
        {
            "server_id": net.address(host),
            "device": [{"device_id": str(index), "rank_id": str(rank)} for index, rank in enumerate(own)],
        }
        for host, own in enumerate(ranks)
    ]
    path.write_text(
        json.dumps({"version": "1.0", "server_count": str(len(ranks)), "server_list": servers, "status": "completed"})
    )


@pytest.mark.slow
def test_table_of_several_servers_is_the_list_of_hosts(hosts: Hosts, workers: Path, tmp_path: Path) -> None:
    """Rank 0 is on the second host: that one is node 0 and runs the scheduler."""
    write_table(hosts.net, tmp_path / "table.json", [[2], [0, 1]])
    words = ("--rank_table_file=table.json", workers / "record.py")
    cwd = {"cwd": tmp_path}
    jobs = [
        hosts.runner.start(*words, prefix=hosts.net.prefix(0), log_dir="log_output/node_1", **cwd),
        hosts.runner.start(*words, prefix=hosts.net.prefix(1), **cwd),
    ]
    assert [job.code for job in finish_all(jobs)] == [0, 0], [job.stderr for job in jobs]
    envs = [record(tmp_path, rank) for rank in range(3)]
    assert [(env["GROUP_RANK"], env["LOCAL_RANK"], env["DEVICE_ID"]) for env in envs] == [
        ("0", "0", "0"),
        ("0", "1", "1"),
        ("1", "0", "0"),
    ]
    assert {env["MASTER_ADDR"] for env in envs} == {hosts.net.address(1)}
    assert {env["RANK_TABLE_FILE"] for env in envs} == {str(tmp_path / "table.json")}


def test_host_that_is_not_in_the_table_is_refused_before_anything_starts(
    hosts: Hosts, workers: Path, tmp_path: Path
) -> None:
    write_table(hosts.net, tmp_path / "table.json", [[0], [1]])
    words = ("--rank_table_file=table.json", workers / "record.py")
    ended = hosts.runner.start(*words, prefix=hosts.net.prefix(2), cwd=tmp_path).finish()
    assert ended.code == 2
    assert f"is none of its servers ({hosts.net.address(0)}, {hosts.net.address(1)})" in ended.errors[0]
    wrong = hosts.runner.start("--worker_num=8", *words, prefix=hosts.net.prefix(1), cwd=tmp_path).finish()
    assert wrong.code == 2 and "--worker_num 8: --rank_table_file" in wrong.errors[0]
    plan = hosts.runner.start("--dry_run", *words, prefix=hosts.net.prefix(1), cwd=tmp_path).finish()
    assert plan.code == 0
    shown = plan.stdout.decode()
    assert "2 workers on 2 hosts" in shown and all(hosts.net.address(host) in shown for host in (0, 1))
