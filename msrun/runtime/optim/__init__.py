"""Optimizers: torch's, which can also be called with gradients as MindSpore's are, and those of MindSpore's that torch
does not have.

All of them train cut parameters: norms of a parameter are those of the whole.
"""

from __future__ import annotations

from msrun.runtime.optim.adam import AdamWeightDecay, LazyAdam
from msrun.runtime.optim.base import Optimizer
from msrun.runtime.optim.ftrl import FTRL
from msrun.runtime.optim.host_steps import offload
from msrun.runtime.optim.lamb import Lamb
from msrun.runtime.optim.lars import LARS
from msrun.runtime.optim.memory import OptimizerMemory, memory_of
from msrun.runtime.optim.of_torch import SGD, Adam, AdamW, Momentum

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
