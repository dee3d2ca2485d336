"""A plain torch script that knows no launcher: env:// and one all_reduce; result_<rank>.json tells the outcome."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
values = torch.arange(4, dtype=torch.float64) * (dist.get_rank() + 1)
dist.all_reduce(values)
gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, {"rank": dist.get_rank(), "local": os.environ["LOCAL_RANK"]})
result = {"rank": dist.get_rank(), "world": dist.get_world_size(), "sum": values.tolist(), "all": gathered}
Path(f"result_{dist.get_rank()}.json").write_text(json.dumps(result))
dist.destroy_process_group()
