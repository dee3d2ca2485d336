"""The eager 1F1B order: the same bubble, and a micro batch's time for every message."""

from __future__ import annotations

import pytest

from msrun.runtime.parallel.pipeline.schedule import Schedule, build_schedule, eager_order

SIZES = [(ranks, micro_size) for ranks in (2, 3, 4, 8) for micro_size in (2 * ranks, 3 * ranks + 1, 5 * ranks)]


def slack_of_forwards(schedule: Schedule) -> int:
    """Return the least time between the end of a forward pass and the next stage's beginning with its result.

    Without those that every rank begins with, one after the other.
    """
    cells = {(c.action.kind, c.action.stage, c.action.micro_batch): c for row in schedule.timeline for c in row}
    return min(
        cells["F", stage + 1, micro].begin - cell.end
        for (kind, stage, micro), cell in cells.items()
        if kind == "F" and stage + 1 < schedule.stages and micro >= 2 * schedule.ranks - 1
    )


@pytest.mark.parametrize(("ranks", "micro_size"), SIZES)
def test_forwards_arrive_before_they_are_read(ranks: int, micro_size: int) -> None:
    assert slack_of_forwards(build_schedule("1f1b", ranks, 1, micro_size)) == 0
    assert slack_of_forwards(build_schedule("eager_1f1b", ranks, 1, micro_size)) >= 1


@pytest.mark.parametrize(("ranks", "micro_size"), SIZES)
def test_rank_r_begins_with_twice_its_distance_from_the_end(ranks: int, micro_size: int) -> None:
    for rank, row in enumerate(eager_order(ranks, micro_size)):
        kinds = "".join(kind for kind, _, _ in row)
        ahead = 2 * (ranks - rank) - 1
        assert kinds == "F" * ahead + "BF" * (micro_size - ahead) + "B" * ahead


def test_few_micro_batches_all_go_forward_first() -> None:
    assert [kind for kind, _, _ in eager_order(4, 2)[0]] == ["F", "F", "B", "B"]
    assert build_schedule("eager_1f1b", 4, 1, 2).bubble == pytest.approx(3 / 5)
