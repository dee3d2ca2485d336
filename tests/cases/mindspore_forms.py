"""Train a network five steps in every form of MindSpore, in every parallel mode, from the same weights each time.

mindspore_forms.py RESULT    RESULT gets {mode: {form: weights after the steps, or what was said}} of this rank
"""

import json
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

IS_OURS = ms.__name__ != "mindspore"
MODES = ("stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel")[
    : 5 if IS_OURS else 2
]
ROWS, STEPS = 8, 5


Refused = RuntimeError  # MindSpore's, of an operator that a CPU does not have
if IS_OURS:
    from msrun.errors import MsrunError as Refused
    from msrun.mindspore.parallel import AutoParallel


class Network(nn.Cell):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Dense(4, 6), nn.Dense(6, 3)
        for index, one in enumerate(self.trainable_params()):
            one.set_data(
                Tensor(np.sin(np.arange(one.numel(), dtype=np.float32)).reshape(tuple(one.shape)) / (index + 2))
            )

    def construct(self, x):
        return self.head(ops.relu(self.body(x)))


class Losses(nn.Cell):
    def __init__(self, network):
        super().__init__()
        self.network, self.loss = network, nn.MSELoss()

    def construct(self, x, y):
        return self.loss(self.network(x), y)


class OwnStep(nn.TrainOneStepCell):
    def construct(self, x, y):
        loss = self.network(x, y)
        self.optimizer(self.grad_reducer(self.grad(self.network, self.weights)(x, y, ops.ones_like(loss))))
        return loss


class OwnGradients(nn.Cell):
    def __init__(self, losses, optimizer):
        super().__init__()
        self.both = nn.ForwardValueAndGrad(losses, optimizer.parameters, get_by_list=True)
        self.optimizer, self.reducer = optimizer, nn.DistributedGradReducer(optimizer.parameters)
        self.reduces = ms.get_auto_parallel_context("parallel_mode") in MODES[1:3]

    def construct(self, x, y):
        loss, gradients = self.both(x, y)
        self.optimizer(self.reducer(gradients) if self.reduces else gradients)
        return loss


def functional(network, optimizer, *, reduces):
    losses = Losses(network)

    def forward(x, y):
        return losses(x, y), x

    grad_fn = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)
    reducer = nn.DistributedGradReducer(optimizer.parameters)

    @ms.jit
    def train_step(x, y):
        (loss, _), gradients = grad_fn(x, y)
        optimizer(reducer(gradients) if reduces else gradients)
        return loss

    return train_step


def functions_made_anew(network, optimizer):
    losses = Losses(network)

    def train_step(x, y):
        optimizer(ops.GradOperation(get_by_list=True)(losses, optimizer.parameters)(x, y))

    return train_step


def gradients_alone(network, optimizer):
    losses = Losses(network)
    return lambda x, y: optimizer(ms.grad(losses, None, optimizer.parameters)(x, y))


def reduced(network, optimizer):
    by_hand = ms.get_auto_parallel_context("parallel_mode") in MODES[1:3]
    return functional(network, optimizer, reduces=by_hand)


FORMS = {
    "value_and_grad": reduced,
    "value_and_grad without a reducer": lambda net, opt: functional(net, opt, reduces=False),
    "GradOperation without a reducer": functions_made_anew,
    "grad without a reducer": gradients_alone,
    "TrainOneStepCell": lambda net, opt: nn.TrainOneStepCell(Losses(net), opt),
    "TrainOneStepCell of one's own": lambda net, opt: OwnStep(Losses(net), opt),
    "TrainOneStepWithLossScaleCell": lambda net, opt: nn.TrainOneStepWithLossScaleCell(
        Losses(net), opt, Tensor(64.0, ms.float32)
    ),
    "ForwardValueAndGrad": lambda net, opt: OwnGradients(Losses(net), opt),
}
OURS = {
    "AutoParallel": lambda net, opt: nn.TrainOneStepCell(AutoParallel(Losses(net)), opt),
    "value_and_grad of an AutoParallel": lambda net, opt: functional(AutoParallel(net), opt, reduces=False),
}
if IS_OURS:
    FORMS.update(OURS)


def train(form, mode, *, alone=False):
    """Return the weights after the steps in a mode, or what was refused.

    Args:
        alone: on all rows, as one process does.
    """
    ms.reset_auto_parallel_context()
    ms.set_auto_parallel_context(parallel_mode=mode, **({} if mode == MODES[0] else {"gradients_mean": True}))
    size, rank = (1, 0) if alone else (get_group_size(), get_rank())
    random = np.random.default_rng(7)
    network = Network()
    optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
    try:
        step = FORMS[form](network, optimizer)
        for _ in range(STEPS):
            x, y = random.standard_normal((2, ROWS, 4)).astype(np.float32)
            mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
            step(Tensor(x[mine]), Tensor(y[mine, :3]))
    except Refused as error:
        return str(error)
    return [one.asnumpy().tolist() for one in network.trainable_params()]


if __name__ == "__main__":
    ms.set_context(device_target="CPU", mode=ms.PYNATIVE_MODE)
    init()
    found = {mode: {form: train(form, mode) for form in FORMS} for mode in MODES}
    Path(f"{sys.argv[1]}.{get_rank()}").write_text(json.dumps(found))
