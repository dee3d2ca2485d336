"""Layouts of a mesh: any one, for properties, and all that fit a shape."""

import itertools

from hypothesis import strategies as st

from msrun.runtime.sharding.layout import TensorLayout


@st.composite
def layouts(draw, mesh, ndim):
    """Draw any layout: each axis cuts one dimension or none; the axes of one dimension stand in any order."""
    split = [()] * ndim
    for axis in draw(st.permutations(mesh.axes)):
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            split[dim] += (axis,)
    return TensorLayout(tuple(split))


def all_layouts(mesh, shape):
    """Return every layout that cuts this shape evenly."""
    found = set()
    for places in itertools.product(range(-1, len(shape)), repeat=len(mesh.axes)):
        for order in itertools.permutations(mesh.axes):
            split = tuple(tuple(axis for axis in order if places[axis] == dim) for dim in range(len(shape)))
            if TensorLayout(split).fits(mesh, shape):
                found.add(TensorLayout(split))
    return sorted(found, key=lambda layout: layout.split)
