"""What rules say of operators: forms, rows of the batch, kept layouts; attention in blocks and losses."""

import operator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import one_fast
from random_networks.functions import Normalized, StraightThrough
from rank_threads import assert_is_that_of_one_process, run_on_threads
from small_capture import captured, partitioned
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import SoftmaxCrossEntropyExpand, WithLoss, parallelize, shard
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.nn import random_calls
from msrun.runtime.nn.random_stream import Box, DrawKey, keep_mask
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.events import tell
from msrun.runtime.partition.price import StepSpec, price
from msrun.runtime.search.search import Search, SearchSpec
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.operators.custom import apply_function
from msrun.runtime.sharding.operators.experts import OPERATOR as ROUTED_EXPERTS
from msrun.runtime.sharding.operators.registry import REPLICATED, find_rule
from msrun.runtime.sharding.operators.rule import STRATEGY, apply_collective, operator_call
from msrun.runtime.sharding.strategies import OperatorStrategy


class Calls(nn.Module):
    def __init__(self, call):
        super().__init__()
        self._call = call

    def forward(self, *inputs):
        return self._call(*inputs)


def graph_of(network, *shapes, integers=()):
    """Return the graph of a network or a function on inputs of these shapes."""
    values = [torch.ones(s, dtype=torch.long if index in integers else None) for index, s in enumerate(shapes)]
    return captured(network if isinstance(network, nn.Module) else Calls(network), *values)


def calls_of(call, *shapes, integers=()):
    nodes = graph_of(call, *shapes, integers=integers).graph.nodes
    return [operator_call(node) for node in nodes if node.op == "call_function"]


def form_of(call, *shapes, integers=()):
    found = next(c for c in calls_of(call, *shapes, integers=integers) if c.node.target is not operator.getitem)
    return (find_rule(found.node.target) or REPLICATED).form(found)


def text(form):
    """Return a form as `b0 k, n k -> b0 n`; dimensions without a label are dots."""

    def row(labels):
        return " ".join(label or "." for label in labels)

    results = " | ".join(map(row, (form.output, *form.others)))
    return f"{', '.join(map(row, form.inputs))} -> {results}".strip()


@pytest.mark.parametrize(
    ("call", "shapes", "form", "whole"),
    [
        (torch.matmul, ((8,), (3, 8, 2)), "k, b0 k n -> b0 n", ""),
        (torch.matmul, ((3, 4, 8), (8,)), "b0 m k, k -> b0 m", ""),
        (lambda x: F.adaptive_avg_pool2d(x, (3, 1)), ((4, 2, 7, 6),), "n0 n1 s0 s1 -> n0 n1 s0 .", "s0"),
        (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), ((4, 2, 6, 6),), "n0 n1 s0 s1 -> n0 n1 s0 s1", ""),
        (lambda x: x.expand(3, 4, 8), ((4, 1),), "d1 . -> d0 d1 d2", ""),
        (lambda x: x.diagonal(), ((4, 8),), ". . -> .", ""),
        (lambda x: torch.std_mean(x, (0, 2)), ((4, 8, 2),), ". d1 . -> d1 | d1", ""),
    ],
)
def test_form_of_an_operator(call, shapes, form, whole):
    """Where no case of the operator tables says it."""
    found = form_of(call, *shapes)
    assert text(found) == form
    assert found.whole == frozenset(whole.split())


def test_size_of_a_reshaped_run_is_what_both_sides_can_be_cut_into():
    form = form_of(lambda x: x.reshape(4, 6), (6, 4))
    assert form.can_split("r0", 2)
    assert not form.can_split("r0", 3)
    assert not form.can_split("r0", 4)


def test_windows_of_a_pool_are_not_cut():
    form = form_of(lambda x: F.adaptive_avg_pool2d(x, (3, 2)), (4, 2, 6, 6))
    assert [form.can_split(label, 2) for label in ("s0", "s1")] == [False, True]
    assert [form.can_split(label, 3) for label in ("s0", "s1")] == [True, False]
    form = form_of(lambda x: F.max_pool2d(x, 2), (4, 2, 4, 4), integers=(0,))
    assert not form.can_split("s0", 2), "no whole number stands for padding"


