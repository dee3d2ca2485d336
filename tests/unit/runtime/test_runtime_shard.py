"""shard: which operator a strategy means, what it lays out, and how values and parameters get there."""

import ast
import importlib
import operator
import re

import operator_cases
import operator_cases_conv
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import every_third_fast, one_fast
from law_graphs import MODULES, give, graph_of, nodes_of
from rank_threads import assert_is_that_of_one_process
from small_capture import captured, partitioned
from torch import fx, nn

from msrun.errors import StrategyError
from msrun.runtime import Layout, shard
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.partition.events import tell
from msrun.runtime.partition.reads import layouts_of_outputs
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.strategies import OperatorStrategy

LAYOUT = Layout((2, 2), ("dp", "mp"))


class Calls(nn.Module):
    """Calls one function of its input and a parameter."""

    def __init__(self, call):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.call = call

    def forward(self, x):
        return self.call(x, self.weight)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def local_program(network, shape=(8, 8), **settings):
    """Return the program on 4 ranks that are given whole inputs."""
    return partitioned(captured(network, torch.ones(shape)), **settings)


def rows(program):
    return [(o.operator.removeprefix("aten."), o.origin, o.strategy) for o in program.operators]


def kinds(program):
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
def test_what_is_no_strategy_is_refused_at_once(arguments, text):
    with pytest.raises(StrategyError) as caught:
        shard(nn.Linear(2, 2), *arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize("target", [nn.Linear, 3, torch.ones(2)])
def test_only_modules_and_functions_take_a_strategy(target):
    with pytest.raises(StrategyError, match="a torch module is expected, or a function"):
        shard(target, ((1, 1),))


def test_sharded_function_computes_what_it_did_and_keeps_its_name():
    @shard(in_strategy=((2, 1),))
    def double(x):
        """Twice."""
        return x * 2

    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert torch.equal(double(torch.ones(2, 2)), torch.full((2, 2), 2.0))


def test_strategy_of_an_operator_that_is_called_in_a_network_is_that_of_the_call():
    multiply = shard(torch.matmul, ((2, 2), (2, 1)))
    program = local_program(Calls(lambda x, w: torch.matmul(multiply(x, w), w)))
    assert rows(program) == [("matmul", "user", ((2, 2), (2, 1))), ("matmul", "data parallel", ((4, 1), (1, 1)))]
    assert rows(local_program(of_product(None, LAYOUT("None", "mp")))) == [("matmul", "user", ((1, 1), (1, 2)))]


def test_single_operator_of_one_input_obeys_its_strategy_and_identity_is_a_place_where_the_layout_changes():
    network = nn.Sequential(nn.Linear(8, 8), shard(nn.Softmax(-1), ((2, 1),)))
    assert rows(local_program(network))[-1] == ("softmax.int", "user", ((2, 1),))
    assert rows(local_program(nn.Sequential(shard(nn.Softmax(-1), ((1, 2),)))))[-1][1:] == ("user", ((1, 2),))
    program = local_program(nn.Sequential(nn.Linear(8, 8), shard(nn.Identity(), ((1, 4),))))
    assert rows(program)[-1] == ("in_strategy", "user", ((1, 4),))
    assert kinds(program)[:2] == ["slice", "exchange"]


def test_strategy_of_a_module_with_several_operators_lays_out_what_enters_and_leaves():
    program = local_program(shard(Mlp(), ((2, 1),), ((1, 2),), {"fc1.weight": (2, 1), "fc2.weight": (1, 2)}))
    assert rows(program) == [
        ("in_strategy", "user", ((2, 1),)),
        ("linear", "follows", ((2, 1), (2, 1), (2,))),
        ("relu", "follows", ((2, 2),)),
        ("linear", "follows", ((2, 2), (1, 2), (1,))),
        ("out_strategy", "user", ((1, 2),)),
    ]
    assert program.parameters["fc1.weight"].layout == TensorLayout(((1,), ())), "the axis that the input leaves"


def test_module_inside_a_region_keeps_its_own_strategy():
    network = Mlp()
    shard(network.fc1, ((1, 1), (4, 1)))
    shard(network, ((4, 1),))
    assert rows(local_program(network))[1:3] == [
        ("linear", "user", ((1, 1), (4, 1), (4,))),
        ("relu", "follows", ((1, 4),)),
    ]
    network.unused = shard(nn.Linear(8, 8), ((1, 1), (4, 1)))
    assert "strategies of modules that the graph does not call: unused" in local_program(network).notes


def test_parameter_given_to_a_sharded_function_is_stored_as_its_strategy_says():
    @shard(in_strategy=(LAYOUT("dp", "None"), LAYOUT("None", "mp")))
    def block(x, w):
        return torch.matmul(torch.tanh(torch.matmul(x, w)), w.t())

    program = local_program(Calls(block))
    assert program.parameters["weight"].layout == TensorLayout(((), (1,)))
    assert [origin for _, origin, _ in rows(program)] == ["user", *["follows"] * 4]


OTHERS = nn.Linear(8, 8)


def of_linear(out):
    return nn.Sequential(shard(nn.Linear(8, 8), ((1, 1), (4, 1)), out))


def of_product(*layouts, function=torch.matmul, **more):
    return Calls(shard(function, layouts, **more))


TWO = ((1, 1), (4, 1))
FOREIGN = {"function": lambda x, w: x @ w @ OTHERS.weight, "parameter_plan": {"weight": (4, 1)}}


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
def test_strategy_that_cannot_be_is_refused(make, text):
    with pytest.raises(StrategyError, match=text):
        local_program(make())


def product(inputs, out=None):
    return local_program(Calls(shard(torch.matmul, inputs, out)))


@pytest.mark.slow
def test_product_with_split_sums_is_all_reduced_unless_its_result_is_wanted_cut():
    assert kinds(product(((1, 4), (4, 1)))) == ["slice", "all_reduce"]
    assert kinds(product(((1, 4), (4, 1)), ((4, 1),)))[:2] == ["slice", "reduce_scatter"]
    assert kinds(product(((1, 4), (4, 1)), ((1, 4),)))[:2] == ["slice", "reduce_scatter"]
    assert kinds(product(((1, 4), (4, 1)), ((2, 1),)))[1:3] == ["reduce_scatter", "all_reduce"]
    assert kinds(product(((2, 2), (2, 1)), ((4, 1),)))[:3] == ["slice", "slice", "reduce_scatter"]


def test_sum_that_one_reader_wants_whole_is_not_scattered():
    multiply = shard(torch.matmul, ((1, 4), (4, 1)))

    def both(x, w):
        y = multiply(x, w)
        return torch.matmul(y, w) + torch.cat([y[:4], y[4:]])

    assert "all_reduce" in kinds(local_program(Calls(both)))


def test_value_that_was_gathered_for_one_reader_is_cut_from_there_for_another():
    rows_first = shard(torch.matmul, ((4, 1), (1, 1)), ((4, 1),))
    whole, sums = shard(torch.matmul, ((1, 1), (1, 1))), shard(torch.matmul, ((1, 4), (4, 1)))

    def call(x, w):
        y = rows_first(x, w)
        return whole(y, w) + sums(y, w)

    network = Calls(call)
    network.weight.requires_grad_(requires_grad=False)
    first, _, both, cut, *_ = local_program(network).operators
    assert (first.collectives, both.collectives) == (("slice dim 0 over axes 0,1",), ("gather dim 0 over axes 0,1",))
    assert cut.collectives[0] == "slice dim 1 over axes 0,1", "no exchange of the parts that it came from"


def test_strict_refuses_traffic_that_nobody_asked_for_and_names_both_ends():
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
    every_third_fast(
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
            (lambda y: y.scatter(0, y.argmax(0, keepdim=True), 1.0), [((1, 4),), ((1, 4), (1, 4))]),
            (lambda y: y.slice_scatter(y[:2], 0, 0, 2), [((1, 4),), ((1, 4), (1, 4))]),
            (lambda y: F.cross_entropy(y.t(), y.argmax(0)), [((1, 4),), ((1, 4),), ((4, 1), (4,))]),
        ]
    ),
)
def test_operator_without_a_strategy_leaves_columns_where_they_are(call, strategies):
    columns = shard(torch.matmul, ((1, 1), (1, 4)))
    program = local_program(Calls(lambda x, w: call(columns(x, w))))
    assert sorted(strategy for _, _, strategy in rows(program)[1:]) == sorted(strategies)


