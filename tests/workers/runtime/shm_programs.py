"""Runs random programs of collectives and messages on the backend shm; every result is compared with what it must be.

usage: shm_programs.py RESULT.json SEED PROGRAMS

All ranks draw the same program; every rank knows every rank's inputs, so each computes what it must get: sums in rank
order, bit by bit. What gloo can do is compared with gloo as well, within rounding; so are groups of several hosts,
which add up each host's sum.
"""

import json
import operator
import os
import random
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import msrun.shm  # noqa: F401  # registers the backend
from msrun.runtime import get_group_size, get_rank, init, release
from msrun.shm.process_group import ShmGroup
from msrun.shm.work import ShmWork

# Before torch 2.13 they had other names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

init("gloo", timeout_s=60)
torch.set_num_threads(1)
RANK, SIZE = get_rank(), get_group_size()
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
         torch.uint8, torch.bool, torch.complex64]  # fmt: skip
NOT_GLOOS = [torch.int16, torch.bool, torch.complex64]
SHAPES = [(), (1,), (7,), (3, 5), (0,), (1000,), (129, 33), (70_000,), (300_001,), (600, 1000)]
SPREADS = ["plain", "plain", "transposed", "every second"]
STEPS = 12
LONG = 5_000_000
"""Numbers of a message that no mailbox takes whole."""
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.complex64: 1e-5}
_Op = dist.ReduceOp
REDUCTIONS = {
    "sum": (_Op.SUM, torch.add),
    "mean": (_Op.AVG, torch.add),
    "product": (_Op.PRODUCT, torch.mul),
    "min": (_Op.MIN, torch.minimum),
    "max": (_Op.MAX, torch.maximum),
    "and": (_Op.BAND, torch.bitwise_and),
    "or": (_Op.BOR, torch.bitwise_or),
    "xor": (_Op.BXOR, torch.bitwise_xor),
}


def has_sense(name, dtype):
    """Whether numbers of a type can be reduced so."""
    if name in ("and", "or", "xor"):
        return not dtype.is_floating_point and not dtype.is_complex
    return not (name in ("min", "max", "product") and dtype.is_complex) and not (name == "mean" and dtype == torch.bool)


def made(seed, rank, shape, dtype, spread):
    """The input of a rank; some do not lie in a row."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    value = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    value = value.to(dtype) if dtype != torch.bool else value > 0
    if spread == "every second" and value.dim():
        return torch.stack([value, value], dim=-1)[..., 0]
    if spread == "transposed" and value.dim() == 2:
        return value.t().contiguous().t()
    return value


def reduced(parts, name):
    step = REDUCTIONS[name][1]
    is_narrow = parts[0].dtype in (torch.bfloat16, torch.float16) and step in (torch.add, torch.mul)
    total = parts[0].float() if is_narrow else parts[0].clone()
    for part in parts[1:]:
        total = step(total, part.float() if is_narrow else part)
    if name == "mean":
        is_whole = not total.is_floating_point() and not total.is_complex()
        total = torch.div(total, len(parts), rounding_mode="trunc" if is_whole else None)
    return total.to(parts[0].dtype)


class All:
    """Several works, waited for in an order of this rank's own."""

    def __init__(self, works, draw):
        self.works = draw.sample(works, len(works))

    def wait(self):
        for work in self.works:
            work.wait()


