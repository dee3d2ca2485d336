"""Cases of reading data in ranks that have joined a world: worker processes, resuming, and what the ranks pass."""

import logging
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun.data import NumpySlicesDataset, config, vision
from msrun.errors import MsrunError
from msrun.runtime import AutoParallel, WithLoss, get_group_size, get_rank

NUM_SAMPLES = 24
START_METHODS = ("forkserver", "fork")
"""Of even and odd ranks: a fork server takes time."""


def add_noise(image):
    """Draw from all three generators that a user's function may draw from."""
    return image + np.float32(random.random() + np.random.rand() + float(torch.rand(())))


def refuse_nine(label):
    if label == 9:
        raise ValueError("nine\nis not allowed")
    return label


def images(workers):
    pixels = np.arange(NUM_SAMPLES * 4 * 4 * 3, dtype=np.uint8).reshape(NUM_SAMPLES, 4, 4, 3)
    return NumpySlicesDataset({"image": pixels, "label": np.arange(NUM_SAMPLES)}, num_parallel_workers=workers)


def pipeline(workers):
    operations = [vision.RandomCrop(4, 2), vision.RandomHorizontalFlip(), vision.Rescale(1.0, 0.0), add_noise]
    return images(workers).map(operations, "image").batch(4)


def numbers(steps):
    return [[*x.double().sum((1, 2, 3)).tolist(), *y.tolist()] for x, y in steps]


def any_number_of_workers():
    torch.manual_seed(1)
    right = float(torch.rand(()))
    torch.manual_seed(1)
    found = {}
    config.set_multiprocessing_start_method(START_METHODS[get_rank() % 2])
    for workers in (0, 2):
        dataset = pipeline(workers)
        found[str(workers)] = [numbers(dataset) for _ in range(2)]
    return {"epochs": found, "next": float(torch.rand(())), "right": right}


def resuming():
    dataset = pipeline(2)
    numbers(dataset)
    whole = numbers(dataset)
    begun = pipeline(2)
    numbers(begun)
    steps = iter(begun)
    next(steps)
    state = begun.state_dict()
    resumed = pipeline(1)
    resumed.load_state_dict(state)
    return {"state": state, "rest": numbers(resumed), "whole": whole, "after": numbers(resumed)}


def failing(dataset):
    try:
        list(dataset)
    except MsrunError as error:
        return {"kind": type(error).__name__, "text": str(error)}
    return {}


def failures():
    return {
        "function": failing(images(1).map(refuse_nine, "label").batch(4)),
        "same": failing(images(0).map(refuse_nine, "label").batch(4)),
    }


class Kept(logging.Handler):
    """The warnings of the runtime's log."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def train(mode, batches):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    parallel = AutoParallel(WithLoss(net, nn.CrossEntropyLoss()), mode)
    kept = Kept()
    log = logging.getLogger("msrun.runtime")
    log.addHandler(kept)
    try:
        for x, y in batches:
            parallel(x, y).backward()
    finally:
        log.removeHandler(kept)
    return kept.lines


def warnings():
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(32, 3, generator=generator), torch.arange(32) % 2)
    sampler = DistributedSampler(data, get_group_size(), get_rank())
    ours = NumpySlicesDataset((data.tensors[0].numpy(), data.tensors[1].numpy()))
    everything = NumpySlicesDataset((data.tensors[0].numpy(), data.tensors[1].numpy()), num_shards=1)
    return {
        "semi_auto": train("semi_auto", DataLoader(data, 4)),
        "data_parallel": train("data_parallel", everything.batch(4)),
        "sampler": train("data_parallel", DataLoader(data, 4, sampler=sampler)),
        "ours": train("data_parallel", ours.batch(4)),
    }


def cases(_world_size):
    """Return what each case does on a rank."""
    return {"workers": any_number_of_workers, "resuming": resuming, "failures": failures, "warnings": warnings}
