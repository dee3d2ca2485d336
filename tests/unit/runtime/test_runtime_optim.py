"""Optimizers: MindSpore's words and formulas, and clipping."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from msrun.errors import ParallelError, StrategyError
from msrun.mindspore import nn as mindspore_nn
from msrun.runtime import clip_by_global_norm, clip_grad_norm_, optim


def test_gradients_follow_the_order_of_parameter_groups():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD([{"params": [second], "lr": 1.0}, {"params": [first], "lr": 10.0}])
    optimizer((torch.ones(3), torch.ones(2)))
    assert second.tolist() == [-1.0] * 3
    assert first.tolist() == [-10.0] * 2


STEPS = 5


def gradients(shape=(4, 3)):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape) for _ in range(STEPS)]


def start(shape=(4, 3)):
    return np.random.default_rng(1).standard_normal(shape)


def adam_like(update):
    """Return the formula of steps by `update` of w, m, v, g and the number of the step."""

    def formula(w, grads):
        m = v = np.zeros_like(w)
        for t, g in enumerate(grads, 1):
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
            w = w - 0.1 * update(w, m, v, g, t)
        return w

    return formula


def momentum(w, grads):
    v = np.zeros_like(w)
    for g in grads:
        v = 0.9 * v + g + 0.01 * w
        w = w - 0.1 * v
    return w


def lamb_update(w, m, v, _, t):
    r = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3) + 0.05 * w
    return min(np.linalg.norm(w) / np.linalg.norm(r), 10.0) * r


def eps_hat(t):
    return float(np.sqrt(1 - 0.9**t) / (1 - 0.8**t))


adam_weight_decay = adam_like(lambda w, m, v, g, t: m / (np.sqrt(v) + 1e-3) + 0.05 * w)
lamb = adam_like(lamb_update)
adam = adam_like(lambda w, m, v, g, t: m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3))
lazy_adam = adam_like(lambda w, m, v, g, t: eps_hat(t) * m / (np.sqrt(v) + 1e-3))
nesterov = adam_like(lambda w, m, v, g, t: eps_hat(t) * (0.8 * m + 0.2 * g) / (np.sqrt(v) + 1e-3))


def ftrl(w, grads):
    n, z = np.full_like(w, 0.1), np.zeros_like(w)
    for g in grads:
        after = n + g * g
        z = z + g - (after**0.4 - n**0.4) / 0.5 * w
        w = np.where(np.abs(z) > 0.3, (np.sign(z) * 0.3 - z) / (after**0.4 / 0.5 + 2 * 0.01), 0.0)
        n = after
    return w


def lars(w, grads):
    v = np.zeros_like(w)
    for g in grads:
        rate = 0.02 * np.linalg.norm(w) / (np.linalg.norm(g) + 0.05 * np.linalg.norm(w) + 1e-5)
        v = 0.9 * v + rate * (g + 0.05 * w)
        w = w - 0.1 * v
    return w


ADAM = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}
CASES = {
    "SGD": (lambda p: optim.SGD(p), lambda w, grads: w - 0.1 * sum(grads)),
    "Momentum": (lambda p: optim.Momentum(p, learning_rate=0.1, momentum=0.9, weight_decay=0.01), momentum),
    "AdamWeightDecay": (lambda p: optim.AdamWeightDecay(p, **ADAM, weight_decay=0.05), adam_weight_decay),
    "Lamb": (lambda p: optim.Lamb(p, **ADAM, weight_decay=0.05), lamb),
    "Adam": (lambda p: optim.Adam(p, **ADAM), adam),
    "Adam of MindSpore": (lambda p: optim.Adam(p, **ADAM, use_eps_hat=True), lazy_adam),
    "Adam of MindSpore on the host": (lambda p: optim.Adam(p, **ADAM, use_eps_hat=True, target="CPU"), lazy_adam),
    "nn.Adam": (lambda p: mindspore_nn.Adam(p, 0.1, 0.8, 0.9, 1e-3), lazy_adam),
    "LazyAdam": (lambda p: optim.LazyAdam(p, **ADAM), lazy_adam),
    "LazyAdam ahead": (lambda p: optim.LazyAdam(p, **ADAM, use_nesterov=True), nesterov),
    "FTRL": (lambda p: optim.FTRL(p, lr=0.5, lr_power=-0.4, l1=0.3, l2=0.01), ftrl),
    "LARS": (lambda p: optim.LARS(optim.Momentum(p, 0.1, 0.9, weight_decay=0.05), coefficient=0.02), lars),
}


@pytest.mark.parametrize(("make", "formula"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("called", [False, True])
def test_steps_follow_the_formula(make, formula, called):
    weight = nn.Parameter(torch.from_numpy(start()))
    optimizer = make([weight])
    for gradient in map(torch.from_numpy, gradients()):
        if called:
            optimizer([gradient])
        else:
            weight.grad = gradient.clone()
            optimizer.step()
            optimizer.zero_grad()
        assert weight.grad is None, "the next step starts without gradients"
    np.testing.assert_allclose(weight.detach().numpy(), formula(start(), gradients()), rtol=1e-10)


def test_mindspores_epsilon_goes_on_after_a_restart_and_refuses_a_group_of_different_ages():
    one, two = (nn.Parameter(torch.from_numpy(start())) for _ in range(2))
    optimizer = optim.Adam([one], **ADAM, use_eps_hat=True)
    for number, gradient in enumerate(map(torch.from_numpy, gradients())):
        if number == 2:
            saved = optimizer.state_dict()
            optimizer = optim.Adam([one], **ADAM)
            optimizer.load_state_dict(saved)
        optimizer([gradient])
    np.testing.assert_allclose(one.detach().numpy(), lazy_adam(start(), gradients()), rtol=1e-10)
    optimizer = optim.Adam([one, two], **ADAM, use_eps_hat=True)
    one.grad = torch.ones_like(one)
    optimizer.step()
    two.grad = torch.ones_like(two)
    with pytest.raises(StrategyError, match="have taken 0 to 1 steps: give those that have no gradient"):
        optimizer.step()


@pytest.mark.parametrize("name", ["LazyAdam", "LazyAdam ahead", "FTRL"])
def test_rows_without_a_gradient_stay_bit_for_bit(name):
    make, formula = CASES[name]
    table, scale = nn.Embedding(6, 3, sparse=True).double(), torch.arange(1.0, 4.0, dtype=torch.float64)
    with torch.no_grad():
        table.weight.copy_(torch.from_numpy(start((6, 3))))
    optimizer = make(table.parameters())
    touched = [[1, 4, 1], [1], [4, 1]]
    for rows in touched:
        optimizer.zero_grad()
        (table(torch.tensor(rows)) * scale).sum().backward()
        before = table.weight.detach().clone()
        optimizer.step()
        others = [row for row in range(6) if row not in rows]
        assert torch.equal(table.weight[others], before[others])
    moments = [v for v in optimizer.state[table.weight].values() if isinstance(v, Tensor) and v.dim()]
    assert len(moments) == 2
    assert all(torch.equal(value[0], value[5]) for value in moments)
    right = formula(start((6, 3))[1], [scale.numpy() * rows.count(1) for rows in touched])
    np.testing.assert_allclose(table.weight[1].detach().numpy(), right, rtol=1e-10)


def test_decay_filter_spares_what_it_is_asked_to():
    network = nn.Linear(3, 2)
    before = network.bias.detach().clone()
    optimizer = optim.AdamWeightDecay(network.parameters(), 0.1, weight_decay=0.5, decay_filter=lambda p: p.dim() > 1)
    weight = network.weight.detach().clone()
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(network.bias, before)
    torch.testing.assert_close(network.weight, weight * 0.95)


def test_moments_of_narrow_weights_are_wide_and_named_as_mindspores():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer, again = (optim.AdamWeightDecay([weight], 0.1) for _ in range(2))
    optimizer([torch.ones_like(weight)])
    again.load_state_dict(optimizer.state_dict())
    for state in (optimizer.state[weight], again.state[weight]):
        assert {key: value.dtype for key, value in state.items()} == dict.fromkeys(("adam_m", "adam_v"), torch.float32)
    assert torch.equal(again.state[weight]["adam_v"], optimizer.state[weight]["adam_v"])


def test_lars_clips_its_rate_and_leaves_biases_alone():
    weight, bias = nn.Parameter(torch.full((2, 2), 100.0)), nn.Parameter(torch.ones(2))
    optimizer = optim.LARS(optim.SGD([weight, bias], 0.1), coefficient=1.0, use_clip=True)
    weight.grad, bias.grad = torch.full((2, 2), 0.1), torch.full((2,), 0.1)
    optimizer.step()
    torch.testing.assert_close(weight, torch.full((2, 2), 100.0 - 0.1 * 0.1))
    torch.testing.assert_close(bias, torch.full((2,), 1.0 - 0.1 * 0.1))
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1


def test_lambs_ratio_is_one_where_a_norm_is_zero():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = optim.Lamb([weight], 0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(weight, torch.full((3,), -0.1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("lars", [False, True])
def test_wrong_gradients_are_refused_and_nothing_moves(lars):
    network = nn.Linear(3, 2)
    before = network.weight.detach().clone()
    plain = optim.SGD(network.parameters())
    optimizer = optim.LARS(plain) if lars else plain
    with pytest.raises(StrategyError, match="1 gradients for 2 parameters; give one for each, in order"):
        optimizer([torch.zeros(2, 3)])
    with pytest.raises(StrategyError, match=r"gradient 1 has shape \(3,\) but its parameter \(2,\)"):
        optimizer([torch.ones(2, 3), torch.ones(3)])
    assert torch.equal(network.weight, before)


@pytest.mark.parametrize("make", [case[0] for case in CASES.values()], ids=CASES.keys())
def test_state_survives_a_state_dict(make):
    weights = [nn.Parameter(torch.from_numpy(start())) for _ in range(2)]
    first, second = make([weights[0]]), make([weights[1]])
    saved = {}
    for step, gradient in enumerate(map(torch.from_numpy, gradients())):
        if step == 3:
            second = make([weights[1]])
            second.load_state_dict(saved)
        first([gradient.clone()])
        second([gradient.clone()])
        saved = second.state_dict()
        saved = {**saved, "state": {key: dict(value) for key, value in saved["state"].items()}}
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: optim.AdamWeightDecay(p, -1.0), r"AdamWeightDecay\(lr=-1.0\): must be a number, 0 or more"),
        (lambda p: optim.Lamb(p, betas=(0.9, 1.0)), "below 1"),
        (lambda p: optim.LazyAdam(p, betas=0.9), "must be two numbers"),
        (lambda p: optim.FTRL(p, lr_power=0.5), "lr_power"),
        (lambda p: optim.LARS(3), "give an optimizer"),
        (lambda p: optim.LARS(optim.SGD(p), coefficient=-1.0), "coefficient"),
    ],
)
def test_values_out_of_range_are_refused(make, match):
    with pytest.raises(StrategyError, match=match):
        make([nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_clipping_in_one_process_is_torchs(norm_type, max_norm):
    torch.manual_seed(0)
    mine, right = nn.Linear(3, 5).double(), nn.Linear(3, 5).double()
    gradients = [torch.randn_like(parameter) for parameter in mine.parameters()]
    for network in (mine, right):
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
    norm = clip_grad_norm_(mine.parameters(), max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(right.parameters(), max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    clipped = clip_by_global_norm(gradients, max_norm, norm_type)
    for one, two, other in zip(mine.parameters(), clipped, right.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=0)
        torch.testing.assert_close(two, other.grad, rtol=1e-12, atol=0)


def test_tied_parameters_and_those_without_gradient_count_once_and_not_at_all():
    tied, without = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    tied.grad = torch.full((4,), 3.0)
    assert float(clip_grad_norm_([tied, tied, without], 3.0)) == 6.0
    torch.testing.assert_close(tied.grad, torch.full((4,), 1.5), rtol=1e-6, atol=0)


def test_short_gradients_are_measured_in_float32():
    parameter = nn.Parameter(torch.zeros(2048, dtype=torch.bfloat16))
    parameter.grad = torch.full((2048,), 1.0, dtype=torch.bfloat16)
    assert float(clip_grad_norm_(parameter, 1e9)) == pytest.approx(math.sqrt(2048), rel=1e-6)


@pytest.mark.parametrize("norm_type", [0.0, 0.5, -1.0, math.nan, "two", True])
def test_norms_that_are_none_and_those_that_are_not_finite_are_refused(norm_type):
    parameter = nn.Parameter(torch.ones(1))
    with pytest.raises(StrategyError, match="must be 1 or more, or infinity"):
        clip_grad_norm_([parameter], 1.0, norm_type)
    parameter.grad = torch.full((1,), math.inf)
    with pytest.raises(ParallelError, match="the norm is inf"):
        clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
