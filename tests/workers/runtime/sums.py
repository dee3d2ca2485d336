"""All-reduces of every kind of tensor, many at once; writes what was wrong.

On shared memory in two groups: one that takes the ranks to share a core, one that takes each to have its own. While the
second one is made the others seem to have ended.

usage: sums.py RESULT.json
"""

import hashlib
import itertools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from msrun.runtime import get_group_size, get_rank, init, release
from msrun.runtime.execute.transfers import start_all_reduce, traffic
from msrun.runtime.shm.segment import SLOT_BYTES

init(timeout_s=60)
rank, size = get_rank(), get_group_size()
groups = [dist.group.WORLD]
if dist.get_backend() == "shm":
    groups, cores_of = [], os.sched_getaffinity

    def own_core(pid):
        if pid != os.getpid():
            raise ProcessLookupError
        return {0}

    for found_cores in (lambda pid: {0}, own_core):
        os.sched_getaffinity = found_cores
        groups.append(dist.new_group(backend="shm"))
    os.sched_getaffinity = cores_of
    assert [group.segment.is_crowded for group in groups] == [True, False]
limit = SLOT_BYTES
SHAPES = [(), (1,), (0, 3), (2,), (3, 5), (limit // 4 - 1,), (limit // 4,), (limit // 4 + 1,), (64, 8, 33)]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def values_of_all(shape, dtype, transposed):
    """Return every rank's tensor, made of small numbers that any order of adding gives exactly."""
    made = []
    for other in range(size):
        generator = torch.Generator().manual_seed(100 * other + len(shape))
        value = torch.randint(-8, 8, shape, generator=generator).to(dtype)
        made.append(value.t() if transposed else value)
    return made


wrong, started = [], []
for group, dtype, shape in itertools.product(groups, TYPES, SHAPES):
    for in_place in (False, True):
        for transposed in (False, True) if len(shape) == 2 else (False,):
            values = values_of_all(shape, dtype, transposed)
            own = values[rank].clone(memory_format=torch.preserve_format)
            before = traffic.calls["all_reduce"], traffic.bytes["all_reduce"]
            future = start_all_reduce(own, group, in_place=in_place)
            name = f"{groups.index(group)} {dtype} {shape} in_place={in_place} transposed={transposed}"
            counted = traffic.calls["all_reduce"] - before[0], traffic.bytes["all_reduce"] - before[1]
            if counted != (1, own.numel() * own.element_size()):
                wrong.append(f"{name}: counted {counted}")
            started.append((name, future, own, values, in_place))
for name, future, own, values, in_place in reversed(started):  # waited for in another order
    total = future.wait()
    if not torch.equal(total, sum(values[1:], values[0])) or total.dtype != own.dtype:
        wrong.append(f"{name}: another sum")
    if not in_place and not torch.equal(own, values[rank]):
        wrong.append(f"{name}: what was given has changed")
for group, dtype in itertools.product(groups if dist.get_backend() == "shm" else [], TYPES):
    values = values_of_all((limit // 8 + 1,), dtype, transposed=False)
    mean = values[rank].clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    total = sum(values[1:], values[0])
    if not torch.equal(mean, total / size if dtype.is_floating_point else total.div(size, rounding_mode="trunc")):
        wrong.append(f"{groups.index(group)} {dtype}: another mean")

digests = {}
for group in groups:
    generator = torch.Generator().manual_seed(rank)
    for count in (2, 1000, limit // 4):  # numbers whose sum depends on the order of adding
        value = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-6, 6, (count,), generator=generator)
        digest = hashlib.sha256(start_all_reduce(value, group).wait().numpy().tobytes()).hexdigest()
        digests.setdefault(count, set()).add(digest)
everyone = [None] * size
dist.all_gather_object(everyone, (wrong, digests))
if rank == 0:
    same = {str(count): len(set.union(*(digests[count] for _, digests in everyone))) for count in digests}
    found = {
        "wrong": [text for texts, _ in everyone for text in texts],
        "results": same,
        "runs": len(started),
    }
    Path(sys.argv[1]).write_text(json.dumps(found))
release()
