"""Embedding tables of one process, and what is decided of the others without any."""

import pytest
import torch

from msrun.errors import DataError, StrategyError
from msrun.runtime import EmbeddingLookup, no_init_parameters, optim
from msrun.runtime.embedding.lookup import build_slices, fill_part
from msrun.runtime.execute.gradients import row_gradient
from msrun.runtime.nn.deferred_init import init_parameters

FIELDS = (3, 1, 4, 2, 2, 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("mode", ["table_row_slice", "table_column_slice", "field_slice"])
def test_every_element_of_a_table_lies_with_one_rank(mode, ranks):
    slices = build_slices(mode, 13, 12, FIELDS if mode == "field_slice" else None, ranks)
    seen = torch.zeros(13, 12)
    for rank in range(ranks):
        seen[slices.part(rank)] += 1
    assert torch.equal(seen, torch.ones(13, 12))
    assert mode != "field_slice" or ranks != 3 or slices.bounds == (0, 4, 10, 13), "fields lie with one rank as a whole"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("init", ["normal", "uniform", "xavier_uniform", "xavier_normal", "ones", 0.5])
def test_parts_of_a_table_begin_as_the_whole(init, dtype, monkeypatch):
    monkeypatch.setattr("msrun.runtime.embedding.lookup._BLOCK", 40)  # three rows
    whole = made(build_slices("batch_slice", 13, 12, None, 1), 0, init, dtype)
    for mode in ("table_row_slice", "table_column_slice"):
        slices = build_slices(mode, 13, 12, None, 4)
        for rank in range(4):
            assert torch.equal(made(slices, rank, init, dtype), whole[slices.part(rank)])


def made(slices, rank, init, dtype):
    place = slices.part(rank)
    part = torch.full([side.stop - side.start for side in place], torch.nan, dtype=dtype)
    return fill_part(part, init, slices, place, seed=5)


def test_first_values_have_the_spread_that_their_words_say():
    torch.manual_seed(0)
    normal = EmbeddingLookup(400, 50).embedding_table
    assert abs(float(normal.std()) - 0.01) < 3e-4
    assert abs(float(normal.mean())) < 3e-4
    uniform = EmbeddingLookup(400, 50, "uniform").embedding_table
    assert float(uniform.abs().max()) <= 0.07 < float(uniform.abs().max()) + 1e-3
    assert not torch.equal(EmbeddingLookup(400, 50).embedding_table, normal)  # two tables of one network


def test_a_table_begins_alike_whether_it_is_deferred_or_not():
    def build():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(3, 3), EmbeddingLookup(5, 4), torch.nn.Linear(2, 2))

    with no_init_parameters():
        network = build()
    for one, other in zip(build().parameters(), init_parameters(network).parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sparse", [True, False])
def test_rows_are_found_and_those_beyond_the_table_are_zeros(sparse):
    layer = EmbeddingLookup(5, 1, target="DEVICE", sparse=sparse)
    found = layer(torch.tensor([[4, 0], [4, 900]]))
    assert torch.equal(found[:, 0], layer.embedding_table.detach()[[4, 4]])
    assert found[1, 1].tolist() == [0]
    (found.squeeze(2) * torch.tensor([[1.0, 10.0], [100.0, 1000.0]])).sum().backward()
    gradient = layer.embedding_table.grad
    assert gradient is not None
    assert gradient.is_sparse is sparse
    assert gradient.to_dense().squeeze(1).tolist() == [10, 0, 0, 0, 101], "a row that is named twice gets both"
    assert layer(torch.zeros(2, 0, dtype=torch.int32)).shape == (2, 0, 1)


def look_up(*rows, **given):
    return EmbeddingLookup(**{"vocab_size": 5, "embedding_size": 3, **given})(torch.tensor(rows))


def without_values(storage):
    with no_init_parameters():
        EmbeddingLookup(5, 3, storage=storage)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda: look_up(target="GPU"), "Attr 'target' of 'EmbeddingLookup' Op passed GPU, should be one of values in"),
        (lambda: look_up(sparse=False), "When target is CPU, embedding_lookup must be sparse."),
        (lambda: look_up(vocab_size=0), "must be a whole number above 0"),
        (lambda: look_up(embedding_size=2.0), "must be a whole number above 0"),
        (lambda: look_up(sparse=1), "must be True or False"),
        (lambda: look_up(max_norm=0), "must be a number above 0, or None"),
        (lambda: look_up(vocab_cache_size=-1), "must be a whole number, 0 or more"),
        (lambda: look_up(vocab_cache_size=4, target="DEVICE"), "the whole table is on the device; give 0"),
        (lambda: look_up(param_init="norml"), "did you mean normal"),
        (lambda: look_up(param_init=torch.zeros(3, 3)), "must have the shape"),
        (lambda: look_up(0, -1), "index -1 is negative; give 0 to 4, or 5 and above for zeros"),
        (lambda: look_up(0.0), "torch.float32; give whole numbers"),
        (lambda: look_up(storage="missing/table"), "missing/table.0: cannot hold a table of 60 bytes: No such file"),
        (lambda: without_values("table"), "inside no_init_parameters()"),
        (lambda: build_slices("rows", 13, 12, None, 1), "must be one of batch_slice, table_row_slice"),
        (lambda: build_slices("table_row_slices", 13, 12, None, 1), "did you mean table_row_slice"),
        (lambda: build_slices("field_slice", 13, 12, None, 1), "needs the number of rows of every field"),
        (lambda: build_slices("field_slice", 13, 12, (6, 6), 1), "whose sum is the vocab_size of 13"),
        (lambda: build_slices("field_slice", 13, 12, (6, 7), 4), "2 fields cannot be shared out among 4 ranks"),
        (lambda: build_slices("table_row_slice", 13, 12, (6, 7), 2), 'only slice_mode="field_slice" has it'),
        (lambda: build_slices("table_column_slice", 13, 12, None, 5), "12 columns cannot be cut into 5 equal parts"),
    ],
)
def test_settings_and_indices_that_cannot_be_are_refused(ask, text):
    with pytest.raises((ValueError, StrategyError, DataError)) as caught:
        ask()
    assert text in str(caught.value)


