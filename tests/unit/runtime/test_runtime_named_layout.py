"""Layout: the ranks as a matrix with names; MindSpore's checks; meshes that hold the user's matrices; torch's words."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from msrun.errors import LayoutTypeError, ParallelError, StrategyError
from msrun.runtime import Layout
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.named_layout import choose_mesh

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
