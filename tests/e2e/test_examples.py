"""The examples as a user runs them: `bash run.sh`, and the same program in one process with the same losses."""

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from commands import command_path
from job_runner import REPOSITORY, WORKER_PATH, free_port, wait_until
from loss_lines import losses
from zoo.packages import missing

DEADLINE_S = 240.0
MSRUN = (sys.executable, "-m", "msrun")
BASH = ("bash",)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
MNIST = REPOSITORY / "examples" / "torch" / "mnist"

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


@pytest.fixture
def examples(tmp_path):
    """A copy of the examples, so that their logs and data go with the test."""
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("log_output", "data"))
    command_path(tmp_path, {"msrun": "-m msrun"})
    return tmp_path / "examples"


def finished(msrun, folder, *words, command=MSRUN, **env):
    """Run a command in the folder of an example to its good end, by default msrun."""
    path = f"{folder.parents[2] / 'bin'}:{os.environ['PATH']}"
    done = msrun.start(*words, cwd=folder, env={"PATH": path, **env}, command=command).finish(DEADLINE_S)
    assert done.code == 0, done.stdout.decode() + done.stderr
    return done


def run_example(msrun, folder, *args, **env):
    """Run an example's run.sh and return the log of worker 0."""
    return finished(msrun, folder, "run.sh", *args, command=BASH, **msrun.warm(), **env).log(0).decode()


def run_alone(msrun, folder, *words, program="train.py", **env):
    """Run an example's program as one plain process and return what it printed."""
    return msrun.run_alone(program, *words, cwd=folder, **env).stdout


@pytest.fixture(scope="module")
def mnist_alone(msrun_of_module, tmp_path_factory, few_images):
    """Losses of the example mnist in one process."""
    folder = tmp_path_factory.mktemp("alone") / "mnist"
    shutil.copytree(MNIST, folder)
    return losses(run_alone(msrun_of_module, folder, DATA_PATH=str(few_images), EPOCHS="2"))


MODES = [
    # mode, words in the log of worker 0
    ("data", "data_parallel, hsdp is off"),
    ("optimizer", "hsdp level1: weights and optimizer state sharded"),
    ("operator", "blocks.0.up"),
    ("pipeline", "bubble 20.0 %"),
    ("accumulate", "hsdp level2"),
    ("copies", "2 copies"),
    ("recompute", "MB kept and"),
    ("fusion", "hsdp level1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "words"), [pytest.param(*row, id=row[0]) for row in MODES])
def test_mnist_in_every_mode_equals_one_process(msrun, examples, few_images, mnist_alone, mode, words):
    text = run_example(msrun, examples / "torch" / "mnist", str(few_images), mode, EPOCHS="2")
    assert words in text
    parallel = losses(text)
    assert len(parallel) == len(mnist_alone) == 4
    np.testing.assert_allclose(parallel, mnist_alone, rtol=1e-3)
    np.testing.assert_allclose(parallel[0], mnist_alone[0], rtol=1e-5)


@pytest.mark.slow
def test_mnist_learns_the_digits_that_it_writes_and_leaves_every_log(msrun, examples):
    folder = examples / "torch" / "mnist"
    found = losses(run_example(msrun, folder, EPOCHS="3"))
    assert len(found) == 15
    assert found[-1, 2] < found[0, 2] / 3
    files = {path.name for path in (folder / "log_output").iterdir()}
    assert {"scheduler.log", "rank_table.json", *(f"worker_{rank}.log" for rank in range(8))} <= files


@pytest.mark.slow
def test_fsdp2_script_of_torch_runs_under_both_launchers(msrun, examples):
    folder, env = examples / "torch" / "fsdp2", {"STEPS": "31"}
    found = losses(run_example(msrun, folder, **env))
    other = finished(msrun, folder, "train.py", command=TORCHRUN, **env)
    np.testing.assert_array_equal(found, losses(other.stdout.decode()))
    assert found[-1, 2] < found[0, 2]


@pytest.mark.slow
def test_finetuned_gpt2_of_transformers_equals_one_process(msrun, examples, tmp_path):
    if absent := missing():
        pytest.skip(absent)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "from zoo.packages import prepare_torchvision\n\nprepare_torchvision()\n"
    )
    path = f"{tmp_path / 'site'}:{WORKER_PATH}"
    folder, env = examples / "torch" / "finetune", {"STEPS": "21", "PYTHONPATH": path}
    text = run_example(msrun, folder, **env)
    found, alone = losses(text), losses(run_alone(msrun, folder, **env))
    assert "may have any size in dimension 1" in text
    np.testing.assert_allclose(found, alone, rtol=1e-5)
    assert found[-1, 2] < found[0, 2] / 1.2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["left", "lost"])
