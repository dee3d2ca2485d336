"""Strategy files, and what is cut and joined by them, without ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

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
from msrun.runtime.parallel.strategy_file import find_equal_ranks, write_strategy

ROWS = ParameterLayout((4,), ((0,), ()), (8, 4))
GRID = ParameterLayout((2, 2), ((1,), (0,)), (8, 4))
SHARDED = ParameterLayout((2, 2), ((), (0,)), (8, 4), opt_weight_shard_step=2, opt_weight_shard_size=2)
STAGED = ParameterLayout((2,), ((0,), ()), (8, 4), pipeline_stages=2, stages=(1,))
BIAS = ParameterLayout((4,), ((),), (8,))


@st.composite
def layouts(draw: st.DrawFn) -> ParameterLayout:
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


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_boxes_of_all_ranks_make_the_whole_and_survive_the_file(layout: ParameterLayout) -> None:
    count = torch.zeros(layout.tensor_shape)
    for rank in range(layout.world_size):
        box = layout.box(rank)
        assert box is not None
        count[box.slices] += 1
    assert bool((count == count[0, 0]).all()), "every element is held equally often"
    again = ParameterLayout.from_json(json.loads(json.dumps(layout.to_json())), layout.pipeline_stages)
    assert again == layout


def test_device_matrix_and_tensor_map_are_mindspores() -> None:
    """Numbers count axes from the last one; optimizer shards cut dimension 0 further."""
    assert [box.offsets for rank in range(4) if (box := ROWS.box(rank))] == [(0, 0), (2, 0), (4, 0), (6, 0)]
    assert [box.offsets for rank in range(4) if (box := GRID.box(rank))] == [(0, 0), (0, 2), (4, 0), (4, 2)]
    assert [box.offsets for rank in range(4) if (box := SHARDED.box(rank))] == [(0, 0), (0, 2), (4, 0), (4, 2)]
    assert (SHARDED.slice_shape, SHARDED.box(3).sizes) == ((8, 2), (4, 2))  # type: ignore[union-attr]
    assert [STAGED.box(rank) is None for rank in range(4)] == [True, True, False, False]
    with pytest.raises(CheckpointError, match="rank 4: the layout is one of 4 ranks"):
        ROWS.box(4)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ParameterLayout((4,), ((1,),), (8,)),
        lambda: ParameterLayout((4,), ((0,),), (6,)),
        lambda: ParameterLayout((4,), ((0,),), (8, 8)),
        lambda: ParameterLayout((2, 2), ((0,), (0,)), (8, 8)),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(wrong: object) -> None:
    with pytest.raises(CheckpointError, match="does not fit it and device matrix"):
        wrong()  # type: ignore[operator]


def test_file_of_mindspore_is_read(tmp_path: Path) -> None:
    item = {
        "dev_matrix": [2, 2],
        "tensor_map": [1, -1],
        "tensor_shape": [8, 4],
        "field": 0,
        "opt_weight_shard_step": 1,
        "opt_weight_shard_size": 2,
    }
    content = {"current_stage": 0, "parallel_strategy_item": {}, "parallel_layout_item": {"net.weight": item}}
    (tmp_path / "strategy.json").write_text(json.dumps(content))
    layout = read_strategy(tmp_path / "strategy.json")["net.weight"]
    assert [box.offsets for rank in range(4) if (box := layout.box(rank))] == [(0, 0), (2, 0), (4, 0), (6, 0)]


def test_files_of_stages_are_merged(tmp_path: Path) -> None:
    for stage, name in enumerate(("first", "second")):
        content = {
            "current_stage": stage,
            "parallel_layout_item": {name: ParameterLayout((2,), ((0,),), (4,)).to_json()},
        }
        (tmp_path / f"strategy_{stage}.json").write_text(json.dumps(content))
    merge_pipeline_strategys(tmp_path, tmp_path / "merged" / "all.json")
    merged = read_strategy(tmp_path / "merged" / "all.json")
    assert {name: layout.stages for name, layout in merged.items()} == {"first": (0,), "second": (1,)}
    assert {*json.loads((tmp_path / "merged" / "all.json").read_text())["parallel_layout_item"]} == {
        "0-first",
        "1-second",
    }
    with pytest.raises(CheckpointError, match="has no strategy files"):
        merge_pipeline_strategys(tmp_path / "merged" / "none", tmp_path / "x.json")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"parallel_layout_item": {"a": {}}}', '{"parallel_layout_item": 3}'])
def test_what_is_no_strategy_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"x\.json is no strategy file in JSON .*strategy_ckpt_save_file"):
        read_strategy(tmp_path / "x.json")
    with pytest.raises(CheckpointError, match="cannot be read: No such file or directory; give another one"):
        read_strategy(tmp_path / "none.json")


def test_ranks_that_a_target_needs_are_as_few_as_possible(tmp_path: Path) -> None:
    write_strategy(tmp_path / "rows.json", {"weight": ROWS, "bias": BIAS})
    write_strategy(tmp_path / "grid.json", {"weight": GRID, "bias": BIAS})
    assert rank_list_for_transform(0, tmp_path / "rows.json", tmp_path / "grid.json") == [0, 1]
    assert rank_list_for_transform(3, tmp_path / "rows.json", tmp_path / "grid.json") == [0, 2, 3]
    assert rank_list_for_transform(0, tmp_path / "rows.json") == [0, 1, 2, 3]
    assert rank_list_for_transform(2, None, tmp_path / "grid.json") == [0]


def test_ranks_with_equal_parts_are_found_again(tmp_path: Path) -> None:
    halves = ParameterLayout((2, 2), ((0,), ()), (8, 4))
    assert find_equal_ranks({"weight": halves}, 1) == [1, 3]
    (tmp_path / "group.json").write_text(json.dumps({"rank_list": [1, 3]}))
    assert restore_group_info_list(tmp_path / "group.json") == [1, 3]
    (tmp_path / "group.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no rank_list"):
        restore_group_info_list(tmp_path / "group.json")


@pytest.mark.parametrize("layout", [ROWS, GRID, SHARDED])
def test_slices_are_merged_by_their_strategy(layout: ParameterLayout) -> None:
    whole = torch.arange(32.0).reshape(8, 4)
    slices = [whole[box.slices] for rank in range(4) if (box := layout.box(rank))]
    assert torch.equal(merge_sliced_parameter(slices, layout), whole)
    assert torch.equal(merge_sliced_parameter(slices, {"weight": layout}), whole)
    with pytest.raises(CheckpointError, match="3 slices, but the strategy is one of 4 ranks"):
        merge_sliced_parameter(slices[:3], layout)


def test_slices_without_a_strategy_are_rows() -> None:
    assert torch.equal(merge_sliced_parameter([torch.zeros(2, 3), torch.ones(1, 3)]).sum(1), torch.tensor([0.0, 0, 3]))
    with pytest.raises(CheckpointError, match="sliced_parameters is empty"):
        merge_sliced_parameter([])


# -- transforming -------------------------------------------------------------------------------------------------


def network(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 8)


def is_same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_checkpoint_goes_from_cut_to_cut_and_back(tmp_path: Path) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    path = save_checkpoint(net, tmp_path / "a.ckpt", optimizer, step_num=3)
    for name, layout in (("rows", ROWS), ("grid", GRID), ("sharded", SHARDED)):
        write_strategy(tmp_path / f"{name}.json", {"weight": layout, "bias": BIAS})
        transform_checkpoints(path, tmp_path / name, "net", None, tmp_path / f"{name}.json")
        path = tmp_path / name
        for rank in (0, 3):
            other = network(1)
            momentum = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
            assert load_checkpoint(path / f"rank_{rank}" / f"net{rank}.ckpt", other, momentum)["step_num"] == 3
            assert is_same(other, net)
            assert torch.equal(
                momentum.state[other.weight]["momentum_buffer"], optimizer.state[net.weight]["momentum_buffer"]
            )
    transform_checkpoints(path, tmp_path / "whole", "net")
    other = network(1)
    other.load_state_dict(torch.load(tmp_path / "whole" / "rank_0" / "net0.ckpt"))
    assert is_same(other, net)


def test_one_rank_is_cut_from_the_ranks_that_it_needs(tmp_path: Path) -> None:
    net = network()
    for name, layout in (("rows", ROWS), ("grid", GRID)):
        write_strategy(tmp_path / f"{name}.json", {"weight": layout, "bias": BIAS})
    transform_checkpoints(save_checkpoint(net, tmp_path / "a"), tmp_path / "rows", "net", None, tmp_path / "rows.json")
    for rank in range(4):
        needed = rank_list_for_transform(rank, tmp_path / "rows.json", tmp_path / "grid.json")
        sources = {other: tmp_path / "rows" / f"rank_{other}" / f"net{other}.ckpt" for other in needed}
        target = tmp_path / "grid" / f"rank_{rank}" / f"net{rank}.ckpt"
        transform_checkpoint_by_rank(rank, sources, target, None, tmp_path / "grid.json")
    other = network(1)
    load_distributed_checkpoint(other, [tmp_path / "grid" / f"rank_{r}" / f"net{r}.ckpt" for r in range(4)])
    assert is_same(other, net)


def test_plain_files_of_slices_need_their_strategy(tmp_path: Path) -> None:
    net, files = network(), []
    for rank in range(4):
        box = GRID.box(rank)
        assert box is not None
        files.append(tmp_path / f"rank_{rank}" / "net.pt")
        files[-1].parent.mkdir()
        torch.save({"weight": net.weight.detach()[box.slices].clone(), "bias": net.bias.detach()}, files[-1])
    write_strategy(tmp_path / "grid.json", {"weight": GRID, "bias": BIAS})
    layouts_of_it = find_layouts(network())
    other = network(1)
    load_distributed_checkpoint(other, files, layouts_of_it, train_strategy_filename=tmp_path / "grid.json")
    assert is_same(other, net)
    transform_checkpoints(tmp_path, tmp_path / "whole", "net", tmp_path / "grid.json")
    assert is_same_file(tmp_path / "whole" / "rank_0" / "net0.ckpt", net)
    with pytest.raises(CheckpointError, match="the file of rank 3 is missing"):
        load_distributed_checkpoint(other, files[:3], train_strategy_filename=tmp_path / "grid.json")


def is_same_file(path: Path, net: nn.Module) -> bool:
    other = network(1)
    load_checkpoint(path, other)
    return is_same(other, net)


def test_set_of_which_one_is_missing_is_refused_and_it_is_named(tmp_path: Path) -> None:
    write_strategy(tmp_path / "rows.json", {"weight": ROWS, "bias": BIAS})
    transform_checkpoints(
        save_checkpoint(network(), tmp_path / "a"), tmp_path / "rows", "net", None, tmp_path / "rows.json"
    )
    files = [tmp_path / "rows" / f"rank_{rank}" / f"net{rank}.ckpt" for rank in range(4)]
    files[2].rename(tmp_path / "elsewhere")
    for load in (
        lambda: load_checkpoint(files[0], network()),
        lambda: load_distributed_checkpoint(network(), [files[0], files[1], files[3]]),
    ):
        with pytest.raises(CheckpointError, match=r"is one of 4 directories of one save, and that of rank 2 \(.*net2"):
            load()
    net = network(1)
    load_distributed_checkpoint(net, [*files[:2], tmp_path / "elsewhere", files[3]])
    assert is_same(net, network())


def test_strategy_or_layouts_of_another_network_are_refused(tmp_path: Path) -> None:
    write_strategy(tmp_path / "wrong.json", {"weight": ParameterLayout((4,), ((0,), ()), (4, 4))})
    path = save_checkpoint(network(), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"weight has shape \(8, 4\) in the checkpoint, \(4, 4\) in the strategy"):
        transform_checkpoints(path, tmp_path / "b", "net", None, tmp_path / "wrong.json")
    with pytest.raises(
        CheckpointError, match=r"layout of weigth: the network has no such parameter .did you mean weight"
    ):
        load_distributed_checkpoint(network(), [path], {"weigth": ROWS})
    with pytest.raises(CheckpointError, match="give a list with the checkpoints of all ranks"):
        load_distributed_checkpoint(network(), str(path))  # type: ignore[arg-type]


# -- load_param_into_net ------------------------------------------------------------------------------------------


def test_names_that_were_not_loaded_and_not_used_are_returned(tmp_path: Path) -> None:
    net = nn.Sequential(network(), network(1))
    other = nn.Sequential(network(2), network(3))
    parameters = load_checkpoint(save_checkpoint(net, tmp_path / "a", epoch_num=2))
    assert parameters.pop("1.bias").shape == (8,)
    assert load_param_into_net(other, {**parameters, "more": torch.ones(1)}) == (
        ["1.bias"],
        ["epoch_num", "step_in_epoch", "step_num", "more"],
    )
    assert torch.equal(other[1].weight, net[1].weight)


def test_one_prefix_is_left_out_unless_strict() -> None:
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
def test_other_shapes_and_types_are_refused(value: Tensor, strict: bool, text: str) -> None:
    net = network()
    with pytest.raises(CheckpointError, match=text):
        load_param_into_net(net, {"weight": value}, strict_load=strict)
    assert is_same(net, network())
    load_param_into_net(net, {"weight": torch.ones(8, 4, dtype=torch.float16)})
    assert net.weight.dtype == torch.float32
