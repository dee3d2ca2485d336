"""The user's own torch DataLoader, where our datasets can stand, too."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, IterableDataset

from msrun.errors import UsageError


def begin_epoch(batches: Any, epoch: int) -> None:
    """Tell what is about to be looped over which epoch (from 0) begins, as a DistributedSampler needs to be told.

    Without it every epoch has the order of the first one. Whatever has a `set_epoch(epoch)` is told: a DataLoader's
    samplers and its dataset.

    Raises:
        UsageError: a torch Dataset, which has no batches.
    """
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        name = type(batches).__name__
        raise UsageError(
            f"{name} is a torch Dataset, which gives samples, not batches; give a DataLoader, or "
            f"GeneratorDataset({name}(...)).batch(n), of which each rank reads its part"
        )
    batch_sampler = getattr(batches, "batch_sampler", None)
    samplers = [getattr(batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    told = set()
    for holder in (batches, *samplers, getattr(batches, "dataset", None)):
        set_epoch = getattr(holder, "set_epoch", None)
        if callable(set_epoch) and id(holder) not in told:
            told.add(id(holder))
            set_epoch(epoch)
