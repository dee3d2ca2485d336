"""The thread of the host's operators, and what a dry run does with it."""

from __future__ import annotations

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from msrun.runtime.execute.host_thread import HostThread


def _count_to(number: int, done: list[int]) -> None:
    for value in range(number):
        done.append((torch.ones(2) + value).numel())


def test_work_on_fake_tensors_is_done_when_the_caller_goes_on() -> None:
    done: list[int] = []
    with FakeTensorMode() as mode:
        assert active_fake_mode() is mode, "torch's private name"
        HostThread().start(lambda: _count_to(2000, done))
        assert len(done) == 2000, "two threads in one fake mode disturb each other"


def test_work_on_real_tensors_runs_beside_the_caller_and_is_waited_for() -> None:
    done: list[int] = []
    task = HostThread().start(lambda: _count_to(2000, done))
    task.wait()
    assert len(done) == 2000
