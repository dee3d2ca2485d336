"""Plain torch scripts: the same result as under torchrun, spawned helpers, and nothing beyond loopback."""

from __future__ import annotations

import ipaddress
import json
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from asked_cases import one_fast
from job_runner import JobRunner

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def read_results(folder: Path) -> list[Any]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("result_*.json"))]


@pytest.fixture(scope="module")
def results_under_torchrun(
    msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    cwd = tmp_path_factory.mktemp("torchrun")
    peer = msrun_of_module.run("--nproc-per-node=2", workers / "all_reduce.py", cwd=cwd, command=TORCHRUN)
    assert peer.code == 0, peer.stderr
    return read_results(cwd)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "exec"])
def test_plain_torch_script_gives_the_result_it_gives_under_torchrun(
    msrun: JobRunner, workers: Path, tmp_path: Path, method: str, results_under_torchrun: list[Any]
) -> None:
    finished = msrun.run("--worker_num=2", "--start_method", method, workers / "all_reduce.py", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    results = read_results(tmp_path)
    assert results == results_under_torchrun
    assert [result["rank"] for result in results] == [0, 1]
    assert results[0]["sum"] == [0.0, 3.0, 6.0, 9.0]


NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
NAMES += ("ROLE_WORLD_SIZE", "ROLE_NAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_RESTART_COUNT")
NAMES += ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE")
LINES = {
    "number": "--nproc-per-node=2 {script} --nproc-per-node 9",
    "standalone": "--standalone --nnodes=1 --nproc_per_node 2 --max-restarts 3 {script} -m",
    "rendezvous": "--nnodes 1 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id j {script}",
    "module": "-m --nproc-per-node=2 seen --lr 0.1",
    "executable": "--no-python --nproc-per-node 2 {python} {script} a b",
    "default": "{script}",
}


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    """A program that writes down what it is told by its launcher; `seen` as a module."""
    path = tmp_path / "seen.py"
    path.write_text(
        "import json, os, sys\n"
        f"env = {{name: os.environ.get(name) for name in {NAMES}}}\n"
        "open(f'result_{os.environ[\"RANK\"]}.json', 'w').write(json.dumps([env, sys.argv[1:], __name__]))\n"
    )
    return path


def line_of(name: str, seen: Path) -> list[str]:
    return LINES[name].format(script=seen, python=sys.executable).split()


@pytest.mark.slow
@pytest.mark.parametrize("name", one_fast("standalone", *(name for name in LINES if name != "standalone")))
def test_line_of_torchrun_gives_the_workers_what_torchrun_gives_them(
    msrun: JobRunner, tmp_path: Path, seen: Path, name: str
) -> None:
    """By msrun itself where the line says how many workers there are, and with torchrun's defaults by its front end."""
    told = []
    commands = [TORCHRUN[:3], [sys.executable, "-m", "msrun.torchrun"]]
    for command in commands if name == "default" else [*commands, [sys.executable, "-m", "msrun"]]:
        finished = msrun.run(*line_of(name, seen), cwd=tmp_path, command=command)
        assert finished.code == 0, finished.stderr
        told.append(read_results(tmp_path))
        for path in tmp_path.glob("result_*.json"):
            path.unlink()
    assert told[0] and all(one == told[0] for one in told)


@pytest.mark.slow
def test_an_exception_that_a_script_records_is_in_the_report(msrun: JobRunner, tmp_path: Path) -> None:
    """Also where the script hides it from its log, and never that of another attempt."""
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        raise ValueError('no such data set: ' + 'x' * 300)\n"
        "try:\n"
        "    main()\n"
        "except ValueError:\n"
        "    sys.exit(7)\n"
        "if sys.argv[1:] and os.environ['RANK'] == '1':\n"
        "    os._exit(9)\n"
    )
    failed = msrun.run("--worker_num=2", "train.py", cwd=tmp_path)
    assert failed.code == 7
    assert "rank 1 on" in failed.stderr and "exit code 7, ValueError: no such data set: xxx" in failed.stderr
    again = msrun.run("--worker_num=2", "--max_restarts=1", "train.py", "later", cwd=tmp_path)
    assert again.code == 9
    assert "exit code 9, after" in again.stderr


def test_workers_of_torch_are_forked_by_default(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    finished = msrun.run("--worker_num=2", workers / "all_reduce.py", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    (ready,) = [event for event in finished.events if event["event"] == "ready"]
    assert (ready["start_method"], ready["reason"]) == ("fork", "")
    assert "by exec, not by fork" not in finished.stderr


def test_import_that_starts_a_thread_makes_workers_start_by_exec_and_says_so(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "with_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (tmp_path / "train.py").write_text("print('ran')\n")
    search = f"{tmp_path / 'modules'}:{msrun.environ()['PYTHONPATH']}"
    options = ["--worker_num=2", "--preload=with_thread"]
    finished = msrun.run(*options, "train.py", cwd=tmp_path, env={"PYTHONPATH": search})
    assert finished.code == 0, finished.stderr
    assert finished.stderr.count("workers start by exec, not by fork: 1 threads were started by imports") == 1
    assert finished.log(1) == b"ran\n"

    insisted = msrun.run(*options, "--start_method=fork", "train.py", cwd=tmp_path, env={"PYTHONPATH": search})
    assert insisted.code == 3
    assert "--start_method fork: not possible here: 1 threads" in insisted.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_data_loader_with_spawned_workers_works(msrun: JobRunner, workers: Path, tmp_path: Path, method: str) -> None:
    finished = msrun.run("--worker_num=1", "--start_method", method, workers / "loader.py", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    report = json.loads((tmp_path / "loader_0.json").read_text())
    assert report == {"squares": [0, 1, 4, 9, 16, 25, 36, 49], "elsewhere": True}


@pytest.mark.slow
@pytest.mark.parametrize("form", one_fast("script", "module"))
def test_spawn_pool_finds_the_functions_of_the_script(
    msrun: JobRunner, workers: Path, tmp_path: Path, form: str
) -> None:
    (tmp_path / "pool.py").write_bytes((workers / "pool.py").read_bytes())
    words = ["pool.py"] if form == "script" else ["-m", "pool"]
    finished = msrun.run("--worker_num=2", *words, cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    assert [finished.log(rank) for rank in (0, 1)] == [b"[2, 4, 6]\n"] * 2


@pytest.mark.slow
def test_nothing_of_a_one_host_job_listens_beyond_loopback(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = msrun.start("--worker_num=3", workers / "connected.py", cwd=tmp_path)
    job.wait_for(*(tmp_path / f"ready_{rank}" for rank in range(3)))
    pids = msrun.processes()
    assert len(pids) >= 6  # launcher, fork server, scheduler, workers
    inet = [entry for pid in pids for entry in psutil.Process(pid).net_connections(kind="inet")]
    assert any(entry.status == psutil.CONN_LISTEN for entry in inet)
    assert any(entry.status == psutil.CONN_ESTABLISHED for entry in inet)
    for entry in inet:
        for address in (entry.laddr, entry.raddr):
            assert not address or is_loopback(address.ip), entry
    job.send(signal.SIGINT)
    assert job.finish().code == 130
