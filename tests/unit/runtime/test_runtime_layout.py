"""Layouts: of numbers, of names, the moves between them, and halos."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from msrun.errors import LayoutTypeError, ParallelError, StrategyError
from msrun.runtime import Layout
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.halo import Message, Window, add_gradients, gradient_message, join_window, window_message
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout, assign_axes, build_mesh
from msrun.runtime.sharding.named_layout import choose_mesh
from msrun.runtime.sharding.redistribution import (
    Move,
    Step,
    _direct_steps,
    _shortest,
    plan_directly,
    plan_redistribution,
)

Parts = list[NDArray[np.int64]]
"""One array per rank."""


def cut(whole: NDArray[np.int64], layout: TensorLayout, mesh: Mesh) -> Parts:
    return [whole[layout.slices(mesh, whole.shape, rank)] for rank in range(mesh.size)]


def apply(step: Step, parts: Parts, mesh: Mesh) -> Parts:
    """Do one move on all ranks."""
    moved = []
    for rank in range(mesh.size):
        ranks = mesh.members(rank, step.axes)
        index = mesh.index(rank, step.axes)
        match step.kind:
            case "gather":
                moved.append(np.concatenate([parts[other] for other in ranks], step.dim))
            case "slice":
                moved.append(np.split(parts[rank], len(ranks), step.dim)[index])
            case "exchange":
                received = [np.split(parts[other], len(ranks), step.dim)[index] for other in ranks]
                moved.append(np.concatenate(received, step.from_dim))
    return moved


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    return build_mesh(draw(st.integers(1, 16)))


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, ndim: int) -> TensorLayout:
    """Draw any layout: each axis cuts one dimension or none; the axes of one dimension stand in any order."""
    split: list[list[int]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(mesh.axes)):
        place = draw(st.integers(-1, ndim - 1))
        if place >= 0:
            split[place].append(axis)
    return TensorLayout(tuple(tuple(axes) for axes in split))


@st.composite
def moves(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...], TensorLayout, TensorLayout]:
    """Draw a mesh, a shape that every layout of it divides, and two layouts."""
    mesh = draw(meshes())
    ndim = draw(st.integers(0, 3))
    shape = tuple(mesh.size * draw(st.integers(1, 2)) for _ in range(ndim))
    return mesh, shape, draw(layouts(mesh, ndim)), draw(layouts(mesh, ndim))


# -- redistribution -----------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(moves())
def test_moves_lead_from_any_layout_to_any_other(
    move: tuple[Mesh, tuple[int, ...], TensorLayout, TensorLayout],
) -> None:
    mesh, shape, source, target = move
    whole = np.arange(math.prod(shape)).reshape(shape)
    parts = cut(whole, source, mesh)
    for step in plan_redistribution(Move(mesh, source, target, shape)):
        parts = apply(step, parts, mesh)
    for mine, right in zip(parts, cut(whole, target, mesh), strict=True):
        np.testing.assert_array_equal(mine, right)


# -- meshes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "shape"), [(1, ()), (2, (2,)), (4, (2, 2)), (6, (3, 2)), (7, (7,)), (8, (2, 2, 2)), (12, (3, 2, 2))]
)
def test_mesh_has_the_prime_factors_of_the_world_largest_first(size: int, shape: tuple[int, ...]) -> None:
    assert build_mesh(size).shape == shape
    assert build_mesh(size).size == size


@pytest.mark.parametrize("size", range(1, 17))
def test_rank_and_coordinates_are_a_round_trip(size: int) -> None:
    mesh = build_mesh(size)
    places = [mesh.coordinates(rank) for rank in range(size)]
    assert len(set(places)) == size
    assert [mesh.index(rank, mesh.axes) for rank in range(size)] == list(range(size))
    for rank, place in enumerate(places):
        assert np.ravel_multi_index(place, mesh.shape) == rank if mesh.shape else rank == 0


@pytest.mark.parametrize("size", range(1, 17))
def test_groups_of_any_axes_partition_the_world(size: int) -> None:
    mesh = build_mesh(size)
    for count in range(len(mesh.axes) + 1):
        for axes in itertools.permutations(mesh.axes, count):
            groups = {mesh.members(rank, axes) for rank in range(size)}
            assert sorted(itertools.chain.from_iterable(groups)) == list(range(size))
            assert {len(ranks) for ranks in groups} == {mesh.extent(axes)}
            for ranks in groups:
                assert [mesh.index(rank, axes) for rank in ranks] == list(range(len(ranks)))


def test_group_of_a_rank_among_very_many_is_found_without_a_list_of_all() -> None:
    mesh = build_mesh(1 << 40, first_rank=5)
    assert mesh.members(5 + (1 << 39) + 3, (0, 39)) == (5 + 2, 5 + 3, 5 + (1 << 39) + 2, 5 + (1 << 39) + 3)


# -- layouts ------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(moves())
def test_parts_of_a_layout_cover_the_tensor_once_per_copy(
    move: tuple[Mesh, tuple[int, ...], TensorLayout, TensorLayout],
) -> None:
    mesh, shape, layout, _ = move
    seen = np.zeros(shape, dtype=int)
    for rank in range(mesh.size):
        part = layout.slices(mesh, shape, rank)
        seen[part] += 1
        assert seen[part].shape == layout.local_shape(mesh, shape)
    assert (seen == mesh.extent(layout.copies(mesh))).all()
    assert layout.fits(mesh, shape)
    assert math.prod(layout.numbers(mesh)) * mesh.extent(layout.copies(mesh)) == mesh.size


def test_layout_does_not_fit_a_dimension_that_it_does_not_divide() -> None:
    mesh = build_mesh(4)
    assert not TensorLayout(((0, 1),)).fits(mesh, (6,))
    assert TensorLayout(((0,),)).fits(mesh, (6,))


# -- strategies as axes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "numbers", "axes"),
    [
        (8, (2, 4), ((0,), (1, 2))),
        (8, (4, 2), ((0, 1), (2,))),
        (8, (1, 8), ((), (0, 1, 2))),
        (8, (2, 1), ((0,), ())),
        (6, (2, 3), ((1,), (0,))),
        (6, (6,), ((0, 1),)),
        (12, (4, 3), ((1, 2), (0,))),
        (12, (6, 2), ((0, 1), (2,))),
        (1, (1, 1), ((), ())),
    ],
)
def test_every_number_of_a_strategy_gets_axes_of_its_own(
    size: int, numbers: tuple[int, ...], axes: tuple[Axes, ...]
) -> None:
    assert assign_axes(build_mesh(size), numbers, what="it") == axes


@settings(deadline=None)
@given(meshes(), st.lists(st.integers(1, 16), max_size=4))
def test_numbers_are_assigned_exactly_when_they_multiply_to_a_divisor(mesh: Mesh, numbers: list[int]) -> None:
    is_legal = mesh.size % math.prod(numbers) == 0
    try:
        assigned = assign_axes(mesh, numbers, what="it")
    except StrategyError:
        assert not is_legal
        return
    assert is_legal
    assert [mesh.extent(axes) for axes in assigned] == numbers
    used = list(itertools.chain.from_iterable(assigned))
    assert len(used) == len(set(used))


@pytest.mark.parametrize(("size", "numbers"), [(8, (3,)), (8, (4, 4)), (6, (4,)), (2, (2, 2)), (1, (2,))])
def test_illegal_numbers_are_refused_with_the_world_in_the_message(size: int, numbers: tuple[int, ...]) -> None:
    with pytest.raises(StrategyError, match=rf"^linear: {math.prod(numbers)} parts do not divide {size} ranks; .*"):
        assign_axes(build_mesh(size), numbers, what="linear")


THREE = Layout((2, 2, 2), ("dp", "sp", "mp"))


@pytest.mark.parametrize(
    ("cut", "split"),
    [
        (("dp", "None"), ((0,), ())),
        (("dp", ("sp", "mp"), "None"), ((0,), (1, 2), ())),
        ((("mp", "dp"),), ((2, 0),)),
        ((), ()),
    ],
)
def test_names_become_the_axes_of_the_mesh(cut: tuple[Any, ...], split: Any) -> None:
    assert THREE(*cut).resolve(build_mesh(8)) == TensorLayout(split)


def test_axis_of_a_size_with_several_factors_is_several_axes_of_the_mesh() -> None:
    layout = Layout((2, 6), ("dp", "mp"))
    mesh = choose_mesh(12, [layout])
    assert mesh.shape == (2, 3, 2)
    assert layout("mp", "dp").resolve(mesh) == TensorLayout(((1, 2), (0,)))
    assert layout("mp", "dp").resolve(mesh).numbers(mesh) == (6, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([2, 4], ("a", "b")), LayoutTypeError, "device_matrix=[2, 4]): must be a tuple of whole numbers"),
        (((2.0, 4), ("a", "b")), LayoutTypeError, "must be a tuple of whole numbers"),
        (((True, 4), ("a", "b")), LayoutTypeError, "must be a tuple of whole numbers"),
        (((2, 4), ["a", "b"]), LayoutTypeError, "must be a tuple of words"),
        (((2, 4), ("a", 3)), LayoutTypeError, "must be a tuple of words"),
        (((2, 4), ("a", "b"), (0, 1)), LayoutTypeError, "must be a list of ranks"),
        (((2, 1), ("a", "b"), [0, True]), LayoutTypeError, "must be a list of ranks"),
        (((), ()), StrategyError, "one or more sizes"),
        (((0, 4), ("a", "b")), StrategyError, "each above 0"),
        (((2, 4), ("a",)), StrategyError, "1 names ('a',) for 2 axes (2, 4); give one name for each axis"),
        (((2, 4), ("a", "a")), StrategyError, "a name stands twice"),
        (((2, 4), ("a", "")), StrategyError, "'' is no name for an axis"),
        (((2, 4), ("None", "a")), StrategyError, "'None' is no name for an axis"),
        (((2, 2), ("a", "interleaved_parallel")), StrategyError, "use MicroBatchInterleaved(network, 2)"),
        (((2, 2), ("a", "b"), [0, 1, 2]), StrategyError, "rank_list has 3 ranks and the matrix 4 places"),
        (((2, 2), ("a", "b"), [0, 1, 1, 2]), StrategyError, "each once"),
        (((2, 2), ("a", "b"), [0, 3, 1, 2]), StrategyError, "is no exchange of axes"),
        (((2, 2), ("a", "b"), [0, 1, 4, 5]), StrategyError, "is no exchange of axes"),
    ],
)
def test_wrong_matrix_is_refused(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        Layout(*arguments)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cut", "error", "text"),
    [
        (("dp", "dp"), StrategyError, "'dp' cuts twice; an axis may be used once for a tensor"),
        (("dp", ("sp", "dp")), StrategyError, "'dp' cuts twice"),
        (("ddp",), StrategyError, "there is no axis 'ddp' (did you mean dp?)"),
        ((("sp", "None"),), StrategyError, "there is no axis 'None'"),
        ((3,), LayoutTypeError, "give a name, a tuple of names or 'None' for each dimension"),
        ((None,), LayoutTypeError, "give a name"),
        ((("sp", 1),), LayoutTypeError, "give a name"),
    ],
)
def test_wrong_names_for_a_tensor_are_refused(cut: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        THREE(*cut)
    assert text in str(caught.value)


def test_errors_are_those_of_mindspore_and_of_the_runtime() -> None:
    assert issubclass(LayoutTypeError, TypeError)
    assert issubclass(StrategyError, ValueError)
    assert issubclass(LayoutTypeError, ParallelError)


def test_layout_without_names_is_no_layout_of_a_tensor() -> None:
    with pytest.raises(StrategyError, match="say which axes cut the tensor"):
        THREE.resolve(build_mesh(8))
    with pytest.raises(StrategyError, match="before asking for its placements"):
        THREE.placements()


def test_calling_a_layout_leaves_it_as_it_was() -> None:
    before = repr(THREE)
    assert THREE("dp") == THREE("dp") != THREE("sp")
    assert hash(THREE("dp")) == hash(Layout((2, 2, 2), ("dp", "sp", "mp"))("dp"))
    assert repr(THREE) == before
    assert repr(THREE("dp", ("sp", "mp"), "None")) == (
        "Layout((2, 2, 2), ('dp', 'sp', 'mp'))('dp', ('sp', 'mp'), 'None')"
    )


# -- meshes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matrices", "world_size", "shape"),
    [
        ([], 6, (3, 2)),
        ([(2, 3)], 6, (2, 3)),
        ([(3, 2)], 6, (3, 2)),
        ([(6,)], 6, (3, 2)),
        ([(2, 4), (4, 2)], 8, (2, 2, 2)),
        ([(2, 6), (4, 3)], 12, (2, 2, 3)),
        ([(1, 2, 3, 1)], 6, (2, 3)),
        ([(4, 6)], 24, (2, 2, 3, 2)),
    ],
)
def test_mesh_holds_every_device_matrix(matrices: list[Any], world_size: int, shape: tuple[int, ...]) -> None:
    layouts = [Layout(matrix, tuple(f"a{i}" for i in range(len(matrix)))) for matrix in matrices]
    mesh = choose_mesh(world_size, layouts)
    assert mesh.shape == shape
    for layout in layouts:
        sizes = [mesh.extent(layout.axes_of(name, mesh)) for name in layout.alias_name]
        assert tuple(sizes) == layout.device_matrix


def test_matrices_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"device matrices \(2, 3\) .* and \(3, 2\) .* contradict each other"):
        choose_mesh(6, [Layout((2, 3), ("a", "b")), Layout((3, 2), ("c", "d"))])


def test_matrix_of_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(StrategyError, match="the matrix has 4 places for 6 ranks"):
        choose_mesh(6, [Layout((2, 2), ("a", "b"))])


def test_rank_list_of_a_transposed_matrix_exchanges_the_axes() -> None:
    layout = Layout((3, 2), ("mp", "dp"), [0, 3, 1, 4, 2, 5])
    mesh = choose_mesh(6, [layout])
    assert mesh.shape == (2, 3)
    cut = layout("mp", "dp").resolve(mesh)
    assert cut == TensorLayout(((1,), (0,)))
    for place, rank in enumerate(layout.rank_list):  # the row of the matrix is the part of dimension 0
        rows, columns = cut.slices(mesh, (3, 2), rank)
        assert (rows.start, columns.start) == divmod(place, 2)


def test_names_describe_a_layout_as_far_as_they_reach() -> None:
    layout = Layout((2, 4), ("dp", "mp"))
    mesh = choose_mesh(8, [layout])
    assert layout.names(TensorLayout(((0, 1, 2), ())), mesh) == ("dp+mp", "None")
    assert layout.names(TensorLayout(((1, 2), (0,))), mesh) == ("mp", "dp")
    assert layout.names(TensorLayout(((1,), ())), mesh) is None


# -- torch's words ------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_world() -> Any:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_world")
def test_device_mesh_of_torch_and_its_placements_are_the_same_cut() -> None:
    mesh = DeviceMesh("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], mesh_dim_names=("dp", "sp", "mp"))
    layout = Layout.from_mesh(mesh)
    assert layout == THREE
    assert layout("dp", ("sp", "mp")).placements() == (Shard(0), Shard(1), Shard(1))
    assert layout("None", "mp").placements() == (Replicate(), Replicate(), Shard(1))
    with pytest.raises(StrategyError, match="torch cuts a dimension in the order of the mesh"):
        layout(("mp", "sp")).placements()


@pytest.mark.usefixtures("fake_world")
def test_device_mesh_without_names_is_refused() -> None:
    with pytest.raises(StrategyError, match="make it with mesh_dim_names"):
        Layout.from_mesh(DeviceMesh("cpu", [0, 1, 2, 3, 4, 5, 6, 7]))


@pytest.mark.usefixtures("fake_world")
def test_rows_of_a_transposed_device_mesh_are_the_rank_list() -> None:
    mesh = DeviceMesh("cpu", [[0, 4], [1, 5], [2, 6], [3, 7]], mesh_dim_names=("mp", "dp"))
    layout = Layout.from_mesh(mesh)
    assert layout.rank_list == [0, 4, 1, 5, 2, 6, 3, 7]
    assert choose_mesh(8, [layout]).extent(layout.axes_of("mp", choose_mesh(8, [layout]))) == 4


Split = tuple[Axes, ...]


def every_layout(mesh: Mesh, shape: tuple[int, ...]) -> list[TensorLayout]:
    """Return every layout that cuts this shape evenly."""
    found = set()
    for places in itertools.product(range(-1, len(shape)), repeat=len(mesh.axes)):
        for order in itertools.permutations(mesh.axes):
            split = tuple(tuple(axis for axis in order if places[axis] == dim) for dim in range(len(shape)))
            if TensorLayout(split).fits(mesh, shape):
                found.add(TensorLayout(split))
    return sorted(found, key=lambda layout: layout.split)


def neighbours(
    mesh: Mesh, split: Split, shape: tuple[int, ...], *, is_differentiable: bool
) -> Iterator[tuple[Split, float]]:
    """Yield where one collective leads from a layout, and the elements that a rank receives for it."""
    local = math.prod(shape) / math.prod(mesh.shape[axis] for axes in split for axis in axes)
    free = [axis for axis in mesh.axes if not any(axis in axes for axes in split)]

    def cut(base: Split, dim: int, axes: Axes) -> Split | None:
        after = tuple((*own, *axes) if d == dim else own for d, own in enumerate(base))
        return after if TensorLayout(after).fits(mesh, shape) else None

    for dim in range(len(shape)):
        for count in range(1, len(free) + 1):
            for axes in itertools.permutations(free, count):
                n = math.prod(mesh.shape[axis] for axis in axes)
                if (after := cut(split, dim, axes)) is not None:
                    yield after, local * (n - 1) / n if is_differentiable else 0
        for count in range(1, len(split[dim]) + 1):
            inner = split[dim][-count:]
            n = math.prod(mesh.shape[axis] for axis in inner)
            joined = tuple(own[:-count] if d == dim else own for d, own in enumerate(split))
            yield joined, local * (n - 1)
            for other in range(len(shape)):
                if other != dim and (after := cut(joined, other, inner)) is not None:
                    yield after, local * (n - 1) / n * (2 if is_differentiable else 1)


def cheapest(
    mesh: Mesh, source: TensorLayout, shape: tuple[int, ...], *, is_differentiable: bool
) -> dict[Split, float]:
    """Return the least elements from one layout to every other: relax edges until nothing changes (Bellman-Ford)."""
    layouts = [layout.split for layout in every_layout(mesh, shape)]
    edges = {split: list(neighbours(mesh, split, shape, is_differentiable=is_differentiable)) for split in layouts}
    best = dict.fromkeys(layouts, math.inf) | {source.split: 0.0}
    changed = True
    while changed:
        changed = False
        for split, after in edges.items():
            for target, price in after:
                if best[split] + price < best[target]:
                    best[target], changed = best[split] + price, True
    return best


MESHES = [Mesh((2,)), Mesh((2, 2)), Mesh((3, 2)), Mesh((2, 3)), Mesh((2, 2, 2)), Mesh((4, 2))]
SHAPES = [(8, 8), (24,), (12, 24), (2, 24), (4, 4, 8)]


@st.composite
def brute_cases(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...], TensorLayout, bool]:
    mesh = draw(st.sampled_from(MESHES))
    shape = draw(st.sampled_from([shape for shape in SHAPES if len(mesh.axes) + len(shape) < 6]))
    source = draw(st.sampled_from(every_layout(mesh, shape)))
    return mesh, shape, source, draw(st.booleans())


@settings(max_examples=30, deadline=None)
@given(brute_cases())
def test_no_cheaper_chain_exists_from_any_layout_to_any_other(
    case: tuple[Mesh, tuple[int, ...], TensorLayout, bool],
) -> None:
    mesh, shape, source, is_differentiable = case
    for target, least in cheapest(mesh, source, shape, is_differentiable=is_differentiable).items():
        move = Move(mesh, source, TensorLayout(target), shape, is_differentiable)
        steps = plan_redistribution(move)
        assert move.total_elements(steps) == least, (target, steps)


def walk(move: Move, steps: tuple[Step, ...]) -> list[TensorLayout]:
    layouts = [move.source]
    for step in steps:
        layouts.append(step.after(layouts[-1]))
    return layouts


@pytest.mark.parametrize("world_size", [8, 16, 64, 1024])
def test_layouts_on_many_ranks_are_reached_by_layouts_that_all_fit(world_size: int) -> None:
    mesh = build_mesh(world_size)
    half = len(mesh.axes) // 2
    first, second = mesh.axes[:half], mesh.axes[half:]
    shape = (world_size, world_size, world_size)
    layouts = [
        TensorLayout(split)
        for split in (
            (first, second, ()),
            (second, first, ()),
            ((), mesh.axes, ()),
            (mesh.axes[::-1], (), ()),
            ((),) * 3,
        )
    ]
    for source, target in itertools.permutations(layouts, 2):
        move = Move(mesh, source, target, shape)
        visited = walk(move, plan_redistribution(move))
        assert visited[-1] == target
        assert all(layout.fits(mesh, shape) for layout in visited)


def test_run_of_axes_that_stand_together_moves_in_one_exchange_on_many_ranks() -> None:
    mesh = build_mesh(1024)
    move = Move(mesh, TensorLayout((mesh.axes, ())), TensorLayout(((), mesh.axes)), (1024, 1024))
    assert plan_redistribution(move) == (Step("exchange", 1, mesh.axes, 0),)


def test_axes_along_which_values_differ_take_no_part() -> None:
    mesh = build_mesh(8)
    source, target = TensorLayout(((0,), (1,))), TensorLayout(((1,), (0,)))
    free = plan_redistribution(Move(mesh, source, target, (8, 8)))
    kept = plan_redistribution(Move(mesh, source, target, (8, 8), kept_axes=(2,)))
    assert 2 in {axis for step in free for axis in step.axes}
    assert 2 not in {axis for step in kept for axis in step.axes}


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (((), ()), ((), ()), []),
        (((), ()), ((0, 1), ()), ["slice"]),
        (((0, 1), ()), ((), ()), ["gather"]),
        (((0,), ()), ((0, 1), ()), ["slice"]),
        (((0, 1), ()), ((0,), ()), ["gather"]),
        (((0,), ()), ((), (0,)), ["exchange"]),
        (((0, 1), ()), ((), (0, 1)), ["exchange"]),
        (((0, 1), ()), ((0,), (1,)), ["exchange"]),
        (((0,), (1,)), ((0, 1), ()), ["exchange"]),
        (((0,), ()), ((1,), ()), ["gather", "slice"]),
    ],
)
def test_moves_of_two_axes_are_those_that_one_writes_by_hand(source: Split, target: Split, kinds: list[str]) -> None:
    move = Move(build_mesh(4), TensorLayout(source), TensorLayout(target), (8, 8))
    assert [step.kind for step in plan_redistribution(move)] == kinds


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_axes_that_move_as_one_make_direct_chains_neither_dearer_nor_longer(data: st.DataObject) -> None:
    mesh = Mesh(data.draw(st.sampled_from([(2, 2), (3, 2, 2), (2, 2, 2), (2,) * 6])))
    dims = data.draw(st.integers(1, 3))

    def layout() -> TensorLayout:
        places = [data.draw(st.integers(-1, dims - 1)) for _ in mesh.axes]
        order = data.draw(st.permutations(mesh.axes))
        return TensorLayout(tuple(tuple(axis for axis in order if places[axis] == dim) for dim in range(dims)))

    move = Move(mesh, layout(), layout(), (mesh.size,) * dims, data.draw(st.booleans()))
    found = plan_directly(move)
    axis_by_axis = _shortest(move, lambda reached: _direct_steps(reached, move.target), limit=None)
    reached = move.source
    for step in found:
        reached = step.after(reached)
        assert reached.fits(mesh, move.shape)
    assert reached == move.target
    assert (move.total_elements(found), len(found)) == (move.total_elements(axis_by_axis), len(axis_by_axis))


def exchange(messages: list[Message]) -> list[list[Tensor]]:
    """Return what every rank gets when all send at once."""
    sent = [message.flat.split(message.send_sizes) for message in messages]
    received = [torch.cat([parts[rank] for parts in sent]) for rank in range(len(messages))]
    return [message.pieces(flat) for message, flat in zip(messages, received, strict=True)]


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, Window]:
    count, part = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    window = Window(
        count * part,
        draw(st.integers(0, 6)),
        draw(st.integers(-5, 5)),
        draw(st.integers(1, 9)),
        draw(st.sampled_from([0.0, -7.5])),
    )
    return count, window


def padded(whole: Tensor, window: Window, index: int) -> Tensor:
    """Return the window of a rank, row by row."""
    rows = range(window.start(index), window.start(index) + window.length)
    none = torch.full_like(whole[:, 0], window.fill)
    return torch.stack([whole[:, row] if 0 <= row < window.size else none for row in rows], 1)


@settings(max_examples=50, deadline=None)
@given(windows())
def test_joined_pieces_are_the_window_of_the_padded_tensor(drawn: tuple[int, Window]) -> None:
    count, window = drawn
    whole = torch.randn(2, window.size, 3, dtype=torch.float64)
    parts = whole.chunk(count, 1)
    received = exchange([window_message(parts[i], 1, window, i, count) for i in range(count)])
    for index in range(count):
        joined = join_window(parts[index], received[index], 1, window, index, count)
        assert torch.equal(joined, padded(whole, window, index))


@settings(max_examples=50, deadline=None)
@given(windows())
def test_gradients_of_windows_are_added_to_the_rows_that_they_read(drawn: tuple[int, Window]) -> None:
    count, window = drawn
    whole = torch.randn(2, window.size, 3, dtype=torch.float64, requires_grad=True)
    gradients = [torch.randn(2, window.length, 3, dtype=torch.float64) for _ in range(count)]
    loss = sum((padded(whole, window, i) * gradients[i]).sum() for i in range(count))
    right = torch.zeros_like(whole)
    if loss.requires_grad:  # type: ignore[union-attr]
        (right,) = torch.autograd.grad(loss, whole)  # type: ignore[arg-type]
    received = exchange([gradient_message(gradients[i], 1, window, i, count) for i in range(count)])
    for index, part in enumerate(right.chunk(count, 1)):
        torch.testing.assert_close(add_gradients(gradients[index], received[index], 1, window, index, count), part)


def test_nothing_is_sent_where_windows_end_with_their_parts() -> None:
    window = Window(8, 2, 0, 2)
    messages = [window_message(torch.ones(1, 2), 1, window, i, 4) for i in range(4)]
    assert [message.flat.numel() for message in messages] == [0] * 4


def test_window_may_reach_over_several_ranks() -> None:
    window = Window(4, 1, -2, 5)
    message = window_message(torch.ones(1, 1), 1, window, 1, 4)
    assert message.send_sizes == [1, 0, 1, 1]
    assert message.receive_sizes == [1, 0, 1, 1]


def test_plan_names_the_window() -> None:
    halo = Collective("halo", (0, 1), 2, window=Window(8, 2, -1, 4))
    assert str(halo) == "halo dim 2, 4 rows from -1 every 2 over axes 0,1"
    assert not halo.is_local
