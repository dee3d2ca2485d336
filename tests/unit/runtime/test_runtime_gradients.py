"""Gradients: of rows of this rank, added up in the order of the text, and where they and gathered parameters lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from placed_parameters import placed
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import value_and_grad, world
from msrun.runtime.execute.gradients import IN_FLIGHT, GradientGroup, GradientSum, LeavingGradients
from msrun.runtime.execute.parameters import GatheredGroup
from msrun.runtime.execute.transfers import TensorFuture
from msrun.runtime.parallel.batch import same_batch
from msrun.runtime.parallel.parameters.storage import _CHUNK_BYTES, digest
from msrun.runtime.parallel.pipeline.pipeline import PipelineSpec
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.sharding.layout import build_mesh
from msrun.runtime.sharding.operators.lookup import embed_own_rows, gather_own_rows, select_own_rows
from msrun.runtime.sharding.operators.rows import pool_own_bags


def test_weight_that_was_frozen_since_is_refused_by_its_number() -> None:
    network = nn.Linear(2, 1)
    step = value_and_grad(lambda x: network(x).sum(), None, list(network.parameters()))
    _, gradients = step(torch.ones(3, 2))
    assert gradients[1].tolist() == [3.0]
    network.bias.requires_grad = False
    with pytest.raises(
        StrategyError, match=r"weights\[1\] of 2 does not require a gradient; call value_and_grad again"
    ):
        step(torch.ones(3, 2))


@pytest.fixture
def leaves() -> dict[str, Tensor]:
    return {name: torch.ones(2, requires_grad=True) for name in ("p0", "p1")}


@pytest.fixture
def total(leaves: dict[str, Tensor]) -> GradientSum:
    stored = [placed(name, torch.nn.Parameter(torch.ones(2))) for name in ("first", "second")]
    return GradientSum(GradientGroup(stored, list(leaves), (), build_mesh(1), 0))


def test_parameter_that_no_gradient_flows_to_has_none(total: GradientSum, leaves: dict[str, Tensor]) -> None:
    leaves["p0"].grad = torch.full((2,), 3.0)
    total.add(leaves.__getitem__)
    found = total.finish(leaves.__getitem__).wait()
    assert set(found) == {"first"}
    assert found["first"].tolist() == [3.0, 3.0]
    assert leaves["p0"].grad is None, "it has left"


def test_step_without_any_gradient_gives_none(total: GradientSum, leaves: dict[str, Tensor]) -> None:
    assert total.finish(leaves.__getitem__).wait() == {}


def test_gradients_of_all_parameters_come_by_name(total: GradientSum, leaves: dict[str, Tensor]) -> None:
    for number, leaf in enumerate(leaves.values()):
        leaf.grad = torch.full((2,), float(number))
    found = total.finish(leaves.__getitem__).wait()
    assert {name: grad.tolist() for name, grad in found.items()} == {"first": [0.0, 0.0], "second": [1.0, 1.0]}


def test_held_gradients_are_counted_in_bytes(total: GradientSum, leaves: dict[str, Tensor]) -> None:
    assert total.kept_bytes(leaves.__getitem__) == 0
    leaves["p1"].grad = torch.zeros(2)
    assert total.kept_bytes(leaves.__getitem__) == 8
    assert not total.is_heavy


def test_gradients_are_handed_out_in_the_order_in_which_they_left_with_so_many_on_their_way() -> None:
    handed: list[str] = []
    leaving = LeavingGradients(lambda gradients: handed.extend(gradients))
    for number in range(IN_FLIGHT + 2):
        leaf = torch.ones(2, requires_grad=True)
        leaf.grad = torch.ones(2)
        parameter = torch.nn.Parameter(torch.ones(2))
        stored = placed(f"w{number}", parameter)
        group = GradientGroup([stored], ["p"], (), build_mesh(1), 0)
        leaving.add(GradientSum(group).finish({"p": leaf}.__getitem__))
        assert handed == [f"w{i}" for i in range(number + 1 - IN_FLIGHT)]
    assert leaving.arrive() == {}
    assert handed == [f"w{i}" for i in range(IN_FLIGHT + 2)]


class OnItsWay(TensorFuture):
    """A message that is read from a tensor's memory until somebody waits for it."""

    def __init__(self, source: Tensor) -> None:
        super().__init__(source)
        self.bytes_at_arrival: list[int] = []

    def wait(self) -> Tensor:
        self.bytes_at_arrival.append(self._value.untyped_storage().size())
        return self._value


