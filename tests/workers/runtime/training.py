"""Trains every network of training_cases on all ranks and in one process; RESULT.json says where they differ.

usage: training.py RESULT.json [name ...]
"""

import contextlib
import json
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from local_parts import local
from only_cases import is_asked
from training_cases import CASES, STEPS, batches, built

from msrun.runtime import AutoParallel, get_group_size, get_rank, init, release


def train(step, parameters, given, case):
    """Yield the loss and the gradients of every step."""
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)
    for batch in given:
        optimizer.zero_grad()
        result = step(*batch)
        loss = result if isinstance(result, torch.Tensor) else result[0]
        loss.backward()
        yield float(loss.detach())
        optimizer.step()


def whole(part, like):
    """Return a parameter or its gradient as one tensor; parts are rows of consecutive ranks."""
    if local(part).shape == like.shape:
        return part.detach()
    part = local(part)
    if not part.numel():
        return None
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(get_group_size())]
    dist.all_gather(parts, part.detach().contiguous())
    return next((torch.cat(parts, dim) for dim in range(part.dim()) if torch.cat(parts, dim).shape == like.shape), None)


def far(case, mine, right):
    return mine is not None and not torch.allclose(local(mine), right, rtol=case.tolerance, atol=case.tolerance)


def compare(case):
    """Return what differs."""
    given = batches(case)
    serial, network = built(case), built(case)
    if case.strategy is not None:
        case.strategy(network.get_submodule(".".join(_path_to_users(network))))
    step = case.settings(AutoParallel(network))
    if case.full_batch:
        step.dataset_strategy("full_batch")
    is_pipeline = step.settings.pipeline.stages > 1
    mine = [
        tuple(value if case.full_batch or is_pipeline else value.chunk(get_group_size())[get_rank()] for value in batch)
        for batch in given
    ]
    losses = train(step, network.parameters(), mine, case)
    rights = train(serial, serial.parameters(), given, case)
    wrong = []
    for number in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16) if case.precision == "bfloat16" else contextlib.nullcontext():
            right = next(rights)
        loss = next(losses)
        if abs(loss - right) > case.tolerance * max(1, abs(right)):
            wrong.append(f"step {number}: loss {loss} for {right}")
        named = dict(serial.named_parameters())
        for name, parameter in network.named_parameters():
            like = named[name]
            is_elsewhere = not local(parameter).numel()
            if not is_elsewhere and (parameter.grad is None) != (like.grad is None):
                wrong.append(f"step {number}: {name}.grad is {'' if parameter.grad is None else 'not '}None")
            elif parameter.grad is not None and not is_elsewhere and far(case, whole(parameter.grad, like), like.grad):
                wrong.append(f"step {number}: {name}.grad differs")
    list(losses), list(rights)
    for name, parameter in network.named_parameters():
        if local(parameter).numel() and far(case, whole(parameter, named[name]), named[name]):
            wrong.append(f"{name} differs after {STEPS} steps")
    buffers = dict(serial.named_buffers())
    wrong += [f"{name} differs" for name, value in network.named_buffers() if far(case, value, buffers[name])]
    return "\n".join(wrong)


def _path_to_users(network):
    """Return the names that lead through the wrappers to the network of the case."""
    path = []
    while hasattr(network, "network"):
        path.append("network")
        network = network.network
    return path


init(timeout_s=60)
warnings.simplefilter("ignore")
results = {}
for case in CASES:
    if not is_asked(case.name) or (sys.argv[2:] and case.name not in sys.argv[2:]):
        continue
    torch.set_default_dtype(torch.float32 if case.precision == "bfloat16" else torch.float64)
    try:
        found = compare(case)
    except Exception:
        found = traceback.format_exc()
    everyone = [None] * get_group_size()
    dist.all_gather_object(everyone, found)
    results[case.name] = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text]
    if get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1))
release()
