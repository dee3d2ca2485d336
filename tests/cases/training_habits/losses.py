"""Losses: inside the network, outside, several of them, of some rows, and their backward passes."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from training_habits.trial import CAPTURED, MODES, OWN_ROWS, Criterion, Mlp, Trial, habit, sgd, train

WITH_RESULTS = tuple(mode for mode in MODES if mode != "pipeline")
"""Modes in which a call in training returns more than a loss."""


@habit("loss inside")
def _(t: Trial) -> None:
    train(t, Criterion(Mlp()))


@habit("loss outside", WITH_RESULTS)
def _(t: Trial) -> None:
    train(t, Mlp(), loss_of=lambda step, x, y: F.mse_loss(step(x), y))
