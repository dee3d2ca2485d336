"""torch's own FSDP2, unchanged: this script runs under torchrun as it does under msrun, and imports nothing of msrun.

Start with `bash run.sh`. A small network learns the handwritten digits of scikit-learn, each
rank its own rows. Rank 0 prints the mean loss of the batch.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)

net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
for layer in net:
    if isinstance(layer, nn.Linear):
        fully_shard(layer)
fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

for step in range(int(os.getenv("STEPS", "100"))):
    rows = torch.arange(32 * step, 32 * (step + 1)) % len(images)
    rows = rows.chunk(ranks)[rank]
    loss = nn.functional.cross_entropy(net(images[rows]), labels[rows])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step: {step}, loss is {mean.item() / ranks}")
dist.destroy_process_group()
