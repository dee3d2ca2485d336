"""Pipelines give the numbers of one process, in as few messages as there must be.
Batch norm in a pipeline has the statistics of each micro batch, as in one process that divides the batch so.
What users do with pipelines besides training: predictions, checkpoints, mistakes; two stages on four ranks."""

import copy
import functools
import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from local_parts import local
from on_ranks import on_ranks
from torch import nn
from ways import Way, train_beside_one_process, weights_late

from msrun.errors import CaptureError, MsrunError, StrategyError
from msrun.runtime import (
    AutoParallel,
    MicroBatchInterleaved,
    Pipeline,
    WithLoss,
    get_group_size,
    get_rank,
    optim,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

STEPS = 4
GLOBAL_BATCH = 16
WIDTH, BLOCKS, CLASSES = 16, 4, 6

C2 = ("copies", 2)
COLUMNS, ROWS = ((1, 1), (2, 1), (2,)), ((1, 2), (1, 2))
MEGATRON = {f"blocks.{block}.{layer}": COLUMNS if layer == "0" else ROWS for block in range(BLOCKS) for layer in "02"}
BY_BLOCKS = {"blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1}


TIED, SKIPS, BOTH = {"is_tied": True}, {"skips": True}, {"is_tied": True, "skips": True}
"""The last layer uses the first one's weight; every block reads what the first layer makes."""
CUT = {"strategies": MEGATRON, "dataset": "full_batch"}
SCENARIOS = [
    Way("gpipe", stages=2, scheduler="gpipe"),
    Way("gpipe-float32", stages=2, scheduler="gpipe", dtype="float32"),
    Way("1f1b", stages=2, stage_config=BY_BLOCKS),
    Way("eager", stages=2, scheduler="eager_1f1b", micro_size=8, of_network=BOTH),
    Way("interleaved", stages=2, interleave=True, optimizer="adam", deferred=True),
    Way("zero-bubble", stages=2, scheduler="zero_bubble", of_network=SKIPS),
    Way("zbv", stages=2, scheduler="zbv", of_network=TIED, deferred=True),
    Way("dualpipev", stages=2, scheduler="dualpipev", of_network=SKIPS, form="step"),
    Way(
        "tied-step-function-sums",
        stages=2,
        scheduler="gpipe",
        micro_size=2,
        of_network=TIED,
        compat="mindspore",
        form="step",
    ),
    Way("one-stage", "level1", stages=1, micro_size=2),
    Way("four-stages", stages=4, of_network=BOTH, optimizer="adam"),
    Way("four-stages-zero-bubble-copies", None, (C2,), stages=4, scheduler="zero_bubble", compat="mindspore"),
    Way("data-parallel", "level2", stages=2, micro_size=2, of_network=TIED, deferred=True),
    Way("tensor-parallel", stages=2, scheduler="zbv", of_network=SKIPS, **CUT),
    Way("zbv-weights-late", stages=2, scheduler="zbv", configure=weights_late, **CUT),
    Way("zero-bubble-level3-copies", "level3", (C2,), stages=2, scheduler="zero_bubble", micro_size=2),
    Way(
        "everything",
        "level3",
        (C2,),
        stages=2,
        scheduler="zero_bubble",
        interleave=True,
        strategies=MEGATRON,
        shard_size=2,
        micro_size=2,
        form="step",
        optimizer="adam",
        deferred=True,
        of_network=TIED,
    ),
]
SIZES = {"one-stage": 2, "data-parallel": 4, "tensor-parallel": 4, "zbv-weights-late": 4, "everything": 8}
SIZES |= {"zero-bubble-level3-copies": 4}
"""Of the worlds that have more than one rank for a stage."""


class Network(nn.Module):
    def __init__(self, *, is_tied=False, skips=False):
        super().__init__()
        self.first = nn.Linear(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(BLOCKS)
        )
        self.last = nn.Linear(WIDTH, CLASSES)
        self.unused = nn.Linear(1, 1)
        if is_tied:
            self.last.weight = None
        self.skips = skips

    def forward(self, x):
        first = h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
            if self.skips:
                h = h + 0.25 * first
        if self.last.weight is None:
            return h @ self.first.weight + self.last.bias
        return self.last(h)


def loss_of(scores, labels):
    smooth = 0.9 * F.one_hot(labels, CLASSES).to(scores.dtype) + 0.1 / CLASSES  # of labels alone: in the last stage
    return F.cross_entropy(scores, smooth)


def batches():
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        x = torch.randn(GLOBAL_BATCH, CLASSES, generator=generator, dtype=torch.float64)
        yield x, torch.randint(0, CLASSES, (GLOBAL_BATCH,), generator=generator)


BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
RUNS = sorted(((SIZES.get(s.name, s.stages), s) for s in SCENARIOS), key=lambda run: run[0])


@functools.cache
def trained(name):
    """Train through one pipeline, check the law, and return what else there is to see."""
    scenario = BY_NAME[name]
    found = train_beside_one_process(scenario, lambda: Network(**scenario.of_network), batches(), loss_of)
    plan = found.step.plan
    if scenario.level is None:
        assert {"calls": plan.traffic.calls, "bytes": plan.traffic.bytes} == found.moved
    lines = plan.explain().splitlines()
    told = [line for line in lines if line.startswith("one training step, on each rank of stage")]
    assert len(told) == scenario.stages and not any("not known" in line for line in lines)
    held = [name for name, p in found.network.named_parameters() if local(p).numel()]
    everyone = [None] * get_group_size()
    dist.all_gather_object(everyone, {"losses": found.losses, "held": held, "traffic": found.moved})
    assert [rank["losses"] for rank in everyone] == [found.losses] * len(everyone)
    return {"ranks": everyone, "plan": json.loads(json.dumps(plan.to_json())), "explain": plan.explain()}


@on_ranks()
@pytest.mark.parametrize(("ranks", "scenario"), slow_but(["zbv"], RUNS, lambda _, s: s.name), indirect=["ranks"])
def test_losses_and_weights_are_those_of_one_process_and_ranks_hold_the_parameters_of_their_stages_alone(scenario):
    """What the graph does not use stays everywhere."""
    found = trained(scenario.name)
    everywhere = {p["name"] for p in found["plan"]["parameters"] if not p["stages"]}
    assert everywhere == {"unused.weight", "unused.bias"}
    holders = {}
    for rank, of_rank in enumerate(found["ranks"]):
        stages = [stage for stage in found["plan"]["pipeline"]["stages"] if rank in stage["ranks"]]
        assert len(stages) == (2 if scenario.interleave or scenario.scheduler in ("zbv", "dualpipev") else 1)
        assert set(of_rank["held"]) == everywhere.union(*(stage["parameters"] for stage in stages))
        for parameter in of_rank["held"]:
            holders.setdefault(parameter, set()).add(rank * scenario.stages // len(found["ranks"]))
    shared = {parameter for parameter, ranks in holders.items() if len(ranks) > 1} - everywhere
    one_rank_holds_both_ends = scenario.scheduler == "zbv" or scenario.stages == 1
    assert shared == ({"first.weight"} if "is_tied" in scenario.of_network and not one_rank_holds_both_ends else set())
    check_messages(scenario, found)


def check_messages(scenario, found):
    """Every border value of every copy of every micro batch is sent once, its gradient once, by every rank of a
    stage; borders between stages of one rank cost nothing."""
    stages = found["plan"]["pipeline"]["stages"]
    sent_calls, sent_bytes = ([0] * len(found["ranks"]) for _ in range(2))
    times = scenario.micro_size * math.prod(count for _, count in scenario.parts)
    for border in found["plan"]["pipeline"]["borders"]:
        assert border["has_gradient"]
        here, there = (stages[border["from_stage"] + more]["ranks"] for more in (0, 1))
        if here != there:
            for rank in [*here, *there]:
                sent_calls[rank] += times
                sent_bytes[rank] += border["nbytes"] * scenario.micro_size
    for rank, of_rank in enumerate(found["ranks"]):
        assert of_rank["traffic"]["calls"].get("send", 0) == sent_calls[rank]
        assert of_rank["traffic"]["bytes"].get("send", 0) == sent_bytes[rank]
    assert sum(of_rank["traffic"]["bytes"].get("receive", 0) for of_rank in found["ranks"]) == sum(sent_bytes)


@on_ranks(2, slow=True)
def test_border_of_one_activation_carries_the_rows_of_a_micro_batch_alone():
    (border,) = trained("gpipe")["plan"]["pipeline"]["borders"]
    rows = GLOBAL_BATCH // BY_NAME["gpipe"].micro_size
    assert border["shape"] == [rows, WIDTH]
    assert trained("gpipe")["ranks"][0]["traffic"]["bytes"]["send"] == GLOBAL_BATCH * WIDTH * 8


@on_ranks(4, slow=True)
def test_value_that_skips_stages_is_passed_along_in_the_layout_that_it_has():
    borders = trained("four-stages")["plan"]["pipeline"]["borders"]
    skipping = [border for border in borders if border["name"] == borders[0]["name"]]
    assert [border["from_stage"] for border in skipping] == [0, 1, 2]
    # Full batch and tensor parallel: the ranks of a stage hold the residual stream cut by rows, as layouts go.
    halves = trained("tensor-parallel")["plan"]["pipeline"]["borders"]
    rows = GLOBAL_BATCH // BY_NAME["tensor-parallel"].micro_size
    assert [rows // 2, WIDTH] in [border["shape"] for border in halves]


@on_ranks(4, slow=True)
def test_gradients_of_level2_are_scattered_after_every_micro_batch_and_weights_gathered_once():
    calls = trained("data-parallel")["ranks"][0]["traffic"]["calls"]
    assert calls["reduce_scatter"] == 2
    assert calls["all_gather"] == 1
    assert calls["broadcast"] == 1


@on_ranks(4, slow=True)
def test_explanation_says_which_stage_holds_what_and_what_leaves_it(ranks):
    text = trained("four-stages")["explain"]
    assert text.startswith("4 ranks in 4 stages (1f1b, 4 micro batches, 1 rank each)")
    assert "stages, divided by equal cost; 1f1b: 4 stages, 4 micro batches, bubble 42.9 %" in text
    (tied,) = [line for line in text.splitlines() if line.split()[:1] == ["first.weight"]]
    assert f"stage 0,3, {'message' if ranks.rank in (0, 3) else 'elsewhere'}" in tied
    (foreign,) = [line for line in text.splitlines() if line.split()[:1] == ["blocks.1.2.weight"]]
    assert (f"{WIDTH}x{WIDTH} -> 0x{WIDTH} " in foreign) == ("elsewhere" in foreign) == (ranks.rank != 1)
    assert "512 B per micro batch, and its gradient back" in text
    assert sum(line.startswith("  stage ") for line in text.splitlines()) == 4


MICRO_BATCHES = 4


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.3), nn.Linear(8, 3)
    )


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(16, 6, generator=draw), torch.randint(0, 3, (16,), generator=draw)


def train(net, step, optimizer, steps=3):
    losses = []
    for number in range(steps):
        loss = step(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_one_process(parts):
    net = network()
    criterion = WithLoss(net, nn.CrossEntropyLoss())

    def step(images, labels):
        pairs = zip(images.chunk(parts), labels.chunk(parts), strict=True)
        return torch.stack([criterion(*pair) for pair in pairs]).mean()

    return train(net, step, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)), net


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow), dtype="float64")
@pytest.mark.parametrize(
    ("scheduler", "interleave", "copies"),
    [
        ("1f1b", True, 1),
        pytest.param("gpipe", False, 1, marks=pytest.mark.slow),
        pytest.param("zbv", False, 1, marks=pytest.mark.slow),
        pytest.param("1f1b", False, 2, marks=pytest.mark.slow),
    ],
)
def test_losses_and_statistics_on_every_rank_are_those_of_one_process_that_divides_the_batch(
    scheduler, interleave, copies
):
    net = network()
    inner = WithLoss(net, nn.CrossEntropyLoss())
    wrapped = Pipeline(MicroBatchInterleaved(inner, copies) if copies > 1 else inner, MICRO_BATCHES)
    step = (
        AutoParallel(wrapped)
        .dataset_strategy("full_batch")
        .pipeline(stages=2, scheduler=scheduler, interleave=interleave)
    )
    losses = train(net, step, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    right, alone = in_one_process(MICRO_BATCHES * copies)
    assert losses == pytest.approx(right, rel=1e-10)
    for (name, buffer), expected in zip(net.named_buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-10, atol=1e-12, msg=name)
    assert f"each micro batch changes {len(list(net.buffers()))} buffers in its turn" in step.plan.explain()
    net.eval(), alone.eval()
    found = step(*batch(9)).item()
    with torch.no_grad():
        assert found == pytest.approx(WithLoss(alone, nn.CrossEntropyLoss())(*batch(9)).item(), rel=1e-10)


@on_ranks(2)
def test_statistics_that_two_stages_share_are_refused_by_name():
    norm = nn.BatchNorm1d(8)
    net = nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 8), copy.copy(norm), nn.Linear(8, 3))
    net[3].running_mean = norm.running_mean
    places = {"0": 0, "1": 0, "2": 1, "3": 1, "4": 1}
    step = AutoParallel(Pipeline(WithLoss(net, nn.CrossEntropyLoss()), 2, stage_config=places))
    with pytest.raises(StrategyError, match=r"changes buffer .* and several stages of the pipeline use it"):
        step.dataset_strategy("full_batch").pipeline(stages=2)(*batch(0))


