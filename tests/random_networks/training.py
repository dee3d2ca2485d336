"""Trains the network of a case: in one process, as the user would, or as one rank of a parallel job."""

import copy
import random
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    Layout,
    MicroBatchInterleaved,
    Pipeline,
    clip_grad_norm_,
    get_rank,
    load_checkpoint,
    no_init_parameters,
    save_checkpoint,
    shard,
    value_and_grad,
)
from random_networks import habits
from random_networks.blocks import BLOCKS
from random_networks.case import WIDTH
from random_networks.network import CONTAINERS, Back, Front, loss_of, make_batches, make_training
from random_networks.reports import Note, whole_of

LOSSES = "losses"
MAX_NORM = 0.05
MASKED = ("masked", "ignored")
"""Losses whose weight of a row depends on the others."""
AVERAGED = ("scores", "both")
"""What is returned where a loss is taken outside: that of this rank's rows."""
CLASSES = {
    name.lower(): getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adafactor")
}
_WRAPPERS = {"copies": MicroBatchInterleaved, "accumulate": GradAccumulation}


def draws(case):
    """Return whether the network takes random numbers."""
    return any(BLOCKS[piece.kind].draws for piece in case.pieces)


def crosses_rows(case):
    """Return whether a row's result depends on the other rows of its micro batch."""
    return case.loss in MASKED or any(BLOCKS[piece.kind].crosses_rows for piece in case.pieces)


def tolerance(case):
    """Return the largest allowed difference, relative to a tensor's largest value."""
    if case.is_16_bit:
        return 6e-2  # what a gradient of many terms that cancel, as before a batch norm, has lost in 16 bits
    if case.optimizer[0] == "muon":
        return 1e-3  # torch's Muon rounds to bfloat16 inside
    return 1e-9


def use_dtype(case):
    """Set and return the type of weights and data."""
    dtype = torch.float32 if case.is_16_bit else torch.float64
    torch.set_default_dtype(dtype)
    return dtype


def train_alone(case):
    """Train in this process: torch alone where nothing is drawn and nothing is computed in 16 bits.

    The batch is divided only where that changes the result; its rows are then in the order in which the ranks' micro
    batches take them.
    """
    dtype = use_dtype(case)
    training = make_training(case)
    habits.prepare(case, training.network)
    called = wrap(case, training) if crosses_rows(case) else training
    if case.chain:
        called = chained(*halves_of(case, training))
    if draws(case) or case.is_16_bit:
        called = AutoParallel(called)
        if case.is_16_bit:
            called.mixed_precision("bfloat16")
    order = row_order(case, case.rows) if crosses_rows(case) else None

    def feed(value):
        return value if order is None else value[row_order(case, len(value))]

    def put_back(value):
        return value if order is None else value[row_order(case, len(value)).argsort()]

    found = loop(case, training, called, dtype, feed)
    if not all(note.value.isfinite().all() for note in found if note.name == LOSSES):
        raise ArithmeticError("a loss that is not finite")
    return [replace(note, value=put_back(note.value)) if note.kind == "rows" else note for note in found]


def row_order(case, rows):
    """Return the rows of the global batch, micro batch by micro batch and in each rank by rank."""
    return torch.arange(rows).view(case.data_ranks, case.parts, -1).transpose(0, 1).reshape(-1)


def train_rank(case, folder):
    """Train as one rank of the world that this process has joined; `with_saved_state` has what it saves."""
    rank = get_rank()
    dtype = use_dtype(case)
    if habits.has(case, "deferred"):
        with no_init_parameters():
            training = make_training(case)
    else:
        training = make_training(case)
    habits.prepare(case, training.network)
    for path, arguments in case.cuts:
        shard(training.network.get_submodule(path), **shard_arguments(arguments))
    whole = wrap(case, training)
    if case.form == "step":
        parameters = [parameter for parameter in training.parameters() if parameter.requires_grad]
        gradients_of = value_and_grad(whole, None, parameters, has_aux=case.returns != "loss")
        step = AutoParallel(lambda *batch, **named: gradients_of(*batch, **named))
    else:
        step = AutoParallel(whole, case.mode)
    if case.chain:
        step = chained(*(configure(case, AutoParallel(half, case.mode)) for half in halves_of(case, training)))
    else:
        configure(case, step)

    index, count = rank % case.data_ranks, case.data_ranks

    def feed(value):
        return value.chunk(count)[index]

    return loop(case, training, step, dtype, feed, folder)


def halves_of(case, training):
    """Return the two networks of a chain."""
    return Front(training.network, case.chain), Back(case, training.network)


def chained(front, back):
    """Return what calls one network with the other's result."""
    return lambda x, *rest, **named: back(front(x), *rest, **named)


