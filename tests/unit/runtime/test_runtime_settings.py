"""Settings of AutoParallel, and MindSpore's context that gives them."""

import contextvars

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from placed_parameters import placed
from small_capture import captured
from torch import nn

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import (
    AutoParallel,
    Model,
    ParallelMode,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    get_auto_parallel_context,
    init,
    layerwise_parallel,
    reduce_scatter,
    release,
    reset_auto_parallel_context,
    set_auto_parallel_context,
    set_comm_fusion,
)
from msrun.runtime.parallel.parameters.fusion import MB, MessageRule, fusion_id_of, group_parameters, parse_comm_fusion
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec, choose_shard_axes
from msrun.runtime.sharding.layout import TensorLayout, build_mesh


@pytest.fixture(autouse=True)
def clean_context():
    reset_auto_parallel_context()
    yield
    reset_auto_parallel_context()


def parallel(*words, **more):
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
def test_old_names_of_modes_keep_their_meaning(word, mode, search):
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
def test_setters_that_a_mode_cannot_obey_and_words_out_of_range_are_refused(ask, text):
    with pytest.raises(StrategyError, match=text):
        ask()


def test_switches_of_transformer_opt_come_from_a_dict_or_a_file(tmp_path):
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
def test_wrong_words_and_values_are_refused_and_nothing_changes(words, text):
    with pytest.raises(StrategyError, match=text):
        set_auto_parallel_context(gradient_fp32_sync=False, **words)
    assert get_auto_parallel_context("gradient_fp32_sync") is True


def test_the_way_to_search_is_that_of_the_context_and_recursive_by_default():
    def mode():
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


def test_stages_and_fusion_reach_auto_parallel():
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


def test_get_tells_what_was_set_else_what_is_done():
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


def test_context_belongs_to_its_task_and_what_the_caller_says_stands_before_it():
    contextvars.copy_context().run(set_auto_parallel_context, parallel_mode="data_parallel")
    assert get_auto_parallel_context("parallel_mode") == "stand_alone"
    set_auto_parallel_context(parallel_mode="data_parallel", compat="mindspore")
    own = parallel("hybrid_parallel", compat="torch").settings
    assert (own.parallel_mode, own.compat) == ("hybrid_parallel", "torch")


def test_auto_parallel_takes_its_defaults_from_the_context():
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


def test_words_that_the_mode_cannot_obey_are_refused_when_it_is_made():
    set_auto_parallel_context(full_batch=True)
    with pytest.raises(StrategyError, match=r"dataset_strategy\(\) needs a captured graph"):
        parallel("data_parallel")
    set_auto_parallel_context(dataset_strategy="data_parallel")
    with pytest.raises(StrategyError, match="full_batch=True and dataset_strategy='data_parallel'"):
        parallel()


def test_place_in_the_world_is_checked_and_not_believed():
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


def test_model_runs_its_module_as_the_context_says():
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


def stored(megabytes=1, fusion_id=None, *, shard_axes=(), dtype=torch.float32, trainable=True, partial_axes=(0,)):
    count = int(megabytes * MB) // torch.empty(0, dtype=dtype).element_size()
    parameter = nn.Parameter(torch.empty(count, dtype=dtype, device="meta"), trainable)
    item = placed("p", parameter, (count,), shard_axes=shard_axes, fusion_id=fusion_id)
    return item, partial_axes


def test_numbers_are_written_on_trainable_parameters_and_later_calls_win():
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[0].bias.requires_grad_(requires_grad=False)
    set_comm_fusion(network, 3, recurse=False)
    assert fusion_id_of(network[0].weight) is None
    assert set_comm_fusion(network, 1) is network
    set_comm_fusion(network[1], 2)
    assert fusion_id_of(network[0].weight) == 1
    assert fusion_id_of(network[0].bias) is None
    assert fusion_id_of(network[1].weight) == fusion_id_of(network[1].bias) == 2


def messages(parameters, config, way="reduce"):
    return group_parameters(parameters, way, parse_comm_fusion(config))


