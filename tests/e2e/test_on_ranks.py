"""`@on_ranks`: what fails on a rank is told in pytest's words, and the next test has ranks again."""

import os
import subprocess
import sys

import pytest
from job_runner import REPOSITORY, WORKER_PATH

MODULE = """
import os
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

@on_ranks(3)
def test_sum(ranks, tmp_path):
    total = torch.ones(3) * ranks.rank
    dist.all_reduce(total)
    assert total.tolist() == [sum(range(ranks.size))] * 3
    (tmp_path / str(ranks.rank)).touch()
    assert ranks.gather(ranks.rank) == list(range(ranks.size))
    assert len(ranks.first(lambda: [*tmp_path.iterdir()])) == ranks.size

@pytest.mark.parametrize("square", [lambda x: x * x, lambda x: x + x], ids=["right", "wrong"])
@on_ranks(3)
def test_square(ranks, square):
    print("here is", ranks.rank)
    assert square(ranks.rank) == ranks.rank**2

@on_ranks(3, env={"NAME": "value"})
def test_end(ranks):
    assert os.environ["NAME"] == "value"
    if ranks.rank == 2:
        os._exit(5)

@on_ranks(3)
def test_backward_pass():
    torch.ones(3, requires_grad=True).sum().backward()
    pytest.skip("far enough")
"""


@pytest.mark.slow
def test_failing_rank_is_told_and_the_others_go_on(tmp_path):
    (tmp_path / "test_module.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "on_ranks", "-p", "no:cacheprovider", "-rs", "-v", "-o", "timeout=60"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([WORKER_PATH, str(REPOSITORY)])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "2 failed, 2 passed, 1 skipped" in done.stdout.splitlines()[-1], done.stdout
    square, end = done.stdout.split("rank 1 of 3 failed")[1], done.stdout.split("rank 2 of 3 ")[1]
    assert square.index("assert square(ranks.rank) == ranks.rank**2") < square.index("E       assert 2 == (1 ** 2)")
    assert "here is 1" in square and "here is 0" not in square
    assert end.startswith("died\nexit status 5")
    assert "far enough" in done.stdout