class Call:
    """One operation of a group. Each method starts it on all ranks; it returns what to wait for, what is written, and
    what must stand there then."""

    def __init__(self, group, ranks, inputs, draw, own_draw):
        self.group, self.ranks, self.inputs, self.draw, self.own_draw = group, ranks, inputs, draw, own_draw
        self.own, self.size, self.is_shm = ranks.index(RANK), len(ranks), isinstance(group, ShmGroup)
        self.mine = inputs[self.own].clone(memory_format=torch.preserve_format)
        self.flats = [value.reshape(-1) for value in inputs]
        self.root = draw.randrange(self.size)
        self.name = draw.choice([name for name in REDUCTIONS if has_sense(name, inputs[0].dtype)])
        self.op = REDUCTIONS[self.name][0]
        self.tag = draw.randrange(1 << 20)
        self.words = {"group": group, "async_op": True}

    def parts(self, count):
        """Numbers for each rank of a group, some more than others, by sender and receiver."""
        return [[(a * 3 + b * 2 + self.tag) % 4 * count for b in range(self.size)] for a in range(self.size)]

    def given(self, counts, width):
        """What each rank gives: as many rows as it has for all others."""
        kind = self.inputs[0].dtype
        return [made(self.tag, rank, (sum(counts[a]), width), kind, "plain") for a, rank in enumerate(self.ranks)]

    def all_reduce(self):
        return dist.all_reduce(self.mine, self.op, **self.words), [self.mine], [reduced(self.inputs, self.name)]

    def reduce(self):
        work = dist.reduce(self.mine, group_dst=self.root, op=self.op, **self.words)
        return (work, [self.mine], [reduced(self.inputs, self.name)]) if self.own == self.root else (work, [], [])

    def broadcast(self):
        return dist.broadcast(self.mine, group_src=self.root, **self.words), [self.mine], [self.inputs[self.root]]

    def all_gather(self):
        out = [torch.empty_like(value) for value in self.inputs]
        return dist.all_gather(out, self.mine, **self.words), out, self.inputs

    def all_gather_uneven(self):
        values = self.given(self.parts(1), 40_000)
        out = [torch.empty_like(value) for value in values]
        return dist.all_gather(out, values[self.own], **self.words), out, values

    def all_gather_single(self):
        flat = self.mine.reshape(-1)
        out = flat.new_empty(self.size * flat.numel())
        return all_gather_single(out, flat, **self.words), [out], [torch.cat(self.flats)]

    def reduce_scatter(self):
        lists = [[self.inputs[(a + b) % self.size] for b in range(self.size)] for a in range(self.size)]
        out = torch.empty_like(self.mine)
        work = dist.reduce_scatter(out, lists[self.own], self.op, **self.words)
        return work, [out], [reduced([own[self.own] for own in lists], self.name)]

    def reduce_scatter_single(self):
        flats = [torch.cat([flat] * self.size) for flat in self.flats]
        out = self.mine.new_empty(self.mine.numel())
        work = reduce_scatter_single(out, flats[self.own], self.op, **self.words)
        return work, [out], [reduced(self.flats, self.name)]

    def all_to_all(self):
        counts = self.parts(10_000)
        given = [value.flatten().split(counts[a]) for a, value in enumerate(self.given(counts, 1))]
        out = [given[a][self.own].new_empty(counts[a][self.own]) for a in range(self.size)]
        work = dist.all_to_all(out, list(given[self.own]), **self.words)
        return work, out, [given[a][self.own] for a in range(self.size)]

    def all_to_all_single(self):
        flat = torch.cat([self.flats[self.own]] * self.size)
        out = torch.empty_like(flat)
        return dist.all_to_all_single(out, flat, **self.words), [out], [torch.cat(self.flats)]

    def all_to_all_rows(self):
        rows = self.parts(1)
        given = self.given(rows, 5000)
        into = [rows[a][self.own] for a in range(self.size)]
        out = given[0].new_empty(sum(into), 5000)
        work = dist.all_to_all_single(out, given[self.own], into, rows[self.own], **self.words)
        return work, [out], [torch.cat([given[a].split(rows[a])[self.own] for a in range(self.size)])]

    def gather(self):
        out = [torch.empty_like(value) for value in self.inputs] if self.own == self.root else []
        work = dist.gather(self.mine, out or None, group_dst=self.root, **self.words)
        return work, out, self.inputs if out else []

    def scatter(self):
        out, values = torch.empty_like(self.mine), [value.contiguous() for value in self.inputs]
        given = values if self.own == self.root else None
        return dist.scatter(out, given, group_src=self.root, **self.words), [out], [values[self.own]]

    def barrier(self):
        return dist.barrier(**self.words), [], []

    def coalesced_sums(self):
        out = [self.mine, self.mine.reshape(-1)[:5].clone(), self.flats[self.own].repeat(2)]
        each = [[value, value.reshape(-1)[:5], value.reshape(-1).repeat(2)] for value in self.inputs]
        with dist._coalescing_manager(self.group, async_ops=True) as work:
            for value in out:
                dist.all_reduce(value, self.op, group=self.group)
        return work, out, [reduced(list(parts), self.name) for parts in zip(*each, strict=True)]

    def coalesced_gathers(self):
        out = [self.flats[0].new_empty(self.size * self.flats[0].numel()) for _ in range(2)]
        with dist._coalescing_manager(self.group, async_ops=True) as work:
            for value in out:
                all_gather_single(value, self.flats[self.own].clone(), group=self.group)
        return work, out, [torch.cat(self.flats)] * 2

    def objects(self):
        out, sent = [None] * self.size, [{"rank": self.ranks[self.root]}]
        dist.all_gather_object(out, {"rank": RANK, "text": "x" * (self.tag % 3000)}, group=self.group)
        assert [entry["rank"] for entry in out] == list(self.ranks)
        dist.broadcast_object_list(sent if self.own == self.root else (sent := [None]), group_src=self.root,
                                   group=self.group)  # fmt: skip
        assert sent == [{"rank": self.ranks[self.root]}]

    def messages(self):
        """Everybody sends to everybody, in orders of their own; tags tell the messages apart."""
        works, out, right = [], [], []
        plan = [(kind, peer, n) for kind in "sr" for peer in range(self.size) for n in range(2) if peer != self.own]
        for kind, peer, n in self.own_draw.sample(plan, len(plan)):
            value, tag = self.inputs[self.own if kind == "s" else peer], self.tag * 2 + n
            value = value if n else value.reshape(-1)[:1].clone()
            if kind == "s":
                works.append(dist.isend(value, self.ranks[peer], self.group, tag))
            else:
                out.append(torch.empty_like(value))
                right.append(value)
                works.append(dist.irecv(out[-1], self.ranks[peer], self.group, tag))
        return All(works, self.own_draw), out, right

    def any_source(self):
        """Each rank sends a message to every other one, which takes them as they come."""
        others = [rank for rank in self.ranks if rank != RANK]
        out = torch.empty(len(others), 1000)
        works = [dist.isend(torch.full((1000,), float(RANK)), to, self.group, self.tag) for to in others]
        works += [dist.irecv(row, None, self.group, self.tag) for row in out]
        right = torch.tensor(others, dtype=torch.float32)[:, None].expand(-1, 1000)
        return All(works, self.own_draw), [lambda: out.sort(0).values], [right]

    def long_message(self):
        """Around the ring, both at once."""
        value, out = torch.full((LONG,), float(RANK)), torch.empty(LONG)
        after, before = self.ranks[(self.own + 1) % self.size], self.ranks[self.own - 1]
        works = [dist.isend(value, after, self.group, self.tag), dist.irecv(out, before, self.group, self.tag)]
        return All(works, self.own_draw), [out], [torch.full((LONG,), float(before))]


