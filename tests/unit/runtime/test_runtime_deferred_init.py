"""Networks without memory: built, given values and loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from msrun.errors import ParallelError
from msrun.runtime import init_parameters, no_init_parameters
from msrun.runtime.schedule.deferred_weights import (
    add_deferred_weights,
    compute_deferred_weights,
    deferring_addmm,
    deferring_linear,
    deferring_matmul,
    forget_deferred_weights,
    take_deferred_weights,
)

Make = Callable[[], nn.Module]


class Holds(nn.Module):
    """A module with the parameters that a function makes."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor))


def initialised(module: nn.Module, initialise: Callable[[Tensor], object], name: str = "weight") -> nn.Module:
    initialise(getattr(module, name))
    return module


def written_in_views() -> nn.Module:
    holds = Holds(weight=torch.empty(4, 6))
    with torch.no_grad():
        holds.weight[:, :3].normal_()
        holds.weight[:, 3:].fill_(0.5)
        holds.weight[1].mul_(2)
        holds.weight.view(-1)[5:7] = 9.0
    return holds


def tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    network[1].weight = network[0].weight
    return network


def copied_from_another() -> nn.Module:
    network = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with torch.no_grad():
        network[1].weight.copy_(network[0].weight.t() * 3)
    return network


def seeded_inside() -> nn.Module:
    first = nn.Linear(4, 4)
    torch.manual_seed(99)
    second = nn.Linear(4, 4)
    torch.manual_seed(99)
    return nn.Sequential(first, second, nn.Linear(4, 4))


MAKES: dict[str, Make] = {
    "linear": lambda: nn.Linear(7, 5),
    "linear-of-float64": lambda: nn.Linear(7, 5, dtype=torch.float64),
    "two-linear": lambda: nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)),
    "conv": lambda: nn.Conv2d(3, 4, 3),
    "transposed-conv": lambda: nn.ConvTranspose2d(3, 4, 3),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(3, 4),
    "embedding": lambda: nn.Embedding(8, 4),
    "embedding-with-padding": lambda: nn.Embedding(8, 4, padding_idx=2),
    "batch-norm": lambda: nn.BatchNorm2d(4),
    "layer-norm": lambda: nn.LayerNorm(4),
    "group-norm": lambda: nn.GroupNorm(2, 4),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "orthogonal": lambda: initialised(nn.Linear(6, 4), nn.init.orthogonal_),
    "truncated-normal": lambda: initialised(nn.Linear(6, 4), lambda w: nn.init.trunc_normal_(w, std=0.02)),
    "xavier": lambda: initialised(nn.Linear(6, 4), nn.init.xavier_uniform_),
    "kaiming": lambda: initialised(nn.Linear(6, 4), nn.init.kaiming_normal_),
    "dirac": lambda: initialised(nn.Conv1d(4, 4, 3), nn.init.dirac_),
    "sparse": lambda: initialised(nn.Linear(6, 4), lambda w: nn.init.sparse_(w, 0.5)),
    "eye": lambda: initialised(nn.Linear(4, 4), nn.init.eye_),
    "zeros": lambda: initialised(nn.Linear(4, 4), nn.init.zeros_),
    "data-attribute": lambda: initialised(nn.Linear(4, 4), lambda w: w.data.normal_(0, 0.1)),
    "scaled-randn": lambda: Holds(weight=torch.randn(4, 5) * 0.1 + 1),
    "expression": lambda: Holds(weight=(torch.rand(4, 5).t() @ torch.randn(4, 3)).relu()),
    "arange": lambda: Holds(weight=torch.arange(6.0).reshape(2, 3)),
    "permuted": lambda: Holds(weight=torch.randperm(6).to(torch.float32)),
    "written-in-views": written_in_views,
    "tied": tied,
    "copied-from-another": copied_from_another,
    "seeded-inside": seeded_inside,
    "dropped-before": lambda: [nn.Linear(9, 9), nn.Linear(3, 3)][1],
    "moved-to-double": lambda: nn.Linear(3, 3).double(),
}


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())
def test_values_are_those_of_building_at_once(make: Make) -> None:
    torch.manual_seed(4)
    right = values(make())
    torch.manual_seed(4)
    with no_init_parameters():
        network = make()
    assert init_parameters(network) is network
    mine = values(network)
    assert mine.keys() == right.keys()
    for name, value in right.items():
        assert mine[name].dtype == value.dtype
        assert torch.equal(mine[name], value), name
    assert not any(tensor.is_meta for tensor in network.state_dict().values())


@pytest.mark.parametrize("name", ["linear", "lstm", "conv", "transformer", "embedding", "orthogonal", "seeded-inside"])
def test_nothing_is_allocated_for_weights_inside_the_block(name: str) -> None:
    with no_init_parameters():
        network = MAKES[name]()
    assert all(parameter.is_meta for parameter in network.parameters())


