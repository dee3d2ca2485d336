"""Modes, their words and their factors."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import (
    AutoParallel,
)
from msrun.runtime.parallel.scaling import replica_scales


@pytest.mark.parametrize(
    ("word", "mode"),
    [
        ("semi_auto_parallel", "semi_auto"),
        ("data_parallel", "data_parallel"),
        ("hybrid_parallel", "hybrid_parallel"),
        ("stand_alone", "stand_alone"),
    ],
)
def test_old_names_of_modes_keep_their_meaning(word: str, mode: str) -> None:
    assert AutoParallel(nn.Linear(2, 2), word).settings.parallel_mode == mode


@pytest.mark.parametrize("word", ["auto", "auto_parallel", "recursive_programming", "sharding_propagation"])
def test_modes_that_search_are_refused_with_the_way_to_go(word: str) -> None:
    with pytest.raises(
        StrategyError, match=f'{word!r}: strategies are not searched for; use parallel_mode="semi_auto"'
    ):
        AutoParallel(nn.Linear(2, 2), word)


@pytest.mark.parametrize("mode", ["data_parallel", "hybrid_parallel", "stand_alone"])
def test_setters_that_a_mode_cannot_obey_are_refused(mode: str) -> None:
    with pytest.raises(StrategyError, match=r"dataset_strategy\(\)"):
        AutoParallel(nn.Linear(2, 2), mode).dataset_strategy("full_batch")


def test_hsdp_needs_ranks_that_are_alike() -> None:
    AutoParallel(nn.Linear(2, 2), "data_parallel").hsdp()
    with pytest.raises(StrategyError, match="needs a captured graph"):
        AutoParallel(nn.Linear(2, 2), "hybrid_parallel").hsdp()
    with pytest.raises(StrategyError, match="its ranks exchange nothing"):
        AutoParallel(nn.Linear(2, 2), "stand_alone").hsdp()


def test_no_sync_is_for_modes_without_capture() -> None:
    with pytest.raises(StrategyError, match="it is for data_parallel and"), AutoParallel(nn.Linear(2, 2)).no_sync():
        pass


@pytest.mark.parametrize(
    ("compat", "averages", "start", "own"),
    [
        ("torch", True, 1.0, 0.25),
        ("torch", False, 4.0, 0.25),
        ("mindspore", True, 1.0, 1.0),
        ("mindspore", False, 4.0, 0.25),
    ],
)
def test_gradients_that_ddp_averages_begin_with_the_right_factor(
    compat: Any, averages: bool, start: float, own: float
) -> None:
    scales = replica_scales(compat, averages, 4)
    assert (scales.start, scales.own) == (start, own)
