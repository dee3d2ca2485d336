"""Searches of strategies: beside every plan that there is, within memory, and never worse for better devices."""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import searched_training
import torch
from asked_cases import every_third_fast, one_fast
from hypothesis import given, settings
from hypothesis import strategies as st
from small_capture import captured, layouts_of
from torch import nn

from msrun import contract
from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.parallel.settings import SearchSettings
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.events import LocalWorks, tell
from msrun.runtime.partition.partition import lower
from msrun.runtime.partition.price import GradientFlow, StepSpec
from msrun.runtime.search.problem import Problem, ProblemBuilder, Variable
from msrun.runtime.search.search import Search, SearchSpec
from msrun.runtime.search.solvers import Answers, solve_dynamic, solve_exactly
from msrun.runtime.sharding.layout import TensorLayout, build_mesh

H100 = PROFILES["h100"]
SLOW_LINKS = replace(H100, name="slow links", in_host=replace(H100.in_host, bytes_per_s=1e9))


class Attention(nn.Module):
    """Three projections of one value, attention, and one more."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (8, 8)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Wide(nn.Module):
    """A large hidden layer: Megatron's pair of cuts moves far less than sums of its gradients."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 4096), nn.Linear(4096, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class MeanSquare(nn.Module):
    def forward(self, y):
        return y.square().mean()


NETWORKS = {
    "mlp": (searched_training.Mlp, (16, 16)),
    "wide": (Wide, (32, 256)),
    "attention": (Attention, (8, 16, 64)),
    "convolutions": (searched_training.Convolutions, (8, 3, 8, 8)),
}


@functools.cache
def graph_of(name):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    return captured(nn.Sequential(make(), MeanSquare()), torch.ones(shape))


def constraints_of(graph, mesh):
    return Constraints(layouts_of(graph, mesh, is_cut=True))


def problem_of(graph, ranks, device=H100):
    mesh = build_mesh(ranks)
    given = constraints_of(graph, mesh)
    flow = GradientFlow.of(graph, tell(lower(graph, decide(graph, mesh, given))))
    return ProblemBuilder(graph, given, device, StepSpec(), LocalWorks(mesh), flow).build()


def plain_step(_, *, shards_all):
    return StepSpec()


def searched(graph, ranks, spec, **more):
    mesh = build_mesh(ranks)
    return Search(graph, mesh, constraints_of(graph, mesh), spec, plain_step, **more).run()


def cheapest_of_all(problem):
    """Return the cost of the best of all plans, every one of them looked at."""
    sizes = [len(variable.splits) for variable in problem.variables]
    assert math.prod(sizes) < 5_000_000
    total = np.full(sizes, problem.constant)
    for index, variable in enumerate(problem.variables):
        total += variable.seconds.reshape([-1 if i == index else 1 for i in range(len(sizes))])
    for (i, j), costs in problem.edges.items():
        total += costs.reshape([sizes[k] if k in (i, j) else 1 for k in range(len(sizes))])
    return float(total.min())


CASES = [(name, ranks) for name in NETWORKS for ranks in (2, 4, 8)]


@pytest.mark.parametrize("device", one_fast(H100, SLOW_LINKS), ids=lambda device: device.name)
@pytest.mark.parametrize(("name", "ranks"), every_third_fast(CASES))
def test_both_searches_find_the_best_of_all_plans(name, ranks, device):
    problem = problem_of(graph_of(name), ranks, device)
    best = cheapest_of_all(problem)
    assert problem.seconds(solve_dynamic(problem)) == pytest.approx(best, rel=1e-12)
    assert problem.seconds(solve_exactly(problem)) == pytest.approx(best, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_dynamic_programming_solves_any_graph_of_choices(data):
    count = data.draw(st.integers(1, 7))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sizes = [data.draw(st.integers(1, 4)) for _ in range(count)]
    variables = [
        Variable([str(i)], [{}] * size, generator.random(size), np.zeros(size)) for i, size in enumerate(sizes)
    ]
    problem = Problem(variables)
    for i, j in data.draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)))):
        if i != j:
            problem.add_edge(i, j, generator.random((sizes[i], sizes[j])))
    best = cheapest_of_all(problem)
    found = solve_dynamic(problem)
    assert problem.seconds(found) == pytest.approx(best)
    narrow = solve_dynamic(problem, most_entries=8)
    assert problem.seconds(narrow) >= best - 1e-12


