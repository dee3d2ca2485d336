"""Embedding tables of one process, and what is decided of the others without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from msrun.errors import DataError, StrategyError
from msrun.runtime import EmbeddingLookup, no_init_parameters, optim
from msrun.runtime.embedding.initial_values import fill_part
from msrun.runtime.embedding.slices import build_slices
from msrun.runtime.execute.gradients import row_gradient
from msrun.runtime.nn.deferred_init import init_parameters

FIELDS = (3, 1, 4, 2, 2, 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("mode", ["table_row_slice", "table_column_slice", "field_slice"])
def test_every_element_of_a_table_lies_with_one_rank(mode: str, ranks: int) -> None:
    slices = build_slices(mode, 13, 12, FIELDS if mode == "field_slice" else None, ranks)
    seen = torch.zeros(13, 12)
    for rank in range(ranks):
        seen[slices.part(rank)] += 1
    assert torch.equal(seen, torch.ones(13, 12))


def test_fields_lie_with_one_rank_as_a_whole() -> None:
    assert build_slices("field_slice", 13, 4, FIELDS, 3).bounds == (0, 4, 10, 13)


@pytest.mark.parametrize(
    ("mode", "fields", "ranks", "text"),
    [
        ("rows", None, 1, "must be one of batch_slice, table_row_slice"),
        ("table_row_slices", None, 1, "did you mean table_row_slice"),
        ("field_slice", None, 1, "needs the number of rows of every field"),
        ("field_slice", (6, 6), 1, "whose sum is the vocab_size of 13"),
        ("field_slice", (6, 7), 4, "2 fields cannot be shared out among 4 ranks"),
        ("table_row_slice", (6, 7), 2, 'only slice_mode="field_slice" has it'),
        ("table_column_slice", None, 5, "12 columns cannot be cut into 5 equal parts"),
    ],
)
def test_slices_that_cannot_be_are_refused(mode: str, fields: Any, ranks: int, text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        build_slices(mode, 13, 12, fields, ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("init", ["normal", "uniform", "xavier_uniform", "xavier_normal", "ones", 0.5])
def test_parts_of_a_table_begin_as_the_whole_does(
    init: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrun.runtime.embedding.initial_values._BLOCK", 40)  # three rows
    whole = made(build_slices("batch_slice", 13, 12, None, 1), 0, init, dtype)
    for mode in ("table_row_slice", "table_column_slice"):
        slices = build_slices(mode, 13, 12, None, 4)
        for rank in range(4):
            assert torch.equal(made(slices, rank, init, dtype), whole[slices.part(rank)])


def made(slices: Any, rank: int, init: Any, dtype: torch.dtype) -> Tensor:
    place = slices.part(rank)
    part = torch.full([side.stop - side.start for side in place], torch.nan, dtype=dtype)
    return fill_part(part, init, slices, place, seed=5)


def test_first_values_have_the_spread_that_their_words_say() -> None:
    torch.manual_seed(0)
    normal = EmbeddingLookup(400, 50).embedding_table
    assert abs(float(normal.std()) - 0.01) < 3e-4
    assert abs(float(normal.mean())) < 3e-4
    uniform = EmbeddingLookup(400, 50, "uniform").embedding_table
    assert float(uniform.abs().max()) <= 0.07 < float(uniform.abs().max()) + 1e-3
    assert not torch.equal(EmbeddingLookup(400, 50).embedding_table, normal)  # two tables of one network


def test_a_table_begins_alike_whether_it_is_deferred_or_not() -> None:
    def build() -> list[Tensor]:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(3, 3), EmbeddingLookup(5, 4), torch.nn.Linear(2, 2)]
        return list(init_parameters(torch.nn.Sequential(*layers)).parameters())

    at_once = build()
    with no_init_parameters():
        torch.manual_seed(1)
        network = torch.nn.Sequential(torch.nn.Linear(3, 3), EmbeddingLookup(5, 4), torch.nn.Linear(2, 2))
    for one, other in zip(at_once, init_parameters(network).parameters(), strict=True):
        assert torch.equal(one, other)


def test_rows_are_found_and_those_beyond_the_table_are_zeros() -> None:
    layer = EmbeddingLookup(5, 3)
    found = layer(torch.tensor([[4, 0], [5, 900]]))
    assert torch.equal(found[0], layer.embedding_table.detach()[[4, 0]])
    assert torch.equal(found[1], torch.zeros(2, 3))
    found.sum().backward()
    gradient = layer.embedding_table.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient.coalesce().indices().tolist() == [[0, 4]]
    assert layer(torch.zeros(2, 0, dtype=torch.int32)).shape == (2, 0, 3)


def test_a_row_that_is_named_twice_gets_both_gradients() -> None:
    layer = EmbeddingLookup(5, 1, "ones")
    (layer(torch.tensor([2, 1, 2])).squeeze(1) * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert layer.embedding_table.grad is not None
    assert layer.embedding_table.grad.to_dense().squeeze(1).tolist() == [0, 10, 101, 0, 0]


def test_a_dense_table_has_a_dense_gradient() -> None:
    layer = EmbeddingLookup(5, 2, target="DEVICE", sparse=False)
    layer(torch.tensor([1, 1])).sum().backward()
    assert layer.embedding_table.grad is not None
    assert layer.embedding_table.grad.tolist() == [[0, 0], [2, 2], [0, 0], [0, 0], [0, 0]]


def test_untouched_rows_stay_bit_for_bit() -> None:
    for make in (optim.LazyAdam, optim.FTRL, torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad):
        layer = EmbeddingLookup(6, 4)
        before = layer.embedding_table.detach().clone()
        optimizer = make(layer.parameters(), lr=0.1)
        for _ in range(2):
            layer(torch.tensor([3, 1])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        same = (layer.embedding_table.detach() == before).all(1)
        assert same.tolist() == [True, False, True, False, True, True]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"target": "GPU"}, "Attr 'target' of 'EmbeddingLookup' Op passed GPU, should be one of values in 'CPU'"),
        ({"sparse": False}, "When target is CPU, embedding_lookup must be sparse."),
        ({"vocab_size": 0}, "must be a whole number above 0"),
        ({"embedding_size": 2.0}, "must be a whole number above 0"),
        ({"sparse": 1}, "must be True or False"),
        ({"max_norm": 0}, "must be a number above 0, or None"),
        ({"vocab_cache_size": -1}, "must be a whole number, 0 or more"),
        ({"vocab_cache_size": 4, "target": "DEVICE"}, "the whole table is on the device; give 0"),
        ({"param_init": "norml"}, "did you mean normal"),
        ({"param_init": torch.zeros(3, 3)}, "must have the shape"),
    ],
)
def test_settings_that_are_none_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EmbeddingLookup(**{"vocab_size": 5, "embedding_size": 3, **given})


def test_indices_that_are_none_are_refused() -> None:
    with pytest.raises(StrategyError, match="index -1 is negative; give 0 to 4, or 5 and above for zeros"):
        EmbeddingLookup(5, 3)(torch.tensor([0, -1]))
    with pytest.raises(StrategyError, match=r"torch\.float32; give whole numbers"):
        EmbeddingLookup(5, 3)(torch.tensor([0.0]))


def test_a_table_in_a_file_is_its_memory(tmp_path: Path) -> None:
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


def test_a_cache_reads_a_row_once_until_it_changes() -> None:
    layer = EmbeddingLookup(9, 2, vocab_cache_size=3)
    cache = layer.cache
    assert cache is not None
    optimizer = optim.LazyAdam(layer.parameters(), lr=0.1)

    def read(*rows: int) -> int:
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


def test_a_hook_of_a_step_may_write_to_any_row() -> None:
    layer = EmbeddingLookup(9, 2, vocab_cache_size=9)
    optimizer = optim.LazyAdam(layer.parameters(), lr=0.1)

    def decay(*_: Any) -> None:
        with torch.no_grad():
            layer.embedding_table.mul_(0.5)

    optimizer.register_step_post_hook(decay)
    rows = torch.arange(4)
    layer(rows)
    layer(rows[:1]).sum().backward()
    optimizer.step()
    assert torch.equal(layer(rows), layer.embedding_table[:4])


def test_files_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing/table\.0: cannot hold a table of 60 bytes: No such file"):
        EmbeddingLookup(5, 3, storage=str(tmp_path / "missing" / "table"))
    with pytest.raises(StrategyError, match=r"inside no_init_parameters\(\)"), no_init_parameters():
        EmbeddingLookup(5, 3, storage=str(tmp_path / "table"))


def test_gradients_of_equal_rows_are_added_up_in_order() -> None:
    found = row_gradient(torch.tensor([4, 1, 4]), torch.tensor([[1.0], [2.0], [3.0]]), (6, 1))
    assert found.is_coalesced()
    assert found.indices().tolist() == [[1, 4]]
    assert found.values().tolist() == [[2.0], [4.0]]
    unsorted = row_gradient(torch.tensor([4, 1]), torch.tensor([[1.0], [2.0]]), (6, 1))
    assert unsorted.values().tolist() == [[2.0], [1.0]]