def test_bags_are_cut_unless_what_is_about_all_of_them_is_read_too():
    def sums(x, weight):
        return torch.embedding_bag(weight, x.argmax(0), torch.arange(0, 8, 2))

    def scaled(x, weight):
        bags, _, sizes, _ = sums(x, weight)
        return bags * sizes[:, None]

    for call, cut in ((lambda x, weight: sums(x, weight)[0], 4), (scaled, 1)):
        program = local_program(Calls(call))
        assert ("embedding_bag", "data parallel", ((1, 1), (cut,), (1,))) in rows(program)
        taken = [node.args[0] for node in program.graph.nodes if node.target is operator.getitem]
        assert {str(getattr(source, "target", None)) for source in taken} == {"aten.embedding_bag.default"}


def test_parameter_is_stored_as_its_uses_need_least_traffic():
    columns = shard(torch.matmul, ((1, 1), (1, 4)))
    whole = shard(torch.matmul, ((4, 1), (1, 1)))
    program = local_program(Calls(lambda x, w: whole(columns(x, w), w)))
    assert program.parameters["weight"].layout == TensorLayout(((), (0, 1)))
    assert program.parameters["weight"].partial_axes == ()
    assert "gather_enter" in kinds(program), "its gradient comes back by a reduce-scatter"


