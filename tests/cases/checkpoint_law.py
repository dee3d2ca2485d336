"""Writes checkpoints in several layouts and goes on from those of other jobs; every rank tells what it found.

usage: checkpoint_law.py FOLDER RESULT.json write|read [LAYOUT...]
write: each layout trains HALF steps; its checkpoint goes to FOLDER/checkpoints, its strategy file to FOLDER/strategies.
read: each layout goes on from every checkpoint in FOLDER/checkpoints.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.runtime import (
    AutoParallel,
    Pipeline,
    WithLoss,
    get_group_size,
    get_rank,
    init,
    load_checkpoint,
    load_distributed_checkpoint,
    load_param_into_net,
    no_init_parameters,
    release,
    reset_auto_parallel_context,
    save_checkpoint,
    set_auto_parallel_context,
    shard,
    transform_checkpoints,
)
from msrun.runtime.checkpoint.reader import open_checkpoint

HALF, STEPS, BATCH = 2, 4, 16
LAYOUTS = ("data-parallel", "level1", "level3", "tensor", "pipeline", "mixed")
FORMS = {
    "file": {"integrated_save": True},
    "directory": {"integrated_save": False},
    "apart": {"integrated_save": False},
    "file-beside": {"integrated_save": True, "async_save": True},
    "directory-beside": {"integrated_save": False, "async_save": True},
    "apart-beside": {"integrated_save": False, "async_save": True},
}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(8, 16)
        self.layer2 = nn.Linear(16, 16)
        self.layer3 = nn.Linear(16, 8)
        self.factor = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("scale", torch.full((2,), 0.5))

    def forward(self, x):
        return self.layer3(torch.tanh(self.layer2(torch.tanh(self.layer1(x))))) * self.scale[0] * self.factor


class Run:
    """A network in one layout, with its optimizer."""

    def __init__(self, layout, seed):
        self.layout, size = layout, get_group_size()
        torch.manual_seed(seed)
        if layout == "mixed":
            with no_init_parameters():
                self.network = Network()
                self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-2)
        else:
            self.network = Network()
            self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-2)
        if layout in ("tensor", "mixed") and size > 1:
            parts = size if layout == "tensor" else 2
            shard(self.network.layer1, ((1, 1), (parts, 1), (parts,)))
            shard(self.network.layer2, ((1, parts), (1, parts)))
        whole = WithLoss(self.network, F.cross_entropy)
        if layout == "pipeline" and size > 1:
            self.step = AutoParallel(Pipeline(whole, 2)).pipeline(2, "zbv" if size > 2 else "1f1b")
        elif layout in ("data-parallel", "level3"):
            self.step = AutoParallel(whole, "data_parallel")
        else:
            self.step = AutoParallel(whole)
        if layout in ("level1", "level3", "mixed"):
            self.step.hsdp(threshold=0, optimizer_level="level3" if layout == "level3" else "level1")

    def train(self, first, last):
        losses = []
        size = get_group_size() // 2 if self.layout == "pipeline" and get_group_size() > 1 else get_group_size()
        for number in range(first, last):
            images, labels = (tensor.chunk(size)[get_rank() % size] for tensor in batch(number))
            loss = self.step(images, labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, 8, generator=generator), torch.randint(0, 8, (BATCH,), generator=generator)


def serial():
    """Losses of one process, and its weights and moments after HALF steps."""
    torch.manual_seed(1)
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    losses, tensors = [], {}
    for number in range(STEPS):
        if number == HALF:
            tensors = {("model", name): value.clone() for name, value in network.state_dict().items()}
            for name, parameter in network.named_parameters():
                for key in ("exp_avg", "exp_avg_sq") if parameter.dim() else ():  # a number is no tensor there
                    tensors["optimizer", name, key] = optimizer.state[parameter][key].clone()
        images, labels = batch(number)
        loss = F.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, tensors


def path_of(folder, form):
    """Return the path that this rank gives."""
    return folder / f"rank_{get_rank()}" / "a.ckpt" if form.startswith("apart") else folder / "a.ckpt"


def write(folder, layouts):
    losses = {}
    for layout in layouts:
        form = list(FORMS)[(LAYOUTS.index(layout) + get_group_size()) % len(FORMS)]
        name = f"{layout}-{get_group_size()}"
        set_auto_parallel_context(strategy_ckpt_save_file=folder / "strategies" / f"{name}.json")
        run = Run(layout, seed=1)
        reset_auto_parallel_context()
        losses[name] = run.train(0, HALF)
        path = path_of(folder / "checkpoints" / name, form)
        save_checkpoint(run.network, path, run.optimizer, step_num=HALF, **FORMS[form])
        losses[name] += run.train(HALF, STEPS)
    return {"losses": losses}


def read(folder, layouts, *, others_alone=False):
    right, tensors = serial()
    found = {}
    for layout in layouts:
        run = Run(layout, seed=2)
        for number, source in enumerate(sorted((folder / "checkpoints").iterdir())):
            if others_alone and source.name == f"{layout}-{get_group_size()}":
                continue
            found[f"{source.name} to {layout}"] = go_on(folder, source, run, number, right, tensors)
    return {"right": right, "pairs": found}


def go_on(folder, source, run, number, right, tensors):
    """Go on from one checkpoint by each of the ways in, and write it again."""
    first = source / "a.ckpt" if (source / "a.ckpt").exists() else source / "rank_0" / "a.ckpt"
    losses = {}
    assert load_checkpoint(first, run.network, run.optimizer)["step_num"] == HALF
    losses["load_checkpoint"] = run.train(HALF, STEPS)
    load_checkpoint(first, run.network, run.optimizer)
    form = list(FORMS)[(number + 1) % len(FORMS)]
    scratch = folder / f"scratch-{get_group_size()}" / f"{source.name} to {run.layout}"
    again = save_checkpoint(run.network, path_of(scratch / "again", form), run.optimizer, **FORMS[form])
    load_checkpoint(again, run.network, run.optimizer)  # waits for it
    run.train(HALF, HALF + 1)
    missing = load_param_into_net(run.network, load_checkpoint(first))[0]
    assert missing == []
    losses["load_param_into_net"] = run.train(HALF, HALF + 1)
    of_ranks = sorted(source.glob("rank_*/a.ckpt"), key=lambda path: int(path.parent.name[5:])) or [first]
    load_distributed_checkpoint(run.network, of_ranks)
    losses["load_distributed_checkpoint"] = run.train(HALF, HALF + 1)
    strategy = folder / "strategies" / f"{run.layout}-{get_group_size()}.json"
    if strategy.exists():
        if get_rank() == 0:
            transform_checkpoints(source if of_ranks != [first] else first, scratch / "cut", "a", None, strategy)
        barrier()
        own = scratch / "cut" / f"rank_{get_rank()}" / f"a{get_rank()}.ckpt"
        load_checkpoint(own, run.network, run.optimizer)
        losses["transform_checkpoints"] = run.train(HALF, STEPS)
        load_distributed_checkpoint(
            run.network, [scratch / "cut" / f"rank_{r}" / f"a{r}.ckpt" for r in range(get_group_size())]
        )
        losses["transformed, load_distributed_checkpoint"] = run.train(HALF, HALF + 1)
    result = {"losses": losses}
    if get_rank() == 0:
        result |= compare(first, again, tensors)
    barrier()
    if get_rank() == 0:
        shutil.rmtree(scratch)
    return result


def compare(first, again, tensors):
    """Return how far a checkpoint is from the values of one process, and whether it was written again bit by bit."""
    reader, _ = open_checkpoint([first])
    second, _ = open_checkpoint([again])
    assert {*reader.tensors} == {*second.tensors} == {*tensors}
    return {
        "difference": max(float((reader.read(key) - value).abs().max()) for key, value in tensors.items()),
        "is_same": all(torch.equal(reader.read(key), second.read(key)) for key in tensors),
    }


def barrier():
    if dist.is_initialized():
        dist.barrier()


def main():
    torch.set_default_dtype(torch.float64)
    init(timeout_s=120)
    folder, task, layouts = Path(sys.argv[1]), sys.argv[3], sys.argv[4:] or LAYOUTS
    mine = write(folder, layouts) if task == "write" else read(folder, layouts)
    everyone = [mine]
    if dist.is_initialized():
        everyone = [None] * get_group_size()
        dist.all_gather_object(everyone, mine)
    if get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(everyone))
    release()


if __name__ == "__main__":
    main()
