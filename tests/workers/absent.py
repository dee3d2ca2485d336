"""absent.py RANK HOW [LATE_S]: rank RANK ends with 0 and joins nothing; the others meet as HOW says, after LATE_S.

HOW: runtime (init() and no collective), plain (init_process_group, then all_reduce), late_import (the same, with torch
imported by a function), smaller (a world without RANK), nothing.
"""

import os
import sys
import time

how = sys.argv[2]
rank = int(os.environ["RANK"])
if rank == int(sys.argv[1]):
    sys.exit(0)
time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)


def meet(**place):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", **place)
    dist.all_reduce(torch.ones(1))


if how == "runtime":
    from msrun.runtime import init

    init()
elif how == "plain":
    import torch.distributed  # noqa: F401 - before the fork

    meet()
elif how == "late_import":
    meet()
elif how == "smaller":
    size = int(os.environ["WORLD_SIZE"]) - 1
    meet(rank=rank - (rank > int(sys.argv[1])), world_size=size)
