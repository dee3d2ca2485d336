"""shm_busy.py FOLDER: collectives and messages without an end, short and long, waited for and not, in groups of all sizes."""

import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from msrun.runtime import get_group_size, get_rank, init

init(timeout_s=60)
assert dist.get_backend() == "shm"
rank, size = get_rank(), get_group_size()
groups = [dist.group.WORLD, dist.new_group(list(range(size - 1))), dist.new_group(list(range(1, size)))]
same = random.Random(1)  # all ranks draw the same
after = (rank + 1) % size
for step in range(1_000_000):
    if step == 3:
        Path(sys.argv[1], f"ready_{rank}").touch()
    count, works = same.choice([1, 1000, 200_000, 3_000_000]), []
    for group in same.sample(groups, 2):
        if dist.get_rank(group) >= 0:
            works.append(dist.all_reduce(torch.ones(count), group=group, async_op=True))
    got = torch.empty(count)
    works += [dist.isend(torch.ones(count), after), dist.irecv(got, (rank - 1) % size)]
    if same.random() < 0.5:
        gathered = [torch.empty(count) for _ in range(size)]
        works.append(dist.all_gather(gathered, torch.ones(count), async_op=True))
    for work in works:
        work.wait()
