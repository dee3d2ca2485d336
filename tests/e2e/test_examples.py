"""The examples as a user runs them: `bash run.sh`, and the same program in one process with the same losses."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from fleet import FleetRunner
from job_runner import REPOSITORY, JobRunner, wait_until
from ssh_net import SshNet

from msrun.runtime.data import write_idx

DEADLINE_S = 240.0
GPT_LINE = re.compile(r"^step: (\d+), loss is (\d+\.\d+)$", re.MULTILINE)
STEP_LINE = re.compile(r"^epoch: (\d+), step: (\d+), loss is (\d+\.\d+)$", re.MULTILINE)
MONITOR_LINE = re.compile(r"^epoch: (\d+) step: (\d+), loss is (\d+\.\d+)$", re.MULTILINE)

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A copy of the examples, so that their logs and data go with the test."""
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("log_output", "data"))
    command = tmp_path / "bin" / "msrun"
    command.parent.mkdir()
    command.write_text(f'#!/bin/bash\nexec {sys.executable} -m msrun "$@"\n')
    command.chmod(0o755)
    return tmp_path / "examples"


@pytest.fixture
def with_digits(examples: Path, digits: Path) -> Path:
    """The same after a first run, which has written the data."""
    shutil.copytree(digits, examples / "data" / "digits")
    return examples


def run_example(msrun: JobRunner, folder: Path, *args: str, **env: str) -> str:
    """Run an example's run.sh and return the log of worker 0."""
    path = f"{folder.parent.parent / 'bin'}:{os.environ['PATH']}"
    job = msrun.start("run.sh", *args, cwd=folder, env={"PATH": path, **msrun.warm(), **env}, command=("bash",))
    done = job.finish(DEADLINE_S)
    assert done.code == 0, done.stderr
    return done.log(0).decode()


