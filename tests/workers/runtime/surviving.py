"""Trains with ModelCheckpoint and goes on from the newest checkpoint; may be told to die once.

usage: surviving.py DIRECTORY [RANK STEP]
Dies by SIGKILL on that rank while its tensors of that step are written. FORM is file or directory.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.data import NumpySlicesDataset
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
from msrun.runtime.checkpoint import storage

SAMPLES, BATCH, EPOCHS = 40, 8, 3
WIDTH = int(os.environ.get("WIDTH", "16"))


class KnowStep(Callback):
    def on_train_step_end(self, context):
        place["step"] = context.cur_step_num


def plan_death():
    write = storage.write_parts

    def write_then_die(*args):
        result = write(*args)
        if place["step"] == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    storage.write_parts = write_then_die


place = {"step": 0}
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
if len(sys.argv) > 2 and get_rank() == int(sys.argv[2]):
    plan_death()
config = CheckpointConfig(
    save_checkpoint_steps=4,
    keep_checkpoint_max=int(os.environ.get("KEEP", "2")),
    integrated_save=os.environ.get("FORM", "file") == "file",
)
callbacks = [KnowStep(), LossMonitor(), ModelCheckpoint("net", folder, config)]
Model(step, optimizer=optimizer).train(EPOCHS, data, callbacks, resume_from=latest_checkpoint(folder, "net"))
release()
