"""save_checkpoint and load_checkpoint in one process: what comes back, what is refused, saving beside the training."""

import contextlib
import gc
import random
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import every_third_fast
from torch import nn

from msrun.errors import CheckpointError
from msrun.runtime import (
    AutoParallel,
    MicroBatchInterleaved,
    Pipeline,
    WithLoss,
    init_parameters,
    latest_checkpoint,
    load_checkpoint,
    no_init_parameters,
    optim,
    release,
    save_checkpoint,
)
from msrun.runtime.checkpoint import save as module
from msrun.runtime.checkpoint.reader import verify_checkpoint
from msrun.runtime.nn.random_stream import choose_random_state, take_random_state

OPTIMIZERS = {
    "momentum": lambda p: optim.Momentum(p, 0.1, 0.9),
    "sgd": lambda p: optim.SGD(p, 0.1),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=0.1),
    "torch-sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "torch-adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "torch-adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "torch-adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "torch-rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "torch-adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "torch-nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "torch-adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "torch-lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1),
    "torch-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
}


FORMS = {
    "file": {},
    "directory": {"integrated_save": False},
    "file beside": {"async_save": True},
    "directory beside": {"integrated_save": False, "async_save": True},
}


class Network(nn.Module):
    def __init__(self, **others):
        super().__init__()
        modules = {"layer": nn.Linear(4, 6), "norm": nn.BatchNorm1d(6), "head": nn.Linear(6, 2)}
        for name, each in (modules | others).items():
            setattr(self, name, each)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.layer(x))))


def wider():
    return Network(head=nn.Linear(6, 3))


def longer():
    return Network(extra=nn.Linear(2, 2))


