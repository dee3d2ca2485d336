"""Hybrid parallel and its communication operators, beside one process that knows every rank's tensors."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from asked_cases import one_fast
from local_parts import local
from mode_networks import STEPS
from on_ranks import on_ranks
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import (
    AutoParallel,
    WithLoss,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    create_group,
    destroy_group,
    get_group_size,
    get_rank,
    layerwise_parallel,
    load_checkpoint,
    optim,
    reduce_scatter,
    save_checkpoint,
    value_and_grad,
)
from msrun.runtime.execute.transfers import start_gather_of, traffic

EXACT = 1e-10
on_four = on_ranks(4)
ROWS, COLUMNS, BATCH = 512, 128, 8
LEARNING_RATE = 1e-6


def whole_weight():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(ROWS, COLUMNS, generator=generator, dtype=torch.float64) / ROWS


class HybridParallelNet(nn.Module):
    """The document's network: each rank has some columns of the weight and sums what all of them give."""

    def __init__(self):
        super().__init__()
        part = whole_weight().chunk(get_group_size(), 1)[get_rank()].clone()
        self.weight = layerwise_parallel(nn.Parameter(part))
        self.scale = nn.Parameter(torch.ones(ROWS, dtype=torch.float64))

    def forward(self, x):
        return all_reduce(torch.matmul(x * self.scale, self.weight).sum(-1))


