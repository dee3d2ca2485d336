"""Networks without memory: built, given values and loaded."""

import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.errors import ParallelError
from msrun.runtime import init_parameters, no_init_parameters
from msrun.runtime.schedule.deferred_weights import (
    compute_deferred_weights,
    deferring_addmm,
    deferring_linear,
    deferring_matmul,
    forget_deferred_weights,
)


class Holds(nn.Module):
    """A module with the parameters that a function makes."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor))


def initialised(module, initialise, name="weight"):
    initialise(getattr(module, name))
    return module


def written_in_views():
    holds = Holds(weight=torch.empty(4, 6))
    with torch.no_grad():
        holds.weight[:, :3].normal_()
        holds.weight[:, 3:].fill_(0.5)
        holds.weight[1].mul_(2)
        holds.weight.view(-1)[5:7] = 9.0
    return holds


def tied():
    network = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    network[1].weight = network[0].weight
    return network


def copied_from_another():
    network = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with torch.no_grad():
        network[1].weight.copy_(network[0].weight.t() * 3)
    return network


def seeded_inside():
    first = nn.Linear(4, 4)
    torch.manual_seed(99)
    second = nn.Linear(4, 4)
    torch.manual_seed(99)
    return nn.Sequential(first, second, nn.Linear(4, 4))


MAKES = {
    "linear": lambda: nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3, dtype=torch.float64)),
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 3)),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "embedding": lambda: nn.Sequential(nn.Embedding(8, 4), nn.Embedding(8, 4, padding_idx=2)),
    "norms": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4)),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "orthogonal": lambda: initialised(nn.Linear(6, 4), nn.init.orthogonal_),
    "truncated-normal": lambda: initialised(nn.Linear(6, 4), lambda w: nn.init.trunc_normal_(w, std=0.02)),
    "kaiming": lambda: initialised(nn.Linear(6, 4), nn.init.kaiming_normal_),
    "dirac": lambda: initialised(nn.Conv1d(4, 4, 3), nn.init.dirac_),
    "sparse": lambda: initialised(nn.Linear(6, 4), lambda w: nn.init.sparse_(w, 0.5)),
    "eye": lambda: initialised(nn.Linear(4, 4), nn.init.eye_),
    "data-attribute": lambda: initialised(nn.Linear(4, 4), lambda w: w.data.normal_(0, 0.1)),
    "scaled-randn": lambda: Holds(weight=torch.randn(4, 5) * 0.1 + 1),
    "expression": lambda: Holds(weight=(torch.rand(4, 5).t() @ torch.randn(4, 3)).relu()),
    "arange": lambda: Holds(weight=torch.arange(6.0).reshape(2, 3), other=torch.randperm(6).to(torch.float32)),
    "written-in-views": written_in_views,
    "tied": tied,
    "copied-from-another": copied_from_another,
    "seeded-inside": seeded_inside,
    "dropped-before": lambda: [nn.Linear(9, 9), nn.Linear(3, 3)][1],
    "moved-to-double": lambda: nn.Linear(3, 3).double(),
}


def values(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("name", MAKES)
def test_values_are_those_of_building_at_once_and_nothing_is_allocated_before(name):
    torch.manual_seed(4)
    right = values(MAKES[name]())
    torch.manual_seed(4)
    with no_init_parameters():
        network = MAKES[name]()
    assert all(parameter.is_meta for parameter in network.parameters())
    torch.manual_seed(5)  # too late
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert init_parameters(network) is network
    assert torch.equal(torch.get_rng_state(), before)
    mine = values(network)
    assert mine.keys() == right.keys()
    for key, value in right.items():
        assert mine[key].dtype == value.dtype
        assert torch.equal(mine[key], value), key
    assert not any(tensor.is_meta for tensor in network.state_dict().values())


def test_types_are_those_of_the_block_and_not_those_of_the_first_call():
    torch.set_default_dtype(torch.float64)
    try:
        with no_init_parameters():
            net = nn.Linear(3, 2)
            net.register_buffer("steps", torch.arange(3))
            net.register_buffer("scale", torch.ones(3) * 0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    init_parameters(net)
    assert [value.dtype for value in net.state_dict().values()] == [torch.float64] * 2 + [torch.int64, torch.float64]
    assert torch.equal(net.scale, torch.ones(3, dtype=torch.float64) * 0.1)


def test_block_is_written_with_and_without_parentheses_and_may_be_nested():
    networks = []
    for block in (no_init_parameters, no_init_parameters()):
        torch.manual_seed(4)
        with block:
            networks.append(nn.Linear(4, 4))
            with no_init_parameters():
                networks.append(nn.Linear(4, 4))
            networks.append(nn.Linear(4, 4))
    assert all(network.weight.is_meta for network in networks)
    values = [init_parameters(network).weight for network in networks]
    assert all(torch.equal(one, other) for one, other in zip(values[:3], values[3:], strict=True))
    assert not torch.equal(values[1], values[2])


def test_block_ends_when_an_error_leaves_it():
    with pytest.raises(ZeroDivisionError), no_init_parameters():
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta
    assert nn.init.orthogonal_.__module__ == "torch.nn.init"


def test_two_networks_of_one_block_are_initialised_one_after_the_other_and_each_once():
    torch.manual_seed(4)
    right = nn.Linear(4, 4), nn.Linear(4, 4)
    torch.manual_seed(4)
    with no_init_parameters():
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    first.weight.parallel_optimizer = False
    first.bias.requires_grad_(requires_grad=False)
    init_parameters(second)
    assert first.weight.is_meta
    init_parameters(first)
    assert torch.equal(first.weight, right[0].weight) and torch.equal(second.weight, right[1].weight)
    assert (first.weight.parallel_optimizer, first.bias.requires_grad, first.weight.requires_grad) == (
        False,
        False,
        True,
    )
    with torch.no_grad():
        first.weight.fill_(3)
    init_parameters(first)
    assert (first.weight == 3).all()


def test_optimizer_built_before_holds_the_same_objects():
    with no_init_parameters():
        network = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
        optimizer = torch.optim.Adam(network.parameters(), 0.1)
    objects = list(network.parameters())
    init_parameters(network)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(a is b is c for a, b, c in zip(network.parameters(), objects, held, strict=True))
    network[1](network[0](torch.ones(2, 4)))[0].sum().backward()
    before = [parameter.detach().clone() for parameter in objects]
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(objects, before, strict=True))


def test_parameter_made_from_data_stays_real():
    data = torch.arange(6.0)
    with no_init_parameters():
        network = Holds(weight=data, other=torch.zeros(3))
    assert network.weight.data_ptr() == data.data_ptr() and not network.weight.is_meta
    assert network.other.is_meta


def test_what_has_no_value_is_told_by_name():
    with no_init_parameters():
        network = Holds(weight=torch.empty(2, 2), bias=torch.zeros(2))
    with pytest.warns(UserWarning, match=r"parameter weight was made by torch\.empty and never given a value"):
        init_parameters(network)
    with pytest.raises(ParallelError, match=r"parameter 0\.weight is on the meta device but was not made inside"):
        init_parameters(nn.Sequential(nn.Linear(4, 4, device="meta")))
    refused = pytest.raises(ParallelError, match="build that part of the network outside no_init_parameters")
    with refused, no_init_parameters():
        nn.Linear(2, 2).weight.sum().item()


def test_parameter_that_a_backward_graph_holds_is_refused():
    from msrun.runtime.tensors.plain_tensors import put_value

    network = nn.Linear(4, 4)
    loss = network(torch.ones(1, 4)).sum()
    with pytest.raises(ParallelError, match="still held by a backward graph"):
        put_value(network.bias, torch.zeros(2))
    del loss
    put_value(network.bias, torch.zeros(2))
    assert network.bias.shape == (2,)


def _leaves(*shapes):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def _gradients(linear, leaves):
    assert callable(linear)
    x, first, bias, second = leaves
    hidden = torch.tanh(linear(x, first, bias))
    (linear(hidden, second) + linear(hidden, second)).square().sum().backward()  # one weight, twice
    return [leaf.grad for leaf in leaves]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    forget_deferred_weights()


@pytest.mark.parametrize("rows", [(5,), (2, 3), (2, 1, 4)])
def test_gradients_are_those_of_autograd_of_one_batch_and_of_two(rows):
    shapes = ((*rows, 4), (6, 4), (6,), (3, 6))
    expected = _gradients(F.linear, _leaves(*shapes))
    leaves = _leaves(*shapes)
    found = _gradients(deferring_linear, leaves)
    assert found[1:] == [None, None, None]
    torch.testing.assert_close(found[0], expected[0])
    for times in (1, 2):
        compute_deferred_weights()
        torch.testing.assert_close([leaf.grad for leaf in leaves[1:]], [times * right for right in expected[1:]])
        _gradients(deferring_linear, leaves)
    forget_deferred_weights()
    compute_deferred_weights()
    torch.testing.assert_close(leaves[1].grad, 2 * expected[1], msg="what a failed pass left is not added later")


def test_gradients_under_the_callers_own_autocast_are_those_of_autograd():
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


def test_frozen_weights_and_inputs_without_gradient_get_none():
    x, weight, bias = _leaves((5, 4), (6, 4), (6,))
    x.requires_grad_(requires_grad=False)
    weight.requires_grad_(requires_grad=False)
    deferring_linear(x, weight, bias).sum().backward()
    compute_deferred_weights()
    assert x.grad is None
    assert weight.grad is None
    assert bias.grad is not None
    assert bias.grad.tolist() == [5.0] * 6


@pytest.mark.parametrize(
    ("late", "at_once"),
    [
        (lambda x, weight, _: deferring_matmul(x, weight), lambda x, weight, _: x @ weight),
        (
            lambda x, weight, bias: deferring_addmm(bias, x, weight),
            lambda x, weight, bias: torch.addmm(bias, x, weight),
        ),
    ],
    ids=["matmul", "addmm"],
)
def test_weights_that_lie_the_other_way_round(late, at_once):
    found = []
    for multiply in (late, at_once):
        leaves = _leaves((5, 4), (4, 6), (6,))
        multiply(*leaves).square().sum().backward()
        compute_deferred_weights()
        found.append([leaf.grad for leaf in leaves if leaf.grad is not None])
    torch.testing.assert_close(*found)
