"""Gradients of a step before they leave: which parameters have one, and what is added up."""

from __future__ import annotations

import pytest
import torch
from placed_parameters import placed
from torch import Tensor

from msrun.runtime.execute.gradients import IN_FLIGHT, GradientGroup, GradientSum, LeavingGradients
from msrun.runtime.sharding.layout import build_mesh


@pytest.fixture
def leaves() -> dict[str, Tensor]:
    return {name: torch.ones(2, requires_grad=True) for name in ("p0", "p1")}


@pytest.fixture
def total(leaves: dict[str, Tensor]) -> GradientSum:
    stored = [placed(name, torch.nn.Parameter(torch.ones(2))) for name in ("first", "second")]
    return GradientSum(GradientGroup(stored, list(leaves), (), build_mesh(1), 0))


def test_parameter_that_no_gradient_flows_to_has_none(total: GradientSum, leaves: dict[str, Tensor]) -> None:
    leaves["p0"].grad = torch.full((2,), 3.0)
    total.add(leaves.__getitem__)
    found = total.finish(leaves.__getitem__).wait()
    assert set(found) == {"first"}
    assert found["first"].tolist() == [3.0, 3.0]
    assert leaves["p0"].grad is None, "it has left"


def test_step_without_any_gradient_gives_none(total: GradientSum, leaves: dict[str, Tensor]) -> None:
    assert total.finish(leaves.__getitem__).wait() == {}


def test_gradients_of_all_parameters_come_by_name(total: GradientSum, leaves: dict[str, Tensor]) -> None:
    for number, leaf in enumerate(leaves.values()):
        leaf.grad = torch.full((2,), float(number))
    found = total.finish(leaves.__getitem__).wait()
    assert {name: grad.tolist() for name, grad in found.items()} == {"first": [0.0, 0.0], "second": [1.0, 1.0]}


def test_held_gradients_are_counted_in_bytes(total: GradientSum, leaves: dict[str, Tensor]) -> None:
    assert total.kept_bytes(leaves.__getitem__) == 0
    leaves["p1"].grad = torch.zeros(2)
    assert total.kept_bytes(leaves.__getitem__) == 8
    assert not total.is_heavy


def test_gradients_are_handed_out_in_the_order_in_which_they_left_with_so_many_on_their_way() -> None:
    handed: list[str] = []
    leaving = LeavingGradients(lambda gradients: handed.extend(gradients))
    for number in range(IN_FLIGHT + 2):
        leaf = torch.ones(2, requires_grad=True)
        leaf.grad = torch.ones(2)
        parameter = torch.nn.Parameter(torch.ones(2))
        stored = placed(f"w{number}", parameter)
        group = GradientGroup([stored], ["p"], (), build_mesh(1), 0)
        leaving.add(GradientSum(group).finish({"p": leaf}.__getitem__))
        assert handed == [f"w{i}" for i in range(number + 1 - IN_FLIGHT)]
    assert leaving.arrive() == {}
    assert handed == [f"w{i}" for i in range(IN_FLIGHT + 2)]
