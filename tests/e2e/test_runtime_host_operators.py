"""Parts of a network on the host: the numbers of one process, the copies of the plan, on 2 and 4 ranks."""

import itertools
import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from host_networks import ROWS, new_batch, new_network
from on_ranks import on_ranks

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
PLACEMENTS = {
    f"{name}/{'+'.join(chosen) or 'nothing'}": (name, chosen)
    for name, modules in MODULES.items()
    for size in range(len(modules) + 1)
    for chosen in itertools.combinations(modules, size)
    if len(modules) < 6 or size not in (2, 3, 4)
}
often = on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
slow_often = on_ranks(2, pytest.param(4, marks=pytest.mark.slow), slow=True)


@dataclass
class Trained:
    """A network of which parts ran on the host, beside one process."""

    model: AutoParallel
    counted: list[dict[str, int]]
    """Calls and bytes of the last step."""
    first: str
    """The explanation of the first call."""

    @property
    def on_host(self):
        return {parameter.name for parameter in self.model.plan.parameters if parameter.on_host}


def train(
    name,
    on_host,
    settings=lambda net: net,
    *,
    prepare=lambda network: None,
    wrap=lambda network: network,
    is_full=False,
    is_deferred=False,
):
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
    losses, first = [], ""
    for step in range(STEPS):
        batch = [value[: ROWS // 2 if step == STEPS - 1 else None] for value in new_batch(step)]
        traffic.reset()
        loss, right = model(*(batch if is_full else own_part(batch))), single(*batch)
        losses.append(loss.item())
        assert losses[-1] == pytest.approx(right.item(), rel=1e-9, abs=0)
        loss.backward()
        right.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        first = first or model.plan.explain()
    assert losses[-1] != losses[0]
    counted = [dict(traffic.calls), dict(traffic.bytes)]
    expected = alone.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name.removeprefix("network.")], rtol=0, atol=1e-9)
    return Trained(model, counted, first)


def own_part(batch):
    return [part.chunk(get_group_size())[get_rank()] for part in batch]


def level(number):
    return lambda net: net.hsdp(threshold=0, optimizer_level=f"level{number}")


def cut_layers(network):
    """Megatron's pair: the sum of the second layer is a message of the host's values."""
    ranks = get_group_size()
    shard(network.up, ((1, 1), (ranks, 1), (ranks,)))
    shard(network.down, ((1, ranks), (1, ranks)))


def staged(name, on_host, scheduler="1f1b", interleave=False, settings=lambda net: net, **how):
    """Train in a pipeline of as many stages as there are ranks, or of two."""
    stages = how.pop("stages", get_group_size())
    micro_size = 2 * stages if interleave else stages
    return train(
        name,
        on_host,
        lambda net: settings(net.pipeline(stages, scheduler=scheduler, interleave=interleave)),
        wrap=lambda net: Pipeline(net, micro_size),
        is_full=True,
        **how,
    )


PIPELINES = {
    "1f1b": (("transformer", ("attention", "down")), {}),
    "zero-bubble": (("transformer", ("attention", "up"), "zero_bubble"), {"stages": 2}),
    "interleaved": (("transformer", ("letters", "down"), "1f1b", True), {"stages": 2}),
    "hsdp": (("transformer", ("letters", "norm", "head")), {"stages": 2, "settings": level(3)}),
    "deferred": (("mlp", ("first", "third")), {"stages": 2, "is_deferred": True}),
}

WAYS = {
    **{f"hsdp-level{n}": partial(train, "transformer", ("attention", "up"), level(n)) for n in (1, 2, 3)},
    "hsdp-deferred": partial(train, "mlp", ("first", "third"), level(3), is_deferred=True),
    "tensor-parallel": partial(train, "transformer", ("up", "down"), prepare=cut_layers, is_full=True),
    "recompute": partial(train, "transformer", ("attention", "up"), prepare=recompute),
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
    **{f"pipeline-{name}": partial(staged, *given, **how) for name, (given, how) in PIPELINES.items()},
}
CASES = {**{name: partial(train, *placed) for name, placed in PLACEMENTS.items()}, **WAYS}


@often
@pytest.mark.parametrize("case", slow_but(["tensor-parallel"], CASES))
def test_parts_on_the_host_give_the_numbers_of_one_process_and_the_copies_of_the_plan(ranks, case):
    found = CASES[case]()
    assert found.model.plan.traffic is not None
    assert found.counted == [found.model.plan.traffic.calls, found.model.plan.traffic.bytes]
    copies = ranks.gather(found.counted[0].get("to_host", 0))  # of a stage's ranks there may be none
    assert any(copies) is not case.endswith("nothing")