def only(kind, mode, config):
    return {kind: {"mode": mode, "config": config}}


AUTO = [4, 4, 2]


@pytest.mark.parametrize(
    ("count", "megabytes", "config", "right"),
    [
        (10, 5, None, [5, 5]),  # as large as DDP's
        (10, 16, {}, AUTO),
        (10, 16, {"openstate": True}, AUTO),
        (10, 16, only("allreduce", "auto", None), AUTO),
        (6, 2, only("allreduce", "size", 1), [1] * 6),
        (6, 2, only("allreduce", "size", 4), [2, 2, 2]),
        (6, 2, only("allreduce", "size", 5), [2, 2, 2]),
        (6, 2, only("allreduce", "size", 12), [6]),
        (40, 1, only("allreduce", "index", [20, 35]), [20, 15, 5]),
        (40, 1, only("allreduce", "index", [1]), [1, 39]),
        (40, 1, only("allreduce", "index", [10, 20, 30, 40]), [10] * 4),
        (40, 1, only("allreduce", "index", [60]), [40]),
    ],
)
def test_configuration_says_how_many_equal_parameters_a_message_carries(count, megabytes, config, right):
    assert [len(group) for group in messages([stored(megabytes)] * count, config)] == right


def test_kinds_that_are_left_out_are_auto_and_gathers_have_sizes_of_their_own():
    for kind in ("allreduce", "allgather", "reducescatter"):
        assert getattr(parse_comm_fusion({}), kind) == MessageRule(64 * MB)
    assert parse_comm_fusion(None).allreduce == MessageRule(25 * MB, alone_bytes=MB)
    cut = [stored(shard_axes=(0,))] * 8
    config = {**only("allgather", "size", 4), **only("reducescatter", "size", 1)}
    assert [len(group) for group in messages(cut, config, "gather")] == [4, 4]
    assert [len(group) for group in messages(cut, config)] == [1] * 8
    assert [len(group) for group in messages([stored()] * 8, config)] == [8]


@pytest.mark.parametrize(
    ("parameters", "config", "groups"),
    [
        ([], None, []),
        ([stored()] * 3, None, [[0, 1, 2]]),
        ([stored(10)] * 3, None, [[0, 1], [2]]),
        ([stored(25), stored(1)], None, [[0], [1]]),
        ([stored(30), stored(1), stored(24)], None, [[0], [1, 2]]),
        ([stored(fusion_id=0)] * 3, None, [[0], [1], [2]]),
        ([stored(fusion_id=1), stored(fusion_id=2), stored(fusion_id=1)], None, [[0, 2], [1]]),
        ([stored(20, 1), stored(20, 1), stored(20, 1)], None, [[0, 1, 2]]),
        ([stored(fusion_id=1), stored(), stored(fusion_id=0)], None, [[0], [1], [2]]),
        ([stored(shard_axes=(0,)), stored(), stored(shard_axes=(0,))], None, [[0, 2], [1]]),
        ([stored(partial_axes=(0,)), stored(partial_axes=(0, 1))], None, [[0], [1]]),
        ([stored(), stored(dtype=torch.bfloat16)], None, [[0], [1]]),
        ([stored(), stored(trainable=False)], None, [[0], [1]]),
        ([stored(fusion_id=3), stored(fusion_id=3, dtype=torch.float64)], None, [[0], [1]]),
        ([stored(fusion_id=3)] * 2 + [stored()], {"openstate": False}, [[0], [1], [2]]),
        ([*map(stored, [1] * 4, [7, None, 7, 0])], only("allreduce", "size", 1), [[0, 2], [1], [3]]),
        ([stored(shard_axes=(0,)), stored()] * 4, only("allreduce", "index", [1, 3]), [[0, 2, 4, 6], [1], [3, 5], [7]]),
    ],
)
def test_parameters_that_are_alike_travel_together(parameters, config, groups):
    assert messages(parameters, config, "reduce" if config else "gather") == groups


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ([], "comm_fusion([]): must be a dict such as {'openstate': True}, or None"),
        ({"allredcue": {}}, "unknown key 'allredcue' (did you mean allreduce?): use openstate, allreduce, allgather"),
        ({"openstate": 1}, "openstate=1: must be True or False"),
        ({"allreduce": 64}, "allreduce=64: must be a dict of mode and config"),
        ({"allreduce": {"mode": "auto"}}, "allreduce has no 'config'"),
        ({"allgather": {"config": None}}, "allgather has no 'mode'"),
        ({"allgather": {"mode": "auto", "config": None, "x": 1}}, "unknown key 'x' of allgather"),
        (only("allreduce", "bytes", 1), "mode 'bytes' of allreduce: must be auto or size or index"),
        (only("allgather", "index", [1]), "mode 'index' of allgather: must be auto or size"),
        (only("reducescatter", "index", [1]), "mode 'index' of reducescatter: must be auto or size"),
        (only("allreduce", "auto", 64), "config 64 of allreduce: must be None with mode auto"),
        *(
            (only("allreduce", "size", size), f"config {size!r} of allreduce: must be a whole")
            for size in (0, 1.5, "1")
        ),
        *(
            (
                only("allreduce", "index", index),
                f"config {index!r} of allreduce: must be ascending whole numbers above 0",
            )
            for index in ([3, 2], [], [2, 2], 5)
        ),
    ],
)
def test_configuration_that_means_nothing_is_refused_in_words(config, text):
    with pytest.raises(StrategyError) as caught:
        AutoParallel(lambda: None).comm_fusion(config)
    assert text in str(caught.value)


