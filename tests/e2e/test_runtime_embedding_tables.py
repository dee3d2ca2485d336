"""Tables over ranks and gradients of rows: the numbers of one process, and no memory or message of a table's size."""

import copy
import functools
import itertools
from contextlib import nullcontext
from pathlib import Path

import cut_networks
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from cut_networks import assert_close, assert_same
from local_parts import local
from on_ranks import on_ranks
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
    shard,
    value_and_grad,
)
from msrun.runtime.embedding.table_cache import RowCache
from msrun.runtime.execute.gradients import added, mean_over_ranks
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.tensors.plain_tensors import plain

ROWS, WIDTH, STEPS = 13, 8, 3
SLICES = {
    "batch_slice": {},
    "table_row_slice": {},
    "table_column_slice": {},
    "field_slice": {"manual_shapes": (1, 5, 3, 4)},
}
MODES = ("data_parallel", "semi_auto")
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "LazyAdam": lambda parameters: optim.LazyAdam(parameters, lr=0.1, weight_decay=0.01),
    "FTRL": lambda parameters: optim.FTRL(parameters, lr=0.1, l1=0.001),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.3),
    "SparseAdam": lambda parameters: _Both(parameters),
}
on_two = on_ranks(2)
slow_on_two = on_ranks(2, slow=True)
slow_on_two_and_four = on_ranks(2, pytest.param(4, marks=pytest.mark.slow), slow=True)


class Table(nn.Module):
    """What an EmbeddingLookup is, in a few lines of torch, for one process."""

    def __init__(self, rows):
        super().__init__()
        self.embedding_table = nn.Parameter(rows)

    def forward(self, indices):
        known = indices < self.embedding_table.shape[0]
        rows = F.embedding(indices[known], self.embedding_table, sparse=True)
        return rows.new_zeros(*indices.shape, rows.shape[1]).index_put((known,), rows)


class Net(nn.Module):
    def __init__(self, table):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(2, 4, dtype=torch.float64)
        self.table = table()
        self.last = nn.Linear(3 * WIDTH + 4, 1, dtype=torch.float64)

    def forward(self, indices, x):
        return self.last(torch.cat([self.table(indices).flatten(1), self.first(x).tanh()], 1))


def lookup(slices, **settings):
    given = {"dtype": torch.float64, **SLICES[slices], **settings}
    return lambda: EmbeddingLookup(ROWS, WIDTH, "xavier_normal", slice_mode=slices, **given)


def embedding():
    return nn.Embedding(16, WIDTH, sparse=True, dtype=torch.float64)


