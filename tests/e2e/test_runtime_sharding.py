"""Strategies as users write them: whatever is cut by hand, with names or numbers, trains like one process.
Searched strategies on real ranks: the losses of one process, the traffic that was priced, limits of memory."""

import copy
import functools
import itertools
import json
import math
import re

import cut_networks
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from local_parts import difference
from on_ranks import on_ranks
from searched_training import NETWORKS, build
from torch import nn
from ways import Way, train_beside_one_process

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import (
    AutoParallel,
    Layout,
    ParallelPlan,
    WithLoss,
    search_degrees,
    shard,
)
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.execute.transfers import traffic

BATCH, INPUTS, HIDDEN, OUTPUTS = 12, 12, 24, 6

TWO_BY_THREE = Layout((2, 3), ("dp", "mp"))
TRANSPOSED = Layout((3, 2), ("mp", "dp"), [0, 3, 1, 4, 2, 5])
"""The same axes as TWO_BY_THREE, the other way round."""


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(INPUTS, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Matrices(nn.Module):
    """Calls functions of tensors instead of modules."""

    def __init__(self, multiply, activate=torch.tanh):
        super().__init__()
        self.first = nn.Parameter(torch.randn(INPUTS, HIDDEN) / 4)
        self.second = nn.Parameter(torch.randn(HIDDEN, OUTPUTS) / 4)
        self.multiply, self.activate = multiply, activate

    def forward(self, x):
        return torch.matmul(self.activate(self.multiply(x, self.first)), self.second)


class Tied(nn.Module):
    """One weight encodes and decodes; the decoder reads it transposed, in another layout than the encoder."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(INPUTS, HIDDEN)
        self.decode = _Decode(self.encode.weight)
        self.head = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x):
        return self.head(self.decode(torch.tanh(self.encode(x))))


class _Decode(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return torch.matmul(x, self.weight)


def layouts(layout):
    """Return a column-cut and a row-cut layer with named axes."""

    def build():
        net = Mlp()
        shard(net.fc1, (layout("dp", "None"), layout("mp", "None"), layout("mp")))
        shard(net.fc2, (layout("dp", "mp"), layout("None", "mp")))
        return net

    return build


def scattered_linear():
    net = Mlp()
    shard(net.fc1, ((1, 1), (6, 1)))
    shard(net.fc2, ((1, 6), (1, 6)), out_strategy=((6, 1),))
    return net


def gathered_linear():
    net = Mlp()
    shard(net.fc1, ((1, 1), (6, 1)), out_strategy=(1, 1))
    return net


def operator_function():
    return Matrices(shard(torch.matmul, ((2, 3), (3, 1)), ((6, 1),)))


def operator_with_layouts():
    cut = shard(torch.matmul, (TWO_BY_THREE("dp", "None"), TWO_BY_THREE("None", "mp")), TWO_BY_THREE("dp", "mp"))
    return Matrices(cut)


def decorated_function():
    @shard(in_strategy=((2, 3),), out_strategy=((1, 3),))
    def activate(x):
        return F.gelu(torch.tanh(x) * 2) + x.mean(0, keepdim=True)

    return Matrices(torch.matmul, activate)


def region():
    net = Mlp()
    net.fc2 = nn.Linear(HIDDEN, OUTPUTS + 1)  # level3 cuts its rows into unequal parts
    plan = {
        "fc1.weight": TWO_BY_THREE("mp", "None"),
        "fc1.bias": TWO_BY_THREE("mp"),
        "self.fc2.weight": TWO_BY_THREE("None", "mp"),
    }
    return shard(net, (TWO_BY_THREE("dp", "None"),), (TWO_BY_THREE("dp", "None"),), plan)


def region_of_tuples():
    plan = {"fc1.weight": (3, 1), "fc1.bias": (3,), "fc2.weight": (1, 3)}
    return shard(Mlp(), ((2, 1),), parameter_plan=plan)


def tied_in_two_layouts():
    net = Tied()
    shard(net.encode, ((2, 1), (3, 1), (3,)))
    shard(net.decode, ((3, 1), (1, 2)))
    return net


def tied_with_two_sums():
    net = Tied()
    shard(net.encode, ((6, 1), (1, 1), (1,)))
    shard(net.decode, ((2, 1), (1, 1)))
    return net


def frozen():
    net = scattered_linear()
    net.get_parameter("fc1.weight").requires_grad_(requires_grad=False)
    return net


def case(name, build, mesh=(3, 2), level=None, parts=(), **settings):
    """One way, of a network that `build` cuts, on a mesh."""
    return Way(name, level, parts, optimizer="sgd", of_network={"build": build, "mesh": mesh}, **settings)


FULL, C2 = {"dataset": "full_batch"}, ("copies", 2)
SCATTERED = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 3}
"""fc2's sum, gathered on the way back; number of labels and loss, and one message of gradients."""
OF_DATA = (TWO_BY_THREE("dp", "None"), TWO_BY_THREE("dp"))
CASES = [
    # fc2's sum over mp, the number of labels and the loss over dp, and one message with all gradients over dp
    case("layouts", layouts(TWO_BY_THREE), (2, 3), calls={"all_reduce": 4}, **FULL),
    case("layouts-of-a-rank-list", layouts(TRANSPOSED), (2, 3), **FULL),
    case("layouts-copies-hsdp", layouts(TWO_BY_THREE), (2, 3), "level1", (C2,), **FULL),
    case("layouts-of-the-data", layouts(TWO_BY_THREE), (2, 3), dataset=OF_DATA),
    case("out-strategy-scatters", scattered_linear, calls=SCATTERED, **FULL),
    case("out-strategy-scatters-float32", scattered_linear, calls=SCATTERED, dtype="float32", **FULL),
    case("out-strategy-gathers", gathered_linear, **FULL),
    case("operator-function", operator_function, **FULL),
    case("operator-function-hsdp-copies", operator_function, level="level1", parts=(C2,)),
    case("operator-function-layouts", operator_with_layouts, (2, 3), **FULL),
    case("decorated-function", decorated_function, **FULL),
    case("region", region, (2, 3), calls={"all_reduce": 4}, **FULL),
    case("region-hsdp-level3", region, (2, 3), "level3", **FULL),
    case("region-of-tuples", region_of_tuples, **FULL),
    case("tied-in-two-layouts", tied_in_two_layouts, **FULL),
    case("tied-in-two-layouts-own-batches-copies", tied_in_two_layouts, parts=(C2,)),
    case("tied-with-two-sums-hsdp-level3", tied_with_two_sums, level="level3", **FULL),
    case("frozen-hsdp-level3", frozen, level="level3"),
    case("strict", Mlp, configure=AutoParallel.strict),
    case("strict-with-out-strategy", scattered_linear, configure=AutoParallel.strict, **FULL),
]


STEPS = 3
on_six = on_ranks(6, dtype="float64")
slow_on_six = on_ranks(6, dtype="float64", slow=True)


def batch(number, rows=BATCH):
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(rows, INPUTS, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, OUTPUTS, (rows,), generator=generator)


PARTS = [numbers for numbers in itertools.product((1, 2, 3, 6), repeat=3) if math.prod(numbers) == 6]


@slow_on_six
@pytest.mark.parametrize(("rows", "inputs", "outputs"), PARTS)
def test_every_layout_of_the_result_of_every_strategy_gives_the_numbers_of_one_process(rows, inputs, outputs):
    x, y = batch(0)[0], torch.randn(BATCH, OUTPUTS, generator=torch.Generator().manual_seed(5))
    serial = nn.Linear(INPUTS, OUTPUTS)
    expected = x.clone().requires_grad_()
    right = F.mse_loss(serial(expected), y)
    right.backward()
    for out in ((1, 1), (1, 2), (1, 6), (6, 1), (2, 3), (3, 2)):
        network = shard(copy.deepcopy(serial), ((rows, inputs), (outputs, inputs)), out_strategy=(out,))
        network.zero_grad()
        given = x.clone().requires_grad_()
        loss = AutoParallel(WithLoss(network, F.mse_loss)).dataset_strategy("full_batch")(given, y)
        loss.backward()
        torch.testing.assert_close(loss.detach(), right.detach(), rtol=1e-10, atol=0)
        torch.testing.assert_close(given.grad, expected.grad, rtol=1e-10, atol=1e-12)
        for mine, other in zip(network.parameters(), serial.parameters(), strict=True):
            assert difference(mine.grad, other.grad, mine) <= 1e-10, out


@slow_on_six
def test_network_that_is_stored_already_runs_with_other_strategies_and_another_batch():
    torch.manual_seed(3)
    network = scattered_linear()
    right = copy.deepcopy(network)
    whole = WithLoss(network, F.cross_entropy)
    AutoParallel(whole).dataset_strategy("full_batch")(*batch(0))
    shard(network.fc1, ((6, 1), (1, 1)))
    shard(network.fc2, ((1, 1), (6, 1)))
    again = AutoParallel(whole).dataset_strategy("full_batch")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (network, right)]
    values = {"data": lambda number: batch(number, 2 * BATCH), "loss_of": F.cross_entropy}
    cut_networks.train(again, right, *optimizers, **values)
    assert any("gather" in text for o in again.plan.operators for text in o.collectives)


