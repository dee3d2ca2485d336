"""Reading data in ranks: worker processes beside threads, resuming, and ranks that pass the same batch.

One job of two ranks runs the cases of tests/cases/data_loading.py, from a script that runs when it is imported.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from job_runner import wait_until

RANKS = 2

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def outcomes(msrun_of_module, workers, tmp_path_factory):
    """What each case found, per rank. The job leaves no process, which its runner proves."""
    folder = tmp_path_factory.mktemp("data")
    script = workers / "runtime" / "modes.py"
    msrun_of_module.run_world(RANKS, script, folder / "result.json", "data_loading", cwd=folder, deadline_s=100.0)
    found = json.loads((folder / "result.json").read_text())
    for ranks in found.values():
        for rank in ranks:
            assert "error" not in rank, rank["error"]
    return found


def test_workers_change_neither_the_steps_nor_what_transforms_functions_and_training_draw(outcomes):
    """Ranks read different parts of every global batch."""
    for rank in outcomes["workers"]:
        none, two = (rank["epochs"][workers] for workers in "02")
        assert none == two
        assert none[0] != none[1]
        assert rank["next"] == rank["right"]
    first, second = (rank["epochs"]["2"][0] for rank in outcomes["workers"])
    for own, other in zip(first, second, strict=True):
        assert not {*own[4:]} & {*other[4:]}


def test_a_state_taken_within_an_epoch_goes_on_with_the_next_step(outcomes):
    for rank in outcomes["resuming"]:
        assert rank["state"] == {"epoch": 1, "step": 1, "seed": 0, "global_batch_size": 8, "steps_per_epoch": 3}
        assert rank["rest"] == rank["whole"][1:]
        assert len(rank["after"]) == len(rank["whole"])


def test_an_error_in_a_worker_names_the_sample_and_the_users_line(outcomes):
    found = outcomes["failures"]
    (failed,) = [rank for rank in found if rank["function"]]
    assert failed["function"] == failed["same"]
    assert failed["function"]["kind"] == "DataError"
    text = failed["function"]["text"]
    assert text.endswith("map: refuse_nine failed on sample 9: ValueError: nine is not allowed")
    path, line = text.split(": ")[0].split(":")
    assert "raise ValueError" in Path(path).read_text().splitlines()[int(line) - 1]


def test_the_same_batch_on_all_ranks_is_warned_of_where_each_should_pass_a_part(outcomes):
    first, second = outcomes["warnings"]
    for mode in ("semi_auto", "data_parallel"):
        (line,) = first[mode]
        assert line.startswith("all 2 ranks got the same batch in each of the first 2 steps")
        assert ("full_batch" in line) is (mode == "semi_auto")
    assert [mode for mode, lines in first.items() if lines] == ["semi_auto", "data_parallel"]
    assert not any(second.values())


READS_AND_WAITS = """
import sys, time
import numpy as np
from msrun.data import NumpySlicesDataset, config

config.set_multiprocessing_start_method(sys.argv[1])
dataset = NumpySlicesDataset(np.arange(64), num_parallel_workers=2).batch(2)
steps = iter(dataset)
next(steps)
print("reading", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_workers_end_with_the_process_that_reads_also_when_it_is_killed(tmp_path, start_method):
    script = tmp_path / "reads.py"
    script.write_text(READS_AND_WAITS)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "torch.py").write_text("another module of this name in the working directory")
    command = [sys.executable, script, start_method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=elsewhere) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        started = psutil.Process(reader.pid).children(recursive=True)
        assert len(started) >= 2
        os.kill(reader.pid, signal.SIGKILL)
        wait_until(lambda: not any(_lives(process) for process in started), "workers gone", 10.0)


def _lives(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
