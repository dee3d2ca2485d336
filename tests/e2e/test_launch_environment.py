"""What a worker finds around itself: ranks, environment, directory, descriptors, signals; the same forked or exec'd."""

import json
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from job_runner import WORKERS

WORLD_SIZE = 2
STALE = {
    "RANK": "9", "WORLD_SIZE": "99", "LOCAL_RANK": "5", "MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "1", "DEVICE_ID": "6",
    "RANK_TABLE_FILE": "/stale/table.json", "MS_ROLE": "MS_SCHED", "TORCHELASTIC_RUN_ID": "stale",
}  # fmt: skip
ODD_VALUE = "a 'b' \"c\" = $HOME\n`id` ☃"
PROCESS_FIELDS = ("pid", "ppid", "pgid", "sid", "draws")


@pytest.fixture(scope="module")
def both(msrun_of_module, tmp_path_factory):
    """The same job, started by fork and by exec from the same directory."""
    cwd = tmp_path_factory.mktemp("record") / "a b"
    cwd.mkdir()
    (cwd / "job.env").write_text("# for every worker\nexport FROM_FILE='one two'\nBOTH=file\n\n")
    jobs = {}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for method in ("fork", "exec"):
        (cwd / f"records_{method}").mkdir()
        env = {**STALE, "RECORD_DIR": f"records_{method}", "MSRUN_GRACE": "9", "MSRUN_CONFIG": "/dev/null"}
        options = ["--worker_num", str(WORLD_SIZE), "--start_method", method, "--log-dir", f"logs {method}"]
        options += ["--preload=numpy", "--env", f"ODD={ODD_VALUE}", "--env", "BOTH=option", "--env_file", "job.env"]
        options += [f"--master_port={port}"] if method == "exec" else []
        finished = msrun_of_module.run(
            *options, WORKERS / "record.py", "one", cwd=cwd, env=env, log_dir=f"logs {method}"
        )
        assert finished.code == 0, finished.stderr
        files = sorted((cwd / f"records_{method}").iterdir())
        ranks = [json.loads(file.read_text()) for file in files]
        jobs[method] = SimpleNamespace(finished=finished, ranks=ranks)
    assert jobs["exec"].finished.read_json("plan.json")["master"]["port"] == port
    return jobs


@pytest.fixture
def recorded(both):
    return both["fork"]


def test_worker_environment_is_complete_and_exact(recorded, msrun_of_module):
    caller = msrun_of_module.environ({**STALE, "RECORD_DIR": "records_fork"})
    plan = recorded.finished.read_json("plan.json")
    port = str(plan["master"]["port"])
    for rank, record in enumerate(recorded.ranks):
        expected = {
            **caller, "FROM_FILE": "one two", "BOTH": "option", "ODD": ODD_VALUE.encode().decode("latin-1"),
            "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_GLOO_LAZY_INIT": "1", "PYTHONFAULTHANDLER": "1",
            "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo",
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "default",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": plan["job_id"], "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": f"{plan['run_dir']}/error_{rank}_0.json",
            "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": port,
            "MS_NODE_ID": str(rank), "MS_NODE_RANK": "0", "RANK_ID": str(rank), "RANK_SIZE": "2",
            "DEVICE_ID": str(rank), "RANK_TABLE_FILE": str(recorded.finished.log_dir / "rank_table.json"),
            "MSRUN_JOB_ID": plan["job_id"], "MSRUN_LOG_DIR": str(recorded.finished.log_dir),
            "MSRUN_RENDEZVOUS": f"file://{plan['run_dir']}/store", "MSRUN_DEVICE_TARGET": "cpu",
            "MSRUN_PROGRESS": f"{plan['run_dir']}/progress", "MSRUN_STACK_SIGNAL": str(int(signal.SIGRTMIN) + 8),
        }  # fmt: skip
        found = dict(record["env"])
        if "LC_CTYPE" not in caller:  # an interpreter in the C locale sets it for itself
            found.pop("LC_CTYPE", None)
        assert found == {name: value.encode().decode("latin-1") for name, value in expected.items()} | {
            "ODD": expected["ODD"]
        }