L, S, HEADS, E = 12, 10, 4, 6
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.arange(L)[:, None] > torch.arange(S)},
    "mask of keys": {"attn_mask": torch.arange(S) > 3},
    "bias of a head": {"attn_mask": torch.linspace(-1, 1, HEADS * L * S, dtype=torch.float64).view(HEADS, L, S)},
    "grouped heads": {"enable_gqa": True},
}


def attend(call, query, key, value):
    box = Box.whole((2, HEADS, L, S))

    def keep(rows):
        return keep_mask(DrawKey(7, 3), 1, 0.4, box.narrow(-2, rows), 0, query.device)

    words = {"attn_mask": None, "is_causal": False, "enable_gqa": False} | call
    return random_calls.attend(query, key, value, dropout_p=0.4, scale=None, keep=keep, **words)


def tensors(call):
    torch.manual_seed(0)
    heads = 2 if "enable_gqa" in call else HEADS
    shapes = [(2, HEADS, L, E), (2, heads, S, E), (2, heads, S, E)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def gradients_of_gradients(call, given):
    result = attend(call, *given)
    first = torch.autograd.grad(result.square().sum(), given, create_graph=True)
    second = torch.autograd.grad(sum(value.square().sum() for value in first), given)
    return [result.detach(), *(value.detach() for value in first), *second]


@pytest.mark.parametrize("call", CASES.values(), ids=CASES.keys())
def test_blocks_give_what_one_block_gives(call, monkeypatch):
    given = tensors(call)
    whole = gradients_of_gradients(call, given)
    monkeypatch.setattr(random_calls, "BLOCK_ELEMENTS", 5 * 2 * HEADS * S)
    for part, expected in zip(gradients_of_gradients(call, given), whole, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)


def test_no_tensor_of_all_weights_is_made_or_kept(monkeypatch):
    monkeypatch.setattr(random_calls, "BLOCK_ELEMENTS", 3 * 2 * HEADS * S)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor))
            return result

    with Watch():
        attend({"is_causal": True}, *tensors({})).sum().backward()
    assert max(sizes) < 2 * HEADS * L * S


SCORES = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.tensor([0, 3, 1, 1, 2, 0, 3, 2])


def expanded(logit, label):
    """MindSpore's small operators."""
    exponentials = (logit - logit.amax(-1, keepdim=True)).exp()
    logarithms = (exponentials / exponentials.sum(-1, keepdim=True)).log()
    return -(logarithms * F.one_hot(label, logit.shape[1])).sum(-1).mean(-1)


def test_expanded_loss_is_the_formula_of_small_operators_and_torchs():
    right, scores = expanded(SCORES, LABELS), 1e4 * SCORES
    assert torch.allclose(SoftmaxCrossEntropyExpand(sparse=True)(SCORES, LABELS), right)
    assert torch.allclose(SoftmaxCrossEntropyExpand()(SCORES, F.one_hot(LABELS, 4)), right)
    assert not expanded(scores, LABELS).isfinite()
    for words in ({}, {"label_smoothing": 0.1, "ignore_index": 3, "reduction": "sum"}):
        loss = SoftmaxCrossEntropyExpand(sparse=True, **words)
        assert torch.equal(loss(scores, LABELS), F.cross_entropy(scores, LABELS, **words))


@pytest.mark.parametrize(("sparse", "label"), [(True, (2,)), (False, (2, 2))])
def test_samples_and_classes_may_both_be_cut_and_scores_are_never_gathered(sparse, label):
    network = WithLoss(Calls(lambda x: x), SoftmaxCrossEntropyExpand(sparse=sparse))
    shard(network.loss_fn, ((2, 2), label))
    program = partitioned(captured(network, SCORES, LABELS if sparse else F.one_hot(LABELS, 4)))
    loss = next(operator for operator in program.operators if operator.origin == "user")
    assert loss.strategy == ((2, 2), label)
    gathers = [text for text in loss.collectives if text.startswith("gather")]
    assert gathers == ["gather dim 1 over axes 1"], "the largest score of every row and part"
    assert [text for text in loss.collectives if text.startswith("all_reduce")] == [
        "all_reduce over axes 1",
        *(["all_reduce over axes 0,1"] if sparse else []),  # the number of labels that count
        "all_reduce over axes 0,1",
    ]


