"""Optimizers and schedules, torch's and the script's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from training_habits.trial import Criterion, Mlp, Trial, habit, sgd, train


def optimized(name: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    @habit(f"optimizer: {name}")
    def _(t: Trial) -> None:
        train(t, Criterion(Mlp()), optimizer=lambda net: make(net.parameters()), steps=4)


for _kind in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop"):
    optimized(_kind, lambda p, kind=_kind: getattr(torch.optim, kind)(p, lr=0.01))
optimized("Adam, foreach off, amsgrad", lambda p: torch.optim.Adam(p, lr=0.01, foreach=False, amsgrad=True))
optimized("AdamW, fused", lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
optimized("Adafactor", lambda p: torch.optim.Adafactor(p, lr=0.01))
optimized("SGD, maximize, dampening", lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.1, maximize=True))
optimized("learning rate as a tensor", lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)))


class Lion(torch.optim.Optimizer):
    """An optimizer as scripts have their own."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                first, second = group["betas"]
                p.add_(state["mean"].mul(first).add(p.grad, alpha=1 - first).sign_(), alpha=-group["lr"])
                state["mean"].mul_(second).add_(p.grad, alpha=1 - second)


class Lars(torch.optim.Optimizer):
    """Steps as long as the weight is large."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.buffers = {p: torch.zeros_like(p) for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.norm() / (p.grad.norm() + 1e-6)
                    p.add_(p.grad * ratio.clamp(max=1.0), alpha=-group["lr"])


class Shaped(torch.optim.Optimizer):
    """Steps by the square root of the number of rows."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / p.shape[0] ** 0.5)


class Factored(torch.optim.Optimizer):
    """Second moments of rows and columns."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() == 2:
                    square = p.grad**2 + 1e-8
                    scale = (square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()).rsqrt()
                    p.add_(p.grad * scale, alpha=-group["lr"])
                else:
                    p.add_(p.grad, alpha=-group["lr"])


optimized("of the script: Lion", Lion)
optimized("of the script: LARS, buffers made at once", Lars)
optimized("of the script: by the number of rows", Shaped)
optimized("of the script: moments of rows and columns", Factored)


@habit("optimizer: LBFGS with a closure")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step = t.wrap(net)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    for _ in range(3):
        x, y = t.batch()

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = step(x, y)
            loss.backward()
            return loss

        t.loss(optimizer.step(closure))
    t.state(step)


@habit("optimizer: SGD with a closure")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step, optimizer = t.wrap(net), sgd(net)
    for _ in range(3):
        x, y = t.batch()

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = step(x, y)
            loss.backward()
            return loss

        t.loss(optimizer.step(closure))
    t.state(step)


@habit("optimizer: two of them, for weights and biases")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step = t.wrap(net)
    both = [
        torch.optim.AdamW([p for p in net.parameters() if p.dim() == 2], lr=0.01),
        torch.optim.SGD([p for p in net.parameters() if p.dim() == 1], lr=0.1),
    ]
    for _ in range(3):
        loss = step(*t.batch())
        loss.backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        t.loss(loss)
    t.state(step)


@habit("optimizer: groups with their own rates and decay")
def _(t: Trial) -> None:
    def make(net: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": [p for n, p in net.named_parameters() if "bias" in n], "weight_decay": 0.0},
                {"params": [p for n, p in net.named_parameters() if "bias" not in n], "lr": 0.001},
            ],
            lr=0.01,
            weight_decay=0.1,
        )

    train(t, Criterion(Mlp()), optimizer=make)


@habit("optimizer: made anew in each step")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step = t.wrap(net)
    for _ in range(3):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        loss = step(*t.batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        t.loss(loss)
    t.state(step)


@habit("optimizer: state saved and loaded into another")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step = t.wrap(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for number in range(4):
        if number == 2:
            other = torch.optim.Adam(net.parameters(), lr=0.5)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer = other
        loss = step(*t.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.state(step)


@habit("optimizer: momentum read and reset")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step = t.wrap(net)
    optimizer = sgd(net, momentum=0.9)
    for number in range(4):
        loss = step(*t.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
        if number == 1:
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()
        else:
            t.whole(sum(float(s["momentum_buffer"].norm()) ** 2 for s in optimizer.state.values()) ** 0.5, "momentum")
    t.state(step)


@habit("optimizer: step hooks")
def _(t: Trial) -> None:
    def make(net: Any) -> torch.optim.Optimizer:
        optimizer = sgd(net)

        def halve(optimizer: Any, _args: Any, _named: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        return optimizer

    train(t, Criterion(Mlp()), optimizer=make)


@habit("optimizer: zero_grad of the module, set_to_none=False")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step, optimizer = t.wrap(net), sgd(net, momentum=0.5)
    for _ in range(3):
        step.zero_grad(set_to_none=False)
        loss = step(*t.batch())
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.state(step)


@habit("optimizer: GradScaler that is off")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step, optimizer, scaler = t.wrap(net), sgd(net), torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(3):
        loss = step(*t.batch())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        t.loss(loss)
    t.state(step)


@habit("optimizer: GradScaler that is on")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
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


def scheduled(name: str, make: Callable[[torch.optim.Optimizer], Any], *, reads_loss: bool = False) -> None:
    @habit(f"schedule: {name}")
    def _(t: Trial) -> None:
        net = Criterion(Mlp())
        step, optimizer = t.wrap(net), sgd(net, momentum=0.9)
        schedule = make(optimizer)
        for _ in range(4):
            loss = step(*t.batch())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step(*([loss.detach()] if reads_loss else []))
            t.loss(loss)
        t.whole(optimizer.param_groups[0]["lr"], "rate")
        t.state(step)


scheduled("StepLR", lambda o: schedules.StepLR(o, 2))
scheduled(
    "warm-up and cosine in turn",
    lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o, 0.1, 1.0, 2), schedules.CosineAnnealingLR(o, 3)], [2]),
)
scheduled("OneCycleLR, with momentum", lambda o: schedules.OneCycleLR(o, 0.1, total_steps=5))
scheduled("LambdaLR", lambda o: schedules.LambdaLR(o, lambda epoch: 0.5**epoch))


@habit("schedule: ReduceLROnPlateau by the loss of the whole batch")
def _(t: Trial) -> None:
    """Captured steps give that loss; elsewhere the script averages it, as DDP scripts do."""
    net = Criterion(Mlp())
    step, optimizer = t.wrap(net), sgd(net)
    schedule = schedules.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for _ in range(4):
        loss = step(*t.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step(t.mean_of_ranks(loss))
        t.loss(loss)
    t.whole(optimizer.param_groups[0]["lr"], "rate")
    t.state(step)
