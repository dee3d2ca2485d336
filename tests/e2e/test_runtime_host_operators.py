"""Parts of a network on the host: the numbers of one process, the copies of the plan, on 2 and 4 ranks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from host_networks import ROWS, new_batch, new_network
from on_ranks import on_all_ranks, on_ranks
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    MicroBatchInterleaved,
    Pipeline,
    WithLoss,
    get_group_size,
    get_rank,
    no_init_parameters,
    recompute,
    set_target,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

STEPS = 3
MODULES = {
    "mlp": ("first", "second", "third"),
    "conv": ("conv", "norm", "pool", "head"),
    "transformer": ("letters", "attention", "norm", "up", "down", "head"),
}
Result = dict[str, Any]


def subsets(names: Iterable[str]) -> list[tuple[str, ...]]:
    names = tuple(names)
    return [chosen for size in range(len(names) + 1) for chosen in itertools.combinations(names, size)]


PLACEMENTS = {
    f"{name}/{'+'.join(chosen) or 'nothing'}": (name, chosen)
    for name, modules in MODULES.items()
    for chosen in subsets(modules)
    if len(modules) < 6 or len(chosen) not in (3, 4)
}


def train(
    name: str,
    on_host: Iterable[str],
    settings: Callable[[AutoParallel], AutoParallel] = lambda net: net,
    *,
    prepare: Callable[[nn.Module], object] = lambda network: None,
    wrap: Callable[[nn.Module], nn.Module] = lambda network: network,
    is_full: bool = False,
    is_deferred: bool = False,
) -> Result:
    """Train on all ranks and alone; the last batch is a smaller one, so that the network is captured twice."""
    network, alone = new_network(name), new_network(name)
    if is_deferred:
        with no_init_parameters():
            network = new_network(name)
    for path in on_host:
        set_target(network.get_submodule(path), "cpu")
    prepare(network)
    model = settings(AutoParallel(wrap(WithLoss(network, F.cross_entropy))))
    if is_full:
        model.dataset_strategy("full_batch")
    single = AutoParallel(wrap(WithLoss(alone, F.cross_entropy)), parallel_mode="stand_alone")
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (network, alone)]
    losses: list[list[float]] = [[], []]
    first = ""
    for step in range(STEPS):
        batch = [value[: ROWS // 2 if step == STEPS - 1 else None] for value in new_batch(step)]
        own = batch if is_full else own_part(batch)
        traffic.reset()
        for found, net, given in ((losses[0], model, own), (losses[1], single, batch)):
            loss = net(*given)
            loss.backward()
            found.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        first = first or model.plan.explain()
    plan = model.plan
    assert plan.traffic is not None
    counted = [dict(traffic.calls), dict(traffic.bytes)]
    right = alone.state_dict()
    state = {name.removeprefix("network."): value for name, value in model.state_dict().items()}
    return {
        "losses": losses[0],
        "right": losses[1],
        "difference": max(float((value - right[name]).abs().max()) for name, value in state.items()),
        "counted": counted,
        "planned": [plan.traffic.calls, plan.traffic.bytes],
        "parameters": {p.name: [p.local_bytes, p.on_host] for p in plan.parameters},
        "ranks": get_group_size(),
        "host_bytes": plan.host_bytes,
        "device_bytes": plan.device_bytes,
        "first": first,
        "explain": plan.explain(),
    }


def own_part(batch: Iterable[Tensor]) -> list[Tensor]:
    return [part.chunk(get_group_size())[get_rank()] for part in batch]


def level(number: int) -> Callable[[AutoParallel], AutoParallel]:
    return lambda net: net.hsdp(threshold=0, optimizer_level=f"level{number}")  # type: ignore[arg-type]


def cut_layers(network: nn.Module) -> None:
    """Megatron's pair: the sum of the second layer is a message of the host's values."""
    ranks = get_group_size()
    shard(network.up, ((1, 1), (ranks, 1), (ranks,)))
    shard(network.down, ((1, ranks), (1, ranks)))


def recompute_all(network: nn.Module) -> None:
    recompute(network)


def with_dropout() -> Result:
    """The same masks wherever a dropout runs."""
    found = []
    for on_host in ((), ("drop", "attention")):
        network = new_network("dropping")
        for path in on_host:
            set_target(network.get_submodule(path), "cpu")
        model = AutoParallel(WithLoss(network, F.cross_entropy))
        torch.manual_seed(5)
        found.append([model(*own_part(new_batch(step))).item() for step in (0, 1)])
    return {"losses": found[1], "right": found[0]}


def with_function() -> Result:
    """A step function that calls a function on the host."""
    ends = set_target(lambda layer, x: torch.sin(layer(x)), "cpu")
    network, alone = new_network("mlp"), new_network("mlp")

    def loss_of(net: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(ends(net.third, torch.tanh(net.second(torch.relu(net.first(x))))), labels)

    x, labels = new_batch(0)
    forward = value_and_grad(lambda x, labels: loss_of(network, x, labels), None, list(network.parameters()))
    step = AutoParallel(lambda x, labels: forward(x, labels)).dataset_strategy("full_batch")
    loss, gradients = step(x, labels)
    right = loss_of(alone, x, labels)
    right.backward()
    differences = [float((g - p.grad).abs().max()) for g, p in zip(gradients, alone.parameters(), strict=True)]
    return {"losses": [loss.item()], "right": [right.item()], "difference": max(differences), "explain": str(step.plan)}


def refused(build: Callable[[nn.Module], AutoParallel], target: str = "first") -> Result:
    network = new_network("mlp")
    set_target(network.get_submodule(target), "cpu")
    try:
        build(network)(*own_part(new_batch(0)))
    except StrategyError as error:
        return {"refused": str(error)}
    return {}


def limited(limits_kb: Mapping[int, float], adds: Callable[[AutoParallel], AutoParallel] = lambda net: net) -> Result:
    """Train the transformer in so much memory of the device, by the number of ranks, or return why that is refused."""
    limit_kb = limits_kb[get_group_size()]
    try:
        found = train("transformer", (), lambda net: adds(net).device_memory_limit(limit_kb / 1024))
        return {**found, "limit": limit_kb}
    except StrategyError as error:
        return {"refused": str(error)}


def staged(
    name: str,
    on_host: Iterable[str],
    scheduler: str = "1f1b",
    interleave: bool = False,
    settings: Callable[[AutoParallel], AutoParallel] = lambda net: net,
    **how: Any,
) -> Result:
    """Train in a pipeline of as many stages as there are ranks, or of two."""
    stages = how.pop("stages", get_group_size())

    def all_settings(net: AutoParallel) -> AutoParallel:
        return settings(net.pipeline(stages, scheduler=scheduler, interleave=interleave))

    micro_size = 2 * stages if interleave else stages
    return train(name, on_host, all_settings, wrap=lambda net: Pipeline(net, micro_size), is_full=True, **how)


PIPELINES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "1f1b": (("transformer", ("attention", "down")), {}),
    "zero-bubble": (("transformer", ("attention", "up"), "zero_bubble"), {"stages": 2}),
    "interleaved": (("transformer", ("letters", "down"), "1f1b", True), {"stages": 2}),
    "hsdp": (("transformer", ("letters", "norm", "head")), {"stages": 2, "settings": level(3)}),
    "deferred": (("mlp", ("first", "third")), {"stages": 2, "is_deferred": True}),
}

WAYS: dict[str, Callable[[], Result]] = {
    **{f"hsdp-level{n}": partial(train, "transformer", ("attention", "up"), level(n)) for n in (1, 2, 3)},
    "hsdp-deferred": partial(train, "mlp", ("first", "third"), level(3), is_deferred=True),
    "tensor-parallel": partial(train, "transformer", ("up", "down"), prepare=cut_layers, is_full=True),
    "recompute": partial(train, "transformer", ("attention", "up"), prepare=recompute_all),
    "recompute-and-limit": partial(
        train, "transformer", ("attention.out", "down"), prepare=lambda network: recompute(network.attention)
    ),
    "accumulation": partial(train, "mlp", ("second",), wrap=lambda net: GradAccumulation(net, 2), is_full=True),
    "copies": partial(train, "conv", ("norm",), wrap=lambda net: MicroBatchInterleaved(net, 2), is_full=True),
    "everything": partial(
        train,
        "transformer",
        ("letters", "attention", "down"),
        level(3),
        prepare=lambda network: (recompute(network.attention), cut_layers(network)),
        wrap=lambda net: GradAccumulation(MicroBatchInterleaved(net, 2), 2),
        is_full=True,
    ),
    "limit": partial(limited, {2: 40, 4: 28}),
    "limit-level2": partial(limited, {2: 34, 4: 24}, level(2)),
    "limit-impossible": partial(limited, {2: 2, 4: 2}),
    "dropout": with_dropout,
    "function": with_function,
    "data-parallel-mode": partial(
        refused, lambda net: AutoParallel(WithLoss(net, F.cross_entropy), parallel_mode="data_parallel")
    ),
    **{f"pipeline-{name}": partial(staged, *given, **how) for name, (given, how) in PIPELINES.items()},
    "pipeline-limit": partial(
        refused,
        lambda net: AutoParallel(Pipeline(WithLoss(net, F.cross_entropy), 2)).pipeline(2).device_memory_limit(1),
    ),
}


CASES = {**{name: partial(train, *placed) for name, placed in PLACEMENTS.items()}, **WAYS}


OTHERS = ("dropout", "function", "data-parallel-mode", "pipeline-limit", "limit-impossible")
TRAINED = [*PLACEMENTS, *(name for name in WAYS if name not in OTHERS)]


FAST = ("everything",)
outcome = on_all_ranks(CASES)
often = on_ranks(2, pytest.param(4, marks=pytest.mark.slow))


def rows(cases: Iterable[str]) -> list[Any]:
    return slow_but([case for case in cases if case in FAST], cases)


@often
@pytest.mark.parametrize("case", rows(TRAINED))
def test_training_with_parts_on_the_host_gives_the_numbers_of_one_process(case: str) -> None:
    for rank in outcome(case):
        assert rank["losses"] == pytest.approx(rank["right"], rel=1e-9, abs=0)
        assert rank["difference"] < 1e-9
        assert rank["losses"][-1] != rank["losses"][0]


@often
@pytest.mark.parametrize("case", rows(TRAINED))
def test_plan_tells_number_and_bytes_of_the_copies_of_a_step(case: str) -> None:
    for rank in outcome(case):
        assert rank["counted"] == rank["planned"]
    copied = any(
        rank["counted"][0].get("to_host", 0) > 0 for rank in outcome(case)
    )  # of a stage's ranks there may be none
    assert copied is not case.endswith("nothing")


@pytest.mark.slow
@often
def test_parameters_of_the_host_leave_the_device() -> None:
    (rank, *_) = outcome("mlp/second")
    assert {name for name, (_, on_host) in rank["parameters"].items() if on_host} == {"second.weight", "second.bias"}
    assert rank["host_bytes"] == (12 * 8 + 8) * 8
    assert rank["device_bytes"] == sum(size for size, on_host in rank["parameters"].values() if not on_host)
    lines = rank["explain"].splitlines()
    begin = lines.index("borders between host (1 operator) and device")
    rows = 4 // rank["ranks"]
    into, out = 8 * 12 * rows, 8 * 8 * rows
    assert [" ".join(line.split()) for line in lines[begin + 1 : begin + 3]] == [
        f"aten.relu of network to_host {into} B, gradient to_device {into} B",
        f"aten.linear of second to_device {out} B, gradient to_host {out} B",
    ]


@pytest.mark.slow
@on_ranks(2)
def test_plan_of_a_stage_names_what_it_copies_as_the_whole_network_does() -> None:
    for rank, found in enumerate(outcome("pipeline-deferred")):
        lines = found["explain"].splitlines()
        begin = lines.index("borders between host (2 operators) and device") + 1
        named = [line.split(" to_")[0].strip() for line in lines[begin : lines.index("", begin)]]
        assert named == (["input 0", "aten.linear of first"], ["aten.tanh of network", "aten.linear of third"])[rank]


@often
@pytest.mark.parametrize("case", rows(["dropout", "function"]))
def test_dropouts_and_functions_on_the_host_change_no_number(case: str) -> None:
    for rank in outcome(case):
        assert rank["losses"] == pytest.approx(rank["right"], rel=1e-12, abs=0)
        assert rank.get("difference", 0.0) < 1e-12
        assert "explain" not in rank or "aten.sin" in rank["explain"]


@often
@pytest.mark.parametrize("case", rows(["limit", "limit-level2"]))
def test_limit_of_device_memory_moves_parameters_and_says_which(case: str) -> None:
    for rank in outcome(case):
        assert rank["host_bytes"] > 0
        assert rank["device_bytes"] > 0
        (note,) = [line for line in rank["first"].splitlines() if line.startswith("note: device_memory_limit")]
        found = re.fullmatch(r".*: (\S+) KB instead of (\S+) KB of the device; on the host: (.*)", note)
        assert found is not None, note
        assert float(found[1]) <= rank["limit"] < float(found[2])
        moved = {name.rpartition(".")[0] for name, (_, on_host) in rank["parameters"].items() if on_host}
        assert moved == set(found[3].split(", "))
        assert f"as in the first call, on the host: {found[3]}" in rank["explain"]


@pytest.mark.slow
@on_ranks(2)
def test_impossible_limit_is_refused_with_what_is_missing() -> None:
    for rank in outcome("limit-impossible"):
        assert re.match(
            r"device_memory_limit\(\S+\): a step needs \S+ KB of the device, and \S+ KB with every operator that has "
            r"parameters on the host: \S+ KB are missing; give more",
            rank["refused"],
        )


@pytest.mark.slow
@on_ranks(2)
def test_modes_that_cannot_do_it_say_so() -> None:
    for rank in outcome("data-parallel-mode"):
        assert rank["refused"] == (
            'set_target of network.first with parallel_mode="data_parallel", which cuts no graph: '
            'use parallel_mode="semi_auto"'
        )
    for rank in outcome("pipeline-limit"):
        assert rank["refused"].startswith("device_memory_limit does not know how many micro batches")