BY_NAME = {case.name: case for case in CASES}


@functools.cache
def trained(name):
    """Train in one way, check the law, and return the plan."""
    case = BY_NAME[name]
    found = train_beside_one_process(case, case.of_network["build"], map(batch, range(STEPS)))
    plan = found.step.plan
    assert plan.to_json()["traffic"] == found.moved
    assert case.calls is None or found.moved["calls"] == case.calls
    assert tuple(plan.mesh) == case.of_network["mesh"]
    assert ParallelPlan.from_json(json.dumps(plan.to_json())) == plan
    return plan


@on_six
@pytest.mark.parametrize("case", slow_but(["region-hsdp-level3"], CASES))
def test_losses_and_weights_are_those_of_one_process_and_the_plan_tells_the_traffic(case):
    trained(case.name)


def plan_of(case):
    return dict(json.loads(json.dumps(trained(case).to_json())))


def parameter(case, name):
    (found,) = [p for p in plan_of(case)["parameters"] if p["name"] == name]
    return dict(found)


@slow_on_six
def test_plan_names_the_axes_of_the_users_layout():
    """Those of a rank list cut as those of the matrix that it transposes."""
    for name, axes, shape in (("fc1.weight", ["mp", "None"], [8, 12]), ("fc2.weight", ["None", "mp"], [6, 8])):
        for case in ("layouts", "layouts-of-a-rank-list"):
            found = parameter(case, name)
            assert (found["axes"], found["local_shape"]) == (axes, shape)
    assert parameter("layouts-copies-hsdp", "fc1.weight")["axes"] == ["mp+dp", "None"]
    assert parameter("out-strategy-scatters", "fc1.weight")["axes"] is None


