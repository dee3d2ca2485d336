"""Losses: inside the network, outside, several of them, of some rows, and their backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from training_habits.trial import MODES, Criterion, Mlp, Trial, habit, sgd, train

WITH_RESULTS = tuple(mode for mode in MODES if mode != "pipeline")
"""Modes in which a call in training returns more than a loss."""


class Step(nn.Module):
    """A network whose forward pass is a function of it and the batch."""

    def __init__(self, forward: Callable[..., Any], net: nn.Module | None = None, **parts: Any) -> None:
        super().__init__()
        self.net = net or Mlp()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **named: Any) -> Any:
        return self._forward(self, *args, **named)


# -- outside of the network --------------------------------------------------------------------------------------------


@habit("loss inside")
def _(t: Trial) -> None:
    train(t, Criterion(Mlp()))


@habit("loss outside", WITH_RESULTS)
def _(t: Trial) -> None:
    train(t, Mlp(), loss_of=lambda step, x, y: F.mse_loss(step(x), y))


@habit("loss outside, with momentum and weight decay", WITH_RESULTS)
def _(t: Trial) -> None:
    train(
        t, Mlp(), loss_of=lambda step, x, y: F.mse_loss(step(x), y),
        optimizer=lambda net: sgd(net, momentum=0.9, weight_decay=0.1),
    )  # fmt: skip


@habit("cross entropy outside", WITH_RESULTS)
def _(t: Trial) -> None:
    def batch() -> tuple[Tensor, Tensor]:
        return t.mine(t.randn(8, 8)), t.mine(t.randint(4, 8))

    train(t, Mlp(), batch=batch, loss_of=lambda step, x, y: F.cross_entropy(step(x), y))


@habit("loss of each row, mean outside", WITH_RESULTS)
def _(t: Trial) -> None:
    net = Criterion(Mlp(), lambda out, y: (out - y).pow(2).mean(1))
    train(t, net, loss_of=lambda step, x, y: step(x, y).mean())


@habit("loss of each element, weighed and averaged outside", WITH_RESULTS)
def _(t: Trial) -> None:
    net = Criterion(Mlp(), lambda out, y: F.smooth_l1_loss(out, y, reduction="none"))
    train(t, net, loss_of=lambda step, x, y: (step(x, y) * x[:, :4].sigmoid()).mean())


@habit("loss inside and a penalty on what comes with it outside", WITH_RESULTS)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Any:
        h = torch.tanh(self.net.a(x))
        return F.mse_loss(self.net.b(h), y), h

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        loss, h = step(x, y)
        return loss + 0.1 * h.pow(2).mean()

    train(t, Step(forward), loss_of=loss_of)


@habit("penalty on the results outside", WITH_RESULTS)
def _(t: Trial) -> None:
    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        out = step(x)
        return F.mse_loss(out, y) + 0.01 * out.abs().mean()

    train(t, Mlp(), loss_of=loss_of)


@habit("distillation from a teacher outside", WITH_RESULTS)
def _(t: Trial) -> None:
    teacher = Mlp().requires_grad_(requires_grad=False)

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.kl_div(step(x).log_softmax(1), teacher(x).softmax(1), reduction="batchmean") + F.mse_loss(step(x), y)

    train(t, Mlp(), loss_of=loss_of)


@habit("labels smoothed and mixed outside", WITH_RESULTS)
def _(t: Trial) -> None:
    def batch() -> tuple[Tensor, Tensor]:
        return t.mine(t.randn(8, 8)), t.mine(t.randint(4, 8))

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        out, soft = step(x), F.one_hot(y, 4).double() * 0.9 + 0.025
        return -(soft * out.log_softmax(1)).sum(1).mean()

    train(t, Mlp(), batch=batch, loss_of=loss_of)


@habit("gradient of the results handed to backward", WITH_RESULTS)
def _(t: Trial) -> None:
    net = Mlp()
    step, stepper = t.wrap(net), sgd(net)
    for number in range(3):
        x, y = t.batch()
        out = step(x)
        stepper.zero_grad()
        out.backward(2 * (out.detach() - y) / out.numel())
        if number == 0:
            t.gradients(step)
        stepper.step()
        t.rows(out)
    t.state(step)


@habit("results of evaluation outside")
def _(t: Trial) -> None:
    step = train(t, Criterion(Mlp()))
    step.eval()
    with torch.no_grad():
        t.loss(step(*t.batch()), "evaluation")


@habit("scores of evaluation and their metric", WITH_RESULTS)
def _(t: Trial) -> None:
    net = Mlp()
    step = train(t, net, loss_of=lambda step, x, y: F.mse_loss(step(x), y))
    step.eval()
    with torch.inference_mode():
        x, y = t.batch()
        out = step(x)
        t.rows(out, "scores")
        t.loss((out.argmax(1) == y.argmax(1)).double().mean(), "accuracy")


# -- several losses and backward passes --------------------------------------------------------------------------------


def _two_losses(self: Step, x: Tensor, y: Tensor) -> Any:
    out = self.net(x)
    return F.mse_loss(out, y), out.pow(2).mean()


@habit("two losses added", WITH_RESULTS)
def _(t: Trial) -> None:
    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        first, second = step(x, y)
        return first + 0.5 * second

    train(t, Step(_two_losses), loss_of=loss_of)


@habit("two losses, the second alone", WITH_RESULTS)
def _(t: Trial) -> None:
    train(t, Step(_two_losses), loss_of=lambda step, x, y: step(x, y)[1])


def _by_hand(t: Trial, net: nn.Module, run: Callable[[Any, Tensor, Tensor], Tensor], steps: int = 3) -> Any:
    """Train where `run` does forward and backward passes."""
    step, stepper = t.wrap(net), sgd(net)
    for number in range(steps):
        stepper.zero_grad()
        loss = run(step, *t.batch())
        if number == 0:
            t.gradients(step)
        stepper.step()
        t.loss(loss)
    t.state(step)
    return step


@habit("two losses, two backward passes with retain_graph", WITH_RESULTS)
def _(t: Trial) -> None:
    def run(step: Any, x: Tensor, y: Tensor) -> Tensor:
        first, second = step(x, y)
        first.backward(retain_graph=True)
        second.backward()
        return first + second

    _by_hand(t, Step(_two_losses), run)


@habit("one loss, two backward passes with retain_graph")
def _(t: Trial) -> None:
    def run(step: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    _by_hand(t, Criterion(Mlp()), run)


@habit("losses of two calls added")
def _(t: Trial) -> None:
    def run(step: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y) + step(x.flip(1), y)
        loss.backward()
        return loss

    _by_hand(t, Criterion(Mlp()), run)


@habit("two calls, two backward passes in reverse order")
def _(t: Trial) -> None:
    def run(step: Any, x: Tensor, y: Tensor) -> Tensor:
        first, second = step(x, y), step(x.flip(1), y)
        second.backward()
        first.backward()
        return first + second

    _by_hand(t, Criterion(Mlp()), run)


@habit("gradient accumulation by hand")
def _(t: Trial) -> None:
    def run(step: Any, x: Tensor, y: Tensor) -> Tensor:
        first = step(x, y) / 2
        first.backward()
        second = step(*t.batch()) / 2
        second.backward()
        return first + second

    _by_hand(t, Criterion(Mlp()), run)


@habit("gradient accumulation with no_sync")
def _(t: Trial) -> None:
    def run(step: Any, x: Tensor, y: Tensor) -> Tensor:
        if hasattr(step, "no_sync"):
            with step.no_sync():
                first = step(x, y) / 2
                first.backward()
        else:
            first = step(x, y) / 2
            first.backward()
        second = step(*t.batch()) / 2
        second.backward()
        return first + second

    _by_hand(t, Criterion(Mlp()), run)


@habit("gradient accumulation with the loss outside", WITH_RESULTS)
def _(t: Trial) -> None:
    def run(step: Any, x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        for _ in range(2):
            loss = F.mse_loss(step(x), y) / 2
            loss.backward()
            total += loss.detach()
            x, y = t.batch()
        return total

    _by_hand(t, Mlp(), run)


@habit("loss times a number")
def _(t: Trial) -> None:
    train(t, Criterion(Mlp()), loss_of=lambda step, x, y: step(x, y) * 3)


@habit("loss times itself without gradient")
def _(t: Trial) -> None:
    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y)
        return loss * loss.detach()

    train(t, Criterion(Mlp()), loss_of=loss_of)


@habit("log of the loss")
def _(t: Trial) -> None:
    train(t, Criterion(Mlp()), loss_of=lambda step, x, y: step(x, y).log())


@habit("backward with a gradient of the loss")
def _(t: Trial) -> None:
    def run(step: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y)
        loss.backward(torch.tensor(0.5))
        return loss

    _by_hand(t, Criterion(Mlp()), run)


@habit("torch.autograd.backward of a list")
def _(t: Trial) -> None:
    def run(step: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y)
        torch.autograd.backward([loss])
        return loss

    _by_hand(t, Criterion(Mlp()), run)


@habit("torch.autograd.grad of the parameters")
def _(t: Trial) -> None:
    net = Criterion(Mlp())

    def run(step: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y)
        parameters = list(step.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        return loss

    _by_hand(t, net, run)


@habit("backward with inputs=")
def _(t: Trial) -> None:
    def run(step: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y)
        loss.backward(inputs=list(step.parameters()))
        return loss

    _by_hand(t, Criterion(Mlp()), run)


@habit("steps whose loss is large are left out")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step, stepper = t.wrap(net), sgd(net)
    for number in range(4):
        x, y = t.batch()
        loss = step(x * (100 if number == 1 else 1), y * (100 if number == 1 else 1))
        t.loss(loss)
        if loss.item() > 50:
            continue
        stepper.zero_grad()
        loss.backward()
        if number == 0:
            t.gradients(step)
        stepper.step()
    t.state(step)


@habit("loss that nobody takes backward, then one that is")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    t_step = t.wrap(net)
    t.loss(t_step(*t.batch()), "thrown away")
    stepper = sgd(net)
    for _ in range(2):
        loss = t_step(*t.batch())
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        t.loss(loss)
    t.state(t_step)


@habit("losses kept in a list and averaged after the epoch")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step, stepper, kept = t.wrap(net), sgd(net), []
    for _ in range(3):
        loss = step(*t.batch())
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        kept.append(loss.detach())
    t.loss(torch.stack(kept).mean())
    t.state(step)


@habit("running loss with lerp and an f-string")
def _(t: Trial) -> None:
    running = torch.zeros(())

    def after(_net: Any, _number: int) -> None:
        t.loss(running, "running")

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y)
        running.lerp_(loss.detach(), 0.5)
        assert f"{loss:.3f}" != f"{running * 0 + 99:.3f}"
        return loss

    train(t, Criterion(Mlp()), loss_of=loss_of, after=after)


# -- losses that look across rows --------------------------------------------------------------------------------------


def _labels(t: Trial, *, ignored: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
    def batch() -> tuple[Tensor, Tensor]:
        x, y = t.randn(8, 8), t.randint(4, 8)
        return t.mine(x), t.mine(torch.where(ignored(torch.arange(8)), -100, y))

    return batch


@habit("sum over the rows inside")
def _(t: Trial) -> None:
    train(t, Criterion(Mlp(), lambda out, y: F.mse_loss(out, y, reduction="sum") / 100))


@habit("sum over the rows outside, by the size of the whole batch", WITH_RESULTS)
def _(t: Trial) -> None:
    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(step(x), y, reduction="sum") / y.numel()

    train(t, Mlp(), loss_of=loss_of)


@habit("ignored labels, as many on each rank")
def _(t: Trial) -> None:
    net = Criterion(Mlp(), F.cross_entropy)
    train(t, net, batch=_labels(t, ignored=lambda row: row % 4 == 1))


@habit("ignored labels, more on one rank")
def _(t: Trial) -> None:
    net = Criterion(Mlp(), F.cross_entropy)
    train(t, net, batch=_labels(t, ignored=lambda row: row < 3))


@habit("a rank without a label that counts")
def _(t: Trial) -> None:
    net = Criterion(Mlp(), F.cross_entropy)
    train(t, net, batch=_labels(t, ignored=lambda row: row < 4))


@habit("ignored labels and weights of classes")
def _(t: Trial) -> None:
    weight = torch.tensor([1.0, 2.0, 0.5, 1.5])
    net = Criterion(Mlp(), lambda out, y: F.cross_entropy(out, y, weight=weight, label_smoothing=0.1))
    train(t, net, batch=_labels(t, ignored=lambda row: row < 2))


@habit("mask of uneven rows, mean over what is left")
def _(t: Trial) -> None:
    lengths = torch.tensor([8, 1, 2, 3, 8, 7, 8, 6])

    def forward(self: Step, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        each = (self.net(x).mean(-1) - y) ** 2
        return (each * mask).sum() / mask.sum()

    def batch() -> tuple[Tensor, ...]:
        mask = (torch.arange(8) < lengths[:, None]).double()
        return t.mine(t.randn(8, 8, 8)), t.mine(t.randn(8, 8)), t.mine(mask)

    train(t, Step(forward), batch=batch)


@habit("mask of uneven rows, outside", WITH_RESULTS)
def _(t: Trial) -> None:
    """Each row by its own length, so that the mean of the ranks is that of the batch."""
    lengths = torch.tensor([8, 1, 2, 3, 8, 7, 8, 6])

    def batch() -> tuple[Tensor, ...]:
        mask = (torch.arange(8) < lengths[:, None]).double()
        return t.mine(t.randn(8, 8, 8)), t.mine(t.randn(8, 8)), t.mine(mask)

    def loss_of(step: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        each = (step(x).mean(-1) - y) ** 2
        return ((each * mask).sum(1) / mask.sum(1)).mean()

    train(t, Mlp(), batch=batch, loss_of=loss_of)


@habit("rows weighed by their share of the batch")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        weight = x[:, 0].abs()
        return (F.mse_loss(self.net(x), y, reduction="none").mean(1) * weight / weight.sum()).sum()

    train(t, Step(forward))


@habit("in-batch negatives")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        first, second = F.normalize(self.net(x), dim=1), F.normalize(self.net(x + 0.1 * y.repeat(1, 2)), dim=1)
        scores = first @ second.t() / 0.2
        return F.cross_entropy(scores, torch.arange(len(x)))

    train(t, Step(forward))


@habit("scores of all pairs with a learnt temperature")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x) @ y.t() * self.scale.exp()
        target = torch.arange(len(x))
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2

    train(t, Step(forward, scale=nn.Parameter(torch.tensor(0.1))))


@habit("triplets with the hardest of the batch")
def _(t: Trial) -> None:
    def batch() -> tuple[Tensor, Tensor]:
        return t.mine(t.randn(8, 8)), t.mine(torch.arange(8) % 2)

    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        out = self.net(x)
        far = ((out[:, None] - out[None]) ** 2).sum(-1)
        same = y[:, None] == y[None]
        return F.relu((far * same).amax(1) - (far + 1e3 * same).amin(1) + 1).mean()

    train(t, Step(forward), batch=batch)


@habit("loss of the hardest rows")
def _(t: Trial) -> None:
    train(t, Criterion(Mlp(), lambda out, y: ((out - y) ** 2).mean(1).topk(3).values.mean()))


@habit("median of the rows' losses")
def _(t: Trial) -> None:
    train(t, Criterion(Mlp(), lambda out, y: ((out - y) ** 2).mean(1).sort().values[2:6].mean()))


@habit("variance and covariance over the batch")
def _(t: Trial) -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        out = out - out.mean(0)
        covariance = out.t() @ out / (len(out) - 1)
        off = covariance.pow(2).sum() - covariance.diagonal().pow(2).sum()
        return F.relu(1 - out.std(0)).mean() + 0.1 * off + F.mse_loss(out, y)

    train(t, Criterion(Mlp(), loss))


@habit("losses by name: huber, hinge, Poisson, Gaussian")
def _(t: Trial) -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (
            F.huber_loss(out, y)
            + F.poisson_nll_loss(out, y.abs())
            + F.gaussian_nll_loss(out, y, torch.full_like(out, 0.5))
            + F.soft_margin_loss(out, y.sign())
            + F.multilabel_soft_margin_loss(out, (y > 0).double())
            + F.cosine_embedding_loss(out, y, torch.ones(len(y)))
            + F.binary_cross_entropy_with_logits(out, y.sigmoid(), pos_weight=torch.tensor(2.0))
        )

    train(t, Criterion(Mlp(), loss))


@habit("focal loss by hand")
def _(t: Trial) -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        logp = out.log_softmax(1)
        picked = logp.gather(1, y.argmax(1, keepdim=True)).squeeze(1)
        return (-((1 - picked.exp()) ** 2) * picked).mean()

    train(t, Criterion(Mlp(), loss))


@habit("CTC", cuts=3)
def _(t: Trial) -> None:
    def batch() -> tuple[Tensor, ...]:
        return t.mine(t.randn(8, 8, 8)), t.mine(t.randint(3, 8, 3) + 1)

    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        logp = self.net(x).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), 8), torch.full((len(x),), 3)
        return F.ctc_loss(logp, y, *lengths, reduction="mean")

    train(t, Step(forward), batch=batch)


@habit("losses of tasks with learnt weights")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        out = self.net(x)
        losses = torch.stack([F.mse_loss(out[:, :2], y[:, :2]), F.l1_loss(out[:, 2:], y[:, 2:])])
        return (losses * torch.exp(-self.logs) + self.logs).sum()

    train(t, Step(forward, logs=nn.Parameter(torch.tensor([0.1, 0.2]))))


@habit("loss that is zero")
def _(t: Trial) -> None:
    train(t, Criterion(Mlp(), lambda out, y: (out * 0).sum()))


@habit("L2 of the weights inside")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())

    train(t, Step(forward))


@habit("L1 of the weights outside")
def _(t: Trial) -> None:
    net = Criterion(Mlp())

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        return step(x, y) + 0.01 * sum(p.abs().sum() for p in step.parameters())

    train(t, net, loss_of=loss_of)


@habit("distance from the first weights outside (EWC)")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    first = [p.detach().clone() for p in net.parameters()]

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        far = sum(((p - q) ** 2).sum() for p, q in zip(step.parameters(), first, strict=True))
        return step(x, y) + 0.1 * far

    train(t, net, loss_of=loss_of)


@habit("squared gradients added up by hand, then a penalty by them (EWC)")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step, optimizer = t.wrap(net), sgd(net)
    importance = None
    for _ in range(3):
        optimizer.zero_grad()
        step(*t.batch()).backward()
        squares = [p.grad.detach().clone() ** 2 / 3 for p in net.parameters()]
        importance = squares if importance is None else [a + b for a, b in zip(importance, squares, strict=True)]
        optimizer.step()
    kept = [p.detach().clone() for p in net.parameters()]
    for _ in range(2):
        loss = step(*t.batch())
        moved = zip(net.parameters(), kept, importance, strict=True)
        loss = loss + 50 * sum((weight * (p - first) ** 2).sum() for p, first, weight in moved)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.named("importance", {str(number): weight for number, weight in enumerate(importance)})
    t.state(step)


@habit("whole-number count among the results", WITH_RESULTS)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Any:
        out = self.net(x)
        return F.mse_loss(out, y), (out.argmax(1) == y.argmax(1)).double().mean()

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        loss, accuracy = step(x, y)
        t.loss(accuracy, "accuracy")
        return loss

    train(t, Step(forward), loss_of=loss_of)
