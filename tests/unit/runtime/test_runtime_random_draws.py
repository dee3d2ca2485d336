"""torch's random operators on numbers of our own: distributions, parts of one whole, rows of the batch, writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import every_third_fast
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from msrun.errors import CaptureError, ParallelError, StrategyError
from msrun.runtime import AutoParallel, MicroBatchInterleaved
from msrun.runtime.capture.batch_rows import refuse_lost_rows
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.nn.random_bits import Box, DrawKey, Source
from msrun.runtime.nn.random_calls import RandomCalls
from msrun.runtime.nn.random_draws import DRAWS, arguments_of, draw
from msrun.runtime.nn.random_stream import drawing, part_of_batch
from msrun.runtime.partition.partition import partition
from msrun.runtime.sharding.layout import Mesh, TensorLayout
from msrun.runtime.sharding.operators.dropout import BATCH_DIM, CALL, LOST, CutShape, number_dropouts
from msrun.runtime.sharding.operators.random_draws import CAPTURED, draw_part

aten = torch.ops.aten
CPU = torch.device("cpu")
MANY = 1 << 18
FLOATS = [torch.float32, torch.float64]


def source(shape: tuple[int, ...] = (MANY,), key: DrawKey | None = None, call: int = 0) -> Source:
    return Source(key or DrawKey(7, 3), call, Box.whole(shape), None, CPU)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(11)
    yield


# -- distributions ------------------------------------------------------------------------------------------------


def distance(values: Tensor, cumulative: Callable[[Tensor], Tensor]) -> float:
    """Return Kolmogorov's distance times the root of the count: 1.95 has a chance of one in a thousand."""
    ordered = values.double().sort().values
    expected, count = cumulative(ordered), len(ordered)
    places = torch.arange(count, dtype=torch.float64)
    return float(torch.maximum(expected - places / count, (places + 1) / count - expected).max()) * math.sqrt(count)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", range(3))
def test_uniform_numbers_are_uniform_and_have_all_digits_of_their_type(dtype: torch.dtype, seed: int) -> None:
    values = source(key=DrawKey(seed, 1)).uniform(dtype)
    assert values.dtype == dtype
    assert 0 <= float(values.min()) < float(values.max()) < 1
    assert distance(values, lambda x: x) < 1.95
    whole = (values.double() * 2.0 ** (24 if dtype == torch.float32 else 53)).long()
    assert torch.equal(whole.double() * 2.0 ** (-24 if dtype == torch.float32 else -53), values.double())
    for bit in range(24 if dtype == torch.float32 else 53):
        assert abs(float(((whole >> bit) & 1).double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(MANY), bit


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_short_uniform_numbers_stay_below_1(dtype: torch.dtype, digits: int) -> None:
    values = source().uniform(dtype).double()
    assert float(values.max()) == 1 - 2.0**-digits
    assert float(values.min()) == 0
    assert len(values.unique()) == 1 << digits


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", range(3))
def test_normal_numbers_have_the_shape_moments_and_tails_of_the_distribution(dtype: torch.dtype, seed: int) -> None:
    values = source(key=DrawKey(seed, 2)).normal(dtype).double()
    assert distance(values, lambda x: 0.5 * torch.special.erfc(-x / math.sqrt(2))) < 1.95
    assert abs(float(values.mean())) < 5 / math.sqrt(MANY)
    assert abs(float(values.square().mean()) - 1) < 5 * math.sqrt(2 / MANY)
    assert abs(float(values.pow(4).mean()) - 3) < 5 * math.sqrt(96 / MANY)
    for limit in (2.0, 3.0, 4.0):
        expected = MANY * math.erfc(limit / math.sqrt(2))
        assert abs(float((values.abs() > limit).sum()) - expected) < 5 * math.sqrt(expected)
    neighbours = float((values[1:] * values[:-1]).mean()) * math.sqrt(MANY)
    assert abs(neighbours) < 5


def drawn(name: str, *args: Any, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (MANY,)) -> Tensor:
    packet, overload = name.split(".")
    operator = getattr(getattr(aten, packet), overload)
    return draw(operator, arguments_of(operator, (torch.empty(shape, dtype=dtype), *args), {}), source(shape))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16, torch.bfloat16])