def test_elastic_job_ends_with_the_numbers_of_one_that_nobody_disturbed(msrun, examples, way):
    """One host of three is taken away, by `msrun drain` or by the death of its agent; the spare one takes its place."""
    folder = examples / "torch" / "elastic"
    path = f"{examples.parent / 'bin'}:{os.environ['PATH']}"
    env = {"PATH": path, "EPOCHS": "3", "SAVE_EVERY": "5", "PRINT_EVERY": "1"}
    job = msrun.start("run.sh", cwd=folder, env=env, command=("bash",))
    log = folder / "log_output" / "worker_0.log"
    wait_until(lambda: log.is_file() and "epoch: 2 step: 1," in log.read_text(), "the first epoch is over", DEADLINE_S)
    if way == "left":
        subprocess.run(["msrun", "drain", "host1"], cwd=folder, env=msrun.environ(env), check=True, capture_output=True)
    else:
        (record,) = msrun.temporary.glob("msrun-spool-*-1/agent.pid")
        os.kill(int(record.read_text().split()[0]), signal.SIGKILL)
    done = job.finish(DEADLINE_S)
    assert done.code == 0, done.stderr
    assert "starting again on host0, host2" in done.stderr
    last = losses(done.log(0).decode())
    assert tuple(last[0, :2]) > (1, 40), "it went on from a checkpoint"
    shutil.rmtree(folder / "checkpoints")
    alone = losses(run_alone(msrun, folder, EPOCHS="3", PRINT_EVERY="1"))
    np.testing.assert_allclose(last[-1], alone[-1], rtol=1e-3)


@pytest.mark.slow
def test_gpt_on_four_dimensions_learns_and_equals_one_process(msrun, examples, tmp_path):
    poem = tmp_path / "poem.txt"
    poem.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    text = run_example(msrun, examples / "torch" / "gpt", str(poem), STEPS="21")
    parallel = losses(text)
    assert parallel[-1, 2] < parallel[0, 2] / 1.2
    assert "8 ranks in 2 stages (1f1b, 4 micro batches, 4 ranks each) as 2 x 2" in text
    alone = losses(run_alone(msrun, examples / "torch" / "gpt", TEXT=str(poem), STEPS="21"))
    np.testing.assert_allclose(parallel, alone, rtol=1e-3)
    np.testing.assert_allclose(parallel[0], alone[0], rtol=1e-5)


