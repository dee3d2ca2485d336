"""Pipeline in one process, and what may be asked of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, MicroBatchInterleaved, Pipeline, WithLoss, load_checkpoint, save_checkpoint
from msrun.runtime.groups import _named_after_ranks
from msrun.runtime.parallel.batch.parts import join_values
from msrun.runtime.parallel.pipeline.pipeline import PipelineSpec


def losses(micro_size: int, compat: str, copies: int = 1) -> tuple[Tensor, Tensor]:
    """Return the loss and the weight's gradient."""
    torch.manual_seed(0)
    network = WithLoss(nn.Linear(4, 2), F.mse_loss).double()
    whole: nn.Module = MicroBatchInterleaved(network, copies) if copies > 1 else network
    step = AutoParallel(Pipeline(whole, micro_size) if micro_size else whole, compat=compat)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (4, 2))
    loss = step.pipeline(2)(x, y) if micro_size else step(x, y)
    loss.backward()
    gradient = network.network.weight.grad
    assert gradient is not None
    return loss.detach(), gradient


@pytest.mark.parametrize("micro_size", [1, 2, 3, 6])
def test_mean_of_micro_batches_is_the_loss_of_the_whole_batch(micro_size: int) -> None:
    torch.testing.assert_close(losses(micro_size, "torch"), losses(0, "torch"), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("micro_size", [1, 2, 3, 6])
def test_mindspores_loss_is_the_sum_of_micro_batches_and_its_gradient_the_means(micro_size: int) -> None:
    loss, gradient = losses(micro_size, "mindspore")
    right, right_gradient = losses(0, "torch")
    torch.testing.assert_close((loss, gradient), (right * micro_size, right_gradient), rtol=1e-12, atol=1e-14)


def test_copies_inside_micro_batches_are_added_up_for_mindspore_with_their_gradients() -> None:
    loss, gradient = losses(3, "mindspore", copies=2)
    right, right_gradient = losses(0, "torch")
    torch.testing.assert_close((loss, gradient), (right * 6, right_gradient * 2), rtol=1e-12, atol=1e-14)


def test_results_that_are_no_scalars_are_joined_by_rows() -> None:
    network = nn.Linear(3, 2)
    x = torch.randn(6, 3)
    with torch.no_grad():
        torch.testing.assert_close(Pipeline(network, 3)(x), network(x))
    assert float(join_values([torch.tensor(1), torch.tensor(2)], 0.5)) == 1.5
    assert join_values(["word", "word"], 0.5) == "word"
    assert join_values([torch.ones(1, 2), torch.zeros(1, 2)], 0.5).tolist() == [[1, 1], [0, 0]]


def test_tensors_given_by_name_are_cut_too() -> None:
    x, y = torch.randn(6, 3), torch.randn(6, 3)
    torch.testing.assert_close(Pipeline(nn.PairwiseDistance(), 2)(x, x2=y), nn.PairwiseDistance()(x, y))


def test_names_of_parameters_and_of_checkpoints_are_the_networks(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 2))
    step = AutoParallel(Pipeline(WithLoss(network, F.mse_loss), 2))
    assert [name for name, _ in step.named_parameters()] == ["0.weight", "0.bias"]
    path = save_checkpoint(step, tmp_path / "saved")
    assert {name for name in load_checkpoint(path) if "weight" in name or "bias" in name} == {"0.weight", "0.bias"}


@pytest.mark.parametrize("number", [0, -1, 1.0, True, "2", None])
def test_number_of_micro_batches_must_be_whole_and_above_0(number: Any) -> None:
    with pytest.raises(StrategyError, match=r"Pipeline\(micro_size=.*\): must be a whole number above 0"):
        Pipeline(nn.Linear(1, 1), number)


@pytest.mark.parametrize("stage", [-1, 1.0, True, "0"])
def test_stage_of_a_module_must_be_a_whole_number(stage: Any) -> None:
    with pytest.raises(StrategyError, match=r"stage_config\['weight'\] = .*: must be a whole number, 0 or more"):
        Pipeline(nn.Linear(1, 1), 1, {"weight": stage})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": 0}, r"pipeline\(stages=0\): must be a whole number above 0"),
        ({"stages": True}, r"pipeline\(stages=True\): must be a whole number above 0"),
        ({"interleave": 1}, r"pipeline\(interleave=1\): must be True or False"),
        ({"output_broadcast": "yes"}, r"pipeline\(output_broadcast='yes'\): must be True or False"),
        ({"scheduler": "1f1"}, r"did you mean 1f1b"),
        ({"scheduler": "gpipe", "interleave": True}, r"use \"1f1b\" or \"zero_bubble\" with it"),
    ],
)
def test_wrong_setting_is_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        AutoParallel(nn.Linear(1, 1)).pipeline(**settings)


def test_world_must_divide_into_stages() -> None:
    assert PipelineSpec(stages=4).ranks_per_stage(8) == 2
    with pytest.raises(StrategyError, match="8 ranks cannot be divided into 3 equal stages"):
        PipelineSpec(stages=3).ranks_per_stage(8)


def test_groups_that_members_make_are_named_after_their_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own name depends on how many groups the process has made, which differs between ranks. When the first
    assertion fails torch has mended it: take member_groups away."""
    name = distributed_c10d._hash_ranks_to_str([0, 1])
    monkeypatch.setitem(distributed_c10d._world.pg_names, object(), "another")  # type: ignore[misc]
    monkeypatch.setattr(distributed_c10d._world, "group_count", distributed_c10d._world.group_count + 1)
    assert distributed_c10d._hash_ranks_to_str([0, 1]) != name
    with _named_after_ranks():
        assert distributed_c10d._process_group_name([0, 1], use_hashed_name=True) == "members-0-1"
    assert distributed_c10d._hash_ranks_to_str([0, 1]) != "members-0-1"
