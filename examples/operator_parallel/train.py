"""Operator parallel: the weights of single operators are cut over the ranks (tensor parallel).

Start with `bash run.sh [DATA_PATH]`. DATA_PATH holds the four MNIST idx files; without it the program trains on
scikit-learn's handwritten digits. The second half of the
program prints what was decided for every operator. One process gives the same losses: `python train.py`.
"""

import os
from pathlib import Path

import torch
from torch import nn

from msrun.runtime import (
    AutoParallel,
    Layout,
    SoftmaxCrossEntropyExpand,
    WithLoss,
    get_group_size,
    get_rank,
    init,
    no_init_parameters,
    optim,
    release,
    shard,
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
        self.layer1 = nn.Linear(28 * 28, 512)
        self.layer2 = nn.Linear(512, 512)
        self.layer3 = nn.Linear(512, 10)

    def forward(self, x):
        x = torch.relu(self.layer1(x.flatten(1)))
        x = torch.relu(self.layer2(x))
        return self.layer3(x)


with no_init_parameters():
    net = Network()
    optimizer = optim.Momentum(net.parameters(), 0.01, 0.9)

if get_group_size() == 8:
    shard(net.layer1, ((2, 1), (4, 1)))  # 2 parts of the batch, 4 parts of the outputs
    shard(net.layer2, ((2, 4), (1, 4)))  # 4 parts of the inputs: partial sums, made whole by an all-reduce
    layout = Layout((2, 4), ("dp", "mp"))
    shard(net.layer3, (layout("dp", "mp"), layout("None", "mp")), out_strategy=(layout("dp", "None"),))

model = AutoParallel(WithLoss(net, SoftmaxCrossEntropyExpand(sparse=True)), parallel_mode="semi_auto")

for epoch in range(int(os.getenv("EPOCHS", "10"))):
    for i, (image, label) in enumerate(data_set):
        loss = model(image, label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 10 == 0:
            print(f"epoch: {epoch}, step: {i}, loss is {loss.item()}")

if get_group_size() > 1 and get_rank() == 0:
    print(model.plan.explain())
release()
