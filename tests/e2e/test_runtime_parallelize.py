"""`parallelize`: plans by name, experts that are shared out and sequences that are cut, trained like one process."""

import copy
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import yaml
from asked_cases import slow_but
from cut_networks import train
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, Pipeline, WithLoss, expert_load, parallelize, recompute, set_target, shard
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.execute.placement import find_stages
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.parallel.compilation import captured_call
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec
from msrun.runtime.parallel.recomputation import recomputed_in
from msrun.runtime.sharding.layout import build_mesh
from msrun.runtime.sharding.operators.attention import ring_attention
from msrun.runtime.simulate.recording import Recording

WIDTH, HEADS, WORDS, LENGTH, ROWS = 16, 4, 24, 6, 8
loss_of = nn.CrossEntropyLoss()


class Transposed(nn.Module):
    """A linear layer with its weight the other way round, as GPT-2's."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 4)
        self.bias = nn.Parameter(torch.randn(outputs) / 4)

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    def __init__(self, layer, kind, key_heads):
        super().__init__()
        self.kind = kind
        self.q, self.out = layer(WIDTH, WIDTH), layer(WIDTH, WIDTH)
        self.k, self.v = (layer(WIDTH, key_heads * WIDTH // HEADS) for _ in range(2))

    def forward(self, x, real):
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mask = None
        if self.kind == "masked":  # the last word attends to nothing, as where padding stands on the left
            mask = (real[:, None, :] & real[:, :, None])[:, None]
        causal = self.kind == "causal"
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, layer, kind, key_heads):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(layer, kind, key_heads)
        self.up, self.down = layer(WIDTH, 4 * WIDTH), layer(4 * WIDTH, WIDTH)

    def forward(self, x, real):
        x = x + self.attention(self.norm(x), real)
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, layer=nn.Linear, kind="causal", key_heads=HEADS):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(layer, kind, key_heads)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x, real = self.embed(tokens), tokens != 0
        for layer in self.layers:
            x = layer(x, real)
        return self.head(x).flatten(0, 1)


ATTENTION = {"layers.*.attention.[qkv]": "colwise", "layers.*.attention.out": "rowwise"}
INSIDE = {**ATTENTION, "layers.*.up": "colwise", "layers.*.down": "rowwise"}
STYLES = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel(), "layers.*.norm": SequenceParallel()}


def brought():
    network = Decoder()
    network.tp_plan = {**INSIDE, "layers.*.gate": "colwise", "head": "colwise_rep"}
    return parallelize(network)


BLOCK = {key: f"attention.{key}" for key in ("q", "k", "v", "out")} | {"up": "up", "down": "down"}


def cut(ranks, *names):
    """Return the shapes of what a rank stores of the weights of a block, where these are cut: all unless named."""
    whole = {"q": [16, 16], "k": [16, 16], "v": [16, 16], "up": [64, 16], "out": [16, 16], "down": [16, 64]}
    for name in names or BLOCK:
        whole[name][name in ("out", "down")] //= ranks
    return whole


PLANS = {
    "words": (
        lambda: parallelize(Decoder(), {**INSIDE, "embed": "vocab", "head": "colwise"}),
        lambda n: (cut(n), {"embed": [24 // n, 16], "head": [24 // n, 16]}),
    ),
    "transposed": (
        lambda: parallelize(Decoder(Transposed), INSIDE),
        lambda n: ({name: shape[::-1] for name, shape in cut(n).items()}, {}),
    ),
    "columns of a table": (
        lambda: parallelize(Decoder(), {"embed": "colwise"}),
        lambda n: (cut(1), {"embed": [24, 16 // n]}),
    ),
    "half of the ranks": (lambda: parallelize(Decoder(), INSIDE, tensor_parallel=2), lambda _: (cut(2), {})),
    "styles of torch": (lambda: parallelize(Decoder(), STYLES), lambda n: (cut(n, "up", "down"), {})),
    "of the model": (brought, lambda n: (cut(n), {"head": [24 // n, 16]})),
}
"""Name -> network, and what each of n ranks stores of the weights of a block, and of the others where it is cut."""


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow), dtype="float64")
@pytest.mark.parametrize("name", slow_but(["of the model"], PLANS))
def test_a_named_plan_trains_like_one_process_and_cuts_what_it_names(ranks, name):
    make, stores = PLANS[name]
    of_blocks, others = stores(ranks.size)
    torch.manual_seed(3)
    step = AutoParallel(WithLoss(make(), loss_of)).dataset_strategy("full_batch")
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(4))
    step.verify(tokens, tokens.flatten())
    stored = {item.name: list(item.local_shape) for item in step.plan.parameters}
    assert {key: stored[f"layers.0.{path}.weight"] for key, path in BLOCK.items()} == of_blocks
    for key in ("embed", "head"):
        assert stored[f"{key}.weight"] == others.get(key, [24, 16])


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"upp": "colwise"}, r"plan 'upp': no module has that name \(did you mean up\?\); the network's are up, norm"),
        ({"up": "columnwise"}, r"plan 'up': 'columnwise' is no word of a plan \(did you mean colwise\?\); they are"),
        ({"norm": "colwise"}, r"plan 'norm': norm \(LayerNorm\) has no weight of two dimensions to be cut colwise"),
        ({"up": nn.ReLU()}, r"plan 'up': 'ReLU' is no word of a plan; they are ColwiseParallel"),
        (None, r"parallelize\(Small\): it brings no tp_plan; give one, e.g."),
        ("no.yaml", r"plan 'no.yaml': No such file or directory; give the path of a YAML file, or a mapping"),
        ({"hsdp": {"threshold": 0}}, "plan 'hsdp': with settings beside them, names of modules stand under `names:`"),
    ],
)
def test_a_plan_that_cannot_be_right_is_refused_before_anything_runs(plan, words):
    with pytest.raises(StrategyError, match=words):
        parallelize(Small(), plan)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("names:\n  upp: colwise", r":2: plan 'upp': no module has that name \(did you mean up\?\)"),
        ("up: columnwise", r":1: plan 'up': 'columnwise' is no word of a plan \(did you mean colwise\?\)"),
        ("names: {}\nhspd: {}", r":2: plan 'hspd': no word of a plan \(did you mean hsdp\?\); they are names, "),
        ("names: {}\nhsdp: {treshold: 1}", r":2: plan hsdp: it takes no 'treshold' \(did you mean threshold\?\); it"),
        ("names: {}\n\nhsdp: {threshold: -1}", r":3: hsdp\(threshold=-1\): must be a whole number of KB, 0 or more"),
        (
            "names: {}\nrecompute: {mode: auto}",
            ":2: plan recompute: .* is no value of it: missing a required argument: 'memory_limit_mb'",
        ),
        ("names: {}\nrecompute: [dwn]", r":2: plan recompute: 'dwn': no module has that name \(did you mean down\?\)"),
        ("names: {}\nrecompute: 3", ":2: plan recompute: 3 must be a list of names of modules"),
        ("names: {}\nstages: {up: -1}", ":2: plan stages: up: -1 must be a whole number, 0 or more"),
        ("names: {}\nstages: {op: 1}", r":2: plan stages: 'op': no module has that name"),
        (
            "names: {}\nparallel_mode: data_paralel",
            r":2: parallel_mode='data_paralel' \(did you mean data_parallel\?\)",
        ),
        ("names: {}\nparallel_mode: data_parallel\npipeline: 2", r":3: pipeline\(\) needs a captured graph"),
        ("names: {}\ntensor_parallel: two", ":2: tensor_parallel='two': must divide"),
        (
            "names: {up: colwise}\ntensor_parallel: 8",
            r":1: plan: colwise cuts the 12 of up.weight .* tensor_parallel=4",
        ),
        ("names: {}\nenable_gradients_mean: 3", ":2: plan enable_gradients_mean: 3 is no value of it: too many"),
        ("names: [up]", r":1: plan names: \('up',\) must be a mapping"),
        ("- up", ":1: a plan is a mapping"),
        ("names: {up: colwise,\nup: rowwise}", ":2: not YAML .*key 'up' is twice"),
    ],
)
def test_a_mistake_in_a_file_of_a_plan_is_told_with_its_line(tmp_path, text, words):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(StrategyError, match=f"^{re.escape(str(path))}{words}"):
        parallelize(Small(), path)


def test_a_plan_of_words_and_settings_is_a_mapping_or_a_file(tmp_path):
    whole = {
        "names": {"up": "colwise", "down": "rowwise"},
        "tensor_parallel": 2,
        "recompute": ["up"],
        "stages": {"up": 0, "down": 1},
        "mixed_precision": "float16",
        "hsdp": {"threshold": 0, "optimizer_level": "level2"},
        "pipeline": {"stages": 2, "scheduler": "gpipe"},
        "dataset_strategy": [[2, 1], [2]],
        "strict": True,
    }
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(whole))
    found = []
    for plan in (whole, path, str(path)):
        network = parallelize(Small(), plan)
        found.append(
            (AutoParallel(WithLoss(network, loss_of)).settings, strategies_of(network), recomputed_in(network))
        )
    by_hand = AutoParallel(Small()).hsdp(threshold=0, optimizer_level="level2").pipeline(2, "gpipe").strict()
    by_hand.mixed_precision("float16").dataset_strategy(((2, 1), (2,)))
    assert [each[0] for each in found] == [by_hand.settings] * 3
    assert found[0] == found[1] == found[2]
    assert found[0][1].keys() == {"up", "down"}
    assert found[0][2].keys() == {"up"}
    assert AutoParallel(network).hsdp(threshold=1).settings.hsdp == HsdpSpec(threshold=1)  # what comes later holds
    assert AutoParallel(parallelize(Small(), {"names": {}, "parallel_mode": "data_parallel"})).settings.is_replicated
    assert AutoParallel(lambda x: network(x)).settings == by_hand.settings
    nested = parallelize(nn.Sequential(Small()), {"names": {}, "recompute": "*"})
    assert recomputed_in(nested).keys() == {"0"}  # the outermost


@on_ranks(2)
def test_stages_of_a_plan_hold_what_it_says():
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    plan = {"names": {}, "stages": {"0": 0, "[12]": 1}, "pipeline": 2, "dataset_strategy": "full_batch"}
    step = AutoParallel(Pipeline(WithLoss(parallelize(network, plan), nn.MSELoss()), 2))
    step.verify(torch.ones(4, 4), torch.ones(4, 4))
    assert [find_stages(layer.weight) for layer in network] == [(0,), (1,), (1,)]


@on_ranks(2)
def test_a_layer_that_does_not_go_into_the_ranks_is_refused_before_the_capture():
    wrong = {
        "linear": (nn.Linear(4, 5), "colwise", torch.randn(2, 4), r"the 5 of 0.weight .* say rowwise, whose 4 do or "),
        "table": (
            nn.Embedding(7, 4),
            "vocab",
            torch.zeros(2, dtype=torch.long),
            r"the 7 of .* say colwise, whose 4 do",
        ),
    }
    for layer, word, x, words in wrong.values():
        step = AutoParallel(parallelize(nn.Sequential(layer), {"0": word}))
        with (
            pytest.raises(StrategyError, match=f"plan: .* cuts {words}"),
            mock.patch.object(captured_call, "compile_call", side_effect=AssertionError("captured")),
        ):
            step(x)


def test_what_is_no_module_is_refused():
    with pytest.raises(StrategyError, match=r"parallelize\(int\): a torch module is expected"):
        parallelize(3, {})


# -- experts ----------------------------------------------------------------------------------------------------------

SMALL, EXPERTS, CHOICES, TOKENS = 8, 4, 2, 16


class Experts(nn.Module):
    """In the form of transformers' models, as a loop over values that no graph holds."""

    def __init__(self, *, bias, turned):
        super().__init__()
        self.is_transposed = turned
        up, down = (SMALL, 24) if turned else (24, SMALL), (12, SMALL) if turned else (SMALL, 12)
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, *up) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, *down) / 3)
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(EXPERTS, 24) / 3)
            self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, SMALL) / 3)
        self.act_fn = nn.SiLU()

    def forward(self, tokens, chosen, shares):
        found = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            rows, places = torch.where(chosen == expert)
            if not len(rows):
                continue
            up, down = self.gate_up_proj[expert], self.down_proj[expert]
            biases = [getattr(self, f"{name}_bias", [None] * EXPERTS)[expert] for name in ("gate_up_proj", "down_proj")]
            gate, value = F.linear(tokens[rows], up.T if self.is_transposed else up, biases[0]).chunk(2, -1)
            made = F.linear(self.act_fn(gate) * value, down.T if self.is_transposed else down, biases[1])
            found = found.index_add(0, rows, made * shares[rows, places, None])
        return found