def test_parameter_that_is_stored_already_keeps_its_layout():
    stored = {"weight": TensorLayout(((0, 1), ()))}
    program = local_program(Calls(torch.matmul), stored=stored)
    assert program.parameters["weight"].layout == stored["weight"]
    assert "gather_enter" in kinds(program)
    assert {r.producer for r in program.redistributions if r.bytes} >= {"parameter weight"}


def test_gradients_are_told_only_where_they_come_back():
    program = local_program(Calls(lambda x, w: (torch.matmul(x, w) * (x @ w).detach()).sum()))
    reached = tell(program).reached
    multiplied = [node for node in program.graph.nodes if node.target is torch.ops.aten.matmul.default]
    assert [node in reached for node in multiplied] == [True, False]
    assert program.parameters["weight"].partial_axes == (0, 1)
    frozen = Calls(torch.matmul)
    frozen.weight.requires_grad_(requires_grad=False)
    assert local_program(frozen).parameters["weight"].partial_axes == ()
    for wanted in (frozenset({0}), frozenset[int]()):
        program = local_program(nn.Tanh(), differentiable_inputs=wanted)
        (tanh,) = (node for node in program.graph.nodes if node.target is torch.ops.aten.tanh.default)
        assert (tanh in tell(program).reached) is bool(wanted)


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
WITH_LAWS_OF_THEIR_OWN = [*operator_cases.BINARY, *operator_cases_conv.BINARY]
MANY = 120
BY_NAME = {case.name: case for name in MODULES for case in importlib.import_module(name).BINARY}


def operator_program(case, strategy, world_size=4):
    graph = graph_of(case, dtype=torch.float64)
    wanted = frozenset(range(len(graph.inputs)))
    give(graph.graph.nodes, strategy)
    return partitioned(graph, world_size, differentiable_inputs=wanted)


@pytest.mark.parametrize("case", every_third_fast(WITH_LAWS_OF_THEIR_OWN, 6), ids=lambda case: case.name)
@pytest.mark.parametrize("world_size", one_fast(6, 4, 2, 8))
def test_every_legal_strategy_is_accepted_and_kept(case, world_size):
    if world_size == 8 and case in operator_cases_conv.BINARY:
        world_size = 3  # their outputs are too short for 8 parts
    for strategy in case.legal(world_size):
        operators = operator_program(case, strategy, world_size).operators
        assert strategy in [operator.strategy for operator in operators if operator.origin == "user"]