def _stack(layers):
    """A chain of equal layers, each of which reads its input three times."""
    generator = np.random.default_rng(5)
    own, around, along = generator.random(6), generator.random((6, 6)), generator.random((6, 6))
    problem = Problem([Variable([str(i)], [{}] * 6, own.copy(), np.zeros(6)) for i in range(4 * layers + 1)])
    for first in range(0, 4 * layers, 4):
        for second in (first + 1, first + 2, first + 4):
            problem.add_edge(first, second, around)
        for pair in ((1, 3), (2, 3), (3, 4)):
            problem.add_edge(first + pair[0], first + pair[1], along)
    return problem


def test_equal_layers_are_eliminated_once():
    def made(layers):
        answers = Answers()
        choice = solve_dynamic(_stack(layers), answers=answers)
        return len(choice), answers.count

    (few, at_few), (many, at_many) = made(8), made(64)
    assert many > 7 * few
    assert at_many < 5 * at_few


def test_a_wide_pair_is_cut_by_columns_and_rows_and_takes_less_than_data_parallel():
    found = searched(graph_of("wide"), 8, SearchSpec("dynamic_programming", SLOW_LINKS))
    up, down = found.plan.splits["linear"], found.plan.splits["linear_1"]
    assert set(up) == {"n"} and set(down) == {"k"} and up["n"] == down["k"]
    assert found.plan.price.seconds < found.data_parallel.seconds / 2


