"""Times steps in turns: searched strategies beside every uniform plan, or the division of a step that is found beside
others; started by `search.py` on all ranks.

usage: search_job.py strategies|degrees NETWORK ROUNDS RESULT.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from search_networks import Mixtral, Perceptron, ResNet50, Transformer
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import (
    AutoParallel,
    Degrees,
    calibrate,
    get_group_size,
    get_rank,
    init,
    release,
    search_degrees,
    shard,
)
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.parallel.degrees import StepPrice
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.parallel.parameters.fusion import ALONE_BYTES
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.price import StepSpec, price
from msrun.runtime.sharding.layout import TensorLayout, build_mesh

SEARCH_LIMIT_S = 100.0
Batch = tuple[Tensor, Tensor]
Built = tuple[AutoParallel, Batch, float | None]
"""With the seconds of a step as it was priced."""
MODE = "dynamic_programming"
OPTIMIZER_STATES = 0
"""Plain SGD: the plans of all turns are in memory together."""


def perceptron() -> tuple[nn.Module, Batch]:
    """Weights that are large beside the batch."""
    return Perceptron(256, 2048, 2), (torch.randn(64, 256), torch.randint(0, 16, (64,)))


def transformer() -> tuple[nn.Module, Batch]:
    """Two blocks."""
    text = torch.randint(0, 1024, (8, 64))
    return Transformer(2, width=256, heads=8, vocabulary=1024), (text, text.roll(1, 1))


def resnet() -> tuple[nn.Module, Batch]:
    """ResNet-50 on small images."""
    return ResNet50(), (torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,)))


def mixtral() -> tuple[nn.Module, Batch]:
    """Two blocks with 8 experts each."""
    text = torch.randint(0, 512, (8, 32))
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_local_experts": 8}
    return Mixtral(**sizes), (text, text.clone())


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "mlp": perceptron,
    "transformer": transformer,
    "resnet": resnet,
    "mixtral": mixtral,
}


@dataclass(frozen=True)
class Uniform:
    """One way to cut all layers: their batch over `data` ranks, their weights over `model`."""

    data: int
    model: int
    is_stored_cut: bool

    def __str__(self) -> str:
        kinds = {"dp": self.data, "tp": self.model}
        words = " x ".join(f"{kind}{count}" for kind, count in kinds.items() if count > 1)
        return f"{words} hsdp" if self.is_stored_cut else words


def uniform_plans(ranks: int) -> list[Uniform]:
    """Return data parallel, tensor parallel of every degree, and both; and with parameters stored cut."""
    degrees = [2**power for power in range(ranks.bit_length())]
    plans = [Uniform(ranks // model, model, is_cut) for is_cut in (False, True) for model in degrees]
    return [plan for plan in plans if plan.data > 1 or not plan.is_stored_cut]


def cut(network: nn.Module, data: int, model: int) -> None:
    """Cut pairs of layers by columns and rows over `model` ranks, and the batch over `data`."""
    if model == 1:
        return
    if isinstance(network, ResNet50):
        for block in network.blocks:
            shard(block.reduce[0], ((data, 1, 1, 1), (model, 1, 1, 1)))
            shard(block.spread[0], ((data, model, 1, 1), (1, model, 1, 1)))
        return
    batch = (data, 1) if isinstance(network, Perceptron) else (data, 1, 1)
    columns = (batch, (model, 1))
    rows = ((*batch[:-1], model), (1, model))
    if isinstance(network, Transformer):
        for block in network.blocks:
            for layer in (block.query, block.key, block.value, block.gate, block.up):
                shard(layer, columns)
            for layer in (block.out, block.down):
                shard(layer, rows)
    elif isinstance(network, Mixtral):
        for block in network.model.model.layers:
            for layer in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
                shard(layer, columns)
            shard(block.self_attn.o_proj, rows)
    elif isinstance(network, Perceptron):
        for number, layer in enumerate(network.layers):
            shard(layer, rows if number % 2 else columns)


def build(name: str, plan: Uniform | None, profile: DeviceProfile) -> Built:
    """Return a network with a plan, the whole batch, and the seconds of a step of a uniform plan as it is priced.

    Args:
        plan: None searches.
    """
    torch.manual_seed(1)
    network, batch = NETWORKS[name]()
    if plan is None:
        step = AutoParallel(network, MODE).search(profile, optimizer_states=OPTIMIZER_STATES)
        return step.dataset_strategy("full_batch"), batch, None
    cut(network, plan.data, plan.model)
    step = AutoParallel(network).dataset_strategy("full_batch")
    if plan.is_stored_cut:
        return step.hsdp(threshold=0), batch, None
    return step, batch, price_of(network, batch, profile)


def price_of(network: nn.Module, batch: Batch, profile: DeviceProfile) -> float:
    """Return the seconds of a step of a network with the strategies that it has."""
    mesh = build_mesh(get_group_size())
    shapes = [tuple(each.shape) for each in batch]
    given = Constraints([TensorLayout.replicated(each.dim()) for each in batch])
    graph = capture(
        find_target(network),
        [*batch],
        {},
        input_shapes=shapes,
        parameter_shapes={},
        strategies=strategies_of(network),
    )
    step = StepSpec(optimizer_states=OPTIMIZER_STATES, alone_bytes=ALONE_BYTES)
    return price(graph, decide(graph, mesh, given), profile, step).seconds


def one_step(step: AutoParallel, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Return the seconds of one step, of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    optimizer.zero_grad()
    step(*batch).backward()
    optimizer.step()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


KINDS: tuple[Callable[[Degrees], bool], ...] = (
    lambda _: True,
    lambda degrees: degrees == Degrees(),
    lambda degrees: degrees == Degrees(shards_optimizer=True),
    lambda degrees: degrees == Degrees(copies=2),
    lambda degrees: degrees == Degrees(micro_batches=2),
    lambda degrees: degrees == Degrees(recomputes=True),
    lambda degrees: degrees.stages == 2,
    lambda degrees: degrees.stages == 4,
)
"""Which of the priced divisions are meant; the fastest of each kind is timed."""


def strategies(name: str, profile: DeviceProfile) -> dict[str, Callable[[], Built]]:
    """Return how the searched plan and every uniform one are built."""
    plans = [None, *uniform_plans(get_group_size())]
    return {"searched" if plan is None else str(plan): partial(build, name, plan, profile) for plan in plans}


def divisions(name: str, profile: DeviceProfile) -> dict[str, Callable[[], Built]]:
    """Return how a network is built with the division that is found, and with the fastest of other kinds."""
    torch.manual_seed(1)
    network, batch = NETWORKS[name]()
    found = search_degrees(
        network, *batch, device=profile, optimizer_states=OPTIMIZER_STATES, time_limit_s=SEARCH_LIMIT_S
    )

    def built(step: StepPrice) -> Built:
        torch.manual_seed(1)
        return found.apply(NETWORKS[name]()[0], step.degrees), batch, step.seconds

    firsts = {
        kind: next((step for step in found.priced if is_meant(step.degrees)), None) for kind, is_meant in KINDS.items()
    }
    return {f"{kind}: {step.degrees}": partial(built, step) for kind, step in firsts.items() if step is not None}


def main() -> None:
    """Build every plan that is legal, and take turns."""
    what, name, rounds, result = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    init()
    torch.set_num_threads(1)
    profile = calibrate()
    plans, times, priced = {}, {}, {}
    for word, build_plan in {"strategies": strategies, "degrees": divisions}[what](name, profile).items():
        step, batch, priced[word] = build_plan()
        optimizer = torch.optim.SGD(step.parameters(), lr=1e-3)
        try:
            one_step(step, optimizer, batch)
        except StrategyError as error:
            if get_rank() == 0:
                print(f"{name} {word}: {error}", file=sys.stderr)
            continue
        if priced[word] is None and step.plan.price is not None:
            priced[word] = step.plan.price.seconds
        one_step(step, optimizer, batch)
        plans[word], times[word] = (step, optimizer, batch), list[float]()
    for number in range(rounds):
        words = list(plans)
        for word in words[number % len(words) :] + words[: number % len(words)]:
            times[word].append(one_step(*plans[word]))
    if get_rank() == 0:
        found = {
            word: {"median_s": statistics.median(seconds), "least_s": min(seconds), "priced_s": priced[word]}
            for word, seconds in times.items()
        }
        result.write_text(json.dumps(found))
    release()


main()
