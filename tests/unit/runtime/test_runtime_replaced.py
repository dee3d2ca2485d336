"""Optimizers follow parameters that other objects have taken the place of; torch's private names."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import msrun.runtime.parallel.modes.fsdp
from msrun.runtime.nn.random_stream import stream_of
from msrun.runtime.nn.replaced import current, replace_parameter, replaced_for_now
from msrun.runtime.tensors.put_value import holding


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


def test_the_stream_of_dropout_goes_on_with_the_new_parameters() -> None:
    network, whole = nn.Linear(3, 3, bias=False), nn.Parameter(torch.ones(3, 3))
    stream = stream_of(network)
    with replaced_for_now(network, {id(network.weight): whole}):
        assert stream_of(network) is stream
    old, network.weight = network.weight, nn.Parameter(torch.ones(3, 3))
    replace_parameter(old, network.weight)
    assert stream_of(network) is stream


def test_a_network_has_other_parameters_for_a_while() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[1].weight = old = network[0].weight
    whole = nn.Parameter(torch.zeros(4, 4))
    with replaced_for_now(network, {id(old): whole}):
        assert network[0].weight is network[1].weight is current(old) is whole
    assert network[0].weight is network[1].weight is current(old) is old


def test_a_parameter_holds_another_value_for_a_while_with_its_hooks_and_without_its_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda gradient: 3 * gradient)
    loss = parameter.sum()
    loss.backward(retain_graph=True)
    with holding([(parameter, torch.zeros(4))]):
        assert parameter.shape == (4,) and parameter.grad is None
        (gradient,) = torch.autograd.grad(parameter.sum(), [parameter])
        assert gradient.tolist() == [3.0] * 4
    assert parameter.tolist() == [1.0, 1.0]
    loss.backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [6.0, 6.0]


def test_torch_still_has_the_private_names_that_leave_parameters_whole() -> None:
    """Fails loudly when torch moves them; parallel/fsdp.py is the one place to change."""
    assert msrun.runtime.parallel.modes.fsdp.ShardPlacementResult is not None
    assert msrun.runtime.parallel.modes.fsdp.HSDPMeshInfo is not None
    assert callable(msrun.runtime.parallel.modes.fsdp.FSDPState._pre_forward)
    assert "_engine_run_backward" in torch.autograd.grad.__code__.co_names
    assert callable(compute_local_shape_and_global_offset)
    assert callable(nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model)
