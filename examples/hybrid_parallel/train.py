"""Hybrid parallel: data parallel around parts that are cut by hand, as the network says itself.

Start with `bash run.sh [DATA_PATH]`. DATA_PATH holds the four MNIST idx files; without it the program trains on
scikit-learn's handwritten digits. Weights that are marked
`layerwise_parallel` belong to their rank; what the ranks exchange stands in `forward`. The example operator_parallel
has the same cut made by strategies. One process gives the same losses: `python train.py`.
"""

import os
from pathlib import Path

import torch
from torch import nn

from msrun.runtime import (
    AutoParallel,
    WithLoss,
    all_reduce,
    get_group_size,
    get_rank,
    init,
    layerwise_parallel,
    release,
)
from msrun.runtime.data import MnistDataset, transforms, vision, write_digits

init()
torch.manual_seed(1)


def create_dataset(batch_size):
    """create dataset"""
    dataset_path = os.getenv("DATA_PATH") or write_digits(Path(__file__).parent.parent / "data" / "digits")
    dataset = MnistDataset(dataset_path, num_shards=1, shard_id=0)
    image_transforms = [
        vision.Rescale(1.0 / 255.0, 0),
        vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        vision.HWC2CHW(),
    ]
    label_transform = transforms.TypeCast(torch.int64)
    dataset = dataset.map(image_transforms, "image")
    dataset = dataset.map(label_transform, "label")
    # every rank sees the whole batch: the weights are cut, not the rows
    return dataset.batch(batch_size)


data_set = create_dataset(32)


def own_part(whole, dim):
    """Return this rank's part of a weight."""
    return layerwise_parallel(nn.Parameter(whole.chunk(get_group_size(), dim)[get_rank()].clone()))


class HybridParallelNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight1 = own_part(torch.randn(28 * 28, 512) * 0.03, 1)
        self.weight2 = own_part(torch.randn(512, 10) * 0.03, 0)
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, x):
        hidden = torch.relu(x.flatten(1) @ self.weight1)
        return all_reduce(hidden @ self.weight2) + self.bias


net = HybridParallelNet()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
model = AutoParallel(WithLoss(net, nn.CrossEntropyLoss()), parallel_mode="hybrid_parallel")

for epoch in range(int(os.getenv("EPOCHS", "10"))):
    for i, (image, label) in enumerate(data_set):
        loss = model(image, label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 10 == 0:
            print(f"epoch: {epoch}, step: {i}, loss is {loss.item()}")

release()
