"""Layouts: of numbers, of names, the moves between them, and halos."""

import itertools
import math

import numpy as np
import pytest
import torch.distributed as dist
from drawn_layouts import all_layouts, layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from msrun.errors import LayoutTypeError, ParallelError, StrategyError
from msrun.runtime import Layout
from msrun.runtime.sharding.layout import Mesh, Move, TensorLayout, assign_axes, build_mesh, plan_redistribution
from msrun.runtime.sharding.named_layout import choose_mesh


def cut(whole, layout, mesh):
    return [whole[layout.slices(mesh, whole.shape, rank)] for rank in range(mesh.size)]


def apply(step, parts, mesh):
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
def meshes(draw):
    return build_mesh(draw(st.integers(1, 16)))


@st.composite
def moves(draw):
    """Draw a mesh, a shape that every layout of it divides, and two layouts."""
    mesh = draw(meshes())
    ndim = draw(st.integers(0, 3))
    shape = tuple(mesh.size * draw(st.integers(1, 2)) for _ in range(ndim))
    return mesh, shape, draw(layouts(mesh, ndim)), draw(layouts(mesh, ndim))


@given(moves())
def test_moves_lead_from_any_layout_to_any_other(move):
    mesh, shape, source, target = move
    whole = np.arange(math.prod(shape)).reshape(shape)
    parts = cut(whole, source, mesh)
    for step in plan_redistribution(Move(mesh, source, target, shape)):
        parts = apply(step, parts, mesh)
    for mine, right in zip(parts, cut(whole, target, mesh), strict=True):
        np.testing.assert_array_equal(mine, right)


@pytest.mark.parametrize("size", range(1, 17))
def test_groups_of_any_axes_partition_the_world(size):
    mesh = build_mesh(size)
    for count in range(len(mesh.axes) + 1):
        for axes in itertools.permutations(mesh.axes, count):
            groups = {mesh.members(rank, axes) for rank in range(size)}
            assert sorted(itertools.chain.from_iterable(groups)) == list(range(size))
            assert {len(ranks) for ranks in groups} == {mesh.extent(axes)}
            for ranks in groups:
                assert [mesh.index(rank, axes) for rank in ranks] == list(range(len(ranks)))


def test_group_of_a_rank_among_very_many_is_found_without_a_list_of_all():
    mesh = build_mesh(1 << 40, first_rank=5)
    assert mesh.members(5 + (1 << 39) + 3, (0, 39)) == (5 + 2, 5 + 3, 5 + (1 << 39) + 2, 5 + (1 << 39) + 3)


@given(moves())
def test_parts_of_a_layout_cover_the_tensor_once_per_copy(move):
    mesh, shape, layout, _ = move
    seen = np.zeros(shape, dtype=int)
    for rank in range(mesh.size):
        part = layout.slices(mesh, shape, rank)
        seen[part] += 1
        assert seen[part].shape == layout.local_shape(mesh, shape)
    assert (seen == mesh.extent(layout.copies(mesh))).all()
    assert layout.fits(mesh, shape)
    for dim, number in enumerate(layout.numbers(mesh)):
        assert layout.fits(mesh, (*shape[:dim], shape[dim] + 1, *shape[dim + 1 :])) is (number == 1)
    assert math.prod(layout.numbers(mesh)) * mesh.extent(layout.copies(mesh)) == mesh.size


@pytest.mark.parametrize(
    ("size", "numbers", "axes"),
    [
        (8, (2, 4), ((0,), (1, 2))),
        (8, (4, 2), ((0, 1), (2,))),
        (8, (2, 1), ((0,), ())),
        (6, (2, 3), ((1,), (0,))),
        (12, (4, 3), ((1, 2), (0,))),
        (1, (1, 1), ((), ())),
    ],
)
def test_every_number_of_a_strategy_gets_own_axes(size, numbers, axes):
    assert assign_axes(build_mesh(size), numbers, what="it") == axes


