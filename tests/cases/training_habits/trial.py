"""A habit of training scripts, and one trial of it: in one process, or on one rank of a world in a parallel mode.

A habit is a function of a `Trial`, written as a user writes a script: `trial.wrap(net)` is AutoParallel of the mode,
and the network itself in one process; `trial.batch()` is what this rank passes. What the trial notes is compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from random_networks.reports import Note, whole_of
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from msrun.runtime import AutoParallel, Pipeline, get_rank, shard

WORLD_SIZE = 2
ALONE = "one process"
IN_HALVES = "one process, half of the rows at a time"
"""What data parallelism and micro batches mean: each half of the rows by itself, and the mean of the losses."""
MODES = ("semi_auto", "hsdp level1", "hsdp level3", "shard", "pipeline", "data_parallel", "data_parallel hsdp")
"""shard: linear layers cut by columns and by rows in turn; shard and pipeline get the whole batch on every rank."""
CAPTURED = MODES[:4]
OWN_ROWS = MODES[5:]
"""Modes in which each rank runs the network on its own rows."""
WITH_RESULTS = (*CAPTURED, *OWN_ROWS)
"""Modes in which a call in training returns more than a loss."""


class Trial:
    """One run of a habit."""

    def __init__(self, mode, *, draws=False, cuts=2, broadcasts=False):
        self.mode = mode
        self._broadcasts = broadcasts
        self.notes: list[Note] = []
        self._draws = draws
        self._cuts = cuts
        self._numbers = torch.Generator().manual_seed(11)
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)

    @property
    def is_pipeline(self):
        return self.mode.startswith("pipeline")

    @property
    def passes_all(self):
        """Whether this process passes the whole batch."""
        return self.mode in (ALONE, IN_HALVES, "shard") or self.is_pipeline

    def wrap(self, net):
        """Return the network in the mode of this trial."""
        if self.mode == ALONE:
            return AutoParallel(net) if self._draws else net
        if self.mode == IN_HALVES:
            return InHalves(net, broadcasts=self._broadcasts)
        if self.mode in OWN_ROWS:
            step = AutoParallel(net, "data_parallel")
            return step.hsdp(threshold=0, optimizer_level="level3") if "hsdp" in self.mode else step
        if self.is_pipeline:
            scheduler = self.mode.partition(" ")[2] or "1f1b"
            return AutoParallel(Pipeline(net, 2)).dataset_strategy("full_batch").pipeline(WORLD_SIZE, scheduler)
        step = AutoParallel(net)
        if "hsdp" in self.mode:
            step.hsdp(threshold=0, optimizer_level=self.mode.removeprefix("hsdp "))
        if self.mode == "shard":
            step.dataset_strategy("full_batch")
            self._cut(net)
        return step

    def _cut(self, net):
        layers = [m for m in net.modules() if type(m) is nn.Linear]
        ones = (1,) * (self._cuts - 1)
        for number, layer in enumerate(layers):
            by_columns = ((*ones, 1), (WORLD_SIZE, 1))
            by_rows = ((*ones, WORLD_SIZE), (1, WORLD_SIZE))
            wanted, size = (by_columns, layer.out_features) if number % 2 == 0 else (by_rows, layer.in_features)
            if size % WORLD_SIZE == 0:
                shard(layer, wanted)

    def randn(self, *shape):
        """Return random numbers, the same on every rank."""
        return torch.randn(*shape, generator=self._numbers)

    def randint(self, high, *shape):
        """Return random whole numbers, the same on every rank."""
        return torch.randint(0, high, shape, generator=self._numbers)

    def mine(self, rows):
        """Return this rank's part of a tensor whose first dimension is the batch."""
        return rows if self.passes_all else rows.chunk(WORLD_SIZE)[get_rank()].clone()

    def batch(self):
        """Return this rank's part of the next batch: what goes in, and what is to come out."""
        return self.mine(self.randn(8, 8)), self.mine(self.randn(8, 4))

    def mean_of_ranks(self, value):
        """Return the mean of what the ranks give, by torch's own all-reduce."""
        value = value.detach().clone()
        if self.mode not in (ALONE, IN_HALVES):
            dist.all_reduce(value)
            value /= WORLD_SIZE
        return value

    def loss(self, value, name="loss"):
        """Note a loss, or another number that is a mean over the batch."""
        self.notes.append(Note("mean", name, float(value)))

    def rows(self, value, name="rows"):
        """Note a result that has a row for each row of the batch."""
        self.notes.append(Note("rows", name, value.detach().clone()))

    def whole(self, value, name="value"):
        """Note what has to be the same on every rank."""
        value = value if isinstance(value, Tensor) else torch.tensor(value)
        self.notes.append(Note("whole", name, whole_of(value)))

    def named(self, name, tensors):
        """Note tensors of which each rank may have some, as the ranks of a pipeline do."""
        held = {key.replace("network.", ""): self._held(tensor) for key, tensor in tensors.items()}
        self.notes.append(
            Note("named", name, {key: whole_of(tensor) for key, tensor in held.items() if tensor.numel()})
        )

    def _held(self, tensor):
        """Return the tensor, or what this rank of a pipeline has of it: all or nothing."""
        return getattr(tensor, "to_local", lambda: tensor)() if self.is_pipeline else tensor

    def gradients(self, net):
        """Note the gradients of a network's parameters."""
        self.named("gradient", {n: p.grad for n, p in net.named_parameters() if p.grad is not None})

    def state(self, net):
        """Note parameters and buffers of what `wrap` returned, or of a network outside."""
        state = {name.replace("network.", ""): value for name, value in net.state_dict().items()}
        found = {name: whole_of(value) for name, value in state.items() if isinstance(value, Tensor)}
        if isinstance(net, InHalves) and self._broadcasts:
            self.notes.append(Note("of ranks", "weight", [{**found, **net.buffers_of(half)} for half in range(2)]))
        else:
            self.notes.append(Note("named", "weight", found))