OPS = [name for name in vars(Call) if not name.startswith("_") and name not in ("parts", "given")]
MESSAGES = ("messages", "any_source", "long_message")
"""gloo's sends wait for their receivers."""


class Program:
    def __init__(self, seed, groups, found):
        self.seed, self.draw, self.groups, self.found = seed, random.Random(seed), groups, found
        self.own_draw = random.Random(seed * 100 + RANK)
        self.open = []

    def run(self):
        for number in range(STEPS):
            if self.own_draw.random() < 0.1:
                time.sleep(self.own_draw.uniform(0, 0.02))
            self.step(number)
        self.close_all()

    def close_all(self):
        """Wait in an order of this rank's own, in one of the ways that there are."""
        self.own_draw.shuffle(self.open)
        for work, check in self.open:
            self.wait_for(work)
            check()
        self.open.clear()

    def wait_for(self, work):
        way = self.own_draw.choice(["wait", "wait", "poll", "future"]) if isinstance(work, ShmWork) else "wait"
        if way == "poll":
            while not work.is_completed():
                time.sleep(0)
        elif way == "future":
            work.get_future().wait()
        work.wait()

    def step(self, number):
        draw = self.draw
        ranks = draw.choice(list(self.groups))
        kind, dtype, shape, spread = draw.choice(OPS), draw.choice(TYPES), draw.choice(SHAPES), draw.choice(SPREADS)
        if number < len(self.groups):  # a long sum in each kind of group, whatever is drawn
            ranks, kind, dtype, shape = list(self.groups)[number], "all_reduce", torch.float32, (300_001,)
        is_async, seed = draw.random() < 0.6, self.seed * 100 + number
        if RANK not in ranks:
            return
        shm, gloo = self.groups[ranks]
        inputs = [made(seed, rank, shape, dtype, spread) for rank in ranks]
        call = Call(shm, ranks, inputs, random.Random(seed), self.own_draw)
        what = f"program {self.seed} step {number}: {kind} {dtype} {shape} {spread} {call.name} of {ranks}"
        if not call.is_shm and not self.gloo_has(kind, dtype, call.name):
            return  # several hosts: gloo carries them, and a rank that it fails in leaves the others waiting
        try:
            started = operator.methodcaller(kind)(call)
            if started is not None and not is_async:
                started[0].wait()
        except (RuntimeError, ValueError) as error:
            if call.is_shm:
                raise AssertionError(what) from error
            return  # several hosts: gloo has it not
        if started is None:
            return
        work, out, right = started
        other = None if kind in MESSAGES else self.ask_gloo(kind, Call(gloo, ranks, inputs, random.Random(seed), draw))
        # torch hands over two numbers for a complex one, in some operations: they are divided in another way
        agrees = same if call.is_shm and not (call.name == "mean" and dtype.is_complex) else near

        def check():
            for index, (value, must) in enumerate(zip(out, right, strict=True)):
                mine = value() if callable(value) else value
                is_gloo = type(shm) is dist.ProcessGroup  # which writes other tensors in another order
                if not agrees(mine, must) and (mine.is_contiguous() or not is_gloo):
                    self.found.append(f"{what}: result {index} is not what it must be")
                elif other is not None and mine.is_contiguous() and not near(mine, other[index]):
                    self.found.append(f"{what}: result {index} is not gloo's")

        self.open.append((work, check))
        if not is_async or len(self.open) > 6:
            self.close_all()

    def gloo_has(self, kind, dtype, name):
        """Whether an operation can go between hosts."""
        if kind in MESSAGES or kind == "all_gather_uneven" or dtype in NOT_GLOOS:
            return False
        is_mean = name == "mean" and dtype.is_floating_point and kind in ("all_reduce", "reduce_scatter_single")
        return is_mean or name in ("sum", "product", "min", "max")

    def ask_gloo(self, kind, call):
        """What gloo gives, None where it cannot."""
        if call.name not in ("sum", "product", "min", "max") or not all(map(torch.Tensor.is_contiguous, call.inputs)):
            return None
        try:
            work, out, _ = operator.methodcaller(kind)(call)
            work.wait()
        except (RuntimeError, ValueError):
            return None
        return out


