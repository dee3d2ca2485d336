"""Modes without capture: the numbers of one process, also with checkpoints of FSDP2 that other layouts go on from."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from local_parts import weight_difference
from mode_networks import batches, make_network, mine, momentum, serial, step_function, train
from on_ranks import on_ranks
from torch import nn

from msrun.runtime import (
    AutoParallel,
    WithLoss,
    get_rank,
    layerwise_parallel,
    no_init_parameters,
    reset_auto_parallel_context,
    set_auto_parallel_context,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

EXACT = 1e-10
on_four = on_ranks(4)
slow_on_four = on_ranks(4, slow=True)


def mode(name, compat="torch", **hsdp):
    def build(network):
        step = AutoParallel(network, name, compat=compat)
        return step.hsdp(**{"threshold": 1, **hsdp}) if hsdp else step

    return build


def gradients_mean(network):
    return mode("data_parallel", "mindspore")(network).enable_gradients_mean()


RANKS, LEVELS = 4, ("level1", "level2", "level3")
DEFERRED, IN_A_STEP, LATE = ({"how": how} for how in ("deferred", "step", "late"))
"""Without values at first; a step function; an optimizer that is made while FSDP2 shows gathered parameters."""
TRAINED = {
    "data-parallel": (mode("data_parallel"), {}),
    "data-parallel-deferred": (mode("data_parallel"), DEFERRED),
    "data-parallel-step": (mode("data_parallel"), IN_A_STEP),
    "sum": (mode("data_parallel", "mindspore"), {"factor": RANKS}),
    "sum-step": (mode("data_parallel", "mindspore"), {"factor": RANKS, **IN_A_STEP}),
    "mindspore-mean": (gradients_mean, {}),
    "hybrid-without-marks": (mode("hybrid_parallel"), {}),
    "fsdp-shard-size-2": (mode("data_parallel", shard_size=2, threshold=0), {}),
    "fsdp-sum": (mode("data_parallel", "mindspore", shard_size=2), {"factor": RANKS}),
    "fsdp-deferred": (mode("data_parallel", threshold=1), DEFERRED),
    **{f"fsdp-{level}": (mode("data_parallel", optimizer_level=level), {}) for level in LEVELS},
    "fsdp-level2-step": (mode("data_parallel", optimizer_level="level2"), IN_A_STEP),
    "fsdp-level3-late": (mode("data_parallel", optimizer_level="level3"), LATE),
}
FAST = ("data-parallel", "sum", "fsdp-level3")


@functools.cache
def trained(case):
    """Train one way, compare the weights with those of one process, and return losses and plan."""
    build, settings = TRAINED[case]
    how, factor = settings.get("how", ""), settings.get("factor", 1)
    with no_init_parameters() if how == "deferred" else nullcontext():
        network = make_network()
    if get_rank() and case in ("data-parallel", "fsdp-level3"):
        for parameter in network.parameters():
            parameter.data.normal_()  # rank 0's are used
    if how == "step":
        step = build(step_function(network, momentum(network)))
        losses = [float(step(mine(images), mine(labels))) for images, labels in batches()]
    elif how == "late":
        step, losses, optimizer = build(WithLoss(network, F.cross_entropy)), [], None
        for images, labels in batches():
            loss = step(mine(images), mine(labels))
            optimizer = optimizer or momentum(network)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    else:
        step = build(WithLoss(network, F.cross_entropy))
        losses = train(step, momentum(network), mine)
    assert weight_difference(network, serial(factor)[1]) <= EXACT
    return losses, step.plan


@on_four
@pytest.mark.parametrize("case", slow_but(FAST, TRAINED))
def test_every_mode_trains_as_one_process_does(ranks, case):
    """Losses are means over the ranks, or in MindSpore's words each rank's own."""
    (losses, _), right = trained(case), serial(TRAINED[case][1].get("factor", 1))[0]
    of_all = ranks.gather(losses)
    assert (of_all[0] != of_all[1]) is ("sum" in case or "mindspore" in case)
    means = [sum(each) / ranks.size for each in zip(*of_all, strict=True)]
    assert means == pytest.approx(right, rel=EXACT, abs=0)
    assert losses[0] != losses[-1]


@on_four
def test_plan_tells_of_ranks_that_differed_and_of_means_or_sums():
    plan, of_sums = (trained(case)[1] for case in ("data-parallel", "sum"))
    assert list(plan.notes) == [
        "4 parameters or buffers differed between ranks (layer1.weight, ...): rank 0's are used"
    ]
    assert not [note for note in of_sums.notes if "differed" in note]
    assert "gradients are means over the ranks (torch)" in plan.explain()
    assert "added up over the ranks (MindSpore's gradients_mean=False)" in of_sums.explain()


@on_four
@pytest.mark.parametrize("level", slow_but(["level3"], LEVELS))
def test_hsdp_without_capture_names_what_is_cut_and_what_stays_whole(level):
    plan = trained(f"fsdp-{level}")[1]
    assert {p.name: (list(p.local_shape), p.shard_ranks, p.reason) for p in plan.parameters} == {
        "layer1.weight": ([8, 24], 4, "rows cut over 4 ranks"),
        "layer1.bias": ([32], 1, "256 B is under the threshold of 1 KB"),
        "layer2.weight": ([2 if get_rank() < 3 else 0, 32], 4, "rows cut over 4 ranks, in unequal parts"),
        "layer2.bias": ([6], 1, "48 B is under the threshold of 1 KB"),
    }
    assert f"hsdp {level}" in plan.optimizer_parallel


@slow_on_four
def test_shard_size_says_how_many_ranks_share_a_weight():
    parameters = trained("fsdp-shard-size-2")[1].parameters
    assert [list(p.local_shape) for p in parameters] == [[16, 24], [16], [3, 32], [3]]


@on_four
def test_stand_alone_ranks_train_for_themselves_and_exchange_nothing(ranks):
    network, right = make_network(), make_network()
    step = AutoParallel(WithLoss(network, F.cross_entropy), "stand_alone")
    traffic.reset()
    losses = train(step, momentum(network), mine)
    assert sum(traffic.calls.values()) == 0
    assert losses == train(lambda x, y: F.cross_entropy(right(x), y), momentum(right), mine)
    assert weight_difference(network, right) == 0
    assert losses[0] != losses[-1]
    assert len({*ranks.gather(losses[0])}) == 4


@on_four
def test_without_broadcast_ranks_keep_their_own_values_and_the_plan_says_so(ranks):
    network = make_network()
    with torch.no_grad():
        network.layer2.bias += ranks.rank
    step = AutoParallel(WithLoss(network, F.cross_entropy), "data_parallel").parameter_broadcast(is_on=False)
    step(*map(mine, next(batches()))).backward()
    (note,) = step.plan.notes
    assert "layer2.bias" in note
    assert note.endswith("parameter_broadcast is off: the ranks train different networks")
    first = ranks.gather(network.layer2.bias[0].item())
    assert [round(bias - first[0], 9) for bias in first] == [0.0, 1.0, 2.0, 3.0]


class _Mean(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x).square().mean()


def _in_a_step(network):
    gradients_of = value_and_grad(network, None, weights=network.parameters())
    return mode("data_parallel")(lambda x: gradients_of(x)[0])


@on_four
def test_every_form_of_a_call_begins_with_the_buffers_of_rank_0(ranks):
    """A batch norm's running mean after a call without a backward pass, and two calls before one backward pass."""
    forms = [mode("data_parallel"), mode("data_parallel", threshold=0), _in_a_step]
    found = []
    for build in forms:
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8), nn.Flatten(0)).double()
        norm = network[1]
        step = build(_Mean(network))
        for images, _ in batches(steps=3):
            step(mine(images) + ranks.rank)
        found.append(norm.running_mean.tolist())
        network.eval()
        with torch.no_grad():
            step(mine(images))
        of_all = ranks.gather(found[-1])
        assert of_all[0] != of_all[1], "every rank has rows of its own"
        assert norm.running_mean.tolist() == of_all[0]
        assert found[-1] == pytest.approx(found[0], rel=EXACT)
    network.train()
    step = mode("data_parallel")(_Mean(network))
    sum(step(mine(images)) for images, _ in batches(steps=3)).backward()


