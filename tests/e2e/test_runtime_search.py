"""Searched strategies on real ranks: the losses of one process, the traffic that was priced, limits of memory."""

import functools
import json
import re

import pytest
import torch
import torch.distributed as dist
from asked_cases import slow_but
from on_ranks import on_ranks
from searched_training import NETWORKS, build

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel, search_degrees, shard
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.execute.transfers import traffic

STEPS = 3
MODES = ("dynamic_programming", "recursive_programming", "sharding_propagation", "auto_parallel", "auto")


def train(step, batch):
    optimizer = torch.optim.Adam(step.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        traffic.reset()
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


DIVISIONS = {
    "fastest": lambda _: True,
    "all": lambda degrees: degrees.stages == 2 and degrees.copies > 1 and degrees.recomputes,
    "optimizer": lambda degrees: degrees.shards_optimizer and degrees.recomputes and degrees.micro_batches > 1,
}
"""Name -> which of the priced divisions of a step are meant."""
often = on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
slow_often = on_ranks(2, pytest.param(4, marks=pytest.mark.slow), slow=True)


@functools.cache
def serial(name):
    """Return the losses of one process: the wrapper draws dropout as the ranks do."""
    network, batch = build(name)
    return train(AutoParallel(network, "stand_alone"), batch)


def assert_right(losses, name):
    assert losses == pytest.approx(serial(name), rel=1e-9)


@often
@pytest.mark.parametrize("mode", slow_but(["dynamic_programming"], MODES))
@pytest.mark.parametrize("name", slow_but(["mlp"], NETWORKS))
def test_searched_strategies_train_as_one_process_with_the_traffic_that_was_priced(ranks, name, mode):
    network, batch = build(name)
    step = AutoParallel(network, mode).dataset_strategy("full_batch")
    losses, plan, counted = train(step, batch), step.plan, dict(traffic.bytes)
    assert_right(losses, name)
    assert plan.traffic is not None and plan.price is not None
    assert counted == plan.traffic.bytes
    if ranks.rank == 0:  # what a halo sends differs between ranks
        assert plan.price.traffic_bytes == plan.traffic.bytes
    assert ranks.gather(plan.strategies()["operators"]) == [plan.strategies()["operators"]] * ranks.size
    text = plan.explain()
    assert "note: searched (" in text
    assert "note: data parallel instead: " in text
    assert plan.mode == {"auto_parallel": "recursive_programming"}.get(mode, mode)


@slow_often
@pytest.mark.parametrize("which", DIVISIONS)
def test_a_step_divided_as_searched_trains_as_one_process(ranks, which):
    """With the fastest priced division of a kind."""
    network, batch = build("transformer")
    found = search_degrees(network, *batch, device="h100", time_limit_s=1000.0)
    degrees = next(each.degrees for each in found.priced if DIVISIONS[which](each.degrees))
    assert_right(train(found.apply(network, degrees), batch), "transformer")
    assert ranks.gather(str(degrees)) == [str(degrees)] * ranks.size


@slow_often
def test_strategies_of_a_file_are_those_that_were_saved(tmp_path):
    path = tmp_path / "strategies.json"
    network, batch = build("mlp")
    first = AutoParallel(network, "dynamic_programming").dataset_strategy("full_batch").search("h100")
    losses = train(first.save_operator_strategy_file(path), batch)
    dist.barrier()
    network, batch = build("mlp")
    second = AutoParallel(network).dataset_strategy("full_batch").load_operator_strategy_file(path)
    assert train(second, batch) == losses
    saved = json.loads(path.read_text())
    assert saved["operators"]
    assert saved == json.loads(json.dumps(first.plan.strategies())) == json.loads(json.dumps(second.plan.strategies()))
    network, batch = build("conv")
    other = AutoParallel(network).dataset_strategy("full_batch").load_operator_strategy_file(path)
    with pytest.raises(StrategyError, match="the network has no operator 'linear_1'"):
        train(other, batch)


@often
def test_an_operator_with_a_strategy_of_the_users_keeps_it(ranks):
    network, batch = build("mlp")
    given = ((1, ranks.size), (1, ranks.size))
    shard(network.get_submodule("network.down"), given)
    step = AutoParallel(network, "dynamic_programming").dataset_strategy("full_batch")
    assert_right(train(step, batch), "mlp")
    down = next(each for each in step.plan.operators if each.module_path == "down")
    assert (down.strategy, down.origin) == ((*given, (1,)), "user")


@often
@pytest.mark.parametrize("limit_mb", slow_but(["0.01"], [0.45, 0.01]))
def test_a_limit_of_memory_is_kept_or_the_missing_bytes_are_told(limit_mb):
    network, batch = build("mlp")
    step = AutoParallel(network, "auto").dataset_strategy("full_batch")
    step.search(PROFILES["h100"], memory_limit_mb=limit_mb)
    try:
        losses = train(step, batch)
    except StrategyError as error:
        assert limit_mb < 0.4
        assert "too much" in str(error) or "cannot be brought under" in str(error)
        return
    assert_right(losses, "mlp")
    assert step.plan.price.memory_bytes <= limit_mb * 2**20


@often
def test_a_rank_that_has_no_time_cuts_the_search_of_all_short(ranks):
    network, batch = build("mlp")
    limit_s = 1e-9 if ranks.rank == ranks.size - 1 else 1000.0
    step = AutoParallel(network, "auto").dataset_strategy("full_batch").search(time_limit_s=limit_s)
    assert_right(train(step, batch), "mlp")
    operators = step.plan.strategies()["operators"]
    assert ranks.gather(operators) == [operators] * ranks.size
    assert any(
        re.search(r"came after 1 of \d+ searches; this is the best of their plans", note) for note in step.plan.notes
    ), step.plan.notes


@often
def test_a_search_does_not_wait_for_a_rank_that_has_nothing_to_search(ranks):
    """The last rank's network cannot be captured while the others wait to compare how far they have searched."""
    network, batch = build("mlp")
    last = ranks.size - 1
    if ranks.rank == last:
        network.get_submodule("network").forward = lambda x: x * float(x.sum())
    with pytest.raises(CaptureError) as error:
        train(AutoParallel(network, "auto").dataset_strategy("full_batch"), batch)
    told = ranks.gather(str(error.value))
    assert all(text.startswith(f"rank {last} cannot run this call: {told[last][:20]}") for text in told[:last])
