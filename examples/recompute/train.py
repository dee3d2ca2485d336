"""Recompute: blocks are computed again before their backward pass instead of being remembered.

Start with `bash run.sh [DATA_PATH]`. DATA_PATH holds the four MNIST idx files; without it the program trains on
scikit-learn's handwritten digits. It prints what a rank
keeps between the forward and the backward pass. One process gives the same losses: `python train.py`.
"""

import os
from pathlib import Path

import torch
from torch import nn

from msrun.runtime import AutoParallel, WithLoss, get_group_size, get_rank, init, no_init_parameters, recompute, release
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


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first = nn.Linear(28 * 28, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.last = nn.Linear(width, 10)

    def forward(self, x):
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


with no_init_parameters():
    net = Network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

for block in net.blocks:
    recompute(block)
model = AutoParallel(WithLoss(net, nn.CrossEntropyLoss()), parallel_mode="semi_auto").hsdp(threshold=16)

for epoch in range(int(os.getenv("EPOCHS", "10"))):
    for i, (image, label) in enumerate(data_set):
        loss = model(image, label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 10 == 0:
            print(f"epoch: {epoch}, step: {i}, loss is {loss.item()}")

if get_group_size() > 1 and get_rank() == 0:
    print(model.activations)
release()
