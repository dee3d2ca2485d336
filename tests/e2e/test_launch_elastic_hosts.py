"""`--nnodes MIN:MAX` where msrun is typed on each host: as many as have come within a window run the job."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from job_runner import JobRunner, Running, wait_until

FRONT_END = (sys.executable, "-m", "msrun.torchrun")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(msrun: JobRunner, cwd: Path, port: int, nnodes: str, window: str = "30") -> Running:
    (cwd / "train.py").write_text(
        "import os, time\nfrom pathlib import Path\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE')\n"
        "Path('ran_' + os.environ['RANK']).write_text(' '.join(os.environ[name] for name in names))\n"
        "while not Path('go').exists():\n    time.sleep(0.01)\n"
    )
    words = [f"--nnodes={nnodes}", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    return msrun.start(*words, f"--rdzv-conf=last_call_timeout={window}", "train.py", cwd=cwd, command=FRONT_END)


def ranks(cwd: Path) -> list[str]:
    return sorted(path.read_text() for path in cwd.glob("ran_*"))


def test_those_that_have_come_run_the_job_and_a_later_one_is_sent_away(msrun: JobRunner, tmp_path: Path) -> None:
    port = free_port()
    first = start(msrun, tmp_path, port, "1:3", window="0.5")
    first.wait_for(tmp_path / "ran_0", tmp_path / "ran_1")
    late = start(msrun, tmp_path, port, "1:3").finish()
    assert late.code == 3 and "an extra host: the job is complete with 2 workers on 1 hosts" in late.errors[0]
    (tmp_path / "go").touch()
    ended = first.finish()
    assert ended.code == 0, ended.stderr
    assert ranks(tmp_path) == ["0 0 2 0 1", "1 1 2 0 1"]
    assert ended.read_json("plan.json")["world_size"] == 2


@pytest.mark.slow
def test_the_most_begin_at_once_also_on_one_machine(msrun: JobRunner, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "go").touch()
    jobs = [start(msrun, tmp_path, port, "1:2", window="600") for _ in range(2)]
    ended = [job.finish() for job in jobs]
    assert [job.code for job in ended] == [0, 0], ended
    assert ranks(tmp_path) == ["0 0 4 0 2", "1 1 4 0 2", "2 0 4 1 2", "3 1 4 1 2"]


def test_fewer_than_are_enough_wait(msrun: JobRunner, tmp_path: Path) -> None:
    job = start(msrun, tmp_path, free_port(), "2:3", window="0")
    wait_until(lambda: "2 of 6 registered, missing" in job.stderr, "it has waited for a while")
    assert not ranks(tmp_path)
    job.send(15)
    assert job.finish().code == 143
