"""What cannot be captured or cut is refused, each with the way out."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from call_patterns.pattern import (
    Calls,
    assert_close,
    assert_gradients,
    batch,
    everywhere,
    mine,
    pattern,
    refused,
    seeded,
)
from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel, Pipeline, WithLoss


@pattern
def constructs_that_cannot_be_captured_name_the_mode_that_needs_no_capture() -> None:
    x, _ = batch()
    branching = Calls(lambda s, x: s.layer(x).mean() if x.sum() > 0 else s.layer(x).sum(), layer=nn.Linear(16, 4))
    counting = Calls(lambda s, x: s.norm(x).mean(), norm=nn.BatchNorm1d(16, momentum=None))
    number = Calls(lambda s, x: s.layer(x).mean() * x.max().item(), layer=nn.Linear(16, 4))
    hooked = Calls(lambda s, x: s.layer(x).mean(), layer=nn.Linear(16, 4))
    hooked.layer.register_full_backward_hook(lambda _module, _into, _out: None)
    writing = Calls(lambda s, x: s.layer(x.mul_(2)).mean(), layer=nn.Linear(16, 4))
    for network in (branching, counting, number, hooked, writing):
        text = refused(CaptureError, AutoParallel(network), mine(x))
        assert "data_parallel" in text, text


def _write_column(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


@pattern
def error_that_the_network_raises_is_told_with_its_line() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if x.shape[1] != 3:
            raise ValueError(f"3 columns are expected, not {x.shape[1]}")
        return self.layer(x).mean()

    text = refused(ValueError, AutoParallel(Calls(forward, layer=nn.Linear(16, 4))), mine(batch()[0]))
    assert text.startswith("3 columns are expected, not 16\n"), text
    assert "refusals.py:" in text, text


@pattern
def those_constructs_train_in_data_parallel_mode() -> None:
    serial = seeded(lambda: Calls(lambda s, x: _write_column(s.layer(x)).pow(2).mean(), layer=nn.Linear(16, 4)))
    network = copy.deepcopy(serial)
    step = AutoParallel(network, "data_parallel")
    x, _ = batch()
    loss = step(mine(x))
    loss.backward()
    right = serial(x)
    right.backward()
    assert_close(loss.detach(), right.detach())
    assert_gradients(network, serial)


@pattern
def dropout_on_lost_rows_is_refused_before_any_stage_runs() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 8, dropout=0.1)  # dimension 0 is the sequence
    network = seeded(lambda: nn.Sequential(nn.Linear(16, 16), layer, nn.Linear(16, 4)))
    step = AutoParallel(Pipeline(WithLoss(network, F.mse_loss), 2)).pipeline(stages=2)
    text = refused(StrategyError, step, torch.randn(4, 3, 16), torch.randn(4, 3, 4))
    assert "rows of the batch are not known" in text
    assert "batch_first=True" in text
    assert len(set(everywhere(text))) == 1


@pattern
def number_taken_out_of_a_tensor_is_refused_by_name() -> None:
    network = Calls(lambda self, x: self.layer(x / x.max().item()), layer=nn.Linear(16, 4))
    text = refused(CaptureError, AutoParallel(WithLoss(network, F.mse_loss)), *map(mine, batch()))
    assert "item" in text
    assert "data_parallel" in text
