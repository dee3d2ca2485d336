"""Modes, their words and their factors."""

from __future__ import annotations

from pathlib import Path
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


@pytest.mark.parametrize(
    ("word", "mode"),
    [
        ("auto", "auto"),
        ("auto_parallel", "recursive_programming"),
        ("sharding_propagation", "sharding_propagation"),
        ("dynamic_programming", "dynamic_programming"),
    ],
)
def test_modes_that_search_are_semi_auto_with_a_search(word: str, mode: str) -> None:
    settings = AutoParallel(nn.Linear(2, 2), word).search("h100", memory_limit_mb=100).settings
    assert settings.parallel_mode == "semi_auto"
    assert settings.search is not None and settings.search.mode == settings.mode_text == mode
    assert settings.search.spec().limit_bytes == 100 * 2**20


def test_search_is_refused_without_a_mode_that_searches_and_out_of_range() -> None:
    with pytest.raises(StrategyError, match=r"search\(\) with parallel_mode='semi_auto', which searches nothing"):
        AutoParallel(nn.Linear(2, 2)).search("h100")
    searching = AutoParallel(nn.Linear(2, 2), "auto")
    with pytest.raises(StrategyError, match=r"device 'h1000'.*must be one of"):
        searching.search("h1000")
    with pytest.raises(StrategyError, match="memory_limit_mb=0"):
        searching.search(memory_limit_mb=0)
    with pytest.raises(StrategyError, match=r"time_limit_s=0\): must be a number of seconds above 0"):
        searching.search(time_limit_s=0)
    with pytest.raises(StrategyError, match="optimizer_states=-1"):
        searching.search(optimizer_states=-1)
    with pytest.raises(StrategyError, match=r"must end in \.json"):
        searching.save_operator_strategy_file("plan.txt")


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


def test_switches_of_transformer_opt_come_from_a_dict_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "speed_up.json"
    file.write_text('{"grad_matmul_communication_overlap": true, "computation_allgather_overlap": false}')
    step = AutoParallel(nn.Linear(2, 2))
    assert not step.settings.overlaps_weights
    assert step.transformer_opt(file).settings.overlaps_weights
    assert step.transformer_opt(str(file)).settings.overlaps_weights
    assert not step.transformer_opt({"grad_matmul_communication_overlap": False}).settings.overlaps_weights
    assert not step.transformer_opt(None).settings.overlaps_weights
    assert not step.transformer_opt("").settings.overlaps_weights


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"grad_matmul_communication_overlp": True}, "did you mean"),
        ({"grad_matmul_communication_overlap": 1}, "must be true or false"),
        ({"computation_allgather_overlap": True}, "does not exist here"),
        ([1], "give a dict of switches or the path"),
        ("/nowhere/speed_up.json", "No such file or directory"),
    ],
)
def test_other_switches_of_transformer_opt_are_refused(config: Any, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        AutoParallel(nn.Linear(2, 2)).transformer_opt(config)


def test_a_file_of_transformer_opt_that_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "speed_up.json"
    file.write_text("{grad")
    with pytest.raises(StrategyError, match="is not JSON"):
        AutoParallel(nn.Linear(2, 2)).transformer_opt(file)
