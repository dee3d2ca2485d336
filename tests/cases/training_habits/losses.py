"""Losses: inside the network, outside, several of them, of some rows, and their backward passes."""

import torch
import torch.nn.functional as F  # noqa: N812

from training_habits.trial import WITH_RESULTS, Criterion, Mlp, Step, habit, loss_habit, passed, sgd, step_habit, train


def criterion(name, loss=F.mse_loss, **options):
    """A habit of a loss inside the network."""

    @habit(name)
    def _(t):
        train(t, Criterion(loss=loss), **options)


criterion("loss inside")


@loss_habit("loss outside", Mlp, WITH_RESULTS)
def _(step, x, y):
    return F.mse_loss(step(x), y)


@habit("gradient of the results handed to backward", WITH_RESULTS)
def _(t):
    def loss_of(step, x, y):
        out = step(x)
        out.backward(2 * (out.detach() - y) / out.numel())
        t.rows(out)
        return F.mse_loss(out, y)

    train(t, Mlp(), loss_of=loss_of, backward=passed)


@habit("results of evaluation outside")
def _(t):
    step = train(t, Criterion())
    step.eval()
    with torch.no_grad():
        t.loss(step(*t.batch()), "evaluation")


@habit("scores of evaluation and their metric", WITH_RESULTS)
def _(t):
    step = train(t, Mlp(), loss_of=lambda step, x, y: F.mse_loss(step(x), y))
    step.eval()
    with torch.inference_mode():
        x, y = t.batch()
        out = step(x)
        t.rows(out, "scores")
        t.loss((out.argmax(1) == y.argmax(1)).double().mean(), "accuracy")


# -- several losses and backward passes --------------------------------------------------------------------------------


def _two_losses():
    def forward(s, x, y):
        out = s.net(x)
        return F.mse_loss(out, y), out.pow(2).mean()

    return Step(forward)


@loss_habit("two losses, the second alone", _two_losses, WITH_RESULTS)
def _(step, x, y):
    return step(x, y)[1]


@loss_habit("two losses, two backward passes with retain_graph", _two_losses, WITH_RESULTS, backward=passed)
def _(step, x, y):
    first, second = step(x, y)
    first.backward(retain_graph=True)
    second.backward()
    return first + second


@loss_habit("one loss, two backward passes with retain_graph", backward=passed)
def _(step, x, y):
    loss = step(x, y)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


@loss_habit("losses of two calls added")
def _(step, x, y):
    return step(x, y) + step(x.flip(1), y)


@loss_habit("two calls, two backward passes in reverse order", backward=passed)
def _(step, x, y):
    first, second = step(x, y), step(x.flip(1), y)
    second.backward()
    first.backward()
    return first + second


@loss_habit("gradient accumulation by hand", backward=passed)
def _(step, x, y):
    first = step(x, y) / 2
    first.backward()
    second = step(x.flip(1), y) / 2
    second.backward()
    return first + second


@loss_habit("gradient accumulation with no_sync", backward=passed)
def _(step, x, y):
    with getattr(step, "no_sync", torch.enable_grad)():
        first = step(x, y) / 2
        first.backward()
    second = step(x.flip(1), y) / 2
    second.backward()
    return first + second


@loss_habit("loss times itself without gradient")
def _(step, x, y):
    loss = step(x, y)
    return loss * loss.detach()


