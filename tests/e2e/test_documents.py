"""The listings of MindSpore's documents in examples/mindspore: word for word, and they print what the documents print.

docs/reference/mindspore_documents.md has a table for each, which these tests make: --update-golden writes it anew.
"""

import json
import re
import shutil

import numpy as np
import pytest
from commands import command_path
from document_listings import DOCUMENTS, PAGE, listings, table
from job_runner import REPOSITORY, wait_until

from msrun.data.digits import build_digits
from msrun.data.mnist import write_idx
from ranktable import read_table

DEADLINE_S = 240.0
WORKERS = (2, 4, 8)
STEPS = 11
"""Of an epoch: ten of them have a line of LossMonitor(100)."""
MONITOR_LINE = r"epoch: (\d+) step: (\d+), loss is (\d+\.\d+)"
FIRST = {
    # document: the form of its lines, the loss of its first line, and how far from it ours may be
    "multi_copy": (MONITOR_LINE, 4.514171123504639, 0.1),
    "optimizer_parallel": (r"epoch: (\d+), step: (\d+), loss is (\d+\.\d+)", 2.3024087, 0.1),
    "heterogeneous": (MONITOR_LINE, None, None),
}
PAGES_OF = (*FIRST, "distributed_training")

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


def test_listings_are_those_of_the_documents(golden):
    found = {document: [listing.digest for listing in listings(document)] for document in PAGES_OF}
    assert {path.name for path in DOCUMENTS.iterdir()} == {*PAGES_OF}
    golden("document_listings.json", json.dumps(found, indent=1) + "\n")


@pytest.mark.parametrize("document", PAGES_OF)
def test_page_of_a_document_has_a_row_for_each_listing(document, golden_page):
    made = table(document, WORKERS)
    golden_page(PAGE, made)
    assert "| ? |" not in made, "say what differs, or nothing"


def path_in(folder):
    """Return a PATH whose msrun, python3 and pytest are those of the tests."""
    words_of = {"msrun": "-m msrun --mindspore=torch", "python3": "", "pytest": "-m pytest -p no:cacheprovider"}
    return command_path(folder, words_of, "/usr/bin:/bin")


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("document", FIRST)
def test_listings_run_and_print_what_the_document_prints(msrun, tmp_path, document, workers):
    folder = tmp_path / "examples" / document
    shutil.copytree(DOCUMENTS / document, folder, ignore=shutil.ignore_patterns("log_output", "data"))
    images, labels = (build_digits()["train", what] for what in ("images", "labels"))
    rows = np.arange(32 * STEPS) % len(images)
    (tmp_path / "data").mkdir()
    write_idx(tmp_path / "data" / "train-images-idx3-ubyte", images[rows])
    write_idx(tmp_path / "data" / "train-labels-idx1-ubyte", labels[rows])
    words = [str(workers)] if document == "heterogeneous" else [str(tmp_path / "data"), str(workers)]
    env = {"PATH": path_in(tmp_path), **msrun.warm()}
    job = msrun.start("run.sh", *words, cwd=folder, env=env, command=("bash",)).finish(DEADLINE_S)
    assert job.code == 0, job.stderr
    assert {path.name for path in (folder / "log_output").iterdir()} >= {"scheduler.log", f"worker_{workers - 1}.log"}
    form, first, distance = FIRST[document]
    for rank in (0, workers - 1):
        said = [line for line in job.log(rank).decode().splitlines() if not line.startswith("msrun")]
        found = [re.fullmatch(form, line) for line in said]
        assert said and all(found), said
        losses = [float(match[3]) for match in found if match]
        assert first is None or losses[0] == pytest.approx(first, abs=distance)
        assert len(losses) == 1 or losses[-1] < losses[0]


# -- distributed_training ---------------------------------------------------------------------------------------------

SMALL_NETWORK = """
from mindspore import nn


def resnet50(batch_size=32, num_classes=10):
    return nn.SequentialCell(
        nn.AvgPool2d(16, 16), nn.Flatten(), nn.Dense(588, 16), nn.ReLU(), nn.Dense(16, num_classes)
    )
"""
"""In the place of resnet.py, which the document leaves open: ResNet-50 takes minutes for a step of eight ranks here."""
TRAINED = re.compile(r"epoch: (\d+) step: (\d+), loss is (\d+\.\d+)$", re.MULTILINE)


