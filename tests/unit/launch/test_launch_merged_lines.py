"""A line that all ranks write is shown once; every rank's lines stay, in their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from msrun.launch.merged_lines import MAX_WAITING, WAIT_S, MergedLines


def test_a_line_of_all_is_shown_once_and_one_of_some_after_a_while() -> None:
    merged = MergedLines([0, 1])
    merged.add(0, [b"epoch 1", b"loss 0.25"], 0.0)
    assert merged.take(0.1) == []
    merged.add(1, [b"epoch 1", b"loss 0.5"], 0.2)
    assert merged.take(0.2) == [(None, b"epoch 1")]
    assert merged.take(WAIT_S) == [(0, b"loss 0.25")]
    assert merged.take(0.3 + WAIT_S) == [(1, b"loss 0.5")]


def test_a_line_of_one_rank_alone_does_not_part_the_others() -> None:
    merged = MergedLines([0, 1])
    merged.add(0, [b"epoch 1"], 0.0)
    merged.add(1, [b"warning", b"epoch 1"], 0.0)
    assert merged.take(WAIT_S) == [(1, b"warning"), (None, b"epoch 1")]


def test_lines_do_not_wait_without_end() -> None:
    merged = MergedLines([0, 1])
    merged.add(0, [b"same"] * (MAX_WAITING + 7), 0.0)
    assert merged.take(0.0) == [(0, b"same")] * 7


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([b"a", b"b", b"c"]), st.floats(0, 1)), max_size=30))
def test_every_line_of_every_rank_is_shown_in_its_order(written: list[tuple[int, bytes, float]]) -> None:
    merged = MergedLines([0, 1, 2])
    shown: list[tuple[int | None, bytes]] = []
    now = 0.0
    for rank, line, pause in written:
        now += pause
        merged.add(rank, [line], now)
        shown += merged.take(now)
    shown += merged.take(now, at_end=True)
    for rank in range(3):
        own = [line for one, line, _ in written if one == rank]
        assert [line for whose, line in shown if whose in (rank, None)] == own