def test_big_network_is_built_that_would_not_fit() -> None:
    with no_init_parameters():
        network = nn.Linear(1 << 20, 1 << 20)
    assert network.weight.shape == (1 << 20, 1 << 20)


def test_random_numbers_after_the_block_do_not_depend_on_initialising() -> None:
    torch.manual_seed(4)
    with no_init_parameters():
        network = nn.Linear(4, 4)
    before = torch.get_rng_state()
    init_parameters(network)
    assert torch.equal(torch.get_rng_state(), before)


def test_seed_set_before_the_block_counts_and_one_set_after_does_not() -> None:
    torch.manual_seed(4)
    right = nn.Linear(4, 4)
    torch.manual_seed(4)
    with no_init_parameters():
        network = nn.Linear(4, 4)
    torch.manual_seed(5)
    init_parameters(network)
    assert torch.equal(network.weight, right.weight)


def test_types_are_those_of_the_block_and_not_those_of_the_first_call() -> None:
    def build() -> nn.Module:
        net = nn.Linear(3, 2)
        net.register_buffer("steps", torch.arange(3))
        net.register_buffer("scale", torch.ones(3) * 0.1)
        return net

    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        at_once = build()
        torch.manual_seed(0)
        with no_init_parameters():
            net = build()
    finally:
        torch.set_default_dtype(torch.float32)
    init_parameters(net)
    for name, value in at_once.state_dict().items():
        assert net.state_dict()[name].dtype == value.dtype, name
        assert torch.equal(net.state_dict()[name], value), name


def test_block_is_written_with_and_without_parentheses() -> None:
    networks = []
    for block in (no_init_parameters, no_init_parameters()):
        torch.manual_seed(4)
        with block:
            networks.append(nn.Linear(4, 4))
    assert all(network.weight.is_meta for network in networks)
    first, second = (init_parameters(network) for network in networks)
    assert torch.equal(first.weight, second.weight)


def test_blocks_may_be_nested() -> None:
    torch.manual_seed(4)
    with no_init_parameters():
        first = nn.Linear(4, 4)
        with no_init_parameters():
            second = nn.Linear(4, 4)
        third = nn.Linear(4, 4)
    for network in (first, second, third):
        init_parameters(network)
        assert not network.weight.is_meta
        assert network.weight.abs().sum() > 0


def test_block_ends_when_an_error_leaves_it() -> None:
    with pytest.raises(ZeroDivisionError), no_init_parameters():
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta
    assert nn.init.orthogonal_.__module__ == "torch.nn.init"


def test_two_networks_of_one_block_are_initialised_one_after_the_other() -> None:
    torch.manual_seed(4)
    right = nn.Linear(4, 4), nn.Linear(4, 4)
    torch.manual_seed(4)
    with no_init_parameters():
        networks = nn.Linear(4, 4), nn.Linear(4, 4)
    init_parameters(networks[1])
    assert networks[0].weight.is_meta
    init_parameters(networks[0])
    assert torch.equal(networks[0].weight, right[0].weight)
    assert torch.equal(networks[1].weight, right[1].weight)


def test_initialising_twice_changes_nothing() -> None:
    with no_init_parameters():
        network = nn.Linear(4, 4)
    init_parameters(network)
    with torch.no_grad():
        network.weight.fill_(3)
    init_parameters(network)
    assert (network.weight == 3).all()


def test_optimizer_built_before_holds_the_same_objects() -> None:
    with no_init_parameters():
        network = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
        optimizer = torch.optim.Adam(network.parameters(), 0.1)
    objects = list(network.parameters())
    init_parameters(network)
    assert all(a is b for a, b in zip(network.parameters(), objects, strict=True))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(a is b for a, b in zip(held, objects, strict=True))
    network[1](network[0](torch.ones(2, 4)))[0].sum().backward()
    before = [parameter.detach().clone() for parameter in objects]
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(objects, before, strict=True))


def test_tied_weights_stay_one_object() -> None:
    with no_init_parameters():
        network = tied()
    init_parameters(network)
    assert network[0].weight is network[1].weight


def test_attributes_of_parameters_survive() -> None:
    with no_init_parameters():
        network = nn.Linear(4, 4)
        network.weight.parallel_optimizer = False
        network.bias.requires_grad_(requires_grad=False)
    init_parameters(network)
    assert network.weight.parallel_optimizer is False
    assert not network.bias.requires_grad
    assert network.weight.requires_grad


def test_parameter_made_from_data_stays_real() -> None:
    data = torch.arange(6.0)
    with no_init_parameters():
        network = Holds(weight=data, other=torch.zeros(3))
    assert not network.weight.is_meta
    assert network.weight.data_ptr() == data.data_ptr()
    assert network.other.is_meta


