"""Train a transformer for some steps with changing lengths; rank 0 tells how it was captured, and the losses."""

import torch
from torch import nn

from msrun.runtime import AutoParallel, WithLoss, get_rank, init, parallelize

init()
torch.manual_seed(0)
network = WithLoss(
    nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(2))),
    nn.MSELoss(),
)
parallelize(network, {"network.*.linear1": "colwise", "network.*.linear2": "rowwise"})
step = AutoParallel(network).dataset_strategy("full_batch")
optimizer = torch.optim.SGD(network.parameters(), 0.1)
told = []
for length in (4, 4, 6, 8):
    x = torch.randn(4, length, 8, generator=torch.Generator().manual_seed(length))
    loss = step(x, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    told.append(loss.item())
if get_rank() == 0:
    print(step.plan.kept)
    print(told, step.captures)
