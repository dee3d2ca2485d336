"""Tables over ranks and gradients of rows: the numbers of one process, and no memory or message of a table's size."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from local_parts import local
from on_ranks import Ranks, on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.errors import ParallelError, StrategyError
from msrun.runtime import (
    AutoParallel,
    EmbeddingLookup,
    GradAccumulation,
    MicroBatchInterleaved,
    Pipeline,
    WithLoss,
    clip_grad_norm_,
    get_group_size,
    get_rank,
    load_checkpoint,
    no_init_parameters,
    optim,
    recompute,
    save_checkpoint,
    value_and_grad,
)
from msrun.runtime.embedding.table_cache import RowCache
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.tensors.plain_tensors import plain

ROWS, WIDTH, STEPS = 13, 8, 3
SLICES: dict[str, dict[str, Any]] = {
    "batch_slice": {},
    "table_row_slice": {},
    "table_column_slice": {},
    "field_slice": {"manual_shapes": (1, 5, 3, 4)},
}
MODES = ("data_parallel", "semi_auto")
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "LazyAdam": lambda parameters: optim.LazyAdam(parameters, lr=0.1, weight_decay=0.01),
    "FTRL": lambda parameters: optim.FTRL(parameters, lr=0.1, l1=0.001),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.3),
    "SparseAdam": lambda parameters: _Both(parameters),
}
on_two = on_ranks(2)
on_two_and_four = on_ranks(2, pytest.param(4, marks=pytest.mark.slow))


class Table(nn.Module):
    """What an EmbeddingLookup is, in a few lines of torch, for one process."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.embedding_table = nn.Parameter(rows)

    def forward(self, indices: Tensor) -> Tensor:
        known = indices < self.embedding_table.shape[0]
        rows = F.embedding(indices[known], self.embedding_table, sparse=True)
        return rows.new_zeros(*indices.shape, rows.shape[1]).index_put((known,), rows)


class Net(nn.Module):
    def __init__(self, table: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(2, 4, dtype=torch.float64)
        self.table = table()
        self.last = nn.Linear(3 * WIDTH + 4, 1, dtype=torch.float64)

    def forward(self, indices: Tensor, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.table(indices).flatten(1), self.first(x).tanh()], 1))


def lookup(slices: str, **settings: Any) -> Callable[[], nn.Module]:
    given = {"dtype": torch.float64, **SLICES[slices], **settings}
    return lambda: EmbeddingLookup(ROWS, WIDTH, "xavier_normal", slice_mode=slices, **given)


def embedding() -> nn.Module:
    return nn.Embedding(16, WIDTH, sparse=True, dtype=torch.float64)


def alone(network: nn.Module) -> Net:
    """Return the same network for this process alone. All ranks call it together."""
    weight = next(network.table.parameters())  # type: ignore[operator, union-attr]
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach().clone()
    found = Net(lambda: Table(whole))
    found.first.load_state_dict(network.first.state_dict())  # type: ignore[operator, union-attr]
    found.last.load_state_dict(network.last.state_dict())  # type: ignore[operator, union-attr]
    return found


def batch(seed: int, highest: int = ROWS + 3, size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, highest, (size, 3), generator=generator)
    indices[:, 2] = indices[:, 1]  # one row several times
    x, y = (torch.randn(size, n, generator=generator, dtype=torch.float64) for n in (2, 1))
    return indices, x, y


def own(values: tuple[Tensor, ...]) -> list[Tensor]:
    return [value.chunk(get_group_size())[get_rank()] for value in values]


class _Both:
    """SparseAdam for the table and SGD for the rest."""

    def __init__(self, parameters: Any) -> None:
        table, *rest = sorted(parameters, key=lambda p: p.numel(), reverse=True)
        self.parts = torch.optim.SparseAdam([table], lr=0.1), torch.optim.SGD(rest, lr=0.1)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def rows_of(gradient: Tensor) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        assert gradient.is_sparse
        return sorted(gradient.coalesce().indices()[0].tolist())


def assert_same(step: Any, right: nn.Module) -> None:
    mine = step.state_dict()
    for (name, value), expected in zip(mine.items(), right.state_dict().values(), strict=True):
        torch.testing.assert_close(
            value, expected, rtol=1e-10, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
        )


