"""What users do with pipelines besides training: predictions, checkpoints, mistakes; two stages on four ranks."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from on_ranks import on_ranks
from torch import nn

from msrun.errors import CaptureError, MsrunError, StrategyError
from msrun.runtime import (
    AutoParallel,
    MicroBatchInterleaved,
    Pipeline,
    WithLoss,
    get_rank,
    load_checkpoint,
    no_init_parameters,
    optim,
    save_checkpoint,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

pytestmark = pytest.mark.slow
on_four = on_ranks(4, dtype="float64")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def make(seed=1):
    torch.manual_seed(seed)
    return Network()


def batch(step=0, rows=16):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def part(tensor):
    return tensor.chunk(2)[get_rank() % 2]


def pipelined(network, **settings):
    return AutoParallel(Pipeline(network, 2)).pipeline(2, **settings)


def with_loss():
    return WithLoss(make(), F.cross_entropy)


def train(step, optimizer, numbers, take=part):
    losses = []
    for number in numbers:
        loss = step(*map(take, batch(number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@on_four
def test_results_that_are_no_loss_stay_in_their_stage_unless_they_are_broadcast(ranks):
    network, x = make(), batch()[0]
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
        x, y = batch(number, rows)
        loss, expected = step(part(x), part(y)), F.cross_entropy(right(x), y)
        for one, one_optimizer in ((loss, optimizer), (expected, its)):
            (2 * one).backward()
            one_optimizer.step()
            one_optimizer.zero_grad()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    x, y = batch(9)
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
    x, y = batch()
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


class Scaled(Network):
    """With a parameter of no dimensions in the second stage."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return super().forward(x) * self.scale


BUILDS = {
    "stages": pipelined,
    "stages-hsdp": lambda net: pipelined(net).hsdp(threshold=0),
    "zbv": lambda net: pipelined(net, scheduler="zbv"),
    "by-name": lambda net: AutoParallel(Pipeline(net, 4, {"first": 0, "middle": 0, "last": 1})).pipeline(2),
    "one": lambda net: AutoParallel(net).hsdp(threshold=0),
}


@on_four
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("stages", "one", optim.Adam),
        ("one", "stages", optim.Adam),
        ("stages-hsdp", "zbv", optim.Adam),
        ("by-name", "by-name", torch.optim.Adagrad),  # which has state from its first moment
    ],
)
def test_training_goes_on_from_a_checkpoint_with_other_stages(ranks, tmp_path, before, after, kind):
    def take(build):
        return ranks.part if build == "one" else part

    def build(seed=1):
        torch.manual_seed(seed)
        network = Scaled()
        return network, kind(network.parameters(), 0.01)

    right, theirs = build()
    expected = train(WithLoss(right, F.cross_entropy), theirs, range(4), lambda t: t)
    network, optimizer = build()
    losses = train(BUILDS[before](WithLoss(network, F.cross_entropy)), optimizer, range(2), take(before))
    path = save_checkpoint(network, tmp_path / "saved", optimizer, step_num=2)
    with no_init_parameters() if kind is optim.Adam else nullcontext():
        network, optimizer = build(seed=5)
    step = BUILDS[after](WithLoss(network, F.cross_entropy))
    load_checkpoint(path, network, optimizer)
    losses += train(step, optimizer, range(2, 4), take(after))
    assert losses == pytest.approx(expected, rel=1e-12)
    whole = load_checkpoint(path)
    shapes = {name: value.shape for name, value in whole.items() if isinstance(value, torch.Tensor)}
    assert shapes == {name: value.shape for name, value in right.named_parameters()}
    train(step, optimizer, range(1), take(after))
    load_checkpoint(path, network, optimizer)  # into what is in its places
    assert train(step, optimizer, range(2, 4), take(after)) == pytest.approx(expected[2:], rel=1e-12)


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
    x, y = map(part, batch())
    with pytest.raises((MsrunError, RuntimeError)) as error:
        MISTAKES[words](x=x, y=y)
    assert words in str(error.value)


@on_four
def test_mistake_of_one_rank_is_told_to_the_others(ranks):
    config = {"first": 0, "last" if ranks.rank < 3 else "lats": 1}
    with pytest.raises(MsrunError) as error:
        AutoParallel(Pipeline(with_loss(), 2, config)).pipeline(2)(*map(part, batch()))
    own = "stage_config: no module 'lats' (did you mean last?); the network's modules are first, middle, last"
    assert str(error.value) == (own if ranks.rank == 3 else f"rank 3 cannot run this call: {own}")
    assert type(error.value) is (StrategyError if ranks.rank == 3 else CaptureError)


def test_rank_that_waits_for_another_stage_says_for_which_message(msrun, workers, tmp_path):
    finished = msrun.run(
        "--worker_num=2", "--hang_time_out=2", workers / "runtime" / "stuck.py", "pipeline", cwd=tmp_path
    )
    assert finished.code == 124, finished.stderr
    (line,) = finished.errors
    assert "behind: rank 1 (step 2" in line
    assert "rank 0 (step 3, waits in receive of gradients of micro batch 0, stage 1 to 0, from rank 1" in line
