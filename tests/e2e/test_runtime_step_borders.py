"""The law of the border: losses outside of steps, chains, states that go from call to call, inputs with gradients,
several losses, any container; in every mode, beside one process that does the same on the whole batch.

Each habit is written once, as for one process. It gets the steps and this rank's part of the batch, and yields what its
user would look at: gradients of parameters, of this rank's rows, numbers. A mode is right if it yields what one process
does, rows of this rank alone, or if it refuses by name what `REFUSED` says.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from on_ranks import on_ranks
from torch import Tensor, nn

from msrun.errors import MsrunError
from msrun.runtime import AutoParallel, Pipeline, WithLoss, get_rank, shard

Wrap = Callable[[nn.Module], Any]
ROWS, WIDTH = 8, 8


class Body(nn.Module):
    """Rows to rows."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.norm, self.b = nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Linear(16, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).tanh())


class Scorer(nn.Module):
    """Rows to one loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(-self.body(x)).mean()


class Cell(nn.Module):
    """A loss and the state for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mix = Body(3), Body(4)

    def forward(self, x: Tensor, y: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(self.body(x) + self.mix(state))
        return F.mse_loss(state, y), state


class Pair(NamedTuple):
    loss: Tensor
    out: Tensor


class NamedPair(Pair):
    """A tuple that pytree does not know."""


class Ordered(collections.OrderedDict[str, Tensor]):
    """A dict that pytree does not know."""


@dataclass
class Record:
    loss: Tensor
    out: Tensor


def ordered(loss: Tensor, out: Tensor) -> Ordered:
    made = Ordered()
    made["loss"], made["out"] = loss, out
    return made


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda loss, out: (loss, out), tuple),
    "list": (lambda loss, out: [loss, out], tuple),
    "dict": (lambda loss, out: {"loss": loss, "out": out}, lambda r: (r["loss"], r["out"])),
    "ordered": (ordered, lambda r: (r["loss"], r["out"])),
    "named": (Pair, lambda r: (r.loss, r.out)),
    "subclass": (NamedPair, lambda r: (r.loss, r.out)),
    "record": (Record, lambda r: (r.loss, r.out)),
}


class Holding(nn.Module):
    """Returns its loss and rows in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.make = Body(), CONTAINERS[kind][0]

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.body(x)
        return self.make(F.mse_loss(out, y), out)


# -- habits -----------------------------------------------------------------------------------------------------------

Habit = Callable[["Place"], Iterator[Tensor]]
HABITS: dict[str, Habit] = {}


class Place:
    """What a habit runs on: one process, or one rank in a mode."""

    def __init__(self, wrap: Wrap | None, parts: int) -> None:
        self._wrap, self._parts = wrap, parts
        self.networks: list[nn.Module] = []
        self._steps: list[nn.Module] = []

    def step(self, network: nn.Module) -> Any:
        self.networks.append(network)
        self._steps.append(network if self._wrap is None else self._wrap(network))
        return self._steps[-1]

    def mine(self, whole: Tensor) -> Tensor:
        """Return this rank's rows."""
        return whole.chunk(self._parts)[get_rank() % self._parts].clone() if self._wrap else whole.clone()

    def weights(self) -> Iterator[Tensor]:
        """Yield all weights, whole on every rank."""
        for step in self._steps:
            yield from (value.clone() for _, value in sorted(step.state_dict().items()))

    def gradients(self) -> Iterator[Tensor]:
        """Yield what one step with all gradients makes of all weights."""
        for network in self.networks:
            torch.optim.SGD(network.parameters(), 1.0).step()
        yield from self.weights()


