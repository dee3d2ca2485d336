"""The all-reduce, short and long: the sum, the same bits on every rank, and what was given left alone."""

import hashlib
import itertools
import os

import torch
import torch.distributed as dist
from on_ranks import on_ranks

from msrun.runtime.execute.transfers import start_all_reduce, traffic
from msrun.shm.segment import SLOT_BYTES as LIMIT

SHAPES = [(), (1,), (0, 3), (2,), (3, 5), (LIMIT // 4 - 1,), (LIMIT // 4,), (LIMIT // 4 + 1,), (64, 8, 33)]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def groups_of_both_kinds():
    """Return one group that takes the ranks to share a core, and one that takes each to have its own.

    While the second one is made the others seem to have ended.
    """
    groups, cores_of = [], os.sched_getaffinity

    def own_core(pid):
        if pid != os.getpid():
            raise ProcessLookupError
        return {0}

    found = (lambda pid: {0}, own_core)
    for os.sched_getaffinity in found:
        groups.append(dist.new_group(backend="shm"))
    os.sched_getaffinity = cores_of
    assert [group.segment.is_crowded for group in groups] == [True, False]
    return groups


def values_of_all(shape, dtype, size, *, transposed):
    """Return every rank's tensor, made of small numbers that any order of adding gives exactly."""
    made = []
    for other in range(size):
        generator = torch.Generator().manual_seed(100 * other + len(shape))
        value = torch.randint(-8, 8, shape, generator=generator).to(dtype)
        made.append(value.t() if transposed else value)
    return made


@on_ranks(3, 4, env={"MSRUN_CPU_BACKEND": "shm"}, slow=True)
def test_sums_on_shared_memory(ranks):
    check_sums(ranks, groups_of_both_kinds())


@on_ranks(3, env={"MSRUN_CPU_BACKEND": "gloo"}, slow=True)
def test_sums_on_gloo(ranks):
    check_sums(ranks, [dist.group.WORLD])


def check_sums(ranks, groups):
    """Many at once are right and bit-equal on all ranks, also where a message takes several steps."""
    started = []
    for group, dtype, shape, in_place in itertools.product(groups, TYPES, SHAPES, (False, True)):
        for transposed in (False, True) if len(shape) == 2 else (False,):
            values = values_of_all(shape, dtype, ranks.size, transposed=transposed)
            own = values[ranks.rank].clone(memory_format=torch.preserve_format)
            before = traffic.calls["all_reduce"], traffic.bytes["all_reduce"]
            future = start_all_reduce(own, group, in_place=in_place)
            name = f"{groups.index(group)} {dtype} {shape} {in_place=} {transposed=}"
            counted = traffic.calls["all_reduce"] - before[0], traffic.bytes["all_reduce"] - before[1]
            assert counted == (1, own.numel() * own.element_size()), name
            started.append((name, future, own, values, in_place))
    assert len(started) > 50
    for name, future, own, values, in_place in reversed(started):  # waited for in another order
        total = future.wait()
        assert torch.equal(total, sum(values[1:], values[0])) and total.dtype == own.dtype, name
        assert in_place or torch.equal(own, values[ranks.rank]), f"{name}: what was given has changed"
    digests = []
    for count in (2, 1000, LIMIT // 4):  # numbers whose sum depends on the order of adding
        of_groups = set()
        for group in groups:
            generator = torch.Generator().manual_seed(ranks.rank)
            value = torch.randn(count, generator=generator) * 10.0 ** torch.randint(
                -6, 6, (count,), generator=generator
            )
            of_groups.add(hashlib.sha256(start_all_reduce(value, group).wait().numpy().tobytes()).hexdigest())
        digests.append(of_groups)
    assert [len(set.union(*of_ranks)) for of_ranks in zip(*ranks.gather(digests), strict=True)] == [1, 1, 1]
