"""Programs that use torch, a cell each."""

# %% compiled
import torch


@torch.jit.script
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


print(double(torch.ones(2)).tolist())
print(torch.fx.symbolic_trace(torch.nn.ReLU())(torch.ones(1)).item())

# %% defaults_of_torch
import torch

print(torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
print(torch.initial_seed() != 0, torch.get_num_interop_threads() > 0, torch.multiprocessing.get_sharing_strategy())
print(torch.__config__.parallel_info().splitlines()[0], torch.backends.mkldnn.is_available())

# %% details_of_distributed
import os

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
import torch.distributed as dist

print(dist.get_debug_level())

# %% group_is_destroyed_in_del
import torch.distributed as dist


class Trainer:
    def __init__(self):
        dist.init_process_group("gloo")

    def __del__(self):
        dist.destroy_process_group()
        print("destroyed")


trainer = Trainer()
print(dist.get_world_size())

# %% loader_with_workers
import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor([index])


if __name__ == "__main__":
    for context in ("fork", "spawn"):
        for batch in DataLoader(Numbers(), batch_size=3, num_workers=2, multiprocessing_context=context):
            print(context, batch.flatten().tolist())

# %% numpy_threads
import os

os.environ["OPENBLAS_NUM_THREADS"] = "2"
import numpy

numpy.ones((300, 300)) @ numpy.ones((300, 300))
print(os.environ["OPENBLAS_NUM_THREADS"], len(os.listdir("/proc/self/task")))

# %% saved_classes_are_of_main
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2, bias=False)


torch.manual_seed(0)
torch.save(Net(), "net.pt")
loaded = torch.load("net.pt", weights_only=False)
print(type(loaded).__module__, loaded)

# %% seeds_of_torch_differ
import random

import numpy
import torch

print(torch.initial_seed() == torch.manual_seed(3).initial_seed(), torch.rand(1).item())
random.seed(3)
numpy.random.seed(3)
print(random.random(), numpy.random.rand())

# %% tensors_are_shared
import torch
import torch.multiprocessing as mp


def work(tensor, queue):
    tensor += 1
    queue.put(tensor.sum().item())


if __name__ == "__main__":
    context = mp.get_context("spawn")
    tensor, queue = torch.zeros(3).share_memory_(), context.Queue()
    child = context.Process(target=work, args=(tensor, queue))
    child.start()
    print(queue.get(), child.join(), tensor.tolist())

# %% threads_from_a_dotenv_file
import os

for line in ["# a comment", "OMP_NUM_THREADS=2", "export MKL_NUM_THREADS=2"]:
    if "=" in line:
        name, _, value = line.removeprefix("export ").partition("=")
        os.environ[name] = value
import torch  # noqa: E402

print(torch.get_num_threads())

# %% threads_from_a_local_module
import os
import sys

sys.dont_write_bytecode = True
import settings  # noqa: E402, F401
import torch  # noqa: E402

print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])

# %% threads_from_the_environment
import os

os.environ["OMP_NUM_THREADS"] = "2"
import torch

print(torch.get_num_threads())
