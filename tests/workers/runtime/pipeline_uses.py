"""What else users do with a pipeline of 2 stages on 4 ranks: predict, differentiate inputs, save and load, err.

usage: pipeline_uses.py RESULT.json
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from torch import nn

from msrun.errors import MsrunError
from msrun.runtime import (
    AutoParallel,
    MicroBatchInterleaved,
    Pipeline,
    WithLoss,
    get_rank,
    init,
    load_checkpoint,
    no_init_parameters,
    optim,
    release,
    save_checkpoint,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

torch.set_default_dtype(torch.float64)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def make(seed=1):
    torch.manual_seed(seed)
    return Network()


def batch(step=0, rows=16):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def part(tensor):
    return tensor.chunk(2)[get_rank() % 2]


def pipelined(network, **settings):
    return AutoParallel(Pipeline(network, 2)).pipeline(2, **settings)


def message_of(call):
    try:
        call()
    except (MsrunError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def predictions():
    """Return what every rank gets of a network without a loss, after training has placed its parameters."""
    network, x = make(), batch()[0]
    right = make()(x).detach()
    found = {}
    with torch.no_grad():
        for broadcast in (False, True):
            result = pipelined(network, output_broadcast=broadcast)(part(x))
            found[f"broadcast {broadcast}"] = None if result is None else float((result - part(right)).abs().max())
    found["with gradients"] = message_of(lambda: pipelined(network)(part(x)))
    return found


def training_then_predicting():
    """Return losses with a smaller last batch, a loss without gradients and its messages, and predictions after it."""
    network, right = make(), make()
    optimizer, its = optim.Adam(network.parameters(), lr=0.01), optim.Adam(right.parameters(), lr=0.01)
    step = pipelined(WithLoss(network, F.cross_entropy))
    losses = []
    for number, rows in enumerate([16, 8, 16]):
        x, y = batch(number, rows)
        loss = step(part(x), part(y))
        (2 * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = F.cross_entropy(right(x), y)
        (2 * expected).backward()
        its.step()
        its.zero_grad()
        losses.append([float(loss.detach()), float(expected.detach())])
    x, y = batch(9)
    traffic.reset()
    with torch.no_grad():
        loss = step(part(x), part(y))
        result = pipelined(network, output_broadcast=True)(part(x))
    return {
        "losses": losses,
        "without gradients": [float(loss), float(F.cross_entropy(right(x), y).detach()), loss.requires_grad],
        "sends": traffic.calls["send"],
        "predicted": float((result - part(right(x).detach())).abs().max()),
        "another number of stages": message_of(
            lambda: AutoParallel(WithLoss(network, F.cross_entropy))(part(x), part(y))
        ),
    }


def gradients_of_inputs():
    """Return differences of value_and_grad's gradients of input and weights, with copies and another result."""
    network, right = make(), make()
    whole = Pipeline(MicroBatchInterleaved(WithLoss(network, F.cross_entropy), 2), 2)

    def loss_and_labels(x, y):
        return whole(x, y), y

    gradients_of = value_and_grad(loss_and_labels, 0, list(network.parameters()), has_aux=True)
    step = AutoParallel(lambda x, y: gradients_of(x, y)).pipeline(2)
    x, y = batch()
    (loss, labels), (of_input, of_weights) = step(part(x), part(y))
    x.requires_grad_()
    expected = F.cross_entropy(right(x), y)
    expected.backward()
    parts = map(local, of_weights)
    held = [(g, p.grad) for g, p in zip(parts, right.parameters(), strict=True) if g.numel()]
    return {
        "loss": [float(loss), float(expected.detach())],
        "labels": labels is None or labels.tolist() == part(y).tolist(),
        "input": float((of_input - part(x.grad)).abs().max()),
        "weights": max(float((a - b).abs().max()) for a, b in held),
        "held": len(held),
    }


