"""Runs random programs of collectives and messages on the backend shm; every result is compared with what it must be.

usage: shm_programs.py RESULT.json SEED PROGRAMS

All ranks draw the same program; every rank knows every rank's inputs, so each computes what it must get: sums in rank
order, bit by bit. What gloo can do is compared with gloo as well, within rounding; so are groups of several hosts,
which add up each host's sum.
"""

import json
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import msrun.runtime.shm  # noqa: F401  # registers the backend
from msrun.runtime import get_group_size, get_rank, init, release
from msrun.runtime.shm.process_group import ShmGroup

init("gloo", timeout_s=60)
torch.set_num_threads(1)
RANK, SIZE = get_rank(), get_group_size()
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
SHAPES = [(), (1,), (7,), (3, 5), (0,), (1000,), (129, 33), (70_000,), (300_001,), (600, 1000)]
OPS = ["all_reduce", "broadcast", "all_gather", "all_gather_single", "reduce_scatter_single", "all_to_all_single",
       "rows", "gather", "scatter", "reduce", "barrier", "messages", "object"]  # fmt: skip
STEPS = 12
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 5e-2, torch.float16: 1e-2}
REDUCTIONS = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "max": (dist.ReduceOp.MAX, torch.maximum),
}


def made(seed, rank, shape, dtype, spread):
    """The input of a rank; some do not lie in a row."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    value = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    value = value.to(dtype) if dtype != torch.bool else value > 0
    if spread == "transposed" and value.dim() == 2:
        return value.t().contiguous().t()
    return value


def reduced(parts, step):
    is_narrow = parts[0].dtype in (torch.bfloat16, torch.float16) and step in (torch.add, torch.mul)
    total = parts[0].float() if is_narrow else parts[0].clone()
    for part in parts[1:]:
        total = step(total, part.float() if is_narrow else part)
    return total.to(parts[0].dtype)


class Program:
    def __init__(self, seed, groups, found):
        self.seed, self.draw, self.groups, self.found = seed, random.Random(seed), groups, found
        self.own_draw = random.Random(seed * 100 + RANK)
        self.open = []

    def run(self):
        for number in range(STEPS):
            self.step(number)
        self.close_all()

    def close_all(self):
        self.own_draw.shuffle(self.open)
        for work, check in self.open:
            work.wait()
            check()
        self.open.clear()

    def step(self, number):
        draw = self.draw
        ranks = draw.choice(list(self.groups))
        shm, gloo = self.groups[ranks]
        kind, dtype, shape = draw.choice(OPS), draw.choice(TYPES), draw.choice(SHAPES)
        spread, is_async = draw.choice(["plain", "plain", "transposed"]), draw.random() < 0.5
        root, name = draw.randrange(len(ranks)), draw.choice(list(REDUCTIONS))
        tags = [draw.randrange(3) for _ in range(6)]
        seed = self.seed * 100 + number
        if RANK not in ranks:
            return
        own = ranks.index(RANK)
        inputs = [made(seed, rank, shape, dtype, spread) for rank in ranks]
        what = f"program {self.seed} step {number}: {kind} {dtype} {shape} {name} of {ranks}, root {root}"
        results = []
        agrees = same if isinstance(shm, ShmGroup) else near
        for group in (shm, gloo):
            results.append(self.call(kind, group, ranks, own, inputs, root, name, tags, is_async and group is shm))
            if results[0] is None or (results[0][0] is None and group is shm):
                return
        (work, got, right), (other_work, other, _) = results

        def check():
            for index, (mine, must) in enumerate(zip(got, right, strict=True)):
                if not agrees(mine, must) and (
                    type(shm) is not dist.ProcessGroup or mine.is_contiguous()
                ):  # else gloo's own
                    self.found.append(f"{what}: result {index} is not what it must be")
                elif other_work is not None and mine.is_contiguous() and not near(mine, other[index]):
                    self.found.append(f"{what}: result {index} is not gloo's")

        self.open.append((work, check))
        if not is_async or len(self.open) > 6:
            self.close_all()

    def call(self, kind, group, ranks, own, inputs, root, name, tags, is_async):
        """Start an operation; returns what to wait for, what it writes, and what must stand there."""
        size, mine, (op, step) = len(ranks), inputs[own].clone(memory_format=torch.preserve_format), REDUCTIONS[name]
        is_gloo = not isinstance(group, ShmGroup)
        try:
            if kind == "all_reduce":
                work = dist.all_reduce(mine, op, group=group, async_op=True)
                out, right = [mine], [reduced(inputs, step)]
            elif kind == "reduce":
                work = dist.reduce(mine, group_dst=root, op=op, group=group, async_op=True)
                out, right = ([mine], [reduced(inputs, step)]) if own == root else ([], [])
            elif kind == "broadcast":
                work = dist.broadcast(mine, group_src=root, group=group, async_op=True)
                out, right = [mine], [inputs[root]]
            elif kind == "all_gather":
                out = [torch.empty_like(value) for value in inputs]
                work, right = dist.all_gather(out, mine, group=group, async_op=True), inputs
            elif kind == "all_gather_single":
                flat = mine.reshape(-1)
                out = [flat.new_empty(size * flat.numel())]
                work = dist.all_gather_single(out[0], flat, group=group, async_op=True)
                right = [torch.cat([value.reshape(-1) for value in inputs])]
            elif kind == "reduce_scatter_single":
                flats = [torch.cat([value.reshape(-1)] * size) for value in inputs]
                out = [mine.new_empty(mine.numel())]
                work = dist.reduce_scatter_single(out[0], flats[own], op, group=group, async_op=True)
                right = [reduced(flats, step)[: mine.numel()]]
            elif kind == "all_to_all_single":
                flats = [torch.cat([value.reshape(-1)] * size) for value in inputs]
                out = [torch.empty_like(flats[own])]
                work = dist.all_to_all_single(out[0], flats[own], group=group, async_op=True)
                right = [torch.cat([value.reshape(-1) for value in inputs])]
            elif kind == "rows":
                rows = [[(a * 3 + b * 2 + tags[0]) % 4 for b in range(size)] for a in range(size)]
                width = 5000
                given = [
                    made(self.seed, rank, (sum(rows[a]), width), mine.dtype, "plain") for a, rank in enumerate(ranks)
                ]
                into = [rows[a][own] for a in range(size)]
                out = [mine.new_empty(sum(into), width)]
                work = dist.all_to_all_single(out[0], given[own], into, rows[own], group=group, async_op=True)
                right = [torch.cat([given[a].split(rows[a])[own] for a in range(size)])]
            elif kind == "gather":
                out = [torch.empty_like(value) for value in inputs] if own == root else []
                work = dist.gather(mine, out or None, group_dst=root, group=group, async_op=True)
                right = inputs if own == root else []
            elif kind == "scatter":
                out = [torch.empty_like(mine)]
                values = [inputs[root] * 0 + inputs[a] for a in range(size)] if mine.dtype != torch.bool else inputs
                work = dist.scatter(
                    out[0],
                    [v.contiguous() for v in values] if own == root else None,
                    group_src=root,
                    group=group,
                    async_op=True,
                )
                right = [values[own]]
            elif kind == "barrier":
                work, out, right = dist.barrier(group=group, async_op=True), [], []
            elif kind == "object":
                out = [None] * size
                dist.all_gather_object(out, {"rank": RANK, "text": "x" * tags[0] * 1000}, group=group)
                assert [entry["rank"] for entry in out] == list(ranks)
                return None
            else:
                return self.messages(group, ranks, own, inputs, tags)
        except (RuntimeError, ValueError):
            if not is_gloo:
                raise
            return None, (), ()  # gloo has it not
        if not is_async:
            try:
                work.wait()
            except RuntimeError:
                if not is_gloo:
                    raise
                return None, (), ()
        return work, out, right

    def messages(self, group, ranks, own, inputs, tags):
        """Everybody sends to everybody, in orders of their own; tags tell the messages apart."""
        if not isinstance(group, ShmGroup):
            return None, (), ()  # gloo's sends wait for their receivers
        size, works, out, right = len(ranks), [], [], []
        plan = [("send", peer, n) for peer in range(size) for n in range(2) if peer != own]
        plan += [("receive", peer, n) for peer in range(size) for n in range(2) if peer != own]
        self.own_draw.shuffle(plan)
        for kind, peer, n in plan:
            if kind == "send":
                works.append(
                    dist.isend(
                        inputs[own] if n else inputs[own].reshape(-1)[:1].clone(), ranks[peer], group, n + 3 * tags[0]
                    )
                )
                continue
            value = torch.empty_like(inputs[peer] if n else inputs[peer].reshape(-1)[:1])
            works.append(dist.irecv(value, ranks[peer], group, n + 3 * tags[0]))
            out.append(value)
            right.append(inputs[peer] if n else inputs[peer].reshape(-1)[:1])
        self.own_draw.shuffle(works)

        class All:
            def wait(self):
                for work in works:
                    work.wait()

        return All(), out, right


def same(mine, must):
    return mine.shape == must.shape and torch.equal(mine.nan_to_num(), must.nan_to_num())


def near(mine, other):
    if mine.dtype not in ROUNDING:
        return torch.equal(mine, other)
    limit = ROUNDING[mine.dtype]
    return torch.allclose(mine.double(), other.double(), rtol=limit, atol=limit * 100, equal_nan=True)


def main():
    seed, programs = int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    subsets = {tuple(range(SIZE))}
    while SIZE > 2 and len(subsets) < 4:
        subsets.add(tuple(sorted(draw.sample(range(SIZE), draw.randint(2, SIZE)))))
    groups = {
        ranks: tuple(dist.new_group(list(ranks), backend=name) for name in ("shm", "gloo")) for ranks in sorted(subsets)
    }
    found = []
    for number in range(programs):
        Program(seed * 1000 + number, groups, found).run()
    everyone = [None] * SIZE
    dist.all_gather_object(everyone, found)
    if RANK == 0:
        Path(sys.argv[1]).write_text(json.dumps([text for own in everyone for text in own]))
    release()


main()