def whole(weight):
    """Return a table, of which this rank may have a part. All ranks call it together."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach().clone()


def alone(network):
    """Return the same network for this process alone."""
    rows = whole(next(network.table.parameters()))
    found = Net(lambda: Table(rows))
    found.first.load_state_dict(network.first.state_dict())
    found.last.load_state_dict(network.last.state_dict())
    return found


def batch(seed, highest=ROWS + 3, size=16):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, highest, (size, 3), generator=generator)
    indices[:, 2] = indices[:, 1]  # one row several times
    x, y = (torch.randn(size, n, generator=generator, dtype=torch.float64) for n in (2, 1))
    return indices, x, y


def known_batch(seed):
    return batch(seed, ROWS)


def own(values):
    return [value.chunk(get_group_size())[get_rank()] for value in values]


class _Both:
    """SparseAdam for the table and SGD for the rest."""

    def __init__(self, parameters):
        table, *rest = sorted(parameters, key=lambda p: p.numel(), reverse=True)
        self.parts = torch.optim.SparseAdam([table], lr=0.1), torch.optim.SGD(rest, lr=0.1)

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()


def rows_of(gradient):
    with torch._C.DisableTorchFunctionSubclass():
        assert gradient.is_sparse
        return sorted(gradient.coalesce().indices()[0].tolist())


train = functools.partial(cut_networks.train, data=batch, give=own, steps=STEPS)


def pair(table, mode="semi_auto", wrap=lambda net: net):
    network = Net(table)
    return AutoParallel(wrap(WithLoss(network, F.mse_loss)), mode), network, alone(network)


def made(name, *networks):
    return [OPTIMIZERS[name](network.parameters()) for network in networks]


@on_two
@pytest.mark.parametrize(
    ("slices", "mode", "name"),
    slow_but(["table_row_slice/data_parallel/FTRL"], itertools.product(SLICES, MODES, OPTIMIZERS)),
)
def test_tables_train_as_in_one_process(slices, mode, name):
    step, network, right = pair(lookup(slices), mode)
    before = copy.deepcopy(right).table.embedding_table
    train(step, right, *made(name, network, right))
    named = {int(row) for seed in range(STEPS) for row in batch(seed)[0].unique() if row < ROWS}
    others = sorted({*range(ROWS)} - named)
    assert torch.equal(step.state_dict()["table.embedding_table"][others], before[others])


# -- what a step is made of ---------------------------------------------------------------------------------------

TABLES = {"embedding": embedding, **{slices: lookup(slices) for slices in SLICES}}
WAYS = {
    "copies": {"wrap": lambda net: MicroBatchInterleaved(net, 2)},
    "both": {"wrap": lambda net: GradAccumulation(MicroBatchInterleaved(net, 2), 2)},
    "full batch": {"change": lambda step, _: step.dataset_strategy("full_batch"), "give": tuple},
    "recomputed": {"change": lambda _, net: recompute(net.table)},
    "hsdp": {"change": lambda step, _: step.hsdp(threshold=0)},
}


@on_two
@pytest.mark.parametrize(("table", "way"), slow_but(["table_row_slice/full batch"], itertools.product(TABLES, WAYS)))
def test_batches_that_are_divided_or_whole_recomputed_blocks_and_hsdp_change_no_number(table, way):
    settings = {"wrap": lambda net: net, "change": lambda *_: None, "give": own, **WAYS[way]}
    step, network, right = pair(TABLES[table], wrap=settings["wrap"])
    settings["change"](step, network)
    data = known_batch if table == "embedding" else batch
    optimizers = made("LazyAdam" if "wrap" in WAYS[way] else "SGD", network, right)
    train(step, right, *optimizers, data=data, give=settings["give"], steps=2)


@slow_on_two_and_four
@pytest.mark.parametrize("name", ["SGD", "LazyAdam"])
@pytest.mark.parametrize("level", ["", "level1", "level3"])
@pytest.mark.parametrize("mode", MODES)
def test_sparse_embedding_layers_train_as_in_one_process(mode, level, name):
    step, network, right = pair(embedding, mode)
    if level:
        step.hsdp(threshold=0, optimizer_level=level)
    optimizers = made(name, network, right)

    def look():
        assert rows_of(network.table.weight.grad) == rows_of(right.table.embedding_table.grad)

    train(step, right, *optimizers, data=known_batch, between=look)


@slow_on_two_and_four
@pytest.mark.parametrize("name", ["LazyAdam", "FTRL"])
@pytest.mark.parametrize("cut", ["rows", "columns", "batch"])
def test_sparse_layers_cut_by_the_user_train_as_in_one_process(ranks, cut, name):
    step, network, right = pair(embedding)
    rows, columns, indices = (ranks.size if cut == each else 1 for each in ("rows", "columns", "batch"))
    shard(network.table, ((rows, columns), (indices, 1)))
    step.dataset_strategy("full_batch")
    train(step, right, *made(name, network, right), data=known_batch, give=tuple)


class Bags(nn.Module):
    """Bags of equal length, of lengths of their own with weights, and bags that leave a row out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        settings = {"sparse": True, "dtype": torch.float64}
        self.even = nn.EmbeddingBag(16, WIDTH, mode="mean", padding_idx=5, **settings)
        self.uneven = nn.EmbeddingBag(16, WIDTH, mode="sum", **settings)
        self.first = nn.Linear(2, WIDTH, dtype=torch.float64)
        self.last = nn.Linear(3 * WIDTH, 1, dtype=torch.float64)

    def forward(self, indices, offsets, weights, x):
        uneven = self.uneven(indices.flatten(), offsets, weights.flatten())
        return self.last(torch.cat([self.even(indices), uneven, self.first(x).tanh()], 1))


