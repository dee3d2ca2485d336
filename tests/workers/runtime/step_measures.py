"""Measures single steps: what is issued when, and what is held in memory. Used by steps.py."""

import torch
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from only_cases import is_asked
from step_cases import BLOCKS, HIDDEN

from msrun.errors import StrategyError
from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    MicroBatchInterleaved,
    WithLoss,
    optim,
    recompute,
    set_comm_fusion,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.executor import Executor
from msrun.runtime.execute.gradients import GradientGroup
from msrun.runtime.execute.parameters import GatheredGroup
from msrun.runtime.execute.segment_runner import SegmentRunner
from msrun.runtime.execute.transfers import traffic

LEVELS = ("level1", "level2", "level3")


class Watched:
    """Replaces methods for as long as the context lasts; `look(name, self, args)` is called before and after each."""

    def __init__(self, methods, look):
        self._methods = methods
        self._look = look

    def __enter__(self):
        self._old = [(owner, name, getattr(owner, name)) for owner, name in self._methods]
        for owner, name, old in self._old:
            setattr(owner, name, self._wrap(name, old))

    def __exit__(self, *_):
        for owner, name, old in self._old:
            setattr(owner, name, old)

    def _wrap(self, name, old):
        def call(own, *args, **kwargs):
            self._look(f"before {name}", own, args)
            result = old(own, *args, **kwargs)
            self._look(f"after {name}", own, args)
            return result

        return call


def order_of_issue(make, batch):
    """Return the events of one level3 step in which every layer's parameters travel alone."""
    network = by_layers(make(torch.float64))
    step = AutoParallel(WithLoss(network, F.cross_entropy)).hsdp(threshold=0, optimizer_level="level3")
    step(*batch).backward()
    compiled = step._captured[0].compiled
    groups, gradients = compiled.executor.groups, compiled.executor.gradient_groups
    events, was_idle = [], {}

    def look(name, own, args):
        if name == "before start_gather":
            was_idle[id(own)] = own._future is None
        elif name == "after start_gather" and was_idle[id(own)] and own._future is not None:
            events.append(("gather", groups.index(own.group)))
        elif name == "after free":
            events.append(("free", groups.index(own.group)))
        elif name == "before start":
            events.append(("reduce", gradients.index(own)))
        elif name == "before run" and not own.segments[args[2]].is_empty:
            events.append(("forward", args[2]))
        elif name == "before run_backward" and not own.segments[args[2]].is_empty:
            events.append(("backward", args[2]))

    methods = [(GatheredGroup, "start_gather"), (GatheredGroup, "free"), (GradientGroup, "start")]
    with Watched([*methods, (SegmentRunner, "run"), (SegmentRunner, "run_backward")], look):
        step(*batch).backward()
    reads = {index: segment.groups for index, segment in enumerate(compiled.segments) if segment.groups}
    return {"program": step.plan.program, "events": events, "reads": reads, "groups": len(groups)}


def by_layers(network):
    for number, layer in enumerate([network.first, *network.blocks, network.last]):
        set_comm_fusion(layer, number + 1)
    return network


def size_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in map(local, tensors))


def memory_of_levels(make, batch):
    """Return bytes on this rank at every level: weights, state, gradients between micro batches, gathered at most."""
    found = {}
    for level in LEVELS:
        network = by_layers(make(torch.float64))
        whole = size_of(network.parameters())
        layers = [size_of(layer.parameters()) for layer in (network.first, *network.blocks, network.last)]
        optimizer = optim.Momentum(network.parameters(), 0.1, 0.9)
        call = GradAccumulation(WithLoss(network, F.cross_entropy), 2)
        step = AutoParallel(call).hsdp(threshold=0, optimizer_level=level)
        step(*batch).backward()
        optimizer.step()
        gathered, gradients = [], []

        def look(name, _own, args, gathered=gathered, gradients=gradients):
            gathered.append(args[0].parameters.gathered_bytes())
            if name == "after backward":
                gradients.append(args[0].parameters.gradient_bytes())

        with Watched([(SegmentRunner, "run"), (Executor, "_wait_for_parameters"), (Executor, "backward")], look):
            step(*batch)
        found[level] = {
            "whole": whole,
            "layers": layers,
            "weights": size_of(network.parameters()),
            "state": size_of(v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)),
            "gradients": gradients[0],
            "gathered": max(gathered),
        }
    return found


