"""What the others are told when something goes wrong on the backend shm.

usage: shm_failures.py FOLDER WHAT RANKS     each rank writes what it was told to FOLDER/RANK.json

The ranks are children of this process: msrun would end the others when one of them dies.
"""

import ctypes
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from msrun.runtime import init
from msrun.runtime.execute.transfers import start_all_reduce

FOLDER, WHAT, SIZE = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
LAST = SIZE - 1


def fork_ranks():
    """Return the rank of a child; the parent waits for all and ends."""
    children = []
    for rank in range(SIZE):
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE}
            os.environ.update({name: str(value) for name, value in place.items()})
            os.environ |= {"MSRUN_JOB_ID": "failures", "MSRUN_RENDEZVOUS": f"file://{FOLDER}/store"}
            return rank
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    sys.exit()


RANK = fork_ranks()
init(timeout_s=30)
assert dist.get_backend() == "shm"
dist.all_reduce(torch.ones(3))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def killed():
    """In the middle of a message of many steps, of which it has written as many as it can alone."""
    value = torch.ones(4_000_000)
    if RANK == LAST:
        dist.all_reduce(value, async_op=True)
        die()
    time.sleep(0.5)
    dist.all_reduce(value)


def killed_before_turn():
    """A long sum goes from rank to rank where they share cores: the last one waits for the turn of the one before."""
    if RANK == LAST - 1:
        die()
    time.sleep(0.3)
    dist.all_reduce(torch.ones(500_000))


def killed_before_pending():
    if RANK == LAST:
        die()
    start_all_reduce(torch.ones(5), dist.group.WORLD).wait()


def killed_before_message():
    if RANK == LAST:
        die()
    if RANK == 0:
        dist.recv(torch.ones(4), LAST)
    else:
        dist.send(torch.ones(8_000_000), LAST)  # more than a mailbox takes


def left():
    if RANK == LAST:
        dist.destroy_process_group()
        time.sleep(2)
    else:
        dist.barrier()


def busy_elsewhere():
    """An operation of many steps goes on while a rank waits for something that another does after it."""
    store = dist.distributed_c10d._get_default_store()
    value = torch.ones(8_000_000)
    work = dist.all_reduce(value, async_op=True)
    if RANK == 0:
        store.wait(["done"], timedelta(seconds=20))
    work.wait()
    if RANK == LAST:
        store.set("done", "")
    assert value.sum() == SIZE * 8_000_000


def other_operation():
    if RANK == LAST:
        dist.all_reduce(torch.ones(4))
    else:
        dist.all_reduce(torch.ones(3))


def other_size_of_message():
    if RANK == 0:
        dist.recv(torch.ones(3), LAST)
    elif RANK == LAST:
        dist.send(torch.ones(4), 0)


def inference():
    """An operation begun in inference mode ends outside it, in any shape; what comes after it is as ever."""
    with torch.inference_mode():
        values = [torch.ones(300_000), torch.ones(300, 200).t(), torch.ones(4)]
        works = [dist.all_reduce(value, async_op=True) for value in values]
    time.sleep(0.1)
    for work in works:
        work.wait()
    after = torch.ones(3, requires_grad=True) * 2
    dist.all_reduce(after)
    assert [value.mean() for value in (*values, after)] == [SIZE, SIZE, SIZE, 2 * SIZE]
    for is_inference in (True, False):  # of sizes that were first met in inference mode
        for _ in range(20):
            with torch.inference_mode(is_inference):
                gathered = torch.empty(SIZE, 5)
                dist.all_gather_into_tensor(gathered.view(-1), torch.full((5,), RANK + 1.0))
                dist.reduce_scatter_tensor(torch.empty(5), gathered.view(-1))
                dist.all_to_all_single(torch.empty(SIZE * 7), torch.ones(SIZE * 7))
                assert gathered.sum() == 5 * SIZE * (SIZE + 1) / 2


def late():
    """A wait that is over may be taken up again."""
    if RANK == LAST:
        time.sleep(1.0)
    value = torch.ones(4)
    work = dist.all_reduce(value, async_op=True)
    if RANK != LAST:
        try:
            work.wait(timedelta(seconds=0.2))
        except RuntimeError as error:
            told.append(str(error))
    work.wait()
    assert value.tolist() == [SIZE] * 4


def own_time_out():
    """A barrier may have a time-out of its own."""
    store = dist.distributed_c10d._get_default_store()
    if RANK == LAST:
        store.wait(["told"], timedelta(seconds=20))
    else:
        try:
            dist.barrier(timeout=timedelta(seconds=0.2))
        except RuntimeError as error:
            told.append(str(error))
    store.set("told", "")
    store.wait(["told"])


def sparse():
    """Sparse tensors are added up, those of DDP as well; each rank may have as many values as it likes."""
    own = torch.sparse_coo_tensor([[0, RANK + 1, 0]], [1.0, 2.0, 3.0], (5,))
    dist.all_reduce(own)
    right = torch.tensor([4.0 * SIZE, *(2.0 if place < SIZE else 0.0 for place in range(4))])
    assert torch.equal(own.to_dense(), right)
    table = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(6, 2, sparse=True))
    table(torch.arange(RANK + 1)).sum().backward()
    slope = table.module.weight.grad.to_dense()[:, 0] * SIZE
    assert slope.round().tolist() == [float(max(0, SIZE - row)) for row in range(6)]


def older_names():
    """torch before 2.13 calls the operations of one tensor by other names."""
    group, value, all_values = dist.group.WORLD, torch.full((2,), float(RANK)), torch.empty(2 * SIZE)
    group._allgather_base(all_values, value).wait()
    assert all_values.tolist() == [float(rank) for rank in range(SIZE) for _ in range(2)]
    group._reduce_scatter_base(value, all_values).wait()
    assert value.tolist() == [float(RANK * SIZE)] * 2
    exchanged = torch.empty(2 * SIZE)
    group.alltoall_base(exchanged, all_values, [], []).wait()
    assert exchanged.tolist() == [float(RANK)] * 2 * SIZE


told = []
began = time.monotonic()
try:
    globals()[WHAT]()
except RuntimeError as error:
    told.append(str(error))
took = time.monotonic() - began
(FOLDER / f"{RANK}.json").write_text(json.dumps([told, took]))
os._exit(0)