@pytest.mark.parametrize("case", every_third_fast(BY_NAME.values(), 32), ids=BY_NAME)
def test_every_illegal_strategy_is_refused_by_operator_input_and_dimension(case):
    candidates = list(case.candidates((1, 2, 4, 3)) if sum(map(len, case.shapes)) < 8 else case.candidates((1, 2)))
    many = 300 if case in operator_cases.BINARY else MANY
    reasons = {s: case.why_illegal(s, 4) for s in candidates[:: max(1, len(candidates) // many)]}
    assert any(reasons.values())
    for strategy, why in reasons.items():
        if not why:
            continue
        with pytest.raises(StrategyError) as caught:
            operator_program(case, strategy)
        text = str(caught.value)
        assert text.startswith("aten.") and " in module op: " in text and "\n" not in text, text
        if case in WITH_LAWS_OF_THEIR_OWN and why != "product":
            assert "dimension " in text and "input " in text, (strategy, text)
        if case in operator_cases.BINARY:
            nearest = ast.literal_eval(text.rpartition("the nearest legal strategy is ")[2])
            assert case.why_illegal(nearest, 4) == "", text


GROUPS = "in 4 groups, which must stay whole; the nearest legal number is 4"


@pytest.mark.parametrize(
    ("name", "strategy", "world_size", "text"),
    [
        ("linear", ((1, 1, 1), (1, 1)), 4, "strategy (1, 1, 1) of input 0 has 3 numbers for 2 dimensions; give one"),
        ("linear", ((1, 1), (1, 1), (1,)), 4, "has 3 tuples for 2 inputs; give one tuple for each tensor input"),
        ("linear", ((1, 2), (1, 1)), 4, "dimension 1 of input 1 is cut into 1 but the same dimension of another input"),
        ("linear", ((8, 1), (1, 1)), 4, "the nearest legal strategy is ((4, 1), (1, 1))"),
        ("linear", ((2, 4), (1, 4)), 4, "the nearest legal strategy is ((1, 4), (1, 4))"),
        ("linear-odd", ((6, 1), (1, 1), (1,)), 4, "the nearest legal strategy is ((2, 1), (1, 1), (1,))"),
        ("linear-bias", ((3, 1), (1, 1)), 4, "the nearest legal strategy is ((4, 1), (1, 1), (1,))"),
        ("linear-odd", ((4, 1), (1, 1), (1,)), 4, "size 6, which 4 does not divide; the nearest legal number is 3"),
        ("linear", ((4, 2), (1, 2)), 4, "strategy ((4, 2), (1, 2)) makes 8 parts for 4 ranks"),
        ("linear-odd", ((3, 1), (1, 1), (1,)), 4, "3 parts do not divide 4 ranks"),
        ("addmm-scaled", ((1,), (1, 4), (4, 1)), 4, "dimension 1 of input 1 must stay whole but is cut into 4; give 1"),
        ("no-rule", ((2, 1), (1, 1)), 4, "dimension 0 of input 0 must stay whole"),
        ("conv2d", ((1, 1, 1, 1), (1, 1, 3, 1)), 4, "dimension 2 of input 1 must stay whole but is cut into 3; give 1"),
        ("conv2d-strided", ((1, 1, 8, 1), (1, 1, 1, 1)), 8, "has size 8, but its output has size 4, which must be cut"),
        ("conv2d-groups", ((1, 8, 1, 1), (1, 1, 1, 1)), 8, f"dimension 1 of input 0 has size 8, {GROUPS}"),
        ("group-norm", ((1, 8, 1), (8,), (8,)), 8, f"dimension 1 of input 0 has size 8, {GROUPS}"),
        ("avg-pool1d-ceil", ((1, 1, 2),), 4, "dimension 2 of input 0 must stay whole but is cut into 2; give 1"),
    ],
)
def test_message_says_what_is_wrong_and_what_is_legal(name, strategy, world_size, text):
    with pytest.raises(StrategyError) as caught:
        operator_program(BY_NAME[name], strategy, world_size)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("linear-3d", ((2, 2), (1, 2)), ((2, 1, 2), (1, 2))),  # that of a matrix serves an input with more dimensions
        ("linear-bias", ((1, 1), (4, 1)), ((1, 1), (4, 1), (4,))),  # the bias follows the weight
    ],
)
def test_what_a_strategy_leaves_out_is_added(name, given, kept):
    (operator,) = operator_program(BY_NAME[name], given).operators
    assert operator.strategy == kept


def test_strategies_are_found_by_the_path_of_their_module():
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert shard(network[1][0], ((1, 1), [2, 1])) is network[1][0]
    assert strategies_of(network) == {"1.0": OperatorStrategy(((1, 1), (2, 1)))}


class Cumulated(nn.Module):
    def forward(self, x):
        return x.cumsum(-1)


def chain(strategies, last=None):
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), last or nn.Softmax(-1))
    for path, strategy in strategies.items():
        shard(network.get_submodule(path), strategy)
    return partitioned(captured(network, torch.ones(8, 8)), is_cut=True)


def test_dimension_that_must_stay_whole_hands_its_cut_to_another():
    program = chain({"2": ((1, 1), (4, 1), (4,))}, last=Cumulated())
    cumsum = program.operators[-1]
    assert cumsum.strategy == ((4, 1),)
    assert cumsum.collectives == ("exchange dim 1 -> 0 over axes 0,1",)
    assert program.operators[2].collectives == ("gather_enter dim 0 over axes 0,1",)


def test_batch_that_the_world_does_not_divide_is_cut_as_far_as_it_goes():
    program = local_program(nn.Linear(8, 8), (6, 8))
    assert program.operators[0].strategy[0] == (2, 1)


class OneWeightTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        for _ in range(2):
            x = self.b(torch.tanh(self.a(x)))
        return x


def test_weight_that_was_cut_for_one_use_is_taken_as_it_is_stored_for_a_use_that_sums_over_that_cut():
    network = OneWeightTwice()
    shard(network.b, ((1, 4), (1, 4)))
    program = local_program(network, (4, 8))
    assert [operator.strategy for operator in program.operators if operator.origin == "user"] == [((1, 4), (1, 4))] * 2


