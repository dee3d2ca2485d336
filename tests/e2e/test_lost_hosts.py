"""Jobs that lose hosts and go on: on spare hosts, on fewer, from the newest checkpoint; and those that cannot."""

import json
import os
import signal

import numpy as np
import pytest
from asked_cases import one_fast
from job_runner import WORKER_IMPORTS, WORKERS
from loss_lines import losses

ATTEMPTS = """
import json, os, time
from pathlib import Path
names = ('RANK', 'WORLD_SIZE', 'TORCHELASTIC_RESTART_COUNT', 'TORCHELASTIC_MAX_RESTARTS', 'MS_WORKER_NUM')
env = {name: os.environ[name] for name in names}
table = json.loads(Path(os.environ['RANK_TABLE_FILE']).read_text())
env['hosts'] = [server['server_id'] for server in table['server_list']]
attempt, rank = env['TORCHELASTIC_RESTART_COUNT'], env['RANK']
print('attempt', attempt, flush=True)
Path(f'up.{attempt}.{rank}.new').write_text(json.dumps(env))
os.rename(f'up.{attempt}.{rank}.new', f'up_{attempt}_{rank}')
while not Path(f'go_{attempt}').exists():
    time.sleep(0.01)
"""


@pytest.fixture
def script(tmp_path):
    """A program that says which attempt it is in, and goes on when that is wanted."""
    path = tmp_path / "attempts.py"
    path.write_text(ATTEMPTS)
    return path


def records(place, job, attempt, count):
    """Return what the workers of an attempt see, once all of them run."""
    paths = [place.cwd / f"up_{attempt}_{rank}" for rank in range(count)]
    job.wait_for(*paths)
    return [json.loads(path.read_text()) for path in paths]


def end_well(rehearsals, job, attempt):
    """Let an attempt come to its end; nothing of the job is left."""
    (rehearsals.cwd / f"go_{attempt}").touch()
    ended = job.finish()
    assert ended.code == 0, ended.stderr
    rehearsals.runner.prove_nothing_left()
    return ended


def kill_agent(rehearsals, number):
    """Kill an agent, by its number among all of the job: hosts that stay keep theirs."""
    os.kill(rehearsals.agent(number), signal.SIGKILL)


@pytest.mark.parametrize("how", one_fast("drained", "killed"))
def test_spare_host_takes_the_place_of_a_lost_one(rehearsals, msrun_here, script, how):
    """Logs, table, plan and environment are those of the new hosts; what was before is kept."""
    job = rehearsals.start("3x1", "--spares=1", "--max_restarts=3", script)
    first = records(rehearsals, job, 0, 2)
    assert {tuple(record["hosts"]) for record in first} == {("127.0.0.2", "127.0.0.3")}
    stays, spare = rehearsals.agent(1), rehearsals.agent(2)
    if how == "killed":
        kill_agent(rehearsals, 0)
    else:
        stranger = msrun_here("drain", "host7", cwd=rehearsals.cwd)
        assert (stranger.code, len(stranger.errors)) == (2, 1)
        assert "host7: the job has no such host" in stranger.stderr and "host0, host1" in stranger.stderr
        asked = msrun_here("drain", "host0", cwd=rehearsals.cwd)
        assert asked.code == 0 and b"host0 leaves job" in asked.stdout, asked.stderr
    second = records(rehearsals, job, 1, 2)
    assert {tuple(record["hosts"]) for record in second} == {("127.0.0.3", "127.0.0.4")}
    assert [record["TORCHELASTIC_MAX_RESTARTS"] for record in first + second] == ["3"] * 4
    assert rehearsals.agent(1) == stays, "the agent of a host that is well stays"
    assert rehearsals.agent(2) == spare, "a spare host is ready before it is needed"
    ended = end_well(rehearsals, job, 1)
    assert "starting again on host1, host2" in ended.stderr
    assert "all 2 workers on 2 hosts finished successfully after restart 1 in " in ended.stderr
    assert [host["name"] for host in ended.read_json("plan.json")["hosts"]] == ["host1", "host2"]
    assert [ended.log(rank) for rank in range(2)] == [b"attempt 1\n"] * 2
    assert (ended.log_dir / "worker_0.attempt_0.log").read_bytes() == b"attempt 0\n"
    assert [event["attempt"] for event in ended.events if event["event"] == "restarting"] == [1]
    status = msrun_here("--status", "log_output", cwd=rehearsals.cwd).stdout.decode()
    assert "hosts host1, host2" in status and "started again" in status
    assert msrun_here("drain", "host1", cwd=rehearsals.cwd).code == 2, "it is over"


def test_job_that_has_too_few_hosts_left_ends_and_says_so(rehearsals, msrun_here, script):
    job = rehearsals.start("2x1", "--min_hosts=2", "--max_restarts=3", script)
    records(rehearsals, job, 0, 2)
    assert msrun_here("drain", "host1", cwd=rehearsals.cwd).code == 0
    ended = job.finish()
    assert ended.code == 128 + signal.SIGTERM
    few = "not started again: fewer than 2 hosts are left (--min_hosts); left by a signal: host1"
    assert few in ended.stderr


@pytest.mark.slow
def test_host_that_leaves_by_a_signal_is_replaced_and_its_workers_may_save(rehearsals, script):
    """As a reboot, a drained node or a reclaimed spot machine ends it: the workers there may save first."""
    saves = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: (Path(f'saved_{rank}').touch(), sys.exit(0)))\n"
    )
    text = script.read_text()
    script.write_text(text.replace("print('attempt'", f"{saves}print('attempt'"))
    job = rehearsals.start("3x1", "--spares=1", "--max_restarts=3", script)
    records(rehearsals, job, 0, 2)
    os.kill(rehearsals.agent(1), signal.SIGTERM)
    second = records(rehearsals, job, 1, 2)
    assert {tuple(record["hosts"]) for record in second} == {("127.0.0.2", "127.0.0.4")}
    assert (rehearsals.cwd / "saved_1").exists()
    ended = end_well(rehearsals, job, 1)
    assert "host1, 127.0.0.3): stopped by SIGTERM\n" in ended.stderr
    assert "starting again on host0, host2; left by a signal: host1\n" in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_training_goes_on_with_fewer_ranks_to_the_losses_of_one_process(rehearsals):
    """Four ranks on two hosts, of which one fails: two ranks end the training from the checkpoint of step 4."""
    program = WORKERS / "runtime" / "surviving.py"
    alone = rehearsals.runner.run("--worker_num=1", program, "alone", cwd=rehearsals.cwd, deadline_s=150.0)
    assert alone.code == 0, alone.stderr
    right = losses(alone.log(0).decode())
    assert len(right) == 15
    imports = [f"--preload={name}" for name in WORKER_IMPORTS]
    options = ["--min_hosts=1", "--max_restarts=2", *imports]
    job = rehearsals.start("2x2", *options, program, "checkpoints", "127.0.0.3").finish(300.0)
    assert job.code == 0, job.stderr
    assert job.read_json("plan.json")["world_size"] == 2
    np.testing.assert_allclose(losses(job.log(0).decode()), right[4:], rtol=1e-9)
    rehearsals.runner.prove_nothing_left()
