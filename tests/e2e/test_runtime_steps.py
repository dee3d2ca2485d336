"""The equality law: one training step in all its ways gives the numbers of one process, in as few messages as told."""

import contextlib
import ctypes
import functools
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from local_parts import local
from on_ranks import on_ranks
from torch import nn
from ways import Way, train_beside_one_process, weights_late

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    MicroBatchInterleaved,
    WithLoss,
    get_rank,
    no_init_parameters,
    optim,
    recompute,
    set_comm_fusion,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.executor import AHEAD, Executor
from msrun.runtime.execute.gradients import GatheredGroup
from msrun.runtime.execute.segment_runner import SegmentRunner
from msrun.runtime.execute.transfers import traffic

RANKS = 4
STEPS = 3
GLOBAL_BATCH = 32
WIDTH, HIDDEN, BLOCKS, FEATURES, CLASSES = 16, 64, 3, 12, 8

UP, DOWN = ((1, 1), (4, 1), (4,)), ((1, 4), (1, 4))
MEGATRON = {f"blocks.{i}.{name}": tuples for i in range(BLOCKS) for name, tuples in (("up", UP), ("down", DOWN))}
MIXED = {
    f"blocks.{i}.{name}": tuples
    for i in range(BLOCKS)
    for name, tuples in (("up", ((2, 1), (2, 1), (2,))), ("down", ((2, 2), (1, 2))))
}


M2, M4, C2 = ("micro", 2), ("micro", 4), ("copies", 2)
EVERY_BLOCK = {f"blocks.{i}": {} for i in range(BLOCKS)}
KEEPS_COLLECTIVES = {path: {"mp_comm_recompute": False} for path in EVERY_BLOCK}
GATHERS_AGAIN = {path: {"parallel_optimizer_comm_recompute": True} for path in EVERY_BLOCK}
LINEAR = torch.ops.aten.linear
SAVES = {
    "blocks.0": {"save": [LINEAR]},
    "blocks.1": {"save": lambda operator: operator in (LINEAR.default,)},
    "blocks.2": {"save": []},
}


LOSS = 2
"""Messages of a cross-entropy: the number of labels that count, which leaves first, and the sum."""

ONE_MESSAGE = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1 + LOSS}
"""hsdp: the cut weights in one message each way, the whole parameters in one, and the loss."""
SOME = {"threshold": 4}
"""Cuts the weights of the blocks, of 8 KB in float64."""


def nothing_fused(step):
    return step.comm_fusion({"openstate": False})