def run_alone(msrun: JobRunner, folder: Path, *words: str, **env: str) -> str:
    """Run an example's program as one plain process and return what it printed."""
    done = subprocess.run(
        [sys.executable, "train.py", *words],
        cwd=folder,
        env=msrun.environ({"OMP_NUM_THREADS": "1", **env}),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(pattern: re.Pattern[str], text: str) -> np.ndarray:
    """Return (epoch, step, loss) of every loss line."""
    return np.array([[float(value) for value in line] for line in pattern.findall(text)])


@pytest.fixture(scope="module")
def one_epoch_alone(msrun_of_module: JobRunner, tmp_path_factory: pytest.TempPathFactory, digits: Path) -> np.ndarray:
    """Losses of the example optimizer_parallel in one process."""
    folder = tmp_path_factory.mktemp("alone") / "optimizer_parallel"
    shutil.copytree(REPOSITORY / "examples" / "optimizer_parallel", folder)
    return losses(STEP_LINE, run_alone(msrun_of_module, folder, DATA_PATH=str(digits), EPOCHS="1"))


@pytest.mark.slow
def test_optimizer_parallel_trains_on_8_workers_and_equals_one_process(
    msrun: JobRunner, with_digits: Path, one_epoch_alone: np.ndarray
) -> None:
    folder = with_digits / "optimizer_parallel"
    text = run_example(msrun, folder, EPOCHS="5")
    parallel = losses(STEP_LINE, text)
    assert len(parallel) == 25
    assert parallel[-1, 2] < parallel[0, 2] / 3
    assert "hsdp level1" in text.splitlines()[0]
    files = {path.name for path in (folder / "log_output").iterdir()}
    assert {"scheduler.log", "rank_table.json", *(f"worker_{rank}.log" for rank in range(8))} <= files
    assert len(one_epoch_alone) == 5
    np.testing.assert_allclose(parallel[: len(one_epoch_alone)], one_epoch_alone, rtol=1e-5)


@pytest.mark.slow
def test_optimizer_parallel_over_four_hosts_equals_one_process(
    msrun: JobRunner, with_digits: Path, one_epoch_alone: np.ndarray
) -> None:
    with SshNet(4) as net:
        folder = with_digits / "optimizer_parallel"
        fleet = FleetRunner(msrun, net, folder)
        done = fleet.start("host[0-3]:2", "--env=EPOCHS=1", "train.py").finish(DEADLINE_S)
        fleet.prove_nothing_left()
    assert done.code == 0, done.stderr
    parallel = losses(STEP_LINE, done.log(0).decode())
    np.testing.assert_allclose(parallel, one_epoch_alone, rtol=1e-5)


@pytest.mark.slow
def test_multiple_copy_trains_on_8_workers_and_equals_one_process(msrun: JobRunner, with_digits: Path) -> None:
    folder = with_digits / "multiple_copy"
    settings = {"EPOCHS": "3", "PRINT_EVERY": "48"}
    text = run_example(msrun, folder, **settings)
    parallel = losses(MONITOR_LINE, text)
    assert [tuple(line) for line in parallel[:2, :2]] == [(1, 48), (2, 48)]
    assert parallel[0, 2] == pytest.approx(2 * np.log(10), rel=0.05), "the sum of two copies' losses"
    assert parallel[-1, 2] < parallel[0, 2]
    assert "2 copies" in text.splitlines()[0]
    alone = losses(MONITOR_LINE, run_alone(msrun, folder, **settings))
    np.testing.assert_allclose(parallel[:2], alone[:2], rtol=1e-5)
    np.testing.assert_allclose(parallel, alone, rtol=1e-3)  # rounding grows with the steps, most where the loss falls


@pytest.mark.slow
def test_examples_read_the_mnist_files_of_data_path(msrun: JobRunner, examples: Path, tmp_path: Path) -> None:
    data = tmp_path / "mnist"
    data.mkdir()
    rng = np.random.default_rng(0)
    write_idx(data / "train-images-idx3-ubyte", rng.integers(0, 256, (64, 28, 28), dtype=np.uint8))
    write_idx(data / "train-labels-idx1-ubyte", rng.integers(0, 10, 64, dtype=np.uint8))
    text = run_example(msrun, examples / "optimizer_parallel", str(data), EPOCHS="1")
    assert len(losses(STEP_LINE, text)) == 1, "64 samples are two batches of 32"
    assert not (examples / "data").exists()


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "exec", "torchrun"])
def test_example_trains_alike_however_its_workers_start(
    msrun: JobRunner, examples: Path, start: str, one_epoch_alone: np.ndarray
) -> None:
    """Without data at first: the workers write it."""
    folder = examples / "optimizer_parallel"
    if start == "torchrun":
        command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        logs = ("--redirects", "3", "--log-dir", str(folder / "torchrun"))  # its console mixes ranks within a line
        job = msrun.start(*logs, "train.py", cwd=folder, env={"EPOCHS": "1"}, command=command).finish(DEADLINE_S)
        text = next((folder / "torchrun").glob("*/attempt_0/0/stdout.log")).read_text()
    else:
        options = ["--worker_num=2", f"--start_method={start}"]
        job = msrun.start(*options, "train.py", cwd=folder, env={"EPOCHS": "1"}).finish(DEADLINE_S)
        text = job.log(0).decode()
    assert job.code == 0, job.stderr
    np.testing.assert_allclose(losses(STEP_LINE, text), one_epoch_alone, rtol=1e-5)


PARALLEL = [
    # example, words in the log of worker 0
    ("data_parallel", "data_parallel, hsdp is off"),
    ("operator_parallel", "(None, mp)"),
    ("hybrid_parallel", "hybrid_parallel"),
    ("pipeline_parallel", "bubble 20.0 %"),
    ("recompute", "MB computed again"),
    ("comm_fusion", "messages of a step: "),
    ("gradient_accumulation", "hsdp level2"),
]


