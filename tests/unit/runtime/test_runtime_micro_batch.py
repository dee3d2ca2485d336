"""Several copies of the batch, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, MicroBatchInterleaved, WithLoss
from msrun.runtime.parallel.batch.parts import split_batch
from msrun.runtime.parallel.scaling import check_compat, part_scale


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2))
def test_slices_are_contiguous_rows_in_order(count: int, rows: int, more_dims: int) -> None:
    value = torch.arange(count * rows * 2**more_dims).reshape(count * rows, *(2,) * more_dims)
    slices = [part for (part,) in split_batch((value,), count)]
    assert all(torch.equal(part, value[i * rows : (i + 1) * rows]) for i, part in enumerate(slices))


def test_numbers_words_and_scalars_go_to_every_slice() -> None:
    number = torch.tensor(3.0)
    first, second = split_batch((torch.ones(4, 2), number, "word", None), 2)
    assert first[1] is second[1] is number
    assert first[2:] == second[2:] == ("word", None)


def test_batch_that_cannot_be_divided_is_refused_with_both_numbers() -> None:
    with pytest.raises(StrategyError, match="a batch of 5 rows on this rank cannot be cut into 2 equal copies; give"):
        split_batch((torch.ones(4, 1), torch.ones(5, 1)), 2)


@pytest.mark.parametrize("number", [0, -1, 1.0, True, "2", None])
def test_number_of_copies_must_be_whole_and_above_0(number: Any) -> None:
    with pytest.raises(StrategyError, match="a whole number above 0"):
        MicroBatchInterleaved(nn.Linear(1, 1), number)


def losses(copies: int, compat: str) -> tuple[Tensor, Tensor]:
    """Return the loss and the weight's gradient."""
    torch.manual_seed(0)
    network = WithLoss(nn.Linear(4, 2), F.mse_loss).double()
    whole = MicroBatchInterleaved(network, copies) if copies else network
    step = AutoParallel(whole, compat=compat)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (4, 2))
    loss = step(x, y)
    loss.backward()
    gradient = network.network.weight.grad
    assert gradient is not None
    return loss.detach(), gradient


@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_mean_of_copies_is_the_loss_of_the_whole_batch(copies: int) -> None:
    torch.testing.assert_close(losses(copies, "torch"), losses(0, "torch"), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_mindspores_sum_of_copies_is_as_many_times_as_large(copies: int) -> None:
    loss, gradient = losses(copies, "mindspore")
    right, right_gradient = losses(0, "torch")
    torch.testing.assert_close((loss, gradient), (right * copies, right_gradient * copies), rtol=1e-12, atol=1e-14)


def test_outside_auto_parallel_the_mean_is_taken() -> None:
    network = WithLoss(nn.Linear(4, 2), F.mse_loss)
    x, y = torch.randn(4, 4), torch.randn(4, 2)
    torch.testing.assert_close(MicroBatchInterleaved(network, 2)(x, y), network(x, y))
    AutoParallel(MicroBatchInterleaved(network, 2), compat="mindspore")(x, y)
    torch.testing.assert_close(MicroBatchInterleaved(network, 2)(x, y), network(x, y))


def test_names_of_parameters_are_the_networks() -> None:
    network = WithLoss(nn.Sequential(nn.Linear(4, 2)), F.mse_loss)
    step = AutoParallel(MicroBatchInterleaved(network, 2))
    assert [name for name, _ in step.named_parameters()] == ["0.weight", "0.bias"]


def test_scale_of_a_part_is_in_one_place() -> None:
    assert [part_scale("torch", n) for n in (1, 2, 4)] == [1.0, 0.5, 0.25]
    assert [part_scale("mindspore", n) for n in (1, 2, 4)] == [1.0, 1.0, 1.0]
    with pytest.raises(StrategyError, match="must be torch"):
        check_compat("jax")
