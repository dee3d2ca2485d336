"""What a training loop does to cut parameters with torch's own tools, beside one process that does the same."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from msrun.errors import ParallelError, StrategyError
from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    Pipeline,
    WithLoss,
    clip_grad_norm_,
    get_rank,
    load_checkpoint,
    no_init_parameters,
    optim,
    save_checkpoint,
    shard,
    value_and_grad,
)

Result = dict[str, Any]
STEPS = 2
ELEMENTWISE: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "foreach": True, "weight_decay": 0.1}, {"fused": True}],
    "Adam": [
        {"amsgrad": True, "foreach": True},
        {"fused": True, "amsgrad": True},
        {"capturable": False, "maximize": True},
    ],
    "AdamW": [{}],
    "Adamax": [{}, {"foreach": True}],
    "NAdam": [{}],
    "RAdam": [{}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "Rprop": [{}, {"foreach": True}],
    "ASGD": [{}],
    "Adagrad": [{}, {"foreach": True}],
    "Adadelta": [{}],
}
_cases: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    _cases[function.__name__] = function
    return function


def cases(world_size: int) -> dict[str, Callable[[], Result]]:
    assert world_size == 2
    return {name: lambda function=function: function() or {} for name, function in _cases.items()}  # type: ignore[func-returns-value, misc]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).tanh())


class Tied(nn.Module):
    """The weight of the first layer is that of the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.middle, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x).tanh()))


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def hsdp(network: nn.Module) -> AutoParallel:
    return AutoParallel(WithLoss(network, F.mse_loss)).dataset_strategy("full_batch").hsdp(threshold=0)


def columns(network: nn.Module) -> AutoParallel:
    shard(network.a, ((1, 1), (2, 1), (2,)))
    return AutoParallel(WithLoss(network, F.mse_loss)).dataset_strategy("full_batch")


def stages(network: nn.Module) -> AutoParallel:
    config = {"a": 0, "middle": 1, "b": 1} if isinstance(network, Tied) else {"a": 0, "norm": 0, "b": 1}
    call = Pipeline(WithLoss(network, F.mse_loss), 2, stage_config=config)
    return AutoParallel(call).dataset_strategy("full_batch").pipeline(2)


def pair(
    build: Callable[[nn.Module], AutoParallel] = hsdp, make: type[nn.Module] = Net
) -> tuple[AutoParallel, Any, Any]:
    """Return the AutoParallel of a network, that network, and the same one for this process alone."""
    network, right = make(), make()
    return build(network), network, right


def backward(step: AutoParallel, right: nn.Module, seed: int = 1) -> None:
    x, y = batch(seed)
    loss, expected = step(x, y), F.mse_loss(right(x), y)
    loss.backward()
    expected.backward()
    assert_close(loss.detach(), expected.detach())


def train(
    step: AutoParallel, right: nn.Module, ours: Any, theirs: Any, between: Callable[[Any], Any] | None = None
) -> None:
    """Take the same steps on both sides and compare the weights."""
    for seed in range(STEPS):
        backward(step, right, seed)
        for network, optimizer in ((step, ours), (right, theirs)):
            if between is not None:
                between(network)
            optimizer.step()
            optimizer.zero_grad()
    assert_state(step.state_dict(), right.state_dict())


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def assert_state(mine: Any, right: Any) -> None:
    assert list(mine) == list(right)
    for name, value in right.items():
        assert type(mine[name]) is Tensor, name
        assert_close(mine[name], value.detach())


def refused(call: Callable[[], Any], *words: str, kind: type[Exception] = ParallelError) -> None:
    try:
        found = call()
    except kind as error:
        assert "\n" not in str(error)
        for word in words:
            assert word in str(error), str(error)
        return
    raise AssertionError(f"not refused: {found}")


# -- norms ----------------------------------------------------------------------------------------------------------