def train(
    step: Any,
    right: nn.Module,
    ours: Any,
    theirs: Any,
    *,
    give: Callable[[tuple[Tensor, ...]], Any] = own,
    between: Callable[[Any], Any] | None = None,
    steps: int = STEPS,
    highest: int = ROWS + 3,
) -> None:
    """Take the same steps on both sides, and compare losses and weights."""
    for seed in range(steps):
        indices, x, y = batch(seed, highest)
        loss = step(*give((indices, x, y)))
        expected = F.mse_loss(right(indices, x), y)
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-10, atol=1e-13)
        loss.backward()
        expected.backward()
        for network, optimizer in ((step, ours), (right, theirs)):
            if between is not None:
                between(network)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(step, right)


def pair(
    table: Callable[[], nn.Module],
    mode: str = "semi_auto",
    wrap: Callable[[nn.Module], Any] = lambda net: net,
) -> tuple[AutoParallel, Net, Net]:
    network = Net(table)
    return AutoParallel(wrap(WithLoss(network, F.mse_loss)), mode), network, alone(network)


@on_two
@pytest.mark.parametrize(
    ("slices", "mode", "name"),
    slow_but(["table_row_slice/semi_auto/FTRL"], itertools.product(SLICES, MODES, OPTIMIZERS)),
)
def test_tables_train_as_in_one_process(slices: str, mode: str, name: str) -> None:
    step, network, right = pair(lookup(slices), mode)
    untouched = alone(network)
    make = OPTIMIZERS[name]
    train(step, right, make(network.parameters()), make(right.parameters()))
    named = {int(row) for seed in range(STEPS) for row in batch(seed)[0].unique() if row < ROWS}
    others = sorted({*range(ROWS)} - named)
    after, before = step.state_dict()["table.embedding_table"], untouched.table.embedding_table
    assert torch.equal(after[others], before[others])  # type: ignore[index]


# -- what a step is made of ---------------------------------------------------------------------------------------


@pytest.mark.slow
@on_two
def test_every_way_of_dividing_a_batch_gives_the_numbers_of_one_process() -> None:
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "micro batches": lambda net: GradAccumulation(net, 2),
        "copies": lambda net: MicroBatchInterleaved(net, 2),
        "both": lambda net: GradAccumulation(MicroBatchInterleaved(net, 2), 2),
    }
    for table, (_, wrap) in itertools.product(
        (lookup("table_row_slice"), lookup("batch_slice"), embedding), ways.items()
    ):
        step, network, right = pair(table, wrap=wrap)
        make = OPTIMIZERS["LazyAdam"]
        highest = ROWS if table is embedding else ROWS + 3
        train(step, right, make(network.parameters()), make(right.parameters()), steps=2, highest=highest)


@on_two_and_four
def test_sparse_embedding_layers_train_as_in_one_process() -> None:
    settings: list[tuple[str, Callable[[AutoParallel], Any]]] = [
        ("data_parallel", lambda step: step),
        ("data_parallel", lambda step: step.hsdp(threshold=0)),
        ("semi_auto", lambda step: step),
        ("semi_auto", lambda step: step.hsdp(threshold=0, optimizer_level="level3")),
    ]
    for (mode, change), name in itertools.product(settings, ("SGD", "LazyAdam")):
        step, network, right = pair(embedding, mode)
        change(step)
        make = OPTIMIZERS[name]
        ours, theirs = None, make(right.parameters())  # FSDP2 puts other parameters in place
        for seed in range(STEPS):
            indices, x, y = batch(seed, ROWS)
            loss, expected = step(*own((indices, x, y))), F.mse_loss(right(indices, x), y)
            loss.backward()
            expected.backward()
            ours = ours or make(network.parameters())
            assert rows_of(network.table.weight.grad) == indices.unique().tolist()  # type: ignore[union-attr, arg-type]
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_same(step, right)