def test_stale_variables_are_replaced_and_said_once(recorded):
    lines = [line for line in recorded.finished.stderr.splitlines() if "replaced" in line]
    assert len(lines) == 1
    text, _, names = lines[0].rpartition(": ")
    assert text == "msrun: set in your environment and replaced for the workers"
    assert names.split(", ") == sorted(STALE)


def test_every_rank_is_a_process_of_its_own_in_the_directory_of_the_caller(recorded):
    assert [record["env"]["RANK"] for record in recorded.ranks] == [str(rank) for rank in range(WORLD_SIZE)]
    assert len({record["pid"] for record in recorded.ranks}) == WORLD_SIZE
    assert len({record["ppid"] for record in recorded.ranks}) == 1, "below the fork server"
    for rank, record in enumerate(recorded.ranks):
        assert record["pid"] == record["pgid"] == record["sid"], "it leads a session"
        log = str(recorded.finished.log_dir / f"worker_{rank}.log")
        assert record["descriptors"] == {"0": "/dev/null", "1": log, "2": log}, "nothing else is open"
        assert record["is_tty"] == [False, False, False]
        assert record["cwd"] == str(recorded.finished.log_dir.parents[1])
        assert record["argv"] == [str(WORKERS / "record.py"), "one"]
        assert record["path"][0] == str(WORKERS)
        assert (record["name"], record["file"]) == ("__main__", str(WORKERS / "record.py"))
    for kind in (0, 1):
        draws = {record["draws"][kind] for record in recorded.ranks}
        assert len(draws) == WORLD_SIZE, "random numbers differ between workers that seed nothing"


def test_forked_and_executed_workers_are_equal_apart_from_process_ids(both):
    def comparable(job, method):
        plan = job.finished.read_json("plan.json")
        texts = []
        for record in job.ranks:
            kept = {name: value for name, value in record.items() if name not in PROCESS_FIELDS}
            text = json.dumps(kept, sort_keys=True)
            for own in (plan["run_dir"], plan["job_id"], str(plan["master"]["port"]), f"logs {method}"):
                text = text.replace(own, "OWN")
            texts.append(text.replace(f"records_{method}", "RECORDS"))
        return texts

    assert comparable(both["fork"], "fork") == comparable(both["exec"], "exec")


@pytest.mark.slow
def test_scheduler_and_fork_server_carry_no_rank(msrun, tmp_path):
    job = msrun.start("--worker_num", "1", WORKERS / "wait.py", cwd=tmp_path, env=STALE).wait_for_workers(1)
    for pid in (job.pid_of("scheduler"), job.pid_of_fork_server()):
        environ = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        names = {line.partition(b"=")[0].decode() for line in environ}
        assert "MSRUN_JOB_ID" in names
        assert not names & {"RANK", "LOCAL_RANK", "RANK_ID", "DEVICE_ID", "MS_ROLE", "MS_NODE_ID", "GROUP_RANK"}
    worker = Path("/proc", str(job.pid_of("0")), "environ").read_bytes().split(b"\0")
    job_id = (job.log_dir / "plan.json").read_text().split('"job_id": "')[1].split('"')[0]
    assert f"MSRUN_JOB_ID={job_id}".encode() in worker  # the process title does not write over the environment
    job.process.terminate()
    assert job.finish().code == 143


def test_blas_of_a_worker_has_the_threads_that_it_was_given(msrun, tmp_path):
    """Also where the fork server has imported numpy before, with one thread, so that it could fork."""
    (tmp_path / "train.py").write_text(
        "import numpy, threadpoolctl\n"
        "print('threads', {one['num_threads'] for one in threadpoolctl.threadpool_info()})\n"
    )
    finished = msrun.run("--worker_num=1", "train.py", cwd=tmp_path, env={"OPENBLAS_NUM_THREADS": "2"})
    assert finished.code == 0 and finished.log(0).endswith(b"threads {2}\n"), finished.log(0)


def test_chdir_moves_workers_and_not_the_logs_and_no_python_program_ends_by_a_broken_pipe(msrun, odd_path, tmp_path):
    program = ("sh", "-c", "pwd; exec grep SigIgn /proc/self/status")
    finished = msrun.run("--worker_num=1", "--chdir", odd_path, *program, cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    folder, _, ignored = (tmp_path / "log_output" / "worker_0.log").read_text().replace("\t", "\n").splitlines()
    assert folder == str(odd_path)
    assert not int(ignored, 16) & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))