@pytest.fixture
def distributed(tmp_path):
    """A copy of the document's files, with a small network, and few images of 32 x 32 in `cifar` beside it."""
    folder = tmp_path / "distributed_training"
    shutil.copytree(DOCUMENTS / folder.name, folder, ignore=shutil.ignore_patterns("log_output", "data", "device*"))
    (folder / "resnet.py").write_text(SMALL_NETWORK)
    draw = np.random.RandomState(0)
    (tmp_path / "cifar").mkdir()
    for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"):
        labels = draw.randint(0, 10, (64, 1))
        images = np.clip(draw.randint(0, 128, (64, 3072)) + 12 * labels, 0, 255)  # brighter, the higher the label
        (tmp_path / "cifar" / f"{name}.bin").write_bytes(np.hstack([labels, images]).astype(np.uint8).tobytes())
    return folder


def run_document(msrun, folder, script, *words):
    env = {"PATH": path_in(folder.parent), "PYTHONPATH": str(REPOSITORY)}
    job = msrun.start(script, *words, cwd=folder, env=env, command=("bash",)).finish(DEADLINE_S)
    assert job.code == 0, job.stdout.decode() + job.stderr
    return job.stdout.decode()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 8])
def test_run_sh_of_the_document_trains_a_process_a_device(msrun, distributed, workers):
    said = run_document(msrun, distributed, "run.sh", "../cifar", str(workers))
    assert said.endswith("start training for device 0\ntraining success\n")
    for rank in range(workers):
        folder = distributed / f"device{rank}"
        log = folder / f"train.log{rank}"  # the document's run.sh waits for rank 0 alone
        wait_until(lambda log=log: "1 passed in" in log.read_text(), f"the end of rank {rank}", DEADLINE_S)
        found = TRAINED.findall(log.read_text())
        steps = str(12 // workers)  # of the files for training and for tests, as MindSpore reads them
        assert [(epoch, step) for epoch, step, _ in found] == [(str(n), steps) for n in range(1, 11)]
        assert float(found[-1][2]) < float(found[0][2]), found
        assert f"RANK_ID={rank}\n" in (folder / f"env{rank}.log").read_text()


@pytest.mark.slow
def test_run_cluster_sh_of_the_document_runs_the_ranks_of_a_host(msrun, distributed):
    run_document(msrun, distributed, "run_cluster.sh", "../cifar", "rank_table_8pcs.json", "8", "0")
    for rank in range(8):
        assert len(TRAINED.findall((distributed / f"device_{rank}" / f"train{rank}.log").read_text())) == 10


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
def test_networks_and_checkpoints_of_the_document_run(msrun, distributed, workers):
    log = distributed / "log_output" / f"worker_{workers - 1}.log"
    lines = {"pytest -s resnet50_distributed_training.py": 10, "networks.py": 4, "checkpoints.py": 2 + 4}
    for script, count in lines.items():
        run_document(msrun, distributed, "run_msrun.sh", "../cifar", str(workers), script)
        assert len(TRAINED.findall(log.read_text())) == count, script
    written = {path.name for path in distributed.glob(f"device{workers - 1}/**/*.ckpt")}
    assert {name.partition("-")[0] for name in written} >= {"auto_parallel", "semi_auto_parallel", "each_card"}


NO_TABLE = "run.sh: RANK_SIZE is 2 or 8, not 4: the document has no other table; see run_msrun.sh\n"
FEW_WORDS = "run_cluster.sh: DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START are missing, or no file \n"


@pytest.mark.parametrize(
    ("script", "words", "said"), [("run.sh", ["", "4"], NO_TABLE), ("run_cluster.sh", ["/data"], FEW_WORDS)]
)
def test_what_is_missing_is_said_in_a_line(msrun, distributed, script, words, said):
    env = {"PATH": path_in(distributed.parent), "PYTHONPATH": str(REPOSITORY)}
    job = msrun.start(script, *words, cwd=distributed, env=env, command=("bash",)).finish(DEADLINE_S)
    assert (job.code, job.stderr) == (2, said)


def test_rank_table_of_two_hosts_is_one():
    table = read_table(DOCUMENTS / "distributed_training" / "rank_table_16pcs.json")
    assert [len(server.devices) for server in table.servers] == [8, 8]
