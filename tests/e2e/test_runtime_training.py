"""Networks, taken as users write them, train on two ranks as they do in one process."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from local_parts import difference, local
from on_ranks import on_ranks
from torch import Tensor, nn

from msrun.runtime import AutoParallel, GradAccumulation, MicroBatchInterleaved, Pipeline, WithLoss, recompute, shard

STEPS = 3
ROWS = 16


class Calls(nn.Module):
    """A network whose forward is a function of itself and its inputs."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._call = forward

    def forward(self, *inputs):
        return self._call(self, *inputs)


@dataclass(frozen=True)
class TrainingCase:
    """A network, its batch, and how it is parallel."""

    name: str
    network: Callable[[], nn.Module]
    """Without its loss; what it returns is compared with targets of its shape."""
    settings: Callable[[AutoParallel], AutoParallel] = lambda step: step
    strategy: Callable[[nn.Module], object] | None = None
    wrap: Callable[[nn.Module], nn.Module] = lambda network: network
    with_loss: bool = True
    """False: the network returns its results, the loss first."""
    inputs: Callable[[torch.Generator], tuple[Tensor, ...]] = lambda generator: (
        torch.randn(ROWS, 8, generator=generator),
    )
    precision: Literal["float64", "bfloat16"] = "float64"
    """bfloat16: torch's mixed precision."""

    @property
    def tolerance(self):
        return 1e-10 if self.precision == "float64" else 5e-2


def level3(step):
    return step.hsdp(threshold=0, optimizer_level="level3")


def level(number):
    return lambda step: step.hsdp(threshold=0, optimizer_level=f"level{number}")


def bfloat16(settings):
    return lambda step: settings(step).mixed_precision("bfloat16")


def stages(count, scheduler="1f1b"):
    return lambda step: step.pipeline(stages=count, scheduler=scheduler)


def level3_in_stages(step):
    return stages(2)(level3(step))


def as_it_is(step):
    return step


def in_pipeline(network):
    return Pipeline(network, 2)


# -- memory of gathered weights ----------------------------------------------------------------------------------------


def halves_of_a_weight():
    def forward(self, x):
        a, b = self.w.chunk(2)
        return self.last((x @ a).tanh() @ b)

    return Calls(forward, w=nn.Parameter(torch.randn(16, 8) / 3), last=nn.Linear(8, 4))


def weight_read_as_it_is_too():
    return Calls(lambda self, x: self.a(x).tanh() @ self.a.weight + self.a.bias, a=nn.Linear(8, 8))


def late_view_of_an_early_weight():
    def forward(self, x):
        flipped = self.first.weight.t()
        for layer in self.layers:
            x = layer(x).tanh()
        return self.first(x) @ flipped.reshape(2, 4, 8).flatten(0, 1)

    return Calls(forward, first=nn.Linear(8, 8), layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))


def view_that_leaves_its_module():
    block = Calls(lambda self, x: (self.a(x).tanh(), self.a.weight.t()), a=nn.Linear(8, 8))

    def forward(self, x):
        hidden, turned = self.block(x)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden @ turned

    return Calls(forward, block=block, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))


def halves_in_a_block():
    def forward(self, x):
        one, other = self.w.chunk(2)
        return F.linear(F.linear(x, one).tanh(), other)

    block = Calls(forward, w=nn.Parameter(torch.randn(16, 8) / 3))
    return Calls(lambda self, x: self.last(self.block(x).tanh()), block=block, last=nn.Linear(8, 4))


def recompute_block(network):
    recompute(network.block, parallel_optimizer_comm_recompute=True)


def weights_as_results():
    def forward(self, x, y):
        loss = F.mse_loss(self.b(self.a(x).tanh()), y) + self.a.weight[0, 0]
        return loss, self.a.weight.t(), self.a.weight, self.a.bias.detach(), self.aside

    return Calls(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 4), aside=nn.Parameter(torch.ones(4)))


def average_of_weights():
    def forward(self, x):
        found = self.b(self.a(x).tanh()) + 0.1 * self.seen.sum()
        self.seen.copy_(self.a.weight.detach().t())
        self.bias.copy_(self.a.bias.detach())
        return found

    network = Calls(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    network.register_buffer("seen", torch.zeros(8, 8))
    network.register_buffer("bias", torch.zeros(8))
    return network


def tied_head():
    def forward(self, x):
        hidden = self.mix(self.table(x)).tanh()
        return F.linear(hidden, self.table.weight)

    return Calls(forward, table=nn.Embedding(12, 8), mix=nn.Linear(8, 8))


def cut_table(strategy):
    return lambda network: shard(network.table, strategy)


def numbers(generator):
    return (torch.randint(0, 12, (ROWS, 3), generator=generator),)


def images(generator):
    return (torch.randn(ROWS, 4, 8, 8, generator=generator),)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(512, 4),
    )


