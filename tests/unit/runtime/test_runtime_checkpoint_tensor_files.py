"""Tensors written in one layout and read in another, for every rank of both, without processes."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.index import NETWORK, OPTIMIZER, TensorKey, flat_name
from msrun.runtime.checkpoint.reader import CheckpointReader, open_parts
from msrun.runtime.checkpoint.storage import DirectoryWriter, PartPlanner, keep_shares, plan_of
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.sharding.layout import Box, Mesh, TensorLayout, build_mesh, whole

KEY = (NETWORK, "weight")


@st.composite
def cuts(draw: st.DrawFn, ndim: int) -> tuple[Mesh, TensorLayout]:
    """A world of 1 to 12 ranks and any layout in it: axes in any order, some left for copies."""
    mesh = build_mesh(draw(st.integers(1, 12)))
    split: list[tuple[int, ...]] = [()] * ndim
    for axis in draw(st.permutations(mesh.axes)):
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            split[dim] += (axis,)
    return mesh, TensorLayout(tuple(split))


@st.composite
def reshardings(draw: st.DrawFn) -> tuple[Tensor, tuple[Mesh, TensorLayout], tuple[Mesh, TensorLayout]]:
    """A whole tensor that both layouts cut evenly."""
    ndim = draw(st.integers(0, 3))
    source, target = draw(cuts(ndim)), draw(cuts(ndim))
    shape = [
        math.lcm(*(mesh.extent(layout.split[dim]) for mesh, layout in (source, target))) * draw(st.integers(1, 2))
        for dim in range(ndim)
    ]
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]))
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype), source, target


def box_of(mesh: Mesh, layout: TensorLayout, shape: Sequence[int], rank: int) -> Box:
    slices = layout.slices(mesh, shape, rank)
    return Box(tuple(shape), tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))


def cut(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


def write_of_all_ranks(path: Path, ranks: Sequence[dict[TensorKey, Chunk]]) -> list[int]:
    """Write as a world of many ranks does; return how many elements each rank wrote."""
    shares = keep_shares([plan_of(parts) for parts in ranks], to_first=False)
    pieces = [
        {key: part for key, part in parts.items() if key in mine} for parts, mine in zip(ranks, shares, strict=True)
    ]
    planners, writer = [PartPlanner(parts) for parts in pieces], DirectoryWriter(path)
    plans, metadata = planners[0].create_global_plan(
        [writer.prepare_local_plan(p.create_local_plan()) for p in planners]
    )
    written = []
    for planner, parts, plan in zip(planners, pieces, writer.prepare_global_plan(plans), strict=True):
        planner.set_up_planner({flat_name(key): part for key, part in parts.items()})
        written.append(writer.write_data(plan, planner).wait())
    writer.finish(metadata, written)
    return [sum(math.prod(part.box.sizes) for part in parts.values()) for parts in pieces]


def opened(path: Path) -> CheckpointReader:
    return open_parts([path])


def read(path: Path, key: TensorKey) -> Tensor:
    return opened(path).read(key)


@settings(max_examples=30, deadline=None)
@given(reshardings())
def test_tensor_written_in_one_layout_is_read_in_any_other(
    case: tuple[Tensor, tuple[Mesh, TensorLayout], tuple[Mesh, TensorLayout]],
) -> None:
    tensor, (mesh, layout), (other_mesh, other_layout) = case
    boxes = [box_of(mesh, layout, tensor.shape, rank) for rank in range(mesh.size)]
    with tempfile.TemporaryDirectory() as folder:
        written = write_of_all_ranks(Path(folder), [{KEY: Chunk(cut(tensor, box), box)} for box in boxes])
        assert sum(written) == tensor.numel(), "every element once"
        reader = opened(Path(folder))
        assert reader.tensors[KEY].shape == tuple(tensor.shape)
        assert reader.tensors[KEY].dtype == tensor.dtype
        for rank in range(other_mesh.size):
            box = box_of(other_mesh, other_layout, tensor.shape, rank)
            value = torch.zeros(box.sizes, dtype=tensor.dtype)
            reader.fill({KEY: Chunk(value, box)})
            assert torch.equal(value, cut(tensor, box))
        assert torch.equal(reader.read(KEY), tensor)


def test_copies_are_shared_out_among_the_ranks_that_hold_them(tmp_path: Path) -> None:
    tensors = {(NETWORK, f"layer{i}.weight"): torch.full((10,), float(i)) for i in range(8)}
    written = write_of_all_ranks(
        tmp_path, [{k: Chunk(t, whole(t.shape)) for k, t in tensors.items()} for _ in range(4)]
    )
    assert written == [20, 20, 20, 20]


def test_names_with_dots_and_optimizer_state_keep_apart(tmp_path: Path) -> None:
    values: dict[TensorKey, Tensor] = {
        (NETWORK, "optimizer.weight"): torch.tensor([1.0]),
        (OPTIMIZER, "weight", "exp_avg"): torch.tensor([2.0]),
        (NETWORK, "a.b.c"): torch.tensor(3.0),
        (OPTIMIZER, "a.b.c", "step"): torch.tensor(4.0),
    }
    write_of_all_ranks(tmp_path, [{key: Chunk(value, whole(value.shape)) for key, value in values.items()}])
    reader = opened(tmp_path)
    assert sorted(reader.network_names) == ["a.b.c", "optimizer.weight"]
    assert all(torch.equal(reader.read(key), value) for key, value in values.items())


def test_parts_that_are_views_are_written_without_the_rest(tmp_path: Path) -> None:
    big = torch.arange(1_000_000, dtype=torch.float32)
    part = big[500:510]
    write_of_all_ranks(tmp_path, [{KEY: Chunk(part, whole(part.shape))}])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 10_000
    assert torch.equal(read(tmp_path, KEY), part)


def test_value_that_is_not_contiguous_comes_back(tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(3, 4).t()
    write_of_all_ranks(tmp_path, [{KEY: Chunk(value, whole(value.shape))}])
    target = torch.zeros(3, 4).t()
    opened(tmp_path).fill({KEY: Chunk(target, whole(target.shape))})
    assert torch.equal(target, value)


def test_part_that_nobody_wrote_is_an_error(tmp_path: Path) -> None:
    half = torch.ones(2)
    write_of_all_ranks(tmp_path, [{KEY: Chunk(half, Box((4,), (0,), (2,)))}])
    with pytest.raises(CheckpointError, match=r"parts of model\.weight are missing; load another one"):
        read(tmp_path, KEY)


@pytest.mark.parametrize("damage", ["index", "file gone", "file cut off", "file overwritten"])
def test_damaged_files_give_one_line(tmp_path: Path, damage: str) -> None:
    value = torch.ones(100)
    write_of_all_ranks(tmp_path, [{KEY: Chunk(value, whole(value.shape))}])
    (file,) = tmp_path.glob("*.distcp")
    if damage == "index":
        os.truncate(tmp_path / "tensors.json", 10)
    elif damage == "file gone":
        file.unlink()
    elif damage == "file cut off":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*; load another one") as error:
        read(tmp_path, KEY)
    assert "\n" not in str(error.value)


def test_torchs_own_tools_read_the_files(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    mesh, layout = build_mesh(4), TensorLayout(((0,), (1,)))
    weight = torch.arange(16.0).reshape(4, 4)
    boxes = [box_of(mesh, layout, weight.shape, rank) for rank in range(4)]
    ranks: list[dict[TensorKey, Chunk]] = [
        {
            (NETWORK, "layer.weight"): Chunk(cut(weight, box), box),
            (OPTIMIZER, "layer.weight", "exp_avg"): Chunk(cut(-weight, box), box),
        }
        for box in boxes
    ]
    write_of_all_ranks(tmp_path / "checkpoint", ranks)
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "whole.pt")
    content = torch.load(tmp_path / "whole.pt")
    assert torch.equal(content["model"]["layer.weight"], weight)
    assert torch.equal(content["optimizer"]["layer.weight"]["exp_avg"], -weight)


def test_every_pair_of_layouts_of_four_ranks_in_two_dimensions(tmp_path: Path) -> None:
    """The exhaustive small case beside the random ones."""
    mesh = build_mesh(4)
    layouts = [
        TensorLayout((rows, columns))
        for rows, columns in itertools.product([(), (0,), (1,), (0, 1), (1, 0)], repeat=2)
        if not set(rows) & set(columns)
    ]
    tensor = torch.arange(64.0).reshape(8, 8)
    for number, layout in enumerate(layouts):
        boxes = [box_of(mesh, layout, tensor.shape, rank) for rank in range(4)]
        folder = tmp_path / str(number)
        write_of_all_ranks(folder, [{KEY: Chunk(cut(tensor, box), box)} for box in boxes])
        reader = opened(folder)
        for other, rank in itertools.product(layouts, range(4)):
            box = box_of(mesh, other, tensor.shape, rank)
            value = torch.zeros(box.sizes)
            reader.fill({KEY: Chunk(value, box)})
            assert torch.equal(value, cut(tensor, box)), (layout, other, rank)
