"""A small network on handwritten digits, data parallel. The same program for every way to start it.

`init()` finds out how it was started: see README.md. DATA_PATH holds the four MNIST idx files; without it the program
trains on scikit-learn's digits. `python train.py` alone is one process, and has the same losses.
"""

import os
from pathlib import Path

import torch
from torch import nn

from msrun.data import MnistDataset, transforms, vision, write_digits
from msrun.runtime import AutoParallel, WithLoss, get_group_size, get_rank, init, release

BATCH_SIZE = 32

init()
torch.manual_seed(1)
print(f"rank {get_rank()} of {get_group_size()}")

data_path = os.getenv("DATA_PATH") or write_digits(Path(__file__).resolve().parent.parent / "data" / "digits")
dataset = MnistDataset(data_path)
dataset = dataset.map([vision.Rescale(1.0 / 255.0, 0), vision.HWC2CHW()], "image")
dataset = dataset.map(transforms.TypeCast(torch.int64), "label")
dataset = dataset.batch(BATCH_SIZE // get_group_size())

net = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
model = AutoParallel(WithLoss(net, nn.CrossEntropyLoss()), parallel_mode="data_parallel")

for epoch in range(int(os.getenv("EPOCHS", "3"))):
    for step, (image, label) in enumerate(dataset):
        loss = model(image, label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"epoch: {epoch}, step: {step}, loss is {loss.item()}")

release()
