"""Plain torch scripts: the same result as under torchrun, spawned helpers, and nothing beyond loopback."""

import ipaddress
import json
import signal
import sys

import psutil
import pytest
from asked_cases import one_fast
from job_runner import PRELOAD, WORKERS

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def read_results(folder):
    return [json.loads(file.read_text()) for file in sorted(folder.glob("result_*.json"))]


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
def seen(tmp_path):
    """A program that writes down what it is told by its launcher; `seen` as a module."""
    path = tmp_path / "seen.py"
    path.write_text(
        "import json, os, sys\n"
        f"env = {{name: os.environ.get(name) for name in {NAMES}}}\n"
        "open(f'result_{os.environ[\"RANK\"]}.json', 'w').write(json.dumps([env, sys.argv[1:], __name__]))\n"
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_line_of_torchrun_gives_workers_what_torchrun_gives(msrun, tmp_path, seen, name):
    """By msrun itself where the line says how many workers there are, and with torchrun's defaults by its front end."""
    told = []
    commands = [TORCHRUN, [sys.executable, "-m", "msrun.torchrun"], [sys.executable, "-m", "msrun"]]
    for command in commands[:2] if name == "default" else commands:
        words = LINES[name].format(script=seen, python=sys.executable).split()
        finished = msrun.run(*words, cwd=tmp_path, command=command)
        assert finished.code == 0, finished.stderr
        told.append(read_results(tmp_path))
        for path in tmp_path.glob("result_*.json"):
            path.unlink()
    assert told[0] and all(one == told[0] for one in told)


@pytest.mark.slow
def test_an_exception_that_a_script_records_is_in_the_report(msrun, tmp_path):
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


@pytest.mark.parametrize("how", one_fast("warm", "fork", "exec"))
def test_workers_of_plain_torch_are_one_world(msrun, tmp_path, how):
    options, env = (PRELOAD, msrun.warm()) if how == "warm" else ((f"--start_method={how}",), {})
    finished = msrun.run("--worker_num=2", *options, WORKERS / "all_reduce.py", cwd=tmp_path, env=env)
    assert finished.code == 0, finished.stderr
    (ready,) = [event for event in finished.events if event["event"] == "ready"]
    assert (ready["start_method"], ready["reason"]) == (("exec", "asked for") if how == "exec" else ("fork", ""))
    assert "by exec, not by fork" not in finished.stderr
    all_ranks = [{"rank": rank, "local": str(rank)} for rank in (0, 1)]
    right = {"world": 2, "sum": [0.0, 3.0, 6.0, 9.0], "all": all_ranks}
    assert read_results(tmp_path) == [{"rank": rank, **right} for rank in (0, 1)]


@pytest.mark.parametrize("method", one_fast("auto", "fork"))
def test_import_that_starts_a_thread_makes_workers_start_by_exec_and_says_so(msrun, tmp_path, method):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "with_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (tmp_path / "train.py").write_text("print('ran')\n")
    search = f"{tmp_path / 'modules'}:{msrun.environ()['PYTHONPATH']}"
    options = ["--worker_num=2", "--preload=with_thread", f"--start_method={method}"]
    finished = msrun.run(*options, "train.py", cwd=tmp_path, env={"PYTHONPATH": search})
    if method == "fork":
        assert finished.code == 3
        assert "--start_method fork: not possible here: 1 threads" in finished.stderr
        return
    assert finished.code == 0, finished.stderr
    assert finished.stderr.count("workers start by exec, not by fork: 1 threads were started by imports") == 1
    assert finished.log(1) == b"ran\n"


LOADER = """
import multiprocessing, os
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return index * index, os.getpid()
def double(number): return 2 * number
if __name__ == "__main__":
    rows = [row for row in DataLoader(Squares(), batch_size=None, num_workers=1, multiprocessing_context="spawn")]
    print([value for value, _ in rows], any(pid == os.getpid() for _, pid in rows))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2, 3]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("words", "method"), [(["helpers.py"], "fork"), (["-m", "helpers"], "exec")])
def test_spawned_helpers_find_names_of_the_script(msrun, tmp_path, words, method):
    (tmp_path / "helpers.py").write_text(LOADER)
    finished = msrun.run("--worker_num=2", f"--start_method={method}", *words, cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    assert finished.log(1) == b"[0, 1, 4, 9, 16, 25, 36, 49] False\n[2, 4, 6]\n"


CONNECTED = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for peer in range(dist.get_world_size()):
    dist.broadcast(torch.ones(1), src=peer)
open("ready_" + os.environ["RANK"], "w").close()
time.sleep(600)
"""


@pytest.mark.slow
def test_nothing_of_a_one_host_job_listens_beyond_loopback(msrun, tmp_path):
    (tmp_path / "train.py").write_text(CONNECTED)
    job = msrun.start("--worker_num=3", "train.py", cwd=tmp_path).wait_for_workers(3)
    pids = msrun.processes()
    assert len(pids) >= 6  # launcher, fork server, scheduler, workers
    inet = [entry for pid in pids for entry in psutil.Process(pid).net_connections(kind="inet")]
    assert any(entry.status == psutil.CONN_LISTEN for entry in inet)
    assert any(entry.status == psutil.CONN_ESTABLISHED for entry in inet)
    addresses = {
        address.ip.removeprefix("::ffff:") for entry in inet for address in (entry.laddr, entry.raddr) if address
    }
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses
    job.send(signal.SIGINT)
    assert job.finish().code == 130
