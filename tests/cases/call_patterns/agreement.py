"""Ranks that do not agree: seeds, weights, buffers, shapes, an error on one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from call_patterns.pattern import (
    WORLD_SIZE,
    Calls,
    Mlp,
    assert_close,
    batch,
    both,
    everywhere,
    mine,
    pattern,
    refused,
    seeded,
)
from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel, MicroBatchInterleaved, Pipeline, WithLoss, get_rank, no_init_parameters
from msrun.runtime.parallel.compilation import compilation


@pattern
def ranks_with_different_seeds_train_one_network() -> None:
    torch.manual_seed(10 + get_rank())
    with no_init_parameters():
        network = Mlp()
    step = AutoParallel(WithLoss(network, F.mse_loss)).hsdp(threshold=0)
    serial = seeded(Mlp, seed=10)
    x, y = batch()
    assert_close(step(mine(x), mine(y)).detach(), F.mse_loss(serial(x), y).detach())
    assert any("different random seeds" in note for note in step.plan.notes)


@pattern
def ranks_that_seed_inside_the_block_train_one_network() -> None:
    torch.manual_seed(0)
    with no_init_parameters():
        network = seeded(Mlp, seed=10 + get_rank())
    step = AutoParallel(WithLoss(network, F.mse_loss))
    serial = seeded(Mlp, seed=10)
    x, y = batch()
    assert_close(step(mine(x), mine(y)).detach(), F.mse_loss(serial(x), y).detach())
    assert torch.equal(network.layer1.weight, serial.layer1.weight)


@pattern
def ranks_with_different_eager_weights_train_rank_0s() -> None:
    network = seeded(Mlp, seed=20 + get_rank())
    serial = seeded(Mlp, seed=20)
    step = AutoParallel(WithLoss(network, F.mse_loss)).hsdp(threshold=0)
    x, y = batch()
    assert_close(step(mine(x), mine(y)).detach(), F.mse_loss(serial(x), y).detach())
    assert any("differed between ranks" in note for note in step.plan.notes)


@pattern
def ranks_with_different_buffers_use_rank_0s() -> None:
    network = seeded(lambda: Calls(lambda s, x: (s.layer(x) * s.scale).mean(), layer=nn.Linear(16, 4)))
    network.register_buffer("scale", torch.full((4,), 1.0 + get_rank()))
    serial = seeded(lambda: nn.Linear(16, 4))
    x, _ = batch()
    losses = everywhere(float(AutoParallel(network)(mine(x)).detach()))
    assert_close(losses[0], float(serial(x).mean().detach()))
    assert losses == [losses[0]] * WORLD_SIZE


@pattern
def no_note_is_made_when_all_ranks_agree() -> None:
    _, _, step = both()
    step(*map(mine, batch()))
    assert step.plan.notes == ()


@pattern
def dropout_gives_all_ranks_one_loss_and_one_gradient_whatever_their_seeds() -> None:
    network = seeded(lambda: Calls(lambda s, x: F.dropout(s.layer(x), 0.5).pow(2).mean(), layer=nn.Linear(16, 4)))
    step = AutoParallel(network)
    torch.manual_seed(30 + get_rank())
    x, _ = batch()
    for _ in range(2):
        loss = step(mine(x))
        loss.backward()
        assert len(set(everywhere(float(loss.detach())))) == 1
    gradients = everywhere(network.layer.weight.grad)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@pattern
def different_batch_shapes_at_the_first_call_are_refused() -> None:
    _, _, step = both()
    x, y = batch(rows=2 + get_rank())
    text = refused(CaptureError, step, x, y)
    assert "rank 1" in text
    assert "batches of one shape" in text


@pattern
def error_on_one_rank_is_told_to_the_others() -> None:
    network = seeded(Mlp)
    step = AutoParallel(MicroBatchInterleaved(WithLoss(network, F.mse_loss), 2))
    x, y = batch(rows=3 if get_rank() == 2 else 4)
    kind = StrategyError if get_rank() == 2 else CaptureError
    text = refused(kind, step, x, y)
    assert "a batch of 3 rows on this rank cannot be cut into 2 equal copies" in text
    assert get_rank() == 2 or text.startswith("rank 2 cannot run this call")


@pattern
def failure_after_the_programs_were_compared_is_told_to_the_others() -> None:
    def fail(*_args: Any, **_named: Any) -> Any:
        raise KeyError("planted")

    wrappers: list[Callable[[nn.Module], AutoParallel]] = [
        lambda network: AutoParallel(network).hsdp(threshold=0),
        lambda network: AutoParallel(Pipeline(network, 2)).pipeline(stages=2),
    ]
    for wrap in wrappers:
        step = wrap(WithLoss(seeded(Mlp), F.mse_loss))
        x, y = batch()
        with pytest.MonkeyPatch.context() as patch:
            if get_rank() == 1:
                patch.setattr(compilation, "build_compiled_call", fail)
            text = refused(KeyError if get_rank() == 1 else CaptureError, step, mine(x), mine(y))
        assert get_rank() == 1 or text == "rank 1 cannot run this call: KeyError: 'planted'"