class Mixture(nn.Module):
    def __init__(self, *, favour=0.0, bias=False, turned=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, SMALL), nn.Linear(SMALL, TOKENS)
        self.gate, self.experts = nn.Linear(SMALL, EXPERTS), Experts(bias=bias, turned=turned)
        with torch.no_grad():
            self.gate.bias[1] += favour

    def forward(self, words):
        x = self.embed(words).flatten(0, 1)
        shares, chosen = self.gate(x).softmax(-1).topk(CHOICES, dim=-1)
        return self.head(x + self.experts(x, chosen, shares / shares.sum(-1, keepdim=True)))


def batch(rows):
    words = torch.randint(0, TOKENS, (rows, 6), generator=torch.Generator().manual_seed(5))
    return words, words.roll(1, 1).flatten()


MIXTURES = {
    "plain": ({}, 4),
    "biases, weights the other way round": ({"bias": True, "turned": True}, 4),
    "one expert has all": ({"favour": 50.0, "bias": True, "turned": True}, 4),
    "none for two experts": ({"favour": -1e4}, 8),
    "the same tokens on all ranks": ({}, 3),
}
"""Name -> what the network is, and rows of the batch; 3 rows cannot be shared out."""


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow), dtype="float64")
@pytest.mark.parametrize("name", slow_but(["one expert has all"], MIXTURES))
def test_experts_that_are_shared_out_train_like_whole_ones(ranks, name):
    settings, rows = MIXTURES[name]
    torch.manual_seed(3)
    network = Mixture(**settings)
    alone = copy.deepcopy(network)
    step = AutoParallel(WithLoss(parallelize(network, {"experts": "expert"}), loss_of))
    step = step.dataset_strategy("full_batch")
    optimizer, beside = (torch.optim.Adam(each.parameters(), 0.05) for each in (network, alone))
    train(step, alone, optimizer, beside, data=lambda _: batch(rows), loss_of=loss_of, steps=4)
    shapes = {item.name: list(item.local_shape) for item in step.plan.parameters}
    assert shapes["experts.down_proj"][0] == EXPERTS // ranks.size


