"""Parts of tensors: written in one layout and read in another, cut and joined by strategy files, without ranks."""

import json
import math
import os
import tempfile
from pathlib import Path

import pytest
import torch
from drawn_layouts import layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from msrun.errors import CheckpointError
from msrun.runtime import (
    ParameterLayout,
    find_layouts,
    load_checkpoint,
    load_distributed_checkpoint,
    load_param_into_net,
    merge_pipeline_strategys,
    merge_sliced_parameter,
    rank_list_for_transform,
    read_strategy,
    restore_group_info_list,
    save_checkpoint,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)
from msrun.runtime.checkpoint.directory import Manifest, Position
from msrun.runtime.checkpoint.index import NETWORK, OPTIMIZER, flat_name
from msrun.runtime.checkpoint.reader import open_parts
from msrun.runtime.checkpoint.storage import finish_directory, keep_shares, plan_of, write_parts
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.parallel.strategy_file import find_equal_ranks, write_strategy
from msrun.runtime.sharding.layout import Box, TensorLayout, build_mesh, whole

ROWS = ParameterLayout((4,), ((0,), ()), (8, 4))
GRID = ParameterLayout((2, 2), ((1,), (0,)), (8, 4))
SHARDED = ParameterLayout((2, 2), ((), (0,)), (8, 4), opt_weight_shard_step=2, opt_weight_shard_size=2)
STAGED = ParameterLayout((2,), ((0,), ()), (8, 4), pipeline_stages=2, stages=(1,))
BIAS = ParameterLayout((4,), ((),), (8,))


@st.composite
def parameter_layouts(draw):
    """Any layout of a tensor of two dimensions on up to 16 ranks."""
    matrix = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    axes = list(draw(st.permutations(range(len(matrix)))))
    cut = [tuple(axes.pop() for _ in range(draw(st.integers(0, len(axes))))) for _ in range(2)]
    shards = tuple(axes[: draw(st.integers(0, len(axes)))])
    extents = [
        math.prod(matrix[len(matrix) - 1 - k] for k in (*split, *(shards if not dim else ())))
        for dim, split in enumerate(cut)
    ]
    stages = draw(st.integers(1, 2))
    return ParameterLayout(
        matrix, tuple(cut), (extents[0] * 2, extents[1]), opt_weight_shard_axes=shards, pipeline_stages=stages
    )


@given(parameter_layouts())
def test_boxes_of_all_ranks_make_the_whole_and_survive_the_file(layout):
    count = torch.zeros(layout.tensor_shape)
    for rank in range(layout.world_size):
        box = layout.box(rank)
        assert box is not None
        count[box.slices] += 1
    assert bool((count == count[0, 0]).all()), "every element is held equally often"
    again = ParameterLayout.from_json(json.loads(json.dumps(layout.to_json())), layout.pipeline_stages)
    assert again == layout


def test_device_matrix_and_tensor_map_are_mindspores():
    """Numbers count axes from the last one; optimizer shards cut dimension 0 further."""
    assert [box.offsets for rank in range(4) if (box := ROWS.box(rank))] == [(0, 0), (2, 0), (4, 0), (6, 0)]
    assert [box.offsets for rank in range(4) if (box := GRID.box(rank))] == [(0, 0), (0, 2), (4, 0), (4, 2)]
    assert [box.offsets for rank in range(4) if (box := SHARDED.box(rank))] == [(0, 0), (0, 2), (4, 0), (4, 2)]
    assert (SHARDED.slice_shape, SHARDED.box(3).sizes) == ((8, 2), (4, 2))
    assert [STAGED.box(rank) is None for rank in range(4)] == [True, True, False, False]
    with pytest.raises(CheckpointError, match="rank 4: the layout is one of 4 ranks"):
        ROWS.box(4)


