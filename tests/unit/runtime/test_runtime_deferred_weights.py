"""Weights' gradients that are computed after those of the inputs are the same gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from msrun.runtime.schedule.deferred_weights import (
    add_deferred_weights,
    compute_deferred_weights,
    deferring_addmm,
    deferring_linear,
    deferring_matmul,
    forget_deferred_weights,
    take_deferred_weights,
)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    forget_deferred_weights()


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def _gradients(linear: object, leaves: list[Tensor]) -> list[Tensor | None]:
    assert callable(linear)
    x, first, bias, second = leaves
    hidden = torch.tanh(linear(x, first, bias))
    (linear(hidden, second) + linear(hidden, second)).square().sum().backward()  # one weight, twice
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("rows", [(5,), (2, 3), (2, 1, 4)])
def test_gradients_are_those_of_autograd(rows: tuple[int, ...]) -> None:
    shapes = ((*rows, 4), (6, 4), (6,), (3, 6))
    expected = _gradients(F.linear, _leaves(*shapes))
    leaves = _leaves(*shapes)
    found = _gradients(deferring_linear, leaves)
    assert found[1:] == [None, None, None]
    torch.testing.assert_close(found[0], expected[0])
    compute_deferred_weights()
    for leaf, right in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, right)


def test_gradients_are_added_to_those_of_the_batch_before() -> None:
    leaves = _leaves((5, 4), (6, 4), (6,), (3, 6))
    _gradients(deferring_linear, leaves)
    compute_deferred_weights()
    once = [leaf.grad.clone() for leaf in leaves[1:] if leaf.grad is not None]
    _gradients(deferring_linear, leaves)
    compute_deferred_weights()
    for leaf, right in zip(leaves[1:], once, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * right)


def test_gradients_under_the_callers_own_autocast_are_those_of_autograd() -> None:
    found = []
    for linear in (F.linear, deferring_linear):
        leaves = [leaf.detach().float().requires_grad_() for leaf in _leaves((5, 4), (6, 4), (6,), (3, 6))]
        with torch.autocast("cpu", torch.bfloat16):
            x, first, bias, second = leaves
            loss = linear(torch.tanh(linear(x, first, bias)), second).float().square().sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
            compute_deferred_weights()
        found.append([leaf.grad for leaf in leaves])
    for late, right in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(late, right, rtol=2e-2, atol=2e-2)


def test_frozen_weights_and_inputs_without_gradient_get_none() -> None:
    x, weight, bias = _leaves((5, 4), (6, 4), (6,))
    x.requires_grad_(requires_grad=False)
    weight.requires_grad_(requires_grad=False)
    deferring_linear(x, weight, bias).sum().backward()
    compute_deferred_weights()
    assert x.grad is None
    assert weight.grad is None
    assert bias.grad is not None
    assert bias.grad.tolist() == [5.0] * 6


def test_what_a_failed_backward_pass_left_is_not_added_later() -> None:
    x, weight, bias = _leaves((5, 4), (6, 4), (6,))
    deferring_linear(x, weight, bias).sum().backward()
    forget_deferred_weights()
    compute_deferred_weights()
    assert weight.grad is None


@pytest.mark.parametrize("form", ["matmul", "addmm"])
def test_weights_that_lie_the_other_way_round(form: str) -> None:
    found = []
    for is_late in (False, True):
        x, weight, bias = leaves = _leaves((5, 4), (4, 6), (6,))
        if form == "matmul":
            result = deferring_matmul(x, weight) if is_late else x @ weight
        else:
            result = deferring_addmm(bias, x, weight) if is_late else torch.addmm(bias, x, weight)
        result.square().sum().backward()
        compute_deferred_weights()
        found.append([leaf.grad for leaf in leaves])
    for late, right in zip(found[1], found[0], strict=True):
        assert (late is None) == (right is None)
        if late is not None:
            torch.testing.assert_close(late, right)


def test_what_is_taken_is_the_callers_to_add_once() -> None:
    x, weight = _leaves((5, 4), (6, 4))
    deferring_linear(x, weight).sum().backward()
    taken = take_deferred_weights()
    compute_deferred_weights()
    assert weight.grad is None
    add_deferred_weights(taken)
    right = x.detach().sum(0).expand(6, 4)
    torch.testing.assert_close(weight.grad, right)