class Bags(nn.Module):
    """Bags of equal length, of lengths of their own with weights, and bags that leave a row out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        settings = {"sparse": True, "dtype": torch.float64}
        self.even = nn.EmbeddingBag(16, WIDTH, mode="mean", padding_idx=5, **settings)
        self.uneven = nn.EmbeddingBag(16, WIDTH, mode="sum", **settings)
        self.first = nn.Linear(2, WIDTH, dtype=torch.float64)
        self.last = nn.Linear(3 * WIDTH, 1, dtype=torch.float64)

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        uneven = self.uneven(indices.flatten(), offsets, weights.flatten())
        return self.last(torch.cat([self.even(indices), uneven, self.first(x).tanh()], 1))


@pytest.mark.slow
@on_two_and_four
def test_sparse_bags_train_as_in_one_process() -> None:
    """Whole tables and tables cut by rows or columns, bags cut or not: equal to torch, and other rows untouched."""
    from msrun.runtime import shard

    ranks = get_group_size()
    cuts = ("", "rows", "columns", "bags")
    for cut, name in [(cut, "LazyAdam") for cut in cuts] + [("rows", "FTRL"), ("bags", "SGD")]:
        network, right = Bags(), Bags()
        before = copy.deepcopy(right)
        parts = {"rows": (ranks, 1), "columns": (1, ranks)}.get(cut, (1, 1))
        bags = ranks if cut == "bags" else 1
        if cut:
            shard(network.even, (parts, (bags,), (1,)))
            shard(network.uneven, (parts, (1,), (bags,), (1,)))
        step = AutoParallel(WithLoss(network, F.mse_loss)).dataset_strategy("full_batch")
        ours, theirs = (OPTIMIZERS[name](one.parameters()) for one in (network, right))
        named = set()
        for seed in range(STEPS):
            indices, x, y = batch(seed, 12)
            offsets = torch.randint(0, 48, (16,), generator=torch.Generator().manual_seed(seed)).sort().values
            offsets[0] = 0
            weights = x.repeat(1, 2)[:, :3]
            named |= {*indices.unique().tolist()}
            loss = step(indices, offsets, weights, x, y)
            expected = F.mse_loss(right(indices, offsets, weights, x), y)
            torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-10, atol=1e-13)
            loss.backward()
            expected.backward()
            for mine, other in ((network.even, right.even), (network.uneven, right.uneven)):
                first, count = (get_rank() * 16 // ranks, 16 // ranks) if cut == "rows" else (0, 16)
                mine_of = [row - first for row in rows_of(other.weight.grad) if first <= row < first + count]  # type: ignore[arg-type]
                assert rows_of(mine.weight.grad) == mine_of  # type: ignore[arg-type]
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_same(step, right)
        untouched = sorted({*range(16)} - named)
        assert torch.equal(step.state_dict()["uneven.weight"][untouched], before.uneven.weight[untouched])
        assert torch.equal(step.state_dict()["even.weight"][5], before.even.weight[5])


@pytest.mark.slow
@on_two_and_four
def test_sparse_layers_cut_by_the_user_train_as_in_one_process() -> None:
    from msrun.runtime import shard

    ranks = get_group_size()
    for strategy, make in itertools.product(
        (((ranks, 1), (1, 1)), ((1, ranks), (1, 1)), ((1, 1), (ranks, 1))), (OPTIMIZERS["LazyAdam"], OPTIMIZERS["FTRL"])
    ):
        network = Net(embedding)
        right = alone(network)
        shard(network.table, strategy)
        step = AutoParallel(WithLoss(network, F.mse_loss)).dataset_strategy("full_batch")
        ours, theirs = make(network.parameters()), make(right.parameters())
        for seed in range(STEPS):
            indices, x, y = batch(seed, ROWS)
            loss, expected = step(indices, x, y), F.mse_loss(right(indices, x), y)
            loss.backward()
            expected.backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_same(step, right)


@pytest.mark.slow
@on_two_and_four
def test_a_cache_changes_no_bit() -> None:
    """Each row is copied once for all lookups between two steps that change it."""
    ways = (("semi_auto", "LazyAdam"), *(("data_parallel", name) for name in ("FTRL", "SGD", "Adagrad", "SparseAdam")))
    for mode, name in ways:
        step, network, _ = pair(lookup("batch_slice", vocab_cache_size=6), mode)
        other, plain, _ = pair(lookup("batch_slice"), mode)
        optimizers = [OPTIMIZERS[name](one.parameters()) for one in (network, plain)]
        for seed in range(STEPS):
            indices, x, y = own(batch(seed, size=4))
            with torch.no_grad():
                assert torch.equal(network(indices, x), plain(indices, x))
            assert torch.equal(step(indices, x, y), other(indices, x, y))
            for one in (step, other):
                one(indices, x, y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if seed == 0:
                with torch.no_grad():
                    for weight in (network.table.embedding_table, plain.table.embedding_table):
                        weight.mul_(2)  # type: ignore[operator]
        assert torch.equal(network.table.embedding_table, plain.table.embedding_table)  # type: ignore[arg-type]
        cache = network.table.cache
        assert isinstance(cache, RowCache)
        assert cache.hits > cache.misses > 0, (mode, name, cache)
        assert cache.copied_bytes == cache.misses * WIDTH * 8
        assert cache.nbytes == 6 * WIDTH * 8


@pytest.mark.slow
@on_two
def test_full_batches_recomputed_blocks_and_hsdp_change_no_number() -> None:
    for slices in SLICES:
        for change in (
            lambda step, _: step.dataset_strategy("full_batch"),
            lambda _, net: recompute(net.table),
            lambda step, _: step.hsdp(threshold=0),
        ):
            step, network, right = pair(lookup(slices))
            change(step, network)
            is_full = step.settings.dataset_strategy == "full_batch"
            make = OPTIMIZERS["SGD"]
            give = tuple if is_full else own
            train(step, right, make(network.parameters()), make(right.parameters()), give=give, steps=2)


@pytest.mark.slow
@on_two
def test_gradients_add_up_over_backward_passes() -> None:
    for slices, mode in itertools.product(("batch_slice", "table_row_slice"), MODES):
        step, network, right = pair(lookup(slices), mode)
        make = OPTIMIZERS["FTRL"]
        ours, theirs = make(network.parameters()), make(right.parameters())
        for seed in range(STEPS):
            indices, x, y = batch(seed)
            if seed < STEPS - 1:
                with step.no_sync():
                    step(*own((indices, x, y))).backward()
            else:
                step(*own((indices, x, y))).backward()
            F.mse_loss(right(indices, x), y).backward()
        assert network.table.embedding_table.grad.is_sparse  # type: ignore[union-attr]
        ours.step()
        theirs.step()
        assert_same(step, right)


@pytest.mark.slow
@on_two
def test_gradients_are_clipped_by_the_norm_of_the_whole() -> None:
    for slices, mode in itertools.product(SLICES, MODES):
        step, network, right = pair(lookup(slices), mode)

        def clip(one: Any, right: nn.Module = right) -> None:
            if one is not right:
                clip_grad_norm_(list(one.parameters()), 0.1)
                return
            gradients = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in right.parameters()]
            norm = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in gradients]))
            for p in right.parameters():
                p.grad = p.grad * min(1.0, 0.1 / (float(norm) + 1e-6))

        make = OPTIMIZERS["SGD"]
        train(step, right, make(network.parameters()), make(right.parameters()), between=clip)


@pytest.mark.slow
@on_two
def test_step_functions_get_gradients_of_rows() -> None:
    for slices, mode in itertools.product(("batch_slice", "table_row_slice"), MODES):
        network = Net(lookup(slices))
        right = alone(network)
        optimizer = optim.LazyAdam(network.parameters(), lr=0.1)
        theirs = optim.LazyAdam(right.parameters(), lr=0.1)
        step = AutoParallel(_step_function(network, optimizer), mode)
        for seed in range(STEPS):
            indices, x, y = batch(seed)
            step(*own((indices, x, y)))
            F.mse_loss(right(indices, x), y).backward()
            theirs.step()
            theirs.zero_grad()
        weight = network.table.embedding_table
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach()
        torch.testing.assert_close(whole, right.table.embedding_table.detach(), rtol=1e-10, atol=1e-13)


def _step_function(network: nn.Module, optimizer: Any) -> Callable[..., Tensor]:
    def forward(indices: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(network(indices, x), y)

    grad = value_and_grad(forward, None, list(network.parameters()))

    def one_step(*given: Tensor) -> Tensor:
        loss, gradients = grad(*given)
        optimizer(gradients)
        return loss

    return one_step


@pytest.mark.slow
@on_two
def test_verification_compares_tables() -> None:
    for slices, mode in itertools.product(SLICES, MODES):
        step, _, _ = pair(lookup(slices), mode)
        step.verify(*own(batch(1)))


@pytest.mark.slow
@on_two
def test_it_works_without_auto_parallel() -> None:
    """Each rank's loss is its own; the table's gradient is the mean of the ranks', as DDP makes the others'."""
    for slices in SLICES:
        network = lookup(slices)()
        right = Table(_whole(network))
        ours, theirs = OPTIMIZERS["LazyAdam"](network.parameters()), OPTIMIZERS["LazyAdam"](right.parameters())
        for seed in range(STEPS):
            indices = batch(seed)[0]
            (mine,) = own((indices,))
            found = network(mine)
            torch.testing.assert_close(found, right(mine))
            (found**2).mean().backward()
            (right(indices) ** 2).mean().backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(_whole(network), right.embedding_table.detach(), rtol=1e-10, atol=1e-13)


def _whole(network: nn.Module) -> Tensor:
    weight = network.embedding_table
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach().clone()  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True, reason="the first step of an optimizer is refused: it takes the rows for other ranks' too"
)
@on_two
def test_ranks_that_stand_alone_exchange_no_rows() -> None:
    """Each rank trains on its own batches, and a table of which it has a part is refused."""
    step, network, right = pair(lookup("batch_slice"), "stand_alone")
    make = OPTIMIZERS["LazyAdam"]
    rank = get_rank()

    def shifted(given: tuple[Tensor, ...]) -> list[Tensor]:
        return list(given) if rank == 0 else [given[0].flip(0), *given[1:]]

    ours, theirs = make(network.parameters()), make(right.parameters())
    traffic.reset()
    for seed in range(STEPS):
        indices, x, y = shifted(batch(seed))
        step(indices, x, y).backward()
        F.mse_loss(right(indices, x), y).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert sum(traffic.bytes.values()) == 0, traffic.bytes
    assert_same(step, right)
    cut, _, _ = pair(lookup("table_row_slice"), "stand_alone")
    try:
        cut(*batch(0))
    except StrategyError as error:
        assert 'give slice_mode="batch_slice"' in str(error)
    else:
        raise AssertionError("a part of a table was looked up alone")


@pytest.mark.slow
@on_two_and_four
def test_stages_of_a_pipeline_hold_whole_tables() -> None:
    """Two stages, of one rank or of two; a table that all ranks share out is refused by name."""
    ranks = get_group_size()
    for name in ("SGD", "LazyAdam", "FTRL"):
        network = Net(lookup("batch_slice"))
        right = alone(network)
        step = AutoParallel(Pipeline(WithLoss(network, F.mse_loss), 2)).pipeline(2).dataset_strategy("full_batch")
        ours, theirs = (OPTIMIZERS[name](one.parameters()) for one in (network, right))
        for seed in range(STEPS):
            indices, x, y = batch(seed)
            step(indices, x, y).backward()
            F.mse_loss(right(indices, x), y).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        state = {name.removeprefix("network."): value for name, value in step.state_dict().items()}
        for name, value in right.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-13)
        held = [plain(network.table.embedding_table).numel() > 0, get_rank() < ranks // 2]  # type: ignore[arg-type, union-attr]
        assert held[0] == held[1], held
    cut = AutoParallel(Pipeline(WithLoss(Net(lookup("table_row_slice")), F.mse_loss), 2)).pipeline(2)
    try:
        cut(*own(batch(0)))
    except StrategyError as error:
        assert "table_row_slice of EmbeddingLookup cuts the table over all" in str(error)
    else:
        raise AssertionError("a table of all ranks was looked up by those of a stage")


# -- indices ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_two
def test_an_empty_batch_on_one_rank_is_none_for_the_others() -> None:
    for slices in SLICES:
        network = lookup(slices)()
        right = Table(_whole(network))
        indices = batch(0)[0]
        mine = indices if get_rank() == 0 else indices[:0]
        (network(mine) ** 2).sum().backward()
        (right(indices) ** 2).sum().backward()
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (network, right)]
        right.embedding_table.grad /= get_group_size()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(_whole(network), right.embedding_table.detach(), rtol=1e-10, atol=1e-13)


@pytest.mark.slow
@on_two
def test_all_indices_beyond_the_table_give_zeros_and_no_gradient() -> None:
    for slices in SLICES:
        network = lookup(slices)()
        found = network(torch.full((2, 2), ROWS))
        assert torch.equal(found, torch.zeros(2, 2, WIDTH, dtype=torch.float64))
        found.sum().backward()
        assert rows_of(network.embedding_table.grad) == []  # type: ignore[arg-type]


@pytest.mark.slow
@on_two
def test_negative_indices_and_other_types_are_refused() -> None:
    for mode in MODES:
        step, _, _ = pair(lookup("table_row_slice"), mode)
        indices, x, y = own(batch(0))
        for wrong, text in ((indices - ROWS - 5, "negative"), (indices.double(), "whole numbers")):
            try:
                step(wrong, x, y)
            except ParallelError as error:
                assert text in str(error), error
            else:
                raise AssertionError(text)


@pytest.mark.slow
@on_two
def test_long_rows_are_scaled_when_they_are_looked_up() -> None:
    for slices, mode in itertools.product(("batch_slice", "table_column_slice"), MODES):
        step, network, right = pair(lookup(slices, max_norm=0.5), mode)
        plain_forward = right.table.forward

        def scaled(indices: Tensor, plain_forward: Any = plain_forward) -> Tensor:
            rows = plain_forward(indices)
            return rows * (0.5 / rows.norm(dim=-1, keepdim=True).clamp_min(0.5))

        right.table.forward = scaled  # type: ignore[method-assign]
        make = OPTIMIZERS["SGD"]
        train(step, right, make(network.parameters()), make(right.parameters()))


# -- memory, messages, files ----------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(value) for value in _tensors((args, kwargs))}
        for value in _tensors(result):
            if _storage(value) not in given:
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    for leaf in torch.utils._pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_sparse:
            yield from (leaf._indices(), leaf._values())
        elif isinstance(leaf, Tensor):
            yield leaf


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@pytest.mark.slow
@on_two
def test_no_step_makes_a_tensor_of_the_size_of_the_table() -> None:
    rows, ranks = 20_000, get_group_size()
    for mode, name in itertools.product(MODES, OPTIMIZERS):
        for slices in ("batch_slice", "table_row_slice", "table_column_slice"):
            table = lambda slices=slices: EmbeddingLookup(rows, WIDTH, slice_mode=slices, dtype=torch.float64)  # noqa: E731
            network = Net(table)
            step = AutoParallel(WithLoss(network, F.mse_loss), mode)
            optimizer = OPTIMIZERS[name](network.parameters())
            for seed in range(3):
                with Largest() as largest:
                    step(*own(batch(seed, rows))).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert 0 < largest.elements < rows * WIDTH / ranks / 10, (mode, name, slices, largest.elements)


@on_two
def test_every_row_travels_once() -> None:
    """What a rank sends when all want one row, over and over."""
    ranks = get_group_size()
    network = lookup("table_row_slice")()
    indices = torch.zeros(50, dtype=torch.int64)  # a row of rank 0
    traffic.reset()
    network(indices)
    counts = 8 * ranks
    asked, answered = 8, WIDTH * 8 * (ranks if get_rank() == 0 else 0)
    assert traffic.bytes["all_to_all"] == counts + asked + answered, traffic.bytes


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Path]:
    """Where ranks save, with what they hold; one process loads it afterwards."""
    yield tmp_path
    for slices, (table, moment) in torch.load(tmp_path / "tables").items():
        network = Net(lookup("batch_slice"))
        optimizer = optim.LazyAdam(network.parameters())
        load_checkpoint(tmp_path / slices, network, optimizer=optimizer)
        weight = network.table.embedding_table
        assert torch.equal(weight.detach(), table)  # type: ignore[operator]
        torch.testing.assert_close(optimizer.state[weight]["exp_avg"], moment, rtol=1e-10, atol=1e-13)  # type: ignore[index]


@pytest.mark.slow
@on_two
def test_tables_go_to_files_and_come_back(ranks: Ranks, saved: Path) -> None:
    tables = {}
    for slices in SLICES:
        step, network, right = pair(lookup(slices))
        ours, theirs = (optim.LazyAdam(net.parameters(), lr=0.1) for net in (network, right))
        train(step, right, ours, theirs)
        save_checkpoint(network, saved / slices, optimizer=ours)
        tables[slices] = [_whole(network.table), theirs.state[right.table.embedding_table]["exp_avg"]]  # type: ignore[arg-type]
        for other in SLICES:
            with no_init_parameters():
                again = Net(lookup(other))
            optimizer = optim.LazyAdam(again.parameters(), lr=0.1)
            load_checkpoint(saved / slices, again, optimizer=optimizer)
            step = AutoParallel(WithLoss(again, F.mse_loss))
            copied = copy.deepcopy(right)
            train(step, copied, optimizer, _with_state(copied, theirs), steps=2)
    if ranks.rank == 0:
        torch.save(tables, saved / "tables")


def _with_state(network: nn.Module, like: Any) -> Any:
    found = optim.LazyAdam(network.parameters(), lr=0.1)
    found.load_state_dict(copy.deepcopy(like.state_dict()))
    return found


@pytest.fixture
def first_values() -> dict[str, Tensor]:
    """Tables that one process makes."""
    return {slices: Net(lookup(slices)).table.embedding_table.detach() for slices in SLICES}  # type: ignore[operator, union-attr]


@on_two
def test_first_values_are_those_of_one_process(first_values: dict[str, Tensor]) -> None:
    """Built at once and built without memory."""
    for slices in SLICES:
        network = Net(lookup(slices))
        with no_init_parameters():
            deferred = Net(lookup(slices))
        step = AutoParallel(WithLoss(deferred, F.mse_loss))
        step.build_plan(*own(batch(0)))
        for name, value in step.state_dict().items():
            mine = dict(network.named_parameters())[name]
            assert torch.equal(value, mine.full_tensor() if hasattr(mine, "full_tensor") else mine), (slices, name)
        assert torch.equal(_whole(network.table), first_values[slices])


@pytest.mark.slow
@on_two
def test_tables_in_files_train_as_those_in_memory() -> None:
    for slices, name in itertools.product(("batch_slice", "field_slice"), ("LazyAdam", "FTRL")):
        base = Path(f"table_{slices}_{name}").absolute()
        step, network, right = pair(lookup(slices, storage=str(base)))
        ours = OPTIMIZERS[name](network.parameters())
        train(step, right, ours, OPTIMIZERS[name](right.parameters()))
        on_disk = torch.from_file(
            f"{base}.{get_rank()}", size=local(network.table.embedding_table).numel(), dtype=torch.float64
        )
        assert torch.equal(on_disk.view(-1, WIDTH), local(network.table.embedding_table))
        files = sorted(path.name for path in base.parent.glob(f"{base.name}.{get_rank()}*"))
        assert len(files) == 3, files  # the table and two of its size that the optimizer keeps


@on_two
def test_what_a_world_cannot_share_out_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"slice_mode": "table_column_slice", "embedding_size": 7}, "7 columns"),
        ({"slice_mode": "field_slice", "manual_shapes": (5, 4, 4)}, "3 fields"),
    ]
    for given, text in wrong:
        try:
            EmbeddingLookup(**{"vocab_size": ROWS, "embedding_size": WIDTH, **given})
        except StrategyError as error:
            assert text in str(error)
        else:
            raise AssertionError(text)


@pytest.mark.slow
@on_two
def test_loss_scales_do_not_change_rows() -> None:
    for mode in MODES:
        tables = []
        for scale in (None, 8.0):
            step, network, _ = pair(lookup("table_row_slice"), mode)
            step.mixed_precision("bfloat16", loss_scale=scale)
            optimizer = OPTIMIZERS["SGD"](network.parameters())
            step(*own(batch(0))).backward()
            optimizer.step()
            tables.append(_whole(network.table))
        assert torch.equal(*tables)
