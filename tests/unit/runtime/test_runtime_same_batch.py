"""When ranks are expected to pass different batches, and what tells two batches apart."""

from __future__ import annotations

import pytest
import torch

from msrun.runtime import world
from msrun.runtime.parallel.batch import same_batch
from msrun.runtime.parallel.pipeline.pipeline import PipelineSpec
from msrun.runtime.parallel.settings import ParallelSettings


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ParallelSettings(), True),
        (ParallelSettings("data_parallel"), True),
        (ParallelSettings("hybrid_parallel"), False),
        (ParallelSettings("stand_alone"), False),
        (ParallelSettings(dataset_strategy="full_batch"), False),
        (ParallelSettings(dataset_strategy=((1, 1),)), False),
        (ParallelSettings(pipeline=PipelineSpec(stages=2)), True),
        (ParallelSettings(pipeline=PipelineSpec(stages=4)), False),
    ],
)
def test_ranks_of_a_stage_that_share_a_batch_are_expected_to_pass_parts_of_it(
    monkeypatch: pytest.MonkeyPatch, settings: ParallelSettings, expected: bool
) -> None:
    monkeypatch.setattr(world, "get_group_size", lambda: 4)
    assert same_batch._is_divided(settings) is expected


def test_a_process_alone_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "get_group_size", lambda: 1)
    assert not same_batch._is_divided(ParallelSettings())
    assert not same_batch._is_divided(ParallelSettings("data_parallel"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_batches_that_differ_in_one_element_or_in_order_are_told_apart(dtype: torch.dtype) -> None:
    batch = torch.eye(4).to(dtype)
    changed = batch.clone()
    changed[3, 3] = 0
    batches = [[batch], [changed], [batch.flip(0)], [batch, batch[:, 0]], [batch[:, :1], batch[0, 0]]]
    assert len({same_batch._digest(tensors) for tensors in batches}) == len(batches)
    assert same_batch._digest([batch.clone()]) == same_batch._digest([batch])


def test_of_a_large_batch_the_first_rows_count() -> None:
    batch = torch.zeros(2000, 1000)
    assert same_batch._digest([batch]) != same_batch._digest([batch.index_fill(0, torch.tensor([0]), 1.0)])