def configure(case, step):
    """Set what the case says."""
    step.dataset_strategy(case.dataset)
    if case.hsdp is not None:
        step.hsdp(**case.hsdp)
    if case.pipeline is not None:
        step.pipeline(case.pipeline["stages"], case.pipeline["scheduler"], case.pipeline["interleave"])
    if case.is_16_bit:
        step.mixed_precision("bfloat16")
    for name, *values in case.settings:
        if name == "recompute":
            step.recompute("auto", memory_limit_mb=values[0])
        else:
            getattr(step, name)(*values)
    return step


def shard_arguments(arguments):
    """Return arguments of `shard`: tuples, or Layouts where the case gives names."""
    found = dict(arguments)
    matrix = found.pop("matrix", None)
    layout = Layout(tuple(matrix), ("dp", "mp")) if matrix else None

    def entry(given):
        return tuple(given) if layout is None else layout(*(tuple(n) if isinstance(n, list) else n for n in given))

    return {name: tuple(entry(given) for given in value) for name, value in found.items()}


def wrap(case, training):
    """Return the network in the wrappers that divide its batch."""
    whole = training
    for kind, parts in reversed(case.wrappers):
        whole = _WRAPPERS[kind](whole, parts)
    return whole if case.pipeline is None else Pipeline(whole, case.pipeline["micro_size"])


