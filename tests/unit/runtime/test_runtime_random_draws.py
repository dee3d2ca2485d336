"""Networks that draw: the same numbers for the same seed and step, whole, in copies, captured; what is refused."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import every_third_fast
from torch import nn
from torch.utils.checkpoint import checkpoint

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel, MicroBatchInterleaved
from msrun.runtime.capture.batch_rows import refuse_lost_rows
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.nn.random_stream import put_stream_state, take_stream_state
from msrun.runtime.partition.partition import partition
from msrun.runtime.sharding.layout import Mesh, TensorLayout
from msrun.runtime.sharding.operators.dropout import BATCH_DIM, CALL, LOST, CutShape, draw_part


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(11)
    yield


class Network(nn.Module):
    """Its result shows what it has drawn."""

    def __init__(self, call):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.call = call

    def forward(self, x):
        return self.call(x * self.weight)


X = torch.full((8, 6), 0.5, dtype=torch.float64)


def steps(call, count=2, x=X):
    """Return the results of a network's first steps on one process."""
    step = AutoParallel(Network(call))
    return [step(x).detach() for _ in range(count)]


def alone(call, x=X):
    return steps(call, 1, x)[0]


def graph_of(call, rows=4):
    x, shape = torch.full((rows, 6), 0.5, dtype=torch.float64), (rows, 6)
    return capture(find_target(Network(call)), [x], {}, input_shapes=[shape], parameter_shapes={}).graph


LADDER = torch.arange(600.0, dtype=torch.float64).view(25, 24)


CALLS = {
    "rand": lambda x: torch.rand(8, 6),
    "rand-of-a-size": lambda x: torch.rand(size=(8, 6), dtype=torch.float64),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn((8, 6)),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint": lambda x: torch.randint(10, (8, 6)),
    "randint-from": lambda x: torch.randint(2, 1000, (8, 6)),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal-of-a-size": lambda x: torch.normal(0.0, 2.0, (8, 6)),
    "normal-of-two": lambda x: torch.normal(x, x + 1),
    "bernoulli": torch.bernoulli,
    "bernoulli-method": lambda x: x.bernoulli(),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(),
    "bernoulli_-of": lambda x: torch.empty_like(x).bernoulli_(x.detach()),
    "uniform_": lambda x: x.new_empty(8, 6).uniform_(-1, 1),
    "normal_": lambda x: torch.empty(8, 6).normal_(std=3.0),
    "exponential_": lambda x: torch.empty(8, 6).exponential_(),
    "random_": lambda x: torch.empty(8, 6).random_(),
    "geometric_": lambda x: torch.empty(8, 6).geometric_(0.1),
    "cauchy_": lambda x: torch.empty(8, 6).cauchy_(),
    "log_normal_": lambda x: torch.empty(8, 6).log_normal_(),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "rrelu_": lambda x: torch.rrelu_(-x, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, train=True)[0],
    "gumbel": lambda x: F.gumbel_softmax(x),
    "fractional_max_pool": lambda x: F.fractional_max_pool2d((x.sum() * 0 + LADDER)[None], 2, output_size=9),
    "dropout": F.dropout,
    "dropout-module": nn.Dropout(0.3, inplace=True),
    "dropout-of-torch": lambda x: torch.dropout_(torch.dropout(x, 0.3, train=True), 0.3, train=True),
    "two-masks": lambda x: F.dropout(x) - F.dropout(x),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "initialisation": lambda x: nn.init.trunc_normal_(torch.empty(8, 6)),
}


@pytest.mark.parametrize("name", every_third_fast(CALLS, 4))
def test_numbers_follow_from_the_seed_and_the_step_alone(name):
    first, second = steps(CALLS[name])
    assert not torch.equal(first, second)
    torch.rand(99)  # what others draw does not matter
    assert torch.equal(alone(CALLS[name]), first)
    torch.manual_seed(12)
    assert not torch.equal(alone(CALLS[name]), first)