def assert_gradients(gradients, network):
    for one, other in zip(gradients, network.parameters(), strict=True):
        found = one.full_tensor() if hasattr(one, "full_tensor") else one
        torch.testing.assert_close(found, other.grad, rtol=0, atol=EXACT)


@on_four
@pytest.mark.parametrize("level", slow_but(["level1"], ["ddp", *LEVELS]))
def test_gradients_of_two_backward_passes_are_those_of_both_batches(level):
    """With one reduction, but level2 and level3 hold cut gradients at once."""
    network, right = make_network(), make_network()
    hsdp = {} if level == "ddp" else {"optimizer_level": level}
    step = mode("data_parallel", **hsdp)(WithLoss(network, F.cross_entropy))
    first, second, third = batches(steps=3)
    step(*map(mine, first)).backward()  # places the parameters
    network.zero_grad()
    with step.no_sync():
        step(*map(mine, second)).backward()
        assert all(parameter.grad is None for parameter in network.parameters()) is (level == "level1")
    step(*map(mine, third)).backward()
    for images, labels in (second, third):
        F.cross_entropy(right(images), labels).backward()
    assert_gradients([parameter.grad for parameter in network.parameters()], right)


@on_four
@pytest.mark.parametrize("name", slow_but(["data_parallel"], ["data_parallel", "semi_auto"]))
def test_two_functions_of_one_step_train_two_networks(name):
    """Each by its own function; one weight is never used."""
    first, second, *rights = (make_network() for _ in range(4))
    first.add_module("unused", nn.Linear(2, 2).double())
    of_first = value_and_grad(lambda x, y: F.cross_entropy(first(x), y), None, list(first.parameters()))
    of_second = value_and_grad(
        lambda x, y: F.cross_entropy(second(x) + first(x).detach(), y), None, list(second.parameters())
    )
    step = AutoParallel(lambda x, y: (of_first(x, y), of_second(x, y)), name)
    if name == "semi_auto":
        step.hsdp(threshold=0)
    images, labels = next(batches())
    (_, gradients), (_, others) = step(mine(images), mine(labels))
    F.cross_entropy(rights[0](images), labels).backward()
    F.cross_entropy(rights[1](images) + rights[0](images).detach(), labels).backward()
    assert_gradients(gradients[:4], rights[0])
    assert_gradients(others, rights[1])


