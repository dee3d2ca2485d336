"""Searched strategies on real ranks: the losses of one process, the traffic that was priced, limits of memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from asked_cases import slow_but
from on_ranks import Ranks, on_all_ranks, on_ranks
from searched_training import NETWORKS, build
from torch import Tensor, nn

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel, Degrees, search_degrees, shard
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.execute.transfers import traffic

Found = dict[str, Any]
STEPS = 3
MODES = ("dynamic_programming", "recursive_programming", "sharding_propagation", "auto_parallel", "auto")


def train(step: nn.Module, batch: tuple[Tensor, ...]) -> list[float]:
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


def serial(name: str) -> list[float]:
    """Return the losses of one process: the wrapper draws dropout as the ranks do."""
    network, batch = build(name)
    return train(AutoParallel(network, "stand_alone"), batch)


def searched(name: str, mode: str) -> Found:
    """Train with strategies that are searched for; tell the price beside what was counted."""
    network, batch = build(name)
    step = AutoParallel(network, mode).dataset_strategy("full_batch")
    losses = train(step, batch)
    counted, plan = dict(traffic.bytes), step.plan
    assert plan.traffic is not None and plan.price is not None
    return {
        "losses": losses,
        "right": serial(name),
        "strategies": plan.strategies()["operators"],
        "notes": list(plan.notes),
        "explain": plan.explain(),
        "counted": counted,
        "planned": plan.traffic.bytes,
        "priced": plan.price.traffic_bytes,
        "mode": plan.mode,
    }


def file() -> Found:
    """Save what was searched, load it in another AutoParallel, and give it to a network that it is not of."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    path = Path(folder[0]) / "strategies.json"
    network, batch = build("mlp")
    first = AutoParallel(network, "dynamic_programming").dataset_strategy("full_batch").search("h100")
    losses = train(first.save_operator_strategy_file(path), batch)
    dist.barrier()
    network, batch = build("mlp")
    second = AutoParallel(network).dataset_strategy("full_batch").load_operator_strategy_file(path)
    again = train(second, batch)
    network, batch = build("conv")
    other = AutoParallel(network).dataset_strategy("full_batch").load_operator_strategy_file(path)
    try:
        train(other, batch)
        refused = ""
    except StrategyError as error:
        refused = str(error)
    return {
        "losses": [losses, again],
        "saved": json.loads(path.read_text()),
        "plans": [first.plan.strategies(), second.plan.strategies()],
        "refused": refused,
    }


def honoured(mode: str) -> Found:
    """A strategy of the user's stays, whatever is searched around it."""
    network, batch = build("mlp")
    shard(network.get_submodule("network.down"), ((1, dist.get_world_size()), (1, dist.get_world_size())))
    step = AutoParallel(network, mode).dataset_strategy("full_batch")
    losses = train(step, batch)
    down = next(each for each in step.plan.operators if each.module_path == "down")
    return {"losses": losses, "right": serial("mlp"), "down": [down.strategy, down.origin]}


def fits(limit_mb: float) -> Found:
    """Search within a limit of memory; tell what was done, or the error."""
    network, batch = build("mlp")
    step = (
        AutoParallel(network, "auto").dataset_strategy("full_batch").search(PROFILES["h100"], memory_limit_mb=limit_mb)
    )
    try:
        losses = train(step, batch)
    except StrategyError as error:
        return {"refused": str(error)}
    assert step.plan.price is not None
    return {"losses": losses, "right": serial("mlp"), "memory": step.plan.price.memory_bytes}


def cut_short() -> Found:
    """The last rank has no time to search, the others have enough."""
    network, batch = build("mlp")
    limit_s = 1e-9 if dist.get_rank() == dist.get_world_size() - 1 else 1000.0
    step = AutoParallel(network, "auto").dataset_strategy("full_batch").search(time_limit_s=limit_s)
    losses = train(step, batch)
    return {
        "losses": losses,
        "right": serial("mlp"),
        "operators": step.plan.strategies()["operators"],
        "notes": list(step.plan.notes),
    }


def captured_by_some() -> Found:
    """The last rank's network cannot be captured while the others wait to compare how far they have searched."""
    network, batch = build("mlp")
    if dist.get_rank() == dist.get_world_size() - 1:
        network.get_submodule("network").forward = _reads_values
    try:
        train(AutoParallel(network, "auto").dataset_strategy("full_batch"), batch)
    except CaptureError as error:
        return {"refused": str(error)}
    return {}


def _reads_values(x: Tensor) -> Tensor:
    return x * float(x.sum())


DIVISIONS: dict[str, Callable[[Degrees], bool]] = {
    "fastest": lambda _: True,
    "stages": lambda degrees: degrees.stages > 1,
    "copies": lambda degrees: degrees.copies > 1 and degrees.stages == 1,
    "all": lambda degrees: degrees.stages == 2 and degrees.copies > 1 and degrees.recomputes,
    "optimizer": lambda degrees: degrees.shards_optimizer and degrees.recomputes and degrees.micro_batches > 1,
}
"""Name -> which of the priced divisions of a step are meant."""