def weights_of_levels(make, batch):
    """Return whether fp32 weights after two steps are bit-equal between levels, without and with micro batches."""
    weights = {}
    for level in LEVELS:
        for parts in (1, 2):
            network = make(torch.float32)
            optimizer = optim.Momentum(network.parameters(), 0.1, 0.9)
            call = GradAccumulation(WithLoss(network, F.cross_entropy), parts)
            step = AutoParallel(call).hsdp(threshold=0, optimizer_level=level)
            for _ in range(2):
                step(batch[0].float(), batch[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
            weights[level, parts] = [local(parameter).clone() for parameter in network.parameters()]

    def equal(one, other):
        return all(torch.equal(a, b) for a, b in zip(weights[one], weights[other], strict=True))

    def difference(one, other):
        return max(float((a - b).abs().max()) for a, b in zip(weights[one], weights[other], strict=True))

    return {
        "levels 1 and 2": equal(("level1", 1), ("level2", 1)),
        "levels 1 and 3": equal(("level1", 1), ("level3", 1)),
        "levels 2 and 3, two micro batches": equal(("level2", 2), ("level3", 2)),
        "levels 1 and 2, two micro batches": difference(("level1", 2), ("level2", 2)) <= 1e-7,
    }


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


def activations(make, batch, whole_batch):
    """Return the measured and the estimated bytes that one copy keeps, and what limits make of them."""
    found, steps = {}, {}
    for name, given in ACTIVATION_CASES.items():
        steps[name] = step = activation_step(make, given)
        data = whole_batch if given.get("tp") else batch
        step(*data).backward()
        estimate = step.activations
        found[name] = {"kept": kept_bytes(step, data), "estimate": estimate.kept_bytes, "again": estimate.again_bytes}
    return found, limited(make, batch, steps["plain"].activations, steps["blocks"].activations)


def activation_step(make, given):
    network = make(torch.float64)
    for block in network.blocks:
        if given.get("tp"):
            shard(block.up, ((1, 1), (4, 1), (4,)))
            shard(block.down, ((1, 4), (1, 4)))
        if "spec" in given:
            recompute(block, **given["spec"])
    call = WithLoss(network, F.cross_entropy)
    call = MicroBatchInterleaved(call, given["copies"]) if "copies" in given else call
    return AutoParallel(call).dataset_strategy("full_batch" if given.get("tp") else "data_parallel")


def limited(make, batch, plain, every):
    """Return how many blocks are recomputed under falling limits, and the refusal of one that is too low."""
    most, least = plain.peak_bytes, every.peak_bytes
    found = {"most": most, "least": least, "chosen": []}
    of_one_block = batch[0].shape[0] * HIDDEN * 8
    for bytes_ in (most, least + of_one_block, least):
        step = activation_step(make, {}).recompute("auto", memory_limit_mb=bytes_ / 2**20)
        step(*batch).backward()
        compiled = step._captured[0].compiled
        peak = step.activations.peak_bytes
        found["chosen"].append({"limit": bytes_, "peak": peak, "regions": [r.path for r in compiled.regions]})
    try:
        activation_step(make, {}).recompute("auto", memory_limit_mb=1 / 2**20)(*batch)
    except StrategyError as error:
        found["refusal"] = str(error)
    return found


def results_and_inputs(make, batch):
    """Return whether results that are not scalars and gradients of inputs come back in the order of the rows."""

    class WithLogits(torch.nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, x, y):
            logits = self.network(x)
            return F.cross_entropy(logits, y), logits

    x, y = batch
    wanted = None
    found = {}
    for name, wrap in {
        "alone": lambda n: n,
        "micro of copies": lambda n: GradAccumulation(MicroBatchInterleaved(n, 2), 4),
        "copies of micro": lambda n: MicroBatchInterleaved(GradAccumulation(n, 4), 2),
    }.items():
        network = wrap(WithLogits(make(torch.float64)))
        step = AutoParallel(value_and_grad_step(network))
        (_, logits), gradient = step(x, y)
        traffic.reset()
        with torch.no_grad():
            again = AutoParallel(network)(x, y)[1]
        wanted = wanted or (logits, gradient)
        found[name] = {
            "logits": bool(torch.allclose(logits, wanted[0], rtol=1e-12)),
            "gradient": bool(torch.allclose(gradient, wanted[1], rtol=1e-10)),
            "without gradient": bool(torch.allclose(again, wanted[0], rtol=1e-12)),
            "calls without gradient": dict(traffic.calls),
        }
    return found


def value_and_grad_step(network):
    return lambda x, y: value_and_grad(network, 0, has_aux=True)(x, y)


def measure(make, batch, whole_batch):
    """Return everything that is asked for."""
    found = {"blocks": BLOCKS}
    if is_asked("activations"):
        found["activations"], found["limited"] = activations(make, batch, whole_batch)
    measures = {
        "order": order_of_issue,
        "memory": memory_of_levels,
        "levels": weights_of_levels,
        "results": results_and_inputs,
    }
    return found | {name: run(make, batch) for name, run in measures.items() if is_asked(name)}