class Keeps(nn.Linear):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last * 2


def test_rows_of_a_result_leave_cut_and_what_a_call_stores_in_attributes_whole():
    layouts = layouts_of_outputs(captured(Keeps(4, 4), torch.ones(8, 4)), build_mesh(4), (0, 1))
    assert [layout.split for layout in layouts] == [((0, 1), ()), ((), ())]


def ways_to_cut(case):
    """Return the first legal strategy that cuts, one that cuts most, and the last, with the layouts of the arguments.

    Of an operator that follows its input: that input cut by its first dimension and by its last, or whole.
    """
    mesh = build_mesh(4)
    layouts = [TensorLayout.replicated(len(shape)) for shape in case.arguments(case.shapes)]
    if case.name in BY_NAME:
        strategies = case.legal(4)
        most = max(strategies, key=lambda strategy: sum(number > 1 for row in strategy for number in row))
        return [(one, one, layouts) for one in dict.fromkeys((*strategies[1:2], most, strategies[-1]))]
    shape = case.shapes[0]
    dims = sorted({0, len(shape) - 1})
    cut = [TensorLayout(tuple(mesh.axes if one == dim else () for one in range(len(shape)))) for dim in dims]
    fitting = [layout for layout in cut if layout.fits(mesh, shape)] or layouts[:1]
    return [(layout.split, None, [layout, *layouts[1:]]) for layout in fitting]


class AsItIs(str):
    __repr__ = str.__str__


def lines_of(nodes, told):
    """Return what the events of a case do; values and what is kept are counted from its own first one."""
    places, kept, lines = {node: f"%{place}" for place, node in enumerate(nodes)}, {}, []
    for event in told.events:
        if (node := event.node) in places:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: AsItIs(places.get(one, one.name)))
            what = kwargs.get("collective", f"{node.target}{args}{kwargs or ''}")
            works = [
                f"{work.operations:g} op, {work.read_bytes:g} + {work.written_bytes:g} B in {work.launches}"
                for work in (event.forward, event.backward)
            ]
            keeps = [kept.setdefault(number, len(kept)) for number in sorted(event.saved)]
            lines.append(f"    {places[node]} = {what}: {'; '.join(works)}; keeps {keeps}")
    return lines


def assert_computes_what_the_operators_do(cases, program):
    values = [case.values(torch.float64) for case in cases]
    for case, of_case in zip(cases, values, strict=True):
        for index, value in enumerate(of_case):
            value.requires_grad_(case.is_differentiable(index))
    inputs = [one for case, of_case in zip(cases, values, strict=True) for one in case.arguments(of_case)]
    names = {f"{n}.p{index}": values[n][index] for n, case in enumerate(cases) for index in case.parameters}
    right = [case.call(*of_case) for case, of_case in zip(cases, values, strict=True)]
    assert_is_that_of_one_process(program, right, inputs, names)


@pytest.mark.parametrize("begin", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["even", "odd"])
@pytest.mark.parametrize("module", MODULES)
def test_local_work_and_messages_of_every_operator_are_the_frozen_ones(golden, module, begin):
    table = importlib.import_module(module)
    cases = [*table.BINARY, *table.UNARY][begin::2]
    graph, ways, lines = graph_of(*cases, dtype=torch.float64), [*map(ways_to_cut, cases)], [[] for _ in cases]
    wanted = [case.is_differentiable(index) for case in cases for index in case.arguments(range(len(case.shapes)))]
    for turn in range(max(map(len, ways))):
        taken = [of_case[min(turn, len(of_case) - 1)] for of_case in ways]
        for nodes, (_, strategy, _) in zip(nodes_of(graph.graph, graph, cases), taken, strict=True):
            give(nodes, strategy)
        layouts = [layout for *_, of_case in taken for layout in of_case]
        wants = frozenset(number for number, is_wanted in enumerate(wanted) if is_wanted)
        program = partitioned(graph, input_layouts=layouts, differentiable_inputs=wants)
        told = tell(program)
        for number, nodes in enumerate(nodes_of(program.graph, graph, cases)):
            if turn < len(ways[number]):
                lines[number] += [f"{cases[number].name} {taken[number][0]}", *lines_of(nodes, told)]
        assert_computes_what_the_operators_do(cases, program)
    text = "\n".join([line for of_case in lines for line in of_case] + [""])
    golden(f"local_work/{module}_{begin}.txt", re.sub(r" at 0x\w+", "", text))