def bag_batch(seed):
    indices, x, y = batch(seed, 12)
    offsets = torch.randint(0, 48, (16,), generator=torch.Generator().manual_seed(seed)).sort().values
    offsets[0] = 0
    return indices, offsets, x.repeat(1, 2)[:, :3], x, y


@slow_on_two_and_four
@pytest.mark.parametrize(
    ("cut", "name"),
    [*((cut, "LazyAdam") for cut in ("", "rows", "columns", "bags")), ("rows", "FTRL"), ("bags", "SGD")],
)
def test_sparse_bags_train_as_in_one_process(ranks, cut, name):
    """Other rows stay untouched."""
    network, right, before = Bags(), Bags(), Bags()
    if cut:
        rows, columns, bags = (ranks.size if cut == each else 1 for each in ("rows", "columns", "bags"))
        shard(network.even, ((rows, columns), (bags,), (1,)))
        shard(network.uneven, ((rows, columns), (1,), (bags,), (1,)))
    step = AutoParallel(WithLoss(network, F.mse_loss)).dataset_strategy("full_batch")
    first, count = (ranks.rank * 16 // ranks.size, 16 // ranks.size) if cut == "rows" else (0, 16)

    def look():
        for mine, other in ((network.even, right.even), (network.uneven, right.uneven)):
            expected = [row - first for row in rows_of(other.weight.grad) if first <= row < first + count]
            assert rows_of(mine.weight.grad) == expected

    train(step, right, *made(name, network, right), data=bag_batch, give=tuple, between=look)
    named = {int(row) for seed in range(STEPS) for row in bag_batch(seed)[0].unique()}
    untouched = sorted({*range(16)} - named)
    assert torch.equal(step.state_dict()["uneven.weight"][untouched], before.uneven.weight[untouched])
    assert torch.equal(step.state_dict()["even.weight"][5], before.even.weight[5])


@slow_on_two_and_four
def test_a_cache_changes_no_bit():
    """Each row is copied once for all lookups between two steps that change it."""
    ways = (("semi_auto", "LazyAdam"), *(("data_parallel", name) for name in ("FTRL", "SGD", "Adagrad", "SparseAdam")))
    for mode, name in ways:
        step, network, _ = pair(lookup("batch_slice", vocab_cache_size=6), mode)
        other, bare, _ = pair(lookup("batch_slice"), mode)
        optimizers = made(name, network, bare)
        for seed in range(STEPS):
            indices, x, y = own(batch(seed, size=4))
            with torch.no_grad():
                assert torch.equal(network(indices, x), bare(indices, x))
            assert torch.equal(step(indices, x, y), other(indices, x, y))
            for one in (step, other):
                one(indices, x, y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if seed == 0:
                with torch.no_grad():
                    for weight in (network.table.embedding_table, bare.table.embedding_table):
                        weight.mul_(2)
        assert torch.equal(network.table.embedding_table, bare.table.embedding_table)
        cache = network.table.cache
        assert isinstance(cache, RowCache)
        assert cache.hits > cache.misses > 0, (mode, name, cache)
        assert (cache.copied_bytes, cache.nbytes) == (cache.misses * WIDTH * 8, 6 * WIDTH * 8)


@slow_on_two
def test_gradients_add_up_over_backward_passes():
    for slices, mode in itertools.product(("batch_slice", "table_row_slice"), MODES):
        step, network, right = pair(lookup(slices), mode)
        optimizers = made("FTRL", network, right)
        for seed in range(STEPS):
            indices, x, y = batch(seed)
            with step.no_sync() if seed < STEPS - 1 else nullcontext():
                step(*own((indices, x, y))).backward()
            F.mse_loss(right(indices, x), y).backward()
        assert network.table.embedding_table.grad.is_sparse
        for optimizer in optimizers:
            optimizer.step()
        assert_same(step, right)


@slow_on_two
def test_gradients_are_clipped_by_the_norm_of_the_whole():
    for slices, mode in itertools.product(SLICES, MODES):
        step, network, right = pair(lookup(slices), mode)

        def clip(step=step, right=right):
            clip_grad_norm_(list(step.parameters()), 0.1)
            gradients = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in right.parameters()]
            norm = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in gradients]))
            for p in right.parameters():
                p.grad = p.grad * min(1.0, 0.1 / (float(norm) + 1e-6))

        train(step, right, *made("SGD", network, right), between=clip)


