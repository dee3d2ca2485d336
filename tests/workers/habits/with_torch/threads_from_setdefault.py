import os

os.environ.pop("OMP_NUM_THREADS", None)
os.environ.setdefault("OMP_NUM_THREADS", "2")
import torch

print(torch.get_num_threads())
