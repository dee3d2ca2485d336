"""Which rows are on which server: every row once, and found again."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from msrun.runtime.server import remote
from msrun.runtime.server.remote import Piece, cut_rows, cut_table, named_rows, number_rows, split_numbers

SHAPES = st.lists(st.integers(1, 200), max_size=3)


def all_rows(cut: tuple[Piece, ...]) -> list[int]:
    return sorted(row for piece in cut for row in piece.rows)


@given(SHAPES, st.integers(1, 5), st.integers(0, 4))
def test_every_row_is_on_one_server(shape: list[int], servers: int, first: int) -> None:
    cut = cut_rows(shape, torch.float64, servers, first % servers)
    assert all_rows(cut) == list(range(shape[0] if shape else 1))
    assert [piece.number for piece in cut] == list(range(len(cut)))
    is_small = math.prod(shape) * 8 <= remote.SMALL_BYTES
    assert len(cut) == (1 if is_small else max(1, min(servers, shape[0])))
    if not is_small and shape[0] >= servers:
        assert {piece.server for piece in cut} == set(range(servers))


@given(st.integers(1, 50), st.integers(1, 6))
def test_rows_of_a_table_take_turns(rows: int, servers: int) -> None:
    cut = cut_table(rows, servers)
    assert all_rows(cut) == list(range(rows))
    assert all(row % servers == piece.server for piece in cut for row in piece.rows)


@given(st.integers(1, 60), st.integers(1, 5), st.data())
def test_rows_are_found_by_their_numbers_in_the_whole(rows: int, servers: int, data: st.DataObject) -> None:
    whole = torch.arange(rows) * 10
    names = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), unique=True)), dtype=torch.int64)
    begin = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(begin, rows))
    for cut in (
        cut_table(rows, servers),
        tuple(Piece(0, n, *bounds) for n, bounds in enumerate([(0, rows // 2), (rows // 2, rows)])),
    ):
        numbers = number_rows(cut, names).sort().values
        assert torch.equal(named_rows(cut, numbers).sort().values, names.sort().values)
        found, inside = torch.zeros_like(names), []
        for piece, part, own_numbers in split_numbers(cut, numbers):
            own = piece.of(whole)
            assert len(own) == len(piece.rows)
            found[part] = own[own_numbers]
            inside += [piece.rows[number] for number in piece.overlap(begin, end)]
        assert torch.equal(found, named_rows(cut, numbers) * 10)
        assert sorted(inside) == list(range(begin, end))