@slow_on_two
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slices", ["batch_slice", "table_row_slice"])
def test_step_functions_get_gradients_of_rows(slices, mode):
    network = Net(lookup(slices))
    right = alone(network)
    optimizer, theirs = made("LazyAdam", network, right)
    grad = value_and_grad(lambda *b: F.mse_loss(network(*b[:2]), b[2]), None, list(network.parameters()))

    def one_step(*given):
        loss, gradients = grad(*given)
        optimizer(gradients)
        return loss

    step = AutoParallel(one_step, mode)
    for seed in range(STEPS):
        indices, x, y = batch(seed)
        step(*own((indices, x, y)))
        F.mse_loss(right(indices, x), y).backward()
        theirs.step()
        theirs.zero_grad()
    assert_close(whole(network.table.embedding_table), right.table.embedding_table.detach())


@slow_on_two
@pytest.mark.parametrize("rows_of_rank_0", [8, 16])
@pytest.mark.parametrize("slices", SLICES)
def test_it_works_without_auto_parallel_also_where_one_rank_has_no_rows(slices, rows_of_rank_0):
    """Each rank's loss is its own; the table's gradient is the mean of the ranks', as DDP makes the others'."""
    network = lookup(slices)()
    right = Table(whole(network.embedding_table))
    optimizers = made("LazyAdam", network, right)
    for seed in range(STEPS):
        indices = batch(seed)[0]
        mine = indices[:rows_of_rank_0] if get_rank() == 0 else indices[rows_of_rank_0:]
        found = network(mine)
        torch.testing.assert_close(found, right(mine))
        (found**2).sum().backward()
        ((right(indices) ** 2).sum() / get_group_size()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(whole(network.embedding_table), right.embedding_table.detach())


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True, reason="the first step of an optimizer is refused: it takes the rows for other ranks' too"
)
@on_two
def test_ranks_that_stand_alone_exchange_no_rows(ranks):
    def shifted(seed):
        indices, x, y = batch(seed)
        return (indices if ranks.rank == 0 else indices.flip(0)), x, y

    step, network, right = pair(lookup("batch_slice"), "stand_alone")
    traffic.reset()
    train(step, right, *made("LazyAdam", network, right), data=shifted, give=tuple)
    assert sum(traffic.bytes.values()) == 0, traffic.bytes


