"""AutoParallel as an nn.Module, in one process: everything that a training loop does to one, under the user's names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, GradAccumulation, MicroBatchInterleaved, Pipeline, WithLoss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x))


WRAPPED: dict[str, Any] = {
    "alone": lambda net: net,
    "with its loss": lambda net: WithLoss(net, nn.MSELoss()),
    "accumulating": lambda net: GradAccumulation(WithLoss(net, nn.MSELoss()), 2),
    "copies of micro batches": lambda net: MicroBatchInterleaved(GradAccumulation(WithLoss(net, nn.MSELoss()), 2), 2),
    "pipeline": lambda net: Pipeline(WithLoss(net, nn.MSELoss()), 2),
}


@pytest.mark.parametrize("way", WRAPPED)
def test_names_are_the_users_own(way: str) -> None:
    net = Net()
    step = AutoParallel(WRAPPED[way](net))
    for list_of in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        mine, right = (dict(getattr(module, list_of)()) for module in (step, net))
        assert list(mine) == list(right)
        assert all(mine[name] is right[name] for name in right)
    assert list(step.state_dict()) == list(net.state_dict())
    assert step.get_parameter("fc.weight") is step.fc.weight is net.fc.weight


def test_everything_a_loop_does_to_a_module_reaches_the_network() -> None:
    net = Net()
    step = AutoParallel(WithLoss(net, nn.MSELoss()))
    assert isinstance(step, nn.Module)
    step.eval()
    assert not net.training
    assert not net.norm.training
    net.train()
    assert step.training
    step.apply(lambda module: nn.init.zeros_(module.weight) if type(module) is nn.Linear else None)
    assert not net.fc.weight.any()
    step.double().requires_grad_(requires_grad=False)
    assert net.fc.weight.dtype == net.norm.running_mean.dtype == torch.float64
    assert not any(parameter.requires_grad for parameter in net.parameters())
    step.requires_grad_()
    x = torch.rand(4, 4, dtype=torch.float64)
    step(x, torch.rand(4, 3, dtype=torch.float64)).backward()
    assert net.fc.weight.grad is not None
    step.zero_grad()
    assert net.fc.weight.grad is None


def test_hooks_run_at_every_call() -> None:
    step = AutoParallel(WithLoss(Net(), nn.MSELoss()))
    seen: list[str] = []
    step.register_forward_pre_hook(lambda *_: seen.append("before"))
    handle = step.register_forward_hook(lambda *_: seen.append("after"))
    x, y = torch.rand(4, 4), torch.rand(4, 3)
    step(x, y)
    step(x, y)
    handle.remove()
    step(x, y)
    assert seen == ["before", "after", "before", "after", "before"]


def test_state_of_another_network_loads_and_its_mistakes_are_named() -> None:
    step, other = AutoParallel(WithLoss(Net(), nn.MSELoss())), Net()
    assert not any(step.load_state_dict(other.state_dict()))
    assert torch.equal(step.fc.weight, other.fc.weight)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*more"):
        step.load_state_dict({**other.state_dict(), "more": torch.zeros(1)})
    found = step.load_state_dict({}, strict=False)
    assert "fc.weight" in found.missing_keys


def test_loss_with_a_state_is_part_of_the_state() -> None:
    step = AutoParallel(WithLoss(Net(), nn.CrossEntropyLoss(weight=torch.arange(3.0))))
    state = step.state_dict()
    assert torch.equal(state["loss_fn.weight"], torch.arange(3.0))
    step.load_state_dict({**state, "loss_fn.weight": torch.ones(3)})
    assert torch.equal(dict(step.named_buffers())["loss_fn.weight"], torch.ones(3))


def test_module_inside_a_module_keeps_its_place() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = AutoParallel(WithLoss(Net(), nn.MSELoss())), nn.Linear(3, 2)

    outer = Outer()
    names = [f"body.{name}" for name in Net().state_dict()]
    assert list(outer.state_dict()) == [*names, "head.weight", "head.bias"]
    outer.load_state_dict({name: value * 0 for name, value in outer.state_dict().items()})
    assert not outer.body.fc.weight.any()
    outer.half()
    assert outer.body.fc.weight.dtype == torch.float16


def test_copies_have_a_network_of_their_own_and_the_same_settings() -> None:
    net = Net()
    net.fc.weight.parallel_optimizer = False  # type: ignore[attr-defined]
    step = AutoParallel(WithLoss(net, nn.MSELoss()), compat="mindspore").hsdp(threshold=7)
    seen: list[int] = []
    step.register_forward_hook(lambda *_: seen.append(1))
    copied = copy.deepcopy(step)
    assert copied.settings == step.settings
    assert copied.network is not step.network
    assert copied.fc.weight is not net.fc.weight
    assert copied.fc.weight.parallel_optimizer is False
    copied(torch.rand(4, 4), torch.rand(4, 3))
    assert seen == [1]
    average = AveragedModel(step)
    average.update_parameters(step)
    assert list(average.module.state_dict()) == list(net.state_dict())


def test_no_sync_works_from_the_first_line() -> None:
    net, right = Net(), Net()
    right.load_state_dict(net.state_dict())
    x, y = torch.rand(4, 4), torch.rand(4, 3)
    for mode in ("semi_auto", "data_parallel", "stand_alone"):
        step = AutoParallel(WithLoss(net, nn.MSELoss()), mode)
        with step.no_sync():
            step(x, y).backward()
        step(x, y).backward()
    for _ in range(6):
        nn.functional.mse_loss(right(x), y).backward()
    assert net.fc.weight.grad is not None
    assert right.fc.weight.grad is not None
    torch.testing.assert_close(net.fc.weight.grad, right.fc.weight.grad)


def test_step_function_has_no_tensors_of_its_own() -> None:
    step = AutoParallel(lambda x: x)
    for ask in (step.parameters, step.state_dict, step.zero_grad, lambda: step.load_state_dict({}), step.half):
        with pytest.raises(StrategyError, match=r"AutoParallel of a step function has no .* ask the network"):
            list(ask())  # type: ignore[call-overload, operator]


def test_two_around_one_network_are_refused() -> None:
    with pytest.raises(StrategyError, match="wrap the whole network, once"):
        AutoParallel(WithLoss(AutoParallel(Net()), nn.MSELoss()))  # type: ignore[arg-type]