class InHalves(nn.Module):
    """Calls a network with each half of the rows: numbers are averaged, results of rows joined.

    Args:
        broadcasts: each half begins with the first half's buffers, as under DDP; otherwise with those that the half
            before has left, as micro batches do.
    """

    def __init__(self, net, *, broadcasts):
        super().__init__()
        self.network = net
        self._broadcasts = broadcasts
        self._own: list[dict[str, Tensor]] = [{}, {}]

    def buffers_of(self, half):
        return {**dict(self.network.named_buffers()), **self._own[half]}

    def forward(self, *args, **named):
        if self._broadcasts:
            before = {name: value.detach().clone() for name, value in self.network.named_buffers()}
            self._own = [before, before]
        results, drawn = [], torch.get_rng_state()
        for half in range(2):
            torch.set_rng_state(drawn)
            if self._broadcasts:
                self._put(self._own[half])
            results.append(self.network(*pytree.tree_map(_half(half), args), **pytree.tree_map(_half(half), named)))
            self._own[half] = {name: value.detach().clone() for name, value in self.network.named_buffers()}
        if self._broadcasts:
            self._put(self._own[0])
        return pytree.tree_map(lambda a, b: _join(a, b) if isinstance(a, Tensor) else a, *results)

    def _put(self, buffers):
        for name, value in buffers.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.network.get_submodule(owner), leaf, value.clone())

    def named_parameters(self, *args, **named):
        return self.network.named_parameters(*args, **named)

    def state_dict(self, *args, **named):
        return self.network.state_dict(*args, **named)

    def load_state_dict(self, *args, **named):
        return self.network.load_state_dict(*args, **named)


def _half(number):
    return lambda value: value.chunk(2)[number] if isinstance(value, Tensor) and value.dim() else value


def _join(first, second):
    return torch.cat([first, second]) if first.dim() else (first + second) / 2


@dataclass(frozen=True)
class Habit:
    name: str
    run: Callable[[Trial], None]
    modes: Collection[str] = MODES
    draws: bool = False
    """Takes torch's random numbers in a captured network: compared with AutoParallel in one process."""
    cuts: int = 2
    """Dimensions of what linear layers get."""
    limit: float = 1e-10
    """Largest difference, relative to a tensor's largest value."""

    def notes(self, mode, *, broadcasts=False):
        """Return what one trial of it has seen."""
        trial = Trial(mode, draws=self.draws, cuts=self.cuts, broadcasts=broadcasts)
        self.run(trial)
        return trial.notes


HABITS = {}