@case
def torchs_clipping_is_global() -> None:
    for build, norm_type, foreach in itertools.product((hsdp, columns), (2.0, 1.0, 3.0, float("inf")), (None, False)):
        step, _, right = pair(build)
        backward(step, right)
        limit, how = 0.05, {"norm_type": norm_type, "foreach": foreach}
        found = nn.utils.clip_grad_norm_(step.parameters(), limit, **how)  # type: ignore[arg-type]
        assert_close(found, nn.utils.clip_grad_norm_(right.parameters(), limit, **how))  # type: ignore[arg-type]
        for one, other in zip(step.parameters(), right.parameters(), strict=True):
            whole = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
            assert_close(whole, other.grad)


@case
def total_norm_of_gradients_is_global_also_of_value_and_grad() -> None:
    network, right = Net(), Net()
    gradients_of = value_and_grad(lambda x, y: F.mse_loss(network(x), y), None, list(network.parameters()))
    norms = []

    def run(x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = gradients_of(x, y)
        norms.append(nn.utils.get_total_norm(gradients))
        return loss

    x, y = batch()
    AutoParallel(run).dataset_strategy("full_batch").hsdp(threshold=0)(x, y)
    expected = torch.autograd.grad(F.mse_loss(right(x), y), list(right.parameters()))
    assert_close(norms[0], nn.utils.get_total_norm(expected))
    step, _, right = pair()
    backward(step, right)
    mine = torch.autograd.grad(step(x, y), list(step.parameters()))
    assert_close(nn.utils.get_total_norm(mine), nn.utils.get_total_norm(expected))
    assert_close(nn.utils.get_total_norm(p.grad for p in step.parameters()), nn.utils.get_total_norm(expected))


@case
def norms_in_a_pipeline_are_refused_by_torchs_clipping_and_right_with_ours() -> None:
    for make in (Net, Tied):
        step, _, right = pair(stages, make)
        backward(step, right)
        refused(lambda step=step: nn.utils.clip_grad_norm_(step.parameters(), 1.0), "in stage", "clip_grad_norm_")  # type: ignore[misc]
        for norm_type in (2.0, 1.0, float("inf")):
            found = clip_grad_norm_(step, 1e9, norm_type)
            assert_close(found, nn.utils.clip_grad_norm_(right.parameters(), 1e9, norm_type))


# -- optimizers -----------------------------------------------------------------------------------------------------


@case
def element_wise_optimizers_made_before_the_first_call_train_as_one_process() -> None:
    for name, build, settings in (
        (n, b, s) for n, several in ELEMENTWISE.items() for s in several for b in (hsdp, stages)
    ):
        step, _, right = pair(build)
        kind = getattr(torch.optim, name)
        ours, theirs = kind(step.parameters(), lr=0.01, **settings), kind(right.parameters(), lr=0.01, **settings)
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in (ours, theirs)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a scheduler that does not see the optimizer's steps warns
            for _ in range(2):
                train(step, right, ours, theirs)
                for schedule in schedules:
                    schedule.step()


@case
def own_element_wise_optimizers_train_as_one_process() -> None:
    class Mine(torch.optim.Rprop):
        """A subclass that says its step anew runs under the checks."""

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    class Lion(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
            means = [self.state[weight].setdefault("mean", torch.zeros(weight.shape).double()) for weight in weights]
            gradients = [weight.grad for weight in weights]
            updates = torch._foreach_lerp(means, gradients, 0.1)
            torch._foreach_add_(weights, [update.sign() for update in updates], alpha=-0.01)
            torch._foreach_lerp_(means, gradients, 0.01)
            assert all(type(mean) is type(gradient) for mean, gradient in zip(means, gradients, strict=True))

    for kind in (Mine, Lion):
        for build in (hsdp, stages):
            step, _, right = pair(build)
            train(step, right, kind(step.parameters()), kind(right.parameters()))


@case
def step_that_fails_leaves_the_checks_on() -> None:
    step, network, right = pair()
    backward(step, right)
    optimizer = torch.optim.SGD([{"params": list(step.parameters())}], 0.1)
    optimizer.param_groups[0]["lr"] = "fast"
    for _ in range(2):
        try:
            optimizer.step()
        except TypeError:
            pass
        else:
            raise AssertionError("the step did not fail")
        refused(lambda: network.a.weight.sum(), "a.weight")


@case
def own_optimizer_that_uses_norms_of_whole_weights_trains_as_one_process() -> None:
    class Lamb(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.05})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for weight in (weight for group in self.param_groups for weight in group["params"]):
                state = self.state[weight]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(weight), weight.new_zeros(weight.shape)
                state["mean"].mul_(0.9).add_(weight.grad, alpha=0.1)
                state["square"].mul_(0.99).addcmul_(weight.grad, weight.grad, value=0.01)
                update = state["mean"] / (state["square"].sqrt() + 1e-6)
                ratio = weight.norm().clamp(0, 10) / (update.norm() / update.numel() ** 0.5)
                weight.add_(update * ratio, alpha=-0.05)

    step, _, right = pair()
    train(
        step,
        right,
        Lamb(step.parameters()),
        Lamb(right.parameters()),
        lambda n: nn.utils.clip_grad_norm_(n.parameters(), 0.3),
    )


@case
def optimizers_of_all_parameters_as_one_are_refused_before_they_change_anything() -> None:
    for build in (hsdp, stages):
        step, _, right = pair(build)
        backward(step, right)
        before = step.state_dict()
        optimizer = torch.optim.LBFGS(step.parameters())
        refused(lambda: optimizer.step(lambda: 0.0), "LBFGS", "one whole", "AdamW", kind=StrategyError)  # noqa: B023
        assert_state(step.state_dict(), before)


@case
def state_of_an_optimizer_of_one_process_is_cut_and_own_state_goes_round() -> None:
    step, _, right = pair()
    theirs = torch.optim.Adam(right.parameters(), 0.01)
    ours = torch.optim.Adam(step.parameters(), 0.01)
    backward(step, right)
    theirs.step()
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    step.load_state_dict(right.state_dict())
    step.zero_grad()
    right.zero_grad()
    train(step, right, ours, theirs)
    refused(lambda: torch.save(ours.state_dict(), io.BytesIO()), "(8, 8) of (16, 8)", "save_checkpoint")
    again = torch.optim.Adam(step.parameters(), 0.01)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(step, right, again, theirs)


@case
def optimizers_of_ours_train_parts_as_one_process() -> None:
    """Norms are those of the whole parameter, state is cut as the parameter, also with a filter by dimensions."""
    kinds: list[Callable[[Any], Any]] = [
        lambda p: optim.AdamWeightDecay(p, 0.01, weight_decay=0.1, decay_filter=lambda one: one.dim() > 1),
        lambda p: optim.Lamb(p, 0.01, weight_decay=0.1),
        lambda p: optim.LazyAdam(p, 0.01, use_nesterov=True, weight_decay=0.1),
        lambda p: optim.FTRL(p, lr=0.05, l1=1e-3, l2=1e-2),
        lambda p: optim.LARS(optim.Momentum(p, 0.1, 0.9, weight_decay=0.1), coefficient=0.1),
    ]
    for kind in kinds:
        for build in (hsdp, columns, stages):
            step, _, right = pair(build)
            train(step, right, kind(step.parameters()), kind(right.parameters()))


@case
def gradients_handed_to_our_optimizer_are_taken() -> None:
    network, right = Net(), Net()
    gradients_of = value_and_grad(lambda x, y: F.mse_loss(network(x), y), None, list(network.parameters()))
    optimizer, theirs = optim.Adam(network.parameters(), lr=0.01), torch.optim.Adam(right.parameters(), lr=0.01)

    def run(x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = gradients_of(x, y)
        optimizer(gradients)
        return loss

    step = AutoParallel(run).dataset_strategy("full_batch").hsdp(threshold=0)
    for seed in range(STEPS):
        x, y = batch(seed)
        expected = F.mse_loss(right(x), y)
        expected.backward()
        assert_close(step(x, y), expected.detach())
        theirs.step()
        theirs.zero_grad()


@case
def step_in_backward_is_refused_where_all_gradients_are_needed_at_once() -> None:
    sgd = torch.optim.SGD
    for build, word in (
        (lambda n: stages(n), "pipeline"),
        (lambda n: hsdp(n).mixed_precision("float16", loss_scale=8.0), "loss scale"),
        (lambda n: AutoParallel(WithLoss(n, F.mse_loss), "data_parallel"), "captured graph"),
        (lambda n: AutoParallel(lambda x: n(x).sum()), "step function"),
    ):
        network = Net()
        step = build(network)  # type: ignore[no-untyped-call]
        optimizer = sgd(network.parameters(), 0.1)
        refused(lambda step=step, optimizer=optimizer: step.step_in_backward(optimizer), word, kind=StrategyError)
    network = Net()
    step = hsdp(network)
    for optimizer in (torch.optim.LBFGS(network.parameters()), network):
        refused(lambda optimizer=optimizer: step.step_in_backward(optimizer), "step_in_backward", kind=StrategyError)
    step.step_in_backward(sgd(network.parameters(), 0.1))
    refused(lambda: clip_grad_norm_(step, 1.0), "clip_grad_norm_", "step_in_backward", kind=StrategyError)
    refused(lambda: step.no_sync().__enter__(), "no_sync()", "step_in_backward", kind=StrategyError)
    step = AutoParallel(GradAccumulation(WithLoss(network, F.mse_loss), 2)).dataset_strategy("full_batch")
    step.step_in_backward(sgd(network.parameters(), 0.1))
    refused(lambda: step(*batch()), "2 micro batches", kind=StrategyError)


# -- state dicts, copies, checkpoints ---------------------------------------------------------------------------------


@case
def state_dict_gives_wholes_and_takes_wholes_in_every_layout() -> None:
    for build in (hsdp, columns, stages):
        step, network, right = pair(build)
        backward(step, right)
        assert_state(step.state_dict(), right.state_dict())
        other = {name: value + 1 for name, value in right.state_dict().items()}
        for target in (step, network):
            target.load_state_dict(other)
            assert_state(step.state_dict(), other)
            target.load_state_dict(right.state_dict())
            assert_state(step.state_dict(), right.state_dict())
        alone = Net()
        alone.load_state_dict(step.state_dict())
        wrong = {name: value[:2] for name, value in right.state_dict().items()}
        try:
            network.load_state_dict(wrong)
        except RuntimeError as error:
            assert "of (16, 8)" in str(error)
            assert "(2, 8), give the whole" in str(error)
        else:
            raise AssertionError("a tensor of a wrong shape was loaded")


@case
def parts_stay_in_this_process_and_say_why() -> None:
    step, network, right = pair()
    backward(step, right)
    best = copy.deepcopy(network.state_dict())
    for save in (network.state_dict, lambda: network, lambda: step):
        refused(lambda save=save: torch.save(save(), io.BytesIO()), "a.weight", "(8, 8) of (16, 8)", "state_dict()")  # type: ignore[misc]
    step.load_state_dict({name: value * 0 for name, value in right.state_dict().items()})
    network.load_state_dict(best)
    assert_state(step.state_dict(), right.state_dict())


@case
def use_of_the_inner_network_is_refused_by_name() -> None:
    step, network, right = pair()
    x, _ = batch()
    backward(step, right)
    weight = network.a.weight
    refused(lambda: network(x), "linear", "a.weight", "(8, 8) of (16, 8)", "call the AutoParallel")
    for call in (
        lambda: x @ weight.T,
        lambda: weight.sum(),
        lambda: weight.grad.mean(),
        lambda: weight.max(),
        lambda: (weight**2).sum(),
        lambda: weight.view(-1),
        lambda: weight[0],
        lambda: weight.tolist(),
        lambda: weight.cpu().numpy(),
        lambda: weight.detach().norm(dim=0),
        lambda: weight.norm(),
        lambda: torch.linalg.norm(weight.detach(), 2),
        lambda: torch.stack([weight, weight]),
        lambda: nn.utils.parameters_to_vector(network.parameters()),
        lambda: nn.init.normal_(weight),
        lambda: torch.randn_like(weight),
        lambda: weight.data.add_(torch.zeros(3, 8).double()),
        lambda: weight + network.b.weight,
    ):
        refused(call, "a.weight", "of (16, 8)")
    stepped, _, right = pair(stages)
    backward(stepped, right)
    weight = dict(stepped.named_parameters())["a.weight"]
    refused(lambda: weight.sum(), "a.weight", "stage 0" if get_rank() == 0 else "this rank holds nothing of (16, 8)")


@case
def element_wise_work_on_parts_takes_whole_tensors_too() -> None:
    step, network, right = pair()
    backward(step, right)
    weight, other = network.a.weight, right.a.weight
    mask = (torch.arange(16 * 8).view(16, 8) % 3 == 0).double()
    row, column = torch.arange(8).double(), torch.arange(16).double().unsqueeze(1)
    with torch.no_grad():
        for target, gradient in ((weight, weight.grad), (other, other.grad)):
            gradient.mul_(mask).add_(row).mul_(column)
            target.sub_(0.1 * torch.where(gradient > 0, gradient, gradient * 2).clamp(-1, 1))
            target.data = target.data * 2 + mask
    assert_state(step.state_dict(), right.state_dict())
    assert_close(weight.grad.full_tensor(), other.grad)
    assert weight.numel() == other.numel()
    weight.data = other.detach() + 1
    assert_close(weight.full_tensor(), other.detach() + 1)
    assert_close(local(weight), weight.to_local())


@case
def copies_know_that_they_are_cut() -> None:
    step, network, right = pair()
    backward(step, right)
    copied = copy.deepcopy(network)
    assert_state(hsdp(copied).state_dict(), right.state_dict())
    again = copy.deepcopy(step)
    assert_state(again.state_dict(), right.state_dict())
    assert_close(again(*batch()).detach(), step(*batch()).detach())
    folder = Path(gettempdir()) / f"copies-{step.plan.world_size}"
    save_checkpoint(copied, folder)
    loaded = load_checkpoint(folder)
    assert_state({name: loaded[name] for name in right.state_dict()}, right.state_dict())


@case
def averages_are_those_of_one_process() -> None:
    for build in (hsdp, stages):
        step, _, right = pair(build)
        backward(step, right)
        step.zero_grad()
        right.zero_grad()
        ways = (None, get_ema_multi_avg_fn(0.5))
        mine = [AveragedModel(step, multi_avg_fn=way, use_buffers=way is not None) for way in ways]
        theirs = [AveragedModel(right, multi_avg_fn=way, use_buffers=way is not None) for way in ways]
        ours, optimizer = torch.optim.SGD(step.parameters(), 0.1), torch.optim.SGD(right.parameters(), 0.1)

        def update(network: nn.Module, step: Any = step, mine: Any = mine, theirs: Any = theirs) -> None:
            for average in mine if network is step else theirs:
                average.update_parameters(network)

        train(step, right, ours, optimizer, update)
        for average, expected in zip(mine, theirs, strict=True):
            assert_state(average.state_dict(), expected.state_dict())
            average.load_state_dict(expected.state_dict())
            x, y = batch(7)
            with torch.no_grad():
                assert_close(average(x, y), F.mse_loss(expected(x), y))


@case
def average_made_before_the_parameters_are_cut_is_refused() -> None:
    step, network, right = pair()
    early = AveragedModel(network)
    backward(step, right)
    refused(lambda: early.update_parameters(network), "(16, 8)", "after AutoParallel's first call")


# -- hooks, deferred values -------------------------------------------------------------------------------------------


@case
def hooks_on_parameters_outlive_the_cut_and_see_norms_of_the_whole() -> None:
    step, network, right = pair()
    seen: list[list[Tensor]] = [[], []]
    handles = []
    for found, model in zip(seen, (network, right), strict=True):
        handles.append(model.a.weight.register_hook(lambda gradient: gradient / gradient.norm()))
        model.b.weight.register_post_accumulate_grad_hook(lambda weight, found=found: found.append(weight.grad.norm()))
    for seed in range(3):
        backward(step, right, seed)
    assert_close(network.a.weight.grad.full_tensor(), right.a.weight.grad)
    assert len(seen[0]) == 3
    assert_close(seen[0], seen[1])
    for handle in handles:
        handle.remove()
    network.a.weight.register_hook(lambda gradient: gradient * 2)
    right.a.weight.register_hook(lambda gradient: gradient * 2)
    backward(step, right)
    assert_close(network.a.weight.grad.full_tensor(), right.a.weight.grad)
    assert network.a.weight.grad is network.a.weight.grad


@case
def deferred_network_loads_and_saves_wholes() -> None:
    with no_init_parameters():
        network = Net()
    right = Net()
    step = hsdp(network)
    early = torch.optim.Adagrad(step.parameters(), 0.01)
    train(step, right, torch.optim.Adam(step.parameters()), torch.optim.Adam(right.parameters()))
    backward(step, right)
    refused(early.step, "Adagrad", "sum", "a.weight", "first call", kind=StrategyError)


@case
def state_made_before_whole_parameters_had_values_is_refused() -> None:
    with no_init_parameters():
        network = Net()
    step = AutoParallel(WithLoss(network, F.mse_loss)).dataset_strategy("full_batch")
    early = torch.optim.Adagrad(step.parameters(), 0.01)
    backward(step, Net())
    refused(early.step, "Adagrad", "sum", "first call", kind=StrategyError)


# -- as a module ------------------------------------------------------------------------------------------------------


@case
def accumulation_loops_begin_with_no_sync_in_every_mode() -> None:
    for mode, level in (
        ("semi_auto", None),
        ("semi_auto", "level1"),
        ("data_parallel", None),
        ("data_parallel", "level1"),
    ):
        network, right = Net(), Net()
        step = AutoParallel(WithLoss(network, F.mse_loss), mode)
        if level:
            step.hsdp(threshold=0, optimizer_level=level)  # type: ignore[arg-type]
        ours, theirs = (torch.optim.SGD(n.parameters(), 0.1) for n in (step, right))
        for seed in range(3):
            for part in range(2):
                x, y = batch(10 * seed + part)
                rows = slice(2 * get_rank(), 2 * get_rank() + 2)
                if part:
                    step(x[rows], y[rows]).backward()
                else:
                    with step.no_sync():
                        step(x[rows], y[rows]).backward()
                F.mse_loss(right(x), y).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_state(step.state_dict(), right.state_dict())


@case
def module_methods_after_the_first_call() -> None:
    step, network, right = pair()
    backward(step, right)
    refused(step.half, "before", kind=StrategyError)
    step.to("cpu").to(torch.float64)
    step.requires_grad_(requires_grad=False).requires_grad_()
    assert [name for name, _ in step.named_parameters()] == [name for name, _ in right.named_parameters()]
    step.eval()
    assert not network.training
    assert not step.training
    outer = nn.ModuleDict({"inner": step, "head": nn.Linear(2, 2)})
    assert_state({n[6:]: v for n, v in outer.state_dict().items() if n.startswith("inner.")}, right.state_dict())
    outer.load_state_dict({n: v * 0 for n, v in outer.state_dict().items()})
    assert all(not value.any() for value in step.state_dict().values())
