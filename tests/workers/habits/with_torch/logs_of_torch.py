import os

os.environ["TORCH_LOGS"] = "+dynamo"
import logging

import torch  # noqa: F401

print(logging.getLogger("torch._dynamo").level)
