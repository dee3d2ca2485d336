"""What goes into a call and what comes out: containers, plain values, hidden state from call to call."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from training_habits.losses import WITH_RESULTS, Step
from training_habits.trial import Mlp, Trial, habit, sgd, train


class Scored(NamedTuple):
    loss: Tensor
    scores: Tensor


@dataclass
class Output:
    loss: Tensor
    scores: Tensor


class Record(dict):
    """A dict with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


Pair = namedtuple("Pair", "loss scores")


def results(name: str, make: Callable[[Tensor, Tensor], Any], take: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
    """A habit of returning the loss and the scores in a container; the loss inside, then one outside too."""

    def forward(self: Step, x: Tensor, y: Tensor) -> Any:
        out = self.net(x)
        return make(F.mse_loss(out, y), out)

    @habit(f"results in {name}", WITH_RESULTS)
    def _(t: Trial) -> None:
        def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
            loss, scores = take(step(x, y))
            t.rows(scores, "scores")
            return loss

        train(t, Step(forward), loss_of=loss_of)

    @habit(f"results in {name}, loss outside", WITH_RESULTS)
    def _(t: Trial) -> None:
        def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
            loss, scores = take(step(x, y))
            return loss + (scores - 1).pow(2).mean()

        train(t, Step(forward), loss_of=loss_of)


results("a tuple", lambda loss, out: (loss, out), lambda found: found)
results("a list, the loss last", lambda loss, out: [out, loss], lambda found: (found[1], found[0]))
results("a dict", lambda loss, out: {"loss": loss, "scores": out}, lambda found: (found["loss"], found["scores"]))
results(
    "an OrderedDict",
    lambda loss, out: OrderedDict(loss=loss, scores=out),
    lambda found: (found["loss"], found["scores"]),
)
results("a NamedTuple", Scored, lambda found: (found.loss, found.scores))
results("a namedtuple", Pair, lambda found: (found.loss, found.scores))
results("a dataclass", Output, lambda found: (found.loss, found.scores))
results("a subclass of dict", lambda loss, out: Record(loss=loss, scores=out), lambda found: (found.loss, found.scores))
results(
    "nested containers",
    lambda loss, out: {"losses": [loss], "more": (out, {"none": None, "name": "x", "size": 4})},
    lambda found: (found["losses"][0], found["more"][0]),
)


@habit("results in a defaultdict of lists", WITH_RESULTS)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Any:
        found = defaultdict(list)
        out = self.net(x)
        found["losses"].append(F.mse_loss(out, y))
        found["losses"].append(out.pow(2).mean())
        return found

    train(t, Step(forward), loss_of=lambda step, x, y: sum(step(x, y)["losses"]))


@habit("the same tensor twice among the results", WITH_RESULTS)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(self.net(x), y)
        return loss, loss, x

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        first, second, third = step(x, y)
        t.rows(third, "argument")
        return first + second

    train(t, Step(forward), loss_of=loss_of)


@habit("one result for each row that is a number of whole values", WITH_RESULTS)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Any:
        out = self.net(x)
        return F.mse_loss(out, y), out.argmax(1), out.detach()

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        loss, picked, out = step(x, y)
        assert not out.requires_grad
        t.rows(picked, "picked")
        t.rows(out, "scores")
        return loss

    train(t, Step(forward), loss_of=loss_of)


@habit("result made under no_grad", WITH_RESULTS)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            target = self.net(x.flip(1))
        return F.mse_loss(self.net(x), target), target

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        loss, target = step(x, y)
        assert not target.requires_grad
        return loss + target.pow(2).mean()

    train(t, Step(forward), loss_of=loss_of)


@habit("results of layers kept by hooks")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.net(x), y)
        return loss + 0.1 * self.kept["a"].pow(2).mean()

    net = Step(forward, kept={})

    def hook(_module: nn.Module, _args: Any, out: Tensor) -> None:
        net.kept["a"] = out

    net.net.a.register_forward_hook(hook)
    train(t, net)


@habit("state left on the module with its graph")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        out = self.net(x)
        self.kept = out if self.kept is None else torch.tanh(out + self.kept)
        return F.mse_loss(self.kept, y)

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        return step(x, y) + step(x.flip(1), y)

    train(t, Step(forward, kept=None), loss_of=loss_of, steps=1)


@habit("tensor with a gradient that is no parameter")
def _(t: Trial) -> None:
    net = Step(lambda self, x, y: F.mse_loss(self.net(x) * self.held[0], y), held=[torch.ones(4, requires_grad=True)])
    train(t, net, steps=1)
    t.whole(net.held[0].grad, "its gradient")


@habit("parameter used again outside of the call", WITH_RESULTS)
def _(t: Trial) -> None:
    net = Mlp()
    train(t, net, loss_of=lambda step, x, y: F.mse_loss(step(x) @ net.b.weight, y.repeat(1, 4)))