def test_parameter_that_is_never_written_warns_by_name() -> None:
    with no_init_parameters():
        network = Holds(weight=torch.empty(2, 2), bias=torch.zeros(2))
    with pytest.warns(UserWarning, match=r"parameter weight was made by torch\.empty and never given a value"):
        init_parameters(network)


def test_written_parameters_do_not_warn() -> None:
    with no_init_parameters():
        network = nn.Sequential(*[make() for make in (MAKES["linear"], MAKES["orthogonal"], MAKES["dirac"])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init_parameters(network)


def test_meta_tensor_made_elsewhere_is_refused_by_name() -> None:
    network = nn.Sequential(nn.Linear(4, 4, device="meta"))
    with pytest.raises(ParallelError, match=r"parameter 0\.weight is on the meta device but was not made inside"):
        init_parameters(network)


def test_value_that_is_needed_inside_the_block_is_refused() -> None:
    refused = pytest.raises(ParallelError, match="build that part of the network outside no_init_parameters")
    with refused, no_init_parameters():
        nn.Linear(2, 2).weight.sum().item()


def test_parameter_that_a_backward_graph_holds_is_refused() -> None:
    from msrun.runtime.tensors.put_value import put_value

    network = nn.Linear(4, 4)
    loss = network(torch.ones(1, 4)).sum()
    with pytest.raises(ParallelError, match="still held by a backward graph"):
        put_value(network.bias, torch.zeros(2))
    del loss
    put_value(network.bias, torch.zeros(2))
    assert network.bias.shape == (2,)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    forget_deferred_weights()


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def _gradients(linear: object, leaves: list[Tensor]) -> list[Tensor | None]:
    assert callable(linear)
    x, first, bias, second = leaves
    hidden = torch.tanh(linear(x, first, bias))
    (linear(hidden, second) + linear(hidden, second)).square().sum().backward()  # one weight, twice
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("rows", [(5,), (2, 3), (2, 1, 4)])
def test_gradients_are_those_of_autograd(rows: tuple[int, ...]) -> None:
    shapes = ((*rows, 4), (6, 4), (6,), (3, 6))
    expected = _gradients(F.linear, _leaves(*shapes))
    leaves = _leaves(*shapes)
    found = _gradients(deferring_linear, leaves)
    assert found[1:] == [None, None, None]
    torch.testing.assert_close(found[0], expected[0])
    compute_deferred_weights()
    for leaf, right in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, right)


def test_gradients_are_added_to_those_of_the_batch_before() -> None:
    leaves = _leaves((5, 4), (6, 4), (6,), (3, 6))
    _gradients(deferring_linear, leaves)
    compute_deferred_weights()
    once = [leaf.grad.clone() for leaf in leaves[1:] if leaf.grad is not None]
    _gradients(deferring_linear, leaves)
    compute_deferred_weights()
    for leaf, right in zip(leaves[1:], once, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * right)


def test_gradients_under_the_callers_own_autocast_are_those_of_autograd() -> None:
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


def test_frozen_weights_and_inputs_without_gradient_get_none() -> None:
    x, weight, bias = _leaves((5, 4), (6, 4), (6,))
    x.requires_grad_(requires_grad=False)
    weight.requires_grad_(requires_grad=False)
    deferring_linear(x, weight, bias).sum().backward()
    compute_deferred_weights()
    assert x.grad is None
    assert weight.grad is None
    assert bias.grad is not None
    assert bias.grad.tolist() == [5.0] * 6


def test_what_a_failed_backward_pass_left_is_not_added_later() -> None:
    x, weight, bias = _leaves((5, 4), (6, 4), (6,))
    deferring_linear(x, weight, bias).sum().backward()
    forget_deferred_weights()
    compute_deferred_weights()
    assert weight.grad is None


@pytest.mark.parametrize("form", ["matmul", "addmm"])
def test_weights_that_lie_the_other_way_round(form: str) -> None:
    found = []
    for is_late in (False, True):
        x, weight, bias = leaves = _leaves((5, 4), (4, 6), (6,))
        if form == "matmul":
            result = deferring_matmul(x, weight) if is_late else x @ weight
        else:
            result = deferring_addmm(bias, x, weight) if is_late else torch.addmm(bias, x, weight)
        result.square().sum().backward()
        compute_deferred_weights()
        found.append([leaf.grad for leaf in leaves])
    for late, right in zip(found[1], found[0], strict=True):
        assert (late is None) == (right is None)
        if late is not None:
            torch.testing.assert_close(late, right)


def test_what_is_taken_is_the_callers_to_add_once() -> None:
    x, weight = _leaves((5, 4), (6, 4))
    deferring_linear(x, weight).sum().backward()
    taken = take_deferred_weights()
    compute_deferred_weights()
    assert weight.grad is None
    add_deferred_weights(taken)
    right = x.detach().sum(0).expand(6, 4)
    torch.testing.assert_close(weight.grad, right)