CASES = [
    Way("plain", calls={"all_reduce": 1 + LOSS}),
    Way("plain-step-function", calls={"all_reduce": 1 + LOSS}, form="step"),
    Way("batch-cut-in-two", dataset=((2, 1), (2,))),
    Way("level1", "level1", (), ONE_MESSAGE, **SOME),
    Way("level2", "level2", (), ONE_MESSAGE, **SOME),
    Way("level3", "level3", (), {**ONE_MESSAGE, "all_gather": 2}, **SOME),
    Way("level1-shard-size-2", "level1", (), {**ONE_MESSAGE, "all_reduce": 2 + LOSS}, shard_size=2, **SOME),
    Way("level1-full-batch", "level1", (), ONE_MESSAGE, dataset="full_batch", **SOME),
    Way("level3-step-function", "level3", (), {**ONE_MESSAGE, "all_gather": 2}, form="step", **SOME),
    Way("level1-adam", "level1", (), ONE_MESSAGE, optimizer="adam", **SOME),
    Way("level1-torch-adamw", "level1", (), ONE_MESSAGE, optimizer="torch-adamw", deferred=True, **SOME),
    Way(
        "never-fused",
        "level1",
        (),
        {"all_gather": 6, "reduce_scatter": 6, "all_reduce": 7 + LOSS},
        fusion={"first": 0, "blocks": 0, "last": 0},
        **SOME,
    ),
    Way(
        "fused-in-two-messages",
        "level1",
        (),
        {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2 + LOSS},
        fusion={"first": 2, "blocks.0": 1, "blocks.1": 2, "blocks.2": 2, "last": 2},
        **SOME,
    ),
    Way("four-copies", None, (("copies", 4),), {"all_reduce": 1 + 4 * LOSS}),
    Way("copies-level1", "level1", (C2,), {**ONE_MESSAGE, "all_reduce": 1 + 2 * LOSS}, **SOME),
    Way("copies-sum-level3", "level3", (C2,), compat="mindspore"),
    Way("tensor-parallel-weights-late", strategies=MEGATRON, dataset="full_batch", configure=weights_late),
    Way("mixed-weights-late-level3", "level3", (C2,), strategies=MIXED, configure=weights_late),
    # accumulation: one reduction at the end, or one per micro batch at level2 and level3
    Way("accumulation", None, (M4,), {"all_reduce": 4 * LOSS + 1}),
    Way("accumulation-float32", None, (M4,), {"all_reduce": 4 * LOSS + 1}, dtype="float32"),
    Way("accumulation-level1", "level1", (M4,), {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 4 * LOSS}),
    Way("accumulation-level2", "level2", (M4,), {"all_gather": 1, "reduce_scatter": 4, "all_reduce": 4 * LOSS}),
    Way("accumulation-level3", "level3", (M4,), {"all_gather": 8, "reduce_scatter": 4, "all_reduce": 4 * LOSS}),
    Way("accumulation-scaled", "level2", (M2,), scaled=True),
    Way("accumulation-of-copies-sum-level2", "level2", (M2, C2), compat="mindspore", form="step"),
    Way("accumulation-mixed-level3", "level3", (M2, C2), strategies=MIXED, dataset="full_batch"),
    # messages: one per parameter, or as the numbers say
    Way(
        "nothing-fused",
        None,
        (),
        {"all_reduce": 13 + LOSS},
        configure=nothing_fused,
    ),
    Way(
        "all-reduces-by-index",
        None,
        (M2,),
        {"all_reduce": 3 + 2 * LOSS},
        configure=lambda step: step.comm_fusion({"allreduce": {"mode": "index", "config": [3, 5]}}),
    ),
    Way(
        "nothing-fused-level3-accumulation",
        "level3",
        (M2,),
        {"all_gather": 2 * 2 * 13, "reduce_scatter": 2 * 13, "all_reduce": 2 * LOSS},
        configure=nothing_fused,
    ),
    # copies: any number, and inside a step function
    Way("three-parts-of-copies", None, (C2, C2), strategies=MEGATRON, dataset="full_batch"),
    Way("fresh-closures", "level1", (C2,), form="fresh closures"),
    # recompute; a Megatron block has one all-reduce forward and, through its residual, one backward
    Way("recompute", None, (), {"all_reduce": 1 + LOSS}, recompute=EVERY_BLOCK),
    Way("recompute-one-layer-with-copies", None, (C2,), recompute={"blocks.1.up": {}}),
    Way("recompute-keeps-collectives", strategies=MEGATRON, dataset="full_batch", recompute=KEEPS_COLLECTIVES),
    Way("recompute-saves-linear", "level3", (M2, C2), strategies=MIXED, recompute=SAVES),
    Way(
        "recompute-gathers-again",
        "level1",
        (C2,),
        {"all_gather": 3, "reduce_scatter": 2, "all_reduce": 2 * LOSS},
        recompute=GATHERS_AGAIN,
    ),
    Way("recompute-everything", "level3", recompute={"": {}}),
    Way("recompute-level3-accumulation", "level3", (M2, C2), strategies=MIXED, recompute=EVERY_BLOCK),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def make_network():
    torch.manual_seed(1)
    return Network()


def batches(steps):
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        images = torch.randn(GLOBAL_BATCH, FEATURES, generator=generator, dtype=torch.float64)
        yield images, torch.randint(0, CLASSES, (GLOBAL_BATCH,), generator=generator)


LEVELS = ("level1", "level2", "level3")


on_four = on_ranks(RANKS, dtype="float64")
slow_on_four = on_ranks(RANKS, dtype="float64", slow=True)


BY_NAME = {case.name: case for case in CASES}


@functools.cache
def trained(name):
    return train_beside_one_process(BY_NAME[name], Network, batches(STEPS))


@on_four
@pytest.mark.parametrize("case", slow_but(["recompute-saves-linear"], CASES))
def test_losses_gradients_weights_and_number_of_messages_are_those_of_one_process(case):
    """A network is captured once, however often it is called."""
    found = trained(case.name)
    step = found.step
    assert case.calls is None or found.moved["calls"] == case.calls
    assert step.plan.to_json()["traffic"] == found.moved
    assert len(step.engine.calls) == 1
    text, adds_up = step.plan.explain(), case.compat == "mindspore"
    assert ("added up" in text, "means over the global batch" in text) == (adds_up, not adds_up)


@slow_on_four
@pytest.mark.parametrize(("name", "parts"), [("level1", 4), ("level3", 4), ("level1-shard-size-2", 2)])
def test_cut_parameters_take_their_share_and_small_ones_stay_whole(name, parts):
    plan = trained(name).step.plan
    for parameter in plan.parameters:
        is_cut = "blocks" in parameter.name and parameter.name.endswith("weight")
        share = parts if is_cut else 1
        assert (parameter.shard_ranks, parameter.local_bytes * share) == (share, parameter.global_bytes)
        assert parameter.reason.endswith(f"rows cut over {parts} ranks" if is_cut else "is under the threshold of 4 KB")
    lines = plan.explain().splitlines()
    (weight,) = [line for line in lines if line.split()[:1] == ["blocks.0.up.weight"]]
    assert f"64x16 -> {64 // parts}x16" in weight and weight.endswith(f"rows cut over {parts} ranks")
    assert lines[0].startswith(f"4 ranks as 2 x 2, semi_auto, hsdp {name.partition('-')[0]}")


def whole_batch():
    return next(batches(1))


def own_batch():
    return tuple(tensor.chunk(RANKS)[get_rank()] for tensor in whole_batch())


@contextlib.contextmanager
def looking(owner, name, look):
    """Call `look(when, arguments)` before and after a method; the first argument is its object."""
    method = getattr(owner, name)

    def call(own, *args, **kwargs):
        look(f"before {name}", (own, *args))
        result = method(own, *args, **kwargs)
        look(f"after {name}", (own, *args))
        return result

    with mock.patch.object(owner, name, call):
        yield


def by_layers(network):
    for number, layer in enumerate([network.first, *network.blocks, network.last]):
        set_comm_fusion(layer, number + 1)
    return network


def size_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in map(local, tensors))


