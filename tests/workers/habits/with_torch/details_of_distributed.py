import os

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
import torch.distributed as dist

print(dist.get_debug_level())
