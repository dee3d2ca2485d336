"""Micro batches: gradient accumulation, and the batch that is divided."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel, GradAccumulation, MicroBatchInterleaved, WithLoss
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.parallel.batch.divided_batch import find_parts, find_wrappers
from msrun.runtime.parallel.batch.parts import BatchParts, PartKind, split_batch
from msrun.runtime.parallel.scaling import Compat, Scales, check_compat, part_scale, scales


def network() -> WithLoss:
    torch.manual_seed(0)
    return WithLoss(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), F.mse_loss).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (4, 2))
    return x.requires_grad_(), y


def outcome(whole: nn.Module, compat: Compat = "torch", incoming: float = 1.0) -> list[Tensor]:
    """Return the loss, the gradient of the input, and those of the parameters."""
    x, y = batch()
    loss = AutoParallel(whole, compat=compat)(x, y)
    (loss * incoming).backward()
    found = [loss.detach(), x.grad, *(parameter.grad for parameter in whole.parameters())]
    return [value for value in found if value is not None]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 12])
def test_loss_and_gradients_are_those_of_the_whole_batch(count: int) -> None:
    torch.testing.assert_close(outcome(GradAccumulation(network(), count)), outcome(network()), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "wrappers", [(GradAccumulation, MicroBatchInterleaved), (MicroBatchInterleaved, GradAccumulation)]
)
def test_wrappers_can_be_nested_either_way(wrappers: Any) -> None:
    outer, inner = wrappers
    torch.testing.assert_close(outcome(outer(inner(network(), 2), 3)), outcome(network()), rtol=1e-12, atol=1e-15)


def test_mindspore_adds_losses_of_micro_batches_up_but_scales_their_gradient() -> None:
    loss, *gradients = outcome(GradAccumulation(network(), 4), "mindspore")
    right_loss, *right = outcome(network())
    torch.testing.assert_close([loss / 4, *gradients], [right_loss, *right], rtol=1e-12, atol=1e-15)


def test_gradients_are_times_the_incoming_one() -> None:
    _, *gradients = outcome(GradAccumulation(network(), 3), incoming=7.0)
    _, *right = outcome(network())
    torch.testing.assert_close([g / 7 for g in gradients], right, rtol=1e-12, atol=1e-15)


def test_one_micro_batch_is_done_before_the_next_begins() -> None:
    whole = network()
    events: list[str] = []

    def note(_module: nn.Module, _args: Any, loss: Tensor) -> None:
        events.append("forward")
        loss.register_hook(lambda _: events.append("backward"))

    whole.register_forward_hook(note)
    GradAccumulation(whole, 3)(*batch())
    assert events == ["forward", "backward"] * 3


def test_hook_of_a_parameter_sees_the_gradient_of_the_batch_once() -> None:
    whole, right, seen = network(), network(), []
    weight, other = (net.network[0].weight for net in (whole, right))  # type: ignore[index, union-attr]
    weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 3)  # type: ignore[func-returns-value]
    for _ in range(2):
        GradAccumulation(whole, 3)(*batch()).backward()
    right(*batch()).backward()
    assert len(seen) == 2
    torch.testing.assert_close(weight.grad, 6 * other.grad, rtol=1e-12, atol=1e-15)


def test_without_gradients_only_forward_passes_run() -> None:
    whole = network()
    trained: list[bool] = []
    whole.register_forward_hook(lambda _module, _args, loss: trained.append(loss.requires_grad))
    with torch.no_grad():
        loss = GradAccumulation(whole, 3)(*batch())
    assert trained == [False] * 3
    assert not loss.requires_grad
    torch.testing.assert_close(loss, whole(*batch()).detach())


def test_hook_of_a_parameter_gets_the_gradient_of_the_whole_batch_once() -> None:
    def with_hook() -> WithLoss:
        whole = network()
        whole.network[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01) * 0.5)  # type: ignore[index, union-attr]
        return whole

    found, right = outcome(GradAccumulation(with_hook(), 3)), outcome(with_hook())
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-15)


def test_gradients_are_handed_out_once_or_as_often_as_the_graph_is_kept() -> None:
    whole = network()
    loss = GradAccumulation(whole, 2)(*batch())
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in whole.parameters() if parameter.grad is not None]
    loss.backward()
    twice = [parameter.grad for parameter in whole.parameters() if parameter.grad is not None]
    torch.testing.assert_close(twice, [2 * gradient for gradient in once])
    with pytest.raises(CaptureError, match="twice on one loss"):
        loss.backward()


def test_loss_must_be_a_scalar_and_come_first() -> None:
    with pytest.raises(StrategyError, match="first result is a tensor of shape \\(6, 8\\): wrap it with its loss"):
        GradAccumulation(nn.Linear(4, 8).double(), 2)(batch()[0])


@pytest.mark.parametrize("number", [0, -1, 1.0, True, "2", None])
def test_number_of_micro_batches_must_be_whole_and_above_0(number: Any) -> None:
    with pytest.raises(StrategyError, match=r"GradAccumulation\(micro_size=.*\): must be a whole number above 0"):
        GradAccumulation(nn.Linear(1, 1), number)


def test_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(StrategyError, match="a batch of 12 rows on this rank cannot be cut into 5 equal micro batches"):
        GradAccumulation(network(), 5)(*batch())


@pytest.mark.parametrize(
    ("compat", "copies", "micro_batches", "right"),
    [
        ("torch", 1, 1, Scales(1.0, 1.0)),
        ("torch", 2, 4, Scales(0.125, 0.125)),
        ("mindspore", 2, 1, Scales(1.0, 1.0)),
        ("mindspore", 1, 4, Scales(1.0, 0.25)),
        ("mindspore", 2, 4, Scales(1.0, 0.25)),
    ],
)
def test_scales_are_in_one_place(compat: Compat, copies: int, micro_batches: int, right: Scales) -> None:
    assert scales(compat, copies, micro_batches) == right


@given(st.lists(st.tuples(st.sampled_from(["copies", "micro batches"]), st.integers(1, 3)), max_size=4))
def test_parts_run_in_the_order_of_the_rows_however_their_wrappers_are_nested(
    divisions: list[tuple[PartKind, int]],
) -> None:
    parts = BatchParts(tuple(divisions))
    rows = torch.arange(parts.total * 2)
    found = [[copy[0] for copy in micro] for micro in parts.split((rows,))]
    assert [len(micro) for micro in found] == [parts.copies] * parts.micro_batches
    assert torch.equal(torch.cat([piece for micro in found for piece in micro]), rows)
    assert torch.equal(torch.cat(parts.in_order(found)), rows)


def trace(function: Any, root: nn.Module) -> Any:
    """Capture a function as AutoParallel does."""
    wrappers = find_wrappers(root)
    rows = 12 // find_parts(wrappers).total
    shapes = [(rows, 4), (rows, 2)]
    return capture(Target(function, root), batch(), {}, input_shapes=shapes, parameter_shapes={}, wrappers=wrappers)


def test_step_that_hands_its_batch_on_is_captured_as_one_part() -> None:
    whole = GradAccumulation(MicroBatchInterleaved(network(), 2), 3)
    graph = trace(lambda x, y: whole(x, y), whole)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names.count("aten.linear.default") == 2
    assert find_parts(find_wrappers(whole)) == BatchParts((("micro batches", 3), ("copies", 2)))


whole = MicroBatchInterleaved(network(), 2)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda x, y: whole(x * 2, y), "is called with tensors that the step has computed"),
        (lambda x, y: whole(x, y) * 2, "the step computes with the result"),
        (lambda x, y: whole(x, y) + whole(x, y), "is called twice in one step"),
        (lambda x, y: whole.network(x, y), "is not called by the step that uses its network"),
    ],
)
def test_step_whose_parts_cannot_be_run_apart_is_refused_in_words(step: Any, text: str) -> None:
    with pytest.raises(StrategyError) as caught:
        trace(step, whole)
    assert text in str(caught.value)


def test_wrappers_side_by_side_are_refused() -> None:
    both = nn.ModuleList([MicroBatchInterleaved(network(), 2), GradAccumulation(network(), 2)])
    with pytest.raises(StrategyError, match="MicroBatchInterleaved and GradAccumulation stand side by side"):
        find_wrappers(both)


def test_every_factorisation_gives_the_same_gradient() -> None:
    right = outcome(network())
    for micro, copies in itertools.product([1, 2, 3], [1, 2]):
        found = outcome(GradAccumulation(MicroBatchInterleaved(network(), copies), micro))
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-15)


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
