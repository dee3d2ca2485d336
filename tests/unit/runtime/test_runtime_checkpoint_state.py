"""save_checkpoint and load_checkpoint in one process: what of network and optimizer comes back, and what is refused."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import every_third_fast
from torch import Tensor, nn

from msrun.errors import CheckpointError
from msrun.runtime import (
    AutoParallel,
    MicroBatchInterleaved,
    WithLoss,
    init_parameters,
    latest_checkpoint,
    load_checkpoint,
    no_init_parameters,
    optim,
    save_checkpoint,
)
from msrun.runtime.checkpoint import optimizer_state
from msrun.runtime.nn.random_stream import choose_random_state, put_random_state, take_random_state

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
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


FORMS: dict[str, dict[str, bool]] = {
    "file": {},
    "directory": {"integrated_save": False},
    "file beside": {"async_save": True},
    "directory beside": {"integrated_save": False, "async_save": True},
}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.layer(x))))


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(network(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())  # type: ignore[arg-type, union-attr]
    return losses


def make(name: str = "adam", seed: int = 0) -> tuple[Network, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    network = Network()
    return network, OPTIMIZERS[name](network.parameters())


@pytest.mark.parametrize(
    ("form", "deferred"),
    [("file", False), ("directory", True), ("directory beside", False), ("file beside", True)],
)
@pytest.mark.parametrize("name", every_third_fast(OPTIMIZERS))
def test_training_goes_on_bit_by_bit(tmp_path: Path, name: str, form: str, deferred: bool) -> None:
    network, optimizer = make(name)
    train(network, optimizer, 3)
    save_checkpoint(network, tmp_path / "a", optimizer, **FORMS[form])
    right = train(network, optimizer, 3, first=3)
    if deferred:
        with no_init_parameters():
            other, its_optimizer = make(name, seed=5)
    else:
        other, its_optimizer = make(name, seed=5)
        train(other, its_optimizer, 1)
    load_checkpoint(tmp_path / "a", other, its_optimizer)
    init_parameters(other)
    assert train(other, its_optimizer, 3, first=3) == right
    for mine, theirs in zip(other.state_dict().values(), network.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_parameters_stay_the_same_objects(tmp_path: Path) -> None:
    network, optimizer = make()
    save_checkpoint(network, tmp_path / "a", optimizer)
    before = [id(parameter) for parameter in network.parameters()]
    load_checkpoint(tmp_path / "a", network, optimizer)
    assert [id(parameter) for parameter in network.parameters()] == before
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in network.parameters())


def wrapped_in_loss(network: nn.Module) -> Any:
    return WithLoss(network, F.mse_loss)


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "bare": lambda n: n,
    "with loss": wrapped_in_loss,
    "copies": lambda n: MicroBatchInterleaved(wrapped_in_loss(n), 2),
    "auto parallel": lambda n: AutoParallel(wrapped_in_loss(n)),
    "auto parallel of copies": lambda n: AutoParallel(MicroBatchInterleaved(wrapped_in_loss(n), 2)),
}


@pytest.mark.parametrize("reader", WRAPPERS)
@pytest.mark.parametrize("writer", WRAPPERS)
def test_wrappers_leave_no_trace_in_the_names(tmp_path: Path, writer: str, reader: str) -> None:
    network, _ = make(seed=1)
    other, _ = make(seed=2)
    save_checkpoint(WRAPPERS[writer](network), tmp_path / "a")
    load_checkpoint(tmp_path / "a", WRAPPERS[reader](other))
    assert torch.equal(other.layer.weight, network.layer.weight)
    assert set(load_checkpoint(tmp_path / "a")) >= set(network.state_dict())


def test_parameters_of_the_loss_are_saved_too(tmp_path: Path) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))

    first, second = WithLoss(nn.Linear(2, 2), Loss()), WithLoss(nn.Linear(2, 2), Loss())
    first.loss_fn.scale.data.fill_(7.0)  # type: ignore[attr-defined]
    save_checkpoint(first, tmp_path / "a")
    load_checkpoint(tmp_path / "a", second)
    assert second.loss_fn.scale.item() == 7.0  # type: ignore[attr-defined]


def test_tied_and_frozen_parameters_and_extra_state_come_back(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, seen: int) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.out = nn.Linear(3, 5, bias=False)
            self.out.weight = self.embedding.weight
            self.frozen = nn.Parameter(torch.full((2,), float(seen)), requires_grad=False)
            self.register_buffer("not_saved", torch.tensor(float(seen)), persistent=False)
            self.seen = seen

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    def holding(seen: int) -> tuple[nn.Module, Tied]:
        inner = Tied(seen)
        return nn.Sequential(inner), inner

    first, inside = holding(7)
    save_checkpoint(first, tmp_path / "a", torch.optim.SGD(first.parameters(), 0.1))
    for deferred in (False, True):
        if deferred:
            with no_init_parameters():
                second, loaded = holding(0)
        else:
            second, loaded = holding(0)
        load_checkpoint(tmp_path / "a", second, torch.optim.SGD(second.parameters(), 0.1))
        init_parameters(second)
        assert loaded.out.weight is loaded.embedding.weight
        assert torch.equal(loaded.out.weight, inside.out.weight)
        assert loaded.frozen.tolist() == [7, 7]
        assert loaded.seen == 7
        assert float(loaded.not_saved) == 0.0  # type: ignore[arg-type]


def test_position_and_appended_values_are_returned(tmp_path: Path) -> None:
    network, _ = make()
    more = {"best": 0.5, "name": "run", "history": [1, 2.5, None], "mean": torch.ones(2), "scheduler": {"last": True}}
    path = save_checkpoint(network, tmp_path / "a", epoch_num=2, step_in_epoch=3, step_num=23, append_dict=more)
    loaded = load_checkpoint(path, network)
    assert torch.equal(loaded.pop("mean"), torch.ones(2))
    more.pop("mean")
    assert loaded == {**more, "epoch_num": 2, "step_in_epoch": 3, "step_num": 23}


def test_without_a_network_whole_tensors_are_returned(tmp_path: Path) -> None:
    network, optimizer = make()
    train(network, optimizer, 1)
    loaded = load_checkpoint(save_checkpoint(network, tmp_path / "a", optimizer))
    assert {name for name, value in loaded.items() if isinstance(value, Tensor)} == set(network.state_dict())
    other, _ = make(seed=3)
    other.load_state_dict({name: loaded[name] for name in other.state_dict()})
    assert torch.equal(other.head.bias, network.head.bias)


def test_settings_of_the_optimizer_come_back_at_once_and_later_changes_stay(tmp_path: Path) -> None:
    network, optimizer = make()
    train(network, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.025
    save_checkpoint(network, tmp_path / "a", optimizer)
    with no_init_parameters():
        other, its_optimizer = make()
    load_checkpoint(tmp_path / "a", other, its_optimizer)
    assert its_optimizer.param_groups[0]["lr"] == 0.025
    its_optimizer.param_groups[0]["lr"] = 0.5  # a schedule, between loading and the first step
    init_parameters(other)
    train(other, its_optimizer, 1)
    assert its_optimizer.param_groups[0]["lr"] == 0.5
    assert int(its_optimizer.state[other.layer.weight]["step"]) == 2


def test_state_that_waits_is_there_for_whoever_asks_for_it(tmp_path: Path) -> None:
    network, optimizer = make()
    train(network, optimizer, 2)
    path = save_checkpoint(network, tmp_path / "a", optimizer)
    with no_init_parameters():
        other, its_optimizer = make()
    load_checkpoint(path, other, its_optimizer)
    assert not its_optimizer.state
    init_parameters(other)
    state = its_optimizer.state_dict()["state"]
    assert torch.equal(state[0]["exp_avg"], optimizer.state[network.layer.weight]["exp_avg"])
    load_checkpoint(path, other, its_optimizer)
    again = save_checkpoint(other, tmp_path / "b", its_optimizer)
    third, its_state = make()
    load_checkpoint(again, third, its_state)
    assert torch.equal(its_state.state[third.layer.weight]["exp_avg"], state[0]["exp_avg"])


def test_optimizer_with_several_groups_keeps_their_settings_apart(tmp_path: Path) -> None:
    def groups(network: Network, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [
                {"params": network.layer.parameters(), "lr": lr},
                {"params": [*network.norm.parameters(), *network.head.parameters()], "lr": lr / 2},
            ],
            momentum=0.9,
        )

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


def test_waiting_state_does_not_keep_a_dropped_optimizer_alive(tmp_path: Path) -> None:
    network, optimizer = make()
    train(network, optimizer, 1)
    save_checkpoint(network, tmp_path / "a", optimizer)
    with no_init_parameters():
        other, its_optimizer = make()
    load_checkpoint(tmp_path / "a", other, its_optimizer)
    assert its_optimizer in optimizer_state._waiting
    dropped = weakref.ref(its_optimizer)
    del its_optimizer
    gc.collect()
    assert dropped() is None


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    network, optimizer = make()
    torch.rand(3), random.random(), np.random.rand()
    save_checkpoint(network, tmp_path / "a", optimizer)
    right = torch.rand(2), random.random(), np.random.rand()
    load_checkpoint(tmp_path / "a", network)
    assert not torch.equal(torch.rand(2), right[0]), "without an optimizer nothing but the network changes"
    load_checkpoint(tmp_path / "a", network, optimizer)
    assert torch.equal(torch.rand(2), right[0])
    assert (random.random(), np.random.rand()) == right[1:]


def test_random_states_of_a_world_of_another_size_are_taken_when_they_were_all_one() -> None:
    torch.manual_seed(1)
    one = take_random_state()
    torch.manual_seed(2)
    other = take_random_state()
    assert choose_random_state([one, other], 1, 2) is other
    assert choose_random_state([one, one], 3, 4) is one
    assert choose_random_state([one, other], 0, 1) is None
    put_random_state(one)
    first = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), first)


def test_newest_checkpoint_of_a_directory_is_found(tmp_path: Path) -> None:
    network, _ = make()
    assert latest_checkpoint(tmp_path / "none") is None
    save_checkpoint(network, tmp_path / "b")
    newest = save_checkpoint(network, tmp_path / "a", integrated_save=False)
    assert latest_checkpoint(str(tmp_path)) == newest
    (newest / "state.pt").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "b"
    assert latest_checkpoint(tmp_path, "CKP") is None


def test_what_is_relative_is_seen_from_where_the_process_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    network, _ = make()
    assert save_checkpoint(network, "sub/a") == tmp_path / "sub" / "a"
    assert latest_checkpoint("sub") == tmp_path / "sub" / "a"
    load_checkpoint("sub/a", network)


class Wider(Network):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)


class Longer(Network):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("saved", "loaded", "found"),
    [
        (Network, Wider, r"head.weight has shape \(3, 6\), in the checkpoint \(2, 6\) \(and 1 more\)"),
        (Network, Longer, r"extra.weight is not in the checkpoint \(and 1 more\)"),
        (Longer, Network, r"extra.bias is only in the checkpoint \(and 1 more\)"),
        (
            Network,
            lambda: Network().double(),
            r"layer.weight is torch.float64, in the checkpoint torch.float32 \(and 7 more\)",
        ),
    ],
)
def test_another_network_is_refused_unless_told_to_load_what_fits(
    tmp_path: Path, saved: Any, loaded: Any, found: str
) -> None:
    source, target = saved(), loaded()
    save_checkpoint(source, tmp_path / "a")
    before = target.layer.weight.detach().clone()
    with pytest.raises(CheckpointError, match=f"is one of another network: {found}; load what fits with strict_load"):
        load_checkpoint(tmp_path / "a", target)
    assert torch.equal(target.layer.weight, before)
    load_checkpoint(tmp_path / "a", target, strict_load=False)
    assert torch.equal(target.layer.weight, source.layer.weight.to(target.layer.weight.dtype))


def test_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    network, optimizer = make()
    with pytest.raises(
        CheckpointError, match=r"parameter 0 of the optimizer, of shape \(2, 2\), is not in the network"
    ):
        save_checkpoint(network, tmp_path / "a", torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    save_checkpoint(network, tmp_path / "a", optimizer)
    with pytest.raises(CheckpointError, match=r"group 0 .* head.bias is only in the checkpoint"):
        load_checkpoint(tmp_path / "a", network, torch.optim.Adam(list(network.parameters())[:-1]))


def test_checkpoint_without_an_optimizer_cannot_give_one(tmp_path: Path) -> None:
    network, optimizer = make()
    save_checkpoint(network, tmp_path / "a")
    with pytest.raises(CheckpointError, match="holds no optimizer: load it without one"):
        load_checkpoint(tmp_path / "a", network, optimizer)


def test_missing_and_incomplete_checkpoints_are_refused_with_what_there_is(tmp_path: Path) -> None:
    network, _ = make()
    with pytest.raises(
        CheckpointError, match=r"there is no checkpoint .*missing: load another one, its folder has none"
    ):
        load_checkpoint(tmp_path / "missing", network)
    save_checkpoint(network, tmp_path / "CKP-1_2.ckpt")
    with pytest.raises(CheckpointError, match=r"\(did you mean CKP-1_2.ckpt\?\): load one that .* has: CKP-1_2.ckpt"):
        load_checkpoint(tmp_path / "CKP-1_3.ckpt", network)
    (save_checkpoint(network, tmp_path / "b", integrated_save=False) / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"b is no complete checkpoint: load one that .* has: CKP-1_2.ckpt"):
        load_checkpoint(tmp_path / "b", network)


def test_parameters_without_values_cannot_be_saved(tmp_path: Path) -> None:
    with no_init_parameters():
        network, _ = make()
    with pytest.raises(CheckpointError, match=r"parameter layer\.weight has no value yet: save after the first step"):
        save_checkpoint(network, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [object(), {"a": [set()]}, lambda: 1])
def test_values_that_only_code_could_read_back_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"appended.mine.* is a \w+, which a checkpoint does not hold"):
        save_checkpoint(nn.Linear(2, 2), tmp_path / "a", append_dict={"mine": value})


@pytest.mark.parametrize("thing", [AutoParallel(lambda x: x), {"weight": torch.ones(1)}, None])
def test_what_is_no_network_is_refused(tmp_path: Path, thing: Any) -> None:
    with pytest.raises(CheckpointError, match="checkpoints need the network, not"):
        save_checkpoint(thing, tmp_path / "a")


def test_state_file_runs_no_code(tmp_path: Path) -> None:
    """A checkpoint from elsewhere: what is no tensor is read without unpickling objects."""
    network, _ = make()
    path = save_checkpoint(network, tmp_path / "a", integrated_save=False)

    class Evil:
        def __reduce__(self) -> Any:
            return (exec, ("raise SystemExit('ran')",))

    torch.save(Evil(), path / "state.pt")
    content = json.loads((path / "checkpoint.json").read_text())
    content["files"]["state.pt"] = (path / "state.pt").stat().st_size
    (path / "checkpoint.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(path, network)
