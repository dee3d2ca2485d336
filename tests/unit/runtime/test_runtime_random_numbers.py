"""Random numbers: distributions and masks, parts of one whole, rows of the batch, each call on its own.
Networks that draw: the same numbers for the same seed and step, whole, in copies, captured; what is refused."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import every_third_fast, one_fast
from drawn_layouts import layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from small_capture import captured, partitioned
from torch import nn
from torch.utils.checkpoint import checkpoint

from msrun.errors import CaptureError, ParallelError, StrategyError
from msrun.runtime import AutoParallel, MicroBatchInterleaved
from msrun.runtime.capture.batch_rows import refuse_lost_rows
from msrun.runtime.nn.random_calls import drop, mask_shape
from msrun.runtime.nn.random_draws import DRAWS, arguments_of, draw
from msrun.runtime.nn.random_stream import Box, DrawKey, Source, keep_mask, put_stream_state, take_stream_state
from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.sharding.operators.dropout import BATCH_DIM, CALL, LOST, CutShape, draw_part, part_mask

aten = torch.ops.aten
CPU = torch.device("cpu")
MANY = 1 << 18
FLOATS = [torch.float32, torch.float64]


def source(shape=(MANY,), key=None, call=0):
    return Source(key or DrawKey(7, 3), call, Box.whole(shape), None, CPU)


def whole_mask(shape, p=0.5, key=None, call=0):
    return keep_mask(key or DrawKey(7, 0), call, p, Box.whole(shape), 0, CPU)


def distance(values, cumulative):
    """Return Kolmogorov's distance times the root of the count: 1.95 has a chance of one in a thousand."""
    ordered = values.double().sort().values
    expected, count = cumulative(ordered), len(ordered)
    places = torch.arange(count, dtype=torch.float64)
    return float(torch.maximum(expected - places / count, (places + 1) / count - expected).max()) * math.sqrt(count)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", range(3))
def test_uniform_numbers_are_uniform_and_have_all_digits_of_their_type(dtype, seed):
    values = source(key=DrawKey(seed, 1)).uniform(dtype)
    assert values.dtype == dtype
    assert 0 <= float(values.min()) < float(values.max()) < 1
    assert distance(values, lambda x: x) < 1.95
    whole = (values.double() * 2.0 ** (24 if dtype == torch.float32 else 53)).long()
    assert torch.equal(whole.double() * 2.0 ** (-24 if dtype == torch.float32 else -53), values.double())
    for bit in range(24 if dtype == torch.float32 else 53):
        assert abs(float(((whole >> bit) & 1).double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(MANY), bit


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_short_uniform_numbers_stay_below_1(dtype, digits):
    values = source().uniform(dtype).double()
    assert float(values.max()) == 1 - 2.0**-digits
    assert float(values.min()) == 0
    assert len(values.unique()) == 1 << digits


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", range(3))
def test_normal_numbers_have_the_shape_moments_and_tails_of_the_distribution(dtype, seed):
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


def drawn(name, *args, dtype=torch.float32, shape=(MANY,)):
    packet, overload = name.split(".")
    operator = getattr(getattr(aten, packet), overload)
    return draw(operator, arguments_of(operator, (torch.empty(shape, dtype=dtype), *args), {}), source(shape))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16, torch.bfloat16])