SCALED_BAG = nn.EmbeddingBag(8, 4, sparse=True, scale_grad_by_freq=True, mode="sum")


def test_gradient_of_a_sparse_embedding_has_rows_however_it_is_cut():
    def has_rows(network, shape=(4,), strategy=None):
        if strategy:
            shard(network, strategy)
        return partitioned(graph_of(network, shape, integers=(0,))).parameters["weight"].has_row_gradient

    for strategy in (((4, 1), (1,)), ((1, 4), (1,)), ((1, 1), (4,))):
        assert has_rows(nn.Embedding(8, 4, sparse=True), strategy=strategy)
    assert has_rows(nn.EmbeddingBag(8, 4, sparse=True), (4, 2))
    assert not has_rows(nn.Embedding(8, 4), strategy=((1, 4), (1,)))
    for network in (nn.Embedding(8, 4, sparse=True, scale_grad_by_freq=True), SCALED_BAG):
        with pytest.raises(CaptureError, match="give one of both"):
            has_rows(network, (4, 2))


def test_statistics_of_halves_are_made_in_float32_as_in_one_process():
    x, norm = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True), Calls(lambda x: F.rms_norm(x, (8,)))
    program = partitioned(captured(nn.Sequential(shard(norm, ((1, 2),))), x), 2)
    casts = [n.kwargs["dtype"] for n in program.graph.nodes if n.target is torch.ops.aten._to_copy.default]
    assert casts == [torch.float32, torch.bfloat16]
    for (result, *_), _ in run_on_threads(program, {program.inputs[0].target: (x, program.input_layouts[0])}):
        torch.testing.assert_close(result, norm(x).detach())


def test_positions_are_embedded_whole_because_they_are_no_part_of_the_batch():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 8)

        def forward(self, x):
            return x + self.table(torch.arange(4))

    program = partitioned(graph_of(Positions(), (8, 4, 8)), is_cut=True)
    (embedding,) = [operator for operator in program.operators if operator.operator == "aten.embedding"]
    assert embedding.strategy == ((1, 1), (1,))
    moved = [text for operator in program.operators for text in operator.collectives if not text.startswith("enter")]
    assert moved == []


def test_operator_without_a_rule_runs_whole_on_every_rank_and_the_plan_says_so_once():
    graph = graph_of(lambda x: x @ torch.linalg.svd(torch.linalg.inv(torch.linalg.inv(x)))[2], (4, 4))
    program = partitioned(graph, is_cut=True, differentiable_inputs=frozenset({0}))
    names = "linalg_inv", "linalg_svd"
    assert program.notes == [f"aten.{name}.default has no rule: every rank computes all of it" for name in names]
    assert program.operators[-1].collectives == ("enter over axes 0,1",), "a gradient comes back to the third result"
    assert tell(partitioned(graph_of(torch.geqrf, (4, 4)))).events, "though the meta device has no such operator"


def test_what_stands_for_others_in_a_graph_is_not_run():
    with pytest.raises(RuntimeError, match="stands between two segments"):
        apply_collective(torch.ones(2), collective=Collective("all_reduce", (0,)))
    with pytest.raises(RuntimeError, match="a captured graph is not run"):
        ROUTED_EXPERTS(*torch.ones(3, 2, 2, requires_grad=True), [torch.ones(2)], 0).sum().backward()
    graph = partitioned(graph_of(lambda x: F.rrelu(x), (4, 4))).graph
    assert torch.ops.aten.rrelu.default in {node.target for node in graph.nodes}, "it draws in training alone"


def test_attention_layer_of_torch_runs_data_parallel_without_a_gather():
    network = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
    network.norm1 = network.norm2 = nn.Identity()
    graph = graph_of(network, (8, 4, 8))
    program = partitioned(graph, is_cut=True)
    assert [text for operator in program.operators for text in operator.collectives] == []
    assert program.notes == []
    dropouts = [node for node in graph.graph.nodes if "dropout_call" in node.meta]
    assert [node.args[0].meta["batch_dim"] for node in dropouts] == [0, 0, 0, 0]
    assert not any(
        node.meta["val"].dim() == 2 for node in graph.graph.nodes if node.target == torch.ops.aten.linear.default
    )


