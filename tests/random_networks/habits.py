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

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from msrun.runtime import recompute
from random_networks.case import Case
from random_networks.network import Network


def has(case: Case, name: str) -> bool:
    """Return whether a case has a habit."""
    return any(habit[0] == name for habit in case.habits)


def prepare(case: Case, network: Network) -> None:
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
            owner: Any = network if rest[0] < 0 else network.blocks[rest[0]]
            owner.writes[rest[1]] = rest[2]
        elif name == "channels_last":
            network.to(memory_format=torch.channels_last)


def weights_of(block: nn.Module) -> Any:
    """Return the first linear layer of a block, of 8 inputs and outputs."""
    return next(m for m in block.modules() if isinstance(m, nn.Linear) and m.in_features == m.out_features)


def add_hook(kind: str, block: nn.Module) -> None:
    """Register a hook."""
    if kind == "forward":
        block.register_forward_hook(lambda module, inputs, output: output * 1.5)
    elif kind == "pre":
        block.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    elif kind == "backward":
        block.register_full_backward_hook(lambda module, gradients, outer: tuple(doubled(g) for g in gradients))
    elif kind == "backward_pre":
        block.register_full_backward_pre_hook(lambda module, outer: tuple(doubled(g) for g in outer))
    elif kind == "seen":
        block.calls_seen = []
        block.register_forward_hook(lambda module, inputs, output: module.calls_seen.append(1))
    elif kind == "seen_backward":
        block.calls_seen = []
        block.register_full_backward_hook(lambda module, gradients, outer: module.calls_seen.append(1))
    else:
        next(block.parameters()).register_hook(lambda gradient: gradient * 0.5)


def take_seen(case: Case, network: Network) -> list[float]:
    """Return for every hook that only looks whether it was called in this step."""
    found = []
    for name, *rest in case.habits:
        if name == "hook" and rest[0].startswith("seen"):
            found.append(float(bool(network.blocks[rest[1]].calls_seen)))
            network.blocks[rest[1]].calls_seen.clear()
    return found


def doubled(gradient: Tensor | None) -> Tensor | None:
    """Return twice the gradient."""
    return None if gradient is None else gradient * 2


def before_step(case: Case, network: Network, step: int) -> None:
    """Do what is done between two steps."""
    for name, *rest in case.habits:
        if name == "change" and rest[0] == step:
            network.blocks[rest[1]].change()
        elif name == "eval_block" and rest[0] == step:
            network.blocks[rest[1]].eval()
        elif name == "weights" and rest[0] == step:
            write_weight(rest[2], weight_of(network, rest[1]))


def after_step(case: Case, network: Network, step: int) -> list[float]:
    """Return what is read of the weights after a step."""
    return [
        read_weight(rest[2], weight_of(network, rest[1]).detach())
        for name, *rest in case.habits
        if name == "read" and rest[0] == step
    ]


def weight_of(network: Network, index: int) -> Tensor:
    """Return the first matrix of a block, or the head's."""
    owner = network.head if index < 0 else network.blocks[index]
    return next(parameter for parameter in owner.parameters() if parameter.dim() >= 2)


WEIGHT_WRITES = ("scale", "rows", "slice", "column", "mask", "data", "copy", "clamp", "data_scale", "norm", "chunk")
WEIGHT_READS = ("norm", "square", "mean", "largest", "rows", "count", "element", "product")


def write_weight(how: str, weight: Tensor) -> None:
    """Write into a weight as scripts do."""
    value = torch.linspace(-0.2, 0.3, weight.numel(), dtype=weight.dtype).view(weight.shape)
    if how == "data":
        weight.data = value
        return
    if how == "data_scale":
        weight.data.mul_(0.9)
        return
    with torch.no_grad():
        if how == "scale":
            weight.mul_(0.8)
        elif how == "rows":
            weight[[0, 3]] = 0.1
        elif how == "slice":
            weight[1:4].mul_(0.5)
        elif how == "column":
            weight[:, 0].zero_()
        elif how == "mask":
            weight[weight.abs() < 0.1] = 0.0
        elif how == "copy":
            weight.copy_(value)
        elif how == "clamp":
            weight.clamp_(-0.1, 0.1)
        elif how == "norm":
            weight.div_(weight.norm())
        else:
            weight.chunk(2)[1].mul_(0.5)


def read_weight(how: str, weight: Tensor) -> float:
    """Return a number that a script reads of a weight."""
    if how == "norm":
        return float(weight.norm())
    if how == "square":
        return weight.pow(2).sum().item()
    if how == "mean":
        return float(weight.mean())
    if how == "largest":
        return float(weight.abs().max())
    if how == "rows":
        return float(weight.flatten(1).norm(dim=1).sum())
    if how == "count":
        return float((weight > 0).sum())
    if how == "element":
        return weight[-1, -1].flatten()[0].item()
    return float((weight * 2 * weight).sum())


def call_arguments(case: Case, step: int) -> dict[str, Any]:
    """Return keyword arguments of the step's call."""
    for name, *rest in case.habits:
        if name == "factor":
            kinds = {"flag": True if step % 2 == 0 else 1, "object": SimpleNamespace(value=1.0 + 0.5 * step)}
            return {"factor": kinds.get(rest[0], 1.0 + 0.5 * (step % 2))}
    return {}
