"""A job that survives a lost host: it writes checkpoints, and the next attempt goes on from the newest complete one.

`bash run.sh [DATA_PATH]` rehearses three hosts of two workers on this machine, of which one is a spare. DATA_PATH holds
the four MNIST idx files; without it the program trains on scikit-learn's handwritten digits. Take a host away while
it runs, with `msrun drain host1` here in another terminal, or kill its agent or a worker: the losses go on where the
newest checkpoint was written, and end with the number of a run that nobody disturbed. It may also go on with another
number of workers, or as one process: `python train.py`. Remove the folder `checkpoints` to begin anew.
"""

import os
from pathlib import Path

import torch
from torch import nn

from msrun.data import MnistDataset, transforms, vision, write_digits
from msrun.runtime import (
    AutoParallel,
    CheckpointConfig,
    LossMonitor,
    Model,
    ModelCheckpoint,
    WithLoss,
    get_group_size,
    init,
    latest_checkpoint,
    no_init_parameters,
    release,
)
from msrun.runtime.optim import Momentum

init()
torch.manual_seed(1)


def create_dataset(batch_size):
    dataset_path = os.getenv("DATA_PATH") or write_digits(Path(__file__).parent.parent / "data" / "digits")
    dataset = MnistDataset(dataset_path)
    image_transforms = [
        vision.Rescale(1.0 / 255.0, 0),
        vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        vision.HWC2CHW(),
    ]
    dataset = dataset.map(image_transforms, "image")
    dataset = dataset.map(transforms.TypeCast(torch.int64), "label")
    return dataset.batch(batch_size // get_group_size())


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = nn.Linear(28 * 28, 512)
        self.layer2 = nn.Linear(512, 512)
        self.layer3 = nn.Linear(512, 10)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.relu(self.layer1(self.flatten(x)))
        return self.layer3(self.relu(self.layer2(x)))


data_set = create_dataset(32)
with no_init_parameters():
    net = Network()
    optimizer = Momentum(net.parameters(), 1e-2, 0.9)

parallel_net = AutoParallel(WithLoss(net, nn.CrossEntropyLoss())).hsdp()
model = Model(parallel_net, optimizer=optimizer)

config = CheckpointConfig(save_checkpoint_steps=int(os.getenv("SAVE_EVERY", "20")), keep_checkpoint_max=3)
checkpoint_cb = ModelCheckpoint(prefix="digits", directory="checkpoints", config=config)
loss_cb = LossMonitor(int(os.getenv("PRINT_EVERY", "10")))

model.train(
    int(os.getenv("EPOCHS", "10")),
    data_set,
    callbacks=[loss_cb, checkpoint_cb],
    resume_from=latest_checkpoint("checkpoints"),
)

release()
