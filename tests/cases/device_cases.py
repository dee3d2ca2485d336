"""Networks on this rank's device, in every layout; tests/e2e/test_runtime_devices.py runs them beside one process."""

import shutil
from functools import partial
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    MicroBatchInterleaved,
    WithLoss,
    clip_grad_norm_,
    device,
    get_local_rank,
    get_rank,
    init_parameters,
    load_checkpoint,
    no_init_parameters,
    optim,
    recompute,
    save_checkpoint,
    shard,
)
from msrun.runtime.nn import random_calls

STEPS = 4
ROWS, LENGTH, WIDTH, HEADS = 8, 12, 16, 2


class Net(nn.Module):
    """A block of attention, with dropout inside and behind it, and one of linear layers."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, 4)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        x = self.norm(x + F.dropout(self.out(seen.transpose(1, 2).flatten(2)), 0.1))
        return self.b(self.a(x).relu())


def whole_batch(network):
    return AutoParallel(network).dataset_strategy("full_batch")


def hsdp(level, network):
    return whole_batch(network).hsdp(threshold=0, optimizer_level=level)


def tensor_parallel(network):
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    net = network.get_submodule("network")
    shard(net.get_submodule("a"), ((1, 1, 1), (ranks, 1), (ranks,)))
    shard(net.get_submodule("b"), ((1, 1, ranks), (1, ranks), (1,)))
    return whole_batch(network)


def recomputed(network):
    recompute(network.get_submodule("network.a"))
    return hsdp("level3", network)


WAYS = {
    "data parallel": whole_batch,
    "without capture": lambda net: AutoParallel(net, parallel_mode="data_parallel"),
    **{level: partial(hsdp, level) for level in ("level1", "level2", "level3")},
    "tensor parallel": tensor_parallel,
    "copies": lambda net: whole_batch(MicroBatchInterleaved(net, 2)),
    "accumulation": lambda net: hsdp("level2", GradAccumulation(net, 2)),
    "recomputed": recomputed,
    "compiled tensor parallel": lambda net: tensor_parallel(net).compile("aot_eager"),
}


def network():
    """Return a network whose parameters have no values yet."""
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    with no_init_parameters():
        net = WithLoss(Net(), F.mse_loss)
    torch.set_default_dtype(torch.float32)
    return net


def batches(*, own_rows=False):
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(STEPS):
        x, y = (torch.rand(ROWS, LENGTH, n, generator=draw, dtype=torch.float64).to(device()) for n in (WIDTH, 4))
        if own_rows and dist.is_initialized():
            x, y = (value.chunk(dist.get_world_size())[get_rank()] for value in (x, y))
        found.append((x, y))
    return found


def train(way, net, steps=slice(STEPS), *, norms=None):
    """Return the losses of some steps; gradients are clipped where `norms` is given, which gets their norms."""
    torch.manual_seed(11)
    parallel = WAYS[way](net)
    optimizer = optim.AdamW(net.parameters(), 0.01)
    losses = []
    for x, y in batches(own_rows=way == "without capture")[steps]:
        loss = parallel(x, y)
        loss.backward()
        if norms is not None:
            norms.append(float(clip_grad_norm_(net.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert {parameter.device for parameter in net.parameters()} == {device()}, "weights are made on this rank's device"
    return losses


def losses_of(way):
    return {"losses": train(way, network())}


def blocks_of_attention():
    whole, random_calls.BLOCK_ELEMENTS = random_calls.BLOCK_ELEMENTS, 5 * ROWS * HEADS * LENGTH
    try:
        return {"losses": train("data parallel", network())}
    finally:
        random_calls.BLOCK_ELEMENTS = whole


def clipped(way):
    norms = []
    losses = train(way, network(), norms=norms)
    return {"losses": losses, "norms": norms}


def saved_and_loaded():
    """Save what two steps of level3 have made, and load it into a network that no step has seen."""
    path = Path(gettempdir()) / "msrun_device_cases.ckpt"
    first = network()
    before = train("level3", first, slice(2))
    save_checkpoint(first, str(path))
    second = init_parameters(network())
    load_checkpoint(str(path), second)
    whole = get_model_state_dict(second, options=StateDictOptions(full_state_dict=True))
    if get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
    return {"losses": before, "norms": [float(value.norm()) for _, value in sorted(whole.items())]}


def joined():
    own = device()
    total = torch.ones(3, device=own)
    if dist.is_initialized():
        dist.all_reduce(total)
    return {"kind": own.type, "index": own.index, "local_rank": get_local_rank(), "sum": total.tolist()}


CASES = {
    "init": joined,
    **{f"losses of {way}": partial(losses_of, way) for way in WAYS},
    "attention in blocks": blocks_of_attention,
    **{f"clipping of {way}": partial(clipped, way) for way in ("level2", "tensor parallel")},
    "checkpoint": saved_and_loaded,
}


def cases(world_size):
    del world_size
    return CASES
