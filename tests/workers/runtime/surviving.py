"""Trains with ModelCheckpoint and goes on from the newest checkpoint; may be told to die.

usage: surviving.py DIRECTORY [RANK STEP | ADDRESS]
Dies by SIGKILL on that rank while its tensors of that step are written. Or kills the agent of the host with this
address in the rank table, at steps 6 and 10, then no more. FORM is file or directory.
"""

import json
import os
import signal
import sys
import time
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


ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def own_address():
    servers = json.loads(Path(os.environ["RANK_TABLE_FILE"]).read_text())["server_list"]
    ranks = {device["rank_id"]: server["server_id"] for server in servers for device in server["device"]}
    assert len(ranks) == int(os.environ["WORLD_SIZE"])
    return ranks[os.environ["RANK"]]


class KnowStep(Callback):
    def on_train_step_end(self, context):
        place["step"] = context.cur_step_num
        if len(sys.argv) == 3 and ATTEMPT < 2 and place["step"] == (6, 10)[ATTEMPT] and own_address() == sys.argv[2]:
            os.kill(parent_of(parent_of(os.getpid())), signal.SIGKILL)
            time.sleep(600)


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
if len(sys.argv) == 4 and get_rank() == int(sys.argv[2]):
    plan_death()
config = CheckpointConfig(
    save_checkpoint_steps=4,
    keep_checkpoint_max=int(os.environ.get("KEEP", "2")),
    integrated_save=os.environ.get("FORM", "file") == "file",
)
callbacks = [KnowStep(), LossMonitor(), ModelCheckpoint("net", folder, config)]
Model(step, optimizer=optimizer).train(EPOCHS, data, callbacks, resume_from=latest_checkpoint(folder, "net"))
release()
