"""Settings of AutoParallel, and MindSpore's context that gives them."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
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


@pytest.fixture(autouse=True)
def clean_context() -> Iterator[None]:
    reset_auto_parallel_context()
    yield
    reset_auto_parallel_context()


def parallel(*words: Any, **more: Any) -> AutoParallel:
    return AutoParallel(nn.Linear(2, 2), *words, **more)


@pytest.mark.parametrize(
    ("word", "mode", "search"),
    [
        ("semi_auto_parallel", "semi_auto", None),
        ("data_parallel", "data_parallel", None),
        ("hybrid_parallel", "hybrid_parallel", None),
        ("stand_alone", "stand_alone", None),
        ("auto", "semi_auto", "auto"),
        ("auto_parallel", "semi_auto", "recursive_programming"),
        ("sharding_propagation", "semi_auto", "sharding_propagation"),
        ("dynamic_programming", "semi_auto", "dynamic_programming"),
    ],
)
def test_old_names_of_modes_keep_their_meaning(word: str, mode: str, search: str | None) -> None:
    step = parallel(word)
    assert step.settings.parallel_mode == mode
    if search is not None:
        found = step.search("h100", memory_limit_mb=100).settings.search
        assert found is not None and found.mode == step.settings.mode_text == search
        assert found.spec().limit_bytes == 100 * 2**20


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda: parallel().search("h100"), r"search\(\) with parallel_mode='semi_auto', which searches nothing"),
        (lambda: parallel("auto").search("h1000"), r"device 'h1000'.*must be one of"),
        (lambda: parallel("auto").search(memory_limit_mb=0), "memory_limit_mb=0"),
        (lambda: parallel("auto").search(time_limit_s=0), r"time_limit_s=0\): must be a number of seconds above 0"),
        (lambda: parallel("auto").search(optimizer_states=-1), "optimizer_states=-1"),
        (lambda: parallel("auto").save_operator_strategy_file("plan.txt"), r"must end in \.json"),
        *(
            (lambda mode=mode: parallel(mode).dataset_strategy("full_batch"), r"dataset_strategy\(\)")
            for mode in ("data_parallel", "hybrid_parallel", "stand_alone")
        ),
        (lambda: parallel("hybrid_parallel").hsdp(), "needs a captured graph"),
        (lambda: parallel("stand_alone").hsdp(), "its ranks exchange nothing"),
        (lambda: parallel().transformer_opt({"grad_matmul_communication_overlp": True}), "did you mean"),
        (lambda: parallel().transformer_opt({"grad_matmul_communication_overlap": 1}), "must be true or false"),
        (lambda: parallel().transformer_opt({"computation_allgather_overlap": True}), "does not exist here"),
        (lambda: parallel().transformer_opt([1]), "give a dict of switches or the path"),
        (lambda: parallel().transformer_opt("/nowhere/speed_up.json"), "No such file or directory"),
        (lambda: parallel().transformer_opt(__file__), "is not JSON"),
    ],
)
def test_setters_that_a_mode_cannot_obey_and_words_out_of_range_are_refused(ask: Callable[[], Any], text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        ask()


def test_switches_of_transformer_opt_come_from_a_dict_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "speed_up.json"
    file.write_text('{"grad_matmul_communication_overlap": true, "computation_allgather_overlap": false}')
    step = parallel()
    for given, overlaps in ((file, True), (str(file), True), ({"grad_matmul_communication_overlap": False}, False)):
        assert step.transformer_opt(given).settings.overlaps_weights is overlaps
    for nothing in (None, ""):
        assert not step.transformer_opt(file).transformer_opt(nothing).settings.overlaps_weights


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
        ({"search_mode": "genetic"}, "search_mode='genetic': must be one of dynamic_programming"),
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


def test_the_way_to_search_is_that_of_the_context_and_recursive_by_default() -> None:
    def mode() -> str:
        search = parallel().settings.search
        assert search is not None
        return search.mode

    set_auto_parallel_context(parallel_mode=ParallelMode.AUTO_PARALLEL)
    assert mode() == get_auto_parallel_context("search_mode") == "recursive_programming"
    set_auto_parallel_context(auto_parallel_search_mode="dynamic_programming")
    assert mode() == get_auto_parallel_context("search_mode") == "dynamic_programming"
    set_auto_parallel_context(search_mode="sharding_propagation")
    with pytest.raises(StrategyError, match="set one of them"):
        parallel()
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
    settings = parallel().settings
    assert (settings.pipeline.stages, settings.pipeline.scheduler) == (2, "gpipe")
    fused = parallel().comm_fusion({"allreduce": {"mode": "size", "config": 32}})
    assert settings.comm_fusion == fused.settings.comm_fusion
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


def test_context_belongs_to_its_task_and_what_the_caller_says_stands_before_it() -> None:
    contextvars.copy_context().run(set_auto_parallel_context, parallel_mode="data_parallel")
    assert get_auto_parallel_context("parallel_mode") == "stand_alone"
    set_auto_parallel_context(parallel_mode="data_parallel", compat="mindspore")
    own = parallel("hybrid_parallel", compat="torch").settings
    assert (own.parallel_mode, own.compat) == ("hybrid_parallel", "torch")


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
    settings = parallel().settings
    assert settings.parallel_mode == "semi_auto"
    assert settings.compat == "mindspore"
    assert settings.dataset_strategy == "full_batch"
    assert settings.gradient_fp32_sync is False
    assert settings.hsdp == HsdpSpec(2, 0, "level2")
    set_auto_parallel_context(force_fp32_communication=True)
    assert parallel().settings.gradient_fp32_sync is True
    reset_auto_parallel_context()
    assert get_auto_parallel_context("parallel_mode") == "stand_alone"
    assert (parallel().settings.parallel_mode, parallel().settings.compat) == ("semi_auto", "torch")


def test_words_that_the_mode_cannot_obey_are_refused_when_it_is_made() -> None:
    set_auto_parallel_context(full_batch=True)
    with pytest.raises(StrategyError, match=r"dataset_strategy\(\) needs a captured graph"):
        parallel("data_parallel")
    set_auto_parallel_context(dataset_strategy="data_parallel")
    with pytest.raises(StrategyError, match="full_batch=True and dataset_strategy='data_parallel'"):
        parallel()


def test_place_in_the_world_is_checked_and_not_believed() -> None:
    set_auto_parallel_context(device_num=8)
    with pytest.raises(StrategyError, match=r"call init\(\) before"):
        parallel()
    init()
    try:
        with pytest.raises(StrategyError, match="device_num=8, but in this process it is 1: leave it out"):
            parallel()
        set_auto_parallel_context(device_num=1, global_rank=0)
        parallel()
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
    own = parallel()
    assert Model(own).network is own
