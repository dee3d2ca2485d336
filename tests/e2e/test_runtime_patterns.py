"""The many ways in which people call a parallel network, each on four ranks; its name must hold."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from on_ranks import on_ranks
from torch import nn

from msrun.errors import CaptureError, StrategyError, WorldError
from msrun.runtime import (
    AutoParallel,
    MicroBatchInterleaved,
    Pipeline,
    WithLoss,
    create_group,
    destroy_group,
    get_group_rank_from_world_rank,
    get_group_size,
    get_process_group_ranks,
    get_rank,
    get_world_rank_from_group_rank,
    no_init_parameters,
    process_group,
    value_and_grad,
)
from msrun.runtime.execute.transfers import start_backward, start_forward
from msrun.runtime.parallel.compilation import compilation
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import build_mesh

WORLD_SIZE = 4
on_four = on_ranks(WORLD_SIZE, dtype="float64")
slow_on_four = on_ranks(WORLD_SIZE, dtype="float64", slow=True)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(16, 8)
        self.layer2 = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer2(torch.relu(self.layer1(x)))


class Calls(nn.Module):
    """A network whose forward is a function of itself and its inputs."""

    def __init__(self, forward, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self._call = forward

    def forward(self, *inputs):
        return self._call(self, *inputs)


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make()


def batch(rows=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 16, generator=generator), torch.randn(rows, 4, generator=generator)


def mine(tensor):
    return tensor.chunk(WORLD_SIZE)[get_rank()]


def everywhere(value):
    found = [None] * WORLD_SIZE
    dist.all_gather_object(found, value)
    return found


def assert_close(left, right):
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def refused(kind, call, *args):
    with pytest.raises(kind) as error:
        call(*args)
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])


def both():
    """Return a network of one process, the same one for all ranks, and its AutoParallel with every weight cut."""
    serial = seeded(Mlp)
    network = copy.deepcopy(serial)
    return serial, network, AutoParallel(WithLoss(network, F.mse_loss)).hsdp(threshold=0)


# -- ranks that do not agree -------------------------------------------------------------------------------------------


def _deferred(make):
    with no_init_parameters():
        return make()


DISAGREEING = {
    "deferred, with other seeds": (lambda: seeded(lambda: _deferred(Mlp), 10 + get_rank()), "different random seeds"),
    "deferred, with seeds inside": (lambda: _deferred(lambda: seeded(Mlp, 10 + get_rank())), ""),
    "eager": (lambda: seeded(Mlp, 10 + get_rank()), "differed between ranks"),
}


@slow_on_four
@pytest.mark.parametrize("how", DISAGREEING)
def test_ranks_whose_weights_differ_train_rank_0s(how):
    make, note = DISAGREEING[how]
    step, serial = AutoParallel(WithLoss(make(), F.mse_loss)).hsdp(threshold=0), seeded(Mlp, seed=10)
    x, y = batch()
    assert_close(step(mine(x), mine(y)).detach(), F.mse_loss(serial(x), y).detach())
    assert any(note in each for each in step.plan.notes) or not note


@slow_on_four
def test_ranks_with_different_buffers_use_rank_0s():
    network = seeded(lambda: Calls(lambda s, x: (s.layer(x) * s.scale).mean(), layer=nn.Linear(16, 4)))
    network.register_buffer("scale", torch.full((4,), 1.0 + get_rank()))
    serial = seeded(lambda: nn.Linear(16, 4))
    x, _ = batch()
    losses = everywhere(float(AutoParallel(network)(mine(x)).detach()))
    assert_close(losses[0], float(serial(x).mean().detach()))
    assert losses == [losses[0]] * WORLD_SIZE


@slow_on_four
def test_error_on_one_rank_is_told_to_the_others():
    network = seeded(Mlp)
    step = AutoParallel(MicroBatchInterleaved(WithLoss(network, F.mse_loss), 2))
    x, y = batch(rows=3 if get_rank() == 2 else 4)
    kind = StrategyError if get_rank() == 2 else CaptureError
    text = refused(kind, step, x, y)
    assert "a batch of 3 rows on this rank cannot be cut into 2 equal copies" in text
    assert get_rank() == 2 or text.startswith("rank 2 cannot run this call")


@slow_on_four
def test_failure_after_the_programs_were_compared_is_told_to_the_others():
    def fail(*_args, **_named):
        raise KeyError("planted")

    wrappers = [
        lambda network: AutoParallel(network).hsdp(threshold=0),
        lambda network: AutoParallel(Pipeline(network, 2)).pipeline(stages=2),
    ]
    for wrap in wrappers:
        step = wrap(WithLoss(seeded(Mlp), F.mse_loss))
        x, y = batch()
        with pytest.MonkeyPatch.context() as patch:
            if get_rank() == 1:
                patch.setattr(compilation, "build_compiled_call", fail)
            text = refused(KeyError if get_rank() == 1 else CaptureError, step, mine(x), mine(y))
        assert get_rank() == 1 or text == "rank 1 cannot run this call: KeyError: 'planted'"


# -- one network, several calls and functions of it --------------------------------------------------------------------


@slow_on_four
def test_step_function_that_differentiates_nothing_itself_is_refused():
    network = seeded(Mlp)

    def train(x, y):
        loss = F.mse_loss(network(x), y)
        loss.backward()
        return loss

    text = refused(CaptureError, AutoParallel(train), *map(mine, batch()))
    assert "value_and_grad" in text


@slow_on_four
def test_settings_after_the_first_call_and_more_shards_than_ranks_are_refused():
    _, _, step = both()
    step(*map(mine, batch()))
    assert "set it before" in refused(StrategyError, step.hsdp)
    assert "set it before" in refused(StrategyError, step.dataset_strategy, "full_batch")
    step = AutoParallel(WithLoss(Mlp(), F.mse_loss)).hsdp(shard_size=8)
    assert "only 4 ranks" in refused(StrategyError, step, *map(mine, batch()))


# -- collectives of a graph --------------------------------------------------------------------------------------------


@slow_on_four
def test_collectives_of_a_graph_take_values_of_any_strides():
    mesh = build_mesh(WORLD_SIZE)
    generator = torch.Generator().manual_seed(get_rank())
    value = torch.randn(4, 4, 8, 4, generator=generator)
    orders = itertools.permutations(range(4))
    strided = [value.permute(order).contiguous().permute([order.index(dim) for dim in range(4)]) for order in orders]
    strided += [value[:, :1].expand(4, 4, 8, 4), value.repeat(1, 1, 1, 2)[..., ::2]]
    kinds = ["all_reduce", "enter", "gather", "gather_enter", "slice", "reduce_scatter"]
    collectives = [Collective(kind, mesh.axes, dim) for kind in kinds for dim in range(4)]
    collectives += [Collective("exchange", mesh.axes, dim, other) for dim, other in itertools.permutations(range(4), 2)]
    for collective, given in itertools.product(collectives, strided):
        for start in (start_forward, start_backward):
            strided_one, plain_one = (start(collective, x, mesh, get_rank()) for x in (given, given.contiguous()))
            assert_close(strided_one.wait(), plain_one.wait())


# -- value_and_grad, and an optimizer that takes its gradients ---------------------------------------------------------


@on_four
def test_gradients_of_arguments_are_those_of_this_ranks_part():
    serial = seeded(Mlp)
    network = copy.deepcopy(serial)
    gradients_of = value_and_grad(lambda x, y: F.mse_loss(network(x), y), (0, 1), list(network.parameters()))
    step = AutoParallel(lambda x, y: gradients_of(x, y))
    x, y = batch()
    loss, (inputs, weights) = step(mine(x), mine(y))
    x.requires_grad_()
    y.requires_grad_()
    right = F.mse_loss(serial(x), y)
    right.backward()
    assert_close(loss, right.detach())
    assert_close(inputs[0], mine(x.grad))
    assert_close(inputs[1], mine(y.grad))
    assert len(weights) == 4
    assert_close(weights[0], serial.layer1.weight.grad)


@slow_on_four
def test_gradient_of_a_number_is_whole_on_every_rank():
    serial = seeded(Mlp)
    network = copy.deepcopy(serial)
    gradients_of = value_and_grad(lambda x, t: (network(x) * t).pow(2).mean(), 1)
    x, _ = batch()
    number = torch.tensor(1.5)
    _, gradient = AutoParallel(lambda x, t: gradients_of(x, t))(mine(x), number)
    number.requires_grad_()
    (serial(x) * number).pow(2).mean().backward()
    assert_close(gradient, number.grad)


# -- groups with a name ------------------------------------------------------------------------------------------------


@on_four
def test_named_group_keeps_the_order_of_its_ranks():
    create_group("odd order", [3, 1, 2])
    assert get_process_group_ranks("odd order") == [3, 1, 2]
    assert get_world_rank_from_group_rank("odd order", 0) == 3
    assert get_group_rank_from_world_rank(1, "odd order") == 1
    assert get_group_size("odd order") == 3
    if get_rank() == 0:
        assert "not in group" in refused(WorldError, get_rank, "odd order")
    else:
        assert dist.get_rank(process_group("odd order")) == get_rank("odd order")
        parts = [torch.empty(1) for _ in range(3)]
        dist.all_gather(parts, torch.tensor([float(get_rank())]), group=process_group("odd order"))
        assert [int(part) for part in parts] == [3, 1, 2]
    assert "exists already" in refused(WorldError, create_group, "odd order", [0, 1])
    assert "two or more different ranks" in refused(WorldError, create_group, "one", [1])
    assert "two or more different ranks" in refused(WorldError, create_group, "twice", [1, 1])
    assert "ranks are 0 to 3" in refused(WorldError, create_group, "outside", [1, 4])
    destroy_group("odd order")
    assert "no group" in refused(WorldError, get_process_group_ranks, "odd order")


# -- orders of forward and backward ------------------------------------------------------------------------------------


@slow_on_four
def test_pass_that_kept_the_graph_sees_a_parameter_that_was_written_since():
    _, network, step = both()
    loss = step(*map(mine, batch()))
    loss.backward(retain_graph=True)
    with torch.no_grad():
        next(network.parameters()).mul_(2)
    assert "written between two backward passes" in refused(CaptureError, loss.backward)


# -- which parameters take part ----------------------------------------------------------------------------------------


@slow_on_four
def test_plan_says_which_parameter_the_loss_does_not_use():
    network = Calls(lambda s, x, y: F.mse_loss(s.used(x), y), used=nn.Linear(16, 4), unused=nn.Linear(8, 8))
    step = AutoParallel(network).hsdp(threshold=0)
    step(*map(mine, batch()))
    (found,) = [parameter for parameter in step.plan.parameters if parameter.name == "unused.weight"]
    assert found.group == -1
    line = next(line for line in step.plan.explain().splitlines() if "unused.weight" in line)
    assert "unused" in line.replace("unused.weight", "")
