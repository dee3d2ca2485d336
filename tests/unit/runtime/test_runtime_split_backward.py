"""The backward pass in two parts gives the gradients of one, for the same work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from msrun.runtime.graph.split_backward import start_backward

Segment = Callable[[list[Tensor], list[Tensor]], list[Tensor]]


def _mlp(x: list[Tensor], w: list[Tensor]) -> list[Tensor]:
    return [F.linear(torch.tanh(F.linear(x[0], w[0], w[2][0])), w[1])]


def _two_inputs_two_results(x: list[Tensor], w: list[Tensor]) -> list[Tensor]:
    shared = x[0] @ w[0] + x[1] @ w[1]
    return [shared.relu(), (shared * x[1]).sum()]


def _weight_used_twice(x: list[Tensor], w: list[Tensor]) -> list[Tensor]:
    return [torch.tanh(x[0] @ w[0]) @ w[0]]


def _weight_also_apart_from_inputs(x: list[Tensor], w: list[Tensor]) -> list[Tensor]:
    return [x[0] @ w[0], (w[0] * w[1]).sum()]


def _penalty_joins_the_loss(x: list[Tensor], w: list[Tensor]) -> list[Tensor]:
    return [(x[0] @ w[0]).square().sum() + w[0].norm() + w[1].sum()]


def _weights_joined_before_use(x: list[Tensor], w: list[Tensor]) -> list[Tensor]:
    return [x[0] @ torch.cat([w[0][:2], w[1][2:]])]


def _residual(x: list[Tensor], w: list[Tensor]) -> list[Tensor]:
    h = x[0]
    for weight in w:
        h = h + torch.tanh(h @ weight)
    return [h, h.mean()]


def _view(x: list[Tensor], w: list[Tensor]) -> list[Tensor]:
    return [(x[0] @ w[0]).view(-1).view(2, -1).t()]


def _normed(x: list[Tensor], w: list[Tensor]) -> list[Tensor]:
    return [F.layer_norm(x[0] @ w[0], (4,), w[1][0], w[2][0])]


def _results_of_weights_alone(x: list[Tensor], w: list[Tensor]) -> list[Tensor]:
    return [w[0] @ w[1], w[2].sum()]


def _result_of_inputs_alone(x: list[Tensor], w: list[Tensor]) -> list[Tensor]:
    return [x[0] * 2, x[1] @ w[0]]


SEGMENTS = [
    _mlp, _two_inputs_two_results, _weight_used_twice, _weight_also_apart_from_inputs, _penalty_joins_the_loss,
    _weights_joined_before_use, _residual, _view, _normed, _results_of_weights_alone, _result_of_inputs_alone,
]  # fmt: skip


def leaves(count: int, seed: int, *, requires_grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 4, generator=generator, dtype=torch.float64).requires_grad_(requires_grad) for _ in range(count)]  # fmt: skip  # noqa: E501


def run(segment: Segment, *, splits: bool, with_inputs: bool = True) -> tuple[list[Tensor | None], int]:
    """Return the gradients of inputs and weights, added to some that were there, and the operations it took."""
    inputs, weights = leaves(2, 1, requires_grad=with_inputs), leaves(3, 2)
    for leaf in weights:
        leaf.grad = torch.ones_like(leaf)
    results = segment(inputs, weights)
    gradients = [torch.randn(r.shape, generator=torch.Generator().manual_seed(3), dtype=r.dtype) for r in results]
    pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
    with FlopCounterMode(display=False) as counter:
        if splits:
            wanted = [leaf for leaf in inputs if leaf.requires_grad]
            left = start_backward([r for r, _ in pairs], [g for _, g in pairs], wanted, weights)
            for leaf in weights:
                assert torch.equal(leaf.grad if leaf.grad is not None else leaf, torch.ones_like(leaf)), "too early"
            left.run()
        else:
            torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
    return [leaf.grad for leaf in [*inputs, *weights]], counter.get_total_flops()


@pytest.mark.parametrize("with_inputs", [True, False], ids=["inputs", "no-inputs"])
@pytest.mark.parametrize("segment", SEGMENTS)
def test_both_parts_together_give_the_gradients_of_one_backward_pass(segment: Segment, with_inputs: bool) -> None:
    found, _ = run(segment, splits=True, with_inputs=with_inputs)
    right, _ = run(segment, splits=False, with_inputs=with_inputs)
    for mine, expected in zip(found, right, strict=True):
        assert (mine is None) == (expected is None)
        if mine is not None and expected is not None:
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("segment", [segment for segment in SEGMENTS if segment is not _weight_used_twice])
def test_no_matrix_product_is_computed_twice(segment: Segment) -> None:
    """Except from one use of a weight to another use of it: the second part goes that way again."""
    assert run(segment, splits=True)[1] == run(segment, splits=False)[1]


def test_second_part_runs_once() -> None:
    inputs, weights = leaves(1, 1), leaves(1, 2)
    (result,) = _view(inputs, weights)
    left = start_backward([result], [torch.ones_like(result)], inputs, weights)
    left.run()
    before = weights[0].grad
    assert before is not None
    kept = before.clone()
    left.run()
    assert torch.equal(before, kept)
