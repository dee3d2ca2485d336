"""ResNet-50 of the example, from its beginning or from a checkpoint, on any number of ranks.

usage: resnet_resume.py EXAMPLE CHECKPOINTS RESULT.json STEPS; it goes on from the newest checkpoint, if there is one.
The file holds the losses of this run.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, sys.argv[1])
from resnet import resnet50

from msrun.mindspore import Model, context, set_seed
from msrun.mindspore.train import CheckpointConfig, ModelCheckpoint
from msrun.runtime import (
    Callback,
    SoftmaxCrossEntropyExpand,
    get_group_size,
    get_rank,
    init,
    latest_checkpoint,
    optim,
    release,
)
from msrun.runtime.data import NumpySlicesDataset

ROWS, SAVE_AFTER = 16, 2


class Losses(Callback):
    def __init__(self, steps):
        self.losses, self.steps = [], steps

    def on_train_step_end(self, run_context):
        self.losses.append(run_context.loss)
        if run_context.cur_step_num == self.steps:
            run_context.request_stop()


init()
set_seed(1)
context.set_auto_parallel_context(parallel_mode="semi_auto_parallel", enable_parallel_optimizer=True, compat="torch")
generator = np.random.default_rng(5)
images = generator.standard_normal((5 * ROWS, 3, 32, 32))
data = NumpySlicesDataset((images, generator.integers(0, 10, 5 * ROWS, dtype=np.int32)))
data = data.batch(ROWS // get_group_size())
net = resnet50().double()
net.end_point.shard(((1, get_group_size()), (1, get_group_size())))
losses = Losses(int(sys.argv[4]))
saving = ModelCheckpoint("net", sys.argv[2], CheckpointConfig(save_checkpoint_steps=SAVE_AFTER, integrated_save=False))
newest = latest_checkpoint(sys.argv[2])
callbacks = [losses] if newest else [losses, saving]
model = Model(
    net, loss_fn=SoftmaxCrossEntropyExpand(sparse=True), optimizer=optim.Momentum(net.parameters(), 0.01, 0.9)
)
model.train(2, data, callbacks, resume_from=newest)
if get_rank() == 0:
    Path(sys.argv[3]).write_text(json.dumps(losses.losses))
release()
