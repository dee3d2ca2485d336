"""Reading data in ranks: worker processes beside threads, resuming, and ranks that pass the same batch."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from job_runner import wait_until
from noise import add_noise
from on_ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun.data import NumpySlicesDataset, config, vision
from msrun.errors import DataError
from msrun.runtime import AutoParallel, WithLoss

NUM_SAMPLES = 24


def refuse_nine(label):
    if label == 9:
        raise ValueError("nine\nis not allowed")
    return label


@contextlib.contextmanager
def warned():
    """Give the warnings of the runtime's log meanwhile."""
    lines, log = [], logging.getLogger("msrun.runtime")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def images(workers):
    pixels = np.arange(NUM_SAMPLES * 4 * 4 * 3, dtype=np.uint8).reshape(NUM_SAMPLES, 4, 4, 3)
    return NumpySlicesDataset({"image": pixels, "label": np.arange(NUM_SAMPLES)}, num_parallel_workers=workers)


def pipeline(workers):
    operations = [vision.RandomCrop(4, 2), vision.RandomHorizontalFlip(), vision.Rescale(1.0, 0.0), add_noise]
    return images(workers).map(operations, "image").batch(4)


def numbers(steps):
    return [[*x.double().sum((1, 2, 3)).tolist(), *y.tolist()] for x, y in steps]


@on_ranks(2)
def test_workers_change_neither_the_steps_nor_what_transforms_functions_and_training_draw(ranks):
    """Ranks read different parts of every global batch, one of them from a fork server, which takes time."""
    torch.manual_seed(1)
    right = float(torch.rand(()))
    torch.manual_seed(1)
    config.set_multiprocessing_start_method(("forkserver", "fork")[ranks.rank])
    none, two = ([numbers(dataset) for _ in range(2)] for dataset in map(pipeline, (0, 2)))
    assert none == two
    assert none[0] != none[1]
    assert float(torch.rand(())) == right
    for own, other in zip(*ranks.gather(two[0]), strict=True):
        assert not {*own[4:]} & {*other[4:]}


@on_ranks(2)
def test_a_state_taken_within_an_epoch_goes_on_with_the_next_step():
    config.set_multiprocessing_start_method("fork")
    dataset, begun, resumed = pipeline(2), pipeline(2), pipeline(1)
    numbers(dataset), numbers(begun)
    whole, steps = numbers(dataset), iter(begun)
    next(steps)
    state = begun.state_dict()
    assert state == {"epoch": 1, "step": 1, "seed": 0, "global_batch_size": 8, "steps_per_epoch": 3}
    resumed.load_state_dict(state)
    assert numbers(resumed) == whole[1:]
    assert len(numbers(resumed)) == len(whole)


@on_ranks(2)
def test_an_error_in_a_worker_names_the_sample_and_the_users_line(ranks):
    config.set_multiprocessing_start_method("fork")
    told = []
    for workers in (0, 1):
        try:
            list(images(workers).map(refuse_nine, "label").batch(4))
        except DataError as error:
            told.append(str(error))
    assert sorted(map(len, ranks.gather(told))) == [0, 2], "one rank has the sample"
    for text in told:
        assert text.endswith("map: refuse_nine failed on sample 9: ValueError: nine is not allowed")
        path, line = text.split(": ")[0].split(":")
        assert "raise ValueError" in Path(path).read_text().splitlines()[int(line) - 1]


@on_ranks(2)
def test_the_same_batch_on_all_ranks_is_warned_of_where_each_should_pass_a_part(ranks):
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(32, 3, generator=generator), torch.arange(32) % 2)
    arrays = tuple(tensor.numpy() for tensor in data.tensors)
    sampler = DistributedSampler(data, ranks.size, ranks.rank)
    for mode, batches, is_same in (
        ("semi_auto", DataLoader(data, 4), True),
        ("data_parallel", NumpySlicesDataset(arrays, num_shards=1).batch(4), True),
        ("data_parallel", DataLoader(data, 4, sampler=sampler), False),
        ("data_parallel", NumpySlicesDataset(arrays).batch(4), False),
    ):
        torch.manual_seed(0)
        parallel = AutoParallel(WithLoss(nn.Linear(3, 2), nn.CrossEntropyLoss()), mode)
        with warned() as lines:
            for x, y in batches:
                parallel(x, y).backward()
        assert len(lines) == (is_same and ranks.rank == 0), (mode, lines)
        for line in lines:
            assert line.startswith("all 2 ranks got the same batch in each of the first 2 steps")
            assert ("full_batch" in line) is (mode == "semi_auto")


READS_AND_WAITS = """
import sys, time
import numpy as np
from msrun.data import NumpySlicesDataset, config

config.set_multiprocessing_start_method(sys.argv[1])
dataset = NumpySlicesDataset(np.arange(64), num_parallel_workers=2).batch(2)
steps = iter(dataset)
next(steps)
print("reading", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_workers_end_with_the_process_that_reads_also_when_it_is_killed(tmp_path, start_method):
    script = tmp_path / "reads.py"
    script.write_text(READS_AND_WAITS)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "torch.py").write_text("another module of this name in the working directory")
    command = [sys.executable, script, start_method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=elsewhere) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        started = psutil.Process(reader.pid).children(recursive=True)
        assert len(started) >= 2
        os.kill(reader.pid, signal.SIGKILL)
        wait_until(lambda: not any(_lives(process) for process in started), "workers gone", 10.0)


def _lives(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
