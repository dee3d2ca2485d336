"""The expanded cross-entropy: the numbers of its formula, also where that overflows; cut classes are not gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import SoftmaxCrossEntropyExpand, WithLoss, shard
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.partition.partition import partition
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.sharding.layout import TensorLayout, build_mesh

SCORES = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.tensor([0, 3, 1, 1, 2, 0, 3, 2])


def expanded(logit: Tensor, label: Tensor) -> Tensor:
    """MindSpore's small operators."""
    exponentials = (logit - logit.amax(-1, keepdim=True)).exp()
    logarithms = (exponentials / exponentials.sum(-1, keepdim=True)).log()
    return -(logarithms * F.one_hot(label, logit.shape[1])).sum(-1).mean(-1)


def test_loss_of_class_numbers_and_of_one_hot_rows_is_the_expanded_formula() -> None:
    right = expanded(SCORES, LABELS)
    assert torch.allclose(SoftmaxCrossEntropyExpand(sparse=True)(SCORES, LABELS), right)
    assert torch.allclose(SoftmaxCrossEntropyExpand()(SCORES, F.one_hot(LABELS, 4)), right)


def test_large_scores_give_a_number_where_the_formula_gives_none() -> None:
    scores = 1e4 * SCORES
    assert not expanded(scores, LABELS).isfinite()
    loss = SoftmaxCrossEntropyExpand(sparse=True)(scores, LABELS)
    assert torch.allclose(loss, (scores.amax(1) - scores.gather(1, LABELS[:, None])[:, 0]).mean())


def test_smoothing_ignored_samples_and_reductions_are_torchs() -> None:
    loss = SoftmaxCrossEntropyExpand(sparse=True, label_smoothing=0.1, ignore_index=3, reduction="sum")
    right = F.cross_entropy(SCORES, LABELS, ignore_index=3, label_smoothing=0.1, reduction="sum")
    assert torch.equal(loss(SCORES, LABELS), right)


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def partitioned(strategy: Any, *, sparse: bool) -> LocalProgram:
    network = WithLoss(Identity(), SoftmaxCrossEntropyExpand(sparse=sparse))
    shard(network.loss_fn, strategy)  # type: ignore[arg-type]
    inputs = [SCORES, LABELS if sparse else F.one_hot(LABELS, 4)]
    shapes = [tuple(value.shape) for value in inputs]
    graph = capture(find_target(network), inputs, {}, input_shapes=shapes, parameter_shapes={})
    layouts = [TensorLayout.replicated(len(shape)) for shape in shapes]
    return partition(
        graph, build_mesh(4), input_layouts=layouts, strategies=strategies_of(network), output_batch_axes=()
    )


@pytest.mark.parametrize(("sparse", "label"), [(True, (2,)), (False, (2, 2))])
def test_samples_and_classes_may_both_be_cut_and_scores_are_never_gathered(sparse: bool, label: Any) -> None:
    program = partitioned(((2, 2), label), sparse=sparse)
    loss = next(operator for operator in program.operators if operator.origin == "user")
    assert loss.strategy == ((2, 2), label)
    gathers = [text for text in loss.collectives if text.startswith("gather")]
    assert gathers == ["gather dim 1 over axes 1"], "the largest score of every row and part"
    assert [text for text in loss.collectives if text.startswith("all_reduce")] == [
        "all_reduce over axes 1",
        *(["all_reduce over axes 0,1"] if sparse else []),  # the number of labels that count
        "all_reduce over axes 0,1",
    ]


def test_cut_that_does_not_fit_names_the_dimension() -> None:
    with pytest.raises(StrategyError, match="dimension 1 of input 0 has size 4, which 3 does not divide"):
        partitioned(((1, 3), (1,)), sparse=True)
