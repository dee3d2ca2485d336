"""Weights and gradients that the script reads and writes between the steps; copies of the network."""

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from random_networks.reports import whole_of
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from training_habits.trial import Criterion, habit, passed, sgd, train


def edited(name, edit, where="after"):
    """A habit of doing something to the network and its first weight in each step, without gradients.

    Args:
        where: after it, or after its backward pass.
    """

    @habit(name)
    def _(t):
        train(t, Criterion(), **{where: torch.no_grad()(lambda net, _: edit(net, net.net.a.weight))})


# -- writes ------------------------------------------------------------------------------------------------------------


def _drawn(draw):
    def edit(_, w):
        torch.manual_seed(5)
        draw(w)

    return edit


def _to_vector(net, _):
    vector_to_parameters(parameters_to_vector(net.parameters()) * 0.9, net.parameters())


def _loaded(net, _):
    net.load_state_dict({name: value * 0.9 for name, value in net.state_dict().items()})


edited("weights scaled", lambda net, w: w.mul_(0.9))
edited("a row set through .data", lambda net, w: w.data.__setitem__(3, 0.0))
edited("a row set under no_grad", lambda net, w: w.__setitem__(11, 0.5))
edited("rows scaled by a slice", lambda net, w: w[:4].mul_(2))
edited("rows scaled by a slice of .data", lambda net, w: w.data[2:13].mul_(0.5))
edited("rows chosen by a list set", lambda net, w: w.__setitem__([0, 9, 15], 0.1))
edited("every second row, by a step", lambda net, w: w[::2].neg_())
edited("flat view written", lambda net, w: w.data.view(-1)[3:70].fill_(0.01))
edited("masked_fill_", lambda net, w: w.masked_fill_(torch.eye(16, 8).bool(), 0.0))
edited("index_copy_", lambda net, w: w.index_copy_(0, torch.tensor([1, 14]), torch.ones(2, 8)))
edited("a row copied from a row", lambda net, w: w[0].copy_(w[15]))
edited("copy_ of new weights", lambda net, w: w.copy_(torch.full((16, 8), 0.1)))
edited(".data assigned", lambda net, w: setattr(w, "data", torch.full((16, 8), 0.1)))
edited("rows kept within a norm", lambda net, w: w.mul_((0.5 / w.norm(dim=1, keepdim=True)).clamp(max=1)))
edited("mean of the rows taken away", lambda net, w: w.sub_(w.mean(0)))
edited("init.xavier_ between steps", _drawn(nn.init.xavier_uniform_))
edited("init.orthogonal_ between steps", _drawn(nn.init.orthogonal_))
edited("init.kaiming_normal_ between steps", _drawn(nn.init.kaiming_normal_))
edited("init.trunc_normal_ between steps", _drawn(nn.init.trunc_normal_))
edited(".data drawn anew", _drawn(lambda w: w.data.normal_()))
edited("reset_parameters between steps", lambda net, w: (torch.manual_seed(5), net.net.a.reset_parameters()))
edited("half of the rows by chunk", lambda net, w: w.chunk(2)[1].add_(1))
edited("rows chosen by a mask set", lambda net, w: w.data.__setitem__(w.detach()[:, 0] > 0, 2.0))
edited("elements chosen by a mask set", lambda net, w: w.data.__setitem__(torch.eye(16, 8).bool(), -1.0))
edited("row of the transposed weight", lambda net, w: w.data.t()[2].neg_())
edited("index_fill_", lambda net, w: w.data.index_fill_(0, torch.tensor([2, 5]), 7.0))
edited("weights clamped", lambda net, w: w.data.clamp_(-0.1, 0.1))
edited("vector_to_parameters", _to_vector)
edited("load_state_dict of scaled weights", _loaded)
edited("foreach scaling", lambda net, w: torch._foreach_mul_(list(net.parameters()), 0.9))
edited("sparsity by the smallest weights", lambda net, w: w.mul_(w.abs() > w.abs().flatten().kthvalue(20).values))
edited("weights times fan-in", lambda net, w: [p.mul_(1 - 0.01 * p.shape[0] ** 0.5) for p in net.parameters()])

# -- gradients ---------------------------------------------------------------------------------------------------------


def of_gradients(name, edit):
    edited(name, edit, where="after_backward")


def _gradients(net):
    return [p.grad for p in net.parameters() if p.grad is not None]


def _norm(net):
    return torch.stack([g.norm() for g in _gradients(net)]).norm()


def _clip_by_norms(net, _):
    scale = (0.05 / (_norm(net) + 1e-6)).clamp(max=1)
    for gradient in _gradients(net):
        gradient.mul_(scale)


def _noise(net, _):
    torch.manual_seed(3)
    for gradient in _gradients(net):
        gradient.add_(torch.randn_like(gradient), alpha=0.01)


def _agc(_, w):
    most = w.norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.01
    w.grad.mul_((most / w.grad.norm(dim=1, keepdim=True).clamp(min=1e-6)).clamp(max=1))


of_gradients("clipping by hand, norm of norms", _clip_by_norms)
of_gradients(
    "clip_grad_norm_ by the largest, of each layer",
    lambda net, w: [nn.utils.clip_grad_norm_(m.parameters(), 0.01, float("inf")) for m in net.net.children()],
)
of_gradients("clip_grad_value_", lambda net, w: nn.utils.clip_grad_value_(net.parameters(), 0.01))
of_gradients("gradients clipped to their rows' weights (AGC)", _agc)
of_gradients("gradient noise, randn_like", _noise)
of_gradients("gradient of rows set to zero", lambda net, w: w.grad[:5].zero_())
of_gradients("gradient of an element set", lambda net, w: w.grad.__setitem__((9, 1), 0.5))
of_gradients("gradient dropped", lambda net, w: setattr(net.net.a.bias, "grad", None))
of_gradients("gradient replaced", lambda net, w: setattr(w, "grad", w.grad * 2))
of_gradients(
    "gradient scaled by its cosine with the weight",
    lambda net, w: w.grad.mul_(F.cosine_similarity(w.grad.flatten(), w.flatten(), dim=0)),
)
of_gradients("weight decay by hand", lambda net, w: [p.grad.add_(p, alpha=0.1) for p in net.parameters()])


