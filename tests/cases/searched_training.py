"""Networks whose strategies are searched for."""

import torch
import torch.nn.functional as F  # noqa: N812
import transformer_scenarios
from torch import nn

from msrun.runtime import WithLoss


class Mlp(nn.Module):
    """A wide layer between small ones: what cuts its weights moves less than what sums their gradients."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 512), nn.Linear(512, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.head(self.down(torch.relu(self.up(x))).tanh())


class Convolutions(nn.Module):
    """Convolution, batch norm and pooling before a linear layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(16 * 16, 8)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.head(torch.relu(self.second(x)).flatten(1))


def _mlp():
    return WithLoss(Mlp(), F.cross_entropy), (torch.randn(16, 16), torch.randint(0, 8, (16,)))


def _conv():
    return WithLoss(Convolutions(), F.cross_entropy), (torch.randn(8, 3, 8, 8), torch.randint(0, 8, (8,)))


def _transformer():
    size = transformer_scenarios.BATCH, transformer_scenarios.TOKENS
    text = torch.randint(0, transformer_scenarios.VOCABULARY, size)
    return transformer_scenarios.Gpt(0.1, "layer"), (text, text.roll(1, 1))


NETWORKS = {"mlp": _mlp, "conv": _conv, "transformer": _transformer}


def build(name):
    """Return a network in float64 and a batch, the same in every process."""
    torch.manual_seed(3)
    network, batch = NETWORKS[name]()
    return network.double(), tuple(each.double() if each.is_floating_point() else each for each in batch)
