"""Training loops as strangers write them around a network, in every layout, beside one process that does the same.

Each loop yields what its user would look at. Ranks have rows of their own where torch trains on them (DDP, FSDP2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch_tools import Net, fsdp2, semi_auto, stages, tensor_parallel, whole

from msrun.errors import MsrunError
from msrun.runtime import AutoParallel, WithLoss, get_rank

Call = Callable[[Tensor, Tensor], Tensor]
Values = Iterator[Tensor]
Result = dict[str, Any]


def ddp(network: nn.Module) -> AutoParallel:
    return AutoParallel(WithLoss(network, F.mse_loss), "data_parallel")


BUILDS: dict[str, Callable[[nn.Module], AutoParallel]] = {
    "hsdp": lambda n: semi_auto(n).hsdp(threshold=0, optimizer_level="level3"),
    "tensor": lambda n: tensor_parallel(n).hsdp(threshold=0),
    "stages": lambda n: stages(n).hsdp(threshold=0),
    "fsdp2": fsdp2,
    "ddp": ddp,
}
OWN_ROWS = ("ddp", "fsdp2")
CUT = ("hsdp", "tensor", "stages")
READ_EVERY_GRADIENT = ("norms_are_read_as_numbers", "sums_are_read_as_numbers")
"""Not with stages: a parameter of another stage has no gradient here, so that `.grad` is None, as in every pipeline."""


@dataclass
class Loop:
    run: Callable[[nn.Module, Call], Values]
    refused: dict[str, str] = field(default_factory=dict)
    """layout -> what the error says, where the numbers of one process cannot be had."""


LOOPS: dict[str, Loop] = {}


def loop(refused: dict[str, str] | None = None) -> Callable[[Any], Any]:
    def add(function: Callable[[nn.Module, Call], Values]) -> Any:
        LOOPS[function.__name__] = Loop(function, refused or {})
        return function

    return add


def each(layouts: tuple[str, ...], text: str) -> dict[str, str]:
    return dict.fromkeys(layouts, text)


def names() -> list[str]:
    """Return loop/layout of every case."""
    return [
        f"{name}/{layout}"
        for name in LOOPS
        for layout in BUILDS
        if not (layout == "stages" and name in READ_EVERY_GRADIENT)
    ]


def cases(world_size: int) -> dict[str, Callable[[], Result]]:
    return {f"{world_size}/{key}": lambda key=key: run(*key.split("/")) for key in names()}  # type: ignore[misc]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def run(name: str, layout: str) -> Result:
    right, network = Net(), Net()
    step, looped = BUILDS[layout](network), LOOPS[name]

    def call(x: Tensor, y: Tensor) -> Tensor:
        parts = dist.get_world_size() if layout in OWN_ROWS else 1
        return step(*(value.chunk(parts)[get_rank() % parts] for value in (x, y)))

    def values(of: nn.Module, call: Call) -> list[Tensor]:
        return [whole(value.detach()).clone() for value in looped.run(of, call)]

    if layout in looped.refused:
        try:
            values(network, call)
        except (MsrunError, RuntimeError) as error:
            assert looped.refused[layout] in str(error), error
            return {}
        raise AssertionError("it was not refused")
    found = values(network, call)
    expected = values(right, lambda x, y: F.mse_loss(right(x), y))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, check_dtype=False)
    for key, value in step.state_dict().items():
        torch.testing.assert_close(whole(value), right.state_dict()[key], rtol=1e-9, atol=1e-11)
    return {}


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)


def train(network: nn.Module, call: Call, optimizer: Any, seeds: range = range(3)) -> Values:
    for seed in seeds:
        loss = call(*batch(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


# -- when things happen -----------------------------------------------------------------------------------------------


@loop()
def inference_comes_first(network: nn.Module, call: Call) -> Values:
    with torch.inference_mode():
        yield call(*batch(20)).clone()
    optimizer = sgd(network)
    for seed in range(3):
        yield from train(network, call, optimizer, range(seed, seed + 1))
        with torch.inference_mode():
            yield call(*batch(20)).clone()


@loop()
def gradients_are_dropped_before_the_first_step(network: nn.Module, call: Call) -> Values:
    optimizer = sgd(network)
    call(*batch(7)).backward()
    optimizer.zero_grad()
    yield from train(network, call, optimizer)


@loop({"stages": "leaves out the other stages"})
def groups_of_the_optimizer_are_clipped(network: nn.Module, call: Call) -> Values:
    optimizer = sgd(network)
    for seed in range(2):
        call(*batch(seed)).backward()
        yield nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)
        optimizer.step()
        optimizer.zero_grad()


@loop()
def half_is_frozen_and_trained_again(network: nn.Module, call: Call) -> Values:
    optimizer = sgd(network)
    for seed in range(6):
        network.a.requires_grad_(seed not in (0, 1, 4))  # type: ignore[union-attr]
        yield from train(network, call, optimizer, range(seed, seed + 1))


@loop({"fsdp2": "was put into the network after FSDP2 had cut it", "stages": "stage 1 of 2 has no operator"})
def head_is_replaced(network: nn.Module, call: Call) -> Values:
    yield from train(network, call, sgd(network), range(2))
    torch.manual_seed(8)
    network.b = nn.Linear(16, 8, dtype=torch.float64)
    yield from train(network, call, sgd(network), range(2))


@loop({"fsdp2": "was put into the network after FSDP2 had cut it"})
def weights_are_tied_later(network: nn.Module, call: Call) -> Values:
    yield call(*batch(0))
    network.norm.bias = network.norm.weight  # type: ignore[union-attr]
    yield from train(network, call, sgd(network))


# -- by hand ----------------------------------------------------------------------------------------------------------


@loop()
def data_is_assigned(network: nn.Module, call: Call) -> Values:
    for seed in range(3):
        loss = call(*batch(seed))
        loss.backward()
        for parameter in network.parameters():
            if parameter.grad is not None:
                parameter.data = parameter.data - 0.1 * parameter.grad.data
                parameter.grad = None
        yield loss


@loop()
def norms_are_read_as_numbers(network: nn.Module, call: Call) -> Values:
    optimizer = sgd(network)
    for seed in range(3):
        loss = call(*batch(seed))
        loss.backward()
        norms = [parameter.grad.norm().item() for parameter in network.parameters()]  # type: ignore[union-attr]
        yield torch.tensor(norms)
        yield torch.tensor([float(parameter.detach().norm(1)) for parameter in network.parameters()])
        for parameter, norm in zip(network.parameters(), norms, strict=True):
            parameter.grad.mul_(0.01 / norm)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@loop()
def sums_are_read_as_numbers(network: nn.Module, call: Call) -> Values:
    call(*batch(0)).backward()
    weight = network.a.weight  # type: ignore[union-attr]
    yield torch.tensor([float((weight.grad**2).sum()), float(weight.mean()), weight.abs().max().item()])
    yield torch.tensor([bool(weight.grad.abs().sum() > 0), bool(torch.isnan(weight).any())])


@loop({"stages": "needs the whole"})
def weights_are_drawn_anew(network: nn.Module, call: Call) -> Values:
    yield from train(network, call, sgd(network), range(2))
    torch.manual_seed(11)
    network.a.reset_parameters()  # type: ignore[operator,union-attr]
    nn.init.xavier_normal_(network.b.weight)  # type: ignore[arg-type,union-attr]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    yield from train(network, call, sgd(network), range(2))


@loop({"stages": "needs the whole"})
def rows_and_chunks_are_written(network: nn.Module, call: Call) -> Values:
    yield from train(network, call, sgd(network), range(2))
    weight = network.a.weight  # type: ignore[union-attr]
    weight.data[:3].mul_(2)
    weight.data[1] = 0.5
    weight.data.view(-1)[3:20].add_(0.25)
    with torch.no_grad():
        row, column = weight[2], weight[:, 1]
        weight.mul_(0.5)
        row.add_(1)
        column.fill_(0.125)
        weight.chunk(2)[1].mul_(torch.linspace(0, 1, weight.shape[1]))
    yield weight[:3].sum()
    yield torch.tensor(float(sum(torch._foreach_norm([value.detach() for value in network.parameters()]))))
    yield from train(network, call, sgd(network), range(2))


@loop(
    {"fsdp2": "which FSDP2 gathers for the call"} | each(CUT, "writes under no_grad into a tensor that has a gradient")
)
def weights_are_written_in_forward(network: nn.Module, call: Call) -> Values:
    def halve(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)  # type: ignore[operator,union-attr]

    network.a.register_forward_pre_hook(halve)  # type: ignore[operator,union-attr]
    yield from train(network, call, sgd(network))


# -- hooks ------------------------------------------------------------------------------------------------------------


@loop({"fsdp2": "which FSDP2 never calls"})
def gradient_hooks(network: nn.Module, call: Call) -> Values:
    network.a.weight.register_hook(lambda gradient: gradient * 3)  # type: ignore[union-attr]
    yield from train(network, call, sgd(network))


@loop({"fsdp2": "which FSDP2 never calls"})
def gradient_hooks_that_come_later(network: nn.Module, call: Call) -> Values:
    optimizer = sgd(network)
    yield from train(network, call, optimizer, range(2))
    network.a.weight.register_hook(lambda gradient: gradient * 3)  # type: ignore[union-attr]
    yield from train(network, call, optimizer)


@loop({"ddp": "before the ranks' mean"})
def hooks_after_gradients(network: nn.Module, call: Call) -> Values:
    def descend(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
        parameter.grad = None

    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
    for seed in range(3):
        loss = call(*batch(seed))
        loss.backward()
        yield loss