def test_exponential_numbers_have_their_distribution_and_their_logarithms_are_numbers(dtype):
    values = drawn("exponential.default", 2.0, dtype=dtype)
    assert values.dtype == dtype
    assert float(values.min()) > 0
    assert values.log().isfinite().all()
    assert abs(float(values.double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(MANY) + (dtype == torch.bfloat16) * 1e-3
    if dtype in FLOATS:
        assert distance(values, lambda x: 1 - (-2.0 * x).exp()) < 1.95


def test_words_at_their_limits_give_finite_numbers(monkeypatch):
    words = torch.tensor([0, -1, 1, -(1 << 31), (1 << 31) - 1], dtype=torch.int32)

    def fill(*args):
        _key, _call, box, _dim, _device, dtype, count, write = args
        out = torch.empty(box.sizes, dtype=dtype)
        write([words.clone() for _ in range(count)], out)
        return out

    monkeypatch.setattr("msrun.runtime.nn.random_stream.fill", fill)
    monkeypatch.setattr("msrun.runtime.nn.random_stream.spread", lambda words: words)
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
def test_share_of_bernoulli_numbers_is_what_was_asked(p):
    for values in (drawn("bernoulli.p", p), drawn("bernoulli.Tensor", torch.full((MANY,), p, dtype=torch.float64))):
        assert values.dtype == torch.float32
        assert set(values.unique().tolist()) <= {0.0, 1.0}
        assert abs(float(values.double().mean()) - p) <= 5 * math.sqrt(p * (1 - p) / MANY)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (0, 1 << 31), (5, (1 << 40) + 5), (0, (1 << 63) - 1)])
def test_whole_numbers_are_uniform_in_their_range(low, high):
    values = source().integers(low, high)
    assert low <= int(values.min()) <= int(values.max()) < high
    if high - low == 10:
        counts = torch.bincount(values - low).double()
        assert float(((counts - MANY / 10) ** 2 / (MANY / 10)).sum()) < 27.9  # 9 degrees of freedom, one in a thousand
    if high - low > 1 << 20:
        assert distance((values - low).double() / (high - low), lambda x: x) < 1.95


def test_what_is_out_of_range_is_refused():
    for p in (-0.1, 1.1, math.nan):
        for name, value in (("bernoulli.p", p), ("bernoulli.Tensor", torch.full((MANY,), p))):
            with pytest.raises(ValueError, match="bernoulli expects p to be in"):
                drawn(name, value)
    for low, high in ((3, 3), (0, (1 << 63) + 1)):
        with pytest.raises(ParallelError, match="must be 1 to 2\\^63 different ones"):
            source().integers(low, high)


def test_other_distributions_have_their_moments():
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


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(400, 500), (200_000,), (4, 5, 100, 100)])
def test_share_of_kept_elements_is_what_was_asked(p, shape):
    kept = whole_mask(shape, p).double()
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.mean() - (1 - p)) < 5 * deviation
    rows = kept.flatten(0, -2).mean(1) if len(shape) > 1 else kept.view(-1, 1000).mean(1)
    length = kept.numel() // rows.numel()
    assert float(rows.var()) == pytest.approx(p * (1 - p) / length, rel=0.5)


def test_elements_behind_the_first_2_to_the_32_have_masks_of_their_own():
    """Whichever part is drawn: a run of consecutive elements or one with gaps, across the border or beside it."""

    def drawn(*box, shape):
        begins, sizes = zip(*box, strict=True)
        return keep_mask(DrawKey(7, 0), 0, 0.5, Box(shape, begins, sizes), None, CPU)

    far, long = 1 << 32, (1 << 34,)
    first, second, third = (drawn((place, 4096), shape=long) for place in (0, far, 2 * far))
    for one, other in ((first, second), (second, third), (first, third)):
        assert abs((one == other).double().mean() - 0.5) < 0.05
    assert torch.equal(drawn((0, 4096), shape=(4096,)), first), "shorter tensors have the numbers that they had"
    across = drawn((far - 70_000, 140_000), shape=long)
    parts = [drawn((far - 70_000, 70_000), shape=long), drawn((far, 70_000), shape=long)]
    assert torch.equal(across, torch.cat(parts))
    wide = (1 << 20, 1 << 14)
    rows = drawn(((1 << 18) - 2, 4), (0, 1 << 14), shape=wide)
    columns = drawn(((1 << 18) - 2, 4), (5, 9), shape=wide)
    assert torch.equal(rows[:, 5:14], columns)
    assert torch.equal(rows[2], drawn((far, 1 << 14), shape=long))