def held_bytes(gathered):
    """Return the bytes of a group's parts that operators read."""
    return sum({s._cdata: s.nbytes() for s in (leaf.untyped_storage() for leaf in gathered.leaves.values())}.values())


@slow_on_four
def test_bytes_on_a_rank_are_the_formula_of_the_level():
    """Weights, state, gradients between micro batches, gathered at most."""
    batch = own_batch()
    for level in LEVELS:
        network = by_layers(make_network())
        whole = size_of(network.parameters())
        layers = [size_of(layer.parameters()) for layer in (network.first, *network.blocks, network.last)]
        optimizer = optim.Momentum(network.parameters(), 0.1, 0.9)
        call = GradAccumulation(WithLoss(network, F.cross_entropy), 2)
        step = AutoParallel(call).hsdp(threshold=0, optimizer_level=level)
        step(*batch).backward()
        optimizer.step()
        gathered, gradients, on_their_way = [], [], {}

        def look(when, args, gathered=gathered, gradients=gradients, on_their_way=on_their_way):
            parameters = args[1].parameters
            gathered.append(sum(map(held_bytes, parameters.gathered)) + sum(on_their_way.values()))
            if when == "after backward":
                grads = [leaf.grad for each in parameters.gathered for leaf in each.leaves.values()]
                for total in parameters.sums:
                    total.settle()
                gradients.append(size_of(g for g in (*grads, *(t.total for t in parameters.sums)) if g is not None))

        def look_at_gather(when, args, on_their_way=on_their_way):
            if when == "after wait":
                on_their_way.pop(id(args[0]), None)
            elif when == "before start_gather" and not held_bytes(args[0]):
                on_their_way[id(args[0])] = RANKS * size_of(member.part for member in args[0].group.members)

        with (
            looking(SegmentRunner, "run", look),
            looking(Executor, "_wait_for_parameters", look),
            looking(Executor, "backward", look),
            looking(GatheredGroup, "start_gather", look_at_gather),
            looking(GatheredGroup, "wait", look_at_gather),
        ):
            step(*batch)
        assert size_of(network.parameters()) == whole // RANKS
        state = size_of(v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
        assert state == whole // RANKS
        assert max(gradients) == (whole if level == "level1" else whole // RANKS)
        windows = [sum(layers[i : i + 1 + AHEAD]) for i in range(len(layers))]
        assert max(gathered) == (max(windows) if level == "level3" else whole)


def kept_bytes(step, batch):
    """Return the bytes of storages that a forward call leaves behind for its backward call, per copy."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
        loss = step(*batch)
    held = loss.grad_fn.step
    for copy in held.copies:
        arrived = [late.wait() for late in copy.arriving.values()]
        saved += [*copy.values.values(), *arrived, *(value for values in copy.written.values() for value in values)]
    given = [leaf for gathered in held.parameters.gathered for leaf in gathered.leaves.values()]
    others = {tensor.untyped_storage()._cdata for tensor in [*given, *batch]}
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    loss.backward()
    return sum(size for key, size in storages.items() if key not in others) // len(held.copies)


ACTIVATION_CASES = {
    "plain": {},
    "blocks": {"spec": {}},
    "tensor parallel": {"tp": True},
    "tensor parallel, blocks": {"tp": True, "spec": {}},
    "tensor parallel, blocks, collectives kept": {"tp": True, "spec": {"mp_comm_recompute": False}},
    "copies, blocks": {"copies": 2, "spec": {}},
}


@functools.cache
def activations():
    """Return the measured and the estimated bytes that one copy keeps."""
    found = {}
    for name, given in ACTIVATION_CASES.items():
        step = activation_step(given)
        data = whole_batch() if given.get("tp") else own_batch()
        step(*data).backward()
        found[name] = {"kept": kept_bytes(step, data), "estimate": step.activations}
    return found


def activation_step(given):
    network = make_network()
    for block in network.blocks:
        if given.get("tp"):
            shard(block.up, ((1, 1), (4, 1), (4,)))
            shard(block.down, ((1, 4), (1, 4)))
        if "spec" in given:
            recompute(block, **given["spec"])
    call = WithLoss(network, F.cross_entropy)
    call = MicroBatchInterleaved(call, given["copies"]) if "copies" in given else call
    return AutoParallel(call).dataset_strategy("full_batch" if given.get("tp") else "data_parallel")


@slow_on_four
def test_limit_recomputes_as_few_blocks_as_it_takes():
    batch = own_batch()
    most, least = (activations()[name]["estimate"].peak_bytes for name in ("plain", "blocks"))
    of_one_block = batch[0].shape[0] * HIDDEN * 8
    regions = []
    for limit in (most, least + of_one_block, least):
        step = activation_step({}).recompute("auto", memory_limit_mb=limit / 2**20)
        step(*batch).backward()
        regions.append([region.path for region in step.engine.calls[0].compiled.regions])
        assert step.activations.peak_bytes <= limit
    assert [len(each) for each in regions] == [0, 2, 3]
    assert regions[1] == ["network.blocks.0", "network.blocks.1"]
    with pytest.raises(StrategyError, match=r"activations of 0.02 MB on this rank cannot be brought under 0.00 MB"):
        activation_step({}).recompute("auto", memory_limit_mb=1 / 2**20)(*batch)


class WithLogits(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x, y):
        logits = self.network(x)
        return F.cross_entropy(logits, y), logits


NESTINGS = {
    "alone": lambda net: net,
    "micro of copies": lambda net: GradAccumulation(MicroBatchInterleaved(net, 2), 4),
    "copies of micro": lambda net: MicroBatchInterleaved(GradAccumulation(net, 4), 2),
}


@functools.cache
def results_and_gradient(nesting):
    network = NESTINGS[nesting](WithLogits(make_network()))
    step = AutoParallel(lambda x, y: value_and_grad(network, 0, has_aux=True)(x, y))
    (_, logits), gradient = step(*own_batch())
    return network, logits, gradient


@slow_on_four
@pytest.mark.parametrize("nesting", NESTINGS)
def test_further_results_and_gradients_of_inputs_come_back_in_the_order_of_rows(nesting):
    _, wanted, wanted_gradient = results_and_gradient("alone")
    network, logits, gradient = results_and_gradient(nesting)
    traffic.reset()
    with torch.no_grad():
        again = AutoParallel(network)(*own_batch())[1]
    assert dict(traffic.calls) == {"all_reduce": LOSS if nesting == "alone" else 8 * LOSS}
    for found in (logits, again):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-8)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-10, atol=1e-8)


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Large(nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@slow_on_four
def test_estimate_of_activations_is_what_a_step_really_keeps():
    for name, found in activations().items():
        assert found["kept"] == found["estimate"].kept_bytes, name


@on_ranks(3, slow=True)
def test_new_shape_on_one_rank_is_refused_on_all(ranks):
    network = WithLoss(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), F.cross_entropy)
    step = AutoParallel(network)
    for rows in (4, 4, 2, 4):  # all ranks together: captured again
        step(torch.ones(rows, 8), torch.zeros(rows, dtype=torch.long)).backward()
    rows = 3 if ranks.rank == 2 else 4
    with pytest.raises(
        CaptureError, match=r"^rank 2 got a batch of 3x8, 3, which no rank had before, while other ranks"
    ):
        step(torch.ones(rows, 8), torch.zeros(rows, dtype=torch.long)).backward()


@on_ranks(RANKS, slow=True)
@pytest.mark.parametrize("way", ["level3", "tensor parallel"])
def test_network_larger_than_a_rank_is_never_whole_on_it(way):
    """Most at a time: parts and their gradients, the gathered layers, and messages of gradients with their sources."""
    layers, width = 32, 512
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: memory is given back at once
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS") - status("RssShmem")  # the memory that carries messages belongs to all ranks together
    with no_init_parameters():
        network = Large(layers, width)
    built = status("VmHWM") - status("RssShmem") - before
    if way == "tensor parallel":
        for number, layer in enumerate(network.layers):
            shard(layer, ((1, 1), (RANKS, 1), (RANKS,)) if number % 2 == 0 else ((1, RANKS), (1, RANKS), (1,)))
    step = AutoParallel(WithLoss(network, F.mse_loss)).dataset_strategy("full_batch")
    if way == "level3":
        step.hsdp(optimizer_level="level3").comm_fusion({"openstate": False})
    step(torch.ones(RANKS, width), torch.ones(RANKS, width)).backward()
    stored, whole = size_of(network.parameters()), step.plan.global_bytes
    layer = whole // layers
    assert stored < whole // RANKS + layer  # the biases of level3 are whole
    assert built < layer
    in_use = 2 * stored + (1 + AHEAD + 3 * (1 + AHEAD)) * layer
    assert status("VmHWM") - status("RssShmem") - before < in_use < whole