def test_memory_is_kept_until_messages_that_are_read_from_it_have_arrived() -> None:
    leaf = torch.ones(6)
    nobody: Any = None
    gathered = GatheredGroup(nobody, {"weight": leaf})
    message = OnItsWay(leaf)
    gathered.lend(message)
    gathered.free()
    assert message.bytes_at_arrival == [24]
    assert leaf.untyped_storage().size() == 0
    gathered.free()
    assert message.bytes_at_arrival == [24]


INF, NAN = float("inf"), float("nan")
LONG = torch.zeros(_CHUNK_BYTES + 3, dtype=torch.uint8)


def changed(tensor: Tensor, index: int, value: float) -> Tensor:
    other = tensor.clone()
    other[index] = value
    return other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([-INF, 1.0]), torch.tensor([-INF, 2.0])),
        (torch.tensor([-INF, 1.0]), torch.tensor([1.0, -INF])),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
        (torch.tensor([1.0, 2.0]).double(), -torch.tensor([1.0, 2.0]).double()),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(3, dtype=torch.bool), torch.tensor([False, False, True])),
        (LONG, changed(LONG, -1, 1)),
        (changed(LONG, 0, 1), changed(LONG, _CHUNK_BYTES - 1, 1)),
        (changed(LONG, 0, 1), changed(LONG, _CHUNK_BYTES, 1)),
    ],
)
def test_tensors_of_other_bits_have_otherdigests(one: Tensor, other: Tensor) -> None:
    assert digest(one) != digest(other)
    assert digest(one) == digest(one.clone())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([NAN, -INF, INF]),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([1 + 2j, 3j]),
        torch.ones(5, dtype=torch.bfloat16),
    ],
)
def testdigest_takes_any_type_and_equal_values_are_equal_wherever_they_lie(tensor: Tensor) -> None:
    odd = torch.zeros(len(tensor.reshape(-1)) + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)
    assert digest(tensor) == digest(odd) == digest(tensor.unsqueeze(-1).expand(*tensor.shape, 2)[..., 0])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ParallelSettings(), True),
        (ParallelSettings("data_parallel"), True),
        (ParallelSettings("hybrid_parallel"), False),
        (ParallelSettings("stand_alone"), False),
        (ParallelSettings(dataset_strategy="full_batch"), False),
        (ParallelSettings(dataset_strategy=((1, 1),)), False),
        (ParallelSettings(pipeline=PipelineSpec(stages=2)), True),
        (ParallelSettings(pipeline=PipelineSpec(stages=4)), False),
    ],
)
def test_ranks_of_a_stage_that_share_a_batch_are_expected_to_pass_parts_of_it(
    monkeypatch: pytest.MonkeyPatch, settings: ParallelSettings, expected: bool
) -> None:
    monkeypatch.setattr(world, "get_group_size", lambda: 4)
    assert same_batch._is_divided(settings) is expected