def test_operators_return_their_input_in_a_world_of_one():
    x = torch.randn(4, 4, requires_grad=True)
    for call in (all_reduce, all_gather, reduce_scatter, broadcast, all_to_all):
        assert call(x) is x


def test_operator_in_a_captured_network_names_the_mode_for_it():
    class Cut(nn.Module):
        def forward(self, x):
            return all_reduce(x)

    with pytest.raises(CaptureError, match='parallel_mode="hybrid_parallel"'):
        captured(Cut(), torch.ones(2))


WORLD = build_mesh(32)


def choose(spec, layout, shape, itemsize=4, *, opted_out=False, partial_axes=(), world=WORLD):
    """Return over how many ranks a parameter is cut, and the reason."""
    axes, reason = choose_shard_axes(
        spec, world, layout, shape, itemsize, opted_out=opted_out, partial_axes=partial_axes
    )
    return world.extent(axes), reason


# 48 x 64 and 64 x 16 on 32 ranks under ((4, 8), (8, 1)) and ((4, 4), (4, 2)): MindSpore's test_parallel_optimizer.py
FIRST = TensorLayout(((2, 3, 4), ()))
"""48 x 64 cut into 8 rows of parts: 6 rows each, 4 copies."""
SECOND = TensorLayout(((2, 3), (4,)))
"""64 x 16 cut into 4 x 2: 16 rows each, 4 copies."""


@pytest.mark.parametrize(
    ("shard_size", "first", "second"), [(-1, 1, 4), (1, 1, 1), (2, 2, 2), (4, 1, 4), (8, 1, 4), (32, 1, 4)]
)
def test_weights_of_mindspores_tests_are_cut_as_there(shard_size, first, second):
    spec = HsdpSpec(shard_size, 0)
    assert choose(spec, FIRST, (48, 64))[0] == first
    assert choose(spec, SECOND, (64, 16))[0] == second


@pytest.mark.parametrize(("threshold", "parts"), [(0, 8), (64, 8), (71, 8), (72, 8), (73, 1), (100, 1)])
def test_weight_of_72_kb_is_cut_up_to_a_threshold_of_72(threshold, parts):
    found, reason = choose(HsdpSpec(-1, threshold), TensorLayout.replicated(2), (96, 192), world=build_mesh(8))
    assert found == parts
    assert reason == ("rows cut over 8 ranks" if parts > 1 else f"72 KB is under the threshold of {threshold} KB")