def loop(case, training, called, dtype, feed, folder=None):
    """Train, and return notes: second results of the steps, losses, buffers and the whole state at the end.

    Among the losses are those of evaluations, 1 for each hook that was called, 0 for one that was not, and what the
    script has read of the weights.

    Args:
        feed: global batch -> what is passed.
        folder: for the checkpoint from which the whole parameters are read; None: they are whole here.
    """
    found, numbers = [], []
    optimizers = []
    rates = []
    copies = Copies(case, training)
    random.seed(case.seed)
    np.random.seed(case.seed)
    is_local = folder is not None and (case.returns in AVERAGED or case.mode == "data_parallel")

    def number(loss):
        """Return a loss of the whole batch."""
        loss = loss.detach().clone()
        if is_local:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return float(loss)

    def make_optimizers():
        optimizers.extend(build_optimizers(case, training.named_parameters()))
        if habits.has(case, "rates"):
            rates.extend(torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers)

    if case.optimizer_made == "before":
        make_optimizers()
    trained = [parameter for parameter in training.parameters() if parameter.requires_grad]
    state = feed(torch.zeros(case.rows, WIDTH, dtype=dtype)) if case.hidden else None
    for step, (x, y) in enumerate(make_batches(case, dtype)):
        habits.before_step(case, training.network, step)
        named = habits.call_arguments(case, step)
        if ("smaller", step) in case.habits:
            x, y = x[: len(x) // 2], y[: len(y) // 2]
        for rows, tokens in [habit[2:] for habit in case.habits if habit[:2] == ("sizes", step)]:
            x, y = (resized(case, value, rows, tokens) for value in (x, y))
        x, y = feed(x), feed(y)
        if ("evaluate", step) in case.habits:
            numbers.append(number(evaluate(case, training, called, x, y)))
        for _ in range(2 if habits.has(case, "backward_twice") else 1):
            losses = []
            gradients = None
            for batch in [x, x.flip(-1)] if case.backward in ("calls", "reversed") else [x]:
                if case.hidden:
                    named["state"] = state
                if case.form == "step":
                    result, gradients = take_gradients(case, trained, called, batch, y, named)
                else:
                    result = called(batch, y, **named)
                taken, other = take_apart(case, result, y)
                losses += taken
                state = other
                if other is not None:
                    found.append(Note("rows", f"second result of step {step}", other.detach().clone()))
            if not optimizers:
                make_optimizers()
            if gradients is None:
                run_backward(case.backward, losses)
            else:
                for parameter, gradient in gradients:
                    parameter.grad = gradient
            numbers += map(number, losses)
            state = None if state is None else state.detach()
        numbers += habits.take_seen(case, training.network)
        if case.clip == "torch":
            torch.nn.utils.clip_grad_norm_(training.parameters(), MAX_NORM)
        elif case.clip == "msrun":
            clip_grad_norm_(training.parameters(), MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not habits.has(case, "keep_zeros"))
        for rate in rates:
            rate.step()
        numbers += habits.after_step(case, training.network, step)
        copies.follow(training, step)
    found.append(Note("whole", LOSSES, torch.tensor(numbers, dtype=torch.float64)))
    if case.pipeline is None:
        found += [Note("whole", f"buffer {name}", value.clone()) for name, value in training.named_buffers()]
    return [*found, Note("named", "after training", whole_state(case, copies.take(training), folder))]


def resized(case, value, rows, tokens):
    """Return a batch with other rows, and of sequences with other tokens."""
    value = value[torch.arange(rows) % len(value)]
    return value[:, torch.arange(tokens) % value.shape[1]] if case.family == "sequences" else value


class Copies:
    """What a script keeps of a network while it trains, and saves in the end."""

    def __init__(self, case, training):
        self._finish = case.finish
        self._copy = copy.deepcopy(training) if case.finish == "ema" else None
        self._slow: list[Tensor] = []

    def follow(self, training, step):
        """Do what is done after a step."""
        if self._finish == "averaged":
            self._copy = self._copy or torch.optim.swa_utils.AveragedModel(training)
            self._copy.update_parameters(training)
        elif self._finish in ("ema", "ema_later"):
            self._copy = self._copy or copy.deepcopy(training)
            with torch.no_grad():
                for mine, theirs in zip(self._copy.parameters(), training.parameters(), strict=True):
                    mine.mul_(0.9).add_(theirs, alpha=0.1)
        elif self._finish == "lookahead":
            self._slow = self._slow or [parameter.detach().clone() for parameter in training.parameters()]
            if step % 2 == 1:
                with torch.no_grad():
                    for parameter, slow in zip(training.parameters(), self._slow, strict=True):
                        slow.add_(parameter - slow, alpha=0.5)
                        parameter.copy_(slow)

    def take(self, training):
        """Return the network that is saved."""
        if self._finish == "deepcopy":
            return copy.deepcopy(training)
        if self._copy is None:
            return training
        return getattr(self._copy, "module", self._copy)


def run_backward(how, losses):
    """Take the losses of a step backward."""
    if how == "retain":
        losses[0].backward(retain_graph=True)
        losses[1].backward()
    elif how == "reversed":
        for loss in reversed(losses):
            loss.backward()
    else:
        sum(losses[1:], losses[0]).backward()


def take_apart(case, result, y):
    """Return the losses and what came with them."""
    if case.returns == "scores":
        return [loss_of(case.loss, result, y)], None
    if case.returns == "two":
        return list(result), None
    if case.returns == "both":
        return [result[0] + 0.1 * (result[1] - 1).square().mean()], result[1]
    if isinstance(result, Tensor):
        return [result], None
    loss, other = CONTAINERS.get(case.returns, CONTAINERS["tuple"])[1](result)
    return [loss], other


def evaluate(case, training, called, x, y):
    """Return the loss in evaluation."""
    training.eval()
    with torch.no_grad():
        result = called(x, y)
        if isinstance(called, AutoParallel) and not isinstance(called.network, nn.Module):
            result, _ = result  # gradients
        losses, _ = take_apart(case, result, y)
    training.train()
    return losses[0]


def take_gradients(case, parameters, called, x, y, named):
    """Return the step function's result, and each parameter with its gradient.

    Args:
        parameters: those of the first step; a step function goes on with them when the network changes.
    """
    if isinstance(called, AutoParallel) and not isinstance(called.network, nn.Module):
        result, gradients = called(x, y, **named)
    else:
        run = value_and_grad(called, None, parameters, has_aux=case.returns != "loss")
        result, gradients = run(x, y, **named)
    return result, list(zip(parameters, gradients, strict=True))


def whole_state(case, saved, folder):
    """Return every parameter and buffer; ranks leave them in a checkpoint, unless a state_dict is asked for."""
    if case.finish == "state_dict" or folder is None:
        return {name: whole_of(value) for name, value in saved.state_dict().items()}
    save_checkpoint(saved, folder / "checkpoint")
    return {}


def with_saved_state(case, notes, folder):
    """Return rank 0's notes with what the ranks have saved, as one process reads it."""
    if case.finish == "state_dict":
        return notes
    read = load_checkpoint(folder / "checkpoint")
    state = {name: value for name, value in read.items() if isinstance(value, Tensor)}
    return [*notes[:-1], replace(notes[-1], value=state)]


def build_optimizers(case, named):
    """Return the optimizer; Muon, which takes matrices alone, has SGD at its side."""
    kind, options = case.optimizer
    parameters = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if kind == "muon":
        matrices = [p for _, p in parameters if p.dim() == 2]
        rest = [p for _, p in parameters if p.dim() != 2]
        found = [torch.optim.Muon(matrices, lr=1e-2)] if matrices else []
        return found + ([torch.optim.SGD(rest, lr=1e-2)] if rest else [])
    if habits.has(case, "groups"):
        split = [[p for n, p in parameters if n.endswith("bias") is is_bias] for is_bias in (False, True)]
        groups = [{"params": group, "lr": rate} for group, rate in zip(split, (1e-2, 2e-2), strict=True) if group]
        return [CLASSES[kind](groups, **options)]
    return [CLASSES[kind]([p for _, p in parameters], **options)]
