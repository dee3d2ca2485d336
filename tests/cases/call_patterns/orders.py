"""Orders of forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from call_patterns.pattern import Calls, assert_close, assert_gradients, batch, both, mine, pattern, refused, seeded
from msrun.errors import CaptureError
from msrun.runtime import AutoParallel
from msrun.runtime.execute.executor import Executor


@pattern
def two_forwards_then_two_backwards_add_up_their_gradients() -> None:
    serial, network, step = both()
    data = [batch(seed=1), batch(seed=2)]
    losses = [step(mine(x), mine(y)) for x, y in data]
    for loss in losses:
        loss.backward()
    for x, y in data:
        F.mse_loss(serial(x), y).backward()
    assert_gradients(network, serial)


@pattern
def backwards_in_the_other_order_give_the_same() -> None:
    serial, network, step = both()
    data = [batch(seed=1), batch(seed=2)]
    first, second = (step(mine(x), mine(y)) for x, y in data)
    second.backward()
    first.backward()
    for x, y in data:
        F.mse_loss(serial(x), y).backward()
    assert_gradients(network, serial)


@pattern
def accumulation_by_hand_equals_one_big_batch() -> None:
    serial, network, step = both()
    x, y = batch(16)
    for part in range(2):
        rows = slice(8 * part, 8 * part + 8)
        (step(mine(x[rows]), mine(y[rows])) / 2).backward()
    F.mse_loss(serial(x), y).backward()
    assert_gradients(network, serial)


@pattern
def sum_of_losses_of_two_forwards_has_one_backward() -> None:
    serial, network, step = both()
    data = [batch(seed=1), batch(seed=2)]
    (step(*map(mine, data[0])) + 3 * step(*map(mine, data[1]))).backward()
    (F.mse_loss(serial(data[0][0]), data[0][1]) + 3 * F.mse_loss(serial(data[1][0]), data[1][1])).backward()
    assert_gradients(network, serial)


@pattern
def forward_under_no_grad_gives_the_loss_and_leaves_nothing_behind() -> None:
    serial, network, step = both()
    x, y = batch()
    with torch.no_grad():
        loss = step(mine(x), mine(y))
    assert_close(loss, F.mse_loss(serial(x), y).detach())
    assert not loss.requires_grad
    assert all(parameter.grad is None for parameter in network.parameters())


@pattern
def forward_under_no_grad_keeps_no_activations() -> None:
    _, _, step = both()
    x, y = batch()
    step(mine(x), mine(y))
    seen: list[bool] = []
    original = Executor.forward

    def forward(self: Executor, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["needs_grad"])
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "forward", forward)
        with torch.no_grad():
            step(mine(x), mine(y))
        step(mine(x), mine(y))
    assert seen == [False, True]


@pattern
def loss_that_is_never_used_disturbs_nothing() -> None:
    serial, network, step = both()
    x, y = batch()
    step(mine(x), mine(y))
    step(mine(x), mine(y)).backward()
    F.mse_loss(serial(x), y).backward()
    assert_gradients(network, serial)


@pattern
def second_backward_of_one_loss_is_refused_in_words() -> None:
    _, _, step = both()
    loss = step(*map(mine, batch()))
    loss.backward()
    text = refused(CaptureError, loss.backward)
    assert "backward() was called twice on one loss" in text


class _TwoLosses(nn.Module):
    """Two losses of one call, which draws random numbers and writes a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(torch.tanh(self.layer(x)), 0.3) - self.mean
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.5)
        out = self.head(h)
        return F.mse_loss(out, y), out.square().mean()


@pattern
def passes_of_two_losses_that_keep_the_graph_add_up() -> None:
    x, y = batch()
    found = []
    for keeps in (True, False):
        network = seeded(_TwoLosses)
        step = AutoParallel(network).hsdp(threshold=0, optimizer_level="level3")
        for _ in range(2):
            first, second = step(mine(x), mine(y))
            if keeps:
                first.backward(retain_graph=True)
                second.backward()
            else:
                (first + second).backward()
            torch.optim.SGD(network.parameters(), 0.1).step()
            network.zero_grad()
        found.append({name: value.clone() for name, value in step.state_dict().items()})
    for name, value in found[0].items():
        assert_close(value, found[1][name])


@pattern
def pass_that_kept_the_graph_sees_a_parameter_that_was_written_since() -> None:
    _, network, step = both()
    loss = step(*map(mine, batch()))
    loss.backward(retain_graph=True)
    with torch.no_grad():
        next(network.parameters()).mul_(2)
    assert "written between two backward passes" in refused(CaptureError, loss.backward)


@pattern
def evaluation_takes_another_batch_size_after_training() -> None:
    serial, network, step = both()
    optimizer, right = (torch.optim.SGD(n.parameters(), 0.1) for n in (network, serial))
    x, y = batch()
    step(mine(x), mine(y)).backward()
    F.mse_loss(serial(x), y).backward()
    optimizer.step()
    right.step()
    step.eval()
    assert not network.training
    x, y = batch(20, seed=3)
    with torch.no_grad():
        assert_close(step(mine(x), mine(y)), F.mse_loss(serial(x), y).detach())
    step.train()
    optimizer.zero_grad()
    right.zero_grad()
    step(mine(x), mine(y)).backward()
    F.mse_loss(serial(x), y).backward()
    assert_gradients(network, serial)


@pattern
def mode_of_a_part_is_seen_at_the_next_call() -> None:
    network = Calls(
        lambda s, x: s.drop(s.layer(x)).pow(2).mean(), layer=seeded(lambda: nn.Linear(16, 4)), drop=nn.Dropout(0.5)
    )
    x, _ = batch()
    step = AutoParallel(network)
    torch.manual_seed(3)
    step(mine(x))
    network.drop.eval()
    assert_close(step(mine(x)).detach(), network.layer(x).pow(2).mean().detach())
