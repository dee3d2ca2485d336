"""Checkpoints of real jobs: loaded by other numbers of ranks, and found again after whatever ended the job."""

import json
import math
import os
import re
import signal
import subprocess
import zlib
from typing import Any

import checkpoint_law
import pytest
import torch
from on_ranks import on_ranks
from torch.distributed.checkpoint import FileSystemReader

from msrun.errors import CheckpointError
from msrun.runtime import load_checkpoint
from msrun.runtime.checkpoint.directory import find_checkpoints, read_manifest

DEADLINE_S = 120.0
LAW_S = 400.0
SOME = ("pipeline", "mixed")
LINE = re.compile(r"^epoch: (\d+) step: (\d+), loss is (\S+)$", re.MULTILINE)

pytestmark = pytest.mark.timeout(2 * DEADLINE_S + 20)


def losses(text):
    """Return (epoch, step) -> loss of every line that LossMonitor printed."""
    found = LINE.findall(text.decode() if isinstance(text, bytes) else text)
    lines = {(int(epoch), int(step)): float(loss) for epoch, step, loss in found}
    assert len(lines) == len(found), "no step is trained twice in one attempt"
    return lines


def names(folder):
    return sorted(path.name for path in folder.iterdir())


class Law:
    """Runs jobs of tests/cases/checkpoint_law.py over one folder; each once."""

    def __init__(self, runner, script, folder):
        self._runner, self._script, self.folder = runner, script, folder
        self._done: dict[str, list[dict[str, Any]]] = {}

    def run(self, world_size, task, *layouts):
        """Return what every rank found."""
        name = "-".join([task, str(world_size), *layouts])
        if name not in self._done:
            self._done[name] = []
            result = self.folder / f"{name}.json"
            self._runner.run_world(
                world_size, self._script, self.folder, result, task, *layouts, cwd=self.folder, deadline_s=LAW_S
            )
            self._done[name] = json.loads(result.read_text())
        assert self._done[name], "the job failed before"
        return self._done[name]


@pytest.fixture(scope="module")
def law(msrun_of_module, tmp_path_factory):
    return Law(msrun_of_module, checkpoint_law.__file__, tmp_path_factory.mktemp("law"))


def assert_goes_on(ranks, ways):
    """Every rank has the losses of one process by every way in, and checkpoints are written again bit by bit."""
    for rank in ranks:
        for pair, found in rank["pairs"].items():
            assert found["losses"].keys() == ways, pair
            for way, losses in found["losses"].items():
                right = rank["right"][2 : 2 + len(losses)]
                assert losses == pytest.approx(right, rel=1e-10, abs=0), f"{pair} by {way}"
    for pair, found in ranks[0]["pairs"].items():
        assert found["difference"] <= 1e-10, pair
        assert found["is_same"], pair


WAYS = {"load_checkpoint", "load_param_into_net", "load_distributed_checkpoint"}
CUT = {"transform_checkpoints", "transformed, load_distributed_checkpoint"}


