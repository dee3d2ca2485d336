"""--max_restarts: the whole job again, with everything kept that should stay and nothing that should go."""

import json

import pytest
from asked_cases import one_fast
from job_runner import WORKERS

from msrun import contract


def records(folder, attempt):
    return [json.loads((folder / f"record_{rank}_{attempt}.json").read_text()) for rank in range(3)]


def run(msrun, cwd, how, *options):
    return msrun.run("--worker_num=3", *options, WORKERS / "attempt.py", how, cwd=cwd)


@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_failed_job_starts_again_and_ends_well(msrun, tmp_path, method):
    finished = run(msrun, tmp_path, "code=7:2", "--max_restarts=2", "--start_method", method)
    assert finished.code == 0, finished.stderr
    assert "rank 1 failed first: exit code 7; starting all workers again now, restart 1" in finished.stderr
    assert "starting all workers again in 1 s, restart 2" in finished.stderr
    for attempt in range(2):
        kept = finished.log_dir / f"worker_1.attempt_{attempt}.log"
        assert f"  rank 1, log: {kept}\n  | rank 1 in attempt {attempt}\n" in finished.stderr
    assert "all 3 workers finished successfully after restart 2 in " in finished.stderr
    assert not (finished.log_dir / contract.FAILURE_JSON).exists()
    for rank in range(3):
        assert finished.log(rank).decode() == f"rank {rank} in attempt 2\n"
        for attempt in range(2):
            kept = finished.log_dir / f"worker_{rank}.attempt_{attempt}.log"
            assert kept.read_text() == f"rank {rank} in attempt {attempt}\n"
    restarts = [event for event in finished.events if event["event"] == "restarting"]
    assert [(event["attempt"], event["delay_s"]) for event in restarts] == [(1, 0.0), (2, 1.0)]
    scheduler = (finished.log_dir / "scheduler.log").read_text()
    assert "starting again now, attempt 1: rank 1 failed first: exit code 7" in scheduler
    assert records(tmp_path, 2) == records(tmp_path, 0), "ranks, ports and the job's id stay the same"
    assert records(tmp_path, 0)[1]["RANK"] == "1" and records(tmp_path, 0)[0]["TORCHELASTIC_MAX_RESTARTS"] == "2"


@pytest.mark.slow
def test_what_an_attempt_left_behind_is_gone_before_the_next_one_starts(msrun, tmp_path):
    finished = run(msrun, tmp_path, "leave", "--max_restarts=1")
    assert finished.code == 0, finished.stderr
    assert all(record["left is gone"] for record in records(tmp_path, 1))


BEGINS = {"plain torch": "dist.init_process_group('gloo')\n", "the runtime": "from msrun.runtime import init\ninit()\n"}


@pytest.mark.slow
@pytest.mark.parametrize("begin", BEGINS)
def test_ranks_meet_again_in_the_next_attempt(msrun, tmp_path, begin):
    (tmp_path / "w.py").write_text(
        f"import os, sys, torch, torch.distributed as dist\n{BEGINS[begin]}"
        "x = torch.ones(1)\ndist.all_reduce(x)\nprint('sum', x.item(), flush=True)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 1: os._exit(7)\n"
        "dist.barrier()\ndist.destroy_process_group()\n"
    )
    finished = msrun.run("--worker_num=2", "--max_restarts=1", "w.py", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    assert finished.log(0) == b"sum 2.0\n"