def test_gradients_are_those_of_torchs_operators():
    x = torch.full((8, 6), -0.5, dtype=torch.float64, requires_grad=True)
    y = AutoParallel(Network(lambda x: F.rrelu(x, training=True)))(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(gradient, y.detach() / x.detach())
    (gradient,) = torch.autograd.grad(AutoParallel(Network(lambda x: torch.bernoulli(-x)))(x).sum(), x)
    assert not gradient.any()


def test_own_generators_and_first_values_of_parameters_are_left_to_torch():
    def call(x):
        generator = torch.Generator().manual_seed(5)
        weight = nn.init.normal_(nn.Parameter(torch.empty(6)))
        return torch.rand(8, 6, generator=generator) + x.detach() * 0 + weight.detach()

    torch.manual_seed(3)
    network = Network(call)
    found = AutoParallel(network)(X)
    torch.manual_seed(3)
    right = torch.rand(8, 6, generator=torch.Generator().manual_seed(5)) + torch.randn(6)
    assert torch.allclose(found.float(), right)


def test_in_place_draws_write_and_keep_the_memory_of_their_tensor():
    kept = {}

    def call(x):
        kept["given"] = torch.zeros(6, 8).t()
        kept["found"] = kept["given"].uniform_(1, 2)
        return kept["found"]

    alone(call)
    assert kept["found"] is kept["given"]
    assert float(kept["given"].min()) >= 1
    assert alone(lambda x: torch.rand_like(x.t())).stride() == (1, 6)

    def drop(x):
        kept["given"] = x * 2
        return F.dropout(kept["given"], 0.5, inplace=True)

    assert torch.equal(alone(drop), kept["given"])


def test_copies_of_a_batch_on_one_process_draw_what_the_whole_batch_draws():
    def draws(x):
        noise = torch.randn(x.shape[0], 1) + torch.rand_like(x) + torch.rand(6)
        joined = torch.rand_like(torch.stack([x, x], 1).flatten(0, 1)).view(-1, 2, 6).sum(1)
        second = torch.empty(3, x.shape[0], 6).uniform_().sum(0)
        return (noise + joined + second + torch.rand(()) + x.new_empty(x.shape[0], 1).bernoulli_(0.5)).detach() + 0 * x

    def call(x):
        return F.dropout(F.dropout(draws(x), 0.2), 0.2)

    right = alone(call)
    network = MicroBatchInterleaved(Network(call), 2)
    seen = []
    network.network.register_forward_hook(lambda module, given, result: seen.append(result.detach()))
    AutoParallel(network)(X)
    assert torch.equal(torch.cat(seen), right)


def test_torchs_own_numbers_on_several_ranks_are_announced_once(caplog):
    network = MicroBatchInterleaved(Network(lambda x: x * 0 + torch.randperm(8).sum()), 2)
    step = AutoParallel(network)
    for _ in range(2):
        step(X)
    assert [record.message for record in caplog.records if "randperm" in record.message] == [
        "randperm draws torch's own numbers: they are right, but not those of one process"
    ]


def test_network_that_drops_nothing_takes_no_step():
    calls = {"drops": False}
    step = AutoParallel(Network(lambda x: F.dropout(x, training=calls["drops"])))
    x = X
    assert torch.equal(step(x), x)
    calls["drops"] = True
    assert torch.equal(step(x), alone(F.dropout))


def test_stream_goes_on_from_its_state_in_another_network():
    network = Network(F.dropout)
    step, x = AutoParallel(network), X
    step(x), step(x)
    state = take_stream_state(network.parameters())
    assert state == [11, 2]
    expected = step(x)
    torch.manual_seed(99)
    resumed = Network(F.dropout)
    put_stream_state(resumed.parameters(), state)
    assert torch.equal(AutoParallel(resumed)(x), expected)
    put_stream_state(resumed.parameters(), state)  # after the first call, too
    assert torch.equal(AutoParallel(resumed)(x), expected)
    assert take_stream_state([torch.ones(1)]) is None


def test_gradient_is_the_mask_and_so_is_the_second_one():
    x = torch.ones(8, 6, dtype=torch.float64, requires_grad=True)
    y = AutoParallel(Network(lambda x: F.dropout(x, 0.25)))(x)
    (gradient,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    assert torch.allclose(gradient, 2 * y * y)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert torch.allclose(second, 2 * y * y)


@pytest.mark.parametrize("needs_weights", [True, False])
def test_dropout_inside_multi_head_attention_is_ours(needs_weights):
    attention = nn.MultiheadAttention(6, 2, dropout=0.5, dtype=torch.float64)
    x = torch.ones(4, 3, 6, dtype=torch.float64)

    def call(x):
        return attention(x, x * 2, x, need_weights=needs_weights)[0]

    first, second = steps(call, x=x)
    assert not torch.equal(first, second)
    torch.rand(9)
    assert torch.equal(alone(call, x), first)
    attention.eval()
    assert torch.equal(*steps(call, x=x))


def test_attention_without_anything_to_drop_is_torchs_own():
    def call(x, p):
        q = x.view(2, 4, 6)
        mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)  # the first row sees nothing
        return F.scaled_dot_product_attention(q, q, q, mask, dropout_p=p).nan_to_num()

    assert torch.allclose(alone(lambda x: call(x, 1e-12)), alone(lambda x: call(x, 0.0)))


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_gradient_of_recomputed_dropout_belongs_to_the_mask_of_its_forward_pass(is_reentrant):
    x = torch.rand(8, 6, dtype=torch.float64).requires_grad_()
    step = AutoParallel(Network(lambda x: checkpoint(F.dropout, x, 0.5, use_reentrant=is_reentrant)))
    y = step(x).sum()
    y.backward()
    assert x.grad is not None
    assert float((x.grad * x.detach()).sum()) == pytest.approx(float(y.detach()))


def test_compiled_network_drops_anew_at_every_step():
    network = Network(lambda x: F.dropout(x, 0.5))
    step = AutoParallel(torch.compile(network, backend="eager"))
    x = X
    first, second, third = (step(x).detach() for _ in range(3))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert set(third.unique().tolist()) == {0.0, 1.0}


def test_wrong_probability_is_refused_as_torch_refuses_it():
    with pytest.raises(ValueError, match="but got 1"):
        alone(lambda x: F.dropout(x, 1.5))


class Turned(torch.autograd.Function):
    """The transpose: nobody knows what a custom function does with its dimensions."""

    @staticmethod
    def forward(ctx, x):
        return x.t().contiguous()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.t()


def rows_found(call, rows=4):
    return [node.meta[BATCH_DIM] for node in graph_of(call, rows).nodes if CALL in node.meta]


@pytest.mark.parametrize(
    ("call", "expected", "rows"),
    every_third_fast(
        [
            (lambda x: x + torch.rand(4, 1), 0, 4),
            (lambda x: x + torch.rand(6), None, 4),
            (lambda x: x + torch.rand(12).sum(), LOST, 4),
            (lambda x: x * x.new_empty(4, 1).bernoulli_(0.5), 0, 4),
            (lambda x: x + torch.normal(torch.zeros(4, 6), torch.ones(4, 6)), 0, 4),
            (lambda x: x + torch.rand_like(x.t()).t(), 1, 4),
            (lambda x: x.sum() + torch.rand_like(x.t().reshape(-1)).sum(), LOST, 4),
            (lambda x: x.view(-1) + torch.rand_like(x.view(-1)), 0, 4),
            # Statistics of the batch are no rows, and change none.
            (lambda x: F.dropout(x - x.mean(0)), 0, 4),
            (lambda x: F.dropout(F.batch_norm(x, x.detach().mean(0), x.detach().var(0))), 0, 4),
            (lambda x: F.dropout(x.t().flip(1)), 1, 4),
            (lambda x: F.dropout((x @ x.t()).softmax(-1) @ x), LOST, 4),
            (lambda x: F.dropout(x + (x @ x.t()).softmax(-1) @ x), 0, 4),
            # Operators without a rule, and functions of the user's.
            (lambda x: F.dropout(x.unfold(1, 2, 2)), 0, 4),
            (lambda x: F.dropout(x.index_add(1, torch.tensor([0, 2]), torch.ones_like(x[:, :2]))), 0, 4),
            (lambda x: F.dropout(Turned.apply(x)), 1, 4),
            (lambda x: F.dropout(Turned.apply(x).median(1).values), LOST, 4),
            (lambda x: torch.bernoulli(x.t().sigmoid().chunk(2)[0]), 1, 4),
            # One row is found as many are.
            (lambda x: F.dropout(x.unflatten(-1, (2, 3)).transpose(1, 2)), 0, 1),
            (lambda x: F.dropout(x.t().unsqueeze(0)), 2, 1),
            (lambda x: F.dropout(x.t().reshape(-1)), LOST, 1),
        ]
    ),
)
def test_rows_of_the_batch_are_found_in_what_is_drawn(call, expected, rows):
    assert rows_found(call, rows) == [expected]


def test_network_whose_random_numbers_nobody_can_find_the_rows_of_runs_in_one_part():
    for call in (F.dropout, lambda x: x + torch.rand(6)):
        refuse_lost_rows(graph_of(call), 2)
    for call, name in (
        (lambda x: x + torch.rand(12).sum(), "rand"),
        (lambda x: F.dropout(x.t().reshape(-1)), "dropout"),
    ):
        refuse_lost_rows(graph_of(call), 1)
        with pytest.raises(StrategyError, match=rf"aten.{name} in module \(top\) draws .* are not known, so 2 parts"):
            refuse_lost_rows(graph_of(call), 2)


PLAIN = nn.GRU(6, 6, 2, dtype=torch.float64)


def test_draws_are_numbered_in_the_order_of_the_network_without_those_that_draw_nothing():
    def call(x):
        x = F.dropout(x, training=False) + F.dropout(x, 0.0) + F.rrelu(x) + PLAIN(x.unsqueeze(1))[0][:, 0]
        first = F.dropout(x).t()
        second = F.dropout(first).reshape(-1) + torch.rand(24)
        return F.dropout(second).sum() + F.dropout(torch.ones(3)).sum()

    found = [(node.meta[CALL], node.meta[BATCH_DIM]) for node in graph_of(call).nodes if CALL in node.meta]
    assert found == [(0, 0), (1, 1), (2, LOST), (3, LOST), (4, None)]


DROPPING = nn.GRU(6, 6, 2, dropout=0.5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "name"),
    every_third_fast(
        [
            (lambda x: x + torch.multinomial(x.detach().sigmoid(), 1), "aten.multinomial.default in module (top)"),
            (lambda x: x[torch.randperm(8)], "aten.randperm.default"),
            (lambda x: x * torch.poisson(x.detach().exp()), "aten.poisson.default"),
            (lambda x: x + torch.rand(6, generator=torch.Generator()), "draws from a generator of its own"),
            (
                lambda x: x * torch.empty_like(x).uniform_(generator=torch.Generator()),
                "draws from a generator of its own",
            ),
            (
                lambda x: x + torch.binomial(x.detach() * 0 + 9, x.detach() * 0 + 0.5),
                "draws random numbers, which would not be",
            ),
            (lambda x: DROPPING(x.unsqueeze(1))[0], "aten.gru.input"),
        ]
    ),
)
def test_other_random_operators_are_refused_with_what_to_do(call, name):
    with pytest.raises(CaptureError) as caught:
        graph_of(call, 8)
    assert name in str(caught.value)
    assert "pass them in as an input" in str(caught.value)
    assert "\n" not in str(caught.value)


OUTSIDE = torch.zeros(6)


def test_draw_into_memory_from_outside_is_refused():
    with pytest.raises(CaptureError, match=r"aten\.uniform_ changes"):
        rows_found(lambda x: x + OUTSIDE.uniform_())


def test_random_numbers_made_of_nothing_are_drawn_in_the_part_that_all_readers_take():
    shape, rows = (4, 6), TensorLayout(((0,), ()))
    network = Network(lambda x: (x * torch.rand(4, 6) * torch.rand(4, 6)[:, 1:2]).sum())
    x = torch.ones(shape, dtype=torch.float64)
    captured = capture(find_target(network), [x], {}, input_shapes=[shape], parameter_shapes={})
    program = partition(captured, Mesh((2,)), input_layouts=[rows], strategies={}, output_batch_axes=(0,))
    parts = [node.kwargs["part"] for node in program.graph.nodes if node.target is draw_part]
    assert parts == [tuple(CutShape((2,), shape, ((0,), ())))] * 2
    assert not [text for operator in program.operators for text in operator.collectives if "slice" in text]