def test_logarithms_of_exponential_numbers_are_numbers(dtype: torch.dtype) -> None:
    values = drawn("exponential.default", 2.0, dtype=dtype)
    assert values.dtype == dtype
    assert float(values.min()) > 0
    assert values.log().isfinite().all()
    assert abs(float(values.double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(MANY) + (dtype == torch.bfloat16) * 1e-3


@pytest.mark.parametrize("dtype", FLOATS)
def test_exponential_numbers_have_their_distribution(dtype: torch.dtype) -> None:
    assert distance(drawn("exponential.default", 0.5, dtype=dtype), lambda x: 1 - (-0.5 * x).exp()) < 1.95


def test_words_at_their_limits_give_finite_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.tensor([0, -1, 1, -(1 << 31), (1 << 31) - 1], dtype=torch.int32)

    def fill(*args: Any) -> Tensor:
        _key, _call, box, _dim, _device, dtype, count, write = args
        out = torch.empty(box.sizes, dtype=dtype)
        write([words.clone() for _ in range(count)], out)
        return out

    monkeypatch.setattr("msrun.runtime.nn.random_bits.fill", fill)
    monkeypatch.setattr("msrun.runtime.nn.random_bits.spread", lambda words: words)
    limits = source((5,))
    for dtype in FLOATS:
        assert limits.normal(dtype).isfinite().all()
        uniform, above = limits.uniform(dtype), limits.above_zero(dtype)
        assert float(uniform.min()) == 0
        assert float(uniform.max()) < 1
        assert 0 < float(above.min()) < 2.0**-31
        assert float(above.max()) <= 1
        exponential = DRAWS[aten.exponential.default](limits, {"lambd": 1.0}, dtype)
        assert exponential.log().isfinite().all()
    assert limits.integers(-3, 4).tolist() == [-3, 3, -3, 0, 0]


@pytest.mark.parametrize("p", [0.0, 1e-12, 0.1, 0.5, 1 - 1e-12, 1.0])
def test_share_of_bernoulli_numbers_is_what_was_asked(p: float) -> None:
    for values in (drawn("bernoulli.p", p), drawn("bernoulli.Tensor", torch.full((MANY,), p, dtype=torch.float64))):
        assert values.dtype == torch.float32
        assert set(values.unique().tolist()) <= {0.0, 1.0}
        assert abs(float(values.double().mean()) - p) <= 5 * math.sqrt(p * (1 - p) / MANY)


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_probabilities_out_of_range_are_refused(p: float) -> None:
    with pytest.raises(ValueError, match="bernoulli expects p to be in"):
        drawn("bernoulli.p", p)
    with pytest.raises(ValueError, match="bernoulli expects p to be in"):
        drawn("bernoulli.Tensor", torch.full((MANY,), p))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (0, 1 << 31), (5, (1 << 40) + 5), (0, (1 << 63) - 1)])
def test_whole_numbers_are_uniform_in_their_range(low: int, high: int) -> None:
    values = source().integers(low, high)
    assert low <= int(values.min()) <= int(values.max()) < high
    if high - low == 10:
        counts = torch.bincount(values - low).double()
        assert float(((counts - MANY / 10) ** 2 / (MANY / 10)).sum()) < 27.9  # 9 degrees of freedom, one in a thousand
    if high - low > 1 << 20:
        assert distance((values - low).double() / (high - low), lambda x: x) < 1.95


def test_range_of_whole_numbers_that_is_empty_or_too_wide_is_refused() -> None:
    for low, high in ((3, 3), (0, (1 << 63) + 1)):
        with pytest.raises(ParallelError, match="must be 1 to 2\\^63 different ones"):
            source().integers(low, high)


def test_other_distributions_have_their_moments() -> None:
    assert distance(drawn("uniform.default", -1.0, 3.0), lambda x: (x + 1) / 4) < 1.95
    assert distance(drawn("cauchy.default", 1.0, 2.0), lambda x: ((x - 1) / 2).atan() / math.pi + 0.5) < 1.95
    geometric = drawn("geometric.default", 0.25).double()
    assert abs(float(geometric.mean()) - 4) < 5 * math.sqrt(12 / MANY)
    assert float(geometric.min()) == 1
    assert set(drawn("geometric.default", 1.0).tolist()) == {1.0}
    logarithms = drawn("log_normal.default", 0.5, 2.0).log()
    assert distance(logarithms, lambda x: 0.5 * torch.special.erfc(-(x - 0.5) / math.sqrt(8))) < 1.95
    normal = drawn("normal_functional.default", 3.0, 0.5)
    assert distance(normal, lambda x: 0.5 * torch.special.erfc(-(x - 3) / 0.5 / math.sqrt(2))) < 1.95
    assert set(drawn("random.default", dtype=torch.bool).tolist()) == {False, True}
    assert int(drawn("random.default", dtype=torch.int8).max()) == 127
    assert float(drawn("random.default", dtype=torch.float32).min()) >= 0
    assert int(drawn("random.from", -5, None, dtype=torch.int32).min()) >= -5
    assert set(drawn("random.to", 3, dtype=torch.int64).tolist()) == {0, 1, 2}


