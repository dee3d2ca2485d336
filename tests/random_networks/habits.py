"""What users do to a network before and between the steps; the same in one process and in parallel.

("frozen", i)               block i does not learn
("tie", i, j)               block j reads the weight of block i
("hook", kind, i)           forward, pre, backward, backward_pre: on block i; parameter: on its first parameter
("change", step, i)         something of block i changes before this step
("eval_block", step, i)     block i is in evaluation from this step on
("recompute", i)            msrun's recompute of block i
("evaluate", step)          the loss without gradients, in evaluation, before this step
("smaller", step)           this step's batch has half of the rows
("sizes", step, rows, n)    this step's batch has other rows, and sequences of n tokens
("factor",)                 a plain argument of the call changes from step to step
("backward_twice",)         two backward passes for each step of the optimizer
("keep_zeros",)             zero_grad(set_to_none=False)
("rates",)                  a schedule of learning rates
("groups",)                 two parameter groups
("channels_last",)          the network's weights in this memory format
("deferred",)               made under no_init_parameters (in parallel)
("write", i, name, how)     what a module of block i makes is written into; i of -1: embed and head
("weights", step, i, how)   weights of block i, or of the head, are written before this step
("read", step, i, how)      weights of block i, or of the head, are read after this step
"""

from types import SimpleNamespace

import torch
from torch import nn

from msrun.runtime import recompute


def has(case, name):
    """Return whether a case has a habit."""
    return any(habit[0] == name for habit in case.habits)


def prepare(case, network):
    """Do what is done before the first step."""
    for name, *rest in case.habits:
        if name == "frozen":
            network.blocks[rest[0]].requires_grad_(requires_grad=False)
        elif name == "tie":
            weights_of(network.blocks[rest[1]]).weight = weights_of(network.blocks[rest[0]]).weight
        elif name == "hook":
            add_hook(rest[0], network.blocks[rest[1]])
        elif name == "recompute":
            recompute(network.blocks[rest[0]])
        elif name == "write":
            owner = network if rest[0] < 0 else network.blocks[rest[0]]
            owner.writes[rest[1]] = rest[2]
        elif name == "channels_last":
            network.to(memory_format=torch.channels_last)


def weights_of(block):
    """Return the first linear layer of a block, of 8 inputs and outputs."""
    return next(m for m in block.modules() if isinstance(m, nn.Linear) and m.in_features == m.out_features)


def add_hook(kind, block):
    """Register a hook."""
    if kind.startswith("seen"):
        block.calls_seen = []
    if kind == "parameter":
        next(block.parameters()).register_hook(lambda gradient: gradient * 0.5)
    else:
        HOOKS[kind](block)


HOOKS = {
    "forward": lambda block: block.register_forward_hook(lambda module, inputs, output: output * 1.5),
    "pre": lambda block: block.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,)),
    "backward": lambda block: block.register_full_backward_hook(lambda module, inner, outer: _doubled(inner)),
    "backward_pre": lambda block: block.register_full_backward_pre_hook(lambda module, outer: _doubled(outer)),
    "seen": lambda block: block.register_forward_hook(lambda module, *_: module.calls_seen.append(1)),
    "seen_backward": lambda block: block.register_full_backward_hook(lambda module, *_: module.calls_seen.append(1)),
}


def _doubled(gradients):
    return tuple(None if gradient is None else gradient * 2 for gradient in gradients)


def take_seen(case, network):
    """Return for every hook that only looks whether it was called in this step."""
    found = []
    for name, *rest in case.habits:
        if name == "hook" and rest[0].startswith("seen"):
            found.append(float(bool(network.blocks[rest[1]].calls_seen)))
            network.blocks[rest[1]].calls_seen.clear()
    return found


def before_step(case, network, step):
    """Do what is done between two steps."""
    for name, *rest in case.habits:
        if name == "change" and rest[0] == step:
            network.blocks[rest[1]].change()
        elif name == "eval_block" and rest[0] == step:
            network.blocks[rest[1]].eval()
        elif name == "weights" and rest[0] == step:
            with torch.no_grad():
                WEIGHT_WRITES[rest[2]](weight_of(network, rest[1]))


def after_step(case, network, step):
    """Return what is read of the weights after a step."""
    return [
        float(WEIGHT_READS[rest[2]](weight_of(network, rest[1]).detach()))
        for name, *rest in case.habits
        if name == "read" and rest[0] == step
    ]


def weight_of(network, index):
    """Return the first matrix of a block, or the head's."""
    owner = network.head if index < 0 else network.blocks[index]
    return next(parameter for parameter in owner.parameters() if parameter.dim() >= 2)


def _spread(weight):
    return torch.linspace(-0.2, 0.3, weight.numel(), dtype=weight.dtype).view(weight.shape)


WEIGHT_WRITES = {
    "rows": lambda w: w.__setitem__([0, 3], 0.1),
    "slice": lambda w: w[1:4].mul_(0.5),
    "column": lambda w: w[:, 0].zero_(),
    "mask": lambda w: w.__setitem__(w.abs() < 0.1, 0.0),
    "data": lambda w: setattr(w, "data", _spread(w)),
    "copy": lambda w: w.copy_(_spread(w)),
    "data_scale": lambda w: w.data.mul_(0.9),
    "norm": lambda w: w.div_(w.norm()),
    "chunk": lambda w: w.chunk(2)[1].mul_(0.5),
}
"""Into a weight, as scripts do."""
WEIGHT_READS = {
    "norm": lambda w: w.norm(),
    "square": lambda w: w.pow(2).sum().item(),
    "largest": lambda w: w.abs().max(),
    "rows": lambda w: w.flatten(1).norm(dim=1).sum(),
    "count": lambda w: (w > 0).sum(),
    "element": lambda w: w[-1, -1].flatten()[0].item(),
    "product": lambda w: (w * 2 * w).sum(),
}
"""Numbers that a script reads of a weight."""


def call_arguments(case, step):
    """Return keyword arguments of the step's call."""
    for name, *rest in case.habits:
        if name == "factor":
            kinds = {"flag": True if step % 2 == 0 else 1, "object": SimpleNamespace(value=1.0 + 0.5 * step)}
            return {"factor": kinds.get(rest[0], 1.0 + 0.5 * (step % 2))}
    return {}