@pytest.mark.parametrize(
    ("spec", "layout", "shape", "settings", "reason"),
    [
        (None, TensorLayout.replicated(2), (64, 64), {}, "hsdp is off"),
        (HsdpSpec(-1, 0), TensorLayout.replicated(2), (64, 64), {"opted_out": True}, "parallel_optimizer is False"),
        (HsdpSpec(-1, 0), TensorLayout(((0, 1, 2, 3, 4), ())), (64, 64), {}, "no rank holds a copy of it"),
        (HsdpSpec(-1, 0), TensorLayout.replicated(2), (1, 64), {}, "its 1 rows cannot be cut into 32 equal parts"),
        (HsdpSpec(-1, 0), FIRST, (48, 64), {}, "its 6 rows cannot be cut into 4 equal parts"),
        (HsdpSpec(3, 0), TensorLayout.replicated(2), (48, 64), {}, "shard_size 3 cannot be made of its 32 copies"),
        (HsdpSpec(-1, 0), TensorLayout(()), (), {}, "it is a single number"),
        (HsdpSpec(-1, 1), TensorLayout.replicated(1), (10,), {}, "40 B is under the threshold of 1 KB"),
        (HsdpSpec(), TensorLayout.replicated(2), (128, 128), {"itemsize": 2}, "32 KB is under the threshold of 64 KB"),
    ],
)
def test_parameter_that_stays_whole_says_why(spec, layout, shape, settings, reason):
    assert choose(spec, layout, shape, **settings) == (1, reason)


@pytest.mark.parametrize(
    ("partial_axes", "shard_size", "axes"),
    [((0, 1), -1, (2, 0, 1)), ((0, 1, 2), 2, (2,))],
    ids=["equal first", "nearest"],
)
def test_copies_with_equal_gradients_then_nearest_ones_share_it(partial_axes, shard_size, axes):
    spec, layout = HsdpSpec(shard_size, 0), TensorLayout.replicated(1)
    found, _ = choose_shard_axes(spec, build_mesh(8), layout, (64,), 4, opted_out=False, partial_axes=partial_axes)
    assert found == axes


def hsdp(**settings):
    return AutoParallel(lambda: None).hsdp(**settings)


ONES = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda: hsdp(shard_size=0), "hsdp(shard_size=0): must be a whole number above 0, or -1 for all"),
        (lambda: hsdp(shard_size=-2), "hsdp(shard_size=-2)"),
        (lambda: hsdp(shard_size=2.0), "hsdp(shard_size=2.0)"),
        (lambda: hsdp(threshold=-1), "hsdp(threshold=-1): must be a whole number of KB, 0 or more"),
        (lambda: hsdp(threshold=0.5), "hsdp(threshold=0.5)"),
        (lambda: hsdp(optimizer_level="level4"), "must be one of level1, level2, level3"),
        (lambda: HsdpSpec(128).check_world(32), "hsdp(shard_size=128): there are only 32 ranks"),
        (lambda: all_reduce(ONES, "prod"), "must be sum, max or min"),
        (lambda: reduce_scatter(ONES, "max"), "reduce_scatter(op='max'): must be sum"),
        (lambda: broadcast(ONES, 3), "root_rank=3"),
        (lambda: all_gather(ONES, 2), "dimension 2 of a tensor of shape"),
        (lambda: layerwise_parallel(ONES), "mark a torch.nn.Parameter"),
        *(
            (lambda n=number: set_comm_fusion(nn.Linear(2, 2), n), "must be a whole number, 0 or more; 0 never fuses")
            for number in (-1, 1.0, True, "1", None)
        ),
    ],
)
def test_values_out_of_range_are_refused_at_once(ask, text):
    HsdpSpec(32).check_world(32)
    HsdpSpec(3).check_world(32)
    with pytest.raises(StrategyError) as caught:
        ask()
    assert text in str(caught.value)