def test_draws_of_other_calls_steps_and_seeds_have_nothing_in_common() -> None:
    base = source().uniform(torch.float64) - 0.5
    for key, call in ((DrawKey(7, 3), 1), (DrawKey(7, 4), 0), (DrawKey(8, 3), 0)):
        other = source(key=key, call=call).uniform(torch.float64) - 0.5
        for shift in (0, 1, 7):
            assert abs(float((base * other.roll(shift)).mean())) * 12 * math.sqrt(MANY) < 5


# -- parts --------------------------------------------------------------------------------------------------------

OPERATORS: dict[str, tuple[Any, ...]] = {
    "aten.rand_like.default": (),
    "aten.randn_like.default": (),
    "aten.normal_functional.default": (1.0, 2.0),
    "aten.exponential.default": (),
    "aten.bernoulli.p": (0.3,),
    "aten.bernoulli.default": (),
    "aten.randint_like.default": (9,),
    "aten.rrelu.default": (0.1, 0.3, True),
}


@st.composite
def parts(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...], TensorLayout]:
    mesh = Mesh(draw(st.sampled_from([(2, 2), (3, 2), (4,)])))
    ndim = draw(st.integers(1, 3))
    places = [draw(st.integers(-1, ndim - 1)) for _ in mesh.axes]
    split = tuple(tuple(axis for axis in mesh.axes if places[axis] == dim) for dim in range(ndim))
    shape = tuple(mesh.extent(axes) * draw(st.integers(1, 3)) for axes in split)
    return mesh, shape, TensorLayout(split)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("operator", OPERATORS)
@settings(max_examples=10)
@given(case=parts())
def test_every_ranks_draw_is_its_part_of_the_whole_one(
    operator: str, dtype: torch.dtype, case: tuple[Mesh, tuple[int, ...], TensorLayout]
) -> None:
    mesh, shape, layout = case
    key = DrawKey(3, 5).to_tensor()
    value = torch.linspace(0, 1, math.prod(shape), dtype=dtype).view(shape) - (0.5 if "rrelu" in operator else 0)

    def result(local: Tensor, place: int, part: CutShape) -> Any:
        given = (local, *OPERATORS[operator])
        return draw_part(
            key, torch.tensor(place), given, {}, operator=operator, call=2, part=tuple(part), batch_dim=None
        )

    right = result(value, 0, CutShape((1,), shape, ((),) * len(shape)))
    for rank in range(mesh.size):
        place = layout.slices(mesh, shape, rank)
        assert torch.equal(result(value[place], rank, CutShape.of(layout, mesh, shape)), right[place])


@pytest.mark.parametrize("batch_parts", [1, 2])
def test_rows_of_a_copy_have_the_numbers_of_their_rows_in_the_whole_batch(batch_parts: int) -> None:
    whole = Source(DrawKey(7, 0), 0, Box.whole((8, 5)), 0, CPU).normal(torch.float64)
    for copy in range(2):
        taken = whole.unflatten(0, (batch_parts, 2, -1))[:, copy].flatten(0, 1)
        key = DrawKey(7, 0, copy, 2, batch_parts)
        assert torch.equal(Source(key, 0, Box.whole((4, 5)), 0, CPU).normal(torch.float64), taken)


# -- networks that run as they are --------------------------------------------------------------------------------


