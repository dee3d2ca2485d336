"""Checkpoints of networks under FSDP2: other layouts go on from them, and they from others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from mode_networks import adam, batches, make_network, mine, weight_difference
from torch import nn

from msrun.runtime import AutoParallel, WithLoss, get_rank, load_checkpoint, save_checkpoint

Result = dict[str, Any]
BEFORE, AFTER = 3, 3
LAYOUTS: dict[str, Callable[[nn.Module], AutoParallel]] = {
    "fsdp": lambda whole: AutoParallel(whole, "data_parallel").hsdp(threshold=1, optimizer_level="level3"),
    "fsdp-in-pairs": lambda whole: AutoParallel(whole, "data_parallel").hsdp(shard_size=2, threshold=0),
    "semi-auto": lambda whole: AutoParallel(whole).hsdp(threshold=1),
    "data-parallel": lambda whole: AutoParallel(whole, "data_parallel"),
}


class Run:
    """A network in one layout, with its optimizer."""

    def __init__(self, layout: str | None, seed: float = 0.0) -> None:
        self.network = make_network()
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter += seed
        self.optimizer = adam(self.network)
        whole = WithLoss(self.network, F.cross_entropy)
        self.step: Any = whole if layout is None else LAYOUTS[layout](whole)
        self._part = (lambda tensor: tensor) if layout is None else mine

    def train(self, given: list[Any]) -> list[float]:
        losses = []
        for images, labels in given:
            loss = self.step(self._part(images), self._part(labels))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


def moved(source: str, target: str, *, is_placed: bool) -> Result:
    """Save in one layout, load in another, before or after its first call, and go on."""
    given = list(batches(steps=BEFORE + AFTER))
    right = Run(None)
    expected = right.train(given)
    first = Run(source)
    first.train(given[:BEFORE])
    path = Path(f"checkpoint-{source}-{target}-{is_placed}").absolute()
    save_checkpoint(first.step, path, optimizer=first.optimizer)
    second = Run(target, seed=1.0)
    if is_placed:
        second.train(given[:1])
    load_checkpoint(path, second.step, second.optimizer)
    losses = second.train(given[BEFORE:])
    torch.distributed.barrier()
    if get_rank() == 0:
        path.unlink()
    return {
        "losses": losses,
        "right": expected[BEFORE:],
        "difference": weight_difference(second.network, right.network),
    }


def cases(ranks: int) -> dict[str, Callable[[], Result]]:
    pairs = [
        ("fsdp", "fsdp-in-pairs"),
        ("fsdp", "semi-auto"),
        ("semi-auto", "fsdp"),
        ("fsdp-in-pairs", "data-parallel"),
    ]
    return {
        f"checkpoint/{source}-to-{target}-{when}": lambda s=source, t=target, w=when: moved(
            s, t, is_placed=w == "placed"
        )
        for source, target in pairs
        for when in ("placed", "fresh")
    }