def test_attention_drops_what_it_drops_in_one_process_however_it_is_cut():
    graph = graph_of(lambda x: F.scaled_dot_product_attention(x, 2 * x, x.flip(0), dropout_p=0.5), (2, 2, 4, 4))
    given, results = torch.randn(2, 2, 4, 4).requires_grad_(), []
    for program in partitioned(graph, 1), partitioned(graph, 4):
        results += run_on_threads(program, {program.inputs[0].target: (given, program.input_layouts[0])})
    assert program.operators[-1].strategy[0] != (1, 1, 1, 1)
    for (result, *_), _ in results[1:]:
        torch.testing.assert_close(result, results[0][0][0])


def test_linear_on_flattened_rows_keeps_its_shape_when_a_reader_wants_it_flat():
    layer = nn.Linear(8, 3)
    graph = graph_of(lambda x: layer(x.reshape(-1, 8)).relu(), (4, 2, 8)).graph
    (linear,) = [node for node in graph.nodes if node.target == torch.ops.aten.linear.default]
    assert linear.meta["val"].shape == (8, 3)
    graph = graph_of(lambda x: layer(x.reshape(-1, 8)).view(2, 4, 3), (4, 2, 8)).graph
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == [
        "aten.reshape.default",
        "aten.linear.default",
    ]


class Centred(torch.autograd.Function):
    """Mixes the rows, of a batch of any size."""

    @staticmethod
    def forward(ctx, x):
        return x - x.mean(0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


class Halved(torch.autograd.Function):
    """Gives another shape."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        return x.view(2, -1, x.shape[1]).sum(0)

    @staticmethod
    def backward(ctx, gradient):
        return torch.cat([gradient, gradient])


class Fixed(torch.autograd.Function):
    """Runs on four rows alone."""

    @staticmethod
    def forward(ctx, x):
        return x.reshape(4, 8) * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Spread(torch.autograd.Function):
    """Makes four rows of any number of them."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        return x.sum(0).expand(4, 8).contiguous()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.sum(0).expand(ctx.rows, 8)


class Hooked:
    """A tensor hook that reads another tensor and looks at the whole gradient."""

    @staticmethod
    def apply(x):
        y, scale = x * 2, x.detach().sin()
        y.register_hook(lambda gradient: gradient / (1 + gradient.norm()) * scale)
        return y


def program_of(function, strategy=None):
    """Cut a network that applies a function on two ranks; `strategy`: the user's, for the function."""
    network = nn.Sequential(nn.Linear(8, 8), Calls(lambda x: sum(tree_leaves(function.apply(x)), 1)))
    graph = captured(network, torch.ones(4, 8))
    if strategy is not None:
        (node,) = [node for node in graph.graph.nodes if "custom_function" in str(node.target)]
        node.meta[STRATEGY] = OperatorStrategy((strategy,))
    return network, partitioned(graph, 2)


@pytest.mark.parametrize(
    ("function", "strategy", "kinds"),
    [
        (StraightThrough, None, ["slice"]),
        (Centred, (1, 2), ["slice", "exchange"]),  # the user's promise that parts may be run
        (Halved, None, ["slice", "gather"]),
        (SimpleNamespace(apply=lambda x: Normalized.apply(x, torch.ones(8))), None, ["slice", "gather"]),
        (Hooked, None, ["slice", "gather", "gather"]),
    ],
)
def test_custom_function_is_cut_as_far_as_is_known_of_it(function, strategy, kinds):
    network, program = program_of(function, strategy)
    nodes = list(program.graph.nodes)
    first = next(number for number, node in enumerate(nodes) if node.target is apply_function)
    collectives = [n.kwargs["collective"].kind for n in nodes[:first] if n.target is apply_collective]
    assert [kind for kind in collectives if kind != "enter"] == kinds
    x = torch.randn(4, 8)
    assert_is_that_of_one_process(program, [network(x)], [x], dict(network.named_parameters()))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (Fixed, r"does not run on parts of shapes \[\[2, 8\]\]: .*; leave it whole, or write it without fixed sizes"),
        (Spread, r"makes \[4, 8\] of parts of shapes \[\[2, 8\]\], not \[2, 8\] as its strategy says: leave it whole"),
        (Halved, r"dimension 0 of input 0 must stay whole but is cut into 2"),
    ],
)
def test_function_that_does_not_fit_its_strategy_is_refused(function, why):
    with pytest.raises(StrategyError, match=why):
        program_of(function, (2, 1))


