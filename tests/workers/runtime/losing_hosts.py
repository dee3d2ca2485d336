"""Trains from the newest checkpoint on; the agent of one host is killed from below at steps 6 and 10, then no more.

usage: losing_hosts.py DIRECTORY [ADDRESS]; ADDRESS of the host, as the rank table of the job has it.
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
    init,
    latest_checkpoint,
    no_init_parameters,
    optim,
    release,
)

ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def own_address():
    servers = json.loads(Path(os.environ["RANK_TABLE_FILE"]).read_text())["server_list"]
    ranks = {device["rank_id"]: server["server_id"] for server in servers for device in server["device"]}
    assert len(ranks) == int(os.environ["WORLD_SIZE"])
    return ranks[os.environ["RANK"]]


class LoseHost(Callback):
    def on_train_step_end(self, context):
        if is_on_host and ATTEMPT < 2 and context.cur_step_num == (6, 10)[ATTEMPT]:
            os.kill(parent_of(parent_of(os.getpid())), signal.SIGKILL)
            time.sleep(600)


is_on_host = len(sys.argv) > 2 and own_address() == sys.argv[2]
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
init(timeout_s=120)
random = np.random.RandomState(0)
data = NumpySlicesDataset((random.rand(48, 8), random.randint(0, 4, 48)), ["x", "y"]).batch(12 // get_group_size())
with no_init_parameters():
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = optim.Adam(network.parameters(), lr=1e-2)
step = AutoParallel(WithLoss(network, F.cross_entropy)).hsdp(threshold=0)
config = CheckpointConfig(save_checkpoint_steps=4, keep_checkpoint_max=2)
callbacks = [LoseHost(), LossMonitor(), ModelCheckpoint("net", sys.argv[1], config)]
Model(step, optimizer=optimizer).train(4, data, callbacks, resume_from=latest_checkpoint(sys.argv[1], "net"))
release()
