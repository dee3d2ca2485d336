"""Random numbers: distributions and masks, parts of one whole, rows of the batch, each call on its own."""

import dataclasses
import math

import pytest
import torch
from asked_cases import one_fast
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.errors import ParallelError, StrategyError
from msrun.runtime.nn.random_calls import drop, mask_shape
from msrun.runtime.nn.random_draws import DRAWS, arguments_of, draw
from msrun.runtime.nn.random_stream import Box, DrawKey, Source, keep_mask
from msrun.runtime.sharding.layout import Mesh, TensorLayout
from msrun.runtime.sharding.operators.dropout import LOST, CutShape, draw_part, part_mask

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
    ndim = draw(st.integers(1, 4))
    places = [draw(st.integers(-1, ndim - 1)) for _ in mesh.axes]
    order = draw(st.permutations(mesh.axes))
    split = tuple(tuple(axis for axis in order if places[axis] == dim) for dim in range(ndim))
    shape = tuple(mesh.extent(axes) * draw(st.integers(1, 3)) for axes in split)
    return mesh, shape, TensorLayout(split)


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