AUC_LINE = re.compile(r"^epoch: (\d+), test: auc (\d)(\.\d+)$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["device", "host", "lookup", "server"])
def test_wide_and_deep_learns_wherever_its_tables_are(msrun, examples, way):
    folder = examples / "torch" / "wide_and_deep"
    text = run_example(msrun, folder, "", way, EPOCHS="2")
    aucs = [float(whole + rest) for _, whole, rest in AUC_LINE.findall(text)]
    assert (0.7 if way == "lookup" else 0.75) < aucs[0] < aucs[1]  # LazyAdam leaves moments of other rows as they are
    assert ("borders between host (3 operators) and device" in text) is (way == "host")
    words = ["--way=lookup"] if way == "lookup" else []  # LazyAdam is not Adam
    alone = losses(run_alone(msrun, folder, *words, EPOCHS="2"))
    np.testing.assert_allclose(losses(text), alone, rtol=1e-4)


@pytest.mark.slow
def test_heterogeneous_gpt_holds_an_eighth_on_the_device_and_learns_as_in_float32(msrun, examples):
    found, tables = {}, {}
    for place in ("host", "device"):
        text = run_example(msrun, examples / "torch" / "heterogeneous", STEPS="51", PLACE=place)
        found[place] = losses(text)
        rows = [line.split() for line in text.splitlines() if line.startswith(("weights", "total"))]
        tables[place] = [[word.strip("(") for word in row if word.startswith("(")] for row in rows]
    assert tables == {"host": [["2.00", "4.00"], ["2.00", "16.00"]], "device": [["4.00", "0.00"], ["16.00", "0.00"]]}
    assert found["host"][-1, 2] < found["host"][0, 2] / 1.5
    np.testing.assert_allclose(found["host"], found["device"], rtol=0.03)
    alone = losses(run_alone(msrun, examples / "torch" / "heterogeneous", STEPS="51"))
    np.testing.assert_allclose(found["host"], alone, rtol=0.03)


SMALL = {"IMAGE_SIZE": "32", "SAMPLES": "32", "BATCH_SIZE": "8", "EPOCHS": "1", "GRAPH_OP_RUN": "1"}
"""The distributed training example at the size of a test."""


@pytest.mark.slow
def test_distributed_training_runs_per_device_as_the_document_does(msrun, examples):
    """By pytest as there, in a folder per device, and under msrun: the same losses."""
    folder = examples / "torch" / "distributed_training"
    env = {"PYTHON": sys.executable, **SMALL}
    runner = {"RUNNER": f"{sys.executable} -m pytest -s -v -p no:cacheprovider"}
    done = finished(msrun, folder, "run.sh", "", "2", command=BASH, **env, **runner)
    assert "training success" in done.stdout.decode()
    logs = [(folder / f"device{rank}" / f"train.log{rank}").read_text() for rank in (0, 1)]
    assert "1 passed" in logs[1]
    assert "RANK_ID=1" in (folder / "device1" / "env.log").read_text()
    per_device = losses(logs[0])[-1]  # pytest prints the test's name before the first line
    assert per_device[1] == 2
    done = finished(msrun, folder, "run_msrun.sh", "", "2", command=BASH, **env)
    np.testing.assert_allclose(losses(done.log(0).decode())[-1], per_device, rtol=1e-6)


@pytest.mark.slow
def test_distributed_training_in_other_modes_and_with_accumulation(msrun, examples):
    folder = examples / "torch" / "distributed_training"
    found = {}
    scripts = {"accumulation": {"SCRIPT": "resnet50_distributed_training_grad_accu.py", "MINI_STEPS": "2"}}
    modes = {mode: {"MODE": mode} for mode in ("data_parallel", "hybrid", "semi_auto", "auto")}
    for name, words in (modes | scripts).items():
        done = finished(msrun, folder, "run_msrun.sh", "", "2", command=BASH, **{**SMALL, **words})
        found[name] = losses(done.log(0).decode())
    program = "resnet50_distributed_training.py"
    alone = losses(run_alone(msrun, folder, program=program, **{**SMALL, "BATCH_SIZE": "16"}))
    assert found["semi_auto"][0] == pytest.approx(alone[0], rel=1e-5)
    assert found["auto"][0] == pytest.approx(alone[0], rel=1e-5)
    assert found["hybrid"][0] == pytest.approx(found["data_parallel"][0], rel=1e-5)
    assert len(found["accumulation"]) == 1, "two batches are one step"


@pytest.mark.slow
def test_train_cifar_of_the_document_with_auto_parallel_has_the_losses_of_one_process(msrun, examples, workers):
    """The document's function word for word; one process has the whole batch."""
    folder, program = examples / "torch" / "distributed_training", workers / "runtime" / "document_cifar.py"
    found, notes = {}, ""
    for ranks in (1, 2):
        words = (f"--worker_num={ranks}", program, folder, str(16 // ranks))
        notes = finished(msrun, folder, *words, IMAGE_SIZE="32", SAMPLES="32").log(0).decode()
        found[ranks] = losses(notes)
    assert "searched (recursive_programming)" in notes or "searched (data parallel)" in notes
    assert len(found[1]) > 1
    np.testing.assert_allclose(found[2], found[1], rtol=1e-3)
    np.testing.assert_allclose(found[2][0], found[1][0], rtol=1e-5)


@pytest.mark.slow
def test_trained_network_answers_and_is_exported_on_other_numbers_of_ranks(msrun, examples):
    folder = examples / "torch" / "distributed_training"
    env = {**SMALL, "CHECKPOINTS": "ckpt"}
    finished(msrun, folder, "run_msrun.sh", "", "2", command=BASH, **env)
    images = (examples / "torch" / "data" / "cifar10_digits" / "test_batch.bin").read_bytes()
    said, answers = [], []
    for ranks in (1, 2):
        done = finished(msrun, folder, f"--worker_num={ranks}", "inference.py", "accuracy", **env)
        said.append(re.findall(r"accuracy: (\S+)", done.log(0).decode()))
        answers.append(ask(msrun, folder, env, ranks, images))
    assert said[0] == said[1] and len(said[0]) == 1
    assert answers[0] == answers[1] and all(b'"class": ' in answer for answer in answers[0])
    finished(msrun, folder, "--worker_num=1", "inference.py", "export", "net.pt", **env)
    state = torch.load(folder / "net.pt", weights_only=True)
    assert state["end_point.weight"].shape == (10, 2048)


def ask(msrun, folder, env, ranks, images):
    """Return what a server on so many ranks answers to the first images, and end it."""
    port = free_port()
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