def same(mine, must):
    return mine.shape == must.shape and torch.equal(mine.nan_to_num(), must.nan_to_num())


def near(mine, other):
    if mine.dtype not in ROUNDING:
        return torch.equal(mine, other)
    limit = ROUNDING[mine.dtype]
    wide = torch.complex128 if mine.is_complex() else torch.float64
    return torch.allclose(mine.to(wide), other.to(wide), rtol=limit, atol=limit * 100, equal_nan=True)


def one_core(_pid):
    """Let a group take its ranks to share a core."""
    return {0}


def own_core(pid):
    """Let a group take each rank to have a core: the others seem to have ended."""
    if pid != os.getpid():
        raise ProcessLookupError
    return {0}


def main():
    seed, programs = int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    subsets = {tuple(range(SIZE))}
    while SIZE > 2 and len(subsets) < 4:
        subsets.add(tuple(sorted(draw.sample(range(SIZE), draw.randint(2, SIZE)))))
    groups = {}
    for number, ranks in enumerate(sorted(subsets)):
        with mock.patch.object(os, "sched_getaffinity", (own_core, one_core)[number % 2]):
            groups[ranks] = tuple(dist.new_group(list(ranks), backend=name) for name in ("shm", "gloo"))
    found = []
    for number in range(programs):
        Program(seed * 1000 + number, groups, found).run()
    everyone = [None] * SIZE
    dist.all_gather_object(everyone, found)
    if RANK == 0:
        Path(sys.argv[1]).write_text(json.dumps([text for own in everyone for text in own]))
    release()


main()