# -- several results ---------------------------------------------------------------------------------------------------


def fused_projections():
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))

    def block():
        return Calls(forward, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))

    return nn.Sequential(*(block() for _ in range(2)))


def sentences(generator):
    return (torch.randn(ROWS, 3, 8, generator=generator),)


def parts_read_far_apart():
    def forward(self, x):
        early, late = self.a(x).split(8, dim=-1)
        one, two = self.b(early).tanh().unbind(0)[:2]
        mean = self.c(early) + one + two
        return self.d(mean).tanh() + late

    return Calls(forward, a=nn.Linear(8, 16), b=nn.Linear(8, 8), c=nn.Linear(8, 8), d=nn.Linear(8, 8))


def recurrent(kind):
    return lambda: Calls(
        lambda self, x: self.b(self.rnn(self.a(x))[0]),
        a=nn.Linear(8, 8), rnn=kind(8, 8, batch_first=True), b=nn.Linear(8, 4),
    )  # fmt: skip


# -- parameters that the loss does not read ----------------------------------------------------------------------------


def loss_beside(make, **parts):
    return lambda: Calls(make, fc=nn.Linear(8, 4), **{name: part() for name, part in parts.items()})


def aux_result(self, x, y):
    return F.mse_loss(self.fc(x), y), self.aux(x)


def aux_without_gradient(self, x, y):
    with torch.no_grad():
        shift = self.aux(x).mean(-1, keepdim=True)
    return F.mse_loss(self.fc(x) + shift, y)


def aux_detached(self, x, y):
    seen = self.aux(x)
    hidden = self.body(x + seen.detach()).tanh()
    return F.mse_loss(self.fc(hidden), y)


def tied_beside_the_loss():
    def forward(self, x, y):
        x = self.a(x).tanh()
        return F.mse_loss(self.fc(x), y), F.linear(self.dead(x), self.a.weight)

    return Calls(forward, a=nn.Linear(8, 8), dead=nn.Linear(8, 8), fc=nn.Linear(8, 4))


def unread_parameters():
    networks = {
        "aux-result": loss_beside(aux_result, aux=lambda: nn.Linear(8, 3)),
        "aux-without-gradient": loss_beside(aux_without_gradient, aux=lambda: nn.Linear(8, 3)),
        "aux-detached": loss_beside(aux_detached, aux=lambda: nn.Linear(8, 8), body=lambda: nn.Linear(8, 8)),
        "tied-beside-the-loss": tied_beside_the_loss,
    }
    for name, network in networks.items():
        case = TrainingCase(f"unread-{name}", network, with_loss=False, inputs=with_target)
        for how, settings in (("dp", as_it_is), ("level1", level(1)), ("level3", level3)):
            yield replace(case, name=f"{case.name}-{how}", settings=settings)
            yield replace(case, name=f"{case.name}-accumulated-{how}", settings=settings, wrap=_accumulated)
        for how in ("1f1b", "zero_bubble"):
            yield replace(case, name=f"{case.name}-{how}", settings=stages(2, how), wrap=in_pipeline)


def _accumulated(network):
    return GradAccumulation(network, 2)


def with_target(generator):
    return torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 4, generator=generator)


# -- one weight twice --------------------------------------------------------------------------------------------------


def one_weight_in_two_modules():
    network = Calls(
        lambda self, x: self.b(self.a(x).tanh()) @ self.b.weight, a=nn.Linear(8, 8), b=nn.Linear(8, 8, bias=False)
    )
    network.b.weight = network.a.weight
    return network


def one_weight_in_a_layer_and_a_norm():
    network = Calls(
        lambda self, x: self.b(self.norm(self.a(x))), a=nn.Linear(8, 8), norm=nn.LayerNorm(8), b=nn.Linear(8, 4)
    )
    network.norm.bias = network.a.bias
    return network


def gathered_weights():
    late = TrainingCase("level3-late-view", late_view_of_an_early_weight, level3)
    yield late
    yield replace(late, name=f"{late.name}-accumulated", wrap=_accumulated)
    yield replace(late, name=f"{late.name}-copies", wrap=lambda network: MicroBatchInterleaved(network, 2))
    yield TrainingCase("level3-halves-of-a-weight", halves_of_a_weight, level3)
    twice = TrainingCase("level3-weight-read-as-it-is", weight_read_as_it_is_too, level3)
    yield twice
    yield replace(twice, name=f"{twice.name}-16-bits", settings=bfloat16(level3), precision="bfloat16")
    yield TrainingCase("recomputed-view-that-leaves", view_that_leaves_its_module, level(1), recompute_block)
    yield TrainingCase("level3-recomputed-view-that-leaves", view_that_leaves_its_module, level3, recompute_block)
    yield TrainingCase("level3-weights-as-results", weights_as_results, level3, with_loss=False, inputs=with_target)
    yield TrainingCase("level3-buffers-from-weights", average_of_weights, level3)
    for name, cut in (("rows", ((2, 1), (1, 1))), ("columns", ((1, 2), (1, 1)))):
        yield TrainingCase(f"level3-tied-head-{name}", tied_head, level3, cut_table(cut), inputs=numbers)
    pipeline = TrainingCase("level3-pipeline", late_view_of_an_early_weight, level3_in_stages, wrap=in_pipeline)
    yield pipeline
    yield replace(pipeline, name=f"{pipeline.name}-of-convolutions", network=convolutions, inputs=images)


