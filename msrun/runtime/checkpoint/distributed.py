"""load_distributed_checkpoint: the checkpoints of all ranks into a network that is cut otherwise, or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msrun.errors import CheckpointError
from msrun.runtime.agreement import attempt
from msrun.runtime.checkpoint.background import background
from msrun.runtime.checkpoint.load import load_network
from msrun.runtime.checkpoint.sources import open_source
from msrun.runtime.parallel.context import get_auto_parallel_context
from msrun.runtime.parallel.parameters.layouts import ParameterLayout, check_layouts
from msrun.runtime.parallel.parameters.network_state import find_network_state
from msrun.runtime.parallel.strategy_file import read_strategy


def load_distributed_checkpoint(
    network: Any,
    checkpoint_filenames: Sequence[str | os.PathLike[str]],
    predict_strategy: Mapping[str, ParameterLayout] | str | os.PathLike[str] | None = None,
    train_strategy_filename: str | os.PathLike[str] | None = None,
    strict_load: bool = False,
) -> None:
    """Load a network from the checkpoints that the ranks of a training wrote, each its own parts.

    The network may be cut in any way, or be cut by its first call later: each rank reads what it holds. All ranks call
    it together.

    Args:
        network: a module, or an AutoParallel of one.
        checkpoint_filenames: of all ranks, in their order; or one that is complete, or that has the others beside it.
        predict_strategy: how this network will be cut, from `Model.infer_train_layout`, `Model.infer_predict_layout`,
            `find_layouts` or a strategy file. It is checked against the network; the network itself decides.
        train_strategy_filename: how the checkpoints were cut, else `strategy_ckpt_load_file` of the context. Only plain
            torch.save files need it: msrun's say it themselves.
        strict_load: refuse a network whose tensors are not exactly those of the checkpoint.

    Raises:
        CheckpointError: a checkpoint is missing or incomplete, or one of another network.
    """
    if isinstance(checkpoint_filenames, str | os.PathLike) or not checkpoint_filenames:
        raise CheckpointError(
            f"checkpoint_filenames={checkpoint_filenames!r}: give a list with the checkpoints of all ranks, in order"
        )
    background.wait()
    strategy = train_strategy_filename or get_auto_parallel_context("strategy_ckpt_load_file") or None

    def load() -> None:
        if isinstance(predict_strategy, str | os.PathLike):
            check_layouts(network, read_strategy(predict_strategy))
        elif predict_strategy is not None:
            check_layouts(network, predict_strategy)
        reader, _ = open_source(dict(enumerate(map(Path, checkpoint_filenames))), strategy)
        load_network(reader, find_network_state(network), strict_load=strict_load)

    attempt(load)