def whole_of(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[no-any-return]


def data(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def habit(function: Habit) -> Habit:
    HABITS[function.__name__] = function
    return function


@habit
def loss_outside(at: Place) -> Iterator[Tensor]:
    step = at.step(Body())
    for seed in (1, 3):
        F.mse_loss(step(at.mine(data(seed))), at.mine(data(seed + 1))).backward()
    yield from at.gradients()


@habit
def losses_of_rows_outside(at: Place) -> Iterator[Tensor]:
    class Rows(Body):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).pow(2).mean(1)

    at.step(Rows())(at.mine(data())).mean().backward()
    yield from at.gradients()


@habit
def loss_inside_and_another_outside(at: Place) -> Iterator[Tensor]:
    loss, state = at.step(Cell())(at.mine(data()), at.mine(data(2)), at.mine(data(3)))
    (loss + 0.1 * state.pow(2).mean()).backward()
    yield from at.gradients()


@habit
def number_times_one_of_the_rank(at: Place) -> Iterator[Tensor]:
    loss = at.step(WithLoss(Body(), F.mse_loss))(at.mine(data()), at.mine(data(2)))
    (loss * at.mine(data(5)).abs().mean()).backward()
    yield from at.gradients()


@habit
def chain(at: Place) -> Iterator[Tensor]:
    make, judge = at.step(Body()), at.step(Scorer(Body(2)))
    judge(make(at.mine(data()))).backward()
    yield from at.gradients()


@habit
def chain_of_rows_with_a_loss_outside(at: Place) -> Iterator[Tensor]:
    first, second = at.step(Body()), at.step(Body(2))
    F.mse_loss(second(first(at.mine(data())) * 2), at.mine(data(2))).backward()
    yield from at.gradients()


@habit
def chain_and_a_loss_of_its_middle(at: Place) -> Iterator[Tensor]:
    make, judge = at.step(Body()), at.step(Scorer(Body(2)))
    middle = make(at.mine(data()))
    (judge(middle) + F.l1_loss(middle, at.mine(data(2)))).backward()
    yield from at.gradients()


@habit
def the_same_step_twice_in_a_chain(at: Place) -> Iterator[Tensor]:
    step = at.step(Body())
    F.mse_loss(step(step(at.mine(data()))), at.mine(data(2))).backward()
    yield from at.gradients()


@habit
def state_through_time(at: Place) -> Iterator[Tensor]:
    step, state, total = at.step(Cell()), at.mine(torch.zeros(ROWS, WIDTH, dtype=torch.float64)), 0.0
    for seed in range(3):
        loss, state = step(at.mine(data(seed)), at.mine(data(seed + 10)), state)
        total = total + loss
    total.backward()  # type: ignore[attr-defined]
    yield from at.gradients()


@habit
def detached_state_through_time(at: Place) -> Iterator[Tensor]:
    step, state = at.step(Cell()), at.mine(torch.zeros(ROWS, WIDTH, dtype=torch.float64))
    for seed in range(3):
        loss, state = step(at.mine(data(seed)), at.mine(data(seed + 10)), state.detach())
        loss.backward()
    yield from at.gradients()


@habit
def gan(at: Place) -> Iterator[Tensor]:
    maker, judge = Body(), Body(2)
    make, judging = at.step(maker), at.step(judge)
    optimizers = [torch.optim.SGD(network.parameters(), 0.1) for network in (maker, judge)]
    for seed in range(2):
        false = make(at.mine(data(seed)))
        real, fake = judging(at.mine(data(seed + 5))), judging(false.detach())
        (F.softplus(-real).mean() + F.softplus(fake).mean()).backward()
        optimizers[1].step()
        judge.zero_grad()
        F.softplus(-judging(false)).mean().backward()
        optimizers[0].step()
        yield from at.weights()
        maker.zero_grad()
        judge.zero_grad()


@habit
def network_that_trains_after_another(at: Place) -> Iterator[Tensor]:
    networks = [Scorer(Body()), Scorer(Body(2))]
    steps = list(map(at.step, networks))
    optimizers = [torch.optim.SGD(network.parameters(), 0.1) for network in networks]
    for step, optimizer in zip(steps, optimizers, strict=True):
        step(at.mine(data())).backward()
        optimizer.step()
    yield from at.weights()


@habit
def input_with_a_gradient(at: Place) -> Iterator[Tensor]:
    x = at.mine(data()).requires_grad_()
    at.step(WithLoss(Body(), F.mse_loss))(x, at.mine(data(2))).backward()
    assert x.grad is not None
    yield x.grad
    yield from at.gradients()


@habit
def input_made_of_a_leaf(at: Place) -> Iterator[Tensor]:
    x, delta = at.mine(data()), at.mine(data(4)).requires_grad_()
    F.mse_loss(at.step(Body())(x + 0.1 * delta), at.mine(data(2))).backward()
    assert delta.grad is not None
    yield delta.grad
    yield from at.gradients()


@habit
def input_of_a_chain(at: Place) -> Iterator[Tensor]:
    x = at.mine(data()).requires_grad_()
    first, judge = at.step(Body()), at.step(Scorer(Body(2)))
    middle = first(x)
    (judge(middle) + F.mse_loss(middle, at.mine(data(2))) + x.pow(2).mean()).backward()
    assert x.grad is not None
    yield x.grad
    yield from at.gradients()


@habit
def input_asked_by_autograd(at: Place) -> Iterator[Tensor]:
    x = at.mine(data()).requires_grad_()
    loss = at.step(WithLoss(Body(), F.mse_loss))(x, at.mine(data(2)))
    yield torch.autograd.grad(loss, x)[0]


@habit
def leaf_away_from_any_step(at: Place) -> Iterator[Tensor]:
    x = at.mine(data()).requires_grad_()
    at.step(WithLoss(Body(), F.mse_loss))(x, at.mine(data(2))).backward()
    x.grad = None
    x.pow(2).sum().backward()
    assert x.grad is not None
    yield x.grad


@habit
def parameter_outside(at: Place) -> Iterator[Tensor]:
    torch.manual_seed(7)
    outside = nn.Linear(WIDTH, WIDTH).double()
    step = at.step(WithLoss(Body(), F.mse_loss))
    optimizer = torch.optim.SGD([*outside.parameters(), *at.networks[0].parameters()], 0.1)
    for seed in range(3):
        step(outside(at.mine(data(seed))), at.mine(data(seed + 5))).backward()
        optimizer.step()
        yield from (parameter.grad.clone() for parameter in outside.parameters() if parameter.grad is not None)
        optimizer.zero_grad()
    yield from (parameter.detach() for parameter in outside.parameters())


@habit
def modules_after_a_step(at: Place) -> Iterator[Tensor]:
    torch.manual_seed(7)
    step, heads = at.step(Body()), [nn.Linear(WIDTH, WIDTH).double() for _ in range(3)]
    for head in heads:
        nn.init.zeros_(head.bias)
    optimizers = [torch.optim.SGD(heads[0].parameters(), 0.1)]
    for seed in range(3):
        for head in heads[len(optimizers) : 1 + seed]:  # one is trained from each step on
            optimizers.append(torch.optim.SGD(head.parameters(), 0.1))
        rows = step(at.mine(data(seed)))
        losses = [F.mse_loss(head(rows), at.mine(data(seed + 5))) for head in heads[: 1 + seed]]
        torch.stack(losses).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield from (parameter.detach().clone() for head in heads for parameter in head.parameters())
    yield from at.gradients()


@habit
def gradient_of_a_module_after_a_step_asked_by_autograd(at: Place) -> Iterator[Tensor]:
    torch.manual_seed(7)
    step, head = at.step(Body()), nn.Linear(WIDTH, WIDTH).double()
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    loss = F.mse_loss(head(step(at.mine(data()))), at.mine(data(2)))
    yield from torch.autograd.grad(loss, [head.weight, *at.networks[0].parameters()])
    optimizer.step()


@habit
def several_losses(at: Place) -> Iterator[Tensor]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.other = Body(), Body(2)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x)
            return F.mse_loss(h, y), F.l1_loss(self.other(h), y)

    one, other = at.step(Two())(at.mine(data()), at.mine(data(2)))
    yield one.detach()
    yield other.detach()
    (one + 0.5 * other).backward()
    yield from at.gradients()


