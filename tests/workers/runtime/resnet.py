"""ResNet-50 of the example in every mode, and in one process.

usage: resnet.py EXAMPLE RESULT.json STEPS; the file holds the losses of the modes asked for, and of one process.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, sys.argv[1])
from only_cases import is_asked
from resnet import resnet50
from resnet50_distributed_training import HybridHead

from msrun.mindspore import Model, context, set_seed
from msrun.runtime import Callback, SoftmaxCrossEntropyExpand, get_group_size, get_rank, optim, release

STEPS, ROWS = int(sys.argv[3]), 16
LOSS = SoftmaxCrossEntropyExpand(sparse=True)


def batches():
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        images = torch.randn(ROWS, 3, 32, 32, dtype=torch.float64, generator=generator)
        yield images, torch.randint(0, 10, (ROWS,), dtype=torch.int32, generator=generator)


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def on_train_step_end(self, run_context):
        self.losses.append(run_context.loss)


def network(mode):
    set_seed(1)
    net = resnet50(head=HybridHead) if mode == "hybrid_parallel" else resnet50()
    if mode == "semi_auto_parallel":
        net.end_point.shard(((1, get_group_size()), (1, get_group_size())))
    return net.double()


def momentum(net):
    return optim.Momentum(filter(lambda x: x.requires_grad, net.get_parameters()), 0.01, 0.9)


def train(mode):
    context.set_auto_parallel_context(parallel_mode=mode, gradients_mean=True, compat="torch")
    net = network(mode)
    losses = Losses()
    data = [tuple(value.chunk(get_group_size())[get_rank()] for value in batch) for batch in batches()]
    Model(net, loss_fn=LOSS, optimizer=momentum(net)).train(1, data, losses)
    context.reset_auto_parallel_context()
    return losses.losses


def train_alone(parts):
    """In one process; batch statistics are those of each of `parts` parts of the batch."""
    net = network("stand_alone").set_train()  # as Model.train does
    optimizer = momentum(net)
    losses = []
    for images, labels in batches():
        total = 0.0
        for x, y in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            loss = LOSS(net(x), y) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


torch.set_num_threads(1)
MODES = ("semi_auto_parallel", "auto_parallel", "data_parallel", "hybrid_parallel")
results = {mode: train(mode) for mode in MODES if is_asked(mode)}
dist.barrier()
if get_rank() == 0:
    results["alone"] = train_alone(1)
    results["alone in parts"] = train_alone(get_group_size())
    Path(sys.argv[2]).write_text(json.dumps(results))
release()
