"""Jobs on several hosts, rehearsed on this machine: ranks, training, failures, restarts, and what is left of them."""

import json
import re
import sys

import pytest
from asked_cases import one_fast
from job_runner import WORKERS, read_record
from plans import without_what_is_chosen_at_start
from rank_tables import plain_table


@pytest.mark.slow
def test_workers_see_hosts_of_their_own(rehearsals):
    """What a shell here has set comes as far as over SSH, and logs are sent; the table given has a host for each."""
    table = rehearsals.cwd / "table.json"
    table.write_text(json.dumps(plain_table()))
    options = [f"--rank_table_file={table}", "--tail_worker_log=all", "--worker_log_name={hostname}_{ip}"]
    program = ["sh", "-c", f"echo from $RANK; exec {sys.executable} {WORKERS}/record.py"]
    job = rehearsals.run("2x2", *options, *program, FOO="1", NCCL_DEBUG="INFO")
    assert job.code == 0, job.stderr
    env = [read_record(rehearsals.cwd, rank)["env"] for rank in range(4)]
    assert [e["LOCAL_RANK"] for e in env] == ["0", "1", "0", "1"]
    assert [(e["GROUP_RANK"], e["MS_NODE_RANK"]) for e in env] == [("0", "0"), ("0", "0"), ("1", "1"), ("1", "1")]
    meeting = {(e["MASTER_ADDR"], e["GROUP_WORLD_SIZE"], e["GLOO_SOCKET_IFNAME"]) for e in env}
    assert meeting == {("127.0.0.2", "2", "lo")}
    assert {(e.get("FOO"), e["NCCL_DEBUG"]) for e in env} == {(None, "INFO")}
    assert (job.log_dir / "host1_127.0.0.3_3.log").read_bytes() == b"from 3\n"
    assert sorted(job.stdout.splitlines()) == [b"[host%d:%d] from %d" % (rank // 2, rank, rank) for rank in range(4)]
    fleet = [(host["name"], host["address"]) for host in job.read_json("plan.json")["fleet"]]
    assert fleet == [("host0", "127.0.0.2"), ("host1", "127.0.0.3")]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), one_fast(("SIGSEGV", 139), ("raise", 1)))
def test_first_failed_worker_ends_the_job_on_every_host(rehearsals, how, code):
    job = rehearsals.run("2x2", WORKERS / "end.py", "3", how)
    assert job.code == code
    words = r"msrun: error: rank 3 on node 1 \(host1, 127\.0\.0\.3\) failed first: (exit code 1|signal SIGSEGV)"
    assert re.match(words, job.errors[0])
    assert re.search(r"\n  ranks 0-.* (not started|stopped by msrun)", job.stderr)
    failure = job.read_json("failure.json")
    assert failure["first_failure"]["log"] == str(job.log_dir / "worker_3.log")
    assert [other["global_rank"] for other in failure["others"]] == [0, 1, 2]
    if how == "raise":
        assert "  | RuntimeError: the loss is gone" in job.stderr


@pytest.mark.parametrize("hosts", one_fast("2x2", "1x2"))
def test_plan_asked_for_is_what_a_run_carries_out(rehearsals, hosts):
    """Devices, cores, interfaces and paths of all hosts; nothing is started for it, and secrets are nowhere in it."""
    table = rehearsals.cwd / "table.json"
    table.write_text(json.dumps(plain_table(num_servers=int(hosts[0]))))
    options = ["--bind_core", "--max_restarts=1", "--env=API_KEY=sesame", f"--rank_table_file={table}"]
    program = [WORKERS / "record.py", "--lr", "0.1"]
    asked = rehearsals.run(hosts, *options, "--plan=json", *program)
    assert asked.code == 0 and not (rehearsals.cwd / "log_output").exists(), asked.stderr
    text = rehearsals.run(hosts, *options, "--plan", *program).stdout.decode()
    run = rehearsals.run(hosts, *options, *program)
    assert run.code == 0, run.stderr
    real = run.read_plan()
    assert without_what_is_chosen_at_start(json.loads(asked.stdout)) == without_what_is_chosen_at_start(real)
    assert json.loads(asked.stdout)["job_id"] == "JOB", "two plans are the same"
    assert "sesame" not in text + asked.stdout.decode()
    for worker in real["hosts"][-1]["workers"]:
        assert f"  {worker['log']}\n" in text and worker["cpus"]