@habit
def two_calls_then_their_passes_in_reverse(at: Place) -> Iterator[Tensor]:
    step = at.step(WithLoss(Body(), F.mse_loss))
    losses = [step(at.mine(data(seed)), at.mine(data(seed + 5))) for seed in (0, 1)]
    losses[1].backward()
    losses[0].backward()
    yield from at.gradients()


@habit
def gradients_asked_by_autograd(at: Place) -> Iterator[Tensor]:
    step = at.step(WithLoss(Body(), F.mse_loss))
    loss = step(at.mine(data()), at.mine(data(2)))
    yield from map(whole_of, torch.autograd.grad(loss, list(at.networks[0].parameters())))


@habit
def penalty_of_parameters_outside(at: Place) -> Iterator[Tensor]:
    step = at.step(WithLoss(Body(), F.mse_loss))
    loss = step(at.mine(data()), at.mine(data(2)))
    (loss + 0.1 * sum(parameter.norm() for parameter in at.networks[0].parameters())).backward()
    yield from at.gradients()


@habit
def penalty_of_an_inputs_gradient_outside(at: Place) -> Iterator[Tensor]:
    step, x = at.step(Body()), at.mine(data()).requires_grad_()
    out = step(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (F.mse_loss(out, at.mine(data(2))) + (slope.norm(dim=1) - 1).pow(2).mean()).backward()
    yield from at.gradients()


@habit
def gradients_of_gradients(at: Place) -> Iterator[Tensor]:
    step = at.step(WithLoss(Body(), F.mse_loss))
    step(at.mine(data()), at.mine(data(2))).backward(create_graph=True)
    yield from at.gradients()


@habit
def part_is_unused_in_some_steps(at: Place) -> Iterator[Tensor]:
    class Branching(nn.Module):
        short = False

        def __init__(self) -> None:
            super().__init__()
            self.body, self.other = Body(), Body(2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.body(x)
            return F.mse_loss(h if self.short else self.other(h), y)

    network = Branching()
    step = at.step(network)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for number in range(4):
        network.short = number % 2 == 1
        step(at.mine(data(number)), at.mine(data(number + 5))).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield from at.weights()


@habit
def results_of_no_rows(at: Place) -> Iterator[Tensor]:
    class Features(Body):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            h = super().forward(x)
            return h, self.a.weight.pow(2).mean(1)

    out, of_weight = at.step(Features())(at.mine(data()))
    assert of_weight.shape == (16,)
    (out.pow(2).mean() + of_weight.mean()).backward()
    yield of_weight.detach()
    yield from at.gradients()


@habit
def detached_results(at: Place) -> Iterator[Tensor]:
    class Detaching(Body):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            h = super().forward(x)
            with torch.no_grad():
                quiet = h * 2
            return h.mean(), h.detach(), quiet

    loss, *others = at.step(Detaching())(at.mine(data()))
    assert [other.requires_grad for other in others] == [False, False]
    loss.backward()
    yield from at.gradients()


@habit
def result_written_into(at: Place) -> Iterator[Tensor]:
    out = at.step(Body())(at.mine(data()))
    out[:, 0] = 0
    out.mul_(2)
    F.mse_loss(out, at.mine(data(2))).backward()
    yield from at.gradients()


@habit
def state_in_an_attribute(at: Place) -> Iterator[Tensor]:
    class Remembering(Body):
        state: Any = None

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            self.state = h if self.state is None else torch.tanh(h + self.state)
            return self.state.pow(2).mean()

    step = at.step(Remembering())
    (step(at.mine(data())) + step(at.mine(data(2)))).backward()
    yield from at.gradients()


@habit
def tensor_that_is_no_parameter(at: Place) -> Iterator[Tensor]:
    class Hiding(Body):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)]

        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * self.hidden[0]).pow(2).mean()

    network = Hiding()
    at.step(network)(at.mine(data())).backward()
    assert network.hidden[0].grad is not None
    yield network.hidden[0].grad
    yield from at.gradients()


