"""Optimizers follow parameters that other objects have taken the place of; torch's private names."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import msrun.runtime.parallel.modes.fsdp
from msrun.runtime.nn.replaced import current, replace_parameter


def test_optimizer_made_before_takes_the_new_parameter_and_keeps_its_state() -> None:
    old, new = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([old], lr=0.1, momentum=0.9)
    old.grad = torch.ones(3)
    optimizer.step()
    moment = optimizer.state[old]["momentum_buffer"]
    replace_parameter(old, new)
    assert current(old) is new
    assert old.numel() == 0, "nobody may read what is trained no more"
    new.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.param_groups[0]["params"] == [new]
    assert optimizer.state[new]["momentum_buffer"] is moment
    torch.testing.assert_close(new.detach(), torch.full((3,), 1 - 0.1 * 1.9))


def test_torch_still_has_the_private_names_that_leave_parameters_whole() -> None:
    """Fails loudly when torch moves them; parallel/fsdp.py is the one place to change."""
    assert msrun.runtime.parallel.modes.fsdp.ShardPlacementResult is not None
    assert msrun.runtime.parallel.modes.fsdp.HSDPMeshInfo is not None
    assert callable(compute_local_shape_and_global_offset)
    assert callable(nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model)
