"""The training script of the picture failing_job.svg and of the tutorial on failures: rank 2 fails at step 3."""

import os
import time

rank = int(os.environ["RANK"])


def read_batch(step):
    if rank == 2 and step == 3:
        raise RuntimeError("batch 3 of this rank is empty")
    return [rank, step]


for step in range(100):
    batch = read_batch(step)
    print("step", step, "batch", batch)
    time.sleep(0.05)