on_four = on_ranks(4, dtype="float64", slow=True)


class SmallNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def make(seed=1):
    torch.manual_seed(seed)
    return SmallNetwork()


def small_batch(step=0, rows=16):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def part(tensor):
    return tensor.chunk(2)[get_rank() % 2]


def pipelined(network, **settings):
    return AutoParallel(Pipeline(network, 2)).pipeline(2, **settings)


def with_loss():
    return WithLoss(make(), F.cross_entropy)


@on_four
def test_results_that_are_no_loss_stay_in_their_stage_unless_they_are_broadcast(ranks):
    network, x = make(), small_batch()[0]
    right = part(make()(x).detach())
    with torch.no_grad():
        alone, broadcast = (pipelined(network, output_broadcast=on)(part(x)) for on in (False, True))
    assert (alone is None) == (ranks.rank < 2)
    assert alone is None or torch.equal(alone, right)
    assert torch.equal(broadcast, right)
    with pytest.raises(StrategyError, match=r"Pipeline\(net\): in training net must return one scalar loss"):
        pipelined(network)(part(x))


@on_four
def test_gradients_are_multiplied_by_what_comes_in_batches_change_their_size_and_without_gradients_only_forward_runs(
    ranks,
):
    network, right = make(), make()
    optimizer, its = optim.Adam(network.parameters(), lr=0.01), optim.Adam(right.parameters(), lr=0.01)
    step = pipelined(WithLoss(network, F.cross_entropy))
    for number, rows in enumerate([16, 8, 16]):
        x, y = small_batch(number, rows)
        loss, expected = step(part(x), part(y)), F.cross_entropy(right(x), y)
        for one, one_optimizer in ((loss, optimizer), (expected, its)):
            (2 * one).backward()
            one_optimizer.step()
            one_optimizer.zero_grad()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    x, y = small_batch(9)
    traffic.reset()
    with torch.no_grad():
        loss = step(part(x), part(y))
        result = pipelined(network, output_broadcast=True)(part(x))
        torch.testing.assert_close(loss, F.cross_entropy(right(x), y), rtol=1e-12, atol=0)
        torch.testing.assert_close(result, part(right(x)), rtol=0, atol=1e-12)
    assert not loss.requires_grad
    assert traffic.calls["send"] == (4 if ranks.rank < 2 else 0), "of two losses' micro batches and the prediction's"
    with pytest.raises(StrategyError, match="placed already, by another AutoParallel with another number of stages"):
        AutoParallel(WithLoss(network, F.cross_entropy))(part(x), part(y))


