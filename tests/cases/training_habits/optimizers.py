"""Optimizers and schedules, torch's and the script's own."""

import copy

import torch
from torch.optim import lr_scheduler as schedules

from msrun.runtime import optim
from training_habits.trial import Criterion, habit, sgd, train


def optimized(name, make):
    @habit(f"optimizer: {name}")
    def _(t):
        train(t, Criterion(), optimizer=make, steps=4)


for _kind in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop"):
    optimized(_kind, lambda net, kind=_kind: getattr(torch.optim, kind)(net.parameters(), lr=0.01))
optimized("Adam, foreach off, amsgrad", lambda net: torch.optim.Adam(net.parameters(), foreach=False, amsgrad=True))
optimized("Adam, fused, maximize", lambda net: torch.optim.Adam(net.parameters(), fused=True, maximize=True))
optimized("SGD, foreach, nesterov", lambda net: sgd(net, momentum=0.9, nesterov=True, foreach=True, weight_decay=0.1))
optimized("RMSprop, centered", lambda net: torch.optim.RMSprop(net.parameters(), 0.01, centered=True, momentum=0.9))
optimized("Adafactor", lambda net: torch.optim.Adafactor(net.parameters(), lr=0.01))
optimized("learning rate as a tensor", lambda net: torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01)))


class Own(torch.optim.Optimizer):
    """An optimizer as scripts have their own; a subclass says how one parameter moves."""

    def __init__(self, net):
        super().__init__(net.parameters(), {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p), alpha=-group["lr"])

    def direction(self, p):
        raise NotImplementedError


class Lion(Own):
    def direction(self, p):
        state = self.state[p]
        if not state:
            state["mean"] = torch.zeros_like(p)
        direction = state["mean"].mul(0.9).add(p.grad, alpha=0.1).sign_()
        state["mean"].mul_(0.99).add_(p.grad, alpha=0.01)
        return direction


class Lars(Own):
    """Steps as long as the weight is large, with buffers made at once."""

    def __init__(self, net):
        super().__init__(net)
        self.buffers = {p: torch.zeros_like(p) for p in net.parameters()}

    def direction(self, p):
        ratio = p.norm() / (p.grad.norm() + 1e-6)
        return p.grad * ratio.clamp(max=1.0)


class Factored(Own):
    """Second moments of rows and columns."""

    def direction(self, p):
        if p.dim() != 2:
            return p.grad
        square = p.grad**2 + 1e-8
        return p.grad * (square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()).rsqrt()


optimized("of the script: Lion", Lion)
optimized("of the script: LARS, buffers made at once", Lars)
optimized("of the script: moments of rows and columns", Factored)


_matrices = {"weight_decay": 0.1, "decay_filter": lambda one: one.dim() > 1}
optimized("of ours: AdamWeightDecay", lambda net: optim.AdamWeightDecay(net.parameters(), 0.01, **_matrices))
optimized("of ours: Lamb", lambda net: optim.Lamb(net.parameters(), 0.01, weight_decay=0.1))
optimized("of ours: LazyAdam", lambda net: optim.LazyAdam(net.parameters(), 0.01, use_nesterov=True, weight_decay=0.1))
optimized("of ours: FTRL", lambda net: optim.FTRL(net.parameters(), lr=0.05, l1=1e-3, l2=1e-2))
optimized("of ours: LARS", lambda net: optim.LARS(optim.Momentum(net.parameters(), 0.1, 0.9), coefficient=0.1))


def _groups(net):
    biases, others = ([p for p in net.parameters() if (p.dim() == 1) is is_bias] for is_bias in (True, False))
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 0.001}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


optimized("groups with their own rates and decay", _groups)


@habit("optimizer: LBFGS with a closure")
def _(t):
    net = Criterion()
    step = t.wrap(net)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    for _ in range(3):
        batch = t.batch()

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = step(*batch)
            loss.backward()
            return loss

        t.loss(optimizer.step(closure))
    t.state(step)


@habit("optimizer: state saved and loaded into another")
def _(t):
    net = Criterion()
    kept = [torch.optim.Adam(net.parameters(), lr=0.01)]

    def after(net, number):
        if number == 1:
            other = torch.optim.Adam(net.parameters(), lr=0.5)
            other.load_state_dict(copy.deepcopy(kept[0].state_dict()))
            kept[0] = other

    train(t, net, optimizer=lambda _: kept, after=after, steps=4)


@habit("optimizer: momentum read and reset")
def _(t):
    net = Criterion()
    optimizer = sgd(net, momentum=0.9)

    def after(_net, number):
        states = optimizer.state.values()
        t.whole(sum(float(state["momentum_buffer"].norm()) ** 2 for state in states) ** 0.5, "momentum")
        for state in states if number == 1 else ():
            state["momentum_buffer"].zero_()

    train(t, net, optimizer=lambda _: optimizer, after=after, steps=4)


@habit("optimizer: zero_grad of the module, set_to_none=False")
def _(t):
    net = Criterion()
    step, optimizer = t.wrap(net), sgd(net, momentum=0.5)
    for _ in range(3):
        step.zero_grad(set_to_none=False)
        loss = step(*t.batch())
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.state(step)


@habit("optimizer: GradScaler that is on")
def _(t):
    net = Criterion()
    step, optimizer, scaler = t.wrap(net), sgd(net), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        loss = step(*t.batch())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        t.loss(loss)
    t.state(step)


def scheduled(name, make, *, reads_loss=False):
    """A habit of a schedule; one that reads the loss gets that of the whole batch.

    Captured steps give that loss; elsewhere the script averages it, as DDP scripts do.
    """

    @habit(f"schedule: {name}")
    def _(t):
        net = Criterion()
        step, optimizer = t.wrap(net), sgd(net, momentum=0.9)
        schedule = make(optimizer)
        for _ in range(4):
            loss = step(*t.batch())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step(*([t.mean_of_ranks(loss)] if reads_loss else []))
            t.loss(loss)
        t.whole(optimizer.param_groups[0]["lr"], "rate")
        t.state(step)


scheduled("OneCycleLR, with momentum", lambda o: schedules.OneCycleLR(o, 0.1, total_steps=5))
scheduled(
    "ReduceLROnPlateau by the loss of the whole batch",
    lambda o: schedules.ReduceLROnPlateau(o, patience=0, factor=0.5),
    reads_loss=True,
)