@habit
def parameter_used_again_outside(at: Place) -> Iterator[Tensor]:
    network = Body()
    out = at.step(network)(at.mine(data()))
    F.mse_loss(out @ network.a.weight.T, at.mine(data(2)).repeat(1, 2)).backward()
    yield from at.gradients()


def _in_container(kind: str) -> Habit:
    def held(at: Place) -> Iterator[Tensor]:
        result = at.step(Holding(kind))(at.mine(data()), at.mine(data(2)))
        loss, out = CONTAINERS[kind][1](result)
        yield loss.detach()
        yield out.detach()
        (loss + out.pow(2).mean()).backward()
        yield from at.gradients()

    return held


HABITS |= {f"held_in_{kind}": _in_container(kind) for kind in CONTAINERS}

# -- modes ------------------------------------------------------------------------------------------------------------


def whole_batch(network: nn.Module) -> Any:
    return AutoParallel(network).dataset_strategy("full_batch")


def sharded(network: nn.Module) -> Any:
    for module in network.modules():
        if isinstance(module, Body):
            shard(module.a, ((1, 1), (2, 1), (2,)))
            shard(module.b, ((1, 2), (1, 2), (1,)))
    return AutoParallel(network)


def stages(network: nn.Module) -> Any:
    bodies = [name for name, module in network.named_modules() if isinstance(module, Body)]
    config = {}
    for name in bodies:
        prefix, first = (f"{name}." if name else ""), int(name == "other")
        config |= {f"{prefix}a": first, f"{prefix}norm": first, f"{prefix}b": 1}
    return AutoParallel(Pipeline(network, 2, stage_config=config)).pipeline(2, output_broadcast=True)


MODES: dict[str, Wrap] = {
    "semi_auto": AutoParallel,
    "full_batch": whole_batch,
    "hsdp1": lambda n: AutoParallel(n).hsdp(threshold=0, optimizer_level="level1"),
    "hsdp3": lambda n: AutoParallel(n).hsdp(threshold=0, optimizer_level="level3"),
    "sharded": sharded,
    "stages": stages,
    "ddp": lambda n: AutoParallel(n, "data_parallel"),
    "fsdp2": lambda n: AutoParallel(n, "data_parallel").hsdp(threshold=0, optimizer_level="level3"),
}


