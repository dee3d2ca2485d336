"""shard: which operator a strategy means, what it lays out, and how values and parameters get there."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import Layout, shard
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.partition.local_work import local_values, nodes_with_gradient
from msrun.runtime.partition.partition import partition
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.sharding.layout import TensorLayout
from msrun.runtime.sharding.named_layout import choose_mesh

LAYOUT = Layout((2, 2), ("dp", "mp"))


class Calls(nn.Module):
    """Calls one function of its input and a parameter."""

    def __init__(self, call: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.weight)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


def local_program(network: nn.Module, shape: tuple[int, ...] = (8, 8), **settings: Any) -> LocalProgram:
    """Return the program on 4 ranks that are given whole inputs."""
    value = torch.ones(shape)
    strategies = strategies_of(network)
    target = find_target(network)
    graph = capture(target, [value], {}, input_shapes=[shape], parameter_shapes={}, strategies=strategies)
    named = [layout for region in graph.regions for layout in region.strategy.layouts]
    inputs = [TensorLayout.replicated(len(shape))]
    mesh = choose_mesh(4, named)
    return partition(graph, mesh, input_layouts=inputs, strategies={}, output_batch_axes=(), **settings)


def rows(program: LocalProgram) -> list[tuple[str, str, Any]]:
    return [(o.operator.removeprefix("aten."), o.origin, o.strategy) for o in program.operators]


def kinds(program: LocalProgram) -> list[str]:
    return [str(node.kwargs["collective"]).split()[0] for nodes in program.collectives for node in nodes]


LISTS = "give one tuple of whole numbers above 0 for each input"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((LAYOUT("dp", "None"), (1, 1)),), "tuples and Layouts in one call"),
        ((((1, 1), (2, 1)), LAYOUT("dp", "mp")), "tuples and Layouts in one call"),
        ((((1, 1), (2, 1)), None, {"weight": LAYOUT("dp", "mp")}), "tuples and Layouts in one call"),
        (((LAYOUT, LAYOUT),), "call the Layout with axis names"),
        ((LAYOUT("dp", "mp"),), LISTS),
        ((None, ((1, "a"),)), "give one tuple of whole numbers above 0"),
        ((None, None, {"weight": (1, -1)}), "give one tuple of whole numbers above 0"),
        ((), "an out_strategy or a parameter_plan"),
        *(((given,), LISTS) for given in [(), ((0, 1),), ((-1,),), ((1.0, 2),), ((True, 1),), (1, 2), 3, ((1, None),)]),
    ],
)
def test_what_is_no_strategy_is_refused_at_once(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(StrategyError) as caught:
        shard(nn.Linear(2, 2), *arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize("target", [nn.Linear, 3, torch.ones(2)])
def test_only_modules_and_functions_take_a_strategy(target: Any) -> None:
    with pytest.raises(StrategyError, match="a torch module is expected, or a function"):
        shard(target, ((1, 1),))


def test_sharded_function_computes_what_it_did_and_keeps_its_name() -> None:
    @shard(in_strategy=((2, 1),))
    def double(x: Tensor) -> Tensor:
        """Twice."""
        return x * 2

    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert torch.equal(double(torch.ones(2, 2)), torch.full((2, 2), 2.0))


def test_strategy_of_an_operator_that_is_called_in_a_network_is_that_of_the_call() -> None:
    multiply = shard(torch.matmul, ((2, 2), (2, 1)))
    program = local_program(Calls(lambda x, w: torch.matmul(multiply(x, w), w)))
    assert rows(program) == [("matmul", "user", ((2, 2), (2, 1))), ("matmul", "data parallel", ((4, 1), (1, 1)))]


def test_single_operator_of_one_input_obeys_its_strategy_and_identity_is_a_place_where_the_layout_changes() -> None:
    network = nn.Sequential(nn.Linear(8, 8), shard(nn.Softmax(-1), ((2, 1),)))
    assert rows(local_program(network))[-1] == ("softmax.int", "user", ((2, 1),))
    assert rows(local_program(nn.Sequential(shard(nn.Softmax(-1), ((1, 2),)))))[-1][1:] == ("user", ((1, 2),))
    program = local_program(nn.Sequential(nn.Linear(8, 8), shard(nn.Identity(), ((1, 4),))))
    assert rows(program)[-1] == ("in_strategy", "user", ((1, 4),))
    assert kinds(program)[:2] == ["slice", "exchange"]


def test_strategy_of_a_module_with_several_operators_lays_out_what_enters_and_leaves() -> None:
    program = local_program(shard(Mlp(), ((2, 1),), ((1, 2),), {"fc1.weight": (2, 1), "fc2.weight": (1, 2)}))
    assert rows(program) == [
        ("in_strategy", "user", ((2, 1),)),
        ("linear", "follows", ((2, 1), (2, 1), (2,))),
        ("relu", "follows", ((2, 2),)),
        ("linear", "follows", ((2, 2), (1, 2), (1,))),
        ("out_strategy", "user", ((1, 2),)),
    ]
    assert program.parameters["fc1.weight"].layout == TensorLayout(((1,), ())), "the axis that the input leaves"


def test_module_inside_a_region_keeps_its_own_strategy() -> None:
    network = Mlp()
    shard(network.fc1, ((1, 1), (4, 1)))
    shard(network, ((4, 1),))
    assert rows(local_program(network))[1:3] == [
        ("linear", "user", ((1, 1), (4, 1), (4,))),
        ("relu", "follows", ((1, 4),)),
    ]
    network.unused = shard(nn.Linear(8, 8), ((1, 1), (4, 1)))
    assert "strategies of modules that the graph does not call: unused" in local_program(network).notes


def test_parameter_given_to_a_sharded_function_is_stored_as_its_strategy_says() -> None:
    @shard(in_strategy=(LAYOUT("dp", "None"), LAYOUT("None", "mp")))
    def block(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(torch.tanh(torch.matmul(x, w)), w.t())

    program = local_program(Calls(block))
    assert program.parameters["weight"].layout == TensorLayout(((), (1,)))
    assert [origin for _, origin, _ in rows(program)] == ["user", *["follows"] * 4]


OTHERS = nn.Linear(8, 8)


def of_linear(out: Any) -> nn.Module:
    return nn.Sequential(shard(nn.Linear(8, 8), ((1, 1), (4, 1)), out))


def of_product(*layouts: Any, function: Any = torch.matmul, **more: Any) -> nn.Module:
    return Calls(shard(function, layouts, **more))


TWO = ((1, 1), (4, 1))
FOREIGN: dict[str, Any] = {"function": lambda x, w: x @ w @ OTHERS.weight, "parameter_plan": {"weight": (4, 1)}}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: of_linear(((3, 1),)), "out_strategy of 0: dimension 0 has size 8, which 3 does not divide"),
        (lambda: of_linear(((4, 4),)), "16 parts do not divide 4 ranks"),
        (lambda: of_linear(((4,),)), "has 1 numbers for 2 dimensions"),
        (lambda: of_linear(((4, 1), (4, 1))), "has 2 tuples for its 1 results"),
        (lambda: nn.Sequential(shard(Mlp(), TWO)), "0 has 2 tuples for its 1 .*linear in 0.fc1, .* in 0.fc2.*_plan"),
        (lambda: nn.Sequential(shard(nn.Identity(), TWO)), "it calls no operator: give one tuple"),
        (lambda: of_product(LAYOUT("dp", "None"), LAYOUT("None", "dp")), "two different dimensions of the work by one"),
        (
            lambda: of_product(LAYOUT("dp", "mp"), LAYOUT("dp", "None")),
            "0 of input 1 is cut by other axes than the same",
        ),
        (lambda: of_product((1, 1), (1, 1), **FOREIGN), "is none of the network's"),
    ],
)
def test_strategy_that_cannot_be_is_refused(make: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        local_program(make())


def test_operator_in_fewer_parts_than_ranks_is_repeated_and_said_so() -> None:
    assert [o.repeats for o in product(((2, 1), (1, 1))).operators] == [2]
    assert [o.repeats for o in product(((2, 2), (2, 1))).operators] == [1]


def product(inputs: Any, out: Any = None) -> LocalProgram:
    return local_program(Calls(shard(torch.matmul, inputs, out)))


def test_product_with_split_sums_is_all_reduced_unless_its_result_is_wanted_cut() -> None:
    assert kinds(product(((1, 4), (4, 1)))) == ["slice", "all_reduce"]
    assert kinds(product(((1, 4), (4, 1)), ((4, 1),)))[:2] == ["slice", "reduce_scatter"]
    assert kinds(product(((1, 4), (4, 1)), ((1, 4),)))[:2] == ["slice", "reduce_scatter"]
    assert kinds(product(((1, 4), (4, 1)), ((2, 1),)))[1:3] == ["reduce_scatter", "all_reduce"]
    assert kinds(product(((2, 2), (2, 1)), ((4, 1),)))[:3] == ["slice", "slice", "reduce_scatter"]


def test_sum_that_one_reader_wants_whole_is_not_scattered() -> None:
    multiply = shard(torch.matmul, ((1, 4), (4, 1)))

    def both(x: Tensor, w: Tensor) -> Tensor:
        y = multiply(x, w)
        return torch.matmul(y, w) + torch.cat([y[:4], y[4:]])

    assert "all_reduce" in kinds(local_program(Calls(both)))


def test_value_that_was_gathered_for_one_reader_is_cut_from_there_for_another() -> None:
    rows_first = shard(torch.matmul, ((4, 1), (1, 1)), ((4, 1),))
    whole, sums = shard(torch.matmul, ((1, 1), (1, 1))), shard(torch.matmul, ((1, 4), (4, 1)))

    def call(x: Tensor, w: Tensor) -> Tensor:
        y = rows_first(x, w)
        return whole(y, w) + sums(y, w)

    network = Calls(call)
    network.weight.requires_grad_(requires_grad=False)
    first, _, both, cut, *_ = local_program(network).operators
    assert (first.collectives, both.collectives) == (("slice dim 0 over axes 0,1",), ("gather dim 0 over axes 0,1",))
    assert cut.collectives[0] == "slice dim 1 over axes 0,1", "no exchange of the parts that it came from"


def test_strict_refuses_traffic_that_nobody_asked_for_and_names_both_ends() -> None:
    network = nn.Sequential(shard(nn.Linear(8, 8), ((1, 1), (4, 1))), nn.Linear(8, 8))
    with pytest.raises(StrategyError) as caught:
        local_program(network, is_strict=True)
    text = str(caught.value)
    assert "aten.linear in module 0 gives (1, 4) and aten.linear in module 1 reads (4, 1)" in text
    assert "out_strategy=((4, 1),)" in text
    shard(network[0], ((1, 1), (4, 1)), ((4, 1),))
    assert kinds(local_program(network, is_strict=True))[:1] == ["exchange"]


@pytest.mark.parametrize(
    ("call", "strategies"),
    [
        (F.relu, [((1, 4),)]),
        (lambda y: y + y, [((1, 4), (1, 4))]),
        (lambda y: y.expand(2, 8, 8), [((1, 4),)]),
        (lambda y: torch.cat([y, y]), [((1, 4), (1, 4))]),
        (lambda y: torch.hstack([y.t(), y.t()]), [((1, 4),), ((1, 4),), ((4, 1), (4, 1))]),
        (lambda y: y.movedim(0, 1), [((1, 4),)]),
        (lambda y: y.reshape(2, 4, 8), [((1, 4),)]),
        (lambda y: y.split(4), [((1, 4),)]),
        (lambda y: F.glu(y, 0), [((1, 4),)]),
        (lambda y: y.sum(0), [((1, 4),)]),
        (lambda y: y.logsumexp(0), [((1, 4),)]),
        (lambda y: y.softmax(0), [((1, 4),)]),
        (lambda y: y[2:], [((1, 4),)]),
        (lambda y: y.tril(), [((1, 4),)]),
        (lambda y: y.repeat(2, 1), [((1, 4),)]),
        (lambda y: y.new_zeros(8, 8), [((1, 4),)]),
        (lambda y: y.topk(2, 0), [((1, 4),)]),
        (lambda y: torch.var_mean(y, 0), [((1, 4),)]),
        (lambda y: F.pad(y, (0, 0, 1, 1)), [((1, 4),)]),
        (lambda y: F.layer_norm(y.t(), (8,)), [((1, 4),), ((4, 1),)]),
        (lambda y: F.batch_norm(y, None, None, training=True), [((1, 4),)]),
        (lambda y: F.max_pool1d(y, 2), [((1, 4),)]),
        (lambda y: F.one_hot(y.argmax(0), 8), [((1, 4),), ((4,),)]),
        (lambda y: F.mse_loss(y, y), [((1, 4), (1, 4))]),
        (lambda y: F.cross_entropy(y.t(), y.argmax(0)), [((1, 4),), ((1, 4),), ((4, 1), (4,))]),
        (lambda y: y.slice_scatter(y[:2], 0, 0, 2), [((1, 4),), ((1, 4), (1, 4))]),
        (lambda y: y.scatter(0, y.argmax(0, keepdim=True), 1.0), [((1, 4),), ((1, 4), (1, 4))]),
    ],
)
def test_operator_without_a_strategy_leaves_columns_where_they_are(
    call: Callable[[Tensor], Any], strategies: list[Any]
) -> None:
    columns = shard(torch.matmul, ((1, 1), (1, 4)))
    program = local_program(Calls(lambda x, w: call(columns(x, w))))
    assert sorted(strategy for _, _, strategy in rows(program)[1:]) == sorted(strategies)


def test_bags_are_cut_unless_what_is_about_all_of_them_is_read_too() -> None:
    def sums(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.embedding_bag(weight, x.argmax(0), torch.arange(0, 8, 2))
        return found

    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        bags, _, sizes, _ = sums(x, weight)
        return bags * sizes[:, None]

    for call, cut in ((lambda x, weight: sums(x, weight)[0], 4), (scaled, 1)):
        program = local_program(Calls(call))
        assert ("embedding_bag", "data parallel", ((1, 1), (cut,), (1,))) in rows(program)
        taken = [node.args[0] for node in program.graph.nodes if node.target is operator.getitem]
        assert {str(getattr(source, "target", None)) for source in taken} == {"aten.embedding_bag.default"}


def test_parameter_is_stored_as_its_uses_need_least_traffic() -> None:
    columns = shard(torch.matmul, ((1, 1), (1, 4)))
    whole = shard(torch.matmul, ((4, 1), (1, 1)))
    program = local_program(Calls(lambda x, w: whole(columns(x, w), w)))
    assert program.parameters["weight"].layout == TensorLayout(((), (0, 1)))
    assert program.parameters["weight"].partial_axes == ()
    assert "gather_enter" in kinds(program), "its gradient comes back by a reduce-scatter"


def test_parameter_that_is_stored_already_keeps_its_layout() -> None:
    stored = {"weight": TensorLayout(((0, 1), ()))}
    program = local_program(Calls(torch.matmul), stored=stored)
    assert program.parameters["weight"].layout == stored["weight"]
    assert "gather_enter" in kinds(program)
    assert {r.producer for r in program.redistributions if r.bytes} >= {"parameter weight"}


def test_gradients_are_told_only_where_they_come_back() -> None:
    program = local_program(Calls(lambda x, w: (torch.matmul(x, w) * (x @ w).detach()).sum()))
    reached = nodes_with_gradient(program, local_values(program))
    multiplied = [node for node in program.graph.nodes if node.target is torch.ops.aten.matmul.default]
    assert [node in reached for node in multiplied] == [True, False]
    assert program.parameters["weight"].partial_axes == (0, 1)
    frozen = Calls(torch.matmul)
    frozen.weight.requires_grad_(requires_grad=False)
    assert local_program(frozen).parameters["weight"].partial_axes == ()
    for wanted in (frozenset({0}), frozenset[int]()):
        program = local_program(nn.Tanh(), differentiable_inputs=wanted)
        (tanh,) = (node for node in program.graph.nodes if node.target is torch.ops.aten.tanh.default)
        assert (tanh in nodes_with_gradient(program, local_values(program))) is bool(wanted)
