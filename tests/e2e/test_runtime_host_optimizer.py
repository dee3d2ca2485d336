"""Optimizers on the host: the losses of the device and of one process, 1/3 and 1/8 of the device's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from host_operators import AdamWeightDecayOp
from on_ranks import Ranks, on_all_ranks, on_ranks
from torch import Tensor, nn

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

Result = dict[str, Any]
STEPS, ROWS, WIDTH, HIDDEN, CLASSES = 4, 16, 32, 64, 64
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
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


WAYS: dict[str, Way] = {
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


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh()), nn.Sequential(nn.Linear(HIDDEN, CLASSES), nn.Identity())
        )
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


def make_net(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net(dtype)


def batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    rows = (torch.randn(2 * STEPS, ROWS, WIDTH, generator=draw, dtype=torch.float64)).to(dtype)
    labels = torch.randint(CLASSES, (2 * STEPS, ROWS), generator=draw)
    return list(zip(rows, labels, strict=True))


def alone(maker: Callable[[Any], torch.optim.Optimizer], way: Way) -> list[float]:
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


def train(maker: Callable[[Any], torch.optim.Optimizer], way: Way, *, on_host: bool) -> list[float]:
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
        shard(net.blocks[0][0], ((data_parts, 1), (2, 1)))  # type: ignore[index]
    loss_of: nn.Module = WithLoss(net, F.cross_entropy)
    if way.form == "pipeline":
        loss_of = Pipeline(loss_of, way.micro_batches, stage_config={"network.blocks.0": 0, "network.blocks.1": 1})
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
    return [_one_step(call, net, optimizer, way, data) for data in _of_steps(way)]


def _of_steps(way: Way) -> list[list[tuple[Tensor, Tensor]]]:
    data, count = batches(torch.float64), way.backward_passes
    if way.mode != "semi_auto":
        place, ranks = get_rank(), get_group_size()
        data = [(x.chunk(ranks)[place], y.chunk(ranks)[place]) for x, y in data]
    return [data[count * step : count * (step + 1)] for step in range(STEPS)]


def _one_step(
    call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, way: Way, data: list[tuple[Tensor, Tensor]]
) -> float:
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


def _step_function(net: nn.Module, optimizer: Any, way: Way) -> Callable[..., Tensor]:
    assert way.clips
    differentiate = value_and_grad(lambda x, y: F.cross_entropy(net(x), y), None, net.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = differentiate(x, y)
        for parameter, gradient in zip(net.parameters(), clip_by_global_norm(gradients, 0.1), strict=True):
            parameter.grad = gradient
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    return step


def law(name: str, way: str) -> Result:
    maker = MAKERS[name]
    return {
        "right": alone(maker, WAYS[way]),
        "device": train(maker, WAYS[way], on_host=False),
        "host": train(maker, WAYS[way], on_host=True),
    }


# -- 16-bit weights ---------------------------------------------------------------------------------------------------


def _start(
    dtype: torch.dtype, level: str | None, *, streams: bool = False, on_host: bool = True
) -> tuple[Net, torch.optim.Optimizer, AutoParallel]:
    net = make_net(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if on_host:
        optim.offload(optimizer)
    call = AutoParallel(WithLoss(net, F.cross_entropy)).dataset_strategy("full_batch")
    if level:
        call.hsdp(threshold=0, optimizer_level=level)  # type: ignore[arg-type]
    if streams:
        call.offload_gradients(optimizer)
    return net, optimizer, call


def _whole(tensor: Any) -> Tensor:
    value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return value.detach().clone()  # type: ignore[no-any-return]


def narrow_weights(*, streams: bool) -> Result:
    """Beside one process that does the same with these gradients: float32 weights, rounded after each step."""
    net, optimizer, call = _start(torch.bfloat16, "level1", streams=streams)
    masters = [nn.Parameter(p.detach().float()) for p in make_net(torch.bfloat16).parameters()]
    reference = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    is_equal, moved = [], []
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
        is_equal += [torch.equal(a, m.detach().bfloat16()) for a, m in zip(after, masters, strict=True)]
        moved.append(any(not torch.equal(a, b) for a, b in zip(after, before, strict=True)))
    state = optimizer.state_dict()["state"]
    kept = [_whole(values["master_weight"]) for values in state.values()]
    is_equal += [torch.equal(k, m.detach()) for k, m in zip(kept, masters, strict=True)]
    return {"equal": is_equal, "moved": moved}


def memory() -> Result:
    """Count bytes an element: 16-bit weights with the optimizer on the host, and float32 Adam on the device."""
    found: Result = {}
    for name, dtype, on_host, streams in (
        ("device", torch.float32, False, False),
        ("host", torch.bfloat16, True, False),
        ("streamed", torch.bfloat16, True, True),
    ):
        _, optimizer, call = _start(dtype, "level1", streams=streams, on_host=on_host)
        for x, y in batches(dtype)[:2]:
            optimizer.zero_grad()
            call(x, y).backward()
            held = optim.memory_of(optimizer)
            optimizer.step()
        after = optim.memory_of(optimizer)
        sides = {side: vars(getattr(held, side)) for side in ("device", "host")}
        found[name] = {
            **{side: {key: count / held.elements for key, count in values.items()} for side, values in sides.items()},
            "copied": [after.copied.to_host / held.elements, after.copied.to_device / held.elements],
        }
    return found


def in_backward() -> Result:
    """Count what a step during the backward pass copies, in bytes an element."""
    _, optimizer, call = _start(torch.bfloat16, "level1")
    call.step_in_backward(optimizer)
    for x, y in batches(torch.bfloat16)[:2]:
        call(x, y).backward()
        optimizer.step()  # it finds no gradients
    found = optim.memory_of(optimizer)
    return {"copied": [found.copied.to_host / found.elements, found.copied.to_device / found.elements]}


def uses() -> Result:
    """Verify, save beside the training, and capture another shape, once gradients have gone to the host."""
    net, optimizer, call = _start(torch.float64, "level1", streams=True)
    path = Path(gettempdir()) / "uses.ckpt"
    x, y = batches(torch.float64)[0]

    def step(model: AutoParallel, opt: torch.optim.Optimizer, rows: int) -> float:
        loss = model(x[:rows], y[:rows])
        loss.backward()
        opt.step()
        opt.zero_grad()
        return float(loss.item())

    step(call, optimizer, ROWS)
    save_checkpoint(net, path, optimizer=optimizer, async_save=True)
    report = str(call.verify(x, y)).splitlines()[0]
    losses = [step(call, optimizer, rows) for rows in (ROWS // 2, ROWS)]
    other, fresh, again = _start(torch.float64, "level1")
    load_checkpoint(path, other, fresh)
    return {"report": report, "losses": losses, "again": [step(again, fresh, rows) for rows in (ROWS // 2, ROWS)]}


# -- checkpoints ------------------------------------------------------------------------------------------------------


def resume(dtype: torch.dtype, places: list[bool], levels: list[str | None]) -> Result:
    """Train with a checkpoint after every step but the last, and go on in another layout, here or on the device."""
    data = batches(dtype)

    def steps(start: tuple[Net, Any, AutoParallel], some: list[tuple[Tensor, Tensor]]) -> list[float]:
        found = []
        for x, y in some:
            loss = start[2](x, y)
            loss.backward()
            start[1].step()
            start[1].zero_grad()
            found.append(loss.item())
        return found

    through = steps(_start(dtype, levels[0], on_host=places[0]), data[: 2 * len(places)])
    resumed: list[float] = []
    for number, (on_host, level) in enumerate(zip(places, levels, strict=True)):
        start = _start(dtype, level, on_host=on_host)
        path = Path(gettempdir()) / f"host-{dtype}-{places}-{levels}".replace(" ", "") / f"{number}.ckpt"
        if number:
            load_checkpoint(path.with_name(f"{number - 1}.ckpt"), start[0], start[1])
        resumed += steps(start, data[2 * number : 2 * number + 2])
        if get_rank() == 0:
            path.parent.mkdir(exist_ok=True)
        dist.barrier()
        save_checkpoint(start[0], path, optimizer=start[1])
    return {"through": through, "resumed": resumed}


def refusals() -> Result:
    """Return what is said to those who ask for what cannot be."""
    net = make_net(torch.float64)
    loss_of = WithLoss(net, F.cross_entropy)
    on_host, on_device = optim.AdamW(net.parameters(), target="cpu"), optim.AdamW(net.parameters())
    muon = optim.offload(torch.optim.Muon([net.blocks[0][0].weight]))  # type: ignore[index, union-attr, list-item]
    x, y = batches(torch.float64)[0]

    def of_muon() -> None:
        step = AutoParallel(loss_of).dataset_strategy("full_batch").hsdp(threshold=0)
        step(x, y).backward()
        muon.step()

    def of_micro_batches() -> None:
        AutoParallel(GradAccumulation(loss_of, 2)).offload_gradients(on_host)(x, y)

    asked: dict[str, Callable[[], Any]] = {
        "on the device": lambda: AutoParallel(loss_of).offload_gradients(on_device),
        "step function": lambda: AutoParallel(lambda: None).offload_gradients(on_host),
        "data parallel": lambda: AutoParallel(loss_of, "data_parallel").offload_gradients(on_host),
        "pipeline": lambda: AutoParallel(Pipeline(loss_of, 2)).pipeline(2).offload_gradients(on_host),
        "scale": lambda: AutoParallel(loss_of).mixed_precision("float16", 8.0).offload_gradients(on_host),
        "whole": of_muon,
        "micro batches": of_micro_batches,
    }
    found = {}
    for name, ask in asked.items():
        try:
            ask()
            found[name] = ""
        except StrategyError as error:
            found[name] = str(error)
    return found


CASES: dict[str, Callable[[], Result]] = {
    **{f"law/{name}/{way}": lambda name=name, way=way: law(name, way) for name, way in LAWS},  # type: ignore[misc]
    "narrow/kept": lambda: narrow_weights(streams=False),
    "narrow/streamed": lambda: narrow_weights(streams=True),
    "memory": memory,
    "in backward": in_backward,
    "uses": uses,
    "resume/narrow": lambda: resume(torch.bfloat16, [True, True], ["level1", "level1"]),
    "resume/layouts": lambda: resume(torch.bfloat16, [True, True, True], ["level1", None, "level3"]),
    "resume/places": lambda: resume(torch.float64, [True, False, True], ["level1", "level1", None]),
    "refusals": refusals,
}


ONE_PROCESS, DEVICE = 1e-9, 1e-12


FAST = ("law/Lamb/streamed-tensor-level3", "resume/places")
outcomes = on_all_ranks(CASES)
often = on_ranks(2, pytest.param(4, marks=pytest.mark.slow))


def rows(cases: list[str]) -> list[Any]:
    return slow_but([case for case in cases if case in FAST], cases)


@often
@pytest.mark.parametrize("case", rows([case for case in CASES if case.startswith("law/")]))
def test_losses_are_those_of_the_device_and_of_one_process(ranks: Ranks, case: str) -> None:
    if ranks.size == 4 and case.endswith("pipeline"):
        pytest.skip("a pipeline of two ranks")
    for rank in outcomes(case):
        assert rank["host"] == pytest.approx(rank["device"], rel=DEVICE, abs=0)
        assert rank["host"] == pytest.approx(rank["right"], rel=ONE_PROCESS, abs=0)
        assert len(set(rank["host"])) == STEPS


@often
@pytest.mark.parametrize("case", rows(["narrow/kept", "narrow/streamed"]))
def test_weights_of_16_bits_are_bit_for_bit_the_rounded_masters_of_one_process(ranks: Ranks, case: str) -> None:
    for rank in outcomes(case):
        assert set(rank["equal"]) == {True}
        assert set(rank["moved"]) == {True}


@pytest.mark.slow
@on_ranks(2)
def test_device_holds_a_third_of_float32_adam_and_an_eighth_of_the_mixed_recipe() -> None:
    for rank in outcomes("memory"):
        device, host, streamed = (rank[name] for name in ("device", "host", "streamed"))
        adam = device["device"]["weights"] + device["device"]["state"]
        mixed = sum(host["device"].values()) + sum(host["host"].values())
        assert adam == pytest.approx(12, abs=0.02)
        assert mixed == pytest.approx(16, abs=0.02)
        assert host["device"] == {"weights": 2, "gradients": 2, "state": 0}
        assert sum(host["device"].values()) / adam == pytest.approx(1 / 3, rel=2e-3)
        assert streamed["device"] == {"weights": 2, "gradients": 0, "state": 0}
        assert sum(streamed["device"].values()) / mixed == pytest.approx(1 / 8, rel=2e-3)
        assert device["copied"] == [0, 0]
        assert host["copied"] == streamed["copied"] == [2, 2], "gradients there, weights back"


@pytest.mark.slow
@often
@pytest.mark.parametrize("case", rows(["resume/narrow", "resume/layouts", "resume/places"]))
def test_training_goes_on_from_a_checkpoint_in_other_layouts_and_places(ranks: Ranks, case: str) -> None:
    for rank in outcomes(case):
        assert rank["resumed"] == pytest.approx(rank["through"], rel=0 if "narrow" in case else DEVICE, abs=0)


@pytest.mark.slow
@on_ranks(2)
def test_step_in_the_backward_pass_copies_gradients_there_and_weights_back() -> None:
    assert [rank["copied"] for rank in outcomes("in backward")] == [[2, 2], [2, 2]]


@pytest.mark.slow
@on_ranks(2)
def test_network_is_verified_saved_and_captured_again_with_its_gradients_on_the_host() -> None:
    for rank in outcomes("uses"):
        assert rank["report"] == "verify: 5 of 5 values of 2 ranks equal one process"
        assert rank["again"] == rank["losses"]


@pytest.mark.slow
@on_ranks(2)
def test_what_cannot_be_is_refused_with_what_to_do() -> None:
    for rank in outcomes("refusals"):
        assert rank["on the device"].endswith("the optimizer works on the device: call optim.offload(optimizer) first")
        assert rank["data parallel"].endswith('needs a captured graph: use parallel_mode="semi_auto"')
        for name in ("step function", "pipeline", "scale", "micro batches"):
            assert rank[name].endswith("leave one of both out"), name
        assert "looks at whole tensors" in rank["whole"]
