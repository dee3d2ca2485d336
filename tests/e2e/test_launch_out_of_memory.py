"""A worker that the kernel's out-of-memory killer takes, in a real memory cgroup."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_runner import JobRunner

LIMIT_BYTES = 512 << 20
V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")

GREEDY = """
import os, pathlib, time
if os.environ["RANK"] != "1":
    time.sleep(600)
pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
print("rank 1 takes what it can get", flush=True)
held = []
while True:
    held.append(bytearray(b"x") * (16 << 20))
"""


@pytest.fixture
def join_file() -> Iterator[Path]:
    """The file of a new cgroup of limited memory that a process writes its pid to; the cgroup goes afterwards."""
    is_v1 = (V1 / "memory.limit_in_bytes").exists()
    folder = (V1 if is_v1 else V2) / f"msrun-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(LIMIT_BYTES))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder / "cgroup.procs"
    folder.rmdir()


def test_worker_killed_for_its_memory_is_said_to_be(msrun: JobRunner, tmp_path: Path, join_file: Path) -> None:
    (tmp_path / "w.py").write_text(GREEDY)
    prefix = ("sh", "-c", f'echo $$ > {join_file} && exec "$@"', "sh")
    finished = msrun.run("--worker_num=2", "--start_method=exec", "w.py", cwd=tmp_path, prefix=prefix)
    assert finished.code == 128 + signal.SIGKILL, finished.stderr
    first = finished.read_json("failure.json")["first_failure"]
    assert (first["global_rank"], first["signal"]) == (1, "SIGKILL")
    assert "out of memory" in first["hint"]
    assert first["hint"] in finished.errors[0]
    assert first["excerpt"] == ["rank 1 takes what it can get"]


def test_worker_killed_by_somebody_is_not_said_to_be_out_of_memory(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text(
        "import os, pathlib, time\npathlib.Path(f'r{os.environ[\"RANK\"]}').touch()\ntime.sleep(600)\n"
    )
    job = msrun.start("--worker_num=2", "w.py", cwd=tmp_path)
    job.wait_for(tmp_path / "r0", tmp_path / "r1")
    os.kill(job.pid_of("1"), signal.SIGKILL)
    finished = job.finish()
    assert finished.code == 137
    hint = finished.read_json("failure.json")["first_failure"]["hint"]
    assert hint in (
        "sent by somebody: the kernel has counted no out-of-memory kill since the job began",
        "if you did not kill it, likely out of memory",
    )