@slow_often
def test_parameters_of_the_host_leave_the_device(ranks):
    found = train("mlp", ("second",))
    plan = found.model.plan
    assert found.on_host == {"second.weight", "second.bias"}
    assert plan.host_bytes == (12 * 8 + 8) * 8
    assert plan.device_bytes == sum(p.local_bytes for p in plan.parameters if not p.on_host)
    lines = plan.explain().splitlines()
    begin = lines.index("borders between host (1 operator) and device")
    rows = 4 // ranks.size
    into, out = 8 * 12 * rows, 8 * 8 * rows
    assert [" ".join(line.split()) for line in lines[begin + 1 : begin + 3]] == [
        f"aten.relu of network to_host {into} B, gradient to_device {into} B",
        f"aten.linear of second to_device {out} B, gradient to_host {out} B",
    ]


@on_ranks(2, slow=True)
def test_plan_of_a_stage_names_what_it_copies_as_the_whole_network_does(ranks):
    lines = WAYS["pipeline-deferred"]().model.plan.explain().splitlines()
    begin = lines.index("borders between host (2 operators) and device") + 1
    named = [line.split(" to_")[0].strip() for line in lines[begin : lines.index("", begin)]]
    of_stages = (["input 0", "aten.linear of first"], ["aten.tanh of network", "aten.linear of third"])
    assert named == of_stages[ranks.rank]


@slow_often
def test_dropouts_on_the_host_draw_the_same_masks():
    found = []
    for on_host in ((), ("drop", "attention")):
        network = new_network("dropping")
        for path in on_host:
            set_target(network.get_submodule(path), "cpu")
        model = AutoParallel(WithLoss(network, F.cross_entropy))
        torch.manual_seed(5)
        found.append([model(*own_part(new_batch(step))).item() for step in (0, 1)])
    assert found[1] == pytest.approx(found[0], rel=1e-12, abs=0)


@slow_often
def test_step_function_calls_a_function_on_the_host():
    ends = set_target(lambda layer, x: torch.sin(layer(x)), "cpu")
    network, alone = new_network("mlp"), new_network("mlp")

    def loss_of(net, x, labels):
        return F.cross_entropy(ends(net.third, torch.tanh(net.second(torch.relu(net.first(x))))), labels)

    batch = new_batch(0)
    forward = value_and_grad(lambda x, labels: loss_of(network, x, labels), None, list(network.parameters()))
    step = AutoParallel(lambda x, labels: forward(x, labels)).dataset_strategy("full_batch")
    loss, gradients = step(*batch)
    right = loss_of(alone, *batch)
    right.backward()
    assert loss.item() == pytest.approx(right.item(), rel=1e-12, abs=0)
    for gradient, parameter in zip(gradients, alone.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-12)
    assert "aten.sin" in str(step.plan)


@slow_often
@pytest.mark.parametrize(
    ("limits_kb", "settings"),
    [({2: 40, 4: 28}, lambda net: net), ({2: 34, 4: 24}, level(2))],
    ids=["limit", "limit-level2"],
)
def test_limit_of_device_memory_moves_parameters_and_says_which(ranks, limits_kb, settings):
    limit_kb = limits_kb[ranks.size]
    found = train("transformer", (), lambda net: settings(net).device_memory_limit(limit_kb / 1024))
    assert found.model.plan.host_bytes > 0 and found.model.plan.device_bytes > 0
    (note,) = [line for line in found.first.splitlines() if line.startswith("note: device_memory_limit")]
    told = re.fullmatch(r".*: (\S+) KB instead of (\S+) KB of the device; on the host: (.*)", note)
    assert told is not None, note
    assert float(told[1]) <= limit_kb < float(told[2])
    assert {name.rpartition(".")[0] for name in found.on_host} == set(told[3].split(", "))
    assert f"as in the first call, on the host: {told[3]}" in found.model.plan.explain()


@on_ranks(2, slow=True)
def test_what_cannot_be_is_refused_with_what_is_missing():
    impossible = (
        r"device_memory_limit\(\S+\): a step needs \S+ KB of the device, and \S+ KB with every operator that has "
        r"parameters on the host: \S+ KB are missing; give more"
    )
    with pytest.raises(StrategyError, match=impossible):
        train("transformer", (), lambda net: net.device_memory_limit(2 / 1024))
    wrong = [
        (
            lambda net: AutoParallel(net, "data_parallel"),
            'set_target of network.first with parallel_mode="data_parallel", which cuts no graph',
        ),
        (
            lambda net: AutoParallel(Pipeline(net, 2)).pipeline(2).device_memory_limit(1),
            "device_memory_limit does not know how many micro batches",
        ),
    ]
    for build, words in wrong:
        network = new_network("mlp")
        set_target(network.get_submodule("first"), "cpu")
        with pytest.raises(StrategyError, match=words):
            build(WithLoss(network, F.cross_entropy))(*own_part(new_batch(0)))
