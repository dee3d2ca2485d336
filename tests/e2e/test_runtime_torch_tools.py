"""torch's own tools in every layout, beside one process: optimizers that look at whole tensors, state dicts,
torch.distributed.checkpoint. Training loops as strangers write them are in tests/cases/training_habits."""

import shutil
from pathlib import Path
from tempfile import gettempdir

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cut_networks import Net, assert_close, assert_state, backward, batch, columns, fsdp2, stages, train, whole_batch
from on_ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from msrun.runtime import Pipeline, get_rank, load_checkpoint, save_checkpoint, shard

FULL = StateDictOptions(full_state_dict=True)


def tensor_parallel(network):
    shard(network.b, ((1, 2), (1, 2), (1,)))
    return columns(network)


LAYOUTS = {
    **{
        f"hsdp-{level}": lambda n, level=level: whole_batch(n).hsdp(threshold=0, optimizer_level=level)
        for level in ("level1", "level2", "level3")
    },
    "tensor": tensor_parallel,
    "tensor+hsdp": lambda n: tensor_parallel(n).hsdp(threshold=0),
    "stages": stages,
    "stages+hsdp": lambda n: stages(n).hsdp(threshold=0),
    "fsdp2": fsdp2,
}
on_two_and_four = on_ranks(2, pytest.param(4, marks=pytest.mark.slow))


def tool(*refused_by, fast=()):
    """Return the decorator of the test of a tool in every layout but those that refuse it."""
    builds = [
        pytest.param(build, id=layout, marks=() if layout in fast else pytest.mark.slow)
        for layout, build in LAYOUTS.items()
        if layout not in refused_by
    ]
    return lambda test: pytest.mark.parametrize("build", builds)(on_two_and_four(test))


def folder(name):
    """Return a folder of all ranks that is not there yet."""
    path = Path(gettempdir()) / name
    if get_rank() == 0:
        path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    return path


def options_of(step, **more):
    return StateDictOptions(strict=not isinstance(step.network, Pipeline), **more)  # a rank has its own stage's


def trained(build, kind=torch.optim.AdamW):
    """Return a parallel network after some steps, the network in it, one process' network, and both optimizers."""
    network, right = Net(), Net()
    step = build(network)
    ours, theirs = kind(network.parameters(), 0.01), kind(right.parameters(), 0.01)
    train(step, right, ours, theirs)
    return step, network, right, ours, theirs


# -- training ---------------------------------------------------------------------------------------------------------


@tool()
def test_optimizers_with_state_of_other_shapes_or_from_their_first_moment_go_on_from_a_checkpoint(build):
    for kind in (torch.optim.Adafactor, torch.optim.Adagrad):
        step, _, right, ours, theirs = trained(build, kind)
        path = folder(f"saved-{dist.get_world_size()}")
        save_checkpoint(step, path, ours)
        last = kind(step.parameters(), 0.5)
        load_checkpoint(path, step, last)
        train(step, right, last, theirs)


@tool()
def test_weights_by_columns(build):
    network, right = Net(), Net()
    for module in (network, right):
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()
    step = build(network)
    ours, theirs = torch.optim.SGD(network.parameters(), 0.1), torch.optim.SGD(right.parameters(), 0.1)
    train(step, right, ours, theirs)


@pytest.mark.slow
@tool("stages", "stages+hsdp", "fsdp2", fast=("hsdp-level2",))
def test_steps_in_backward(build):
    """Every message of gradients is used and dropped when it arrives; the loop's own optimizer.step() finds none."""
    ways = [(torch.optim.AdamW, {"foreach": True}), (torch.optim.AdamW, {"fused": True}), (torch.optim.Adafactor, {})]
    for kind, settings in ways:
        network, right = Net(), Net()
        step = build(network).comm_fusion({"openstate": False})  # a message for each parameter
        ours, theirs = kind(network.parameters(), 0.01, **settings), kind(right.parameters(), 0.01, **settings)
        step.step_in_backward(ours)
        train(step, right, ours, theirs)
        backward(step, right)
        assert all(parameter.grad is None for parameter in network.parameters())
    network, right = Net(), Net()
    step = build(network)
    names = dict(network.named_parameters())
    some, rest = ([p for n, p in names.items() if n.startswith("a.") is is_first] for is_first in (True, False))
    first, second = torch.optim.AdamW(some, 0.01), torch.optim.AdamW(rest, 0.01)
    step.step_in_backward(first)  # it trains some; the gradients of the rest come as ever
    theirs = torch.optim.AdamW(right.parameters(), 0.01)
    train(step, right, second, theirs)


# -- state dicts ------------------------------------------------------------------------------------------------------


@tool(fast=("hsdp-level1",))
def test_full_state_dicts_go_round(build):
    step, network, right, ours, theirs = trained(build)
    for model in (network, step):
        assert_state(get_model_state_dict(model, options=FULL), right.state_dict())
    mine, expected = (get_optimizer_state_dict(n, o, options=FULL) for n, o in ((network, ours), (right, theirs)))
    missing = set(expected["state"]) - set(mine["state"])
    assert not missing or (isinstance(step.network, Pipeline) and missing < set(expected["state"]))
    for name, values in mine["state"].items():
        for key, value in values.items():
            assert_close(value, expected["state"][name][key])
    again = torch.optim.AdamW(network.parameters(), 0.01)
    set_optimizer_state_dict(network, again, mine, options=options_of(step, full_state_dict=True))
    train(step, right, again, theirs)
    other, fresh = Net(1), Net(2)
    new = build(fresh)
    new(*batch(0))
    for model in (fresh, new):
        set_model_state_dict(model, other.state_dict(), options=FULL)
        assert_state(new.state_dict(), other.state_dict())


@tool()
def test_distributed_checkpoints(build):
    """What torch.distributed.checkpoint writes in this layout is read in it, and by one process."""
    _, network, right, ours, theirs = trained(build)
    path = folder(f"dcp-{dist.get_world_size()}")
    parted = get_optimizer_state_dict(network, ours)
    assert any(isinstance(value, DTensor) for values in parted["state"].values() for value in values.values())
    dcp.save({"net": get_model_state_dict(network), "opt": parted}, checkpoint_id=path)
    fresh = Net(5)
    new = build(fresh)
    optimizer = torch.optim.AdamW(fresh.parameters(), 0.01)
    train_one = Net(5)
    train(new, train_one, optimizer, torch.optim.AdamW(train_one.parameters(), 0.01), steps=1)
    state = {"net": get_model_state_dict(fresh), "opt": get_optimizer_state_dict(fresh, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(fresh, state["net"])
    set_optimizer_state_dict(fresh, optimizer, state["opt"], options=options_of(new))
    assert_state(new.state_dict(), right.state_dict())
    alone = {"net": Net(7).state_dict()}
    dcp.load(alone, checkpoint_id=path, no_dist=True)
    assert_state(alone["net"], right.state_dict())
    train(new, right, optimizer, theirs)
