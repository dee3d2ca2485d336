"""What the rules of transformers' operators say: forms, illegal strategies, rows of the batch, kept layouts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import every_third_fast
from law_graphs import MODULES
from operator_cases import OperatorNetwork
from operator_cases_transformer import OperatorCase
from torch import Tensor, nn

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import shard
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.partition.partition import partition
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.operators.registry import REPLICATED, find_rule
from msrun.runtime.sharding.operators.rule import Form, operator_call
from msrun.runtime.sharding.operators.selection import triangle
from msrun.runtime.sharding.strategies import OperatorStrategy

MANY = 300
ELSEWHERE = ("operator_cases", "operator_cases_conv")
"""Tables with tests of their own."""
BINARY: list[OperatorCase] = [
    case for name in MODULES if name not in ELSEWHERE for case in importlib.import_module(name).BINARY
]


class Calls(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self._call(*inputs)


def graph_of(call: Callable[..., Any], *shapes: tuple[int, ...], integers: tuple[int, ...] = ()) -> CapturedGraph:
    values = [
        torch.zeros(shape, dtype=torch.long) if index in integers else torch.ones(shape)
        for index, shape in enumerate(shapes)
    ]
    return capture(find_target(Calls(call)), values, {}, input_shapes=shapes, parameter_shapes={})


def row(labels: tuple[str | None, ...]) -> str:
    return " ".join(label or "." for label in labels)


def text(form: Form) -> str:
    inputs = ", ".join(map(row, form.inputs))
    return f"{inputs} -> {' | '.join(map(row, (form.output, *form.others)))}"


@pytest.mark.parametrize(
    ("call", "shapes", "integers", "form", "whole"),
    [
        (lambda w, i: F.embedding(i, w), ((8, 4), (3, 2)), (1,), "v e, i0 i1 -> i0 i1 e", ""),
        (lambda x, i: x.gather(1, i), ((4, 8), (4, 2)), (1,), "d0 v, d0 g -> d0 g", ""),
        (lambda x, i: x.gather(1, i), ((4, 8), (2, 2)), (1,), ". v, . g -> . g", ""),
        (lambda x, i: x.index_select(-1, i), ((4, 8), (3,)), (1,), "d0 v, i0 -> d0 i0", ""),
        (lambda x, i: x[:, i], ((4, 8, 2), (3, 5)), (1,), "d0 v d2, i0 i1 -> d0 i0 i1 d2", ""),
        (lambda x, i, j: x[i, j], ((4, 8, 2), (3,), (3,)), (1, 2), ". . d2, i0, i0 -> i0 d2", ""),
        (lambda x, i, j: x[i, :, j], ((4, 8, 2), (3,), (3,)), (1, 2), ". d1 ., i0, i0 -> i0 d1", ""),
        (lambda x, i, j: x[:, i, j], ((4, 8, 2), (3, 1), (5,)), (1, 2), "d0 . ., i0 ., i1 -> d0 i0 i1", ""),
        (
            F.scaled_dot_product_attention,
            ((2, 4, 3, 8),) * 3,
            (),
            "b0 b1 l e, b0 b1 l e, b0 b1 l v -> b0 b1 l v",
            "e",
        ),
        (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            ((2, 4, 3, 8), (2, 1, 3, 8), (2, 1, 3, 8)),
            (),
            "b0 b1 l e, b0 . l e, b0 . l v -> b0 b1 l v",
            "e",
        ),
        (lambda x, y: torch.cat([x, y], -1), ((4, 8), (4, 2)), (), "d0 ., d0 . -> d0 .", ""),
        (lambda x, y: torch.stack([x, y], 1), ((4, 8), (4, 8)), (), "d0 d1, d0 d1 -> d0 . d1", ""),
        (lambda x: x.split(2, 1), ((4, 4),), (), "d0 . -> d0 . | d0 .", ""),
        (lambda x: x.unbind(1), ((4, 3, 2),), (), "d0 . d2 -> d0 d2 | d0 d2 | d0 d2", ""),
        (lambda x: x[:, 1], ((4, 8, 2),), (), "d0 . d2 -> d0 d2", ""),
        (lambda x: x[:, 1:3], ((4, 8),), (), "d0 . -> d0 .", ""),
        (lambda x: x.flip(1), ((4, 8),), (), "d0 . -> d0 .", ""),
        (lambda x: x.tril(), ((4, 8),), (), "d0 d1 -> d0 d1", ""),
        (lambda x: x.repeat(3, 2, 1), ((4, 8),), (), ". d1 -> . . d1", ""),
        (lambda x: x.topk(2), ((4, 8),), (), "d0 . -> d0 . | d0 .", ""),
        (lambda x: x.max(0), ((4, 8),), (), ". d1 -> d1 | d1", ""),
        (lambda x: x.logsumexp(-1), ((4, 8),), (), "d0 d1 -> d0", ""),
        (lambda x: x.var(0, keepdim=True), ((4, 8),), (), "d0 d1 -> . d1", "d0"),
        (lambda x: x.movedim(0, 2), ((4, 8, 2),), (), "d0 d1 d2 -> d1 d2 d0", ""),
        (lambda x, y: torch.einsum("bij,jk->bki", x, y), ((2, 4, 8), (8, 3)), (), "b i j, j k -> b k i", ""),
        (lambda x, y: torch.einsum("...ij,jk", x, y), ((2, 4, 8), (8, 3)), (), "...0 i j, j k -> ...0 i k", ""),
        (lambda x: torch.einsum("ii->i", x), ((4, 4),), (), "i i -> i", "i"),
        (lambda c, a, b: torch.baddbmm(c, a, b), ((3,), (2, 4, 8), (2, 8, 3)), (), "n, b m k, b k n -> b m n", ""),
    ],
)
def test_form_of_an_operator(
    call: Callable[..., Any], shapes: Any, integers: tuple[int, ...], form: str, whole: str
) -> None:
    nodes = [n for n in graph_of(call, *shapes, integers=integers).graph.nodes if n.op == "call_function"]
    found = operator_call(next(n for n in nodes if find_rule(n.target) is not None))
    shown = (find_rule(found.node.target) or REPLICATED).form(found)
    assert text(shown) == form
    assert shown.whole == frozenset(whole.split())


@cache
def captured(name: str) -> CapturedGraph:
    case = next(case for case in BINARY if case.name == name)
    values = case.values(torch.float64)
    given = [value for index, value in enumerate(values) if index not in case.parameters]
    shapes = [tuple(value.shape) for value in given]
    return capture(find_target(OperatorNetwork(case, values)), given, {}, input_shapes=shapes, parameter_shapes={})


@pytest.mark.parametrize("case", every_third_fast(BINARY), ids=lambda case: case.name)
def test_every_illegal_strategy_is_refused_by_operator_input_and_dimension(case: OperatorCase) -> None:
    candidates = list(case.candidates((1, 2, 4, 3)) if sum(map(len, case.shapes)) < 8 else case.candidates((1, 2)))
    given = [shape for index, shape in enumerate(case.shapes) if index not in case.parameters]
    illegal = [s for s in candidates[:: max(1, len(candidates) // MANY)] if case.why_illegal(s, 4)]
    for strategy in illegal:
        with pytest.raises(StrategyError) as caught:
            partition(
                captured(case.name),
                build_mesh(4),
                input_layouts=[TensorLayout.replicated(len(shape)) for shape in given],
                strategies={"op": OperatorStrategy(strategy)},
                output_batch_axes=(),
            )
        assert str(caught.value).startswith("aten.")
        assert " in module op: " in str(caught.value)
    assert illegal


def sparse_program(network: nn.Module, shape: tuple[int, ...] = (4,)) -> LocalProgram:
    indices = torch.zeros(shape, dtype=torch.int64)
    graph = capture(find_target(network), [indices], {}, input_shapes=[shape], parameter_shapes={})
    return run(graph, strategies_of(network))


@pytest.mark.parametrize("strategy", [((4, 1), (1,)), ((1, 4), (1,)), ((1, 1), (4,))])
def test_gradient_of_a_sparse_embedding_has_rows_however_it_is_cut(strategy: Any) -> None:
    network = nn.Embedding(8, 4, sparse=True)
    shard(network, strategy)
    assert sparse_program(network).parameters["weight"].has_row_gradient
    dense = nn.Embedding(8, 4)
    shard(dense, strategy)
    assert not sparse_program(dense).parameters["weight"].has_row_gradient


@pytest.mark.parametrize("is_sparse", [True, False])
def test_gradient_of_a_sparse_embedding_bag_has_rows(is_sparse: bool) -> None:
    program = sparse_program(nn.EmbeddingBag(8, 4, sparse=is_sparse), (4, 2))
    assert program.parameters["weight"].has_row_gradient == is_sparse


def test_sparse_gradients_that_torch_does_not_have_are_refused() -> None:
    with pytest.raises(CaptureError, match="give one of both"):
        sparse_program(nn.Embedding(8, 4, sparse=True, scale_grad_by_freq=True))
    with pytest.raises(CaptureError, match="give one of both"):
        sparse_program(nn.EmbeddingBag(8, 4, sparse=True, scale_grad_by_freq=True, mode="sum"), (4, 2))


def run(graph: CapturedGraph, strategies: Any, parts: bool = False) -> LocalProgram:
    mesh = build_mesh(4)
    shapes = [node.meta["val"].shape for node in graph.graph.nodes if node.name in graph.inputs]
    layouts = [TensorLayout((mesh.axes if parts else (), *((),) * (len(shape) - 1))) for shape in shapes]
    return partition(
        graph, mesh, input_layouts=layouts, strategies=strategies, output_batch_axes=mesh.axes if parts else ()
    )


@pytest.mark.parametrize("strategy", [((4, 1),), ((1, 4),), ((2, 2),)])
@pytest.mark.parametrize("module", [nn.Softmax(-1), nn.ReLU()], ids=lambda module: type(module).__name__)
def test_strategy_of_a_module_with_one_operator_of_one_input_is_obeyed(module: nn.Module, strategy: Any) -> None:
    network = nn.Sequential(nn.Linear(8, 8), module)
    shard(module, strategy)
    graph = capture(find_target(network), [torch.ones(8, 8)], {}, input_shapes=[(8, 8)], parameter_shapes={})
    operator = run(graph, strategies_of(network)).operators[-1]
    assert (operator.strategy, operator.origin) == (strategy, "user")


def test_strategy_that_cuts_what_must_stay_whole_is_refused_for_operators_of_one_input() -> None:
    class Cumulate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(1)

    network = nn.Sequential(nn.Linear(8, 8), Cumulate())
    shard(network[1], ((1, 4),))
    graph = capture(find_target(network), [torch.ones(8, 8)], {}, input_shapes=[(8, 8)], parameter_shapes={})
    with pytest.raises(StrategyError, match="dimension 1 of input 0 must stay whole but is cut into 4"):
        run(graph, strategies_of(network))


def test_positions_are_embedded_whole_because_they_are_no_part_of_the_batch() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table(torch.arange(4))

    graph = capture(find_target(Positions()), [torch.ones(8, 4, 8)], {}, input_shapes=[(8, 4, 8)], parameter_shapes={})
    program = run(graph, {}, parts=True)
    (embedding,) = [operator for operator in program.operators if operator.operator == "aten.embedding"]
    assert embedding.strategy == ((1, 1), (1,))
    moved = [text for operator in program.operators for text in operator.collectives if not text.startswith("enter")]
    assert moved == []


def test_attention_layer_of_torch_runs_data_parallel_without_a_gather() -> None:
    network = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
    network.norm1 = network.norm2 = nn.Identity()  # type: ignore[assignment]
    graph = capture(find_target(network), [torch.ones(8, 4, 8)], {}, input_shapes=[(8, 4, 8)], parameter_shapes={})
    program = run(graph, {}, parts=True)
    assert [text for operator in program.operators for text in operator.collectives] == []
    assert program.notes == []
    dropouts = [node for node in graph.graph.nodes if "dropout_call" in node.meta]
    assert [node.args[0].meta["batch_dim"] for node in dropouts] == [0, 0, 0, 0]
    assert not any(
        node.meta["val"].dim() == 2 for node in graph.graph.nodes if node.target == torch.ops.aten.linear.default
    )


def test_linear_on_flattened_rows_keeps_its_shape_when_a_reader_wants_it_flat() -> None:
    layer = nn.Linear(8, 3)
    graph = graph_of(lambda x: layer(x.reshape(-1, 8)).relu(), (4, 2, 8)).graph
    (linear,) = [node for node in graph.nodes if node.target == torch.ops.aten.linear.default]
    assert linear.meta["val"].shape == (8, 3)
    graph = graph_of(lambda x: layer(x.reshape(-1, 8)).view(2, 4, 3), (4, 2, 8)).graph
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == [
        "aten.reshape.default",
        "aten.linear.default",
    ]


@pytest.mark.parametrize("is_upper", [True, False])
@pytest.mark.parametrize("diagonal", [-1, 0, 2])
@pytest.mark.parametrize("place", range(4))
def test_part_of_a_triangle_is_that_part_of_the_whole(is_upper: bool, diagonal: int, place: int) -> None:
    whole = torch.arange(1.0, 49.0).reshape(2, 4, 6)
    row, column = divmod(place, 2)
    part = whole[:, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
    found = triangle(part, torch.tensor(place), (2, 2), (0,), (1,), diagonal, is_upper)
    right = (whole.triu if is_upper else whole.tril)(diagonal)[:, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
    assert torch.equal(found, right)
