import importlib
import sys

import torch

before = len(sys.modules)
print(importlib.import_module("torch") is torch, "torch" in sys.modules, torch.__spec__.name)
import torch.utils.data  # noqa: E402

print(torch.utils.data.DataLoader.__module__)