def several_results():
    for name, network in (("fused-projections", fused_projections), ("parts-read-far-apart", parts_read_far_apart)):
        for how in ("1f1b", "zero_bubble", "zbv"):
            yield TrainingCase(f"border-{name}-{how}", network, stages(2, how), wrap=in_pipeline, inputs=sentences)
    for kind in (nn.LSTM, nn.GRU):
        yield TrainingCase(f"border-{kind.__name__}", recurrent(kind), stages(2), wrap=in_pipeline, inputs=sentences)
        yield TrainingCase(f"whole-{kind.__name__}", recurrent(kind), inputs=sentences)


def tied_in_16_bits():
    networks = (
        ("one-weight-in-two-modules", one_weight_in_two_modules),
        ("one-weight-in-a-layer-and-a-norm", one_weight_in_a_layer_and_a_norm),
    )
    halves = TrainingCase("recomputed-halves-of-a-weight", halves_in_a_block, as_it_is, recompute_block)
    yield replace(halves, name=f"{halves.name}-16-bits", settings=bfloat16(as_it_is), precision="bfloat16")
    for name, network in networks:
        for how, settings in (("dp", as_it_is), ("level3", level3)):
            yield TrainingCase(f"{name}-16-bits-{how}", network, bfloat16(settings), precision="bfloat16")


CASES = [*gathered_weights(), *several_results(), *unread_parameters(), *tied_in_16_bits()]


def built(case):
    """Return the network with its loss and wrappers."""
    torch.manual_seed(0)
    network = case.network()
    return case.wrap(WithLoss(network, nn.MSELoss()) if case.with_loss else network)


def batches(case):
    """Return the whole batch of every step."""
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs = case.inputs(generator)
        if case.with_loss:
            torch.manual_seed(0)
            with torch.no_grad():
                shape = case.network().eval()(*inputs).shape
            inputs = (*inputs, torch.randn(shape, generator=generator))
        found.append(inputs)
    return found


def train(step, network, given):
    """Yield the loss of every step, with the gradients in place."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    for batch in given:
        optimizer.zero_grad()
        result = step(*batch)
        loss = result if isinstance(result, Tensor) else result[0]
        loss.backward()
        yield float(loss.detach())
        optimizer.step()


FAST = ["unread-tied-beside-the-loss-accumulated-level3"]


@on_ranks(2, dtype="float64")
@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_losses_gradients_weights_and_buffers_are_those_of_one_process(ranks, case):
    torch.set_default_dtype(torch.float32 if case.precision == "bfloat16" else torch.float64)
    given = batches(case)
    serial, network = built(case), built(case)
    if case.strategy is not None:
        inner = network
        while hasattr(inner, "network"):
            inner = inner.network
        case.strategy(inner)
    step = case.settings(AutoParallel(network))
    is_whole = step.settings.pipeline.stages > 1
    mine = [tuple(value if is_whole else ranks.part(value) for value in batch) for batch in given]
    losses, rights = train(step, network, mine), train(serial, serial, given)
    named, wrong = dict(serial.named_parameters()), []
    held = dict(network.named_parameters())
    for number in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16) if case.precision == "bfloat16" else contextlib.nullcontext():
            right = next(rights)
        loss = next(losses)
        if abs(loss - right) > case.tolerance * max(1, abs(right)):
            wrong.append(f"step {number}: loss {loss} for {right}")
        for name, parameter in held.items():
            if not local(parameter).numel():
                continue  # in another stage
            if (parameter.grad is None) != (named[name].grad is None):
                wrong.append(f"step {number}: {name}.grad is {'' if parameter.grad is None else 'not '}None")
            elif (
                parameter.grad is not None and difference(parameter.grad, named[name].grad, parameter) > case.tolerance
            ):
                wrong.append(f"step {number}: {name}.grad differs")
    assert [*losses, *rights] == []  # which takes the last step
    wrong += [f"{name} differs" for name, each in held.items() if difference(each, named[name]) > case.tolerance]
    for name, value in serial.named_buffers():
        torch.testing.assert_close(network.get_buffer(name), value, rtol=case.tolerance, atol=case.tolerance)
    assert wrong == [], "\n".join(wrong)