def checkpoints(folder):
    """Save in two stages, load into one, three steps on; and the other way round. Returns losses and the right ones."""
    found = {}
    right = make()
    its = optim.Adam(right.parameters(), lr=0.01)
    expected = []
    for number in range(4):
        x, y = batch(number)
        loss = F.cross_entropy(right(x), y)
        loss.backward()
        its.step()
        its.zero_grad()
        expected.append(float(loss.detach()))
    builders = {
        "stages": lambda n: pipelined(WithLoss(n, F.cross_entropy)),
        "stages-hsdp": lambda n: pipelined(WithLoss(n, F.cross_entropy)).hsdp(threshold=0),
        "zbv": lambda n: pipelined(WithLoss(n, F.cross_entropy), scheduler="zbv"),
        "one": lambda n: AutoParallel(WithLoss(n, F.cross_entropy)).hsdp(threshold=0),
    }
    for before, after in [("stages", "one"), ("one", "stages"), ("stages-hsdp", "zbv")]:
        network = make()
        optimizer = optim.Adam(network.parameters(), lr=0.01)
        losses = run(builders[before](network), optimizer, range(2), before)
        path = save_checkpoint(network, Path(folder) / f"{before}-{after}", optimizer, step_num=2)
        with no_init_parameters():
            network = make(seed=5)
            optimizer = optim.Adam(network.parameters(), lr=0.01)
        load_checkpoint(path, network, optimizer)
        losses += run(builders[after](network), optimizer, range(2, 4), after)
        whole = load_checkpoint(path)
        found[f"{before} to {after}"] = {
            "losses": losses,
            "right": expected,
            "shapes": {name: list(value.shape) for name, value in whole.items() if isinstance(value, torch.Tensor)},
        }
    network = make(seed=7)
    optimizer = optim.Adam(network.parameters(), lr=0.01)
    step = pipelined(WithLoss(network, F.cross_entropy))
    run(step, optimizer, range(1), "stages")
    load_checkpoint(path, network, optimizer)  # into stages that are in their places
    losses = run(step, optimizer, range(2, 4), "stages")
    found["into placed stages"] = {"losses": losses, "right": expected[2:], "shapes": {}}
    return found


def run(step, optimizer, numbers, kind):
    losses = []
    for number in numbers:
        x, y = (t.chunk(4)[get_rank()] if kind == "one" else part(t) for t in batch(number))
        loss = step(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def errors():
    x, y = (part(tensor) for tensor in batch())

    def with_loss():
        return WithLoss(make(), F.cross_entropy)

    def twice():
        loss = pipelined(with_loss())(x, y)
        loss.backward()
        loss.backward()

    def changed():
        whole = Pipeline(with_loss(), 2)
        gradients_of = value_and_grad(lambda a, b: whole(a, b).exp(), None, list(whole.parameters()))
        AutoParallel(lambda a, b: gradients_of(a, b)).pipeline(2)(x, y)

    def different():
        network = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 + get_rank() // 2)])
        pipelined(WithLoss(network, F.cross_entropy))(x, y)

    def wrong_order():
        config = {"first": 1, "last": 0}
        AutoParallel(Pipeline(with_loss(), 2, config)).pipeline(2)(x, y)

    def one_rank_fails():
        name = "last" if get_rank() < 3 else "lats"
        AutoParallel(Pipeline(with_loss(), 2, {"first": 0, name: 1})).pipeline(2)(x, y)

    return {
        "twice": message_of(twice),
        "not wrapped": message_of(lambda: AutoParallel(with_loss()).pipeline(2)(x, y)),
        "world": message_of(lambda: AutoParallel(Pipeline(with_loss(), 4)).pipeline(3)(x, y)),
        "inside": message_of(lambda: AutoParallel(WithLoss(Pipeline(make(), 2), F.cross_entropy)).pipeline(2)(x, y)),
        "changed": message_of(changed),
        "different": message_of(different),
        "wrong order": message_of(wrong_order),
        "one rank fails": message_of(one_rank_fails),
        "batch": message_of(lambda: AutoParallel(Pipeline(with_loss(), 3)).pipeline(2)(x, y)),
        "few micro batches": message_of(lambda: AutoParallel(Pipeline(with_loss(), 1)).pipeline(2)(x, y)),
    }


def main():
    init(timeout_s=120)
    folder = [str(Path(sys.argv[1]).parent / "checkpoints")]
    dist.broadcast_object_list(folder, 0)
    mine = {
        "predictions": predictions(),
        "training": training_then_predicting(),
        "inputs": gradients_of_inputs(),
        "checkpoints": checkpoints(folder[0]),
        "errors": errors(),
    }
    everyone = [None] * 4
    dist.all_gather_object(everyone, mine)
    if get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(everyone))
    release()


main()