@pytest.mark.parametrize(
    ("matrix", "cut", "shape"),
    [((4,), ((1,),), (8,)), ((4,), ((0,),), (6,)), ((4,), ((0,),), (8, 8)), ((2, 2), ((0,), (0,)), (8, 8))],
)
def test_numbers_that_contradict_each_other_are_refused(matrix, cut, shape):
    with pytest.raises(CheckpointError, match="does not fit it and device matrix"):
        ParameterLayout(matrix, cut, shape)


def test_file_of_mindspore_is_read(tmp_path):
    item = {"dev_matrix": [2, 2], "tensor_map": [1, -1], "tensor_shape": [8, 4], "field": 0}
    item |= {"opt_weight_shard_step": 1, "opt_weight_shard_size": 2}
    content = {"current_stage": 0, "parallel_strategy_item": {}, "parallel_layout_item": {"net.weight": item}}
    (tmp_path / "strategy.json").write_text(json.dumps(content))
    layout = read_strategy(tmp_path / "strategy.json")["net.weight"]
    assert [box.offsets for rank in range(4) if (box := layout.box(rank))] == [(0, 0), (2, 0), (4, 0), (6, 0)]


def test_files_of_stages_are_merged(tmp_path):
    layout = ParameterLayout((2,), ((0,),), (4,)).to_json()
    for stage, name in enumerate(("first", "second")):
        content = {"current_stage": stage, "parallel_layout_item": {name: layout}}
        (tmp_path / f"strategy_{stage}.json").write_text(json.dumps(content))
    file = tmp_path / "merged" / "all.json"
    merge_pipeline_strategys(tmp_path, file)
    assert {name: layout.stages for name, layout in read_strategy(file).items()} == {"first": (0,), "second": (1,)}
    assert {*json.loads(file.read_text())["parallel_layout_item"]} == {"0-first", "1-second"}
    with pytest.raises(CheckpointError, match="has no strategy files"):
        merge_pipeline_strategys(tmp_path / "merged" / "none", tmp_path / "x.json")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"parallel_layout_item": {"a": {}}}', '{"parallel_layout_item": 3}'])
def test_what_is_no_strategy_file_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"x\.json is no strategy file in JSON .*strategy_ckpt_save_file"):
        read_strategy(tmp_path / "x.json")
    with pytest.raises(CheckpointError, match="cannot be read: No such file or directory; give another one"):
        read_strategy(tmp_path / "none.json")


def test_ranks_that_a_target_needs_are_as_few_as_possible(strategies):
    rows, grid = strategies["rows"], strategies["grid"]
    assert rank_list_for_transform(0, rows, grid) == [0, 1]
    assert rank_list_for_transform(3, rows, grid) == [0, 2, 3]
    assert rank_list_for_transform(0, rows) == [0, 1, 2, 3]
    assert rank_list_for_transform(2, None, grid) == [0]


@pytest.fixture
def strategies(tmp_path):
    """Files by the name of a layout."""
    files = {name: tmp_path / f"{name}.json" for name in ("rows", "grid", "sharded")}
    for file, layout in zip(files.values(), (ROWS, GRID, SHARDED), strict=True):
        write_strategy(file, {"weight": layout, "bias": BIAS})
    return files


def test_ranks_with_equal_parts_are_found_again(tmp_path):
    halves = ParameterLayout((2, 2), ((0,), ()), (8, 4))
    assert find_equal_ranks({"weight": halves}, 1) == [1, 3]
    (tmp_path / "group.json").write_text(json.dumps({"rank_list": [1, 3]}))
    assert restore_group_info_list(tmp_path / "group.json") == [1, 3]
    (tmp_path / "group.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no rank_list"):
        restore_group_info_list(tmp_path / "group.json")