@slow_on_two_and_four
@pytest.mark.parametrize("name", ["SGD", "LazyAdam", "FTRL"])
def test_stages_of_a_pipeline_hold_whole_tables(ranks, name):
    """Two stages, of one rank or of two."""
    step, network, right = pair(lookup("batch_slice"), wrap=lambda net: Pipeline(net, 2))
    step.pipeline(2).dataset_strategy("full_batch")
    train(step, right, *made(name, network, right), give=tuple)
    assert (plain(network.table.embedding_table).numel() > 0) == (ranks.rank < ranks.size // 2)


# -- what is refused ----------------------------------------------------------------------------------------------


@slow_on_two
@pytest.mark.parametrize("mode", MODES)
def test_wrong_indices_are_refused(mode):
    step, _, _ = pair(lookup("table_row_slice"), mode)
    indices, x, y = own(batch(0))
    with pytest.raises(ParallelError, match="negative"):
        step(indices - ROWS - 5, x, y)
    with pytest.raises(ParallelError, match="whole numbers"):
        step(indices.double(), x, y)


@slow_on_two
def test_a_table_that_the_ranks_of_a_step_do_not_share_is_refused():
    cut, _, _ = pair(lookup("table_row_slice"), "stand_alone")
    with pytest.raises(StrategyError, match='give slice_mode="batch_slice"'):
        cut(*batch(0))
    cut, _, _ = pair(lookup("table_row_slice"), wrap=lambda net: Pipeline(net, 2))
    with pytest.raises(StrategyError, match="table_row_slice of EmbeddingLookup cuts the table over all"):
        cut.pipeline(2)(*own(batch(0)))


@on_two
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"slice_mode": "table_column_slice", "embedding_size": 7}, "7 columns"),
        ({"slice_mode": "field_slice", "manual_shapes": (5, 4, 4)}, "3 fields"),
    ],
)
def test_what_a_world_cannot_share_out_is_refused(given, text):
    with pytest.raises(StrategyError, match=text):
        EmbeddingLookup(**{"vocab_size": ROWS, "embedding_size": WIDTH, **given})


@slow_on_two
def test_long_rows_are_scaled_when_they_are_looked_up():
    for slices, mode in itertools.product(("batch_slice", "table_column_slice"), MODES):
        step, network, right = pair(lookup(slices, max_norm=0.5), mode)

        def scaled(indices, forward=right.table.forward):
            rows = forward(indices)
            return rows * (0.5 / rows.norm(dim=-1, keepdim=True).clamp_min(0.5))

        right.table.forward = scaled
        train(step, right, *made("SGD", network, right))


# -- memory, messages, files ----------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in _tensors((args, kwargs))}
        for value in _tensors(result):
            if value.untyped_storage()._cdata not in given:
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


def _tensors(values):
    for leaf in torch.utils._pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_sparse:
            yield from (leaf._indices(), leaf._values())
        elif isinstance(leaf, Tensor):
            yield leaf


@slow_on_two
def test_no_step_makes_a_tensor_of_the_size_of_the_table():
    rows, ranks = 20_000, get_group_size()
    slices = ("batch_slice", "table_row_slice", "table_column_slice")
    for mode, name, cut in itertools.product(MODES, OPTIMIZERS, slices):
        network = Net(lambda cut=cut: EmbeddingLookup(rows, WIDTH, slice_mode=cut, dtype=torch.float64))
        step = AutoParallel(WithLoss(network, F.mse_loss), mode)
        (optimizer,) = made(name, network)
        for seed in range(3):
            with Largest() as largest:
                step(*own(batch(seed, rows))).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert 0 < largest.elements < rows * WIDTH / ranks / 10, (mode, name, cut, largest.elements)


@on_two
def test_every_row_travels_once():
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
def saved(tmp_path):
    """Where ranks save, with what they hold; one process loads it afterwards."""
    yield tmp_path
    for slices, (table, moment) in torch.load(tmp_path / "tables").items():
        network = Net(lookup("batch_slice"))
        optimizer = optim.LazyAdam(network.parameters())
        load_checkpoint(tmp_path / slices, network, optimizer=optimizer)
        weight = network.table.embedding_table
        assert torch.equal(weight.detach(), table)
        assert_close(optimizer.state[weight]["exp_avg"], moment)