@on_ranks(2, dtype="float64")
def test_checkpoints_of_two_ranks_go_on_in_other_layouts_and_are_written_by_every_rank_once(ranks, tmp_path):
    checkpoint_law.write(tmp_path, SOME)
    found = ranks.gather(checkpoint_law.read(tmp_path, SOME, others_alone=True))
    assert {*found[0]["pairs"]} == {f"{source}-2 to {target}" for source in SOME for target in SOME if source != target}
    assert_goes_on(found, WAYS | CUT)
    path = tmp_path / "checkpoints" / "mixed-2" / "a.ckpt"
    manifest = read_manifest(path)
    assert manifest is not None
    assert manifest.world_size == 2
    assert sorted(manifest.files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.pt", "tensors.json"]
    assert manifest.checksums == {name: zlib.crc32((path / name).read_bytes()) for name in manifest.files}
    tensors = FileSystemReader(path).read_metadata().state_dict_metadata
    assert len(tensors) == 8 + 2 * 6, "weights and a buffer, moments"
    for tensor in tensors.values():
        assert sum(math.prod(chunk.sizes) for chunk in tensor.chunks) == math.prod(tensor.size)
    assert len(tensors["model.layer1.weight"].chunks) == len(tensors["optimizer.layer1.weight.exp_avg"].chunks) == 2


@pytest.mark.slow
@pytest.mark.timeout(5 * LAW_S)
@pytest.mark.parametrize("layout", checkpoint_law.LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_layout_on_1_2_4_and_8_ranks_goes_on_from_every_other(law, world_size, layout):
    for writers in (1, 2, 4, 8):
        law.run(writers, "write")
    ranks = law.run(world_size, "read", layout)
    assert len(ranks[0]["pairs"]) == 4 * len(checkpoint_law.LAYOUTS)
    assert_goes_on(ranks, WAYS | (CUT if world_size > 1 else set()))


@pytest.fixture(scope="module")
def undisturbed(msrun_of_module, workers, tmp_path_factory):
    """Losses of one process that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    alone = msrun_of_module.run_alone(workers / "runtime" / "surviving.py", folder / "checkpoints", cwd=folder)
    lines = losses(alone.stdout)
    assert len(lines) == 15
    assert names(folder / "checkpoints") == ["net-3_2.ckpt", "net-3_5.ckpt"], "keep_checkpoint_max is 2"
    return lines


@pytest.mark.slow
def test_killed_while_it_writes_it_goes_on_from_the_checkpoint_before_with_half_the_workers(
    msrun, workers, tmp_path, undisturbed
):
    folder = tmp_path / "checkpoints"
    args = (workers / "runtime" / "surviving.py", folder)
    form = {"FORM": "directory"}
    first = msrun.run("--worker_num=4", *args, "2", "8", cwd=tmp_path, env=form, deadline_s=DEADLINE_S)
    assert first.code == 128 + signal.SIGKILL, first.stderr
    assert names(folder) == ["net-1_4.ckpt", "net-2_3.ckpt.saving"]
    assert [path.name for path, _ in find_checkpoints(folder)] == ["net-1_4.ckpt"]
    second = msrun.run("--worker_num=2", *args, cwd=tmp_path, deadline_s=DEADLINE_S)
    assert second.code == 0, second.stderr
    lines = losses(second.log(0))
    assert list(lines) == list(undisturbed)[4:]
    assert lines == pytest.approx({place: undisturbed[place] for place in lines}, rel=1e-10)
    assert names(folder) == ["net-3_2.ckpt", "net-3_5.ckpt"]


DEATHS = 13
"""Of each form and way, 52 together."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", ["now", "beside"])
@pytest.mark.parametrize("form", ["file", "directory"])
def test_killed_at_random_moments_of_saving_it_always_goes_on_from_a_whole_checkpoint(
    msrun, workers, tmp_path, form, when
):
    args = (workers / "runtime" / "dying_saves.py", tmp_path / "checkpoints")
    for seed in range(DEATHS):
        done = msrun.run("--worker_num=2", "--quiet", *args, f"{form} {when} {seed}", form, when, cwd=tmp_path)
        assert done.code == 128 + signal.SIGALRM, f"death {seed}: {done.stderr}"
    found = find_checkpoints(tmp_path / "checkpoints", "net")
    reached = found[-1][1].position.step if found else 0
    done = msrun.run(
        "--worker_num=2", "--quiet", *args, "none", form, when, str(reached + 2), cwd=tmp_path, deadline_s=DEADLINE_S
    )
    assert done.code == 0, done.stderr
    left = names(tmp_path / "checkpoints")
    assert [path.name for path, _ in find_checkpoints(tmp_path / "checkpoints")] == left, "nothing half-written is left"
    assert len(left) == min(2, reached + 2)


@pytest.mark.slow
def test_hosts_without_a_shared_folder_write_and_read_what_their_ranks_hold(msrun, workers, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root may give every rank a file system of its own")
    (tmp_path / "disk").mkdir()
    script = workers / "runtime" / "separate_hosts.py"
    args = (tmp_path / "disk", tmp_path / "shared", tmp_path / "result.json")
    done = msrun.run("--worker_num=2", "--quiet", script, *args, cwd=tmp_path, deadline_s=DEADLINE_S)
    assert done.code == 0, done.stderr
    assert os.listdir(tmp_path / "disk") == [], "it was in the ranks' own"
    for rank in json.loads((tmp_path / "result.json").read_text()):
        assert rank["files"] == {"beside.ckpt": True, "parts.ckpt": True, "whole.ckpt": False}
        assert all(loss == right for loss, right in rank["losses"])
        assert (rank["newest"], rank["newest of all"]) == ("beside.ckpt", "whole.ckpt")
        assert re.search(r"there is no checkpoint .*beside\.ckpt", rank["gone on one"])
    with pytest.raises(CheckpointError, match="weight is marked layerwise_parallel, and each of 2 ranks saved its own"):
        load_checkpoint(tmp_path / "shared" / "own", torch.nn.Linear(2, 1))


@pytest.mark.slow
def test_full_disk_is_one_clear_error_and_leaves_the_checkpoints_before(msrun, workers, tmp_path, small_disk):
    def resize(size):
        subprocess.run(["mount", "-o", f"remount,size={size}", small_disk], check=True)

    args = (workers / "runtime" / "surviving.py", small_disk / "checkpoints")
    settings = {"WIDTH": "1000", "KEEP": "9"}
    done = msrun.run("--worker_num=2", *args, cwd=tmp_path, env=settings, deadline_s=DEADLINE_S)
    assert done.code == 1, done.stderr
    for rank in range(2):
        last = done.log(rank).decode().splitlines()[-1]
        assert re.fullmatch(
            rf"uncaught CheckpointError at \S+: checkpoint {small_disk}/checkpoints/net-3_2\.ckpt was not "
            r"saved, earlier ones are untouched: (?:rank [01]: )?No space left on device; free some space, or keep "
            r"fewer checkpoints \(keep_checkpoint_max\)",
            last,
        ), last
    assert names(small_disk / "checkpoints") == ["net-1_4.ckpt", "net-2_3.ckpt"]
    assert [path.name for path, _ in find_checkpoints(small_disk / "checkpoints")] == ["net-1_4.ckpt", "net-2_3.ckpt"]
    resize("4m,ro")
    refused = msrun.run_alone(*args, cwd=tmp_path, code=1, **settings)
    assert re.search(
        r"CheckpointError.*Read-only file system; give a directory that can be written to$", refused.stderr
    )
    resize("4m,rw")
    alone = msrun.run_alone(*args, cwd=tmp_path, **settings)
    assert next(iter(losses(alone.stdout))) == (2, 4)