def test_a_process_alone_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "get_group_size", lambda: 1)
    assert not same_batch._is_divided(ParallelSettings())
    assert not same_batch._is_divided(ParallelSettings("data_parallel"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_batches_that_differ_in_one_element_or_in_order_are_told_apart(dtype: torch.dtype) -> None:
    batch = torch.eye(4).to(dtype)
    changed = batch.clone()
    changed[3, 3] = 0
    batches = [[batch], [changed], [batch.flip(0)], [batch, batch[:, 0]], [batch[:, :1], batch[0, 0]]]
    assert len({same_batch._digest(tensors) for tensors in batches}) == len(batches)
    assert same_batch._digest([batch.clone()]) == same_batch._digest([batch])


def test_of_a_large_batch_the_first_rows_count() -> None:
    batch = torch.zeros(2000, 1000)
    assert same_batch._digest([batch]) != same_batch._digest([batch.index_fill(0, torch.tensor([0]), 1.0)])


ROWS, WIDTH = 6, 3
MESH = (2, 3)
CUTS: list[tuple[int, ...]] = [(0,), (1,), (0, 1)]
"""Axes of the mesh that cut the rows: into 2, 3 and 6 parts."""


def whole_table() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()


def ranks_of(axes: tuple[int, ...]) -> Iterator[tuple[Tensor, int, int]]:
    """Return the place of one rank for each part of what these axes cut, and which part of how many it is."""
    parts = 1
    for axis in axes:
        parts *= MESH[axis]
    for part in range(parts):
        if axes == (0,):
            rank = part * MESH[1]
        else:
            rank = part
        yield torch.tensor([rank]), part, parts


def check(
    whole: Callable[[Tensor], Tensor], own: Callable[[Tensor, Tensor], Tensor], axes: tuple[int, ...], dim: int
) -> None:
    """Compare values and gradients of the whole table with what the ranks find in their rows."""
    table = whole_table()
    expected = whole(table)
    weight = torch.arange(1.0, expected.numel() + 1, dtype=torch.float64).view(expected.shape)
    (of_whole,) = torch.autograd.grad((expected * weight).sum(), table)
    of_whole = of_whole.to_dense()
    total = torch.zeros_like(expected)
    for place, part, parts in ranks_of(axes):
        rows = table.detach().chunk(parts, dim)[part].clone().requires_grad_()
        found = own(rows, place)
        total = total + found.detach()
        (gradient,) = torch.autograd.grad((found * weight).sum(), rows)
        torch.testing.assert_close(gradient.to_dense(), of_whole.chunk(parts, dim)[part])
    torch.testing.assert_close(total, expected.detach())


@pytest.mark.parametrize("axes", CUTS)
@pytest.mark.parametrize("sparse", [False, True])
@given(padding=st.sampled_from([-1, 0, 4]), index=st.lists(st.integers(0, ROWS - 1), min_size=4, max_size=4))
def test_embedding(axes: tuple[int, ...], sparse: bool, padding: int, index: list[int]) -> None:
    looked_up = torch.tensor(index).view(2, 2)
    check(
        lambda table: F.embedding(looked_up, table, None if padding < 0 else padding),
        lambda rows, place: embed_own_rows(
            rows, looked_up, place, MESH, axes, ROWS, padding_idx=padding, sparse=sparse
        ),
        axes,
        0,
    )


def test_rows_of_a_sparse_embedding_get_a_gradient_where_they_lie_and_nowhere_else() -> None:
    rows = whole_table().detach()[3:].requires_grad_()
    index = torch.tensor([1, 4, 4, 2])
    found = embed_own_rows(rows, index, torch.tensor([3]), MESH, (0,), ROWS, padding_idx=-1, sparse=True)
    (gradient,) = torch.autograd.grad(found.sum(), rows)
    assert gradient.is_sparse and gradient.coalesce().indices().tolist() == [[1]]


@pytest.mark.parametrize("axes", CUTS)
def test_gather_along_either_dimension(axes: tuple[int, ...]) -> None:
    index = torch.tensor([[5, 0, 2], [1, 1, 3]])
    check(
        lambda table: table.gather(0, index),
        lambda rows, place: gather_own_rows(rows, index, place, MESH, axes, ROWS, dim=0),
        axes,
        0,
    )


def test_gather_along_the_second_dimension() -> None:
    index = torch.tensor([[0, 2], [1, 1]])
    check(
        lambda table: table.gather(1, index),
        lambda rows, place: gather_own_rows(rows, index, place, MESH, (1,), WIDTH, dim=1),
        (1,),
        1,
    )


@pytest.mark.parametrize("axes", CUTS)
@pytest.mark.parametrize("index", [torch.tensor(4), torch.tensor([5, 0, 0]), torch.tensor([[1, 2], [3, 4]])])
def test_selection_of_rows(axes: tuple[int, ...], index: Tensor) -> None:
    check(
        lambda table: table[index],
        lambda rows, place: select_own_rows(rows, index, place, MESH, axes, ROWS, dim=0),
        axes,
        0,
    )


@pytest.mark.parametrize("index", [torch.tensor(2), torch.tensor([[2, 0], [1, 1]])])
def test_selection_of_columns(index: Tensor) -> None:
    check(
        lambda table: table[:, index],
        lambda rows, place: select_own_rows(rows, index, place, MESH, (1,), WIDTH, dim=1),
        (1,),
        1,
    )


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("mode", "has_shares"), [("sum", False), ("sum", True), ("mean", False)])
@pytest.mark.parametrize("axes", CUTS)
@given(
    index=st.lists(st.integers(0, ROWS - 1), min_size=5, max_size=5),
    offsets=st.lists(st.integers(0, 5), min_size=2, max_size=2).map(sorted),
    padding=st.sampled_from([None, 0, 4]),
    has_end=st.booleans(),
)
def test_bags(
    axes: tuple[int, ...],
    mode: str,
    has_shares: bool,
    sparse: bool,
    index: list[int],
    offsets: list[int],
    padding: int | None,
    has_end: bool,
) -> None:
    rows_of_bags = torch.tensor(index)
    begins = torch.tensor([0, *offsets, *([5] if has_end else [])])
    shares = torch.tensor([0.5, 2.0, -1.0, 3.0, 0.25], dtype=torch.float64) if has_shares else None
    settings: dict[str, Any] = {"mode": mode, "padding_idx": padding}

    def of_rank(rows: Tensor, place: Tensor) -> Tensor:
        return pool_own_bags(
            rows, rows_of_bags, begins, shares, place, mesh_shape=MESH, rows=axes, bags=(), size=ROWS, count=3,
            has_end=has_end, sparse=sparse, **settings,
        )  # fmt: skip

    check(
        lambda table: F.embedding_bag(
            rows_of_bags, table, begins, per_sample_weights=shares, include_last_offset=has_end, **settings
        ),
        of_rank,
        axes,
        0,
    )


@pytest.mark.parametrize("rows", [(), (0,)])
def test_bags_of_a_rank_follow_those_of_the_one_before(rows: tuple[int, ...]) -> None:
    """Three parts of the bags along axis 1; the rows whole, or cut along axis 0."""
    table, index = whole_table().detach(), torch.tensor([5, 0, 3, 3, 1, 2, 4])
    offsets = torch.tensor([0, 2, 2, 3, 6, 6])
    shares = torch.arange(1.0, 8, dtype=torch.float64)
    expected = F.embedding_bag(index, table, offsets, mode="sum", per_sample_weights=shares)
    found = []
    for part in range(3):
        total = torch.zeros(2, WIDTH, dtype=torch.float64)
        for half in range(2 if rows else 1):
            total += pool_own_bags(
                table.chunk(2)[half] if rows else table, index, offsets, shares, torch.tensor([3 * half + part]),
                mesh_shape=MESH, rows=rows, bags=(1,), size=ROWS, count=2, mode="sum", padding_idx=None,
                has_end=False, sparse=False,
            )  # fmt: skip
        found.append(total)
    torch.testing.assert_close(torch.cat(found), expected)


def test_row_that_no_table_has_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="index out of range: a table has 6 rows"):
        select_own_rows(torch.zeros(3, 2), torch.tensor([6]), torch.tensor([0]), MESH, (0,), ROWS, dim=0)
