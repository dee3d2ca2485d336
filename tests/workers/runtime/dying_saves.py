"""Saves after every step until it dies at a random moment, or until LAST steps when nothing is to kill it.

usage: dying_saves.py FOLDER SEED file|directory now|beside [LAST]
Step t adds t to every weight and makes every momentum -t, so a checkpoint says whether it is whole and of one step.
One that finds a checkpoint that is not, or finds the last complete save gone, exits with status 93. The seed says which
rank dies and when; a timer kills it as SIGKILL would: nothing is caught.
"""

import os
import random
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from msrun.runtime import (
    AutoParallel,
    Callback,
    CheckpointConfig,
    Model,
    ModelCheckpoint,
    get_rank,
    init,
    latest_checkpoint,
    release,
)
from msrun.runtime.checkpoint.directory import find_checkpoints
from msrun.runtime.checkpoint.reader import open_checkpoint, verify_checkpoint

KEEP, LONGEST_S = 2, 0.1
BAD = 93
folder, seed, form, when = Path(sys.argv[1]), *sys.argv[2:5]
last_step = int(sys.argv[5]) if len(sys.argv) > 5 else None
noted = folder.with_name("saved")


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(32, 1024)) for _ in range(6))

    def forward(self, x):
        return -sum(weight.sum() for weight in self.weights) * x.mean()


class ArmTimer(Callback):
    """Before the first save."""

    is_armed = False

    def on_train_step_end(self, context):
        generator = random.Random(seed)
        rank, moment = generator.randrange(2), generator.uniform(1e-4, LONGEST_S)
        if last_step is None and get_rank() == rank and not self.is_armed:
            self.is_armed = True
            signal.setitimer(signal.ITIMER_REAL, moment)
        if last_step is not None and context.cur_step_num >= last_step:
            context.request_stop()


class NoteSave(Callback):
    """Before every step: that of the last one is saved; beside the training, that of the one before it."""

    def on_train_step_begin(self, context):
        if get_rank() == 0:
            noted.write_text(str(context.cur_step_num - (when == "beside")))


def check():
    """Look at every checkpoint that is taken for complete, on the rank that removes the old ones."""
    if get_rank() != 0:
        return
    for path, manifest in find_checkpoints(folder, "net"):
        step = manifest.position.step
        reader, _ = open_checkpoint([path])
        assert len(reader.tensors) == 12, f"{path}: {[*reader.tensors]}"
        for key in reader.tensors:
            right = step * (step + 1) / 2 if key[0] == "model" else -step
            assert bool((reader.read(key) == right).all()), f"{path}: {key} is not that of step {step}"
        assert all(not file.fault for file in verify_checkpoint(path)), f"{path} is damaged"
    found = find_checkpoints(folder, "net")
    last = found[-1][1].position.step if found else 0
    known = int(noted.read_text() or 0) if noted.exists() else 0
    assert last >= known, f"step {known} was saved, the newest checkpoint is of step {last}"
    assert len(found) <= KEEP + 1, "the old ones go"


torch.set_default_dtype(torch.float64)
init(timeout_s=60)
try:
    check()
except AssertionError as error:
    print(error, flush=True)
    os._exit(BAD)
network = Counter()
optimizer = torch.optim.SGD(network.parameters(), lr=1.0, momentum=1.0)
config = CheckpointConfig(1, keep_checkpoint_max=KEEP, integrated_save=form == "file", async_save=when == "beside")
model = Model(AutoParallel(network).hsdp(threshold=0), optimizer=optimizer)
data = [(torch.ones(2, 2),)] * 4
callbacks = [ArmTimer(), ModelCheckpoint("net", folder, config), NoteSave()]
model.train(10**6, data, callbacks, resume_from=latest_checkpoint(folder, "net"))
check()
release()