@loss_habit("torch.autograd.grad of the parameters", backward=passed)
def _(step, x, y):
    loss, parameters = step(x, y), list(step.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    return loss


criterion("torch.autograd.backward of a list", backward=lambda loss: torch.autograd.backward([loss]))


@loss_habit("backward with inputs=", backward=passed)
def _(step, x, y):
    loss = step(x, y)
    loss.backward(inputs=list(step.parameters()))
    return loss


@habit("loss that nobody takes backward, then one that is")
def _(t):
    def loss_of(step, *batch):
        t.loss(step(*t.batch()), "thrown away")
        return step(*batch)

    train(t, Criterion(), loss_of=loss_of)


# -- losses that look across rows --------------------------------------------------------------------------------------


def _labels(ignored):
    """Return batches whose first rows have labels that do not count."""
    return lambda t: (t.randn(8, 8), torch.where(torch.arange(8) < ignored, -100, t.randint(4, 8)))


def _by_name(out, y):
    return (
        F.huber_loss(out, y)
        + F.poisson_nll_loss(out, y.abs())
        + F.gaussian_nll_loss(out, y, torch.full_like(out, 0.5))
        + F.soft_margin_loss(out, y.sign())
        + F.multilabel_soft_margin_loss(out, (y > 0).double())
        + F.cosine_embedding_loss(out, y, torch.ones(len(y)))
        + F.binary_cross_entropy_with_logits(out, y.sigmoid(), pos_weight=torch.tensor(2.0))
    )


criterion("sum over the rows inside", lambda out, y: F.mse_loss(out, y, reduction="sum") / 100)
criterion("ignored labels, more on one rank", F.cross_entropy, batch=_labels(3))
criterion("a rank without a label that counts", F.cross_entropy, batch=_labels(4))
criterion("loss of the hardest rows", lambda out, y: ((out - y) ** 2).mean(1).topk(3).values.mean())
criterion("losses by name: huber, hinge, Poisson, Gaussian", _by_name)


def _masked(t):
    lengths = torch.tensor([8, 1, 2, 3, 8, 7, 8, 6])
    return t.randn(8, 8, 8), t.randn(8, 8), (torch.arange(8) < lengths[:, None]).double()


@step_habit("mask of uneven rows, mean over what is left", batch=_masked)
def _(s, x, y, mask):
    return ((s.net(x).mean(-1) - y) ** 2 * mask).sum() / mask.sum()


@step_habit("in-batch negatives")
def _(s, x, y):
    first, second = F.normalize(s.net(x), dim=1), F.normalize(s.net(x + 0.1 * y.repeat(1, 2)), dim=1)
    return F.cross_entropy(first @ second.t() / 0.2, torch.arange(len(x)))


@step_habit("CTC", cuts=3, batch=lambda t: (t.randn(8, 8, 8), t.randint(3, 8, 3) + 1))
def _(s, x, y):
    logp = s.net(x).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logp, y, torch.full((len(x),), 8), torch.full((len(x),), 3), reduction="mean")


# -- weights in the loss -----------------------------------------------------------------------------------------------


@step_habit("L2 of the weights inside")
def _(s, x, y):
    return F.mse_loss(s.net(x), y) + 0.01 * sum(p.pow(2).sum() for p in s.parameters())


@loss_habit("L1 of the weights outside")
def _(step, x, y):
    return step(x, y) + 0.01 * sum(p.abs().sum() for p in step.parameters())


def _far(net, first, weights=None):
    pairs = zip(net.parameters(), first, weights or [torch.ones(())] * len(first), strict=True)
    return sum((weight * (p - q) ** 2).sum() for p, q, weight in pairs)


@habit("distance from the first weights outside (EWC)")
def _(t):
    net = Criterion()
    first = [p.detach().clone() for p in net.parameters()]
    train(t, net, loss_of=lambda step, x, y: step(x, y) + 0.1 * _far(step, first))


@habit("squared gradients added up by hand, then a penalty by them (EWC)")
def _(t):
    net = Criterion()
    step, optimizer, importance = t.wrap(net), sgd(net), [torch.zeros(())] * 4
    for _ in range(3):
        optimizer.zero_grad()
        step(*t.batch()).backward()
        squares = [p.grad.detach().clone() ** 2 / 3 for p in net.parameters()]
        importance = [b if not a.dim() else a + b for a, b in zip(importance, squares, strict=True)]
        optimizer.step()
    kept = [p.detach().clone() for p in net.parameters()]
    for _ in range(2):
        loss = step(*t.batch()) + 50 * _far(net, kept, importance)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.named("importance", {str(number): weight for number, weight in enumerate(importance)})
    t.state(step)
