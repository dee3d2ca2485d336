"""Pipeline parallel: two stages of two ranks; micro batches follow each other through the stages.

Start with `bash run.sh [DATA_PATH]`. DATA_PATH holds the four MNIST idx files; without it the program trains on
scikit-learn's handwritten digits. At the end it writes the
order of the work as a picture, `schedule.svg`. One process gives the same losses: `python train.py`.
"""

import os
from pathlib import Path

import torch
from torch import nn

from msrun.runtime import AutoParallel, Pipeline, WithLoss, get_group_size, get_rank, init, no_init_parameters, release
from msrun.runtime.data import MnistDataset, transforms, vision, write_digits

init()
torch.manual_seed(1)
STAGES = 2 if get_group_size() > 1 else 1


def create_dataset(batch_size):
    """Ranks of equal place in their stages read the same part of the batch."""
    per_stage = get_group_size() // STAGES
    dataset_path = os.getenv("DATA_PATH") or write_digits(Path(__file__).parent.parent / "data" / "digits")
    dataset = MnistDataset(dataset_path, num_shards=per_stage, shard_id=get_rank() % per_stage)
    image_transforms = [
        vision.Rescale(1.0 / 255.0, 0),
        vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        vision.HWC2CHW(),
    ]
    label_transform = transforms.TypeCast(torch.int64)
    dataset = dataset.map(image_transforms, "image")
    dataset = dataset.map(label_transform, "label")
    return dataset.batch(batch_size // per_stage)


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

stage_config = {"first": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "last": 1}
pipeline = Pipeline(WithLoss(net, nn.CrossEntropyLoss()), 4, stage_config if STAGES > 1 else None)
model = AutoParallel(pipeline, parallel_mode="semi_auto").pipeline(stages=STAGES, scheduler="1f1b")

for epoch in range(int(os.getenv("EPOCHS", "10"))):
    for i, (image, label) in enumerate(data_set):
        loss = model(image, label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 10 == 0:
            print(f"epoch: {epoch}, step: {i}, loss is {loss.item()}")

if get_group_size() > 1 and get_rank() == 0:
    Path("schedule.svg").write_text(model.plan.schedule_svg())
    print(model.plan.schedule_text())
release()
