"""Parts of a network on the host: the numbers of one process, the copies of the plan, on 2 and 4 ranks.
Optimizers on the host: the losses of the device and of one process, 1/3 and 1/8 of the device's memory."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from host_networks import NETWORKS, ROWS, new_batch, new_network
from on_ranks import on_ranks
from torch import nn
from ways import Way, train_beside_one_process

from msrun.errors import StrategyError
from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    Pipeline,
    WithLoss,
    clip_grad_norm_,
    get_group_size,
    get_rank,
    load_checkpoint,
    optim,
    recompute,
    save_checkpoint,
    set_target,
    shard,
    value_and_grad,
)

STEPS = 3
often = on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
slow_often = on_ranks(2, pytest.param(4, marks=pytest.mark.slow), slow=True)


def own_part(batch):
    return [part.chunk(get_group_size())[get_rank()] for part in batch]


def cut_layers(network, first="up", second="down"):
    """Megatron's pair: the sum of the second layer is a message of the host's values."""
    ranks = get_group_size()
    shard(network.get_submodule(first), ((1, 1), (ranks, 1), (ranks,)))
    shard(network.get_submodule(second), ((1, ranks), (1, ranks)))


def of(network, *on_host, prepare=lambda _network: None, **settings):
    """Return a way to train a network of which parts run on the host."""
    given = {"network": network, "on_host": on_host, "prepare": prepare}
    name = f"{network}/{'+'.join(on_host) or 'nothing'}"
    return Way(**{"name": name, "optimizer": "torch-adamw", "of_network": given, **settings})


def train(way):
    """Train on all ranks and alone; the last batch is a smaller one, so that the network is captured twice."""

    def make():
        network = NETWORKS[way.of_network["network"]]().double()
        for path in way.of_network["on_host"]:
            set_target(network.get_submodule(path), "cpu")
        way.of_network["prepare"](network)
        return network

    batches = [
        [value[: ROWS // 2 if step == STEPS - 1 else None] for value in new_batch(step)] for step in range(STEPS)
    ]
    found = train_beside_one_process(way, make, batches)
    expected = found.alone.state_dict()
    for name, value in found.step.state_dict().items():
        torch.testing.assert_close(value, expected[name.removeprefix("network.")], rtol=0, atol=1e-9)
    return found


def on_host(plan):
    return {parameter.name for parameter in plan.parameters if parameter.on_host}


CUT, MICRO, COPIES = {"prepare": cut_layers, "dataset": "full_batch"}, ("micro", 2), ("copies", 2)
STAGES = {"stages": 2, "micro_size": 2, "dataset": "full_batch"}
WAYS = [
    of("mlp"),
    of("conv", "norm", "head"),
    of("transformer", "letters", "attention", "norm", "up", "down", "head"),
    *(of("transformer", "attention", "up", name=f"hsdp-level{n}", level=f"level{n}") for n in (1, 2, 3)),
    of("mlp", "first", "third", name="hsdp-deferred", level="level3", deferred=True),
    of(
        *("mlp", "second", "third"),
        name="tensor-parallel-mlp",
        prepare=partial(cut_layers, first="second", second="third"),
        dataset="full_batch",
    ),
    of("transformer", "up", "down", name="tensor-parallel", **CUT),
    of("transformer", "attention", "up", name="recompute", prepare=recompute),
    of(
        *("transformer", "attention.out", "down"),
        name="recompute-and-limit",
        prepare=lambda network: recompute(network.attention),
    ),
    of("mlp", "second", name="accumulation", parts=(MICRO,), dataset="full_batch"),
    of("transformer", "norm", name="copies", parts=(COPIES,), dataset="full_batch"),
    of(
        *("transformer", "letters", "attention", "down"),
        name="everything",
        level="level3",
        prepare=lambda network: (recompute(network.attention), cut_layers(network)),
        parts=(MICRO, COPIES),
        dataset="full_batch",
    ),
    of("transformer", "attention", "down", name="pipeline-1f1b", **STAGES),
    of("transformer", "attention", "up", name="pipeline-zero-bubble", scheduler="zero_bubble", **STAGES),
    of("transformer", "letters", "down", name="pipeline-interleaved", interleave=True, **{**STAGES, "micro_size": 4}),
    of("transformer", "letters", "norm", "head", name="pipeline-hsdp", level="level3", **STAGES),
    of("mlp", "first", "third", name="pipeline-deferred", deferred=True, **STAGES),
]


@often
@pytest.mark.parametrize("way", slow_but(["tensor-parallel-mlp"], WAYS))
def test_parts_on_the_host_give_the_numbers_of_one_process_and_the_copies_of_the_plan(ranks, way):
    found = train(way)
    assert found.step.plan.traffic is not None
    assert found.moved == {"calls": found.step.plan.traffic.calls, "bytes": found.step.plan.traffic.bytes}
    copies = ranks.gather(found.moved["calls"].get("to_host", 0))  # of a stage's ranks there may be none
    assert any(copies) is not way.name.endswith("nothing")


@slow_often
def test_parameters_of_the_host_leave_the_device(ranks):
    plan = train(of("mlp", "second")).step.plan
    assert on_host(plan) == {"second.weight", "second.bias"}
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
    lines = train(WAYS[-1]).step.plan.explain().splitlines()
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
@pytest.mark.parametrize(("limits_kb", "level"), [({2: 40, 4: 28}, None), ({2: 34, 4: 24}, "level2")])
def test_limit_of_device_memory_moves_parameters_and_says_which(ranks, limits_kb, level):
    limit_kb = limits_kb[ranks.size]
    way = of("transformer", level=level, configure=lambda step: step.device_memory_limit(limit_kb / 1024))
    plan = train(way).step.plan
    assert plan.host_bytes > 0 and plan.device_bytes > 0
    (moved,) = re.findall("as in the first call, on the host: (.*)", plan.explain())
    assert {name.rpartition(".")[0] for name in on_host(plan)} == set(moved.split(", "))
    step = way.set_up(new_network("transformer"), None, F.cross_entropy, [])
    step(*own_part(new_batch(0)))
    (note,) = [line for line in step.plan.explain().splitlines() if line.startswith("note: device_memory_limit")]
    told = re.fullmatch(r".*: (\S+) KB instead of (\S+) KB of the device; on the host: (.*)", note)
    assert told is not None, note
    assert float(told[1]) <= limit_kb < float(told[2])
    assert told[3] == moved


@on_ranks(2, slow=True)
def test_what_cannot_be_is_refused_with_what_is_missing():
    impossible = (
        r"device_memory_limit\(\S+\): a step needs \S+ KB of the device, and \S+ KB with every operator that has "
        r"parameters on the host: \S+ KB are missing; give more"
    )
    with pytest.raises(StrategyError, match=impossible):
        train(of("transformer", configure=lambda step: step.device_memory_limit(2 / 1024)))
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


MANY_STEPS, BATCH_ROWS, WIDTH, HIDDEN, CLASSES = 4, 16, 32, 64, 64


def offload(_step, optimizer, ratio=1.0):
    optim.offload(optimizer, ratio=ratio)


def stream(step, optimizer):
    """Gradients go to the host as they arrive."""
    step.offload_gradients(optim.offload(optimizer))


def step_in_backward(step, optimizer):
    step.step_in_backward(optim.offload(optimizer))


TENSOR = {"of_network": {"is_cut": True}}
"""Parallel over 2 ranks."""
OWN_ROWS = {"mode": "data_parallel", "dataset": "data_parallel"}
OPTIMIZER_WAYS = {
    "whole": {},
    "level1": {"level": "level1", "clips": "torch"},
    "level3": {"level": "level3"},
    "tensor": {**TENSOR, "clips": "torch"},
    "tensor-level1-half": {"level": "level1", "join": partial(offload, ratio=0.5), **TENSOR},
    "streamed-level1": {"level": "level1", "join": stream},
    "streamed-tensor-level3": {"level": "level3", "join": stream, **TENSOR, "clips": "torch"},
    "streamed-accumulation": {"level": "level1", "join": stream, "passes": 2},
    "accumulation": {"level": "level1", "passes": 2},
    "micro-batches": {"level": "level1", "parts": (MICRO,)},
    "in-backward": {"level": "level1", "join": step_in_backward, "clips": ""},
    "step-function": {"level": "level1", "form": "step"},
    "deferred": {"level": "level1", "deferred": True},
    "pipeline": {"level": "level1", **STAGES},
    "data-parallel": OWN_ROWS,
    "fsdp": {"level": "level3", **OWN_ROWS, "clips": "torch"},
}
OTHERS = ("momentum", "adam-weight-decay", "lamb", "adam-weight-decay-op")
LAWS = [
    *(("torch-adamw", way) for way in OPTIMIZER_WAYS),
    *((name, way) for name in OTHERS for way in ("level1", "tensor", "streamed-tensor-level3")),
    ("lamb", "accumulation"),
    ("lamb", "pipeline"),
]
DEVICE = 1e-12
slow_on_two = on_ranks(2, slow=True)


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh()), nn.Linear(HIDDEN, CLASSES)
        self.to(dtype)

    def forward(self, x):
        return self.last(self.first(x))


def make_net(dtype):
    torch.manual_seed(0)
    return Net(dtype)


def batches(dtype):
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(2 * MANY_STEPS, BATCH_ROWS, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    labels = torch.randint(CLASSES, (2 * MANY_STEPS, BATCH_ROWS), generator=draw)
    return list(zip(rows, labels, strict=True))


@often
@pytest.mark.parametrize(("name", "way"), slow_but(["lamb/streamed-tensor-level3"], LAWS))
def test_optimizers_on_the_host_give_the_numbers_of_the_device_and_of_one_process(name, way):
    settings = {"optimizer": name, "dataset": "full_batch", "join": offload, "clips": "ours", **OPTIMIZER_WAYS[way]}
    on_host = Way(way, **settings)

    def make():
        net = make_net(torch.float64)
        if on_host.of_network:
            shard(net.first[0], ((get_group_size() // 2, 1), (2, 1)))
        return net

    data = batches(torch.float64)[: MANY_STEPS * on_host.passes]
    found = train_beside_one_process(on_host, make, data)
    on_device = train_beside_one_process(replace(on_host, join=lambda *_: None), make, data)
    assert found.losses == pytest.approx(on_device.losses, rel=DEVICE, abs=0)
    assert optim.memory_of(found.optimizer).host.state > 0


# -- 16-bit weights ---------------------------------------------------------------------------------------------------


def _start(dtype, level, *, streams=False, on_host=True):
    net = make_net(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if on_host:
        optim.offload(optimizer)
    call = AutoParallel(WithLoss(net, F.cross_entropy)).dataset_strategy("full_batch")
    if level:
        call.hsdp(threshold=0, optimizer_level=level)
    if streams:
        call.offload_gradients(optimizer)
    return net, optimizer, call


def _whole(tensor):
    value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return value.detach().clone()


@slow_often
@pytest.mark.parametrize("streams", [False, True])
def test_weights_of_16_bits_are_bit_for_bit_the_rounded_masters_of_one_process(streams):
    """Beside one process that does the same with these gradients: float32 weights, rounded after each step."""
    net, optimizer, call = _start(torch.bfloat16, "level1", streams=streams)
    masters = [nn.Parameter(p.detach().float()) for p in make_net(torch.bfloat16).parameters()]
    reference = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    for x, y in batches(torch.bfloat16)[:MANY_STEPS]:
        before = [_whole(p) for p in net.parameters()]
        call(x, y).backward()
        clip_grad_norm_(net.parameters(), 0.5)
        for master, parameter in zip(masters, net.parameters(), strict=True):
            master.grad = _whole(parameter.grad).float()
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
        after = [_whole(p) for p in net.parameters()]
        assert all(torch.equal(a, m.detach().bfloat16()) for a, m in zip(after, masters, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    kept = [_whole(values["master_weight"]) for values in optimizer.state_dict()["state"].values()]
    assert all(torch.equal(k, m.detach()) for k, m in zip(kept, masters, strict=True))


def _bytes_of(dtype, *, on_host, streams=False, in_backward=False):
    """Return bytes an element, before and after the second step: on the device, on the host, copied there and back."""
    _, optimizer, call = _start(dtype, "level1", streams=streams, on_host=on_host)
    if in_backward:
        call.step_in_backward(optimizer)
    for x, y in batches(dtype)[:2]:
        optimizer.zero_grad()
        call(x, y).backward()
        held = optim.memory_of(optimizer)
        optimizer.step()
    copied = optim.memory_of(optimizer).copied
    sides = [vars(getattr(held, side)).items() for side in ("device", "host")]
    device, host = ({key: count / held.elements for key, count in side} for side in sides)
    return device, host, [copied.to_host / held.elements, copied.to_device / held.elements]


@slow_on_two
def test_device_holds_a_third_of_float32_adam_and_an_eighth_of_the_mixed_recipe():
    """Gradients are copied there, and weights back."""
    device, _, nothing = _bytes_of(torch.float32, on_host=False)
    assert device["weights"] + device["state"] == pytest.approx(12, abs=0.02)
    assert nothing == [0, 0]
    device, host, copied = _bytes_of(torch.bfloat16, on_host=True)
    assert device == {"weights": 2, "gradients": 2, "state": 0}
    assert sum(device.values()) + sum(host.values()) == pytest.approx(16, abs=0.02)
    streamed, _, of_streamed = _bytes_of(torch.bfloat16, on_host=True, streams=True)
    assert streamed == {"weights": 2, "gradients": 0, "state": 0}
    _, _, in_backward = _bytes_of(torch.bfloat16, on_host=True, in_backward=True)
    assert copied == of_streamed == in_backward == [2, 2]


def _train(start, some):
    found = []
    for x, y in some:
        loss = start[2](x, y)
        loss.backward()
        start[1].step()
        start[1].zero_grad()
        found.append(loss.item())
    return found


@slow_on_two
def test_network_is_verified_saved_and_captured_again_with_its_gradients_on_the_host(tmp_path):
    """Saved beside the training, once gradients have gone to the host."""
    net, optimizer, call = start = _start(torch.float64, "level1", streams=True)
    x, y = batches(torch.float64)[0]
    others = [(x[:rows], y[:rows]) for rows in (BATCH_ROWS // 2, BATCH_ROWS)]
    _train(start, [(x, y)])
    save_checkpoint(net, tmp_path / "saved", optimizer=optimizer, async_save=True)
    assert str(call.verify(x, y)).startswith("verify: 5 of 5 values of 2 ranks equal one process\n")
    again = _start(torch.float64, "level1")
    losses = _train(start, others)
    load_checkpoint(tmp_path / "saved", again[0], again[1])
    assert _train(again, others) == losses


# -- checkpoints ------------------------------------------------------------------------------------------------------


@slow_often
@pytest.mark.parametrize(
    ("dtype", "places", "levels"),
    [
        (torch.bfloat16, [True, True], ["level1", "level1"]),
        (torch.bfloat16, [True, True, True], ["level1", None, "level3"]),
        (torch.float64, [True, False, True], ["level1", "level1", None]),
    ],
    ids=["narrow", "layouts", "places"],
)
def test_training_goes_on_from_a_checkpoint_in_other_layouts_and_places(tmp_path, dtype, places, levels):
    """On the host or on the device."""
    data = batches(dtype)
    through = _train(_start(dtype, levels[0], on_host=places[0]), data[: 2 * len(places)])
    resumed = []
    for number, (on_host, level) in enumerate(zip(places, levels, strict=True)):
        start = _start(dtype, level, on_host=on_host)
        if number:
            load_checkpoint(tmp_path / f"{number - 1}", start[0], start[1])
        resumed += _train(start, data[2 * number : 2 * number + 2])
        save_checkpoint(start[0], tmp_path / f"{number}", optimizer=start[1])
    assert resumed == pytest.approx(through, rel=DEVICE if len(places) == 3 else 0, abs=0)


@slow_on_two
def test_what_cannot_be_is_refused_with_what_to_do():
    net = make_net(torch.float64)
    loss_of = WithLoss(net, F.cross_entropy)
    on_host, on_device = optim.AdamW(net.parameters(), target="cpu"), optim.AdamW(net.parameters())
    muon = optim.offload(torch.optim.Muon([net.last.weight]))
    x, y = batches(torch.float64)[0]

    def of_muon():
        AutoParallel(loss_of).dataset_strategy("full_batch").hsdp(threshold=0)(x, y).backward()
        muon.step()

    one_of_both = "leave one of both out$"
    asked = [
        (lambda: AutoParallel(loss_of).offload_gradients(on_device), r"call optim\.offload\(optimizer\) first$"),
        (lambda: AutoParallel(lambda: None).offload_gradients(on_host), one_of_both),
        (
            lambda: AutoParallel(loss_of, "data_parallel").offload_gradients(on_host),
            'needs a captured graph: use parallel_mode="semi_auto"$',
        ),
        (lambda: AutoParallel(Pipeline(loss_of, 2)).pipeline(2).offload_gradients(on_host), one_of_both),
        (lambda: AutoParallel(loss_of).mixed_precision("float16", 8.0).offload_gradients(on_host), one_of_both),
        (lambda: AutoParallel(GradAccumulation(loss_of, 2)).offload_gradients(on_host)(x, y), one_of_both),
        (of_muon, "looks at whole tensors"),
    ]
    for ask, words in asked:
        with pytest.raises(StrategyError, match=words):
            ask()