@pytest.mark.parametrize("layout", [ROWS, GRID, SHARDED])
def test_slices_are_merged_by_their_strategy(layout):
    whole = torch.arange(32.0).reshape(8, 4)
    slices = [whole[box.slices] for rank in range(4) if (box := layout.box(rank))]
    assert torch.equal(merge_sliced_parameter(slices, layout), whole)
    assert torch.equal(merge_sliced_parameter(slices, {"weight": layout}), whole)
    assert torch.equal(merge_sliced_parameter(slices), torch.cat(slices)), "rows without a strategy"
    with pytest.raises(CheckpointError, match="3 slices, but the strategy is one of 4 ranks"):
        merge_sliced_parameter(slices[:3], layout)
    with pytest.raises(CheckpointError, match="sliced_parameters is empty"):
        merge_sliced_parameter([])


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 8)


def is_same(first, second):
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_checkpoint_goes_from_cut_to_cut_and_back(tmp_path, strategies):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    path = save_checkpoint(net, tmp_path / "a.ckpt", optimizer, step_num=3)
    for name, file in strategies.items():
        transform_checkpoints(path, tmp_path / name, "net", None, file)
        path = tmp_path / name
        for rank in (0, 3):
            other = network(1)
            momentum = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
            assert load_checkpoint(path / f"rank_{rank}" / f"net{rank}.ckpt", other, momentum)["step_num"] == 3
            assert is_same(other, net)
            found, right = momentum.state[other.weight], optimizer.state[net.weight]
            assert torch.equal(found["momentum_buffer"], right["momentum_buffer"])
    transform_checkpoints(path, tmp_path / "whole", "net")
    other = network(1)
    other.load_state_dict(torch.load(tmp_path / "whole" / "rank_0" / "net0.ckpt"))
    assert is_same(other, net)


def test_one_rank_is_cut_from_the_ranks_that_it_needs(tmp_path, strategies):
    net, rows, grid = network(), strategies["rows"], strategies["grid"]
    transform_checkpoints(save_checkpoint(net, tmp_path / "a"), tmp_path / "rows", "net", None, rows)
    for rank in range(4):
        needed = rank_list_for_transform(rank, rows, grid)
        sources = {other: tmp_path / "rows" / f"rank_{other}" / f"net{other}.ckpt" for other in needed}
        target = tmp_path / "grid" / f"rank_{rank}" / f"net{rank}.ckpt"
        transform_checkpoint_by_rank(rank, sources, target, None, grid)
    other = network(1)
    load_distributed_checkpoint(other, [tmp_path / "grid" / f"rank_{r}" / f"net{r}.ckpt" for r in range(4)])
    assert is_same(other, net)


def test_plain_files_of_slices_need_their_strategy(tmp_path, strategies):
    net, files = network(), [tmp_path / f"rank_{rank}" / "net.pt" for rank in range(4)]
    for rank, file in enumerate(files):
        box = GRID.box(rank)
        assert box is not None
        file.parent.mkdir()
        torch.save({"weight": net.weight.detach()[box.slices].clone(), "bias": net.bias.detach()}, file)
    other, whole = network(1), network(1)
    load_distributed_checkpoint(other, files, find_layouts(network()), train_strategy_filename=strategies["grid"])
    assert is_same(other, net)
    transform_checkpoints(tmp_path, tmp_path / "whole", "net", strategies["grid"])
    load_checkpoint(tmp_path / "whole" / "rank_0" / "net0.ckpt", whole)
    assert is_same(whole, net)
    with pytest.raises(CheckpointError, match="the file of rank 3 is missing"):
        load_distributed_checkpoint(other, files[:3], train_strategy_filename=strategies["grid"])


def test_set_of_which_one_is_missing_is_refused_and_it_is_named(tmp_path, strategies):
    path = save_checkpoint(network(), tmp_path / "a")
    transform_checkpoints(path, tmp_path / "rows", "net", None, strategies["rows"])
    files = [tmp_path / "rows" / f"rank_{rank}" / f"net{rank}.ckpt" for rank in range(4)]
    files[2].rename(tmp_path / "elsewhere")
    words = r"is one of 4 directories of one save, and that of rank 2 \(.*net2"
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(files[0], network())
    with pytest.raises(CheckpointError, match=words):
        load_distributed_checkpoint(network(), [files[0], files[1], files[3]])
    net = network(1)
    load_distributed_checkpoint(net, [*files[:2], tmp_path / "elsewhere", files[3]])
    assert is_same(net, network())


