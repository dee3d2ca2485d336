"""Saving beside the training: what waits for what, and where an error comes out."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from msrun.errors import CheckpointError
from msrun.runtime import load_checkpoint, release, save_checkpoint
from msrun.runtime.checkpoint import save as module
from msrun.runtime.checkpoint.verify import verify_checkpoint


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits until it is set."""
    event, run = threading.Event(), module.Writing.run

    def wait_and_run(self: module.Writing, *args: object) -> None:
        assert event.wait(60)
        run(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(module.Writing, "run", wait_and_run)
    yield event
    event.set()
    module.background.forget()


def test_training_goes_on_and_the_file_has_what_was_there(tmp_path: Path, gate: threading.Event) -> None:
    net = nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(net.parameters(), 1.0, momentum=0.9)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    path = save_checkpoint(net, tmp_path / "a", optimizer, async_save=True)
    net(torch.randn(8, 4)).sum().backward()  # the running mean changes, which no optimizer does
    optimizer.step()
    assert not path.exists()
    gate.set()
    loaded = load_checkpoint(path)  # it waits
    assert all(torch.equal(loaded[name], value) for name, value in before.items())
    assert not torch.equal(net.running_mean, before["running_mean"])  # type: ignore[arg-type]


def test_next_save_waits_for_the_one_before(tmp_path: Path, gate: threading.Event) -> None:
    net = nn.Linear(2, 2)
    save_checkpoint(net, tmp_path / "a", async_save=True)
    threading.Timer(0.05, gate.set).start()
    save_checkpoint(net, tmp_path / "b", async_save=True)
    assert (tmp_path / "a").is_file(), "it is complete by now"
    release()
    assert (tmp_path / "b").is_file(), "release() waits"


@pytest.mark.parametrize("asked", ["save", "load", "release"])
def test_error_comes_out_once_at_the_next_thing_that_waits(tmp_path: Path, asked: str) -> None:
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


def test_writes_after_the_call_are_not_in_the_file_whoever_makes_them(tmp_path: Path, gate: threading.Event) -> None:
    """Weights that are clipped, averaged or normalised through `.data` tell nobody that they changed."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 1.0, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    path = save_checkpoint(net, tmp_path / "a", optimizer, async_save=True)
    net.weight.data.mul_(2)
    with torch.no_grad():
        net.bias.add_(1)
    optimizer.state[net.weight]["momentum_buffer"].zero_()
    gate.set()
    loaded = load_checkpoint(path)
    assert all(torch.equal(loaded[name], value) for name, value in before.items())
    load_checkpoint(path, net, optimizer)
    assert optimizer.state[net.weight]["momentum_buffer"].any()


@pytest.mark.slow
def test_end_of_the_process_waits_for_a_save_of_many_megabytes(tmp_path: Path) -> None:
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
