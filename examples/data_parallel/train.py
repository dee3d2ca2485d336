"""Data parallel: every rank has the whole network and its own part of the batch (torch's DDP, no capture).

Start with `bash run.sh [DATA_PATH]`. DATA_PATH holds the four MNIST idx files; without it the program trains on
scikit-learn's handwritten digits. Dropout has the masks of one process, so
`python train.py` gives the same losses.
"""

import os
from pathlib import Path

import torch
from torch import nn

from msrun.runtime import (
    AutoParallel,
    WithLoss,
    get_group_size,
    init,
    release,
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
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16 * 7 * 7, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.head(self.drop(x.flatten(1)))


net = Network()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
model = AutoParallel(WithLoss(net, nn.CrossEntropyLoss()), parallel_mode="data_parallel")

for epoch in range(int(os.getenv("EPOCHS", "10"))):
    for i, (image, label) in enumerate(data_set):
        loss = model(image, label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 10 == 0:
            print(f"epoch: {epoch}, step: {i}, loss is {loss.item()}")

release()
