"""Optimizers on the host: the losses of the device and of one process, 1/3 and 1/8 of the device's memory."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from host_operators import AdamWeightDecayOp
from on_ranks import on_ranks
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    Pipeline,
    WithLoss,
    clip_by_global_norm,
    clip_grad_norm_,
    get_group_size,
    get_rank,
    load_checkpoint,
    no_init_parameters,
    optim,
    save_checkpoint,
    shard,
    value_and_grad,
)

STEPS, ROWS, WIDTH, HIDDEN, CLASSES = 4, 16, 32, 64, 64
MAKERS = {
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamWeightDecay": lambda p: optim.AdamWeightDecay(p, lr=1e-2, weight_decay=0.1),
    "Lamb": lambda p: optim.Lamb(p, lr=1e-2, weight_decay=0.1),
    "AdamWeightDecayOp": lambda p: AdamWeightDecayOp(p, learning_rate=1e-2, weight_decay=0.1),
}


@dataclass(frozen=True)
class Way:
    """How a network is trained."""

    level: str | None = None
    streams: bool = False
    """Gradients go to the host as they arrive."""
    is_cut: bool = False
    """Tensor parallel over 2 ranks."""
    clips: str = "ours"
    backward_passes: int = 1
    micro_batches: int = 1
    form: str = "module"
    ratio: float = 1.0
    mode: str = "semi_auto"


WAYS = {
    "whole": Way(),
    "level1": Way("level1", clips="torch"),
    "level3": Way("level3"),
    "tensor": Way(is_cut=True, clips="torch"),
    "tensor-level1-half": Way("level1", is_cut=True, ratio=0.5),
    "streamed-level1": Way("level1", streams=True),
    "streamed-tensor-level3": Way("level3", streams=True, is_cut=True, clips="torch"),
    "streamed-accumulation": Way("level1", streams=True, backward_passes=2),
    "accumulation": Way("level1", backward_passes=2),
    "micro-batches": Way("level1", micro_batches=2),
    "in-backward": Way("level1", form="in backward", clips=""),
    "step-function": Way("level1", form="step"),
    "deferred": Way("level1", form="deferred"),
    "pipeline": Way("level1", form="pipeline", micro_batches=2),
    "data-parallel": Way(mode="data_parallel"),
    "fsdp": Way("level3", mode="data_parallel", clips="torch"),
}
LAWS = [
    *(("AdamW", way) for way in WAYS),
    *((name, way) for name in MAKERS if name != "AdamW" for way in ("level1", "tensor", "streamed-tensor-level3")),
    ("Lamb", "accumulation"),
    ("Lamb", "pipeline"),
]
ONE_PROCESS, DEVICE = 1e-9, 1e-12
slow_on_two = on_ranks(2, slow=True)
often = on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
slow_often = on_ranks(2, pytest.param(4, marks=pytest.mark.slow), slow=True)


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
    rows = torch.randn(2 * STEPS, ROWS, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    labels = torch.randint(CLASSES, (2 * STEPS, ROWS), generator=draw)
    return list(zip(rows, labels, strict=True))


def alone(maker, way):
    """Train in one process on whole batches."""
    net = make_net(torch.float64)
    optimizer = maker(net.parameters())
    losses, data = [], batches(torch.float64)
    for _ in range(STEPS):
        for _ in range(way.backward_passes):
            x, y = data.pop(0)
            loss = F.cross_entropy(net(x), y)
            loss.backward()
        losses.append(loss.item())
        if way.clips:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(maker, way, *, on_host):
    """Train on all ranks."""
    if way.form == "deferred":
        torch.manual_seed(0)
        with no_init_parameters():
            net = Net(torch.float64)
            optimizer = maker(net.parameters())
    else:
        net = make_net(torch.float64)
        optimizer = maker(net.parameters())
    if on_host:
        optim.offload(optimizer, ratio=way.ratio)
    if way.is_cut:
        data_parts = get_group_size() // 2
        shard(net.first[0], ((data_parts, 1), (2, 1)))
    loss_of = WithLoss(net, F.cross_entropy)
    if way.form == "pipeline":
        loss_of = Pipeline(loss_of, way.micro_batches, stage_config={"network.first": 0, "network.last": 1})
    elif way.micro_batches > 1:
        loss_of = GradAccumulation(loss_of, way.micro_batches)
    called = _step_function(net, optimizer, way) if way.form == "step" else loss_of
    call = AutoParallel(called, parallel_mode=way.mode)
    if way.mode == "semi_auto":
        call.dataset_strategy("full_batch")
    if way.level:
        call.hsdp(threshold=0, optimizer_level=way.level)
    if way.form == "pipeline":
        call.pipeline(stages=2)
    if way.streams and on_host:
        call.offload_gradients(optimizer)
    if way.form == "in backward":
        call.step_in_backward(optimizer)
    data = batches(torch.float64)
    if way.mode != "semi_auto":
        place, ranks = get_rank(), get_group_size()
        data = [(x.chunk(ranks)[place], y.chunk(ranks)[place]) for x, y in data]
    count = way.backward_passes
    return [_one_step(call, net, optimizer, way, data[count * n : count * (n + 1)]) for n in range(STEPS)]


def _one_step(call, net, optimizer, way, data):
    if way.form == "step":
        return float(call(*data[0]).item())
    for x, y in data:
        loss = call(x, y)
        loss.backward()
    if way.mode != "semi_auto":
        loss = loss.detach().clone()
        dist.all_reduce(loss, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        loss /= get_group_size()
    if way.clips == "ours":
        clip_grad_norm_(net.parameters(), 0.1)
    elif way.clips:
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def _step_function(net, optimizer, way):
    differentiate = value_and_grad(lambda x, y: F.cross_entropy(net(x), y), None, net.parameters())

    def step(x, y):
        loss, gradients = differentiate(x, y)
        for parameter, gradient in zip(net.parameters(), clip_by_global_norm(gradients, 0.1), strict=True):
            parameter.grad = gradient
        optimizer.step()
        return loss

    return step


@often
@pytest.mark.parametrize(("name", "way"), slow_but(["Lamb/streamed-tensor-level3"], LAWS))
def test_losses_are_those_of_the_device_and_of_one_process(ranks, name, way):
    if ranks.size == 4 and way == "pipeline":
        pytest.skip("a pipeline of two ranks")
    found = train(MAKERS[name], WAYS[way], on_host=True)
    assert found == pytest.approx(train(MAKERS[name], WAYS[way], on_host=False), rel=DEVICE, abs=0)
    assert found == pytest.approx(alone(MAKERS[name], WAYS[way]), rel=ONE_PROCESS, abs=0)
    assert len(set(found)) == STEPS


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
    for x, y in batches(torch.bfloat16)[:STEPS]:
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
    others = [(x[:rows], y[:rows]) for rows in (ROWS // 2, ROWS)]
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
