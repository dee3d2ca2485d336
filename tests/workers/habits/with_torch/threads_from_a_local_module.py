import os
import sys

sys.dont_write_bytecode = True
import settings  # noqa: E402, F401
import torch  # noqa: E402

print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