WIDTH = 8
"""Of a head."""
MESH = build_mesh(4)
H100 = PROFILES["h100"]


class Attention(nn.Module):
    def __init__(self, heads, key_heads, dropout=0.0):
        super().__init__()
        self.q, self.out = nn.Linear(64, heads * WIDTH), nn.Linear(heads * WIDTH, 64)
        self.k, self.v = (nn.Linear(64, key_heads * WIDTH) for _ in range(2))
        self.dropout = dropout

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2)).square().mean()


class Unread(nn.Linear):
    def forward(self, x):
        return x.relu()


def constraints(splits=None):
    return Constraints([TensorLayout(((), MESH.axes, ()))], splits=splits or {})


def attention_of(graph):
    return next(node.name for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))


def price_of(graph, way):
    decisions = decide(graph, MESH, constraints({attention_of(graph): {way: MESH.axes}}))
    return price(graph, decisions, H100, StepSpec())


@pytest.mark.parametrize("length", one_fast(2048, 512, 8192))
@pytest.mark.parametrize(("heads", "key_heads"), one_fast((6, 2), (4, 4)))
def test_a_ring_keeps_its_part_of_keys_values_results_and_sums(heads, key_heads, length):
    """Queries are counted where they are made."""
    graph = graph_of(Attention(heads, key_heads), (1, length, 64))
    rows = length // MESH.size
    numbers = rows * (heads * WIDTH + 2 * key_heads * WIDTH + heads)
    assert price_of(graph, "ring").activations[attention_of(graph)] == 4 * numbers


@pytest.mark.parametrize(("heads", "way"), one_fast((6, "ring"), (4, "ulysses")))
def test_a_search_cuts_a_sequence_that_is_too_long(heads, way):
    """Where heads cannot be shared out it is the ring."""
    graph = graph_of(Attention(heads, 2 if way == "ring" else heads), (1, 65536, 64))
    found = Search(graph, MESH, constraints(), SearchSpec("exact", H100), lambda _, *, shards_all: StepSpec()).run()
    split = found.plan.splits[attention_of(graph)]
    assert set(split) <= {"ring"} if way == "ring" else set(split) <= {"ulysses", "b1"}
    assert split


@pytest.mark.parametrize(
    ("network", "word", "words"),
    [
        (Attention(6, 6), "ulysses", r"ulysses cuts a size of 64 and 6 heads to exchange into 4; .* is 2, or use"),
        (Attention(4, 4, dropout=0.1), "ring", r"ring is for self attention \(as many queries as keys, no drop"),
        (nn.Sequential(nn.Linear(64, 64)), "ring", r"0 is to attend by ring, but it calls scaled_dot_.* 0 times"),
        (Attention(4, 4), "rings", r"'rings' is no word of a plan \(did you mean ring\?\)"),
        (nn.Linear(64, 6), "colwise", r"into 4 by a dimension of size 6, which does not go; .* legal number is 3"),
        (Unread(64, 64), "rowwise", r"rowwise of a weight \(64, 64\), which it does not read; name another module"),
    ],
)
def test_what_does_not_go_is_refused_by_name(network, word, words):
    whole = nn.Sequential(network)
    with pytest.raises(StrategyError, match=words):
        decide(graph_of(parallelize(whole, {"0": word}), (1, 64, 64)), MESH, constraints())


def test_ranks_that_a_plan_leaves_share_out_the_batch():
    network = parallelize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {"0": "colwise"}, tensor_parallel=2)
    strategies = [operator.strategy for operator in partitioned(graph_of(network, (4, 8)), is_cut=True).operators]
    assert strategies == [((2, 1), (2, 1), (2,)), ((4, 1), (1, 1), (1,))]
