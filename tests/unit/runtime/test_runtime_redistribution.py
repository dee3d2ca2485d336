"""Chains of moves: right for any two layouts, and the cheapest of all chains, found apart by brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout, build_mesh
from msrun.runtime.sharding.redistribution import (
    Move,
    Step,
    _direct_steps,
    _shortest,
    plan_directly,
    plan_redistribution,
)

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