class Network(nn.Module):
    """Its result shows what it has drawn."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x * self.weight)


def alone(call: Callable[[Tensor], Any], rows: int = 8) -> Any:
    return AutoParallel(Network(call))(torch.full((rows, 6), 0.5, dtype=torch.float64))


LADDER = torch.arange(600.0, dtype=torch.float64).view(25, 24)
CALLS: dict[str, Callable[[Tensor], Any]] = {
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
    "distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "initialisation": lambda x: nn.init.trunc_normal_(torch.empty(8, 6)),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_follow_from_the_seed_and_the_step_alone(name: str) -> None:
    first = alone(CALLS[name])
    torch.rand(99)  # what others draw does not matter
    assert torch.equal(alone(CALLS[name]), first)
    torch.manual_seed(12)
    assert not torch.equal(alone(CALLS[name]), first)


GRAPHLESS = {"fractional_max_pool", "distribution", "initialisation", "normal-of-two", "random_"}
"""Those that do more than one operator, whose tensors differ, or that dynamo does not know (random_)."""


@pytest.mark.parametrize("name", every_third_fast(sorted(CALLS.keys() - GRAPHLESS)))
def test_captured_draws_have_the_numbers_of_the_network_as_it_is(name: str) -> None:
    """The one random operator of each graph, run by the rule's function, gives what the call gave."""
    shape, seen = (8, 6), {}
    example = torch.full(shape, 0.5, dtype=torch.float64)
    graph = capture(
        find_target(Network(lambda x: CALLS[name](x.detach()).sum() + x.sum())),
        [example],
        {},
        input_shapes=[shape],
        parameter_shapes={},
    ).graph
    for node in graph.nodes:
        if CALL in node.meta:
            assert node.target in CAPTURED
            given = torch.fx.node.map_arg(
                (node.args, node.kwargs),
                lambda n: (-example if "rrelu" in name else example).to(n.meta["val"].dtype),
            )
            part = CutShape((1,), shape, ((), ()))
            seen[node.meta[CALL]] = draw_part(
                DrawKey(11, 0).to_tensor(),
                torch.tensor(0),
                *given,
                operator=str(node.target),
                call=node.meta[CALL],
                part=tuple(part),
                batch_dim=node.meta[BATCH_DIM],
            )
            assert node.meta[BATCH_DIM] == 0
    (found,) = seen.values()
    if name == "gumbel":
        found = (-found.log() + example).softmax(-1)
    found = found[0] if isinstance(found, tuple) else found
    right = alone(CALLS[name])
    assert found.dtype == right.dtype
    torch.testing.assert_close(found, right.detach(), rtol=1e-12, atol=0)