@habit("gradients of a head outside, by torch.autograd.grad", WITH_RESULTS)
def _(t: Trial) -> None:
    net, head = Mlp(8, 16, 8), nn.Linear(8, 4)
    x, y = t.batch()
    optimizer = sgd(head)
    loss = F.mse_loss(head(t.wrap(net)(x)), y)
    for parameter, gradient in zip(
        both := [head.weight, *net.parameters()], torch.autograd.grad(loss, both), strict=True
    ):
        parameter.grad = gradient
    optimizer.step()
    t.whole(head.weight)


@habit("result written into", WITH_RESULTS)
def _(t: Trial) -> None:
    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        out = step(x)
        out[:, 0] = 0
        return F.mse_loss(out.mul_(2), y)

    train(t, Mlp(), loss_of=loss_of)


@habit("result that has no rows of the batch", WITH_RESULTS)
def _(t: Trial) -> None:
    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        loss, of_weight = step(x, y)
        return loss + of_weight.mean()

    train(t, Step(lambda self, x, y: (F.mse_loss(self.net(x), y), self.net.a.weight.pow(2).mean(1))), loss_of=loss_of)


@habit("activation left on the module, read outside", WITH_RESULTS)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.net.a(x))
        return F.mse_loss(self.net.b(self.hidden), y)

    net = Step(forward)

    def after(_net: Any, _number: int) -> None:
        t.loss(net.hidden.detach().abs().mean(), "activation")

    train(t, net, after=after)


# -- what goes in ------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    name: str = "batch"


class Rows(NamedTuple):
    x: Tensor
    y: Tensor


def arguments(name: str, pack: Callable[[Tensor, Tensor], Any], take: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
    """A habit of passing the batch in a container."""

    @habit(f"batch in {name}")
    def _(t: Trial) -> None:
        def forward(self: Step, batch: Any) -> Tensor:
            x, y = take(batch)
            return F.mse_loss(self.net(x), y)

        train(t, Step(forward), loss_of=lambda step, x, y: step(pack(x, y)))


arguments("a tuple", lambda x, y: (x, y), lambda batch: batch)
arguments("a list", lambda x, y: [x, y], lambda batch: batch)
arguments("a dict", lambda x, y: {"x": x, "y": y}, lambda batch: (batch["x"], batch["y"]))
arguments("a dict with more", lambda x, y: {"x": x, "y": y, "ids": None, "name": "a"}, lambda b: (b["x"], b["y"]))
arguments("a dataclass", Batch, lambda batch: (batch.x, batch.y))
arguments("a NamedTuple", Rows, lambda batch: batch)
arguments("a subclass of dict", lambda x, y: Record(x=x, y=y), lambda batch: (batch.x, batch.y))


@habit("keyword arguments and defaults")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, *, target: Tensor, weight: float = 0.5, mask: Tensor | None = None) -> Tensor:
        out = self.net(x)
        return F.mse_loss(out if mask is None else out * mask, target) * weight

    train(t, Step(forward), loss_of=lambda step, x, y: step(x, target=y, weight=0.7))


@habit("number that changes from call to call")
def _(t: Trial) -> None:
    numbers = iter([0.1, 0.2, 0.3])

    def forward(self: Step, x: Tensor, y: Tensor, weight: float) -> Tensor:
        return F.mse_loss(self.net(x), y) * weight

    train(t, Step(forward), loss_of=lambda step, x, y: step(x, y, next(numbers)))


@habit("tensor of one number as an argument")
def _(t: Trial) -> None:
    numbers = iter([0.1, 0.2, 0.3])

    def forward(self: Step, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y) * weight

    train(t, Step(forward), loss_of=lambda step, x, y: step(x, y, torch.tensor(next(numbers))))


@habit("positions as an argument without rows of the batch", cuts=3)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor, where: Tensor) -> Tensor:
        return F.mse_loss(self.net(x + where).mean(1), y)

    def batch() -> tuple[Tensor, ...]:
        return t.mine(t.randn(8, 5, 8)), t.mine(t.randn(8, 4)), torch.linspace(0, 1, 40).view(1, 5, 8)

    train(t, Step(forward), batch=batch)


@habit("smaller last batch")
def _(t: Trial) -> None:
    sizes = iter([8, 8, 4, 8])

    def batch() -> tuple[Tensor, Tensor]:
        return t.batch(rows=next(sizes))

    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y)

    train(t, Step(forward), batch=batch, steps=4)


@habit("sequences of another length in each step", cuts=3)
def _(t: Trial) -> None:
    lengths = iter([5, 3, 7, 5])

    def batch() -> tuple[Tensor, Tensor]:
        return t.mine(t.randn(8, next(lengths), 8)), t.mine(t.randn(8, 4))

    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x).mean(1), y)

    train(t, Step(forward), batch=batch, steps=4)