class WholeNet(nn.Module):
    """The same network in one process."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(whole_weight())
        self.scale = nn.Parameter(torch.ones(ROWS, dtype=torch.float64))

    def forward(self, x):
        return torch.matmul(x * self.scale, self.weight).sum(-1)


def assert_trained(network, step, optimizer=None):
    """Train on the same batch on every rank, beside one process. A step function has an optimizer of its own."""
    serial, generator, losses = WholeNet(), torch.Generator().manual_seed(2), []
    theirs = optim.Momentum(serial.parameters(), LEARNING_RATE, 0.9)
    for _ in range(STEPS):
        x = torch.randn(BATCH, ROWS, generator=generator, dtype=torch.float64)
        y = torch.randn(BATCH, generator=generator, dtype=torch.float64)
        loss, right = step(x, y), F.mse_loss(serial(x), y)
        right.backward()
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        theirs.step()
        theirs.zero_grad()
        losses.append(float(loss.detach()))
        assert losses[-1] == pytest.approx(float(right.detach()), rel=EXACT, abs=0)
    assert losses[0] != losses[-1]
    part = serial.weight.detach().chunk(get_group_size(), 1)[get_rank()]
    torch.testing.assert_close(local(network.weight), part, rtol=EXACT, atol=float(part.abs().max()) * EXACT)
    torch.testing.assert_close(local(network.scale), serial.scale.detach(), rtol=0, atol=EXACT)


@on_ranks(4, pytest.param(8, marks=pytest.mark.slow))
@pytest.mark.parametrize("form", one_fast("module", "step"))
def test_hand_cut_network_of_the_document_equals_one_process(form):
    network = HybridParallelNet()
    optimizer, whole = optim.Momentum(network.parameters(), LEARNING_RATE, 0.9), WithLoss(network, F.mse_loss)
    gradients_of = value_and_grad(lambda x, y: whole(x, y), None, list(network.parameters()))

    def train(x, y):
        loss, gradients = gradients_of(x, y)
        optimizer(gradients)
        return loss

    step = AutoParallel(whole if form == "module" else train, "hybrid_parallel")
    assert_trained(network, step, optimizer if form == "module" else None)
    reasons = {parameter.name: parameter.reason for parameter in step.plan.parameters}
    assert reasons == {"weight": "this rank's own part", "scale": "hsdp is off"}


@on_four
def test_mindspores_sums_leave_marked_gradients_as_the_operators_give_them(ranks):
    """Marked parameters keep the gradient of all ranks' losses, gradients_mean or not."""
    x, y = torch.ones(2, ROWS, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for is_mean in (True, False):
        serial, network = WholeNet(), HybridParallelNet()
        step = AutoParallel(WithLoss(network, F.mse_loss), "hybrid_parallel", compat="mindspore")
        F.mse_loss(serial(x), y).backward()
        (step.enable_gradients_mean() if is_mean else step)(x, y).backward()
        part = ranks.part(serial.weight.grad, 1)
        assert float((network.weight.grad / part).mean()) == pytest.approx(4.0)
        of_scale = network.scale.grad / serial.scale.grad
        assert float(of_scale.mean()) == pytest.approx(1.0 if is_mean else 4.0)


@on_four
@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto"])
def test_marked_parameters_are_refused_where_they_would_be_reduced_or_cut(mode):
    with pytest.raises(
        StrategyError, match=r'weight is marked layerwise_parallel.*use parallel_mode="hybrid_parallel"'
    ):
        AutoParallel(WithLoss(HybridParallelNet(), F.mse_loss), mode)(whole_weight().T, torch.zeros(COLUMNS).double())


@on_four
@pytest.mark.parametrize("form", one_fast("apart", "shared"))
def test_hand_cut_network_is_saved_by_every_rank_and_goes_on(ranks, form):
    """In one directory, or in directories of their own."""
    folder = Path("hybrid" if form == "shared" else f"hybrid-{ranks.rank}")
    runs = []
    for is_second in (False, True):
        network = HybridParallelNet()
        optimizer = optim.Momentum(network.parameters(), LEARNING_RATE, 0.9)
        step = AutoParallel(WithLoss(network, F.mse_loss), "hybrid_parallel")
        if is_second:
            with torch.no_grad():
                network.weight.zero_()
            load_checkpoint(folder / "a", step, optimizer)
        losses = []
        for number in range(2 if is_second else 0, 4):
            if number == 2 and not is_second:
                save_checkpoint(step, folder / "a", optimizer)
            x = torch.full((BATCH, ROWS), number + 1.0, dtype=torch.float64)
            loss = step(x, x[:, 0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        runs.append([*losses[-2:], network.weight.tolist()])
    assert runs[0] == runs[1]
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert load_checkpoint(folder / "a")["weight"].shape == (512, 128 // 4)


# -- operators ----------------------------------------------------------------------------------------------------


def check(call, whole, ranks, moves):
    """Compare result and gradient with those of one process: the loss is the sum of all ranks' losses."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(4, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in ranks]
    with torch.no_grad():
        inputs[-1][0, 0] = inputs[0][0, 0] = 9.0  # a tie of the largest
    place = ranks.index(get_rank())
    x = inputs[place].detach().clone().requires_grad_()
    traffic.reset()
    mine = call(x)
    results = [whole(inputs, rank) for rank in range(len(ranks))]
    weights = [torch.randn(result.shape, generator=generator, dtype=torch.float64) for result in results]
    (mine * weights[place]).sum().backward()
    torch.stack([(r * w).sum() for r, w in zip(results, weights, strict=True)]).sum().backward()
    given = inputs[place].grad
    torch.testing.assert_close(mine, results[place], rtol=0, atol=EXACT)
    torch.testing.assert_close(x.grad, torch.zeros_like(x) if given is None else given, rtol=0, atol=EXACT)
    assert sorted(traffic.calls) == moves


class _Extreme(torch.autograd.Function):
    """MindSpore's gradient: every rank that has the extreme gets all of the gradient."""

    @staticmethod
    def forward(ctx, is_max, *inputs):
        stacked = torch.stack(inputs)
        result = stacked.amax(0) if is_max else stacked.amin(0)
        ctx.save_for_backward(stacked == result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        return None, *(gradient * ctx.saved_tensors[0]).unbind(0)


def operator(name, group, ranks):
    count = len(ranks)

    def exchange(inputs, rank, split, concat):
        return torch.cat([x.chunk(count, split)[rank] for x in inputs], concat)

    def scatter(inputs, rank, dim):
        return torch.stack(inputs).sum(0).chunk(count, dim)[rank]

    table = {
        "all-reduce": (lambda x: all_reduce(x, group=group), lambda xs, _: torch.stack(xs).sum(0)),
        "all-reduce-max": (lambda x: all_reduce(x, "max", group), lambda xs, _: _Extreme.apply(True, *xs)),  # noqa: FBT003
        "all-reduce-min": (lambda x: all_reduce(x, "min", group), lambda xs, _: _Extreme.apply(False, *xs)),  # noqa: FBT003
        "all-gather": (lambda x: all_gather(x, group=group), lambda xs, _: torch.cat(xs)),
        "all-gather-last": (lambda x: all_gather(x, -1, group), lambda xs, _: torch.cat(xs, -1)),
        "reduce-scatter": (lambda x: reduce_scatter(x, group=group), lambda xs, r: scatter(xs, r, 0)),
        "reduce-scatter-last": (lambda x: reduce_scatter(x, dim=1, group=group), lambda xs, r: scatter(xs, r, 1)),
        "broadcast": (lambda x: broadcast(x, ranks[1], group), lambda xs, _: xs[1] * 1.0),
        "all-to-all": (lambda x: all_to_all(x, group=group), lambda xs, r: exchange(xs, r, 0, 0)),
        "all-to-all-across": (lambda x: all_to_all(x, 1, 0, group), lambda xs, r: exchange(xs, r, 1, 0)),
    }
    return table[name]


MOVES = {
    "all-reduce": ["all_reduce"],
    "all-reduce-max": ["all_reduce"],
    "all-reduce-min": ["all_reduce"],
    "all-gather": ["all_gather", "reduce_scatter"],
    "all-gather-last": ["all_gather", "reduce_scatter"],
    "reduce-scatter": ["all_gather", "reduce_scatter"],
    "reduce-scatter-last": ["all_gather", "reduce_scatter"],
    "broadcast": ["all_reduce", "broadcast"],
    "all-to-all": ["all_to_all"],
    "all-to-all-across": ["all_to_all"],
}


@on_four
@pytest.mark.parametrize("name", MOVES)
def test_communication_operator_has_the_result_and_the_gradient_of_the_sum_of_losses(ranks, name):
    """Also in groups of ranks that do not follow each other: 0, 2 and 1, 3."""
    check(*operator(name, None, [0, 1, 2, 3]), [0, 1, 2, 3], MOVES[name])
    groups = {"even": [0, 2], "odd": [1, 3]}
    for group, members in groups.items():
        create_group(group, members)
    own = "odd" if ranks.rank % 2 else "even"
    check(*operator(name, own, groups[own]), groups[own], MOVES[name])
    for group in groups:
        destroy_group(group)


@on_ranks(4, env={"MSRUN_CPU_BACKEND": "gloo"})
def test_parts_that_gloo_exchanges_are_added_up_as_well(ranks):
    name = "reduce-scatter-last"
    check(*operator(name, None, [0, 1, 2, 3]), [0, 1, 2, 3], MOVES[name])
    parts = torch.arange(20.0).view(4, 5)
    assert torch.equal(start_gather_of(parts[ranks.rank].split([2, 3]), dist.group.WORLD).wait(), parts)