@on_ranks(2, dtype="float64")
def test_the_load_of_every_expert_is_counted(ranks):
    network = parallelize(Mixture(favour=50.0), {"experts": "expert"})
    words, labels = batch(4)
    part = words.chunk(ranks.size)[ranks.rank]
    step = AutoParallel(WithLoss(network, loss_of))
    step(part, labels.chunk(ranks.size)[ranks.rank]).backward()
    (load,) = expert_load(network).values()
    assert (load[1], sum(load)) == (24, 24 * CHOICES)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(4, 4), "Linear has no weights of experts to be shared out: a gate_up_proj"),
        (nn.Module(), "Module has no weights of experts"),
    ],
)
def test_what_are_no_experts_is_refused(module, words):
    with pytest.raises(StrategyError, match=words):
        parallelize(nn.ModuleDict({"mlp": module}), {"mlp": "expert"})


# -- sequences --------------------------------------------------------------------------------------------------------

KEY_HEADS = 2


def words(rows, length):
    tokens = torch.randint(1, WORDS, (rows, length), generator=torch.Generator().manual_seed(4))
    tokens[:, -1] = 0
    return tokens


def cut_by(network, ranks):
    """Return the step of a network whose sequences of one row come in as many parts as there are ranks."""
    return AutoParallel(WithLoss(network, loss_of)).dataset_strategy(((1, ranks), (ranks,)))