@pytest.fixture(scope="module")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven batches of 32 in MNIST's form."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    write_idx(folder / "train-images-idx3-ubyte", rng.integers(0, 256, (352, 28, 28), dtype=np.uint8))
    write_idx(folder / "train-labels-idx1-ubyte", rng.integers(0, 10, 352, dtype=np.uint8))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), [pytest.param(*row, id=row[0]) for row in PARALLEL])
def test_every_way_to_train_in_parallel_equals_one_process(
    msrun: JobRunner, examples: Path, few_images: Path, name: str, words: str
) -> None:
    text = run_example(msrun, examples / name, str(few_images), EPOCHS="2")
    assert words in text
    parallel = losses(STEP_LINE, text)
    alone = losses(STEP_LINE, run_alone(msrun, examples / name, DATA_PATH=str(few_images), EPOCHS="2"))
    assert len(parallel) == len(alone) == 4
    np.testing.assert_allclose(parallel, alone, rtol=1e-3)
    np.testing.assert_allclose(parallel[0], alone[0], rtol=1e-5)


@pytest.mark.slow
def test_gpt_on_four_dimensions_learns_and_equals_one_process(msrun: JobRunner, examples: Path, tmp_path: Path) -> None:
    poem = tmp_path / "poem.txt"
    poem.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    text = run_example(msrun, examples / "gpt", str(poem), STEPS="21")
    parallel = losses(GPT_LINE, text)
    assert parallel[-1, 1] < parallel[0, 1] / 1.2
    assert "8 ranks in 2 stages (1f1b, 4 micro batches, 4 ranks each) as 2 x 2" in text
    alone = losses(GPT_LINE, run_alone(msrun, examples / "gpt", TEXT=str(poem), STEPS="21"))
    np.testing.assert_allclose(parallel, alone, rtol=1e-3)
    np.testing.assert_allclose(parallel[0], alone[0], rtol=1e-5)