def habit(name, modes=MODES, *, draws=False, cuts=2, limit=1e-10):
    """Register the decorated script."""

    def register(run):
        assert name not in HABITS, name
        HABITS[name] = Habit(name, run, tuple(modes), draws, cuts, limit)
        return run

    return register


# -- networks and loops that many scripts have -------------------------------------------------------------------------


class Mlp(nn.Module):
    """Scores of each row."""

    def __init__(self, inputs=8, hidden=16, outputs=4):
        super().__init__()
        self.a, self.b = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Criterion(nn.Module):
    """A network with its loss."""

    def __init__(self, net=None, loss=F.mse_loss):
        super().__init__()
        self.net, self._loss = net or Mlp(), loss

    def forward(self, x, y):
        return self._loss(self.net(x), y)


class Step(nn.Module):
    """A network whose forward pass is a function of it and the batch; tensors among its parts are buffers."""

    def __init__(self, forward, net=None, **parts):
        super().__init__()
        self.net = net or Mlp()
        self._forward = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args, **named):
        return self._forward(self, *args, **named)


def sgd(*nets, lr=0.05, **options):
    return torch.optim.SGD(dict.fromkeys(p for net in nets for p in net.parameters()), lr=lr, **options)


def passed(_loss):
    """The backward pass when `loss_of` has made it."""


def train(
    trial,
    *nets,
    steps=3,
    batch=lambda t: (t.randn(8, 8), t.randn(8, 4)),
    more=(),
    optimizer=sgd,
    renews=False,
    loss_of=lambda step, *batch: step(*batch),
    backward=Tensor.backward,
    before=lambda _net, _step: None,
    after_backward=lambda _net, _step: None,
    after=lambda _net, _step: None,
):
    """Train in the usual loop, and note losses, first gradients and the state at the end; return what was wrapped.

    Args:
        batch: the whole of a batch, of which `loss_of` gets this rank's part.
        more: one more argument of each step.
        optimizer: makes one, or a list of them, of the networks.
        renews: makes it anew in each step.
        loss_of: what is wrapped, and a batch -> the loss.
        before: called with the first network and the step's number before each step, `after_backward`, `after` in it.
    """
    wrapped, optimizers = [trial.wrap(net) for net in nets], [] if renews else _listed(optimizer(*nets))
    for number in range(steps):
        before(nets[0], number)
        optimizers = _listed(optimizer(*nets)) if renews else optimizers
        if backward is passed:
            _zero(optimizers)
        loss = loss_of(*wrapped, *map(trial.mine, batch(trial)), *more[number : number + 1])
        if backward is not passed:
            _zero(optimizers)
        backward(loss)
        if number == 0:
            for net in wrapped:
                trial.gradients(net)
        after_backward(nets[0], number)
        for one in optimizers:
            one.step()
        trial.loss(loss)
        after(nets[0], number)
    for net in wrapped:
        trial.state(net)
    return wrapped[0]


def _listed(optimizer):
    return optimizer if isinstance(optimizer, list) else [optimizer]


def _zero(optimizers):
    for one in optimizers:
        one.zero_grad()


def step_habit(name, modes=MODES, *, net=Mlp, parts=dict, draws=False, cuts=2, **options):
    """Register training of a `Step` with the decorated forward pass, by `options` of `train`."""

    def register(forward):
        @habit(name, modes, draws=draws, cuts=cuts)
        def _(t):
            train(t, Step(forward, net(), **parts()), **options)

        return forward

    return register


def loss_habit(name, make=Criterion, modes=MODES, **options):
    """Register training whose loss is the decorated function of what is wrapped and a batch."""

    def register(loss_of):
        @habit(name, modes)
        def _(t):
            train(t, make(), loss_of=loss_of, **options)

        return loss_of

    return register


def scores(name, forward, between=lambda _net, _step: None, modes=MODES, *, limit=1e-10, **parts):
    """Register training of a forward pass that gives scores of (x), maybe with more; the loss is of the scores.

    Args:
        between: is called with the network and the step's number before each step.
        parts: make the network's parts.
    """

    @habit(name, modes, limit=limit)
    def _(t):
        net = Step(lambda self, x, y: F.mse_loss(forward(self, x), y), **{key: make() for key, make in parts.items()})
        train(t, net, before=between)