@on_four
def test_value_and_grad_gives_gradients_of_inputs_and_of_held_weights_and_other_results(ranks):
    network, right = make(), make()
    whole = Pipeline(MicroBatchInterleaved(WithLoss(network, F.cross_entropy), 2), 2)
    gradients_of = value_and_grad(lambda x, y: (whole(x, y), y), 0, list(network.parameters()), has_aux=True)
    step = AutoParallel(lambda x, y: gradients_of(x, y)).pipeline(2)
    x, y = small_batch()
    (loss, labels), (of_input, of_weights) = step(part(x), part(y))
    x.requires_grad_()
    expected = F.cross_entropy(right(x), y)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    assert labels is None or labels.tolist() == part(y).tolist()
    torch.testing.assert_close(of_input, part(x.grad), rtol=0, atol=1e-12)
    held = [(g, p.grad) for g, p in zip(map(local, of_weights), right.parameters(), strict=True) if g.numel()]
    for mine, other in held:
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    assert sum(ranks.gather(len(held))) == 2 * 6, "each of six weights is in two ranks of a stage"


def twice(x, y):
    loss = pipelined(with_loss())(x, y)
    loss.backward()
    loss.backward()


def changed(x, y):
    whole = Pipeline(with_loss(), 2)
    gradients_of = value_and_grad(lambda a, b: whole(a, b).exp(), None, list(whole.parameters()))
    AutoParallel(lambda a, b: gradients_of(a, b)).pipeline(2)(x, y)


