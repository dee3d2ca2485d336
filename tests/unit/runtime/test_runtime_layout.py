"""Layouts: meshes, axes, strategies as axes, and the moves from any layout to any other, applied by hand in numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from msrun.errors import StrategyError
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout, assign_axes, build_mesh
from msrun.runtime.sharding.redistribution import Move, Step, plan_redistribution

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
