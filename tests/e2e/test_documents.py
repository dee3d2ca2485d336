"""The listings of MindSpore's documents in examples/mindspore: word for word, and they print what the documents print.

docs/documents has a table for each, which these tests make: --update-golden writes it anew.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from document_listings import DOCUMENTS, PAGES, listings, table
from job_runner import JobRunner

from msrun.runtime.data.digits import build_digits
from msrun.runtime.data.idx import write_idx

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

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


def test_listings_are_those_of_the_documents(golden: Callable[[str, str], None]) -> None:
    found = {document: [listing.digest for listing in listings(document)] for document in FIRST}
    assert {path.name for path in DOCUMENTS.iterdir()} == {*FIRST}
    golden("document_listings.json", json.dumps(found, indent=1) + "\n")


@pytest.mark.parametrize("document", FIRST)
def test_page_of_a_document_has_a_row_for_each_listing(document: str, request: pytest.FixtureRequest) -> None:
    page, made = table(document, WORKERS)
    if request.config.getoption("--update-golden"):
        (PAGES / f"{document}.md").write_text(made, encoding="utf-8")
    assert page == made, "if meant, run pytest --update-golden"
    assert "| ? |" not in made, "say what differs, or nothing"


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("document", FIRST)
def test_listings_run_and_print_what_the_document_prints(
    msrun: JobRunner, tmp_path: Path, document: str, workers: int
) -> None:
    folder = tmp_path / "examples" / document
    shutil.copytree(DOCUMENTS / document, folder, ignore=shutil.ignore_patterns("log_output", "data"))
    images, labels = (build_digits()["train", what] for what in ("images", "labels"))
    rows = np.arange(32 * STEPS * workers) % len(images)
    (tmp_path / "data").mkdir()
    write_idx(tmp_path / "data" / "train-images-idx3-ubyte", images[rows])
    write_idx(tmp_path / "data" / "train-labels-idx1-ubyte", labels[rows])
    command = tmp_path / "bin" / "msrun"
    command.parent.mkdir()
    command.write_text(f'#!/bin/bash\nexec {sys.executable} -m msrun --mindspore=torch "$@"\n')
    command.chmod(0o755)
    words = [str(workers)] if document == "heterogeneous" else [str(tmp_path / "data"), str(workers)]
    env = {"PATH": f"{command.parent}:/usr/bin:/bin", **msrun.warm()}
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