def different(x, y):
    network = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 + get_rank() // 2)])
    pipelined(WithLoss(network, F.cross_entropy))(x, y)


def piped(stages, *settings, x, y):
    AutoParallel(Pipeline(with_loss(), *settings)).pipeline(stages)(x, y)


def loss_outside(x, y):
    AutoParallel(WithLoss(Pipeline(make(), 2), F.cross_entropy)).pipeline(2)(x, y)


MISTAKES = {
    "backward() was called twice on one loss": twice,
    "wrap it in Pipeline(net_with_loss, micro_size)": lambda x, y: AutoParallel(with_loss()).pipeline(2)(x, y),
    "the step computes with the result of a network whose batch is divided": changed,
    "computes with the result of a network whose batch is divided": loss_outside,
    "rank 2 captured another network than rank 0": different,
    "pipeline(stages=3): 4 ranks cannot be divided into 3 equal stages": functools.partial(piped, 3, 4),
    "module last is in stage 0 but reads what operator aten.tanh in stage 1 makes": functools.partial(
        piped, 2, 2, {"first": 1, "last": 0}
    ),
    "a batch of 8 rows on this rank cannot be cut into 3 equal micro batches": functools.partial(piped, 2, 3),
    "Pipeline(micro_size=1): 1f1b with 2 stages needs at least 2 micro batches": functools.partial(piped, 2, 1),
}