WAYS = [
    (way, kind, length)
    for way, ranks in (("ring", 4), ("ulysses", 2))
    for kind in ("causal", "plain", "masked")
    for length in (16, 12)
]
"""The parts of 12 words on 4 ranks are odd."""


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow), dtype="float64")
@pytest.mark.parametrize(
    ("way", "kind", "length"),
    slow_but(["ring causal 16", "ring masked 12", "ulysses causal 16"], WAYS, lambda *w: " ".join(map(str, w))),
)
def test_a_sequence_that_is_cut_trains_like_a_whole_one(ranks, way, kind, length):
    """Nothing gathers it: every other layer keeps the cut."""
    torch.manual_seed(3)
    network = parallelize(
        Decoder(kind=kind, key_heads=ranks.size if way == "ulysses" else KEY_HEADS), {"layers.*.attention": way}
    )
    step, tokens = cut_by(network, ranks.size), words(1, length)
    part = tokens.chunk(ranks.size, 1)[ranks.rank]
    step.verify(part, part.flatten())
    moved = step.plan.traffic
    assert moved is not None
    assert ("ring" in moved.calls) == (way == "ring")
    if kind != "masked":  # which words are real is read in both ways
        assert set(moved.calls) == {"all_reduce", "ring" if way == "ring" else "all_to_all"}
    text = step.plan.explain()
    assert ("the next keys and values travel while a block is computed" in text) == (way == "ring")
    assert ("causal work balanced" in text) == (way == "ring" and kind == "causal" and (length // ranks.size) % 2 == 0)
    for _ in range(2):
        traffic.reset()
        step(part, part.flatten()).backward()
    assert {name: [moved.calls[name], moved.bytes[name]] for name in moved.calls} == {
        name: [traffic.calls[name], traffic.bytes[name]] for name in traffic.calls
    }


@on_ranks(4, dtype="float64", slow=True)
@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_heads_are_cut_beside_the_sequence(way):
    torch.manual_seed(3)
    network = parallelize(Decoder(), {"layers.*.attention": way, **ATTENTION}, tensor_parallel=2)
    tokens = words(1, 16)
    step = AutoParallel(WithLoss(network, loss_of)).dataset_strategy("full_batch")
    step.verify(tokens, tokens.flatten())
    cuts = {each.strategy[0] for each in step.plan.operators if "attention" in each.operator}
    assert cuts == {(1, 2, 2, 1)}


@on_ranks(4, dtype="float64", slow=True)
def test_a_ring_that_is_recomputed_sends_its_keys_and_values_again(ranks):
    network = parallelize(Decoder(key_heads=KEY_HEADS), {"layers.*.attention": "ring"})
    recompute(network.layers[0])
    step, part = cut_by(network, ranks.size), words(1, 16).chunk(ranks.size, 1)[ranks.rank]
    step.verify(part, part.flatten())
    for _ in range(2):
        traffic.reset()
        step(part, part.flatten()).backward()
    assert step.plan.traffic is not None
    assert (traffic.calls["ring"], traffic.bytes["ring"]) == (3, step.plan.traffic.bytes["ring"])


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow), dtype="float32")
@pytest.mark.parametrize(
    ("heads", "key_heads", "causal"),
    slow_but(
        ["4 4 True"], [(h, k, c) for h, k in ((4, 4), (8, 2)) for c in (True, False)], lambda *w: " ".join(map(str, w))
    ),
)
def test_memory_grows_as_the_formula_says(ranks, heads, key_heads, causal):
    """With Q of a rank's part of the queries and C of its keys and values: 2 Q + C and one sum a row are kept; at the
    peak of the backward pass it is 3 Q, or 4 if causal, and 9 C, or 7 of two ranks."""
    mesh, found = build_mesh(ranks.size), []
    for length in (128, 256):
        shape = (1, heads, length, 32)
        query, keys_values = torch.randn(shape).requires_grad_(), torch.randn(1, key_heads, length, 64).requires_grad_()
        gradient = torch.randn(shape)
        record = Recording(PROFILES["h100"], (query, keys_values, gradient))
        place = {"mesh_shape": mesh.shape, "first_rank": 0, "axes": mesh.axes}
        words = {"width": 32, "is_causal": causal, "is_balanced": causal, "scale": None, **place}
        with record.recording():
            result = ring_attention(keys_values.clone(), query.clone(), None, torch.tensor(ranks.rank), **words)
            kept = record.memory.now
            result.backward(gradient)
        found.append((kept, record.memory.peak))
    of_queries, of_keys_values, of_sums = 4 * 128 * heads * 32, 4 * 128 * key_heads * 64, 4 * 128 * heads
    kept, peak = (after - before for before, after in zip(*found, strict=True))
    assert kept == 2 * of_queries + of_keys_values + of_sums
    assert peak == pytest.approx((3 + causal) * of_queries + (9 if ranks.size > 2 else 7) * of_keys_values, rel=0.15)


def place_and_cut():
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    shard(network[0], ((1, 1), (2, 1), (2,)))
    set_target(network[1], "cpu")
    shard(network[2], ((1, 2), (1, 2)))
    recompute(network[3])
    return network


def cut_pixels():
    layers = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1, groups=2)
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 8))
    shard(network[0], ((1, 1, 2, 1), (1, 1, 1, 1)))
    shard(network[2], ((1, 2, 1, 1), (2, 1, 1, 1), (2,)))
    return network


@on_ranks(2)
@pytest.mark.parametrize(("name", "make", "shape"), [("host", place_and_cut, [8]), ("pixels", cut_pixels, [2, 8, 4])])
def test_plan_and_program_are_the_frozen_ones(ranks, golden, name, make, shape):
    step = AutoParallel(WithLoss(make(), F.mse_loss)).dataset_strategy("full_batch").hsdp(threshold=0)
    step(torch.ones(4, *shape), torch.ones(4, 8)).backward()
    text = re.sub(r"captured and cut in .*", "", step.plan.explain())
    ranks.first(lambda: golden(f"parallel_plan_{name}.txt", f"{text}\n{step.plan.program}\n"))