def train(network, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(network(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def make(name="adam", seed=0):
    torch.manual_seed(seed)
    network = Network()
    return network, OPTIMIZERS[name](network.parameters())


@pytest.mark.parametrize(
    ("form", "deferred"), [("file", False), ("directory", True), ("directory beside", False), ("file beside", True)]
)
@pytest.mark.parametrize("name", every_third_fast(OPTIMIZERS, 5))
def test_training_goes_on_bit_by_bit(tmp_path, name, form, deferred):
    network, optimizer = make(name)
    train(network, optimizer, 3)
    save_checkpoint(network, tmp_path / "a", optimizer, **FORMS[form])
    right = train(network, optimizer, 3, first=3)
    with no_init_parameters() if deferred else contextlib.nullcontext():
        other, its_optimizer = make(name, seed=5)
    if not deferred:
        train(other, its_optimizer, 1)
    load_checkpoint(tmp_path / "a", other, its_optimizer)
    init_parameters(other)
    assert train(other, its_optimizer, 3, first=3) == right
    for mine, theirs in zip(other.state_dict().values(), network.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


WRAPPERS = {
    "bare": lambda n: n,
    "with loss": lambda n: WithLoss(n, F.mse_loss),
    "copies": lambda n: MicroBatchInterleaved(WithLoss(n, F.mse_loss), 2),
    "auto parallel": lambda n: AutoParallel(WithLoss(n, F.mse_loss)),
    "pipeline": lambda n: AutoParallel(Pipeline(WithLoss(n, F.mse_loss), 2)),
    "auto parallel of copies": lambda n: AutoParallel(MicroBatchInterleaved(WithLoss(n, F.mse_loss), 2)),
}


@pytest.mark.parametrize("reader", WRAPPERS)
@pytest.mark.parametrize("writer", WRAPPERS)
def test_wrappers_leave_no_trace_in_the_names(tmp_path, writer, reader):
    network, _ = make(seed=1)
    other, _ = make(seed=2)
    save_checkpoint(WRAPPERS[writer](network), tmp_path / "a")
    load_checkpoint(tmp_path / "a", WRAPPERS[reader](other))
    assert torch.equal(other.layer.weight, network.layer.weight)
    assert set(load_checkpoint(tmp_path / "a")) >= set(network.state_dict())


def test_parameters_of_the_loss_are_saved_too(tmp_path):
    first, second = (WithLoss(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    save_checkpoint(first, tmp_path / "a")
    load_checkpoint(tmp_path / "a", second)
    assert torch.equal(second.loss_fn.weight, first.loss_fn.weight)


@pytest.mark.parametrize("deferred", [False, True])
def test_tied_and_frozen_parameters_and_extra_state_come_back(tmp_path, deferred):
    class Tied(nn.Module):
        def __init__(self, seen):
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.out = nn.Linear(3, 5, bias=False)
            self.out.weight = self.embedding.weight
            self.frozen = nn.Parameter(torch.full((2,), float(seen)), requires_grad=False)
            self.register_buffer("not_saved", torch.tensor(float(seen)), persistent=False)
            self.seen = seen

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    first = nn.Sequential(Tied(7))
    save_checkpoint(first, tmp_path / "a", torch.optim.SGD(first.parameters(), 0.1))
    with no_init_parameters() if deferred else contextlib.nullcontext():
        second = nn.Sequential(Tied(0))
    load_checkpoint(tmp_path / "a", second, torch.optim.SGD(second.parameters(), 0.1))
    init_parameters(second)
    loaded = second[0]
    assert loaded.out.weight is loaded.embedding.weight
    assert torch.equal(loaded.out.weight, first[0].out.weight)
    assert loaded.frozen.tolist() == [7, 7]
    assert (loaded.seen, float(loaded.not_saved)) == (7, 0.0)


def test_position_and_appended_values_are_returned(tmp_path):
    network, _ = make()
    more = {"best": 0.5, "name": "run", "history": [1, 2.5, None], "mean": torch.ones(2), "scheduler": {"last": True}}
    path = save_checkpoint(network, tmp_path / "a", epoch_num=2, step_in_epoch=3, step_num=23, append_dict=more)
    loaded = load_checkpoint(path, network)
    assert torch.equal(loaded.pop("mean"), torch.ones(2))
    more.pop("mean")
    assert loaded == {**more, "epoch_num": 2, "step_in_epoch": 3, "step_num": 23}


def test_state_of_an_optimizer_waits_for_a_network_without_values(tmp_path):
    network, optimizer = make()
    train(network, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.025
    path = save_checkpoint(network, tmp_path / "a", optimizer)
    with no_init_parameters():
        other, its_optimizer = make()
    load_checkpoint(path, other, its_optimizer)
    assert not its_optimizer.state
    assert its_optimizer.param_groups[0]["lr"] == 0.025, "settings are there at once"
    its_optimizer.param_groups[0]["lr"] = 0.5  # a schedule, between loading and the first step
    init_parameters(other)
    right = optimizer.state[network.layer.weight]["exp_avg"]
    assert torch.equal(its_optimizer.state_dict()["state"][0]["exp_avg"], right)
    train(other, its_optimizer, 1)
    assert its_optimizer.param_groups[0]["lr"] == 0.5
    assert int(its_optimizer.state[other.layer.weight]["step"]) == 3
    load_checkpoint(path, other, its_optimizer)
    third, its_state = make()
    load_checkpoint(save_checkpoint(other, tmp_path / "b", its_optimizer), third, its_state)
    assert torch.equal(its_state.state[third.layer.weight]["exp_avg"], right)


def test_optimizer_with_several_groups_keeps_their_settings_apart(tmp_path):
    def groups(network, lr):
        rest = [*network.norm.parameters(), *network.head.parameters()]
        both = [{"params": network.layer.parameters(), "lr": lr}, {"params": rest, "lr": lr / 2}]
        return torch.optim.SGD(both, momentum=0.9)

    network, _ = make()
    optimizer = groups(network, 0.4)
    train(network, optimizer, 2)
    save_checkpoint(network, tmp_path / "a", optimizer)
    other, _ = make(seed=2)
    its_optimizer = groups(other, 0.1)
    load_checkpoint(tmp_path / "a", other, its_optimizer)
    assert [group["lr"] for group in its_optimizer.param_groups] == [0.4, 0.2]
    assert train(other, its_optimizer, 2) == train(network, optimizer, 2)
    with pytest.raises(CheckpointError, match="the optimizer has 1 parameter groups, the one in the checkpoint 2"):
        load_checkpoint(tmp_path / "a", other, torch.optim.SGD(other.parameters(), 0.1))


def test_waiting_state_does_not_keep_a_dropped_optimizer_alive(tmp_path):
    network, optimizer = make()
    train(network, optimizer, 1)
    save_checkpoint(network, tmp_path / "a", optimizer)
    with no_init_parameters():
        other, its_optimizer = make()
    load_checkpoint(tmp_path / "a", other, its_optimizer)
    dropped = weakref.ref(its_optimizer)
    del its_optimizer
    gc.collect()
    assert dropped() is None


def test_random_numbers_go_on_where_they_were(tmp_path):
    network, optimizer = make()
    torch.rand(3), random.random(), np.random.rand()
    save_checkpoint(network, tmp_path / "a", optimizer)
    right = torch.rand(2), random.random(), np.random.rand()
    load_checkpoint(tmp_path / "a", network)
    assert not torch.equal(torch.rand(2), right[0]), "without an optimizer nothing but the network changes"
    load_checkpoint(tmp_path / "a", network, optimizer)
    assert torch.equal(torch.rand(2), right[0])
    assert (random.random(), np.random.rand()) == right[1:]


def test_random_states_of_a_world_of_another_size_are_taken_when_they_were_all_one():
    one, _, other = take_random_state(), torch.manual_seed(2), take_random_state()
    assert choose_random_state([one, other], 1, 2) is other
    assert choose_random_state([one, one], 3, 4) is one
    assert choose_random_state([one, other], 0, 1) is None


def test_newest_checkpoint_is_found_also_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network, _ = make()
    assert latest_checkpoint(tmp_path / "none") is None
    assert save_checkpoint(network, "sub/b") == tmp_path / "sub" / "b"
    load_checkpoint("sub/b", network)
    newest = save_checkpoint(network, "sub/a", integrated_save=False)
    assert latest_checkpoint("sub") == newest == tmp_path / "sub" / "a"
    (newest / "state.pt").unlink()
    assert latest_checkpoint(tmp_path / "sub") == tmp_path / "sub" / "b"
    assert latest_checkpoint(tmp_path / "sub", "CKP") is None


@pytest.mark.parametrize(
    ("saved", "loaded", "found"),
    [
        (Network, wider, r"head.weight has shape \(3, 6\), in the checkpoint \(2, 6\) \(and 1 more\)"),
        (Network, longer, r"extra.weight is not in the checkpoint \(and 1 more\)"),
        (longer, Network, r"extra.bias is only in the checkpoint \(and 1 more\)"),
        (Network, lambda: Network().double(), r"layer.weight is torch.float64, .* torch.float32 \(and 7 more\)"),
    ],
)
def test_another_network_is_refused_unless_what_fits_may_do(tmp_path, saved, loaded, found):
    source, target = saved(), loaded()
    save_checkpoint(source, tmp_path / "a")
    before = target.layer.weight.detach().clone()
    with pytest.raises(CheckpointError, match=f"is one of another network: {found}; load what fits with strict_load"):
        load_checkpoint(tmp_path / "a", target)
    assert torch.equal(target.layer.weight, before)
    load_checkpoint(tmp_path / "a", target, strict_load=False)
    assert torch.equal(target.layer.weight, source.layer.weight.to(target.layer.weight.dtype))


def test_optimizer_of_another_network_or_of_none_is_refused(tmp_path):
    network, optimizer = make()
    with pytest.raises(CheckpointError, match=r"0 of the optimizer, of shape \(2, 2\), is not in the network"):
        save_checkpoint(network, tmp_path / "a", torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    save_checkpoint(network, tmp_path / "a", optimizer)
    with pytest.raises(CheckpointError, match=r"group 0 .* head.bias is only in the checkpoint"):
        load_checkpoint(tmp_path / "a", network, torch.optim.Adam(list(network.parameters())[:-1]))
    save_checkpoint(network, tmp_path / "b")
    with pytest.raises(CheckpointError, match="holds no optimizer: load it without one"):
        load_checkpoint(tmp_path / "b", network, optimizer)


def without_values():
    with no_init_parameters():
        return make()[0]


@pytest.mark.parametrize(
    ("thing", "more", "words"),
    [
        (without_values(), {}, r"parameter layer\.weight has no value yet: save after the first step"),
        (AutoParallel(lambda x: x), {}, "checkpoints need the network, not"),
        ({"weight": torch.ones(1)}, {}, "checkpoints need the network, not"),
        (None, {}, "checkpoints need the network, not"),
        (nn.Linear(2, 2), {"mine": object()}, r"appended.mine.* is a \w+, which a checkpoint does not hold"),
        (nn.Linear(2, 2), {"mine": {"a": [set()]}}, r"appended.mine.* is a \w+, which a checkpoint does not hold"),
        (nn.Linear(2, 2), {"mine": lambda: 1}, r"appended.mine.* is a \w+, which a checkpoint does not hold"),
    ],
)
def test_what_no_checkpoint_holds_is_refused(tmp_path, thing, more, words):
    with pytest.raises(CheckpointError, match=words):
        save_checkpoint(thing, tmp_path / "a", append_dict=more)
    assert list(tmp_path.iterdir()) == []


def test_missing_and_incomplete_checkpoints_are_refused_with_what_there_is(tmp_path):
    network, _ = make()
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*missing: load another one, its folder has no"):
        load_checkpoint(tmp_path / "missing", network)
    save_checkpoint(network, tmp_path / "CKP-1_2.ckpt")
    with pytest.raises(CheckpointError, match=r"\(did you mean CKP-1_2.ckpt\?\): load one that .* has: CKP-1_2.ckpt"):
        load_checkpoint(tmp_path / "CKP-1_3.ckpt", network)
    (save_checkpoint(network, tmp_path / "b", integrated_save=False) / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"b is no complete checkpoint: load one that .* has: CKP-1_2.ckpt"):
        load_checkpoint(tmp_path / "b", network)


@pytest.fixture
def gate(monkeypatch):
    """Writing waits until it is set."""
    event, run = threading.Event(), module.Writing.run

    def wait_and_run(self, *args):
        assert event.wait(60)
        run(self, *args)

    monkeypatch.setattr(module.Writing, "run", wait_and_run)
    yield event
    event.set()
    module.background.forget()


def test_next_save_waits_for_the_one_before(tmp_path, gate):
    net = nn.Linear(2, 2)
    save_checkpoint(net, tmp_path / "a", async_save=True)
    threading.Timer(0.05, gate.set).start()
    save_checkpoint(net, tmp_path / "b", async_save=True)
    assert (tmp_path / "a").is_file(), "it is complete by now"
    release()
    assert (tmp_path / "b").is_file(), "release() waits"


@pytest.mark.parametrize("asked", ["save", "load", "release"])
def test_error_comes_out_once_at_the_next_thing_that_waits(tmp_path, asked):
    net = nn.Linear(2, 2)
    (tmp_path / "taken").write_text("a user's file")
    save_checkpoint(net, tmp_path / "taken", async_save=True)
    with pytest.raises(
        CheckpointError, match=r"taken was not saved, earlier ones are untouched: .*taken exists and is no"
    ):
        if asked == "save":
            save_checkpoint(net, tmp_path / "b")
        elif asked == "load":
            load_checkpoint(tmp_path / "b")
        else:
            release()
    save_checkpoint(net, tmp_path / "b")
    assert (tmp_path / "taken").read_text() == "a user's file"


def test_writes_after_the_call_are_not_in_the_file_whoever_makes_them(tmp_path, gate):
    """Weights that are clipped, averaged or normalised through `.data` tell nobody that they changed."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(net.parameters(), 1.0, momentum=0.9)
    net(torch.randn(8, 2)).square().sum().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    path = save_checkpoint(net, tmp_path / "a", optimizer, async_save=True)
    net[0].weight.data.mul_(2)
    with torch.no_grad():
        net[0].bias.add_(1)
    net(torch.randn(8, 2)).sum().backward()  # the running mean changes, which no optimizer does
    optimizer.step()
    optimizer.state[net[1].bias]["momentum_buffer"].zero_()
    assert not path.exists()
    gate.set()
    loaded = load_checkpoint(path)  # it waits
    assert all(torch.equal(loaded[name], value) for name, value in before.items())
    assert not any(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    load_checkpoint(path, net, optimizer)
    assert optimizer.state[net[1].bias]["momentum_buffer"].any()


@pytest.mark.slow
def test_end_of_the_process_waits_for_a_save_of_many_megabytes(tmp_path):
    program = f"""
import torch
from torch import nn
from msrun.runtime import save_checkpoint
net = nn.Linear(4096, 6000)
save_checkpoint(net, {str(tmp_path / "a")!r}, async_save=True)
save_checkpoint(net, {str(tmp_path / "b")!r}, integrated_save=False, async_save=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("a", "b"):
        assert all(not file.fault for file in verify_checkpoint(tmp_path / name))
