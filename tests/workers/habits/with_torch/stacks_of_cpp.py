import os

os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"
import torch

try:
    torch.ones(2) @ torch.ones(3)
except RuntimeError as error:
    print("frame #" in str(error))