@habit("clip_grad_norm_")
def _(t):
    def after_backward(net, _):
        t.whole(nn.utils.clip_grad_norm_(net.parameters(), 0.05), "norm")

    train(t, Criterion(), after_backward=after_backward)


# -- copies ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _lerp(mine, theirs):
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        p.mul_(0.9).add_(q, alpha=0.1)


@habit("EMA copied after the first step")
def _(t):
    kept = []

    def after(net, _):
        if not kept:
            kept.append(copy.deepcopy(net))
        _lerp(kept[0], net)

    train(t, Criterion(), after=after)
    t.state(kept[0])


@habit("EMA of the state_dict")
def _(t):
    shadow = {}

    def after(net, _):
        for name, value in net.state_dict().items():
            shadow[name] = value * 0.1 + shadow[name] * 0.9 if name in shadow else value.clone()

    train(t, Criterion(), after=after)
    t.named("shadow", shadow)


@habit("AveragedModel of the network, made before")
def _(t):
    net = Criterion()
    averaged = AveragedModel(net)
    train(t, net, after=lambda net, n: averaged.update_parameters(net))
    t.state(averaged.module)


@habit("AveragedModel of what is wrapped, made after the first step")
def _(t):
    step = train(t, net := Criterion(), steps=1)
    averaged, optimizer = AveragedModel(step, multi_avg_fn=get_ema_multi_avg_fn(0.9)), sgd(net)
    for _ in range(3):
        optimizer.zero_grad()
        step(*t.batch()).backward()
        optimizer.step()
        averaged.update_parameters(step)
    t.state(averaged.module)


@habit("Lookahead whose slow weights are made before")
def _(t):
    net = Criterion()
    slow = [p.detach().clone() for p in net.parameters()]

    @torch.no_grad()
    def after(net, number):
        if number % 2 == 1:
            for p, s in zip(net.parameters(), slow, strict=True):
                s.add_(p - s, alpha=0.5)
                p.copy_(s)

    train(t, net, after=after, steps=4)


@habit("sharpness-aware minimization (SAM)")
def _(t):
    net = Criterion()

    def moved(sign, moves):
        with torch.no_grad():
            for p, move in zip(net.parameters(), moves, strict=True):
                p.add_(move, alpha=sign)

    def loss_of(step, x, y):
        step(x, y).backward()
        moves = [g * (0.05 / (_norm(net) + 1e-12)) for g in _gradients(net)]
        moved(1, moves)
        net.zero_grad()
        loss = step(x, y)
        loss.backward()
        moved(-1, moves)
        return loss

    train(t, net, loss_of=loss_of, backward=passed)


@habit("deepcopy of what is wrapped, before the first call")
def _(t):
    step = t.wrap(Criterion())
    other = copy.deepcopy(step)
    x, y = t.batch()
    step(x, y).backward()
    t.loss(other(x, y))
    t.gradients(step)
    t.state(other)


@habit("deepcopy of what is wrapped, after a step, and both go on")
def _(t):
    step = train(t, Criterion())
    for one in (step, copy.deepcopy(step)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        loss = one(*t.batch())
        loss.backward()
        optimizer.step()
        t.loss(loss)
        t.state(one)


# -- what the network is made of changes -------------------------------------------------------------------------------


@habit("a layer frozen, later trained again")
def _(t):
    train(t, Criterion(), before=lambda net, n: net.net.a.requires_grad_(requires_grad=n != 1), steps=4)


@habit("a layer thawed, its weights added to the optimizer")
def _(t):
    net = Criterion()
    net.net.a.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)

    def before(net, number):
        if number == 2:
            net.net.a.requires_grad_(requires_grad=True)
            optimizer.add_param_group({"params": list(net.net.a.parameters()), "lr": 0.01})

    train(t, net, before=before, optimizer=lambda _: optimizer, steps=4)


def changed(name, change, make=Criterion, **options):
    """A habit of changing what the network is made of after the first step, with a new optimizer for each."""

    @habit(name)
    def _(t):
        def before(net, number):
            if number == 1:
                torch.manual_seed(3)
                change(net)

        train(t, make(), before=before, renews=True, **options)


def _grown(net):
    rows = torch.cat([whole_of(net.net[0].weight), torch.ones(8, 8)])
    net.net[0] = nn.Embedding.from_pretrained(rows, freeze=False)


def _words(**options):
    return Criterion(nn.Sequential(nn.Embedding(16, 8, **options), nn.Linear(8, 4)))


def _ids(t):
    return t.randint(16, 8), t.randn(8, 4)


changed("the head replaced between steps", lambda net: setattr(net.net, "b", nn.Linear(16, 4)))
changed("pruning by torch.nn.utils.prune", lambda net: prune.l1_unstructured(net.net.a, "weight", 0.3))
changed("embedding grown between steps", _grown, _words, batch=_ids)


@habit(".to(float32) after the first call")
def _(t):
    net = Criterion()
    step = t.wrap(net)
    t.loss(step(*t.batch()))
    net.to(torch.float32)
    optimizer = sgd(net)
    for _ in range(2):
        loss = step(*(part.float() for part in t.batch()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert abs(float(loss)) < 10


@habit("embedding with max_norm")
def _(t):
    train(t, _words(max_norm=0.5), batch=_ids)
