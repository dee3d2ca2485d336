"""One network on MNIST in every kind of parallelism: MODE=data, optimizer, operator, pipeline, copies and more.

Start with `bash run.sh [DATA_PATH] [MODE]`. DATA_PATH holds the four MNIST idx files; without it the program trains on
scikit-learn's handwritten digits. The batch of 32 is shared by all ranks, so that one process gives the same losses in
every mode: `python train.py`.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn

from msrun.data import MnistDataset, transforms, vision, write_digits
from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    MicroBatchInterleaved,
    Pipeline,
    WithLoss,
    get_group_size,
    get_rank,
    init,
    no_init_parameters,
    parallelize,
    recompute,
    release,
)

MODES = {
    "data": "every rank has the whole network and its own rows (torch's DDP)",
    "optimizer": "weights, gradients and optimizer state are stored cut over the ranks (ZeRO, FSDP, MindSpore's hsdp)",
    "operator": "layers are cut in four, rows in two (tensor parallel), by names",
    "pipeline": "two stages; micro batches follow each other through them",
    "accumulate": "a batch in two parts, with the memory of one and one message of gradients",
    "copies": "two halves of the batch take turns: one computes while the data of the other travels",
    "recompute": "blocks are computed again before their backward pass instead of being remembered",
    "fusion": "as optimizer, with the gradients in messages of 1 MB",
}
parser = argparse.ArgumentParser()
parser.add_argument("--mode", default=os.getenv("MODE", "optimizer"), choices=list(MODES), metavar="MODE")
mode = parser.parse_args().mode

init()
torch.manual_seed(1)
RANKS = get_group_size()
STAGES = 2 if mode == "pipeline" and RANKS > 1 else 1


def create_dataset(batch_size):
    """Each rank reads its own part of the batch; ranks of equal place in their stages read the same."""
    parts = RANKS // STAGES
    dataset_path = os.getenv("DATA_PATH") or write_digits(Path(__file__).parent.parent / "data" / "digits")
    dataset = MnistDataset(dataset_path, num_shards=parts, shard_id=get_rank() % parts)
    image_transforms = [
        vision.Rescale(1.0 / 255.0, 0),
        vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        vision.HWC2CHW(),
    ]
    dataset = dataset.map(image_transforms, "image")
    dataset = dataset.map(transforms.TypeCast(torch.int64), "label")
    return dataset.batch(batch_size // parts)


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


data_set = create_dataset(32)
with no_init_parameters():  # a rank makes only what it keeps
    net = Network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
whole = WithLoss(net, nn.CrossEntropyLoss())

if mode == "data":
    model = AutoParallel(whole, "data_parallel")
elif mode == "operator":
    if RANKS == 8:
        parallelize(net, {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, tensor_parallel=4)
    model = AutoParallel(whole)
elif mode == "pipeline":
    stage_of = {"first": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "last": 1}
    model = AutoParallel(Pipeline(whole, 4, stage_of if STAGES > 1 else None)).pipeline(STAGES, scheduler="1f1b")
elif mode == "accumulate":
    model = AutoParallel(GradAccumulation(whole, 2)).hsdp(threshold=16, optimizer_level="level2")
elif mode == "copies":
    model = AutoParallel(MicroBatchInterleaved(whole, 2))
else:
    if mode == "recompute":
        for block in net.blocks:
            recompute(block)
    model = AutoParallel(whole).hsdp(threshold=16)
    if mode == "fusion":
        model.comm_fusion({"allreduce": {"mode": "size", "config": 1}, "reducescatter": {"mode": "size", "config": 1}})

for epoch in range(int(os.getenv("EPOCHS", "10"))):
    for i, (image, label) in enumerate(data_set):
        loss = model(image, label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 10 == 0:
            print(f"epoch: {epoch}, step: {i}, loss is {loss.item()}")

if RANKS > 1 and get_rank() == 0 and mode != "data":
    print(model.plan.explain() if mode == "operator" else model.plan.summary())
    if mode == "recompute":
        print(model.activations)
    if mode == "pipeline":
        print(model.plan.schedule_text())
        Path("schedule.svg").write_text(model.plan.schedule_svg())
release()