def divided(which: str) -> Found:
    """Train with the fastest priced division of a kind."""
    network, batch = build("transformer")
    found = search_degrees(network, *batch, device="h100", time_limit_s=1000.0)
    degrees = next(each.degrees for each in found.priced if DIVISIONS[which](each.degrees))
    step = found.apply(network, degrees)
    return {"losses": train(step, batch), "right": serial("transformer"), "degrees": str(degrees)}


CASES: dict[str, Callable[[], Found]] = {
    **{f"{name}/{mode}": (lambda name=name, mode=mode: searched(name, mode)) for name in NETWORKS for mode in MODES},
    "file": file,
    "cut_short": cut_short,
    "captured_by_some": captured_by_some,
    "honoured": lambda: honoured("dynamic_programming"),
    **{f"divided/{which}": (lambda which=which: divided(which)) for which in DIVISIONS},
    **{f"limit/{limit}": (lambda limit=limit: fits(limit)) for limit in (1000.0, 0.45, 0.3, 0.01)},
}


TRAINED = [f"{name}/{mode}" for name in NETWORKS for mode in MODES]
FAST = ("mlp/dynamic_programming", "limit/0.01")
outcomes = on_all_ranks(CASES)
often = on_ranks(2, pytest.param(4, marks=pytest.mark.slow))


def rows(keys: list[str]) -> list[Any]:
    return slow_but([key for key in keys if key in FAST], keys)


@often
@pytest.mark.parametrize("key", rows(TRAINED))
def test_searched_strategies_train_as_one_process(key: str) -> None:
    for found in outcomes(key):
        assert found["losses"] == pytest.approx(found["right"], rel=1e-9)
        assert found["strategies"] == outcomes(key)[0]["strategies"], "every rank has found the same"


@often
@pytest.mark.parametrize("key", rows(TRAINED))
def test_the_traffic_of_searched_strategies_is_the_counted_one(key: str) -> None:
    for found in outcomes(key):
        assert found["counted"] == found["planned"]
    first = outcomes(key)[0]  # what a halo sends differs between ranks
    assert first["priced"] == first["counted"]


@often
@pytest.mark.parametrize("key", rows(TRAINED))
def test_the_plan_says_what_was_searched_and_what_data_parallel_would_take(key: str) -> None:
    found = outcomes(key)[0]
    assert "note: searched (" in found["explain"]
    assert "note: data parallel instead: " in found["explain"]
    mode = key.rpartition("/")[2]
    assert found["mode"] == {"auto_parallel": "recursive_programming"}.get(mode, mode)


@often
@pytest.mark.parametrize("key", rows([key for key in CASES if "divided" in key]))
def test_a_step_divided_as_searched_trains_as_one_process(key: str) -> None:
    for found in outcomes(key):
        assert found["losses"] == pytest.approx(found["right"], rel=1e-9), found["degrees"]
        assert found["degrees"] == outcomes(key)[0]["degrees"], "every rank has found the same"


@pytest.mark.slow
@often
def test_strategies_of_a_file_are_those_that_were_saved() -> None:
    found = outcomes("file")[0]
    assert found["losses"][0] == found["losses"][1]
    assert found["saved"] == found["plans"][0] == found["plans"][1]
    assert found["saved"]["operators"]
    assert "the network has no operator 'linear_1'" in found["refused"]


@often
def test_an_operator_with_a_strategy_of_the_users_keeps_it(ranks: Ranks) -> None:
    found, size = outcomes("honoured")[0], ranks.size
    assert found["losses"] == pytest.approx(found["right"], rel=1e-9)
    assert found["down"] == [[[1, size], [1, size], [1]], "user"]


@often
@pytest.mark.parametrize("key", rows([key for key in CASES if "limit" in key]))
def test_a_limit_of_memory_is_kept_or_the_missing_bytes_are_told(key: str) -> None:
    found, limit_mb = outcomes(key)[0], float(key.rpartition("/")[2])
    if "refused" in found:
        assert limit_mb < 0.4
        assert "too much" in found["refused"] or "cannot be brought under" in found["refused"]
        return
    assert found["losses"] == pytest.approx(found["right"], rel=1e-9)
    assert found["memory"] <= limit_mb * 2**20


@often
def test_a_rank_that_has_no_time_cuts_the_search_of_all_short() -> None:
    for found in outcomes("cut_short"):
        assert found["losses"] == pytest.approx(found["right"], rel=1e-9)
        assert found["operators"] == outcomes("cut_short")[0]["operators"]
        assert any("came after 1 of 15 searches; this is the best of their plans" in note for note in found["notes"])


@often
def test_a_search_does_not_wait_for_a_rank_that_has_nothing_to_search(ranks: Ranks) -> None:
    *others, last = outcomes("captured_by_some")
    for found in others:
        assert found["refused"].startswith(f"rank {ranks.size - 1} cannot run this call: {last['refused'][:20]}")
