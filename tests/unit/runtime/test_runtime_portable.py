"""Traces that another process may load: what makes a call do something else there is seen, or is not kept at all."""

import contextlib
import dataclasses
import enum
import functools
import importlib.util
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from small_capture import captured
from torch import Tensor, nn

from msrun.runtime.capture.marked_calls import find_marked
from msrun.runtime.capture.portable import UnportableError, text_of, text_of_modules
from msrun.runtime.capture.portable_trace import PortableTrace

TABLE = {"factor": 1.0}
FACTOR = 1.0


class Shape(enum.IntEnum):
    ROUND = 1


class Holder:
    factor = 1.0
    factors = (1.0,)

    def scale(self, x):
        return x * 2


HELD = Holder()


def scaled(x, factor=1.0):
    return x * factor


def doubled(x):
    return x * 2


def _multiplier(factor):
    def multiply(x):
        return x * factor

    return multiply


multiply = _multiplier(1.0)


class Network(nn.Module):
    """Calls a function with the result of a layer, and itself."""

    def __init__(self, then, layer=None):
        super().__init__()
        self.layer = layer or nn.Linear(4, 4)
        self.then = then
        self.factor = 1.0
        self.shape = Shape.ROUND
        self.table = torch.ones(4)

    def forward(self, x):
        return self.then(self, self.layer(x))


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


def of_factor(network, x):
    return x * network.factor


def of_shape(network, x):
    return x * network.shape


def of_table(network, x):
    return x * network.table.stride()[0]


def of_globals(_, x):
    return x * FACTOR * TABLE["factor"]


def of_holder(_, x):
    return HELD.scale(x) * HELD.factor * Holder.factors[0]


def of_functions(_, x):
    return multiply(scaled(F.gelu(x)))


def of_state(_, x):
    return x * (2 if torch.are_deterministic_algorithms_enabled() else 1)


def of_nothing(_, x):
    return x


def call_of(network):
    return network, (torch.ones(2, 4),), {}


def known_of(network):
    return {id(value): name for name, value in [*network.named_modules(), *network.named_parameters()]}


def kept(network):
    call = call_of(network)
    return PortableTrace.of(captured(network, *call[1]).traced, call, known_of(network))


def load(portable, network):
    text_of_modules(network)
    portable.load(call_of(network), known_of(network), find_marked(network, {}))


@contextlib.contextmanager
def _changed(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def _set(owner, name, value):
    return lambda _: _changed(lambda: getattr(owner, name), functools.partial(setattr, owner, name), value)


def _on_network(name, value):
    return lambda network: mock.patch.dict(vars(network), {name: value})


def _sevenfold(*given, **named):
    raise NotImplementedError


HERE = sys.modules[__name__]
DETERMINISTIC = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
DEFAULT_DTYPE = torch.get_default_dtype, torch.set_default_dtype
CHANGES = {
    "an attribute": (of_factor, _on_network("factor", 2.0)),
    "the type of an attribute": (of_factor, _on_network("factor", 1)),
    "the value of an enum": (of_shape, _set(Shape.ROUND, "_value_", 2)),
    "the strides of a tensor": (of_table, _on_network("table", torch.ones(8)[::2])),
    "the type of a tensor": (of_table, _on_network("table", torch.ones(4).double())),
    "a number of a module": (of_globals, _set(HERE, "FACTOR", 2.0)),
    "a dict of a module": (of_globals, lambda _: mock.patch.dict(TABLE, factor=2.0)),
    "an attribute of a class": (of_holder, _set(Holder, "factor", 2.0)),
    "a tuple of a class": (of_holder, _set(Holder, "factors", (2.0,))),
    "a method": (of_holder, _set(Holder, "scale", lambda _, x: x)),
    "the code of a method": (of_holder, _set(Holder.scale, "__code__", (lambda _, x: x).__code__)),
    "a function": (of_functions, _set(HERE, "scaled", doubled)),
    "the code of a function": (of_functions, _set(scaled, "__code__", doubled.__code__)),
    "a default": (of_functions, _set(scaled, "__defaults__", (2.0,))),
    "a number in a closure": (of_functions, _set(multiply.__closure__[0], "cell_contents", 2.0)),
    "a function of torch": (of_functions, _set(F, "gelu", _sevenfold)),
    "a function in C that a layer calls": (of_factor, _set(F, "linear", _sevenfold)),
    "a function in C that one of torch calls": (of_nothing, _set(F, "linear", _sevenfold)),
    "the code of what one of torch calls": (of_nothing, _set(F._in_projection_packed, "__code__", doubled.__code__)),
    "what one of torch calls": (of_nothing, _set(F, "_in_projection_packed", _sevenfold)),
    "a switch of torch": (of_state, lambda _: _changed(*DETERMINISTIC, value=True)),
    "autocast": (of_nothing, lambda _: torch.autocast("cpu", torch.bfloat16)),
    "no gradients": (of_nothing, lambda _: torch.no_grad()),
    "the default type": (of_nothing, lambda _: _changed(*DEFAULT_DTYPE, torch.float64)),
    "a mode of torch's functions": (of_nothing, lambda _: torch.device("cpu")),
    "hooks of saved tensors": (of_nothing, lambda _: torch.autograd.graph.save_on_cpu()),
}


@functools.cache
def kept_once(then):
    network = Network(then, Attention(4, 2) if then is of_nothing else None)
    return network, kept(network)


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen_by_who_loads(what):
    then, change = CHANGES[what]
    network, portable = kept_once(then)
    load(portable, network)
    with change(network), pytest.raises(UnportableError):
        load(portable, network)


@torch.compiler.assume_constant_result
def assumed():
    return TABLE["factor"]


@torch._dynamo.allow_in_graph
def unfollowed(x):
    return x * TABLE["factor"]


@dataclasses.dataclass
class Pair:
    first: Tensor


def of_assumed(_, x):
    return x * assumed()


def of_packages(_, x):
    return x * (2 if importlib.util.find_spec("zzz") else 1)


def of_unfollowed(_, x):
    return unfollowed(x)


def of_made_code(_, x):
    return Pair(x).first


REFUSED = [
    (of_assumed, "the result of assumed"),
    (of_packages, "the result of find_spec"),
    (of_unfollowed, "unfollowed, which stands in the graph"),
    (of_made_code, "no name in a module"),
]


@pytest.mark.parametrize(("then", "words"), REFUSED)
def test_what_nothing_would_guard_is_not_kept(then, words):
    with pytest.raises(UnportableError, match=words):
        kept(Network(then))


def test_which_rank_it_is_has_no_text():
    with pytest.raises(UnportableError, match="get_rank"):
        text_of(dist.get_rank)


def test_a_method_of_a_network_whose_result_is_assumed_constant_is_not_kept():
    with mock.patch.object(Network, "assumed", assumed, create=True), pytest.raises(UnportableError):
        text_of_modules(Network(of_nothing))


def test_a_class_that_is_patched_after_its_first_use_has_another_text():
    network = Network(of_nothing)
    before = text_of_modules(network)
    with mock.patch.object(Network, "forward", lambda _, x: x):
        assert text_of_modules(network) != before
    assert text_of_modules(network) == before


def test_a_hook_of_all_modules_is_not_kept():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UnportableError, match="hook"):
            text_of_modules(Network(of_nothing))
    finally:
        handle.remove()
