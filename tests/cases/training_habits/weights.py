"""Weights and gradients that the script reads and writes between the steps; copies of the network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from training_habits.trial import MODES, Criterion, Mlp, Trial, habit, sgd, train, whole_of


def edited(
    name: str, edit: Callable[[Trial, Criterion, int], None], where: str = "after", modes: Collection[str] = MODES
) -> None:
    """A habit of doing something to the network in each step: after it, or after its backward pass."""

    @habit(name, modes)
    def _(t: Trial) -> None:
        train(t, Criterion(Mlp()), **{where: lambda net, number: edit(t, net, number)})


def without_gradients(edit: Callable[[Trial, Any, int], Any]) -> Callable[[Trial, Any, int], None]:
    def run(t: Trial, net: Any, number: int) -> None:
        with torch.no_grad():
            edit(t, net, number)

    return run


# -- writes ------------------------------------------------------------------------------------------------------------


def _first(net: Any) -> nn.Parameter:
    return net.net.a.weight


def _seeded(draw: Callable[..., Any], *args: Any) -> None:
    torch.manual_seed(5)
    draw(*args)


edited("weights scaled", without_gradients(lambda t, net, n: _first(net).mul_(0.9)))
edited("weights clamped (WGAN)", without_gradients(lambda t, net, n: [p.clamp_(-0.1, 0.1) for p in net.parameters()]))
edited("weights scaled through .data", lambda t, net, n: _first(net).data.mul_(0.9))
edited("a row set through .data", lambda t, net, n: _first(net).data.__setitem__(3, 0.0))
edited("a row set under no_grad", without_gradients(lambda t, net, n: _first(net).__setitem__(11, 0.5)))
edited("rows scaled by a slice", without_gradients(lambda t, net, n: _first(net)[:4].mul_(2)))
edited("rows scaled by a slice of .data", lambda t, net, n: _first(net).data[2:13].mul_(0.5))
edited("a column set", without_gradients(lambda t, net, n: _first(net)[:, 0].zero_()))
edited("rows chosen by a list set", without_gradients(lambda t, net, n: _first(net).__setitem__([0, 9, 15], 0.1)))
edited(
    "elements chosen by a mask set", lambda t, net, n: _first(net).data.__setitem__(_first(net).data.abs() < 0.1, 0.0)
)
edited("every second row, by a step", without_gradients(lambda t, net, n: _first(net)[::2].neg_()))
edited("chunk written", without_gradients(lambda t, net, n: _first(net).chunk(2)[1].mul_(0.5)))
edited("flat view written", lambda t, net, n: _first(net).data.view(-1)[3:70].fill_(0.01))
edited("masked_fill_", without_gradients(lambda t, net, n: _first(net).masked_fill_(torch.eye(16, 8).bool(), 0.0)))
edited(
    "index_copy_",
    without_gradients(lambda t, net, n: _first(net).index_copy_(0, torch.tensor([1, 14]), torch.ones(2, 8))),
)
edited("a row copied from a row", without_gradients(lambda t, net, n: _first(net)[0].copy_(_first(net)[15])))
edited("copy_ of new weights", without_gradients(lambda t, net, n: _first(net).copy_(torch.full((16, 8), 0.1 * n))))
edited(".data assigned", lambda t, net, n: setattr(_first(net), "data", torch.full((16, 8), 0.1 * n)))
edited(
    "rows kept within a norm",
    without_gradients(lambda t, net, n: _first(net).mul_((0.5 / _first(net).norm(dim=1, keepdim=True)).clamp(max=1))),
)
edited("columns kept within a norm (renorm_)", without_gradients(lambda t, net, n: _first(net).renorm_(2, 1, 0.5)))
edited("weights divided by their norm", without_gradients(lambda t, net, n: _first(net).div_(_first(net).norm())))
edited("mean of the rows taken away", without_gradients(lambda t, net, n: _first(net).sub_(_first(net).mean(0))))
edited("noise added to weights", without_gradients(lambda t, net, n: _first(net).add_(t.randn(16, 8), alpha=0.01)))
edited("init.constant_ between steps", lambda t, net, n: nn.init.constant_(net.net.a.bias, 0.1))
edited(
    "init.xavier_ between steps",
    lambda t, net, n: _seeded(nn.init.xavier_uniform_, _first(net)),
)
edited("reset_parameters between steps", lambda t, net, n: _seeded(net.net.a.reset_parameters))
edited(
    "init.orthogonal_ between steps",
    lambda t, net, n: _seeded(nn.init.orthogonal_, _first(net)),
)
edited("bias of a layer set to zero", without_gradients(lambda t, net, n: net.net.a.bias.zero_()))
edited(
    "vector_to_parameters",
    without_gradients(
        lambda t, net, n: vector_to_parameters(parameters_to_vector(net.parameters()) * 0.9, net.parameters())
    ),
)
edited(
    "load_state_dict of scaled weights",
    lambda t, net, n: net.load_state_dict({k: v * 0.9 for k, v in net.state_dict().items()}) and None,
)
edited(
    "state_dict kept and loaded again",
    lambda t, net, n: (
        setattr(net, "kept", copy.deepcopy(net.state_dict())) if n == 0 else net.load_state_dict(net.kept) and None
    ),
)
edited("foreach scaling", without_gradients(lambda t, net, n: torch._foreach_mul_(list(net.parameters()), 0.9)))
edited(
    "sparsity by the smallest weights",
    without_gradients(
        lambda t, net, n: _first(net).mul_(_first(net).abs() > _first(net).abs().flatten().kthvalue(20).values)
    ),
)
edited("rounded weights", without_gradients(lambda t, net, n: _first(net).copy_((_first(net) * 8).round() / 8)))
edited(
    "weights of one layer into another",
    without_gradients(lambda t, net, n: net.net.b.weight.copy_(_first(net).t()[:4])),
)

# -- reads -------------------------------------------------------------------------------------------------------------

edited("norm of the weights", lambda t, net, n: t.whole(_first(net).detach().norm(), "norm"))
edited(
    "sum of squares", lambda t, net, n: t.whole(sum(p.detach().pow(2).sum() for p in net.parameters()).item(), "sum")
)
edited(
    "mean, deviation, extremes",
    lambda t, net, n: (
        [t.whole(f(_first(net).detach()), f.__name__) for f in (torch.mean, torch.std, torch.amax, torch.min)] and None
    ),
)
edited("count of large weights", lambda t, net, n: t.whole((_first(net).detach().abs() > 0.1).sum().item(), "count"))
edited("rows' norms", lambda t, net, n: t.whole(_first(net).detach().norm(dim=1), "norms"))
edited("columns' means", lambda t, net, n: t.whole(_first(net).detach().mean(0), "means"))
edited("a row read", lambda t, net, n: t.whole(_first(net)[3].detach(), "row"))
edited("one element read by item()", lambda t, net, n: t.whole(_first(net)[9, 1].item(), "element"))
edited(
    "weights to a list, to numpy",
    lambda t, net, n: t.whole(torch.tensor(_first(net).detach().numpy().tolist()), "list"),
)
edited("histogram of weights", lambda t, net, n: t.whole(torch.histc(_first(net).detach(), 5, -1, 1), "histogram"))
edited("largest singular value", lambda t, net, n: t.whole(torch.linalg.matrix_norm(_first(net).detach(), 2), "sigma"))
edited("product with the transpose", lambda t, net, n: t.whole(_first(net).detach().t() @ _first(net).detach(), "gram"))
edited(
    "isnan and isfinite", lambda t, net, n: t.whole(all(p.isfinite().all().item() for p in net.parameters()), "finite")
)
edited("equality of two weights", lambda t, net, n: t.whole(torch.equal(_first(net), _first(net).clone()), "equal"))
edited("state_dict's sum", lambda t, net, n: t.whole(sum(float(v.sum()) for v in net.state_dict().values()), "sum"))
edited(
    "shape and numel of the weights",
    lambda t, net, n: t.whole(
        sum(p.numel() for p in net.parameters()) * 1000 + sum(p.shape.numel() for p in net.parameters()), "sizes"
    ),
)
edited(
    "weights times fan-in",
    without_gradients(lambda t, net, n: [p.mul_(1 - 0.01 * p.shape[0] ** 0.5) for p in net.parameters()]),
)

# -- gradients ---------------------------------------------------------------------------------------------------------


def of_gradients(name: str, edit: Callable[[Trial, Criterion, int], Any]) -> None:
    edited(name, without_gradients(edit), where="after_backward")


def _gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def _clip_by_hand(t: Trial, net: nn.Module, _: int) -> None:
    total = sum(g.pow(2).sum() for g in _gradients(net)) ** 0.5
    for gradient in _gradients(net):
        gradient.mul_(min(1.0, 0.05 / (float(total) + 1e-6)))


def _clip_by_norms(t: Trial, net: nn.Module, _: int) -> None:
    total = torch.stack([g.norm() for g in _gradients(net)]).norm()
    t.whole(total, "norm")
    for gradient in _gradients(net):
        gradient.mul_((0.05 / (total + 1e-6)).clamp(max=1))


def _clip(t: Trial, net: nn.Module, _: int) -> None:
    t.whole(nn.utils.clip_grad_norm_(net.parameters(), 0.05), "norm")


def _noise(t: Trial, net: nn.Module, _: int) -> None:
    for gradient in _gradients(net):
        gradient.add_(t.randn(*gradient.shape) * 0.01)


def _noise_like(t: Trial, net: nn.Module, number: int) -> None:
    torch.manual_seed(number)
    for gradient in _gradients(net):
        gradient.add_(torch.randn_like(gradient), alpha=0.01)


def _agc(t: Trial, net: nn.Module, _: int) -> None:
    for p in net.parameters():
        if p.grad is not None and p.dim() == 2:
            most = p.norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.01
            p.grad.mul_((most / p.grad.norm(dim=1, keepdim=True).clamp(min=1e-6)).clamp(max=1))


of_gradients("clipping by hand, sum of squares", _clip_by_hand)
of_gradients("clipping by hand, norm of norms", _clip_by_norms)
of_gradients("clip_grad_norm_", _clip)
of_gradients(
    "clip_grad_norm_ without a limit",
    lambda t, net, n: t.whole(nn.utils.clip_grad_norm_(net.parameters(), float("inf")), "norm"),
)
of_gradients(
    "clip_grad_norm_ by the largest",
    lambda t, net, n: nn.utils.clip_grad_norm_(net.parameters(), 0.01, norm_type=float("inf")),
)
of_gradients(
    "clip_grad_norm_ of each layer",
    lambda t, net, n: [nn.utils.clip_grad_norm_(m.parameters(), 0.02) for m in net.net.children()],
)
of_gradients("clip_grad_value_", lambda t, net, n: nn.utils.clip_grad_value_(net.parameters(), 0.01))
of_gradients("gradients clipped to their rows' weights (AGC)", _agc)
of_gradients("gradient noise of the gradient's shape", _noise)
of_gradients("gradient noise, randn_like", _noise_like)
of_gradients("gradient of rows set to zero", lambda t, net, n: _first(net).grad[:5].zero_())
of_gradients("gradient of an element set", lambda t, net, n: _first(net).grad.__setitem__((9, 1), 0.5))
of_gradients("gradient masked", lambda t, net, n: _first(net).grad.mul_(torch.eye(16, 8)))
of_gradients("gradient's sign", lambda t, net, n: [g.sign_().mul_(0.1) for g in _gradients(net)])
of_gradients(
    "gradient without its mean (centralized)",
    lambda t, net, n: _first(net).grad.sub_(_first(net).grad.mean(1, keepdim=True)),
)
of_gradients("gradient dropped", lambda t, net, n: setattr(net.net.a.bias, "grad", None))
of_gradients("gradient replaced", lambda t, net, n: setattr(_first(net), "grad", _first(net).grad * 2))
of_gradients("gradients scaled by foreach", lambda t, net, n: torch._foreach_mul_(_gradients(net), 0.5))
of_gradients(
    "gradient's cosine with the weight",
    lambda t, net, n: t.whole(F.cosine_similarity(_first(net).grad.flatten(), _first(net).flatten(), dim=0), "cosine"),
)
of_gradients(
    "inner product of gradients and weights",
    lambda t, net, n: t.whole(sum((p.grad * p).sum() for p in net.parameters()), "product"),
)
of_gradients("weight decay by hand", lambda t, net, n: [p.grad.add_(p, alpha=0.1) for p in net.parameters()])
of_gradients(
    "steps with nan skipped",
    lambda t, net, n: [p.grad.nan_to_num_() for p in net.parameters() if not p.grad.isfinite().all()],
)
of_gradients("plain SGD by hand", lambda t, net, n: [p.sub_(0.1 * p.grad) for p in net.parameters()])


# -- copies ------------------------------------------------------------------------------------------------------------


def _lerp(mine: nn.Module, theirs: nn.Module) -> None:
    with torch.no_grad():
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            p.mul_(0.9).add_(q, alpha=0.1)


@habit("EMA copied before the first call")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    ema = copy.deepcopy(net)
    train(t, net, after=lambda net, n: _lerp(ema, net))
    t.state(ema)


@habit("EMA copied after the first step")
def _(t: Trial) -> None:
    net, kept = Criterion(Mlp()), {}

    def after(net: Any, number: int) -> None:
        if number == 0:
            kept["ema"] = copy.deepcopy(net)
        _lerp(kept["ema"], net)

    train(t, net, after=after)
    t.state(kept["ema"])


@habit("EMA as a dict of clones")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    shadow = {name: p.detach().clone() for name, p in net.named_parameters()}

    def after(net: Any, _: int) -> None:
        for name, p in net.named_parameters():
            shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)

    train(t, net, after=after)
    t.named("shadow", shadow)


@habit("EMA as a dict of clones made after the first step")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    shadow: dict[str, Tensor] = {}

    def after(net: Any, _: int) -> None:
        for name, p in net.named_parameters():
            shadow[name] = p.detach() * 0.1 + shadow[name] * 0.9 if name in shadow else p.detach().clone()

    train(t, net, after=after)
    t.named("shadow", shadow)


@habit("EMA of the state_dict")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    shadow: dict[str, Tensor] = {}

    def after(net: Any, _: int) -> None:
        for name, value in net.state_dict().items():
            shadow[name] = value * 0.1 + shadow[name] * 0.9 if name in shadow else value.clone()

    train(t, net, after=after)
    t.named("shadow", shadow)


@habit("AveragedModel of the network, made before")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    averaged = AveragedModel(net)
    train(t, net, after=lambda net, n: averaged.update_parameters(net))
    t.state(averaged.module)


@habit("AveragedModel of what is wrapped, made after the first step")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step, optimizer = t.wrap(net), sgd(net)
    averaged = None
    for _ in range(3):
        loss = step(*t.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averaged = averaged or AveragedModel(step, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        averaged.update_parameters(step)
        t.loss(loss)
    assert averaged is not None
    t.state(averaged.module)


@habit("Lookahead by hand")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    slow: list[Tensor] = []

    def after(net: Any, number: int) -> None:
        if not slow:
            slow.extend(p.detach().clone() for p in net.parameters())
        if number % 2 == 1:
            with torch.no_grad():
                for p, s in zip(net.parameters(), slow, strict=True):
                    s.add_(p - s, alpha=0.5)
                    p.copy_(s)

    train(t, net, after=after, steps=4)


@habit("Lookahead whose slow weights are made before")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    slow = [p.detach().clone() for p in net.parameters()]

    def after(net: Any, number: int) -> None:
        if number % 2 == 1:
            with torch.no_grad():
                for p, s in zip(net.parameters(), slow, strict=True):
                    s.add_(p - s, alpha=0.5)
                    p.copy_(s)

    train(t, net, after=after, steps=4)


@habit("sharpness-aware minimization (SAM)")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step, optimizer = t.wrap(net), sgd(net)
    for _ in range(3):
        x, y = t.batch()
        optimizer.zero_grad()
        step(x, y).backward()
        moves = []
        with torch.no_grad():
            total = torch.stack([g.norm() for g in _gradients(net)]).norm()
            for p in net.parameters():
                moves.append(None if p.grad is None else p.grad * (0.05 / (total + 1e-12)))
                if p.grad is not None:
                    p.add_(moves[-1])
        optimizer.zero_grad()
        loss = step(x, y)
        loss.backward()
        with torch.no_grad():
            for p, move in zip(net.parameters(), moves, strict=True):
                if move is not None:
                    p.sub_(move)
        optimizer.step()
        t.loss(loss)
    t.state(step)


@habit("weights swapped for the averaged ones while evaluating")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step = train(t, net)
    backup = {name: p.detach().clone() for name, p in net.named_parameters()}
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.5)
        t.loss(step(*t.batch()), "averaged")
        for name, p in net.named_parameters():
            p.copy_(backup[name])
        t.loss(step(*t.batch()), "own")


@habit("deepcopy of what is wrapped, before the first call")
def _(t: Trial) -> None:
    step = t.wrap(Criterion(Mlp()))
    other = copy.deepcopy(step)
    x, y = t.batch()
    step(x, y).backward()
    t.loss(other(x, y))
    t.gradients(step)
    t.state(other)


@habit("deepcopy of what is wrapped, after a step, and both go on")
def _(t: Trial) -> None:
    step = train(t, Criterion(Mlp()))
    other = copy.deepcopy(step)
    for one in (step, other):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        loss = one(*t.batch())
        loss.backward()
        optimizer.step()
        t.loss(loss)
        t.state(one)


@habit("best weights kept and restored")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    best: dict[str, Any] = {}

    def after(net: Any, number: int) -> None:
        if number == 1:
            best.update({name: value.detach().clone() for name, value in net.state_dict().items()})

    step = train(t, net, after=after)
    step.load_state_dict(best)
    t.state(step)


# -- what the network is made of changes -------------------------------------------------------------------------------


@habit("a layer frozen, later trained again")
def _(t: Trial) -> None:
    train(t, Criterion(Mlp()), before=lambda net, n: net.net.a.requires_grad_(requires_grad=n != 1), steps=4)


@habit("a layer thawed, its weights added to the optimizer")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    net.net.a.requires_grad_(requires_grad=False)
    step = t.wrap(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
    for number in range(4):
        if number == 2:
            net.net.a.requires_grad_(requires_grad=True)
            optimizer.add_param_group({"params": list(net.net.a.parameters()), "lr": 0.01})
        loss = step(*t.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.state(step)


@habit("the head replaced between steps")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step = t.wrap(net)
    for number in range(3):
        if number == 1:
            torch.manual_seed(3)
            net.net.b = nn.Linear(16, 4)
        optimizer = sgd(net)
        loss = step(*t.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.state(step)


@habit("layer added between steps")
def _(t: Trial) -> None:
    net = Criterion(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    step = t.wrap(net)
    for number in range(3):
        if number == 1:
            torch.manual_seed(3)
            net.net.append(nn.Linear(4, 4))
        optimizer = sgd(net)
        loss = step(*t.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.state(step)


@habit("pruning by torch.nn.utils.prune")
def _(t: Trial) -> None:
    def before(net: Any, number: int) -> None:
        if number == 1:
            prune.l1_unstructured(net.net.a, "weight", 0.3)

    net = Criterion(Mlp())
    step = t.wrap(net)
    for number in range(3):
        before(net, number)
        optimizer = sgd(net)
        loss = step(*t.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.state(step)


@habit("pruned before the first call")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    prune.l1_unstructured(net.net.a, "weight", 0.3)
    train(t, net)


@habit(".to(float32) after the first call")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step = t.wrap(net)
    t.loss(step(*t.batch()))
    net.to(torch.float32)
    optimizer = sgd(net)
    for _ in range(2):
        x, y = t.batch()
        loss = step(x.float(), y.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert abs(float(loss)) < 10
    t.whole(round(float(loss) * 0, 3), "float32")


@habit("requires_grad_ off for the whole network while evaluating")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step, optimizer = t.wrap(net), sgd(net)
    for _ in range(2):
        net.requires_grad_(requires_grad=False)
        t.loss(step(*t.batch()), "evaluation")
        net.requires_grad_(requires_grad=True)
        loss = step(*t.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.state(step)


@habit("embedding whose padding row is set to zero after each step")
def _(t: Trial) -> None:
    words = nn.Embedding(16, 8)
    net = Criterion(nn.Sequential(words, nn.Linear(8, 4)))

    def after(net: Any, _: int) -> None:
        with torch.no_grad():
            words.weight[2].zero_()

    train(t, net, batch=lambda: (t.mine(t.randint(16, 8)), t.mine(t.randn(8, 4))), after=after)


@habit("embedding with max_norm")
def _(t: Trial) -> None:
    net = Criterion(nn.Sequential(nn.Embedding(16, 8, max_norm=0.5), nn.Linear(8, 4)))
    train(t, net, batch=lambda: (t.mine(t.randint(16, 8)), t.mine(t.randn(8, 4))))


@habit("embedding with padding_idx")
def _(t: Trial) -> None:
    net = Criterion(nn.Sequential(nn.Embedding(16, 8, padding_idx=0), nn.Linear(8, 4)))
    train(t, net, batch=lambda: (t.mine(t.randint(16, 8)), t.mine(t.randn(8, 4))))


@habit("embedding grown between steps")
def _(t: Trial) -> None:
    net = Criterion(nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 4)))
    step = t.wrap(net)
    for number in range(3):
        if number == 1:
            old = step.state_dict()["net.0.weight"]
            rows = torch.cat([whole_of(old), torch.ones(8, 8)])
            net.net[0] = nn.Embedding.from_pretrained(rows, freeze=False)
        optimizer = sgd(net)
        loss = step(t.mine(t.randint(8, 8) + 8 * (number > 0)), t.mine(t.randn(8, 4)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.state(step)
