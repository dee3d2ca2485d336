"""Optimizer parallel: weights and optimizer state are stored cut over the ranks (MindSpore's hsdp, ZeRO).

Start with `bash run.sh [DATA_PATH]`. DATA_PATH holds the four MNIST idx files; without it the program trains on
scikit-learn's handwritten digits. The batch of 32 is shared by all ranks, so one process gives the same losses:
`python train.py`.
"""

import os
from pathlib import Path

import torch
from torch import nn

from msrun.runtime import (
    AutoParallel,
    get_group_size,
    init,
    no_init_parameters,
    optim,
    release,
    set_comm_fusion,
    value_and_grad,
)
from msrun.runtime.data import MnistDataset, transforms, vision, write_digits

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


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = nn.Linear(28 * 28, 512)
        self.layer2 = nn.Linear(512, 512)
        self.layer3 = nn.Linear(512, 10)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.flatten(x)
        x = self.layer1(x)
        x = self.relu(x)
        x = self.layer2(x)
        x = self.relu(x)
        return self.layer3(x)


with no_init_parameters:
    net = Network()
    optimizer = optim.SGD(net.parameters(), 1e-2)

set_comm_fusion(net.layer1, 0)
set_comm_fusion(net.layer2, 1)
set_comm_fusion(net.layer3, 2)

loss_fn = nn.CrossEntropyLoss()


def forward_fn(data, target):
    logits = net(data)
    loss = loss_fn(logits, target)
    return loss, logits


grad_fn = value_and_grad(forward_fn, None, net.parameters(), has_aux=True)


def train_step(inputs, targets):
    (loss_value, _), grads = grad_fn(inputs, targets)
    optimizer(grads)
    return loss_value


parallel_net = AutoParallel(train_step, parallel_mode="semi_auto")
parallel_net.hsdp()

for epoch in range(int(os.getenv("EPOCHS", "10"))):
    i = 0
    for image, label in data_set:
        loss_output = parallel_net(image, label)
        if i % 10 == 0:
            print(f"epoch: {epoch}, step: {i}, loss is {loss_output.item()}")
        i += 1

release()
