import os

for line in ["# a comment", "OMP_NUM_THREADS=2", "export MKL_NUM_THREADS=2"]:
    if "=" in line:
        name, _, value = line.removeprefix("export ").partition("=")
        os.environ[name] = value
import torch  # noqa: E402

print(torch.get_num_threads())
