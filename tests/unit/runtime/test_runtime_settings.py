"""Settings of AutoParallel, and MindSpore's context that gives them."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import (
    AutoParallel,
    Model,
    ParallelMode,
    get_auto_parallel_context,
    init,
    release,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec
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


@pytest.fixture(autouse=True)
def clean_context() -> Iterator[None]:
    reset_auto_parallel_context()
    yield
    reset_auto_parallel_context()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"parallel_mod": "x"}, r"unknown word \(did you mean parallel_mode\?\)"),
        ({"device_num": 0}, "must be a whole number from 1 to 4096"),
        ({"device_num": 4097}, "must be a whole number from 1 to 4096"),
        ({"device_num": True}, "must be a whole number"),
        ({"global_rank": -1}, "must be a whole number from 0 to 4095"),
        ({"gradients_mean": 1}, "must be True or False"),
        ({"parallel_mode": "data-parallel"}, r"did you mean data_parallel\?"),
        (
            {"search_mode": "genetic"},
            "search_mode='genetic': must be one of dynamic_programming",
        ),
        ({"auto_parallel_search_mode": None}, "auto_parallel_search_mode=None: must be one of"),
        ({"dataset_strategy": "full"}, r"dataset_strategy\('full'\)"),
        ({"full_batch": "yes"}, "must be True or False"),
        ({"compat": "numpy"}, "must be torch"),
        ({"parallel_optimizer_config": []}, "must be a dict"),
        ({"parallel_optimizer_config": {"threshold": 1}}, "must be one of gradient_accumulation_shard"),
        ({"parallel_optimizer_config": {"parallel_optimizer_threshold": -1}}, "must be a whole number from 0"),
        ({"parallel_optimizer_config": {"optimizer_level": "level4"}}, "must be one of level1"),
        ({"optimizer_weight_shard_size": 0}, "above 0, or -1"),
        ({"pipeline_stages": 0}, "1 to 4096"),
        ({"pipeline_scheduler": "2f2b"}, "1f1b"),
        ({"comm_fusion": {"allreduce": {"mode": "auto"}}}, "config"),
        ({"all_reduce_fusion_config": [20, 35]}, "say it with set_comm_fusion"),
        ({"strategy_ckpt_load_file": 1}, "must be the path of a file"),
        ({"strategy_ckpt_config": {"save_file": "x"}}, "say it with strategy_ckpt_save_file"),
        ({"loss_repeated_mean": False}, "must be True"),
        ({"enable_alltoall": 1}, "must be True"),
    ],
)
def test_wrong_words_and_values_are_refused_and_nothing_changes(words: dict[str, Any], text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        set_auto_parallel_context(gradient_fp32_sync=False, **words)
    assert get_auto_parallel_context("gradient_fp32_sync") is True


def test_values_that_are_as_things_are_pass() -> None:
    set_auto_parallel_context(pipeline_stages=1, search_mode="recursive_programming", loss_repeated_mean=True)
    assert get_auto_parallel_context("pipeline_stages") == 1
    assert get_auto_parallel_context("strategy_ckpt_save_file") == ""


def test_the_way_to_search_is_that_of_the_context_and_recursive_by_default() -> None:
    def mode() -> str:
        search = AutoParallel(nn.Linear(2, 2)).settings.search
        assert search is not None
        return search.mode

    set_auto_parallel_context(parallel_mode=ParallelMode.AUTO_PARALLEL)
    assert mode() == get_auto_parallel_context("search_mode") == "recursive_programming"
    set_auto_parallel_context(auto_parallel_search_mode="dynamic_programming")
    assert mode() == get_auto_parallel_context("search_mode") == "dynamic_programming"
    set_auto_parallel_context(search_mode="sharding_propagation")
    with pytest.raises(StrategyError, match="set one of them"):
        AutoParallel(nn.Linear(2, 2))
    reset_auto_parallel_context()
    set_auto_parallel_context(parallel_mode=ParallelMode.AUTO_PARALLEL, sharding_propagation=True)
    assert mode() == "sharding_propagation"


def test_stages_and_fusion_reach_auto_parallel() -> None:
    set_auto_parallel_context(
        parallel_mode="semi_auto",
        pipeline_stages=2,
        pipeline_scheduler="gpipe",
        comm_fusion={"allreduce": {"mode": "size", "config": 32}},
    )
    settings = AutoParallel(nn.Linear(2, 2)).settings
    assert (settings.pipeline.stages, settings.pipeline.scheduler) == (2, "gpipe")
    assert (
        settings.comm_fusion
        == AutoParallel(nn.Linear(2, 2)).comm_fusion({"allreduce": {"mode": "size", "config": 32}}).settings.comm_fusion
    )
    assert get_auto_parallel_context("pipeline_stages") == 2


def test_get_tells_what_was_set_else_what_is_done() -> None:
    assert get_auto_parallel_context("parallel_mode") == "stand_alone"
    assert get_auto_parallel_context("gradients_mean") is True
    assert get_auto_parallel_context("device_num") == 1
    assert get_auto_parallel_context("full_batch") is False
    set_auto_parallel_context(compat="mindspore", dataset_strategy="full_batch")
    assert get_auto_parallel_context("gradients_mean") is False
    assert get_auto_parallel_context("parameter_broadcast") is False
    assert get_auto_parallel_context("full_batch") is True
    set_auto_parallel_context(gradients_mean=True)
    assert get_auto_parallel_context("gradients_mean") is True
    with pytest.raises(StrategyError, match=r"did you mean device_num\?"):
        get_auto_parallel_context("device_number")


def test_reset_restores_every_default() -> None:
    set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=False, full_batch=True)
    reset_auto_parallel_context()
    assert get_auto_parallel_context("parallel_mode") == "stand_alone"
    assert AutoParallel(nn.Linear(2, 2)).settings.parallel_mode == "semi_auto"


def test_context_belongs_to_its_task() -> None:
    contextvars.copy_context().run(set_auto_parallel_context, parallel_mode="data_parallel")
    assert get_auto_parallel_context("parallel_mode") == "stand_alone"


def test_auto_parallel_takes_its_defaults_from_the_context() -> None:
    set_auto_parallel_context(
        parallel_mode=ParallelMode.SEMI_AUTO_PARALLEL,
        compat="mindspore",
        full_batch=True,
        gradient_fp32_sync=False,
        enable_parallel_optimizer=True,
        optimizer_weight_shard_size=2,
        parallel_optimizer_config={"parallel_optimizer_threshold": 0, "gradient_accumulation_shard": True},
    )
    settings = AutoParallel(nn.Linear(2, 2)).settings
    assert settings.parallel_mode == "semi_auto"
    assert settings.compat == "mindspore"
    assert settings.dataset_strategy == "full_batch"
    assert settings.gradient_fp32_sync is False
    assert settings.hsdp == HsdpSpec(2, 0, "level2")
    set_auto_parallel_context(force_fp32_communication=True)
    assert AutoParallel(nn.Linear(2, 2)).settings.gradient_fp32_sync is True


def test_what_the_caller_says_stands_before_the_context() -> None:
    set_auto_parallel_context(parallel_mode="data_parallel", compat="mindspore")
    settings = AutoParallel(nn.Linear(2, 2), "hybrid_parallel", compat="torch").settings
    assert (settings.parallel_mode, settings.compat) == ("hybrid_parallel", "torch")


def test_words_that_the_mode_cannot_obey_are_refused_when_it_is_made() -> None:
    set_auto_parallel_context(full_batch=True)
    with pytest.raises(StrategyError, match=r"dataset_strategy\(\) needs a captured graph"):
        AutoParallel(nn.Linear(2, 2), "data_parallel")
    set_auto_parallel_context(dataset_strategy="data_parallel")
    with pytest.raises(StrategyError, match="full_batch=True and dataset_strategy='data_parallel'"):
        AutoParallel(nn.Linear(2, 2))


def test_place_in_the_world_is_checked_and_not_believed() -> None:
    set_auto_parallel_context(device_num=8)
    with pytest.raises(StrategyError, match=r"call init\(\) before"):
        AutoParallel(nn.Linear(2, 2))
    init()
    try:
        with pytest.raises(StrategyError, match="device_num=8, but in this process it is 1: leave it out"):
            AutoParallel(nn.Linear(2, 2))
        set_auto_parallel_context(device_num=1, global_rank=0)
        AutoParallel(nn.Linear(2, 2))
    finally:
        release()


def test_model_runs_its_module_as_the_context_says() -> None:
    network = nn.Linear(3, 2)
    assert not isinstance(Model(network, F.cross_entropy).network, AutoParallel)
    set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    model = Model(network, F.cross_entropy, torch.optim.SGD(network.parameters(), 0.1))
    assert isinstance(model.network, AutoParallel)
    assert model.network.settings.parallel_mode == "data_parallel"
    before = network.weight.detach().clone()
    model.train(1, [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))])
    assert not torch.equal(before, network.weight)
    own = AutoParallel(nn.Linear(2, 2))
    assert Model(own).network is own
