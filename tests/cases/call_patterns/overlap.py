"""Levels of the parallel optimizer, copies of a batch and what overlaps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from torch import Tensor

from call_patterns.pattern import Mlp, assert_gradients, batch, both, mine, pattern, refused, seeded
from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, MicroBatchInterleaved, WithLoss, shard


@pattern
def all_levels_give_bit_equal_weights() -> None:
    weights = []
    for level in ("level1", "level2", "level3"):
        network = seeded(Mlp).float()
        step = AutoParallel(WithLoss(network, F.mse_loss)).hsdp(threshold=0, optimizer_level=level)
        optimizer = torch.optim.Adam(network.parameters(), 0.01)
        for seed in range(3):
            x, y = batch(seed=seed)
            step(mine(x).float(), mine(y).float()).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([local(parameter).clone() for parameter in network.parameters()])
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))


@pattern
def gathered_weights_of_level3_are_freed_between_forward_and_backward() -> None:
    serial, network, _ = both()
    step = AutoParallel(WithLoss(network, F.mse_loss)).hsdp(threshold=0, optimizer_level="level3")
    x, y = batch()
    loss = step(mine(x), mine(y))
    held = loss.grad_fn.step.parameters.gathered
    cut = [group for group in held if group.group.shard_axes]
    assert cut
    assert all(leaf.untyped_storage().size() == 0 for group in cut for leaf in group.leaves.values())
    loss.backward()
    F.mse_loss(serial(x), y).backward()
    assert_gradients(network, serial)


@pattern
def batch_that_copies_do_not_divide_is_refused() -> None:
    network = seeded(Mlp)
    step = AutoParallel(MicroBatchInterleaved(WithLoss(network, F.mse_loss), 2))
    text = refused(StrategyError, step, *map(mine, batch(12)))
    assert "a batch of 3 rows on this rank cannot be cut into 2 equal copies" in text


@pattern
def shard_size_beyond_the_world_is_refused_at_the_first_call() -> None:
    _, network, _ = both()
    step = AutoParallel(WithLoss(network, F.mse_loss)).hsdp(shard_size=8)
    assert "only 4 ranks" in refused(StrategyError, step, *map(mine, batch()))


class Events:
    """Records when collectives start and are waited for, and when segments compute."""

    def __init__(self, step: AutoParallel) -> None:
        from msrun.runtime.execute import segment_runner
        from msrun.runtime.execute import segment_runner as steps

        self.names: list[str] = []
        self._undo: list[tuple[Any, str, Any]] = []
        self._wrap(segment_runner.SegmentRunner, "run", lambda f: lambda *args: self._run(f, *args))
        self._wrap(steps.ValueOnItsWay, "wait", lambda f: lambda future: self._wait(f, future))

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self._undo.append((owner, name, original))
        setattr(owner, name, make(original))

    def _run(self, original: Any, runner: Any, step: Any, copy: Any, index: int, needs_grad: bool) -> None:
        number = next(n for n, other in enumerate(step.copies) if other is copy)
        segment = runner.segments[index]
        run = segment.run
        waits = [name for name in segment.reads if name in copy.arriving]
        for name in waits:
            copy.arriving[name].label = f"{name} of copy {number}"
        segment.run = lambda *values: self.names.append(f"compute {index} of copy {number}") or run(*values)
        try:
            original(runner, step, copy, index, needs_grad)
        finally:
            segment.run = run
        for crossing in segment.crossings:
            if not crossing.collective.is_local:
                self.names.append(f"start {crossing.result} of copy {number}")
                copy.arriving[crossing.result].label = f"{crossing.result} of copy {number}"

    def _wait(self, original: Any, future: Any) -> Tensor:
        if hasattr(future, "label"):
            self.names.append(f"wait {future.label}")
        return original(future)

    def stop(self) -> None:
        for owner, name, original in self._undo:
            setattr(owner, name, original)


@pattern
def while_one_copys_data_travels_the_other_copy_computes() -> None:
    network = seeded(Mlp)
    shard(network.layer1, ((1, 1), (4, 1), (4,)))
    shard(network.layer2, ((1, 4), (1, 4)))
    step = AutoParallel(MicroBatchInterleaved(WithLoss(network, F.mse_loss), 2)).dataset_strategy("full_batch")
    x, y = batch()
    step(x, y)
    events = Events(step)
    try:
        step(x, y)
    finally:
        events.stop()
    names = events.names
    started = next(i for i, name in enumerate(names) if name.startswith("start") and name.endswith("copy 0"))
    waited = next(i for i, name in enumerate(names) if name == names[started].replace("start", "wait"))
    between = names[started + 1 : waited]
    assert any(name.startswith("compute") and name.endswith("copy 1") for name in between), names
    assert any(name.startswith("start") and name.endswith("copy 1") for name in between), names


@pattern
def backward_takes_turns_as_well() -> None:
    network = seeded(Mlp)
    shard(network.layer1, ((1, 1), (4, 1), (4,)))
    shard(network.layer2, ((1, 4), (1, 4)))
    step = AutoParallel(MicroBatchInterleaved(WithLoss(network, F.mse_loss), 2)).dataset_strategy("full_batch")
    x, y = batch()
    x.requires_grad_()  # its gradient needs an all-reduce
    loss = step(x, y)
    compiled = step._captured[0].compiled
    executor, names = compiled.executor, []
    copies = loss.grad_fn.step.copies
    runner = executor.runner
    run, start = runner.run_backward, runner.start_crossings
    number = lambda copy: next(n for n, other in enumerate(copies) if other is copy)  # noqa: E731
    runner.run_backward = lambda s, c, i: names.append(("compute", i, number(c))) or run(s, c, i)
    runner.start_crossings = lambda c, i: names.append(("start", i, number(c))) or start(c, i)
    loss.backward()
    last = len(compiled.segments) - 1
    expected = [("start", last, 0), ("start", last, 1)]
    slots = executor.order.backward
    for slot, number_of_copy in itertools.product(slots, (0, 1)):
        for index in slot:
            expected.append(("compute", index, number_of_copy))
            if index:
                expected.append(("start", index - 1, number_of_copy))
    assert names == expected
    assert [index for slot in slots for index in slot] == list(range(last, -1, -1))
    assert len(slots) > 1, "the gradients of layer1's input are summed while the other copy computes"
