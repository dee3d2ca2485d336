"""Multi-copy parallel: two halves of the batch take turns, one computes while the other's data travels.

Start with `bash run.sh [DATA_PATH]`. DATA_PATH holds the four MNIST idx files; without it the program trains on
scikit-learn's handwritten digits. compat="mindspore" adds the losses of the two copies up, as MindSpore does: the
losses start at 2 ln 10 = 4.6. Leave it out to get their mean.
"""

import os
from pathlib import Path

import torch
from torch import nn

from msrun.runtime import (
    AutoParallel,
    LossMonitor,
    MicroBatchInterleaved,
    Model,
    WithLoss,
    get_group_size,
    init,
    no_init_parameters,
    release,
)
from msrun.runtime.data import MnistDataset, transforms, vision, write_digits
from msrun.runtime.optim import SGD

init()
torch.manual_seed(1)


def create_dataset(batch_size):
    """create dataset"""
    dataset_path = os.getenv("DATA_PATH") or write_digits(Path(__file__).parent.parent / "data" / "digits")
    dataset = MnistDataset(dataset_path)
    image_transforms = [
        vision.Rescale(1.0 / 255.0, 0),
        vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        vision.HWC2CHW(),
    ]
    label_transform = transforms.TypeCast(torch.int64)
    dataset = dataset.map(image_transforms, "image")
    dataset = dataset.map(label_transform, "label")
    return dataset.batch(batch_size // get_group_size())


data_set = create_dataset(32)


def dense(inputs, outputs):
    """A linear layer with weights from N(0, 0.01) and zero biases, MindSpore's Dense(weight_init="normal")."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
    return layer


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.Sequential(
            dense(28 * 28, 512),
            nn.ReLU(),
            dense(512, 512),
            nn.ReLU(),
            dense(512, 10),
        )

    def forward(self, x):
        x = self.flatten(x)
        return self.dense_relu_sequential(x)


with no_init_parameters():
    net = Network()
    optimizer = SGD(net.parameters(), 1e-2)

loss_fn = nn.CrossEntropyLoss()
loss_cb = LossMonitor(int(os.getenv("PRINT_EVERY", "100")))
net = MicroBatchInterleaved(WithLoss(net, loss_fn), 2)
net = AutoParallel(net, parallel_mode="semi_auto", compat="mindspore")
model = Model(net, optimizer=optimizer)
model.train(int(os.getenv("EPOCHS", "10")), data_set, callbacks=[loss_cb])

release()