def test_masks_of_other_calls_steps_seeds_and_neighbours_have_nothing_in_common():
    base = whole_mask((300, 700))
    keys = [(DrawKey(7, 0), 1), (DrawKey(7, 1), 0), (DrawKey(8, 0), 0), (DrawKey(7, 1), 1), (DrawKey(-7, 0), 0)]
    others = [whole_mask((300, 700), key=key, call=call) for key, call in keys]
    others += [base.roll(shift, dim) for shift in (1, 2, 64, 128) for dim in (0, 1)]
    others += [other.roll(shift, 1) for other in others[:3] for shift in (1, 7)]
    for other in others:
        agreement = (base == other).double().mean()
        assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(base.numel())


def test_extremes_keep_everything_or_nothing():
    assert whole_mask((50, 50), 0.0).all()
    assert not whole_mask((50, 50), 1.0).any()
    assert whole_mask(()).shape == ()
    assert whole_mask((0, 3)).shape == (0, 3)


OPERATORS = {
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
def parts(draw):
    mesh = Mesh(draw(st.sampled_from([(2, 2), (3, 2), (4,), (2, 2, 2)])))
    layout = draw(layouts(mesh, draw(st.integers(1, 4))))
    return mesh, tuple(mesh.extent(axes) * draw(st.integers(1, 3)) for axes in layout.split), layout


def test_values_that_are_replaced_have_a_gradient_of_0():
    share, whole = torch.full((3,), 0.5, requires_grad=True), CutShape((1,), (3,), ((),))
    given = DrawKey(3, 5).to_tensor(), torch.tensor(0), (share,), {}
    drawn, made_alike = (
        draw_part(*given, operator=f"aten.{name}.default", call=2, part=tuple(whole), batch_dim=None)
        for name in ("bernoulli", "rand_like")
    )
    assert torch.autograd.grad(drawn.sum(), share)[0].tolist() == [0.0, 0.0, 0.0]
    assert not made_alike.requires_grad


@pytest.mark.parametrize("dtype", one_fast(*FLOATS))
@pytest.mark.parametrize("operator", OPERATORS)
@settings(max_examples=5)
@given(case=parts())
def test_every_ranks_draw_is_its_part_of_the_whole_one(operator, dtype, case):
    mesh, shape, layout = case
    key = DrawKey(3, 5).to_tensor()
    value = torch.linspace(0, 1, math.prod(shape), dtype=dtype).view(shape) - (0.5 if "rrelu" in operator else 0)

    def result(local, place, part):
        given = (local, *OPERATORS[operator])
        return draw_part(
            key, torch.tensor(place), given, {}, operator=operator, call=2, part=tuple(part), batch_dim=None
        )

    right = result(value, 0, CutShape((1,), shape, ((),) * len(shape)))
    for rank in range(mesh.size):
        place = layout.slices(mesh, shape, rank)
        assert torch.equal(result(value[place], rank, CutShape.of(layout, mesh, shape)), right[place])


@given(parts())
def test_every_ranks_mask_is_its_part_of_the_whole_one(case):
    mesh, shape, layout = case
    key = DrawKey(3, 5)
    right = keep_mask(key, 2, 0.4, Box.whole(shape), None, CPU)
    for rank in range(mesh.size):
        part = CutShape.of(layout, mesh, shape)
        mine = part_mask(key.to_tensor(), torch.tensor(rank), 2, 0.4, part, None, CPU)
        assert torch.equal(mine, right[layout.slices(mesh, shape, rank)])


def test_long_tensors_are_worked_on_in_blocks_without_a_seam():
    right = whole_mask((3, 50_000))
    assert torch.equal(whole_mask((150_000,)).view(3, -1), right)
    for begin, size in ((0, 70_000), (70_000, 80_000), (149_999, 1)):
        part = keep_mask(DrawKey(7, 0), 0, 0.5, Box((150_000,), (begin,), (size,)), 0, CPU)
        assert torch.equal(part, right.view(-1)[begin : begin + size])


@pytest.mark.parametrize("batch_parts", [1, 2, 4])
@pytest.mark.parametrize("joined", [1, 3])
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_rows_of_a_copy_have_the_masks_of_their_rows_in_the_whole_batch(batch_parts, joined, batch_dim):
    """Each rank's rows are cut into copies: of two ranks with rows 0, 1 | 2, 3 the copies have 0, 2 and 1, 3."""
    rows, copies = 8, 2
    right = whole_mask((rows * joined, 5)) if batch_dim == 0 else whole_mask((5, rows * joined))
    by_row = right.movedim(batch_dim, 0).unflatten(0, (rows, joined))
    for copy in range(copies):
        taken = by_row.unflatten(0, (batch_parts, copies, -1))[:, copy].flatten(0, 1)
        key = DrawKey(7, 0, copy, copies, batch_parts)
        shape = (4 * joined, 5) if batch_dim == 0 else (5, 4 * joined)
        mine = keep_mask(key, 0, 0.5, Box.whole(shape), batch_dim, CPU)
        assert torch.equal(mine.movedim(batch_dim, 0).unflatten(0, (4, joined)), taken)


def test_copies_of_rows_that_nobody_can_find_are_refused():
    part, place = CutShape((2,), (12,), ((),)), torch.tensor(0)
    with pytest.raises(StrategyError, match="2 copies of the batch cannot have the numbers of one"):
        part_mask(DrawKey(1, 0, 0, 2).to_tensor(), place, 0, 0.5, part, LOST, CPU)
    assert part_mask(DrawKey(1, 0).to_tensor(), place, 0, 0.5, part, LOST, CPU).shape == (12,)


def test_alpha_dropout_keeps_mean_and_variance_of_standard_numbers():
    x = torch.randn(400, 500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = drop(x, whole_mask((400, 500), 0.2), 0.2, "alpha_dropout")
    assert float(y.mean()) == pytest.approx(0, abs=0.02)
    assert float(y.var()) == pytest.approx(1, rel=0.02)


def test_feature_dropout_drops_whole_channels():
    shape = mask_shape("feature_dropout", (20, 30, 4, 5))
    y = drop(torch.ones(20, 30, 4, 5), whole_mask(shape, 0.25), 0.25, "feature_dropout").flatten(2)
    assert torch.equal(y.amin(-1), y.amax(-1))
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])