AUC_LINE = re.compile(r"^epoch: (\d+), test: auc (\d)(\.\d+)$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["device", "host", "lookup", "server"])
def test_wide_and_deep_learns_wherever_its_tables_are(msrun: JobRunner, examples: Path, way: str) -> None:
    folder = examples / "wide_and_deep"
    text = run_example(msrun, folder, "", way, EPOCHS="2")
    aucs = [float(whole + rest) for _, whole, rest in AUC_LINE.findall(text)]
    assert (0.7 if way == "lookup" else 0.75) < aucs[0] < aucs[1]  # LazyAdam leaves moments of other rows as they are
    assert ("borders between host (3 operators) and device" in text) is (way == "host")
    words = ["--way=lookup"] if way == "lookup" else []  # LazyAdam is not Adam
    alone = losses(MONITOR_LINE, run_alone(msrun, folder, *words, EPOCHS="2"))
    np.testing.assert_allclose(losses(MONITOR_LINE, text), alone, rtol=1e-4)


@pytest.mark.slow
def test_heterogeneous_gpt_holds_an_eighth_on_the_device_and_learns_as_in_float32(
    msrun: JobRunner, examples: Path
) -> None:
    found, tables = {}, {}
    for place in ("host", "device"):
        text = run_example(msrun, examples / "heterogeneous", STEPS="51", PLACE=place)
        found[place] = losses(GPT_LINE, text)
        rows = [line.split() for line in text.splitlines() if line.startswith(("weights", "total"))]
        tables[place] = [[word.strip("(") for word in row if word.startswith("(")] for row in rows]
    assert tables == {"host": [["2.00", "4.00"], ["2.00", "16.00"]], "device": [["4.00", "0.00"], ["16.00", "0.00"]]}
    assert found["host"][-1, 1] < found["host"][0, 1] / 1.5
    np.testing.assert_allclose(found["host"], found["device"], rtol=0.03)
    alone = losses(GPT_LINE, run_alone(msrun, examples / "heterogeneous", STEPS="51"))
    np.testing.assert_allclose(found["host"], alone, rtol=0.03)


SMALL = {"IMAGE_SIZE": "32", "SAMPLES": "32", "BATCH_SIZE": "8", "EPOCHS": "1", "GRAPH_OP_RUN": "1"}
"""The distributed training example at the size of a test."""


@pytest.mark.slow
def test_distributed_training_runs_per_device_as_the_document_does(msrun: JobRunner, examples: Path) -> None:
    """By pytest as there, in a folder per device, and under msrun: the same losses."""
    folder = examples / "distributed_training"
    env = {"PATH": f"{examples.parent / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable, **SMALL}
    runner = {"RUNNER": f"{sys.executable} -m pytest -s -v -p no:cacheprovider"}
    job = msrun.start("run.sh", "", "2", cwd=folder, env={**env, **runner}, command=("bash",))
    done = job.finish(DEADLINE_S)
    assert done.code == 0, done.stdout.decode() + done.stderr
    assert "training success" in done.stdout.decode()
    logs = [(folder / f"device{rank}" / f"train.log{rank}").read_text() for rank in (0, 1)]
    assert "1 passed" in logs[1]
    assert "RANK_ID=1" in (folder / "device1" / "env.log").read_text()
    per_device = losses(MONITOR_LINE, logs[0])[-1]  # pytest prints the test's name before the first line
    assert per_device[1] == 2
    job = msrun.start("run_msrun.sh", "", "2", cwd=folder, env=env, command=("bash",))
    done = job.finish(DEADLINE_S)
    assert done.code == 0, done.stderr
    np.testing.assert_allclose(losses(MONITOR_LINE, done.log(0).decode())[-1], per_device, rtol=1e-6)


@pytest.mark.slow
def test_distributed_training_in_other_modes_and_with_accumulation(msrun: JobRunner, examples: Path) -> None:
    folder = examples / "distributed_training"
    env = {"PATH": f"{examples.parent / 'bin'}:{os.environ['PATH']}", **SMALL}
    found = {}
    scripts = {"accumulation": {"SCRIPT": "resnet50_distributed_training_grad_accu.py", "MINI_STEPS": "2"}}
    modes = {mode: {"MODE": mode} for mode in ("data_parallel", "hybrid", "semi_auto", "auto")}
    for name, words in (modes | scripts).items():
        job = msrun.start("run_msrun.sh", "", "2", cwd=folder, env={**env, **words}, command=("bash",))
        done = job.finish(DEADLINE_S)
        assert done.code == 0, done.stderr
        found[name] = losses(MONITOR_LINE, done.log(0).decode())
    done = subprocess.run(
        [sys.executable, "resnet50_distributed_training.py"],
        cwd=folder,
        env=msrun.environ({"OMP_NUM_THREADS": "1", **SMALL, "BATCH_SIZE": "16"}),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    alone = losses(MONITOR_LINE, done.stdout)
    assert found["semi_auto"][0] == pytest.approx(alone[0], rel=1e-5)
    assert found["auto"][0] == pytest.approx(alone[0], rel=1e-5)
    assert found["hybrid"][0] == pytest.approx(found["data_parallel"][0], rel=1e-5)
    assert len(found["accumulation"]) == 1, "two batches are one step"


@pytest.mark.slow
def test_train_cifar_of_the_document_with_auto_parallel_has_the_losses_of_one_process(
    msrun: JobRunner, examples: Path, workers: Path
) -> None:
    """The document's function word for word; one process has the whole batch."""
    folder, program = examples / "distributed_training", workers / "runtime" / "document_cifar.py"
    found, notes = {}, ""
    for ranks in (1, 2):
        words = (f"--worker_num={ranks}", program, folder, str(16 // ranks))
        done = msrun.start(*words, cwd=folder, env={"IMAGE_SIZE": "32", "SAMPLES": "32"}).finish(DEADLINE_S)
        assert done.code == 0, done.stderr
        found[ranks] = losses(MONITOR_LINE, done.log(0).decode())
        notes = done.log(0).decode()
    assert "searched (recursive_programming)" in notes or "searched (data parallel)" in notes
    assert len(found[1]) > 1
    np.testing.assert_allclose(found[2], found[1], rtol=1e-3)
    np.testing.assert_allclose(found[2][0], found[1][0], rtol=1e-5)


@pytest.mark.slow
def test_distributed_training_starts_by_mpirun_too(msrun: JobRunner, examples: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    env = {"PYTHON": sys.executable, "DEVICE_TARGET": "CPU", "OMP_NUM_THREADS": "1", **SMALL}
    job = msrun.start("run_gpu.sh", "", "2", cwd=examples / "distributed_training", env=env, command=("bash",))
    done = job.finish(DEADLINE_S)
    assert done.code == 0, done.stdout.decode() + done.stderr
    assert len(losses(MONITOR_LINE, done.stdout.decode())) >= 1


@pytest.mark.slow
def test_trained_network_answers_on_other_numbers_of_ranks(msrun: JobRunner, examples: Path) -> None:
    folder = examples / "distributed_training"
    env = {"PATH": f"{examples.parent / 'bin'}:{os.environ['PATH']}", **SMALL, "CHECKPOINTS": "ckpt"}
    job = msrun.start("run_msrun.sh", "", "2", cwd=folder, env=env, command=("bash",))
    assert job.finish(DEADLINE_S).code == 0
    said = {}
    for ranks in (1, 2, 4):
        done = msrun.start(f"--worker_num={ranks}", "inference.py", "accuracy", cwd=folder, env=env).finish(DEADLINE_S)
        assert done.code == 0, done.stderr
        said[ranks] = re.findall(r"accuracy: (\S+)", done.log(0).decode())
    assert said[1] == said[2] == said[4]
    assert len(said[1]) == 1
    done = msrun.start("--worker_num=1", "inference.py", "export", "net.pt", cwd=folder, env=env).finish(DEADLINE_S)
    assert done.code == 0, done.stderr
    state = torch.load(folder / "net.pt", weights_only=True)
    assert state["end_point.weight"].shape == (10, 2048)


@pytest.mark.slow
def test_cut_network_answers_requests(msrun: JobRunner, examples: Path) -> None:
    """Two ranks compute the answers that one does."""
    folder = examples / "distributed_training"
    env = {"PATH": f"{examples.parent / 'bin'}:{os.environ['PATH']}", **SMALL, "CHECKPOINTS": "ckpt"}
    job = msrun.start("run_msrun.sh", "", "2", cwd=folder, env=env, command=("bash",))
    assert job.finish(DEADLINE_S).code == 0
    images = (examples / "data" / "cifar10_digits" / "test_batch.bin").read_bytes()
    one, two = (ask(msrun, folder, env, ranks, images) for ranks in (1, 2))
    assert one == two
    assert all(b'"class": ' in answer for answer in one)


def ask(msrun: JobRunner, folder: Path, env: dict[str, str], ranks: int, images: bytes) -> list[bytes]:
    """Return what a server on so many ranks answers to the first images, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = msrun.start(f"--worker_num={ranks}", "inference.py", "serve", cwd=folder, env={**env, "PORT": str(port)})
    log, line, url = folder / "log_output" / "worker_0.log", f"answering on port {port}", f"http://127.0.0.1:{port}"
    wait_until(lambda: log.is_file() and line in log.read_text(), "the server", DEADLINE_S)
    records = [images[start + 1 : start + 3073] for start in range(0, 4 * 3073, 3073)]
    answers = [urllib.request.urlopen(url, data=record, timeout=DEADLINE_S).read() for record in records]
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(url, data=b"no image", timeout=DEADLINE_S)
    job.send(signal.SIGTERM)
    assert job.finish(DEADLINE_S).code == 143
    return answers
