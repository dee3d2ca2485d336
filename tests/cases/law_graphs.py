"""Which cases the strategy laws run in a world, and their graphs."""

import functools
import importlib
import itertools
from operator import getitem
from pathlib import Path

import torch
from operator_cases import OperatorNetwork
from small_capture import captured
from torch import nn

from msrun.runtime.sharding.operators.registry import REPLICATED, find_rule
from msrun.runtime.sharding.operators.rule import STRATEGY, operator_call
from msrun.runtime.sharding.strategies import OperatorStrategy

MODULES = tuple(sorted(path.stem for path in Path(__file__).parent.glob("operator_cases*.py")))
"""Every table of operators beside this file."""
WORLDS = (2, 4, 8)


def key_of(world_size, module, case):
    return f"{world_size}/{module}/{case.name}"


def types_of(world_size, module, case):
    """Return in which types a case runs in a world; none: it does not run there.

    In float64 every case runs in the world of its module's EVERY_CASE_IN (4 unless it says so), and those with
    `on_eight` in the next larger one too. Two ranks compute in other types: in what the module says in MORE_TYPES, or
    those with `on_eight` in float32.
    """
    cases = importlib.import_module(module)
    world_of_all = getattr(cases, "EVERY_CASE_IN", 4)
    found = []
    if world_size == world_of_all or (case.on_eight and world_size == 2 * world_of_all):
        found.append(torch.float64)
    if world_size == 2:
        others = getattr(cases, "MORE_TYPES", {case.name: ("float32",) if case.on_eight else ()}).get(case.name, ())
        found += [getattr(torch, text) for text in others]
    return found


def runs_of(world_size):
    """Yield key, case, whether it follows its input's layout instead of a strategy, and the types in which it runs."""
    for module in MODULES:
        cases = importlib.import_module(module)
        for case, follows in [*((case, False) for case in cases.BINARY), *((case, True) for case in cases.UNARY)]:
            if dtypes := types_of(world_size, module, case):
                yield key_of(world_size, module, case), case, follows, dtypes


@functools.cache
def graph_of(*cases, dtype):
    """Return the graph of one case, or of several beside each other."""
    networks = [OperatorNetwork(case, case.values(dtype)) for case in cases]
    network = Beside(networks) if len(networks) > 1 else networks[0]
    return captured(network, *(one for case in cases for one in case.arguments(case.values(dtype))))


class Beside(nn.Module):
    """Calls networks one after the other, each with values of its own."""

    def __init__(self, networks):
        super().__init__()
        for number, network in enumerate(networks):
            self.add_module(str(number), network)  # not in a list, where those that are alike would be traced once

    def forward(self, *values):
        given, results = iter(values), []
        for network in self.children():
            results.append(network(*[next(given) for _ in range(network.count)]))
        return results


def nodes_of(graph, captured, cases):
    """Return, of each of several cases, its nodes in a graph: in the captured one, or in its program's on a rank."""
    inputs, number_of = iter(captured.inputs), {}
    for number, case in enumerate(cases):
        number_of |= dict.fromkeys(itertools.islice(inputs, len(case.arguments(case.shapes))), number)
    number_of |= {name: int(path.split(".")[0]) for name, path in captured.parameters.items()}
    nodes = [node for node in graph.nodes if node.op == "call_function" or node.name in number_of]
    for node in nodes:
        found = [number_of[one.name] for one in node.all_input_nodes if one.name in number_of]
        number_of |= {node.name: found[0]} if found else {}
    for node in reversed(nodes):  # what is made of nothing
        found = [number_of[user.name] for user in node.users if user.name in number_of]
        number_of |= {node.name: found[0]} if found and node.name not in number_of else {}
    return [[node for node in nodes if number_of.get(node.name) == number] for number in range(len(cases))]


def give(nodes, strategy):
    """Give the operators of a case a strategy, or none; beside others those of one input that follow it have none."""
    calls = [operator_call(node) for node in nodes if node.op == "call_function" and node.target is not getitem]
    for call in calls:
        call.node.meta.pop(STRATEGY, None)
        is_followed = len(calls) > 1 and len(call.tensors) == 1 and (find_rule(call.node.target) or REPLICATED).follows
        if strategy and call.tensors and not is_followed:
            call.node.meta[STRATEGY] = OperatorStrategy(strategy)