@given(meshes(), st.lists(st.integers(1, 16), max_size=4))
def test_numbers_are_assigned_exactly_when_they_multiply_to_a_divisor(mesh, numbers):
    is_legal = mesh.size % math.prod(numbers) == 0
    try:
        assigned = assign_axes(mesh, numbers, what="it")
    except StrategyError as error:
        assert not is_legal
        assert str(error).startswith(f"it: {math.prod(numbers)} parts do not divide {mesh.size} ranks; ")
        return
    assert is_legal
    assert [mesh.extent(axes) for axes in assigned] == numbers
    used = list(itertools.chain.from_iterable(assigned))
    assert len(used) == len(set(used))


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
def test_names_become_the_axes_of_the_mesh(cut, split):
    assert THREE(*cut).resolve(build_mesh(8)) == TensorLayout(split)
    assert THREE(*cut).numbers == tuple(2 ** len(axes) for axes in split)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([2, 4], ("a", "b")), "device_matrix=[2, 4]): must be a tuple of whole numbers"),
        (((2.0, 4), ("a", "b")), "must be a tuple of whole numbers"),
        (((True, 4), ("a", "b")), "must be a tuple of whole numbers"),
        (((2, 4), ["a", "b"]), "must be a tuple of words"),
        (((2, 4), ("a", 3)), "must be a tuple of words"),
        (((2, 4), ("a", "b"), (0, 1)), "must be a list of ranks"),
        (((2, 1), ("a", "b"), [0, True]), "must be a list of ranks"),
        (((), ()), "one or more sizes"),
        (((0, 4), ("a", "b")), "each above 0"),
        (((2, 4), ("a",)), "1 names ('a',) for 2 axes (2, 4); give one name for each axis"),
        (((2, 4), ("a", "a")), "a name stands twice"),
        (((2, 4), ("a", "")), "'' is no name for an axis"),
        (((2, 4), ("None", "a")), "'None' is no name for an axis"),
        (((2, 2), ("a", "interleaved_parallel")), "use MicroBatchInterleaved(network, 2)"),
        (((2, 2), ("a", "b"), [0, 1, 2]), "rank_list has 3 ranks and the matrix 4 places"),
        (((2, 2), ("a", "b"), [0, 1, 1, 2]), "each once"),
        (((2, 2), ("a", "b"), [0, 3, 1, 2]), "is no exchange of axes"),
        (((2, 2), ("a", "b"), [0, 1, 4, 5]), "is no exchange of axes"),
        (lambda: THREE("dp", "dp"), "'dp' cuts twice; an axis may be used once for a tensor"),
        (lambda: THREE("dp", ("sp", "dp")), "'dp' cuts twice"),
        (lambda: THREE("ddp"), "there is no axis 'ddp' (did you mean dp?)"),
        (lambda: THREE(("sp", "None")), "there is no axis 'None'"),
        (lambda: THREE(3), "give a name, a tuple of names or 'None' for each dimension"),
        (lambda: THREE(None), "give a name"),
        (lambda: THREE(("sp", 1)), "give a name"),
        (lambda: THREE.resolve(build_mesh(8)), "say which axes cut the tensor"),
        (lambda: THREE.placements(), "before asking for its placements"),
        (lambda: choose_mesh(6, [Layout((2, 3), ("a", "b")), Layout((3, 2), ("c", "d"))]), "contradict each other"),
        (lambda: choose_mesh(6, [Layout((2, 2), ("a", "b"))]), "the matrix has 4 places for 6 ranks"),
        (lambda: build_mesh(12, strides={4, 6}), "axes that begin at every 4 and at every 6 ranks"),
    ],
)
def test_matrices_and_names_that_mean_nothing_are_refused_with_mindspores_errors(arguments, text):
    of_type = text.startswith("give a name") or "must be a" in text
    with pytest.raises(TypeError if of_type else ValueError) as caught:
        arguments() if callable(arguments) else Layout(*arguments)
    assert isinstance(caught.value, LayoutTypeError if of_type else StrategyError)
    assert isinstance(caught.value, ParallelError)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_calling_a_layout_leaves_it_as_it_was():
    before = repr(THREE)
    assert THREE("dp") == THREE("dp") != THREE("sp")
    assert hash(THREE("dp")) == hash(Layout((2, 2, 2), ("dp", "sp", "mp"))("dp"))
    assert repr(THREE) == before
    assert repr(THREE("dp", ("sp", "mp"), "None")) == f"{before}('dp', ('sp', 'mp'), 'None')"


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
def test_mesh_holds_every_device_matrix(matrices, world_size, shape):
    layouts = [Layout(matrix, tuple(f"a{i}" for i in range(len(matrix)))) for matrix in matrices]
    mesh = choose_mesh(world_size, layouts)
    assert mesh.shape == shape
    for layout in layouts:
        sizes = [mesh.extent(layout.axes_of(name, mesh)) for name in layout.alias_name]
        assert tuple(sizes) == layout.device_matrix
        assert layout(*layout.alias_name[::-1]).resolve(mesh).numbers(mesh) == layout.device_matrix[::-1]


def test_rank_list_of_a_transposed_matrix_exchanges_the_axes():
    layout = Layout((3, 2), ("mp", "dp"), [0, 3, 1, 4, 2, 5])
    mesh = choose_mesh(6, [layout])
    assert mesh.shape == (2, 3)
    cut = layout("mp", "dp").resolve(mesh)
    assert cut == TensorLayout(((1,), (0,)))
    for place, rank in enumerate(layout.rank_list):  # the row of the matrix is the part of dimension 0
        rows, columns = cut.slices(mesh, (3, 2), rank)
        assert (rows.start, columns.start) == divmod(place, 2)


