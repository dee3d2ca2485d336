"""Checkpoints of real jobs: loaded by other numbers of ranks, and found again after whatever ended the job."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from job_runner import REPOSITORY, JobRunner, wait_until
from torch.distributed.checkpoint import FileSystemReader

from msrun.runtime.checkpoint.directory import find_checkpoints, read_manifest

DEADLINE_S = 120.0
WRITERS = ["level1", "level3-pairs", "rows-and-hsdp-deferred", "ddp"]
HALF = 3
LINE = re.compile(r"^epoch: (\d+) step: (\d+), loss is (\S+)$", re.MULTILINE)
Lines = dict[tuple[int, int], float]

pytestmark = pytest.mark.timeout(2 * DEADLINE_S + 20)


def losses(text: bytes | str) -> Lines:
    """Return (epoch, step) -> loss of every line that LossMonitor printed."""
    found = LINE.findall(text.decode() if isinstance(text, bytes) else text)
    lines = {(int(epoch), int(step)): float(loss) for epoch, step, loss in found}
    assert len(lines) == len(found), "no step is trained twice in one attempt"
    return lines


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run_alone(runner: JobRunner, *args: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program as one plain process, without msrun."""
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env=runner.environ({"OMP_NUM_THREADS": "1", **env}),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.fixture(scope="module")
def written(
    msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Checkpoints that 4 ranks wrote in the middle of several trainings, and the losses of these."""
    folder = tmp_path_factory.mktemp("written")
    script = workers / "runtime" / "resharding.py"
    done = msrun_of_module.run(
        "--worker_num=4",
        "--quiet",
        script,
        folder / "checkpoints",
        folder / "result.json",
        "write",
        cwd=folder,
        deadline_s=DEADLINE_S,
    )
    assert done.code == 0, done.stderr
    return folder / "checkpoints", json.loads((folder / "result.json").read_text())[0]


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["2 ranks", "one process"])
def test_checkpoint_of_4_ranks_goes_on_in_every_layout_of(
    msrun: JobRunner, workers: Path, tmp_path: Path, written: tuple[Path, dict[str, Any]], world_size: int
) -> None:
    folder, right = written
    shutil.copytree(folder, tmp_path / "checkpoints")
    args = (workers / "runtime" / "resharding.py", tmp_path / "checkpoints", tmp_path / "result.json", "read")
    if world_size == 1:
        alone = run_alone(msrun, *args, cwd=tmp_path)
        assert alone.returncode == 0, alone.stderr
    else:
        done = msrun.run("--worker_num=2", "--quiet", *args, cwd=tmp_path, deadline_s=DEADLINE_S)
        assert done.code == 0, done.stderr
    ranks = json.loads((tmp_path / "result.json").read_text())
    assert len(ranks) == world_size
    assert {run.split(" -> ")[0] for run in ranks[0]} == set(WRITERS)
    for rank in ranks:
        for run, found in rank.items():
            assert found == pytest.approx(right[run.split(" -> ")[0]][HALF:], rel=1e-10, abs=0), run


def test_every_rank_writes_and_nothing_is_written_twice(written: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = written
    for name in WRITERS:
        manifest = read_manifest(folder / name)
        assert manifest is not None
        assert manifest.world_size == 4
        assert sum(file.endswith(".distcp") for file in manifest.files) == 4
        tensors = FileSystemReader(folder / name).read_metadata().state_dict_metadata
        assert len(tensors) == 6 * (3 if name in ("level1", "rows-and-hsdp-deferred") else 2), "weights and moments"
        for tensor in tensors.values():
            assert sum(math.prod(chunk.sizes) for chunk in tensor.chunks) == math.prod(tensor.size)
    cut = FileSystemReader(folder / "level1").read_metadata().state_dict_metadata
    assert len(cut["optimizer.layer1.weight.exp_avg"].chunks) == len(cut["model.layer1.weight"].chunks) == 4


@pytest.fixture(scope="module")
def undisturbed(msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Losses of one process that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    alone = run_alone(msrun_of_module, workers / "runtime" / "surviving.py", folder / "checkpoints", cwd=folder)
    assert alone.returncode == 0, alone.stderr
    lines = losses(alone.stdout)
    assert len(lines) == 15
    assert names(folder / "checkpoints") == ["net-3_2.ckpt", "net-3_5.ckpt"], "keep_checkpoint_max is 2"
    return lines


@pytest.mark.slow
def test_killed_while_it_writes_it_goes_on_from_the_checkpoint_before_with_half_the_workers(
    msrun: JobRunner, workers: Path, tmp_path: Path, undisturbed: Lines
) -> None:
    folder = tmp_path / "checkpoints"
    args = (workers / "runtime" / "surviving.py", folder)
    first = msrun.run("--worker_num=4", *args, "in-write", "2", "8", cwd=tmp_path, deadline_s=DEADLINE_S)
    assert first.code == 128 + signal.SIGKILL, first.stderr
    assert names(folder) == ["net-1_4.ckpt", "net-2_3.ckpt.saving"]
    assert [path.name for path, _ in find_checkpoints(folder)] == ["net-1_4.ckpt"]
    second = msrun.run("--worker_num=2", *args, cwd=tmp_path, deadline_s=DEADLINE_S)
    assert second.code == 0, second.stderr
    lines = losses(second.log(0))
    assert list(lines) == list(undisturbed)[4:]
    assert lines == pytest.approx({place: undisturbed[place] for place in lines}, rel=1e-10)
    assert names(folder) == ["net-3_2.ckpt", "net-3_5.ckpt"]


@pytest.mark.slow
def test_restarted_by_msrun_it_ends_with_the_losses_of_an_undisturbed_run(
    msrun: JobRunner, workers: Path, tmp_path: Path, undisturbed: Lines
) -> None:
    """Everything of the second checkpoint is on the disk, but it does not have its name yet."""
    done = msrun.run(
        "--worker_num=4",
        "--max_restarts=1",
        workers / "runtime" / "surviving.py",
        tmp_path / "checkpoints",
        "before-rename",
        "0",
        "8",
        cwd=tmp_path,
        deadline_s=DEADLINE_S,
    )
    assert done.code == 0, done.stderr
    first = losses((done.log_dir / "worker_1.attempt_0.log").read_bytes())
    second = losses(done.log(1))
    assert list(first) == list(undisturbed)[:8]
    assert list(second) == list(undisturbed)[4:], "not from the one without a name"
    assert all(second[place] == first[place] for place in first.keys() & second.keys()), "bit by bit"
    assert {**first, **second} == pytest.approx(undisturbed, rel=1e-10)
    assert names(tmp_path / "checkpoints") == ["net-3_2.ckpt", "net-3_5.ckpt"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A file system of 1 MB, and a way to make it another size."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a small file system")
    try:
        yield (
            folder,
            lambda size: (subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True), None)[1],
        )
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_full_disk_is_one_clear_error_and_leaves_the_checkpoints_before(
    msrun: JobRunner, workers: Path, tmp_path: Path, small_disk: tuple[Path, Callable[[str], None]]
) -> None:
    disk, resize = small_disk
    args = (workers / "runtime" / "surviving.py", disk / "checkpoints")
    settings = {"WIDTH": "1000", "KEEP": "9"}
    done = msrun.run("--worker_num=2", *args, cwd=tmp_path, env=settings, deadline_s=DEADLINE_S)
    assert done.code == 1, done.stderr
    for rank in range(2):
        last = done.log(rank).decode().splitlines()[-1]
        assert re.fullmatch(
            rf"uncaught CheckpointError at \S+: checkpoint {disk}/checkpoints/net-3_2\.ckpt was not "
            r"saved, earlier ones are untouched: rank [01]: No space left on device; free some space, or keep fewer "
            r"checkpoints \(keep_checkpoint_max\)",
            last,
        ), last
    assert names(disk / "checkpoints") == ["net-1_4.ckpt", "net-2_3.ckpt"]
    assert [path.name for path, _ in find_checkpoints(disk / "checkpoints")] == ["net-1_4.ckpt", "net-2_3.ckpt"]
    resize("4m")
    alone = run_alone(msrun, *args, cwd=tmp_path, **settings)
    assert alone.returncode == 0, alone.stderr
    assert next(iter(losses(alone.stdout))) == (2, 4)


@pytest.mark.slow
def test_example_survives_the_death_of_a_worker(msrun: JobRunner, tmp_path: Path, digits: Path) -> None:
    shutil.copytree(digits, tmp_path / "examples" / "data" / "digits")
    shutil.copytree(
        REPOSITORY / "examples" / "resume",
        tmp_path / "examples" / "resume",
        ignore=shutil.ignore_patterns("log_output", "checkpoints"),
    )
    folder = tmp_path / "examples" / "resume"
    command = tmp_path / "bin" / "msrun"
    command.parent.mkdir()
    command.write_text(f'#!/bin/bash\nexec {sys.executable} -m msrun "$@"\n')
    command.chmod(0o755)
    settings = {"EPOCHS": "1", "SAVE_EVERY": "10", "PRINT_EVERY": "1"}
    path = f"{command.parent}:{os.environ['PATH']}"
    job = msrun.start("run.sh", cwd=folder, env={**settings, "PATH": path}, command=("bash",))
    wait_until((folder / "checkpoints" / "digits-1_10.ckpt").exists, "the first checkpoint", DEADLINE_S)
    os.kill(job.pid_of("2"), signal.SIGKILL)
    done = job.finish(DEADLINE_S)
    assert done.code == 0, done.stderr
    first = losses((done.log_dir / "worker_0.attempt_0.log").read_bytes())
    second = losses(done.log(0))
    assert min(second) > (1, 10), "not from the beginning"
    shutil.rmtree(folder / "checkpoints")
    alone = run_alone(msrun, "train.py", cwd=folder, **settings)
    assert alone.returncode == 0, alone.stderr
    right = losses(alone.stdout)
    assert {**first, **second} == pytest.approx(right, rel=1e-4), "of one process, in float32"
    shared = first.keys() & second.keys()
    assert {place: second[place] for place in shared} == pytest.approx({p: first[p] for p in shared}, rel=1e-6)
