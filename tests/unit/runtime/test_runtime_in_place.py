"""Which collectives may take the memory of what they move."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from msrun.runtime.schedule.segments import may_take_gradient, may_take_source
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.operators.rule import apply_collective

aten = torch.ops.aten
SUM, ENTER = Collective("all_reduce", (0,)), Collective("enter", (0,))


class Graph:
    """x and w, and what is done with them."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x, self.w = self.graph.placeholder("x"), self.graph.placeholder("w")

    def call(self, target: object, *args: fx.Node) -> fx.Node:
        return self.graph.call_function(target, args)  # type: ignore[arg-type]

    def move(self, value: fx.Node, collective: Collective) -> fx.Node:
        return self.graph.call_function(apply_collective, (value,), {"collective": collective})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("target", "may"),
    [
        (aten.linear.default, True),
        (aten.mm.default, True),
        (aten.bmm.default, True),
        (aten.matmul.default, True),
        (aten.add.Tensor, False),  # may be read again by who made it: only products are known to keep factors alone
        (aten.sigmoid.default, False),  # its backward pass reads its result
        (aten.view.default, False),  # another's memory
        (operator.getitem, False),
    ],
)
def test_sum_takes_the_memory_of_a_product_that_nobody_else_reads(target: object, may: bool) -> None:
    graph = Graph()
    total = graph.move(graph.call(target, graph.x, graph.w), SUM)
    assert may_take_source(total, SUM, set()) is may


def test_product_that_somebody_else_reads_stays_as_it_is() -> None:
    graph = Graph()
    product = graph.call(aten.linear.default, graph.x, graph.w)
    total = graph.move(product, SUM)
    assert not may_take_source(total, SUM, {product}), "a result of the network"
    graph.call(aten.relu.default, product)
    assert not may_take_source(total, SUM, set()), "an operator"


def test_gathers_and_inputs_stay_as_they_are() -> None:
    graph = Graph()
    gather = Collective("gather", (0,), 0)
    assert not may_take_source(graph.move(graph.call(aten.linear.default, graph.x, graph.w), gather), gather, set())
    assert not may_take_source(graph.move(graph.x, SUM), SUM, set())


def test_gradient_of_what_only_products_read_may_be_taken() -> None:
    graph = Graph()
    entered = graph.move(graph.x, ENTER)
    graph.call(aten.linear.default, entered, graph.w)
    graph.call(aten.linear.default, entered, graph.w)
    assert may_take_gradient(entered, ENTER, set())
    assert not may_take_gradient(entered, ENTER, {entered}), "the caller's gradient comes in there"


@pytest.mark.parametrize("reader", ["nobody", "a sum", "a bias"])
def test_gradient_that_may_be_anothers_stays_as_it_is(reader: str) -> None:
    graph = Graph()
    entered = graph.move(graph.x, ENTER)
    if reader == "a sum":
        graph.call(aten.linear.default, entered, graph.w)
        graph.call(aten.add.Tensor, entered, graph.w)
    elif reader == "a bias":
        graph.call(aten.linear.default, graph.x, graph.w, entered)
    assert not may_take_gradient(entered, ENTER, set())