def test_strategy_or_layouts_of_another_network_are_refused(tmp_path):
    write_strategy(tmp_path / "wrong.json", {"weight": ParameterLayout((4,), ((0,), ()), (4, 4))})
    path = save_checkpoint(network(), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"weight has shape \(8, 4\) in the checkpoint, \(4, 4\) in the strategy"):
        transform_checkpoints(path, tmp_path / "b", "net", None, tmp_path / "wrong.json")
    with pytest.raises(CheckpointError, match=r"layout of weigth: the network has no such .* .did you mean weight"):
        load_distributed_checkpoint(network(), [path], {"weigth": ROWS})
    with pytest.raises(CheckpointError, match="give a list with the checkpoints of all ranks"):
        load_distributed_checkpoint(network(), str(path))


def test_names_that_were_not_loaded_and_not_used_are_returned(tmp_path):
    net = nn.Sequential(network(), network(1))
    other = nn.Sequential(network(2), network(3))
    parameters = load_checkpoint(save_checkpoint(net, tmp_path / "a", epoch_num=2))
    assert parameters.pop("1.bias").shape == (8,)
    assert load_param_into_net(other, {**parameters, "more": torch.ones(1)}) == (
        ["1.bias"],
        ["epoch_num", "step_in_epoch", "step_num", "more"],
    )
    assert torch.equal(other[1].weight, net[1].weight)


def test_one_prefix_is_left_out_unless_strict():
    net = nn.ModuleDict({"backbone": network(1)})
    parameters = network().state_dict()
    assert load_param_into_net(net, parameters, strict_load=True) == (
        ["backbone.weight", "backbone.bias"],
        ["weight", "bias"],
    )
    assert load_param_into_net(net, parameters) == ([], [])
    assert is_same(net["backbone"], network())


@pytest.mark.parametrize(
    ("value", "strict", "text"),
    [
        (torch.zeros(4, 8), False, r"weight has shape \(8, 4\), in parameter_dict \(4, 8\)"),
        (torch.zeros(8, 4, dtype=torch.float64), True, "convert it, or give strict_load=False"),
        (torch.zeros(8, 4, dtype=torch.int64), False, "in parameter_dict torch.int64: convert it"),
    ],
)
def test_other_shapes_and_types_are_refused(value, strict, text):
    net = network()
    with pytest.raises(CheckpointError, match=text):
        load_param_into_net(net, {"weight": value}, strict_load=strict)
    assert is_same(net, network())
    load_param_into_net(net, {"weight": torch.ones(8, 4, dtype=torch.float16)})
    assert net.weight.dtype == torch.float32


KEY = (NETWORK, "weight")


@st.composite
def cuts(draw, ndim):
    """A world of 1 to 12 ranks and any layout in it: axes in any order, some left for copies."""
    mesh = build_mesh(draw(st.integers(1, 12)))
    return mesh, draw(layouts(mesh, ndim))


@st.composite
def reshardings(draw):
    """A whole tensor that both layouts cut evenly."""
    ndim = draw(st.integers(0, 3))
    source, target = draw(cuts(ndim)), draw(cuts(ndim))
    shape = [
        math.lcm(*(mesh.extent(layout.split[dim]) for mesh, layout in (source, target))) * draw(st.integers(1, 2))
        for dim in range(ndim)
    ]
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]))
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype), source, target


def box_of(mesh, layout, shape, rank):
    slices = layout.slices(mesh, shape, rank)
    return Box(tuple(shape), tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))


def cut(tensor, box):
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