# -- state from call to call -------------------------------------------------------------------------------------------


def _recurrent(self: Step, x: Tensor, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = self.cell(x, h)
    return F.mse_loss(self.net(h), y), h


def _cell() -> Step:
    return Step(_recurrent, cell=nn.GRUCell(8, 8))


@habit("hidden state handed on, detached", WITH_RESULTS)
def _(t: Trial) -> None:
    state = t.mine(torch.zeros(8, 8))

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        nonlocal state
        loss, h = step(x, y, state)
        state = h.detach()
        t.rows(state, "state")
        return loss

    train(t, _cell(), loss_of=loss_of)


@habit("hidden state handed on with its graph: two calls, one backward pass", WITH_RESULTS)
def _(t: Trial) -> None:
    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        first, h = step(x, y, t.mine(torch.zeros(8, 8)))
        second, h = step(x.flip(1), y, h)
        return first + second

    train(t, _cell(), loss_of=loss_of)


@habit("hidden state with its graph through three calls, last loss alone", WITH_RESULTS)
def _(t: Trial) -> None:
    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        h = t.mine(torch.zeros(8, 8))
        for _ in range(3):
            loss, h = step(x, y, h)
        return loss

    train(t, _cell(), loss_of=loss_of)


@habit("truncated backpropagation through time", WITH_RESULTS)
def _(t: Trial) -> None:
    state = t.mine(torch.zeros(8, 8))

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        nonlocal state
        state = state.detach().requires_grad_()
        total: Any = 0
        for shift in range(2):
            loss, state = step(x.roll(shift, 1), y, state)
            total = total + loss
        return total

    train(t, _cell(), loss_of=loss_of)


@habit("state of an LSTM, a tuple, handed on", WITH_RESULTS)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        h, c = self.cell(x, state)
        return F.mse_loss(self.net(h), y), (h.detach(), c.detach())

    state = (t.mine(torch.zeros(8, 8)), t.mine(torch.zeros(8, 8)))

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        nonlocal state
        loss, state = step(x, y, state)
        assert not state[0].requires_grad
        return loss

    train(t, Step(forward, cell=nn.LSTMCell(8, 8)), loss_of=loss_of)


@habit("hidden state kept on the module, detached")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h = self.cell(x, torch.zeros(len(x), 8) if self.h is None else self.h)
        self.h = h.detach()
        return F.mse_loss(self.net(h), y)

    train(t, Step(forward, cell=nn.GRUCell(8, 8), h=None))


@habit("recurrent loop over time inside", cuts=2)
def _(t: Trial) -> None:
    def batch() -> tuple[Tensor, Tensor]:
        return t.mine(t.randn(8, 5, 8)), t.mine(t.randn(8, 4))

    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 8)
        for place in range(x.shape[1]):
            h = self.cell(x[:, place], h)
        return F.mse_loss(self.net(h), y)

    train(t, Step(forward, cell=nn.GRUCell(8, 8)), batch=batch)


@habit("inputs that require gradients")
def _(t: Trial) -> None:
    net = Step(lambda self, x, y: F.mse_loss(self.net(x), y))
    step, stepper = t.wrap(net), sgd(net)
    for _ in range(2):
        x, y = t.batch()
        x.requires_grad_()
        loss = step(x, y)
        stepper.zero_grad()
        loss.backward()
        t.rows(x.grad, "gradient of the batch")
        x.grad = None
        x.pow(2).sum().backward()
        t.rows(x.grad, "gradient away from any step")
        stepper.step()
        t.loss(loss)
    t.state(step)


@habit("adversarial examples (FGSM)")
def _(t: Trial) -> None:
    net = Step(lambda self, x, y: F.mse_loss(self.net(x), y))

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        step(x, y).backward()
        return step((x + 0.1 * x.grad.sign()).detach(), y)

    train(t, net, loss_of=loss_of)


@habit("gradient of the loss by the batch, torch.autograd.grad", WITH_RESULTS)
def _(t: Trial) -> None:
    net = Step(lambda self, x: self.net(x))
    step = t.wrap(net)
    x, y = t.batch()
    x.requires_grad_()
    loss = F.mse_loss(step(x), y)
    (gradient,) = torch.autograd.grad(loss, x)
    t.rows(gradient, "gradient of the batch")


@habit("latent vectors of the batch learnt beside the network")
def _(t: Trial) -> None:
    net = Step(lambda self, z, y: F.mse_loss(self.net(z), y))
    step = t.wrap(net)
    z = t.mine(t.randn(8, 8)).requires_grad_()
    stepper = torch.optim.SGD([{"params": [z], "lr": 1.0}, {"params": list(net.parameters())}], lr=0.05)
    y = t.mine(t.randn(8, 4))
    for _ in range(3):
        loss = step(z, y)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        t.loss(loss)
    t.rows(z, "latent vectors")
    t.state(step)