def test_key_travels_as_a_tensor():
    key = DrawKey((1 << 64) - 5, 3, 1, 2, 4)
    back = DrawKey.of_tensor(key.to_tensor())
    assert dataclasses.replace(back, seed=back.seed % (1 << 64)) == key
    assert torch.equal(whole_mask((99,), key=back), whole_mask((99,), key=key))


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
    return captured(Network(call), X[:rows]).graph


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


def test_torchs_own_numbers_on_several_ranks_are_announced_once(logged):
    network = MicroBatchInterleaved(Network(lambda x: x * 0 + torch.randperm(8).sum()), 2)
    step = AutoParallel(network)
    for _ in range(2):
        step(X)
    assert [record.getMessage() for record in logged if "randperm" in record.getMessage()] == [
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


@pytest.mark.parametrize("also", one_fast(lambda x: x, lambda x: PLAIN(x.unsqueeze(1))[0][:, 0]), ids=["", "gru"])
def test_draws_are_numbered_in_the_order_of_the_network_without_those_that_draw_nothing(also):
    def call(x):
        x = F.dropout(x, training=False) + F.dropout(x, 0.0) + F.rrelu(x) + also(x)
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
            (lambda x: DROPPING(x.unsqueeze(1))[0], "aten.gru.input"),
            (
                lambda x: x + torch.binomial(x.detach() * 0 + 9, x.detach() * 0 + 0.5),
                "draws random numbers, which would not be",
            ),
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
    network = Network(lambda x: (x * torch.rand(4, 6) * torch.rand(4, 6)[:, 1:2]).sum())
    program = partitioned(captured(network, X[:4]), 2, is_cut=True)
    parts = [node.kwargs["part"] for node in program.graph.nodes if node.target is draw_part]
    assert parts == [tuple(CutShape((2,), (4, 6), ((0,), ())))] * 2
    assert not [text for operator in program.operators for text in operator.collectives if "slice" in text]
