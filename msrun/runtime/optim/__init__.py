"""Optimizers: torch's, which can also be called with gradients as MindSpore's are, and those of MindSpore's that torch
does not have.

All of them train cut parameters: norms of a parameter are those of the whole.
"""

from __future__ import annotations

from msrun.runtime.optim.base import Optimizer, OptimizerMemory, memory_of
from msrun.runtime.optim.host_steps import offload
from msrun.runtime.optim.optimizers import FTRL, LARS, SGD, Adam, AdamW, AdamWeightDecay, Lamb, LazyAdam, Momentum

__all__ = [
    "FTRL",
    "LARS",
    "SGD",
    "Adam",
    "AdamW",
    "AdamWeightDecay",
    "Lamb",
    "LazyAdam",
    "Momentum",
    "Optimizer",
    "OptimizerMemory",
    "memory_of",
    "offload",
]
