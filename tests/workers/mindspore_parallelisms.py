"""Kinds of parallelism in MindSpore's words, on 4 ranks and in one process, from the same weights and rows.

mindspore_parallelisms.py RESULT    RESULT gets {case: losses, results or weights} of this rank
"""

import json
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Model, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.parallel import AutoParallel, Layout, Pipeline
from mindspore.train import Accuracy, LossMonitor

ROWS, FEATURES, CLASSES = 16, 8, 4
rng = np.random.default_rng(0)
images = rng.normal(size=(ROWS, 2, FEATURES)).astype(np.float32)
labels = rng.integers(0, CLASSES, ROWS).astype(np.int32)
targets = rng.normal(size=(ROWS, CLASSES)).astype(np.float32)


class Network(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Dense(2 * FEATURES, 12), nn.BatchNorm1d(12), nn.Dense(12, CLASSES)
        for index, one in enumerate(self.trainable_params()):
            one.set_data(
                Tensor(np.sin(np.arange(one.numel(), dtype=np.float32)).reshape(tuple(one.shape)) / (index + 2))
            )

    def construct(self, x):
        return self.last(ops.relu(self.first(x.reshape(x.shape[0], -1))))


class Products(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first = ms.Parameter(Tensor(np.sin(np.arange(128, dtype=np.float32)).reshape(16, 8)))
        self.last = ms.Parameter(Tensor(np.cos(np.arange(32, dtype=np.float32)).reshape(4, 8)))
        self.matmul, self.relu, self.transposed = ops.MatMul(), ops.ReLU(), ops.MatMul(transpose_b=True)

    def construct(self, x):
        return self.transposed(self.relu(self.matmul(x, self.first)), self.last)


def products(matrix, *strategies):
    net = Products()
    layout = Layout(matrix, ("x", "y", "z"))
    cut = [tuple(layout(*entry) for entry in entries) for entries in strategies]
    if get_group_size() > 1:
        net.matmul.add_prim_attr("enable_nd_tp", value=True).shard(cut[0])
        net.relu.shard(cut[1])
        net.transposed.add_prim_attr("enable_nd_tp", value=True).shard(cut[2])
    net = AutoParallel(net, "semi_auto")
    net.dataset_strategy("full_batch")
    return [net(Tensor(images.reshape(ROWS, -1))).asnumpy().tolist()]


def in_two_dimensions():
    return products(
        (2, 2, 1), (("None", ("x", "y")), ("x", "y")), (("None", ("y", "x")),), (("None", ("y", "x")), ("x", "y"))
    )


def in_three_dimensions():
    return products(
        (2, 1, 2), ((("z", "y"), "x"), (("x", "z"), "y")), ((("z", "x"), "y"),), ((("z", "x"), "y"), ("x", ("y", "z")))
    )


def searched_stages():
    net, losses = Network(), []
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    stages = {"_backbone.first": 0, "_backbone.last": 1}
    step = Pipeline(nn.WithLossCell(net, nn.MSELoss()), 2, stage_config=stages)
    if get_group_size() > 1:
        step = AutoParallel(step, "recursive_programming")
        step.full_batch = True
        step.pipeline(stages=2, scheduler="1f1b")
    train = nn.TrainOneStepCell(step, optimizer)
    for _ in range(3):
        losses.append(float(train(Tensor(images), Tensor(targets))))
    return losses


def slices():
    """Each rank passes one half of the features, ranks 0 and 2 the same."""
    net, losses = Network(), []
    part = images if get_group_size() == 1 else np.split(images, 2, 2)[get_rank() % 2]
    step = AutoParallel(nn.WithLossCell(net, nn.MSELoss()), "semi_auto")
    step.dataset_strategy(((1, 1, 2), (1, 1)) if get_group_size() > 1 else ((1, 1, 1), (1, 1)))
    train = nn.TrainOneStepCell(step, nn.SGD(net.trainable_params(), 0.1))
    for _ in range(3):
        losses.append(float(train(Tensor(part), Tensor(targets))))
    return losses


def loss_of_each_row(form):
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", full_batch=True)
    net, loss_fn = Network(), nn.SoftmaxCrossEntropyWithLogits(sparse=True)
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    batch, found = (Tensor(images), Tensor(labels)), []
    if form == "Model":
        Model(net, loss_fn, optimizer).train(2, [batch], callbacks=[LossMonitor()])
    elif form == "TrainOneStepCell":
        step = nn.TrainOneStepCell(nn.WithLossCell(net, loss_fn), optimizer)
        found = [step(*batch).asnumpy().tolist() for _ in range(2)]
    else:
        step = ms.value_and_grad(lambda x, y: loss_fn(net(x), y), None, optimizer.parameters)
        for _ in range(2):
            loss, gradients = step(*batch)
            found.append(loss.asnumpy().tolist())
            optimizer(gradients)
    ms.reset_auto_parallel_context()
    return [*found, net.last.bias.asnumpy().tolist()]


def placed():
    """Other ranks have other rows and other first values, and get those of rank 0."""
    net, own = Network(), get_rank()
    if get_group_size() > 1:
        net.first.place("MS_WORKER", 1)
        net.norm.place("MS_WORKER", 3)
    net.last.weight.set_data(net.last.weight + own)
    normed = nn.SequentialCell(net, nn.BatchNorm1d(CLASSES))
    if get_group_size() > 1:
        normed[1].place("MS_WORKER", 2)
    optimizer = nn.Momentum(normed.trainable_params(), 0.1, 0.9)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    model = Model(normed, loss, optimizer, metrics={"accuracy": Accuracy()})
    rows = ROWS - 4 * (own > 0)
    batches = [(Tensor(images[:rows] + own), Tensor((labels[:rows] + own) % CLASSES))]
    model.train(3, batches, callbacks=[LossMonitor()])
    values = [value.asnumpy().tolist() for value in normed.state_dict().values() if value.dim()]
    return [model.eval(batches)["accuracy"], *values]


CASES = {
    "2D tensor parallel": in_two_dimensions,
    "3D tensor parallel": in_three_dimensions,
    "stages whose strategies are searched for": searched_stages,
    "slices of a sample": slices,
    "a loss for each row, Model": lambda: loss_of_each_row("Model"),
    "a loss for each row, TrainOneStepCell": lambda: loss_of_each_row("TrainOneStepCell"),
    "a loss for each row, value_and_grad": lambda: loss_of_each_row("value_and_grad"),
    "placed cells": placed,
}

if __name__ == "__main__":
    init()
    found = {name: case() for name, case in CASES.items()}
    Path(f"{sys.argv[1]}.{get_rank()}").write_text(json.dumps(found))
