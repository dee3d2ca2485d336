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
    left_out: Mapping[str, str] = field(default_factory=dict)
    """mode -> why it makes no sense for this model"""
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


def columns(layers, rows, dims=3):
    """Cut linear layers by their outputs in 2, and their input's batch in `rows`; the input has `dims` dimensions."""
    for layer in layers:
        shard(layer, ((rows, *(1,) * (dims - 1)), (2, 1)))


def inputs(layers, rows, dims=3):
    """Cut linear layers by their inputs in 2, and their input's batch in `rows`."""
    for layer in layers:
        shard(layer, ((rows, *(1,) * (dims - 2), 2), (1, 2)))


def channels(layers, rows):
    """Cut convolutions by their output channels in 2, and their input's batch in `rows`."""
    for layer in layers:
        shard(layer, ((rows, 1, 1, 1), (2, 1, 1, 1)))


def called(network, *paths):
    """Return the submodules whose path ends with one of these names, which must exist."""
    found = [module for path, module in network.named_modules() if path.endswith(paths)]
    if not found:
        raise LookupError(f"no module is called {' or '.join(paths)}")
    return found


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