def write_of_all_ranks(path, ranks):
    """Write as a world of many ranks does; return how many elements each rank wrote."""
    plans = keep_shares([plan_of(parts) for parts in ranks], to_first=False)
    shares = [{item.index.fqn for item in plan.items} for plan in plans]
    pieces = [
        {key: part for key, part in parts.items() if flat_name(key) in mine}
        for parts, mine in zip(ranks, shares, strict=True)
    ]
    path.mkdir(exist_ok=True)
    files = [write_parts(path, number, parts) for number, parts in enumerate(pieces)]
    finish_directory(path, files, b"", Manifest(Position(), len(ranks), serial=1, saved_at=0.0))
    return [sum(math.prod(part.box.sizes) for part in parts.values()) for parts in pieces]


@settings(max_examples=30, deadline=None)
@given(reshardings())
def test_tensor_written_in_one_layout_is_read_in_any_other(case):
    tensor, (mesh, layout), (other_mesh, other_layout) = case
    boxes = [box_of(mesh, layout, tensor.shape, rank) for rank in range(mesh.size)]
    with tempfile.TemporaryDirectory() as folder:
        written = write_of_all_ranks(Path(folder), [{KEY: Chunk(cut(tensor, box), box)} for box in boxes])
        assert sum(written) == tensor.numel(), "every element once"
        reader = open_parts([Path(folder)])
        assert reader.tensors[KEY].shape == tuple(tensor.shape)
        assert reader.tensors[KEY].dtype == tensor.dtype
        for rank in range(other_mesh.size):
            box = box_of(other_mesh, other_layout, tensor.shape, rank)
            value = torch.zeros(box.sizes, dtype=tensor.dtype)
            reader.fill({KEY: Chunk(value, box)})
            assert torch.equal(value, cut(tensor, box))
        assert torch.equal(reader.read(KEY), tensor)


def test_names_with_dots_and_optimizer_state_keep_apart(tmp_path):
    values = {
        (NETWORK, "optimizer.weight"): torch.tensor([1.0]),
        (OPTIMIZER, "weight", "exp_avg"): torch.tensor([2.0]),
        (NETWORK, "a.b.c"): torch.tensor(3.0),
        (OPTIMIZER, "a.b.c", "step"): torch.tensor(4.0),
    }
    write_of_all_ranks(tmp_path, [{key: Chunk(value, whole(value.shape)) for key, value in values.items()}])
    reader = open_parts([tmp_path])
    assert sorted(reader.network_names) == ["a.b.c", "optimizer.weight"]
    assert all(torch.equal(reader.read(key), value) for key, value in values.items())


def test_parts_that_are_views_are_written_without_the_rest(tmp_path):
    part = torch.arange(1_000_000, dtype=torch.float32)[500:512].view(3, 4).t()
    write_of_all_ranks(tmp_path, [{KEY: Chunk(part, whole(part.shape))}])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 10_000
    target = torch.zeros(3, 4).t()
    open_parts([tmp_path]).fill({KEY: Chunk(target, whole(target.shape))})
    assert torch.equal(target, part)


def test_torchs_own_tools_read_the_files(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    mesh, layout = build_mesh(4), TensorLayout(((0,), (1,)))
    weight, of_network, of_optimizer = torch.arange(16.0).reshape(4, 4), (NETWORK, "a.b"), (OPTIMIZER, "a.b", "avg")
    boxes = [box_of(mesh, layout, weight.shape, rank) for rank in range(4)]
    ranks = [{of_network: Chunk(cut(weight, box), box), of_optimizer: Chunk(cut(-weight, box), box)} for box in boxes]
    write_of_all_ranks(tmp_path / "checkpoint", ranks)
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "whole.pt")
    content = torch.load(tmp_path / "whole.pt")
    assert torch.equal(content["model"]["a.b"], weight)
    assert torch.equal(content["optimizer"]["a.b"]["avg"], -weight)
