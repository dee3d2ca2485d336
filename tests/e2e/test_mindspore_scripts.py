"""Scripts that import `mindspore`, under msrun as they are: MindSpore where it is installed, else msrun.mindspore.

MINDSPORE_PYTHON names a Python with MindSpore and what msrun needs: `make mindspore`.
"""

import pytest
from job_runner import PRELOAD, wait_until

WORDS = """
import os
import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import get_group_size, get_rank, init

ms.set_context(device_target="CPU")
init()
total = ops.AllReduce()(Tensor(np.array([get_rank() + 1.0], np.float32)))
print("rank", get_rank(), "of", get_group_size(), "sum", float(total[0]), ms.__name__)
"""
FAILS_ONCE = """
if get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("the first time")
print("again", float(ops.AllReduce()(total)[0]))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(WORDS)
    return path


def log_of(folder, rank):
    return (folder / "log_output" / f"worker_{rank}.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "exec"])
def test_import_mindspore_finds_ours_where_there_is_no_other(msrun, script, method):
    options = ("--worker_num=2", "--mindspore=torch", *PRELOAD, f"--start_method={method}")
    job = msrun.run(*options, script.name, cwd=script.parent, env=msrun.warm("mindspore"))
    assert job.code == 0, job.stderr
    assert "msrun: mindspore is msrun.mindspore, on torch" in job.stderr
    assert all(f"rank {rank} of 2 sum 3.0" in log_of(script.parent, rank) for rank in (0, 1))


@pytest.mark.slow
def test_ranks_go_on_when_the_first_pytest_ends_without_a_test(msrun, script, tmp_path):
    with script.open("a") as file:
        file.write(
            "import pathlib, time\nwhile get_rank() and not pathlib.Path('go_on').exists():\n    time.sleep(0.01)\n"
        )
    job = msrun.start("--worker_num=2", "--mindspore=torch", "pytest", "-s", script.name, cwd=tmp_path)
    events = tmp_path / "log_output" / "events.jsonl"
    job.wait_for(events)
    wait_until(lambda: '"exited"' in events.read_text(), "rank 0 has ended")
    (tmp_path / "go_on").touch()
    ended = job.finish()
    assert ended.code == 5
    assert [event["status"] >> 8 for event in ended.events if event["event"] == "exited"] == [5, 5]
    assert "pytest found no test there; it had run the file to look for some" in ended.stderr
    assert all(f"rank {rank} of 2 sum 3.0" in log_of(tmp_path, rank) for rank in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--worker_num=2",), ("--rehearse=2x1",)], ids=["one host", "two hosts"])
def test_workers_of_real_mindspore_meet_and_start_again(msrun, script, mindspore_python, words):
    script.write_text(WORDS + FAILS_ONCE)
    job = msrun.run(
        *words,
        "--max_restarts=1",
        script.name,
        cwd=script.parent,
        command=(mindspore_python, "-m", "msrun"),
        deadline_s=200,
    )
    assert job.code == 0, job.stderr
    assert "of this environment" in job.stderr
    assert "ValueError: the first time" in job.stderr
    assert "again 6.0" in log_of(script.parent, 1)