@pytest.mark.parametrize(
    ("device", "name"),
    one_fast(*itertools.product((SLOW_LINKS, H100), ("wide", "mlp"))),
    ids=lambda value: getattr(value, "name", value),
)
def test_memory_is_never_exceeded_and_more_of_it_never_takes_longer(device, name):
    graph, free = graph_of(name), SearchSpec("dynamic_programming", device)
    need = searched(graph, 4, free).plan.price.memory_bytes
    before = math.inf
    refused = 0
    for limit in (need // 50, need // 3, int(need * 0.8), 2 * need):
        try:
            found = searched(graph, 4, replace(free, memory_bytes=limit))
        except StrategyError as error:
            assert "no strategy fits into" in str(error) and "the largest parameters are" in str(error)
            assert before == math.inf
            refused += 1
            continue
        if found.activation_limit_bytes is None:
            assert found.plan.price.memory_bytes <= limit
            assert found.plan.price.seconds <= before
            before = found.plan.price.seconds
    assert refused and before < math.inf


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wide", "mlp"])
def test_the_plan_of_a_search_never_takes_longer_on_a_device_with_more_bandwidth(name):
    def seconds(device):
        return searched(graph_of(name), 4, SearchSpec("dynamic_programming", device)).plan.price.seconds

    (less, more), base = (0.01, 10.0), seconds(H100)
    links = {f: replace(H100.in_host, bytes_per_s=H100.in_host.bytes_per_s * f) for f in (less, more)}
    by_link = {f: seconds(replace(H100, in_host=links[f])) for f in links}
    by_memory = {f: seconds(replace(H100, memory_bandwidth=H100.memory_bandwidth * f)) for f in links}
    for found in ([by[less], base, by[more]] for by in (by_link, by_memory)):
        assert found == sorted(found, reverse=True)
        assert found[0] > found[-1]


def test_a_device_that_waits_long_for_every_message_gets_a_plan_with_fewer_of_them():
    graph = graph_of("attention")

    def messages(wait_s):
        device = replace(SLOW_LINKS, wait_s=wait_s)
        found = searched(graph, 4, SearchSpec("dynamic_programming", device)).plan.price
        own = sum(len(each.forward_messages) + len(each.backward_messages) for each in found.operators)
        return own + len({(sent.message.operation, sent.axes) for sent in found.sums})

    assert messages(1.0) < messages(0.0)


def test_optimizer_parallel_is_turned_on_when_cutting_operators_is_not_enough():
    """A table that every operator reads whole: only its storage can be cut."""
    graph, mesh = graph_of("wide"), build_mesh(4)
    given = constraints_of(graph, mesh)
    whole = {name: TensorLayout.replicated(len(shape)) for name, shape in _parameter_shapes(graph).items()}
    given = replace(given, stored=whole)

    def step_of(_, *, shards_all):
        weights = {name: mesh.axes for name, shape in _parameter_shapes(graph).items() if shape[0] % 4 == 0}
        return StepSpec(shard_axes=weights if shards_all else {}, optimizer_states=8)

    spec = SearchSpec("dynamic_programming", H100)
    free = Search(graph, mesh, given, spec, step_of).run()
    assert not free.shards_optimizer
    found = Search(graph, mesh, given, replace(spec, memory_bytes=free.plan.price.memory_bytes // 2), step_of).run()
    assert found.shards_optimizer
    assert found.plan.price.memory_bytes <= free.plan.price.memory_bytes // 2
    assert any("hsdp level1" in note for note in found.notes)


@pytest.mark.parametrize(("name", "ranks"), one_fast(("wide", 8), ("convolutions", 4), ("mlp", 8), ("attention", 4)))
def test_what_must_be_recomputed_counts_when_nothing_fits(name, ranks):
    graph, mesh = graph_of(name), build_mesh(ranks)
    given, free = constraints_of(graph, mesh), SearchSpec("dynamic_programming", SLOW_LINKS)

    prices = [plan.price for _, plans in Search(graph, mesh, given, free, plain_step).plans() for plan in plans]
    limit = min(price.memory_bytes for price in prices) - 1
    found = Search(graph, mesh, given, replace(free, memory_bytes=limit), plain_step).run()
    assert found.activation_limit_bytes is not None

    def overflow(price):
        room = limit - (price.memory_bytes - price.activation_bytes)
        return price.activation_bytes / room if room > 0 else math.inf

    own = found.plan.price
    better = [each for each in prices if each.seconds < own.seconds and overflow(each) <= overflow(own)]
    assert better == []


def _parameter_shapes(graph):
    nodes = [node for node in graph.graph.nodes if node.name in graph.parameters]
    return {graph.parameters[node.name]: tuple(node.meta["val"].shape) for node in nodes}


@pytest.mark.slow
def test_a_search_ends_at_its_limit_of_time_with_the_best_plan_so_far():
    graph, free, searches = graph_of("wide"), SearchSpec("dynamic_programming", SLOW_LINKS), 5
    need = searched(graph, 4, free).plan.price.memory_bytes

    def within(time_limit_s, memory_bytes=2 * need, fewest=searches):
        spec = replace(free, time_limit_s=time_limit_s, memory_bytes=memory_bytes)
        return searched(graph, 4, spec, clock=itertools.count(1.0).__next__, fewest=lambda n: min(n, fewest))

    little = int(0.6 * need)
    done = within(1000.0, little)
    assert not done.cut_short and done.plan.price.memory_bytes <= little
    for count, limit_s in ((1, 0.5), (2, 1.5)):
        found = within(limit_s)
        words = f"the time limit of {limit_s} s came after {count} of {searches} searches"
        assert found.cut_short == words
        assert f"searched: {words}; this is the best of their plans" in found.notes
        of_other_ranks = within(1000.0, fewest=count)
        assert of_other_ranks.plan.splits == found.plan.splits
        assert f"came after {count} of {searches} searches" in of_other_ranks.cut_short
    with pytest.raises(StrategyError, match=r"too much .* \(the time limit of 0.5 s came after 1 of"):
        within(0.5, little)


def test_a_search_is_for_the_device_of_this_process_or_that_a_dry_run_stands_for(monkeypatch):
    def device():
        return SearchSettings("dynamic_programming").spec().device.name

    assert device() == "cpu"
    with monkeypatch.context() as patch:
        patch.setattr(world, "device", lambda: torch.device("cuda", 0))
        for name, profile in {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "Tesla T4": "a100"}.items():
            patch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
            assert device() == profile
    monkeypatch.setenv(contract.MSRUN_SIM_LEVEL, "1")
    monkeypatch.setenv(contract.MSRUN_SIM_DEVICE, "h100")
    assert device() == "h100"