def parts_of(mode: str) -> int:
    """Return into how many parts the ranks cut the batch."""
    ranks: int = dist.get_world_size()
    return {"full_batch": 1, "stages": ranks // 2}.get(mode, ranks)


CUT = ("hsdp1", "hsdp3", "sharded")
CAPTURED = ("semi_auto", "full_batch", *CUT)
NO_LOSS = ("loss_outside", "losses_of_rows_outside", "chain", "chain_of_rows_with_a_loss_outside",
           "chain_and_a_loss_of_its_middle", "the_same_step_twice_in_a_chain", "gan", "input_made_of_a_leaf",
           "input_of_a_chain", "modules_after_a_step",
           "gradient_of_a_module_after_a_step_asked_by_autograd",
           "penalty_of_an_inputs_gradient_outside", "results_of_no_rows",
           "result_written_into")  # fmt: skip
REFUSED: dict[tuple[str, str], str] = {
    **{(name, "stages"): "must return one scalar loss" for name in NO_LOSS},
    **{
        (name, "stages"): "gradients flow from result 0 alone"
        for name in (
            "loss_inside_and_another_outside",
            "state_through_time",
            *(f"held_in_{kind}" for kind in CONTAINERS),
        )
    },
    ("several_losses", "stages"): "must return one scalar loss",
    **{(f"held_in_{kind}", "stages"): "return it as it is" for kind in ("ordered", "record")},
    **{
        ("gradient_of_a_module_after_a_step_asked_by_autograd", mode): "outside of the step gives that of this rank"
        for mode in (*CAPTURED, "ddp")
    },
    ("gradient_of_a_module_after_a_step_asked_by_autograd", "fsdp2"): "which gathers others for each call",
    ("gradients_asked_by_autograd", "fsdp2"): "which gathers others for each call",
    **{("penalty_of_an_inputs_gradient_outside", mode): "create_graph=True" for mode in (*CAPTURED, "fsdp2")},
    **{("state_in_an_attribute", mode): "store detach()" for mode in CAPTURED},
    ("state_in_an_attribute", "stages"): "stores tensors in attributes",
    **{("tensor_that_is_no_parameter", mode): "register it as nn.Parameter" for mode in (*CAPTURED, "stages")},
    **{("parameter_used_again_outside", mode): "use it inside the network" for mode in ("semi_auto", "fsdp2")},
    ("parameter_used_again_outside", "stages"): "must return one scalar loss",
    **{("gradients_of_gradients", mode): "create_graph=True" for mode in MODES},
}
"""(habit, mode) -> what the error says, where the numbers of one process cannot be had"""


FAST_HABITS = (
    "loss_outside",
    "chain",
    "state_through_time",
    "input_of_a_chain",
    "parameter_outside",
    "modules_after_a_step",
)
FAST = [
    *(f"{habit}/{mode}" for habit in FAST_HABITS for mode in ("semi_auto", "hsdp3", "ddp", "fsdp2")),
    *(f"held_in_{kind}/{mode}" for kind in ("subclass", "record") for mode in ("semi_auto", "ddp")),
    "two_calls_then_their_passes_in_reverse/ddp",
    "gradients_asked_by_autograd/ddp",
    "part_is_unused_in_some_steps/ddp",
    "gradients_of_gradients/semi_auto",
    "network_that_trains_after_another/hsdp3",
    "detached_results/semi_auto",
    "loss_inside_and_another_outside/stages",
]


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
@pytest.mark.parametrize(("name", "mode"), slow_but(FAST, itertools.product(HABITS, MODES)))
def test_what_stands_around_steps_has_the_numbers_of_one_process_or_is_refused(name: str, mode: str) -> None:
    def values(place: Place) -> list[Tensor]:
        return [value.detach().clone() for value in HABITS[name](place)]

    alone, place = Place(None, 1), Place(MODES[mode], parts_of(mode))
    if (name, mode) in REFUSED:
        with pytest.raises((MsrunError, RuntimeError)) as error:
            values(place)
        assert REFUSED[name, mode] in str(error.value)
        return
    for one, other in zip(values(place), values(alone), strict=True):
        expected = other if one.shape == other.shape else place.mine(other)
        torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-12, check_dtype=False)
