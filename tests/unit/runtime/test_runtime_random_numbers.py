"""Masks of dropout: random enough, parts of one whole, the same each time; other randomness is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel, MicroBatchInterleaved
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.nn.dropout import drop, mask_shape
from msrun.runtime.nn.random_bits import Box, DrawKey, keep_mask
from msrun.runtime.nn.random_stream import (
    current_draw,
    drawing,
    part_of_batch,
    put_stream_state,
    slices_of_batch,
    take_stream_state,
)
from msrun.runtime.sharding.layout import Mesh, TensorLayout
from msrun.runtime.sharding.operators.dropout import LOST, CutShape, part_mask

CPU = torch.device("cpu")


def whole_mask(shape: tuple[int, ...], p: float = 0.5, key: DrawKey | None = None, call: int = 0) -> Tensor:
    return keep_mask(key or DrawKey(7, 0), call, p, Box.whole(shape), 0, CPU)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(400, 500), (200_000,), (4, 5, 100, 100)])
def test_share_of_kept_elements_is_what_was_asked(p: float, shape: tuple[int, ...]) -> None:
    kept = whole_mask(shape, p).double()
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.mean() - (1 - p)) < 5 * deviation
    rows = kept.flatten(0, -2).mean(1) if len(shape) > 1 else kept.view(-1, 1000).mean(1)
    length = kept.numel() // rows.numel()
    assert float(rows.var()) == pytest.approx(p * (1 - p) / length, rel=0.5)


def test_elements_behind_the_first_2_to_the_32_have_masks_of_their_own() -> None:
    """Whichever part is drawn: a run of consecutive elements or one with gaps, across the border or beside it."""

    def drawn(*box: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
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


def test_masks_of_other_calls_steps_seeds_and_neighbours_have_nothing_in_common() -> None:
    base = whole_mask((300, 700))
    others = [
        whole_mask((300, 700), key=key, call=call)
        for key, call in [
            (DrawKey(7, 0), 1),
            (DrawKey(7, 1), 0),
            (DrawKey(8, 0), 0),
            (DrawKey(7, 1), 1),
            (DrawKey(-7, 0), 0),
        ]
    ]
    others += [base.roll(shift, dim) for shift in (1, 2, 64, 128) for dim in (0, 1)]
    others += [other.roll(shift, 1) for other in others[:3] for shift in (1, 7)]
    for other in others:
        agreement = (base == other).double().mean()
        assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(base.numel())


def test_extremes_keep_everything_or_nothing() -> None:
    assert whole_mask((50, 50), 0.0).all()
    assert not whole_mask((50, 50), 1.0).any()
    assert whole_mask(()).shape == ()
    assert whole_mask((0, 3)).shape == (0, 3)


@st.composite
def parts(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...], TensorLayout]:
    mesh = Mesh(draw(st.sampled_from([(2, 2), (3, 2), (2, 2, 2)])))
    ndim = draw(st.integers(1, 4))
    places = [draw(st.integers(-1, ndim - 1)) for _ in mesh.axes]
    order = draw(st.permutations(mesh.axes))
    split = tuple(tuple(axis for axis in order if places[axis] == dim) for dim in range(ndim))
    shape = tuple(mesh.extent(axes) * draw(st.integers(1, 3)) for axes in split)
    return mesh, shape, TensorLayout(split)


@given(parts())
def test_every_ranks_mask_is_its_part_of_the_whole_one(case: tuple[Mesh, tuple[int, ...], TensorLayout]) -> None:
    mesh, shape, layout = case
    key = DrawKey(3, 5)
    right = keep_mask(key, 2, 0.4, Box.whole(shape), None, CPU)
    for rank in range(mesh.size):
        part = CutShape.of(layout, mesh, shape)
        mine = part_mask(key.to_tensor(), torch.tensor(rank), 2, 0.4, part, None, CPU)
        assert torch.equal(mine, right[layout.slices(mesh, shape, rank)])


def test_long_tensors_are_worked_on_in_blocks_without_a_seam() -> None:
    right = whole_mask((3, 50_000))
    assert torch.equal(whole_mask((150_000,)).view(3, -1), right)
    for begin, size in ((0, 70_000), (70_000, 80_000), (149_999, 1)):
        part = keep_mask(DrawKey(7, 0), 0, 0.5, Box((150_000,), (begin,), (size,)), 0, CPU)
        assert torch.equal(part, right.view(-1)[begin : begin + size])


@pytest.mark.parametrize("batch_parts", [1, 2, 4])
@pytest.mark.parametrize("joined", [1, 3])
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_rows_of_a_copy_have_the_masks_of_their_rows_in_the_whole_batch(
    batch_parts: int, joined: int, batch_dim: int
) -> None:
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


def test_copies_of_rows_that_nobody_can_find_are_refused() -> None:
    part = CutShape((2,), (4, 4), ((), ()))
    with pytest.raises(StrategyError, match="2 copies of the batch cannot have the numbers of one"):
        part_mask(DrawKey(1, 0, 0, 2).to_tensor(), torch.tensor(0), 0, 0.5, part, LOST, CPU)
    assert part_mask(DrawKey(1, 0).to_tensor(), torch.tensor(0), 0, 0.5, part, LOST, CPU).shape == (4, 4)


def test_alpha_dropout_keeps_mean_and_variance_of_standard_numbers() -> None:
    x = torch.randn(400, 500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = drop(x, whole_mask((400, 500), 0.2), 0.2, "alpha_dropout")
    assert float(y.mean()) == pytest.approx(0, abs=0.02)
    assert float(y.var()) == pytest.approx(1, rel=0.02)


def test_feature_dropout_drops_whole_channels() -> None:
    shape = mask_shape("feature_dropout", (20, 30, 4, 5))
    y = drop(torch.ones(20, 30, 4, 5), whole_mask(shape, 0.25), 0.25, "feature_dropout").flatten(2)
    assert torch.equal(y.amin(-1), y.amax(-1))
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])


class Network(nn.Module):
    """Its result shows its masks."""

    def __init__(self, call: Callable[[Tensor], Tensor], *, is_training: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.call = call
        self.train(is_training)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x * self.weight)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(11)
    yield


def run_alone(call: Callable[[Tensor], Tensor], steps: int = 3, shape: tuple[int, ...] = (8, 6)) -> list[Tensor]:
    step = AutoParallel(Network(call))
    return [step(torch.ones(shape, dtype=torch.float64)).detach() for _ in range(steps)]


def test_masks_follow_from_the_seed_and_the_step_alone() -> None:
    first = run_alone(F.dropout)
    torch.rand(1000)  # what others draw does not matter
    assert all(torch.equal(a, b) for a, b in zip(first, run_alone(F.dropout), strict=True))
    assert not torch.equal(first[0], first[1])
    torch.manual_seed(12)
    assert not torch.equal(first[0], run_alone(F.dropout)[0])


def test_every_call_of_a_network_has_a_mask_of_its_own() -> None:
    (y,) = run_alone(lambda x: torch.stack([F.dropout(x), F.dropout(x)]), 1)
    assert not torch.equal(y[0], y[1])


def test_network_that_drops_nothing_takes_no_step() -> None:
    calls = {"drops": False}
    step = AutoParallel(Network(lambda x: F.dropout(x, training=calls["drops"])))
    x = torch.ones(8, 6, dtype=torch.float64)
    assert torch.equal(step(x), x)
    calls["drops"] = True
    assert torch.equal(step(x), run_alone(F.dropout, 1)[0])


def test_network_without_parameters_has_new_masks_at_every_step_too() -> None:
    step, x = AutoParallel(nn.Dropout()), torch.ones(8, 6)
    assert not torch.equal(step(x), step(x))


def test_stream_goes_on_from_its_state_in_another_network() -> None:
    network = Network(F.dropout)
    step, x = AutoParallel(network), torch.ones(8, 6, dtype=torch.float64)
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


def test_gradient_is_the_mask_and_so_is_the_second_one() -> None:
    x = torch.ones(8, 6, dtype=torch.float64, requires_grad=True)
    y = AutoParallel(Network(lambda x: F.dropout(x, 0.25)))(x)
    (gradient,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    assert torch.allclose(gradient, 2 * y * y)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert torch.allclose(second, 2 * y * y)


def test_copies_of_a_batch_on_one_process_drop_what_the_whole_batch_drops() -> None:
    (right,) = run_alone(lambda x: F.dropout(F.dropout(x, 0.2), 0.2), 1)
    network = MicroBatchInterleaved(Network(lambda x: F.dropout(F.dropout(x, 0.2), 0.2)), 4)
    seen: list[Tensor] = []
    network.network.register_forward_hook(lambda module, given, result: seen.append(result.detach()))
    AutoParallel(network)(torch.ones(8, 6, dtype=torch.float64))
    assert torch.equal(torch.cat(seen), right)


def test_copies_of_micro_batches_are_slices_of_the_batch_in_any_order() -> None:
    network = Network(F.dropout)
    with drawing(network, lambda question: question(), 2) as draw, part_of_batch(1, 2), slices_of_batch((3, 1), 4):
        inner = current_draw.get()
        assert inner is not None
        found = [inner.key(copy) for copy in (0, 1)]
        assert [(key.index, key.count, key.batch_parts) for key in found] == [(7, 8, 2), (5, 8, 2)]
    assert draw.is_used
    assert take_stream_state(network.parameters()) == [11, 1]


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda x: nn.Dropout(0.3)(x), (8, 6)),
        (lambda x: nn.Dropout(0.3, inplace=True)(x * 1), (8, 6)),
        (lambda x: torch.dropout(x, 0.3, train=True), (8, 6)),
        (lambda x: torch.dropout_(x * 1, 0.3, train=True), (8, 6)),
    ],
)
def test_every_way_to_write_dropout_has_the_same_mask(call: Callable[[Tensor], Tensor], shape: Any) -> None:
    (right,) = run_alone(lambda x: F.dropout(x, 0.3), 1, shape)
    assert torch.equal(run_alone(call, 1, shape)[0], right)


def test_inplace_dropout_writes_into_its_input() -> None:
    kept: dict[str, Tensor] = {}

    def call(x: Tensor) -> Tensor:
        kept["given"] = x * 2
        return F.dropout(kept["given"], 0.5, inplace=True)

    (y,) = run_alone(call, 1)
    assert torch.equal(kept["given"], y)


@pytest.mark.parametrize("needs_weights", [True, False])
def test_dropout_inside_multi_head_attention_is_ours(needs_weights: bool) -> None:
    attention = nn.MultiheadAttention(6, 2, dropout=0.5, dtype=torch.float64)

    def call(x: Tensor) -> Tensor:
        return attention(x, x * 2, x, need_weights=needs_weights)[0]

    first, second = run_alone(call, 2, (4, 3, 6))
    assert not torch.equal(first, second)
    torch.rand(9)
    assert torch.equal(run_alone(call, 1, (4, 3, 6))[0], first)
    attention.eval()
    assert torch.equal(run_alone(call, 1, (4, 3, 6))[0], run_alone(call, 1, (4, 3, 6))[0])


def test_attention_without_anything_to_drop_is_torchs_own() -> None:
    def call(x: Tensor, p: float) -> Tensor:
        q = x.view(2, 4, 6)
        mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)  # the first row sees nothing
        return F.scaled_dot_product_attention(q, q, q, mask, dropout_p=p).nan_to_num()

    composed = run_alone(lambda x: call(x, 1e-12), 1)[0]
    assert torch.allclose(composed, run_alone(lambda x: call(x, 0.0), 1)[0])


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_gradient_of_recomputed_dropout_belongs_to_the_mask_of_its_forward_pass(is_reentrant: bool) -> None:
    x = torch.rand(8, 6, dtype=torch.float64).requires_grad_()
    step = AutoParallel(Network(lambda x: checkpoint(F.dropout, x, 0.5, use_reentrant=is_reentrant)))
    y = step(x).sum()
    y.backward()
    assert x.grad is not None
    assert float((x.grad * x.detach()).sum()) == pytest.approx(float(y.detach()))


def test_compiled_network_drops_anew_at_every_step() -> None:
    network = Network(lambda x: F.dropout(x, 0.5))
    step = AutoParallel(torch.compile(network, backend="eager"))
    x = torch.ones(8, 6, dtype=torch.float64)
    first, second, third = (step(x).detach() for _ in range(3))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert set(third.unique().tolist()) == {0.0, 2.0}


def test_wrong_probability_is_refused_as_torch_refuses_it() -> None:
    with pytest.raises(ValueError, match="but got 1"):
        run_alone(lambda x: F.dropout(x, 1.5))


def captured(call: Callable[[Tensor], Tensor], shape: tuple[int, ...] = (8, 6)) -> Any:
    value = torch.ones(shape, dtype=torch.float64)
    return capture(find_target(Network(call)), [value], {}, input_shapes=[shape], parameter_shapes={}).graph


DROPPING = nn.GRU(6, 6, 2, dropout=0.5, dtype=torch.float64)
PLAIN = nn.GRU(6, 6, 2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: x + torch.multinomial(x.detach().sigmoid(), 1), "aten.multinomial.default in module (top)"),
        (lambda x: x[torch.randperm(8)], "aten.randperm.default"),
        (lambda x: x * torch.poisson(x.detach().exp()), "aten.poisson.default"),
        (lambda x: x + torch.rand(6, generator=torch.Generator()), "generator"),
        (lambda x: x * torch.empty_like(x).uniform_(generator=torch.Generator()), "generator"),
        (lambda x: DROPPING(x.unsqueeze(1))[0], "aten.gru.input"),
    ],
)
def test_other_random_operators_are_refused_with_what_to_do(call: Callable[[Tensor], Tensor], name: str) -> None:
    with pytest.raises(CaptureError) as caught:
        captured(call)
    assert name in str(caught.value)
    assert "pass them in as an input" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_random_operators_that_draw_nothing_are_no_matter() -> None:
    assert captured(lambda x: F.rrelu(x, training=False))
    assert captured(lambda x: PLAIN(x.unsqueeze(1))[0])


def test_dropouts_are_numbered_in_the_order_of_the_network_and_know_the_rows_of_the_batch() -> None:
    def call(x: Tensor) -> Tensor:
        x = F.dropout(x, training=False) + F.dropout(x, 0.0)
        first = F.dropout(x).t()
        second = F.dropout(first).reshape(-1)
        return F.dropout(second).sum() + F.dropout(torch.ones(3)).sum()

    found = [
        (node.meta["dropout_call"], node.args[0].meta["batch_dim"])
        for node in captured(call).nodes
        if "dropout_call" in node.meta
    ]
    assert found == [(0, 0), (1, 1), (2, LOST), (3, None)]


def test_key_travels_as_a_tensor() -> None:
    key = DrawKey((1 << 64) - 5, 3, 1, 2, 4)
    back = DrawKey.of_tensor(key.to_tensor())
    assert dataclasses.replace(back, seed=back.seed % (1 << 64)) == key
    assert torch.equal(whole_mask((99,), key=back), whole_mask((99,), key=key))