@on_four
@pytest.mark.parametrize("words", MISTAKES)
def test_mistake_is_explained_on_every_rank(words):
    x, y = map(part, small_batch())
    with pytest.raises((MsrunError, RuntimeError)) as error:
        MISTAKES[words](x=x, y=y)
    assert words in str(error.value)


@on_four
def test_mistake_of_one_rank_is_told_to_the_others(ranks):
    config = {"first": 0, "last" if ranks.rank < 3 else "lats": 1}
    with pytest.raises(MsrunError) as error:
        AutoParallel(Pipeline(with_loss(), 2, config)).pipeline(2)(*map(part, small_batch()))
    own = "stage_config: no module 'lats' (did you mean last?); the network's modules are first, middle, last"
    assert str(error.value) == (own if ranks.rank == 3 else f"rank 3 cannot run this call: {own}")
    assert type(error.value) is (StrategyError if ranks.rank == 3 else CaptureError)


@pytest.mark.slow
def test_rank_that_waits_for_another_stage_says_for_which_message(msrun, workers, tmp_path):
    finished = msrun.run(
        "--worker_num=2", "--hang_time_out=2", workers / "runtime" / "stuck.py", "pipeline", cwd=tmp_path
    )
    assert finished.code == 124, finished.stderr
    (line,) = finished.errors
    assert "behind: rank 1 (step 2" in line
    assert "rank 0 (step 3, waits in receive of gradients of micro batch 0, stage 1 to 0, from rank 1" in line
