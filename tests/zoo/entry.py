"""One model of the zoo: how it is built, what it is fed, and which modes make sense for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from msrun.runtime import shard

ROWS = 8
"""Samples of the global batch."""

Batch = tuple[Tensor, ...]
Update = Callable[[], None]


def momentum(network, lr=0.05):
    """Return a step of SGD with momentum, which shows gradients of a wrong size, as Adam does not."""
    return torch.optim.SGD(network.parameters(), lr=lr, momentum=0.9).step


def adamw(network):
    """Return a step of AdamW."""
    return torch.optim.AdamW(network.parameters(), lr=2e-3).step


@dataclass(frozen=True)
class Entry:
    """One model."""

    name: str
    build: Callable[[], nn.Module]
    """The network with its loss."""
    batch: Callable[[torch.Generator], Batch]
    """The global batch, `ROWS` samples."""
    source: str = "msrun's tests"
    """The package that the model comes from."""
    is_float64: bool = False
    draws: bool = False
    """Whether forward draws random numbers: one process then draws from the network's stream, too."""
    normalises_batch: bool = False
    """Whether it has batch norm: micro batches, and ranks in data_parallel, have statistics of their own."""
    optimizer: Callable[[nn.Module], Update] = momentum
    cut: Callable[[nn.Module, int], None] | None = None
    """Gives the network a tensor-parallel strategy in two parts; the batch is cut in as many as it is told."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """mode -> words of the error with which it is refused"""

    def data(self):
        """Return the global batch, the same everywhere."""
        made = self.batch(torch.Generator().manual_seed(1))
        return tuple(t.double() if self.is_float64 and t.is_floating_point() else t for t in made)

    def network(self):
        """Return the model with the same values everywhere."""
        torch.manual_seed(0)
        network = self.build()
        return network.double() if self.is_float64 else network


def cut(*, columns=(), inputs=(), channels=(), dims=3):
    """Return what cuts layers in 2, found by the ends of their names, which must exist, and their input's batch.

    Args:
        columns: linear layers, by their outputs.
        inputs: linear layers, by their inputs.
        channels: convolutions, by their output channels.
        dims: of what linear layers get.
    """

    def give_strategies(network, rows):
        between, paths = (1,) * (dims - 2), [path for path, _ in network.named_modules()]
        strategies = {
            columns: ((rows, *between, 1), (2, 1)),
            inputs: ((rows, *between, 2), (1, 2)),
            channels: ((rows, 1, 1, 1), (2, 1, 1, 1)),
        }
        for ends in filter(None, strategies):
            found = [path for path in paths if path.endswith(ends)]
            assert found, f"no module is called {' or '.join(ends)}"
            for path in found:
                shard(network.get_submodule(path), strategies[ends])

    return give_strategies


def images(classes=10, size=32):
    """Return a maker of images and their labels."""

    def batch(generator):
        return (
            torch.randn(ROWS, 3, size, size, generator=generator),
            torch.randint(classes, (ROWS,), generator=generator),
        )

    return batch


def tokens(vocabulary=64, length=12):
    """Return a maker of token ids, and of ids to predict."""

    def batch(generator):
        return (
            torch.randint(1, vocabulary, (ROWS, length), generator=generator),
            torch.randint(1, vocabulary, (ROWS, length), generator=generator),
        )

    return batch