def test_a_table_in_a_file_is_its_memory(tmp_path):
    layer = EmbeddingLookup(5, 3, "ones", storage=str(tmp_path / "table"))
    optimizer = optim.FTRL(layer.parameters(), initial_accum=0.25)
    layer(torch.tensor([4])).sum().backward()
    optimizer.step()
    for name, value in (
        ("table.0", layer.embedding_table.detach()),
        ("table.0.accum", optimizer.state[layer.embedding_table]["accum"]),
    ):
        stored = torch.from_file(str(tmp_path / name), size=15).view(5, 3)
        assert torch.equal(stored, value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.0", "table.0.accum", "table.0.linear"]


def test_a_cache_reads_a_row_once_until_it_changes():
    layer = EmbeddingLookup(9, 2, vocab_cache_size=3)
    cache = layer.cache
    assert cache is not None
    optimizer = optim.LazyAdam(layer.parameters(), lr=0.1)

    def read(*rows):
        before = cache.misses
        found = layer(torch.tensor(rows))
        assert torch.equal(found, layer.embedding_table[list(rows)])
        found.sum().backward()
        return cache.misses - before

    assert [read(1, 2), read(2, 1, 1), read(2, 3)] == [2, 0, 1]
    assert [read(4), read(1), read(4, 1)] == [1, 1, 0]  # 1, the least recently used, had made room for 4
    optimizer.zero_grad()
    assert read(4, 1) == 0
    optimizer.step()
    assert [read(4), read(1)] == [1, 1]  # they have changed
    with torch.no_grad():
        layer.embedding_table[8] = 5.0  # somebody has written to the table: nobody knows where
    assert read(1, 4) == 2
    assert (cache.hits, cache.copied_bytes) == (7, cache.misses * 2 * 4)


def test_a_hook_of_a_step_may_write_to_any_row():
    layer = EmbeddingLookup(9, 2, vocab_cache_size=9)
    optimizer = optim.LazyAdam(layer.parameters(), lr=0.1)

    def decay(*_):
        with torch.no_grad():
            layer.embedding_table.mul_(0.5)

    optimizer.register_step_post_hook(decay)
    rows = torch.arange(4)
    layer(rows)
    layer(rows[:1]).sum().backward()
    optimizer.step()
    assert torch.equal(layer(rows), layer.embedding_table[:4])


def test_gradients_of_equal_rows_are_added_up_in_order():
    found = row_gradient(torch.tensor([4, 1, 4]), torch.tensor([[1.0], [2.0], [3.0]]), (6, 1))
    assert found.is_coalesced()
    assert found.indices().tolist() == [[1, 4]]
    assert found.values().tolist() == [[2.0], [4.0]]
    unsorted = row_gradient(torch.tensor([4, 1]), torch.tensor([[1.0], [2.0]]), (6, 1))
    assert unsorted.values().tolist() == [[2.0], [1.0]]
