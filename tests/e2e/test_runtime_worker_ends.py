"""The end of a worker: the world's threads are gone, a failure is not held up, and a user's mistake comes first."""

import sys

import pytest
from job_runner import WORKER_PATH

ON_GLOO = {"MSRUN_CPU_BACKEND": "gloo"}
"""The backend with threads of its own; without the variable, ranks of one host are on shared memory."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "words"),
    [("fork", ("ending",)), ("exec", ("ending",)), ("exec", ("releasing",)), ("exec", ("releasing", "data_parallel"))],
)
def test_no_thread_of_the_world_outlives_it(msrun, workers, tmp_path, start, words):
    options = ["--worker_num=2", f"--start_method={start}", workers / "runtime" / "leave.py"]
    finished = msrun.run(*options, *words, cwd=tmp_path, env={**ON_GLOO, **msrun.warm()})
    assert finished.code == 0, finished.stderr
    assert [finished.log(rank).decode().splitlines()[-1] for rank in range(2)] == ["group threads: []"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("start", "backend"), [("fork", "gloo"), ("exec", "shm")])
def test_failing_worker_does_not_wait_for_its_collectives(msrun, workers, tmp_path, start, backend):
    script = workers / "runtime" / "leave.py"
    options = ["--worker_num=2", f"--start_method={start}"]
    finished = msrun.run(*options, script, "failing", cwd=tmp_path, env={"MSRUN_CPU_BACKEND": backend})
    assert finished.code == 1, finished.stderr
    failure = finished.read_json("failure.json")
    assert (failure["first_failure"]["global_rank"], failure["first_failure"]["exit_code"]) == (0, 1)
    assert "rank 0 fails with a collective under way" in finished.stderr
    assert [other["state"] for other in failure["others"]] == ["stopped by msrun"], (
        "it would never have ended by itself"
    )


FORWARD = [
    "uncaught ValueError at {script}:18: 3 rows are too many",
    '    raise ValueError(f"{{len(hidden)}} rows are too many")',
    "  called at {script}:26, in <module>",
    "    net(torch.ones(3, 4))",
]
SETTING = 'uncaught StrategyError at {script}:25: hsdp() with parallel_mode="stand_alone": its ranks exchange nothing'


@pytest.mark.parametrize("method", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
def test_the_users_line_comes_first_in_log_and_report(msrun, workers, tmp_path, method):
    script = workers / "runtime" / "user_error.py"
    finished = msrun.run("--worker_num=2", "--start_method", method, script, "forward", cwd=tmp_path, env=msrun.warm())
    assert finished.code == 1
    *lines, left_out = finished.log(0).decode().splitlines()
    assert lines == [line.format(script=script) for line in FORWARD]
    assert left_out.endswith(" frames inside libraries left out; MSRUN_DEBUG=1 shows them")
    assert finished.read_json("failure.json")["first_failure"]["excerpt"] == [*lines, left_out]
    assert f"  | {lines[0]}\n" in finished.stderr


@pytest.mark.slow
def test_an_error_of_the_runtime_is_one_line(msrun, workers, tmp_path):
    script = workers / "runtime" / "user_error.py"
    finished = msrun.run("--worker_num=2", script, "setting", cwd=tmp_path)
    (line,) = finished.log(0).decode().splitlines()
    assert line.startswith(SETTING.format(script=script))


@pytest.mark.slow
def test_msrun_debug_shows_every_frame(msrun, workers, tmp_path):
    script = workers / "runtime" / "user_error.py"
    finished = msrun.run("--worker_num=2", script, "forward", cwd=tmp_path, env={"MSRUN_DEBUG": "1"})
    log = finished.log(0).decode()
    assert log.startswith(FORWARD[0].format(script=script) + "\nTraceback (most recent call last):\n")
    assert "auto_parallel.py" in log


@pytest.mark.slow
def test_a_console_that_has_shown_the_log_does_not_quote_it(msrun, workers, tmp_path):
    script = workers / "runtime" / "user_error.py"
    words = ["sh", "-c", f'exec "$0" -m msrun --worker_num=2 {script} forward 2>&1', sys.executable]
    finished = msrun.run(cwd=tmp_path, command=words)
    text = finished.stdout.decode()
    assert text.count("rows are too many") == 2, "the message, and the line that raises it"
    assert f"log: {finished.log_dir / 'worker_0.log'} (pid " in text and "), shown above\n" in text


@pytest.mark.slow
def test_torchruns_workers_have_the_rank_before_each_line(msrun, workers, tmp_path):
    script = workers / "runtime" / "user_error.py"
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", script, "forward"]
    finished = msrun.run(cwd=tmp_path, command=[str(word) for word in words], env={"PYTHONPATH": WORKER_PATH})
    assert f"[rank0]: {FORWARD[0].format(script=script)}\n" in finished.stderr