@slow_on_two
def test_tables_go_to_files_and_come_back(ranks, saved):
    tables = {}
    for slices in SLICES:
        step, network, right = pair(lookup(slices))
        ours, theirs = made("LazyAdam", network, right)
        train(step, right, ours, theirs)
        save_checkpoint(network, saved / slices, optimizer=ours)
        tables[slices] = [whole(network.table.embedding_table), theirs.state[right.table.embedding_table]["exp_avg"]]
        for other in SLICES:
            with no_init_parameters():
                again = Net(lookup(other))
            copied = copy.deepcopy(right)
            optimizers = made("LazyAdam", again, copied)
            load_checkpoint(saved / slices, again, optimizer=optimizers[0])
            optimizers[1].load_state_dict(copy.deepcopy(theirs.state_dict()))
            train(AutoParallel(WithLoss(again, F.mse_loss)), copied, *optimizers, steps=2)
    if ranks.rank == 0:
        torch.save(tables, saved / "tables")


@pytest.fixture
def first_values():
    """Tables that one process makes."""
    return {slices: whole(Net(lookup(slices)).table.embedding_table) for slices in SLICES}


@on_two
@pytest.mark.parametrize("slices", slow_but(["table_row_slice"], SLICES))
def test_first_values_are_those_of_one_process(first_values, slices):
    """Built at once and built without memory."""
    network = Net(lookup(slices))
    with no_init_parameters():
        deferred = Net(lookup(slices))
    step = AutoParallel(WithLoss(deferred, F.mse_loss))
    step.build_plan(*own(batch(0)))
    named = dict(network.named_parameters())
    for name, value in step.state_dict().items():
        assert torch.equal(value, whole(named[name])), (slices, name)
    assert torch.equal(whole(named["table.embedding_table"]), first_values[slices])


@slow_on_two
def test_tables_in_files_train_as_those_in_memory():
    for slices, name in itertools.product(("batch_slice", "field_slice"), ("LazyAdam", "FTRL")):
        base = Path(f"table_{slices}_{name}").absolute()
        step, network, right = pair(lookup(slices, storage=str(base)))
        train(step, right, *made(name, network, right))
        held = local(network.table.embedding_table)
        on_disk = torch.from_file(f"{base}.{get_rank()}", size=held.numel(), dtype=torch.float64)
        assert torch.equal(on_disk.view(-1, WIDTH), held)
        files = sorted(path.name for path in base.parent.glob(f"{base.name}.{get_rank()}*"))
        assert len(files) == 3, files  # the table and two of its size that the optimizer keeps


@slow_on_two
def test_loss_scales_do_not_change_rows():
    for mode in MODES:
        tables = []
        for scale in (None, 8.0):
            step, network, _ = pair(lookup("table_row_slice"), mode)
            step.mixed_precision("bfloat16", loss_scale=scale)
            (optimizer,) = made("SGD", network)
            step(*own(batch(0))).backward()
            optimizer.step()
            tables.append(whole(network.table.embedding_table))
        assert torch.equal(*tables)


@on_ranks(3)
@pytest.mark.parametrize("rows", [[[0, 2], [2, 2, 1], []], [[], [], []], [[3], [3], [3]]], ids=["some", "none", "same"])
def test_gradients_of_rows_are_averaged_over_ranks_and_added_to_any(ranks, rows):
    gradients = [
        torch.sparse_coo_tensor(torch.tensor([each]).long(), torch.randn(len(each), 2), (4, 2)) for each in rows
    ]
    whole = [gradient.to_dense() for gradient in gradients]
    mean = mean_over_ranks(gradients[ranks.rank])
    assert mean.is_sparse
    torch.testing.assert_close(mean.to_dense(), sum(whole) / 3)
    for one, other in itertools.product((gradients[0], whole[0]), (gradients[1], whole[1])):
        total = added(one, other)
        assert total.is_sparse == (one.is_sparse and other.is_sparse)
        torch.testing.assert_close(total.to_dense() if total.is_sparse else total, whole[0] + whole[1])
