"""Trains with ModelCheckpoint and goes on from the newest checkpoint; may be told to die once.

usage: surviving.py DIRECTORY [in-write RANK STEP | before-rename RANK STEP | after-step RANK STEP]
Dies by SIGKILL on that rank at that step, in its first attempt only: while its tensors are written, when everything is
written but the checkpoint has no name yet, or between two steps. FORM is file or directory; with BESIDE a thread
writes.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.runtime import (
    AutoParallel,
    Callback,
    CheckpointConfig,
    LossMonitor,
    Model,
    ModelCheckpoint,
    WithLoss,
    get_group_size,
    get_rank,
    init,
    latest_checkpoint,
    no_init_parameters,
    optim,
    release,
)
from msrun.runtime.checkpoint import save as writing
from msrun.runtime.data import NumpySlicesDataset

SAMPLES, BATCH, EPOCHS = 40, 8, 3
WIDTH = int(os.environ.get("WIDTH", "16"))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class DieAfterStep(Callback):
    def on_train_step_end(self, context):
        place["step"] = context.cur_step_num
        if how == "after-step" and context.cur_step_num == when:
            die()


def plan_death():
    write, rename = writing.DirectoryWriter.write_data, writing.give_name

    def write_then_die(*args):
        result = write(*args)
        if how == "in-write" and place["step"] == when:
            die()
        return result

    def die_before_rename(temporary, final):
        if how == "before-rename" and place["step"] == when:
            die()
        rename(temporary, final)

    writing.DirectoryWriter.write_data = write_then_die
    writing.give_name = die_before_rename


place = {"step": 0}
how, rank, when = sys.argv[2:5] if len(sys.argv) > 2 else ("", "-1", "-1")
rank, when = int(rank), int(when)

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
init(timeout_s=120)
random = np.random.RandomState(0)
data = NumpySlicesDataset((random.rand(SAMPLES, 8), random.randint(0, 4, SAMPLES)), ["x", "y"])
data = data.batch(BATCH // get_group_size())
with no_init_parameters():
    network = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
    optimizer = optim.Adam(network.parameters(), lr=1e-2)
step = AutoParallel(WithLoss(network, F.cross_entropy)).hsdp(threshold=0)

folder = Path(sys.argv[1])
died = folder.with_name(folder.name + ".died")
if get_rank() == rank and not died.exists():
    died.touch()
    plan_death()
else:
    how = ""
config = CheckpointConfig(
    save_checkpoint_steps=4,
    keep_checkpoint_max=int(os.environ.get("KEEP", "2")),
    integrated_save=os.environ.get("FORM", "file") == "file",
    async_save=bool(os.environ.get("BESIDE")),
)
callbacks = [DieAfterStep(), LossMonitor(), ModelCheckpoint("net", folder, config)]
Model(step, optimizer=optimizer).train(EPOCHS, data, callbacks, resume_from=latest_checkpoint(folder, "net"))
release()