def operators(case, kind):
    return [o for o in plan_of(case)["operators"] if o["operator"] == kind]


@on_six
def test_out_strategy_of_a_product_with_split_sums_is_a_reduce_scatter():
    (product,) = [o for o in operators("out-strategy-scatters", "aten.linear") if o["module_path"] == "fc2"]
    assert product["collectives"] == ["reduce_scatter dim 0 over axes 0,1"]
    (scatter,) = product["traffic"]
    assert scatter["forward"] == {"operation": "reduce_scatter", "bytes": 12 * 6 * 8, "ranks": 6}
    assert scatter["backward"] == {"operation": "all_gather", "bytes": 12 * 6 * 8 // 6, "ranks": 6}
    (wanted,) = operators("out-strategy-scatters", "out_strategy")
    assert (wanted["strategy"], wanted["collectives"]) == ([[6, 1]], [])


@slow_on_six
def test_input_that_comes_in_another_layout_than_it_is_read_is_refused_when_strict():
    network = nn.Sequential(shard(nn.Linear(INPUTS, OUTPUTS), ((1, 6), (1, 6))))
    step = AutoParallel(WithLoss(network, F.cross_entropy)).dataset_strategy("data_parallel").strict()
    with pytest.raises(StrategyError) as error:
        step(*batch(0))
    words = "strict: input input_0 gives (6, 1) and aten.linear in module network.0 reads (1, 6), which moves 960 bytes"
    assert f"{words} to each rank and step; pass it so with dataset_strategy, as (1, 6)" in str(error.value)


@slow_on_six
def test_mesh_that_the_stored_parameters_do_not_have_is_refused():
    net = Mlp()
    step = AutoParallel(WithLoss(net, F.cross_entropy)).dataset_strategy("full_batch")
    step(*batch(0))
    layout = Layout((2, 3), ("dp", "mp"))
    shard(net.fc1, (layout("dp", "None"), layout("None", "None")))
    with pytest.raises(
        StrategyError, match=r"stored on a mesh of \(3, 2\) since an earlier call, which has no such axes"
    ):
        step(*batch(0, 2 * BATCH))


MODES = ("dynamic_programming", "recursive_programming", "sharding_propagation", "auto_parallel", "auto")


def train(step, batch):
    optimizer = torch.optim.Adam(step.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        traffic.reset()
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


DIVISIONS = {
    "fastest": lambda _: True,
    "all": lambda degrees: degrees.stages == 2 and degrees.copies > 1 and degrees.recomputes,
    "optimizer": lambda degrees: degrees.shards_optimizer and degrees.recomputes and degrees.micro_batches > 1,
}
"""Name -> which of the priced divisions of a step are meant."""
often = on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
slow_often = on_ranks(2, pytest.param(4, marks=pytest.mark.slow), slow=True)


@functools.cache
def serial(name):
    """Return the losses of one process: the wrapper draws dropout as the ranks do."""
    network, batch = build(name)
    return train(AutoParallel(network, "stand_alone"), batch)


def assert_right(losses, name):
    assert losses == pytest.approx(serial(name), rel=1e-9)


@often
@pytest.mark.parametrize("mode", slow_but(["dynamic_programming"], MODES))
@pytest.mark.parametrize("name", slow_but(["mlp"], NETWORKS))
def test_searched_strategies_train_as_one_process_with_the_traffic_that_was_priced(ranks, name, mode):
    network, batch = build(name)
    step = AutoParallel(network, mode).dataset_strategy("full_batch")
    losses, plan, counted = train(step, batch), step.plan, dict(traffic.bytes)
    assert_right(losses, name)
    assert plan.traffic is not None and plan.price is not None
    assert counted == plan.traffic.bytes
    if ranks.rank == 0:  # what a halo sends differs between ranks
        assert plan.price.traffic_bytes == plan.traffic.bytes
    assert ranks.gather(plan.strategies()["operators"]) == [plan.strategies()["operators"]] * ranks.size
    text = plan.explain()
    assert "note: searched (" in text
    assert "note: data parallel instead: " in text
    assert plan.mode == {"auto_parallel": "recursive_programming"}.get(mode, mode)


@slow_often
@pytest.mark.parametrize("which", DIVISIONS)
def test_a_step_divided_as_searched_trains_as_one_process(ranks, which):
    """With the fastest priced division of a kind."""
    network, batch = build("transformer")
    found = search_degrees(network, *batch, device="h100", time_limit_s=1000.0)
    degrees = next(each.degrees for each in found.priced if DIVISIONS[which](each.degrees))
    assert_right(train(found.apply(network, degrees), batch), "transformer")
    assert ranks.gather(str(degrees)) == [str(degrees)] * ranks.size


@slow_often
def test_strategies_of_a_file_are_those_that_were_saved(tmp_path):
    path = tmp_path / "strategies.json"
    network, batch = build("mlp")
    first = AutoParallel(network, "dynamic_programming").dataset_strategy("full_batch").search("h100")
    losses = train(first.save_operator_strategy_file(path), batch)
    dist.barrier()
    network, batch = build("mlp")
    second = AutoParallel(network).dataset_strategy("full_batch").load_operator_strategy_file(path)
    assert train(second, batch) == losses
    saved = json.loads(path.read_text())
    assert saved["operators"]
    assert saved == json.loads(json.dumps(first.plan.strategies())) == json.loads(json.dumps(second.plan.strategies()))
    network, batch = build("conv")
    other = AutoParallel(network).dataset_strategy("full_batch").load_operator_strategy_file(path)
    with pytest.raises(StrategyError, match="the network has no operator 'linear_1'"):
        train(other, batch)


@often
def test_an_operator_with_a_strategy_of_the_users_keeps_it(ranks):
    network, batch = build("mlp")
    given = ((1, ranks.size), (1, ranks.size))
    shard(network.get_submodule("network.down"), given)
    step = AutoParallel(network, "dynamic_programming").dataset_strategy("full_batch")
    assert_right(train(step, batch), "mlp")
    down = next(each for each in step.plan.operators if each.module_path == "down")
    assert (down.strategy, down.origin) == ((*given, (1,)), "user")


@slow_often
@pytest.mark.parametrize("limit_mb", [0.45, 0.01])
def test_a_limit_of_memory_is_kept_or_the_missing_bytes_are_told(limit_mb):
    network, batch = build("mlp")
    step = AutoParallel(network, "auto").dataset_strategy("full_batch")
    step.search(PROFILES["h100"], memory_limit_mb=limit_mb)
    try:
        losses = train(step, batch)
    except StrategyError as error:
        assert limit_mb < 0.4
        assert "too much" in str(error) or "cannot be brought under" in str(error)
        return
    assert_right(losses, "mlp")
    assert step.plan.price.memory_bytes <= limit_mb * 2**20


@often
def test_a_rank_that_has_no_time_cuts_the_search_of_all_short(ranks):
    network, batch = build("mlp")
    limit_s = 1e-9 if ranks.rank == ranks.size - 1 else 1000.0
    step = AutoParallel(network, "auto").dataset_strategy("full_batch").search(time_limit_s=limit_s)
    assert_right(train(step, batch), "mlp")
    operators = step.plan.strategies()["operators"]
    assert ranks.gather(operators) == [operators] * ranks.size
    assert any(
        re.search(r"came after 1 of \d+ searches; this is the best of their plans", note) for note in step.plan.notes
    ), step.plan.notes


@often
def test_a_search_does_not_wait_for_a_rank_that_has_nothing_to_search(ranks):
    """The last rank's network cannot be captured while the others wait to compare how far they have searched."""
    network, batch = build("mlp")
    last = ranks.size - 1
    if ranks.rank == last:
        network.get_submodule("network").forward = lambda x: x * float(x.sum())
    with pytest.raises(CaptureError) as error:
        train(AutoParallel(network, "auto").dataset_strategy("full_batch"), batch)
    told = ranks.gather(str(error.value))
    assert all(text.startswith(f"rank {last} cannot run this call: {told[last][:20]}") for text in told[:last])