def test_gradients_are_those_of_torchs_operators() -> None:
    x = torch.full((8, 6), -0.5, dtype=torch.float64, requires_grad=True)
    y = AutoParallel(Network(lambda x: F.rrelu(x, training=True)))(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(gradient, y.detach() / x.detach())
    (gradient,) = torch.autograd.grad(AutoParallel(Network(lambda x: torch.bernoulli(-x)))(x).sum(), x)
    assert not gradient.any()
    part = tuple(CutShape((1,), (8, 6), ((), ())))
    given = {"call": 0, "part": part, "batch_dim": None}
    key, place = DrawKey(1, 0).to_tensor(), torch.tensor(0)
    y = draw_part(key, place, (-x,), {}, operator="aten.bernoulli.default", **given)
    assert not torch.autograd.grad(y.sum(), x)[0].any()
    y = draw_part(key, place, (x, 0.1, 0.3, True), {}, operator="aten.rrelu.default", **given)
    assert torch.allclose(torch.autograd.grad(y.sum(), x)[0], y.detach() / x.detach())
    assert not draw_part(key, place, (x,), {}, operator="aten.rand_like.default", **given).requires_grad


def test_own_generators_and_first_values_of_parameters_are_left_to_torch() -> None:
    def call(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        weight = nn.init.normal_(nn.Parameter(torch.empty(6)))
        return torch.rand(8, 6, generator=generator) + x.detach() * 0 + weight.detach()

    torch.manual_seed(3)
    network = Network(call)
    found = AutoParallel(network)(torch.ones(8, 6, dtype=torch.float64))
    torch.manual_seed(3)
    right = torch.rand(8, 6, generator=torch.Generator().manual_seed(5)) + torch.randn(6)
    assert torch.allclose(found.float(), right)


def test_in_place_draws_write_and_keep_the_memory_of_their_tensor() -> None:
    kept: dict[str, Tensor] = {}

    def call(x: Tensor) -> Tensor:
        kept["given"] = torch.zeros(6, 8).t()
        kept["found"] = kept["given"].uniform_(1, 2)
        return kept["found"]

    alone(call)
    assert kept["found"] is kept["given"]
    assert float(kept["given"].min()) >= 1
    assert alone(lambda x: torch.rand_like(x.t())).stride() == (1, 6)


def test_copies_of_a_batch_on_one_process_draw_what_the_whole_batch_draws() -> None:
    def call(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape[0], 1) + torch.rand_like(x) + torch.rand(6)
        joined = torch.rand_like(torch.stack([x, x], 1).flatten(0, 1)).view(-1, 2, 6).sum(1)
        second = torch.empty(3, x.shape[0], 6).uniform_().sum(0)
        return (noise + joined + second + torch.rand(()) + x.new_empty(x.shape[0], 1).bernoulli_(0.5)).detach() + 0 * x

    right = alone(call)
    network = MicroBatchInterleaved(Network(call), 2)
    seen: list[Tensor] = []
    network.network.register_forward_hook(lambda module, given, result: seen.append(result.detach()))
    AutoParallel(network)(torch.full((8, 6), 0.5, dtype=torch.float64))
    assert torch.equal(torch.cat(seen), right.detach())


def test_rank_that_runs_its_own_rows_draws_the_numbers_of_these_rows() -> None:
    network = Network(lambda x: torch.randn(len(x), 3))
    x = torch.ones(8, 6, dtype=torch.float64)
    right = AutoParallel(network)(x)
    torch.manual_seed(11)
    fresh = Network(network.call)
    with drawing(fresh, lambda question: question(), 1), RandomCalls(), part_of_batch(1, 2, [x[4:]]):
        assert torch.equal(fresh(x[4:]), right[4:])


def test_torchs_own_numbers_on_several_ranks_are_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    network = MicroBatchInterleaved(Network(lambda x: x * 0 + torch.randperm(8).sum()), 2)
    step = AutoParallel(network)
    for _ in range(2):
        step(torch.ones(8, 6, dtype=torch.float64))
    assert [record.message for record in caplog.records if "randperm" in record.message] == [
        "randperm draws torch's own numbers: they are right, but not those of one process"
    ]


# -- captured graphs ----------------------------------------------------------------------------------------------


class Turned(torch.autograd.Function):
    """The transpose: nobody knows what a custom function does with its dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.t().contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.t()


def captured_draws(call: Callable[[Tensor], Tensor], rows: int = 4) -> fx.Graph:
    shape = (rows, 6)
    return capture(
        find_target(Network(call)),
        [torch.ones(shape, dtype=torch.float64)],
        {},
        input_shapes=[shape],
        parameter_shapes={},
    ).graph


def rows_found(call: Callable[[Tensor], Tensor], rows: int = 4) -> list[int | None]:
    return [node.meta[BATCH_DIM] for node in captured_draws(call, rows).nodes if CALL in node.meta]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: x + torch.rand(4, 1), 0),
        (lambda x: x + torch.rand(6), None),
        (lambda x: x + torch.rand(()), None),
        (lambda x: x + torch.rand(12).sum(), LOST),
        (lambda x: x + torch.rand(3, 4, 1).sum(), LOST),
        (lambda x: x * x.new_empty(4, 1).bernoulli_(0.5), 0),
        (lambda x: x * torch.zeros(4, 1).bernoulli_(0.5), 0),
        (lambda x: x + torch.normal(torch.zeros(4, 6), torch.ones(4, 6)), 0),
        (lambda x: x + torch.rand_like(x.t()).t(), 1),
        (lambda x: x.sum() + torch.rand_like(x.t().reshape(-1)).sum(), LOST),
        (lambda x: x.view(-1) + torch.rand_like(x.view(-1)), 0),
        # Statistics of the batch are no rows, and change none.
        (lambda x: F.dropout(x - x.mean(0)), 0),
        (lambda x: F.dropout(F.batch_norm(x, x.detach().mean(0), x.detach().var(0))), 0),
        (lambda x: F.dropout(x.t().flip(1)), 1),
        (lambda x: F.dropout((x @ x.t()).softmax(-1) @ x), LOST),
        (lambda x: F.dropout(x + (x @ x.t()).softmax(-1) @ x), 0),
        (lambda x: F.dropout(x.t() @ x), LOST),
        # Operators without a rule, and functions of the user's.
        (lambda x: F.dropout(x.unfold(1, 2, 2)), 0),
        (lambda x: F.dropout(x.index_add(1, torch.tensor([0, 2]), torch.ones_like(x[:, :2]))), 0),
        (lambda x: F.dropout(Turned.apply(x)), 1),
        (lambda x: F.dropout(Turned.apply(x[:, :4])), 1),
        (lambda x: F.dropout(Turned.apply(x).median(1).values), LOST),
        (lambda x: torch.bernoulli(x.t().sigmoid().chunk(2)[0]), 1),
    ],
)
def test_rows_of_the_batch_are_found_in_what_is_drawn(call: Callable[[Tensor], Tensor], expected: int | None) -> None:
    assert rows_found(call) == [expected]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: F.dropout(x.unflatten(-1, (2, 3)).transpose(1, 2)), 0),
        (lambda x: F.dropout(x.t().unsqueeze(0)), 2),
        (lambda x: F.dropout(x.view(-1)), 0),
        (lambda x: F.dropout(x.t().reshape(-1)), LOST),
    ],
)
def test_one_row_is_found_as_many_are(call: Callable[[Tensor], Tensor], expected: int) -> None:
    assert rows_found(call, rows=1) == [expected]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: x + torch.rand(12).sum(), r"aten.rand in module \(top\) draws .* of shape \(12,\)"),
        (lambda x: F.dropout(x.t().reshape(-1)), r"aten.dropout in module \(top\) draws .* of shape \(24,\)"),
    ],
)
def test_network_whose_random_numbers_nobody_can_find_the_rows_of_runs_in_one_part(
    call: Callable[[Tensor], Tensor], name: str
) -> None:
    graph = captured_draws(call)
    refuse_lost_rows(graph, 1)
    with pytest.raises(StrategyError, match=rf"{name} whose rows of the batch are not known, so 2 parts"):
        refuse_lost_rows(graph, 2)


@pytest.mark.parametrize("call", [lambda x: x + torch.rand(4, 1), F.dropout, lambda x: x + torch.rand(6)])
def test_network_whose_random_numbers_have_known_rows_runs_in_several_parts(call: Callable[[Tensor], Tensor]) -> None:
    refuse_lost_rows(captured_draws(call), 2)


def test_copies_of_rows_that_nobody_can_find_are_refused() -> None:
    given = {"operator": "aten.rand.default", "call": 0, "part": ((2,), (12,), ((),)), "batch_dim": LOST}
    with pytest.raises(StrategyError, match=r"aten.rand.default .* rows of the batch are not known.* or use one copy"):
        draw_part(DrawKey(1, 0, 0, 2).to_tensor(), torch.tensor(0), ([12],), {}, **given)
    assert draw_part(DrawKey(1, 0).to_tensor(), torch.tensor(0), ([12],), {}, **given).shape == (12,)


def test_every_operator_that_draws_has_a_number_and_those_without_training_have_none() -> None:
    shape = (4, 6)
    graph = capture(
        find_target(Network(lambda x: F.dropout(x) + torch.rand_like(x) + F.rrelu(x) + torch.randn(4, 6))),
        [torch.ones(shape, dtype=torch.float64)],
        {},
        input_shapes=[shape],
        parameter_shapes={},
    ).graph
    assert [node.meta[CALL] for node in graph.nodes if CALL in node.meta] == [0, 1, 2]


def test_numbers_that_would_differ_from_rank_to_rank_are_refused_with_a_remedy() -> None:
    for draws, named, reason in [
        (aten.rand.generator, {"generator": torch.Generator()}, "draws from a generator of its own"),
        (aten.binomial.default, {}, "draws random numbers, which would not be those of one process"),
    ]:
        graph = fx.Graph()
        value = graph.placeholder("x")
        graph.call_function(draws, ([2, 3],) if named else (value, value), named)
        with pytest.raises(CaptureError, match=reason):
            number_dropouts(graph)


def test_draw_into_memory_from_outside_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"aten\.uniform_ changes"):
        rows_found(lambda x: x + Outside.memory.uniform_())


class Outside:
    memory = torch.zeros(6)


def test_random_numbers_made_of_nothing_are_drawn_in_the_part_that_all_readers_take() -> None:
    shape = (4, 6)
    captured = capture(
        find_target(Network(lambda x: (x * torch.rand(4, 6) * torch.rand(4, 6)[:, 1:2]).sum())),
        [torch.ones(shape, dtype=torch.float64)],
        {},
        input_shapes=[shape],
        parameter_shapes={},
    )
    rows = TensorLayout(((0,), ()))
    program = partition(captured, Mesh((2,)), input_layouts=[rows], strategies={}, output_batch_axes=(0,))
    parts = [node.kwargs["part"] for node in program.graph.nodes if node.target is draw_part]
    assert parts == [tuple(CutShape((2,), shape, ((0,), ())))] * 2
    assert not [text for operator in program.operators for text in operator.collectives if "slice" in text]