@on_four
def test_value_and_grad_of_a_parallel_module_reduces_and_leaves_gradients_that_were_there_alone():
    """torch's DDP reduces in backward() only; value_and_grad of a module under it must not pass it by."""
    network, right = make_network(), make_network()
    step = AutoParallel(WithLoss(network, F.cross_entropy), "data_parallel")
    images, labels = next(batches())
    kept = network.layer2.bias.grad = torch.full_like(network.layer2.bias, 7.0)
    _, gradients = value_and_grad(step, None, list(network.parameters()))(mine(images), mine(labels))
    F.cross_entropy(right(images), labels).backward()
    assert_gradients(gradients, right)
    assert network.layer2.bias.grad is kept


@on_four
def test_layer_that_only_some_steps_of_some_ranks_use_trains(ranks):
    """DDP by itself waits for it for ever."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = make_network()
            self.extra = nn.Linear(6, 6).double()

        def forward(self, x, uses_extra):
            y = self.network(x)
            return self.extra(y).pow(2).mean() + y.sum() * 0 if uses_extra else y.pow(2).mean()

    network, right = Branching(), Branching()
    right.load_state_dict(network.state_dict())
    step = AutoParallel(network, "data_parallel")
    for index, (images, _) in enumerate(batches(steps=4)):
        step(mine(images), index % 2 == 1 and ranks.rank == 0).backward()
        losses = [right(part, index % 2 == 1 and rank == 0) for rank, part in enumerate(images.chunk(ranks.size))]
        torch.stack(losses).mean().backward()
        for one, other in zip(network.parameters(), right.parameters(), strict=True):
            wanted, found = (torch.zeros_like(p) if p.grad is None else p.grad for p in (other, one))
            torch.testing.assert_close(found, wanted, rtol=0, atol=EXACT)
        network.zero_grad()
        right.zero_grad()


@slow_on_four
def test_context_turns_on_optimizer_parallel_and_full_batch():
    """In semi_auto by its old name."""
    network = make_network()
    set_auto_parallel_context(
        parallel_mode="semi_auto_parallel",
        gradients_mean=True,
        full_batch=True,
        enable_parallel_optimizer=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": 1, "gradient_accumulation_shard": True},
    )
    try:
        step = AutoParallel(WithLoss(network, F.cross_entropy))
    finally:
        reset_auto_parallel_context()
    losses, (right, right_network) = train(step, momentum(network), lambda tensor: tensor), serial()
    assert losses == pytest.approx(right, rel=EXACT, abs=0)
    assert weight_difference(network, right_network) <= EXACT
    assert step.plan.dataset_strategy == "full_batch"
    assert step.plan.optimizer_parallel.startswith("hsdp level2")
    assert [p.shard_ranks for p in step.plan.parameters if p.name == "layer1.weight"] == [4]
    assert any("gradients_mean changes nothing" in note for note in step.plan.notes)


@on_ranks(2, slow=True)
def test_the_first_line_of_a_plan_says_what_of_the_parameters_is_here():
    cut, own = make_network(), make_network()
    shard(cut.layer1, ((1, 1), (2, 1)))
    layerwise_parallel(own.layer1.weight)
    told = [
        (AutoParallel(_Mean(make_network())), "semi_auto, hsdp is off", "whole on every rank, 8 KB"),
        (
            AutoParallel(_Mean(make_network())).hsdp(threshold=10**6),
            "semi_auto, hsdp level1 cuts no parameter of this network",
            "whole on every rank, 8 KB",
        ),
        (
            AutoParallel(_Mean(make_network())).hsdp(threshold=0),
            "semi_auto, hsdp level1: weights and optimizer state sharded",
            "4 KB of 8 KB on this rank",
        ),
        (AutoParallel(_Mean(cut)), "semi_auto, hsdp is off", "5 KB of 8 KB on this rank"),
        (
            AutoParallel(_Mean(own), "hybrid_parallel"),
            "hybrid_parallel, hsdp is off",
            "8 KB on this rank, 1 of 4 of them this rank's own parts",
        ),
    ]
    for model, begin, end in told:
        model(mine(next(batches())[0])).backward()
        first = model.plan.summary()
        assert first.startswith(f"2 ranks as 2, {begin}; ") and first.endswith(f"; parameters {end}"), first
    (line,) = [line for line in model.plan.explain().splitlines() if " layer1.weight " in line]
    assert "? -> 32x24" in line and line.endswith("this rank's own part")
