import os

os.environ["OMP_NUM_THREADS"] = "2"
import torch

print(torch.get_num_threads())