def test_names_describe_a_layout_as_far_as_they_reach():
    layout = Layout((2, 4), ("dp", "mp"))
    mesh = choose_mesh(8, [layout])
    assert layout.names(TensorLayout(((0, 1, 2), ())), mesh) == ("dp+mp", "None")
    assert layout.names(TensorLayout(((1, 2), (0,))), mesh) == ("mp", "dp")
    assert layout.names(TensorLayout(((1,), ())), mesh) is None


@pytest.fixture
def fake_world():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_world")
def test_device_mesh_of_torch_and_its_placements_are_the_same_cut():
    mesh = DeviceMesh("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], mesh_dim_names=("dp", "sp", "mp"))
    layout = Layout.from_mesh(mesh)
    assert layout == THREE
    assert layout("dp", ("sp", "mp")).placements() == (Shard(0), Shard(1), Shard(1))
    assert layout("None", "mp").placements() == (Replicate(), Replicate(), Shard(1))
    with pytest.raises(StrategyError, match="torch cuts a dimension in the order of the mesh"):
        layout(("mp", "sp")).placements()
    transposed = Layout.from_mesh(DeviceMesh("cpu", [[0, 4], [1, 5], [2, 6], [3, 7]], mesh_dim_names=("mp", "dp")))
    assert transposed.rank_list == [0, 4, 1, 5, 2, 6, 3, 7]
    with pytest.raises(StrategyError, match="make it with mesh_dim_names"):
        Layout.from_mesh(DeviceMesh("cpu", [0, 1, 2, 3, 4, 5, 6, 7]))


def neighbours(mesh, split, shape, *, is_differentiable):
    """Yield where one collective leads from a layout, and the elements that a rank receives for it."""
    local = math.prod(shape) / math.prod(mesh.shape[axis] for axes in split for axis in axes)
    free = [axis for axis in mesh.axes if not any(axis in axes for axes in split)]

    def cut(base, dim, axes):
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


def cheapest(mesh, source, shape, *, is_differentiable):
    """Return the least elements from one layout to every other: relax edges until nothing changes (Bellman-Ford)."""
    splits = [layout.split for layout in all_layouts(mesh, shape)]
    edges = {split: list(neighbours(mesh, split, shape, is_differentiable=is_differentiable)) for split in splits}
    best = dict.fromkeys(splits, math.inf) | {source.split: 0.0}
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
def brute_cases(draw):
    mesh = draw(st.sampled_from(MESHES))
    shape = draw(st.sampled_from([shape for shape in SHAPES if len(mesh.axes) + len(shape) < 6]))
    source = draw(st.sampled_from(all_layouts(mesh, shape)))
    return mesh, shape, source, draw(st.booleans())


@settings(max_examples=30, deadline=None)
@given(brute_cases())
def test_no_chain_between_two_layouts_is_cheaper(case):
    mesh, shape, source, is_differentiable = case
    for target, least in cheapest(mesh, source, shape, is_differentiable=is_differentiable).items():
        move = Move(mesh, source, TensorLayout(target), shape, is_differentiable)
        steps = plan_redistribution(move)
        assert move.total_elements(steps) == least, (target, steps)


@pytest.mark.parametrize("world_size", [8, 16, 64, 1024])
def test_layouts_on_many_ranks_are_reached_by_layouts_that_all_fit(world_size):
    mesh, shape = build_mesh(world_size), (world_size,) * 3
    half = len(mesh.axes) // 2
    first, second = mesh.axes[:half], mesh.axes[half:]
    splits = ((first, second, ()), (second, first, ()), ((), mesh.axes, ()), (mesh.axes[::-1], (), ()), ((),) * 3)
    for source, target in itertools.permutations(map(TensorLayout, splits), 2):
        reached = source
        for step in plan_redistribution(Move(mesh, source, target, shape)):
            reached = step.after(reached)
            assert reached.fits(mesh, shape)
        assert reached == target


def test_axes_along_which_values_differ_take_no_part():
    mesh = build_mesh(8)
    source, target = TensorLayout(((0,), (1,))), TensorLayout(((1,), (0,)))
    free = plan_redistribution(Move(mesh, source, target, (8, 8)))
    kept = plan_redistribution(Move(mesh, source, target, (8, 8), kept_axes=(2,)))
    assert 2 in {axis for step in free for axis in step.axes}
    assert 2 not in {axis for step in kept for axis in step.axes}
