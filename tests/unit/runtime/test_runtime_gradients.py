"""Gradients of a rank's own rows, digests of tensors, and when memory that is gathered may be freed.
Mixed precision in one process: casts in the graph, loss scales."""

import copy
import ctypes
import functools
import io
import math
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import one_fast
from small_capture import captured
from torch import Tensor, fx, nn

from msrun.errors import ParallelError, StrategyError
from msrun.runtime import AutoParallel, WithLoss, optim, value_and_grad
from msrun.runtime.capture.aten import apply_autocast
from msrun.runtime.execute import transfers as module
from msrun.runtime.execute.gradients import GatheredGroup, LeavingGradients
from msrun.runtime.execute.transfers import TensorFuture
from msrun.runtime.parallel.border import LateLoss
from msrun.runtime.parallel.compilation import agreement
from msrun.runtime.parallel.parameters.storage import _CHUNK_BYTES, digest
from msrun.runtime.parallel.precision import LossScale, PrecisionSpec
from msrun.runtime.sharding.operators.table_lookup import embed_own_rows, select_own_rows
from msrun.runtime.tensors.plain_tensors import watch_constructors


def test_weight_that_was_frozen_since_is_refused_by_its_number():
    network = nn.Linear(2, 1)
    step = value_and_grad(lambda x: network(x).sum(), None, list(network.parameters()))
    _, gradients = step(torch.ones(3, 2))
    assert gradients[1].tolist() == [3.0]
    network.bias.requires_grad = False
    with pytest.raises(
        StrategyError, match=r"weights\[1\] of 2 does not require a gradient; call value_and_grad again"
    ):
        step(torch.ones(3, 2))


class OnItsWay(TensorFuture):
    """A message that is read from a tensor's memory until somebody waits for it."""

    def __init__(self, source):
        super().__init__(source)
        self.bytes_at_arrival: list[int] = []

    def wait(self):
        self.bytes_at_arrival.append(self._value.untyped_storage().size())
        return self._value


def test_memory_is_kept_until_messages_that_are_read_from_it_have_arrived():
    leaf = torch.ones(6)
    nobody = None
    gathered = GatheredGroup(nobody, {"weight": leaf})
    message = OnItsWay(leaf)
    gathered.lend(message)
    gathered.free()
    assert message.bytes_at_arrival == [24]
    assert leaf.untyped_storage().size() == 0
    gathered.free()
    assert message.bytes_at_arrival == [24]


def test_gradients_are_handed_out_once_two_messages_have_left_after_theirs():
    seen: list[Any] = []
    leaving = LeavingGradients(seen.append)
    for number, length in enumerate([0, 0, 1, 2]):
        leaving.add(SimpleNamespace(wait=lambda number=number: {"weight": number}))
        assert len(seen) == length
    assert leaving.arrive() == {}
    assert seen == [{"weight": number} for number in range(4)]


INF, NAN = float("inf"), float("nan")
LONG = torch.zeros(_CHUNK_BYTES + 3, dtype=torch.uint8)


def changed(tensor, index, value):
    other = tensor.clone()
    other[index] = value
    return other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([-INF, 1.0]), torch.tensor([-INF, 2.0])),
        (torch.tensor([-INF, 1.0]), torch.tensor([1.0, -INF])),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
        (torch.tensor([1.0, 2.0]).double(), -torch.tensor([1.0, 2.0]).double()),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(3, dtype=torch.bool), torch.tensor([False, False, True])),
        (LONG, changed(LONG, -1, 1)),
        (changed(LONG, 0, 1), changed(LONG, _CHUNK_BYTES - 1, 1)),
        (changed(LONG, 0, 1), changed(LONG, _CHUNK_BYTES, 1)),
        (torch.tensor([NAN, -INF, INF]), torch.zeros(3)),
        (torch.tensor(2.5), torch.empty(0, 3)),
        (torch.tensor([1 + 2j, 3j]), torch.ones(2, dtype=torch.bfloat16)),
    ],
)
def test_equal_tensors_have_one_digest_wherever_they_lie_and_others_another(one, other):
    assert digest(one) != digest(other)
    odd = torch.zeros(one.numel() + 1, dtype=one.dtype)[1:].view(one.shape).copy_(one)
    assert digest(one) == digest(odd) == digest(one.unsqueeze(-1).expand(*one.shape, 2)[..., 0])


def test_batches_that_differ_in_one_element_or_in_order_are_told_apart():
    batch, large = torch.eye(4), torch.zeros(2000, 1000)
    batches = [[batch], [changed(batch, (3, 3), 0)], [batch.flip(0)], [batch, batch[:, 0]], [batch[:, :1], batch[0, 0]]]
    batches += [[large], [changed(large, 0, 1)]]
    assert len({agreement._digest(tensors) for tensors in batches}) == len(batches)
    assert agreement._digest([batch.clone()]) == agreement._digest([batch])


OWN_ROWS = torch.tensor([3]), (2, 3), (0,), 6
"""The fourth of six ranks, which has the second half of six rows."""


def test_rows_of_a_sparse_embedding_get_a_gradient_where_they_lie_and_nowhere_else():
    rows, index = torch.randn(3, 3).requires_grad_(), torch.tensor([[1, 4], [5, 4]])
    found = embed_own_rows(rows, index, *OWN_ROWS, padding_idx=5, sparse=True)
    assert torch.equal(found, torch.stack([0 * rows[0], rows[1], rows[2], rows[1]]).view(2, 2, 3))
    (gradient,) = torch.autograd.grad(found.sum(), rows)
    assert gradient.is_sparse and gradient.coalesce().indices().tolist() == [[1]]
    assert gradient.to_dense().tolist() == [[0.0] * 3, [2.0] * 3, [0.0] * 3]


def test_row_that_no_table_has_is_an_error():
    with pytest.raises(RuntimeError, match="index out of range: a table has 6 rows"):
        select_own_rows(torch.zeros(3, 2), torch.tensor([6]), *OWN_ROWS, dim=0)


class Source:
    """Makes losses of a weight; notes in which order the value and the gradient are asked for."""

    def __init__(self):
        self.weight = torch.ones(3, requires_grad=True)
        self.events: list[str] = []

    def loss(self):
        result = _Sum.apply(self, self.weight)
        assert isinstance(result, LateLoss)
        return result

    def arrive(self):
        self.events.append("value")
        return self.weight.detach().sum().detach().requires_grad_()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source, weight):
        ctx.source = source
        return LateLoss.of(source.arrive, weight.dtype)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.source.events.append("gradient")
        return None, gradients[0].expand(3)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * 2


def seen_in_inference_mode(loss):
    with torch.inference_mode():
        return loss.item()


def saved_and_read(loss):
    file = io.BytesIO()
    torch.save(loss.detach(), file)
    file.seek(0)
    return float(torch.load(file))


def added_up(loss):
    total = torch.zeros(())
    with torch.no_grad():
        total += loss
    return float(total)


LOOKS = {
    "item": lambda loss: loss.item(),
    "float": lambda loss: float(loss.detach()),
    "text": lambda loss: float(f"{loss:.1f}"),
    "repr": lambda loss: 3.0 if repr(loss).startswith("tensor(3., grad_fn=") else repr(loss),
    "data": lambda loss: float(loss.data),
    "list": lambda loss: torch.stack([torch.zeros(()), loss]).tolist()[1],
    "arithmetic": lambda loss: (loss * 2 / 2).item(),
    "sum": lambda loss: (sum([loss, loss]) / 2).item(),
    "in place": added_up,
    "comparison": lambda loss: 3.0 if loss > 2.5 else 0.0,
    "operator": lambda loss: torch.ops.aten.mul.Scalar(loss, 1.0).item(),
    "inference mode": seen_in_inference_mode,
    "numpy": lambda loss: float(np.asarray(loss.detach())),
    "dlpack": lambda loss: float(torch.from_dlpack(loss.detach())),
    "tolist": lambda loss: loss.tolist(),
    "copy": lambda loss: float(copy.copy(loss.detach())),
    "pickle": lambda loss: float(pickle.loads(pickle.dumps(loss.detach()))),
    "torch.save": saved_and_read,
    "function of the user": lambda loss: _Twice.apply(loss).item() / 2,
    "after backward": lambda loss: (loss.backward(), loss.item())[1],
    "tensor": lambda loss: (watch_constructors(), float(torch.tensor(loss)))[1],
    "as_tensor": lambda loss: (watch_constructors(), float(torch.as_tensor(loss.detach(), dtype=torch.float64)))[1],
    "memory": lambda loss: ctypes.c_float.from_address(loss.data_ptr()).value,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_whoever_looks_gets_the_value_and_from_then_on_a_plain_tensor(look):
    source = Source()
    loss = source.loss()
    assert look(loss) == 3.0
    assert type(loss) is Tensor
    assert source.events.count("value") == 1
    assert loss.item() == 3.0 and loss.requires_grad and loss.dim() == 0


def backward(source, loss):
    loss.backward()
    return source.weight.grad


@pytest.mark.parametrize(
    ("differentiate", "gradient", "events"),
    [
        (backward, 1.0, ["gradient", "value"]),
        (lambda source, loss: torch.autograd.grad(loss, [source.weight])[0], 1.0, ["gradient", "value"]),
        (lambda source, loss: backward(source, loss**2), 6.0, ["value", "gradient"]),
        (lambda source, loss: torch.autograd.grad(loss, [source.weight], loss)[0], 3.0, ["value", "gradient"]),
    ],
    ids=["backward", "grad", "of the value", "its own gradient"],
)
def test_gradients_do_not_wait_for_the_value_unless_they_need_it(differentiate, gradient, events):
    source = Source()
    loss = source.loss()
    assert source.events == [], "nobody has looked"
    assert differentiate(source, loss).tolist() == [gradient] * 3
    assert source.events == events
    assert loss.item() == 3.0


def test_one_gradient_of_two_losses_waits_for_neither_first():
    one, other = Source(), Source()
    losses = [one.loss(), other.loss()]
    torch.autograd.grad(losses, [one.weight, other.weight])
    assert one.events == other.events == ["gradient", "value"]
    assert [loss.item() for loss in losses] == [3.0, 3.0]


def test_errors_reach_whoever_looks_and_leave_no_number_behind():
    def arrive():
        raise ParallelError("rank 1 has gone")

    loss = LateLoss.of(arrive, torch.float32)
    with pytest.raises(ParallelError, match="rank 1 has gone"):
        loss.item()
    assert torch.isnan(loss)
    loss = Source().loss()
    with pytest.raises(RuntimeError, match="shape"):
        loss.backward(torch.ones(2))
    assert loss.item() == 3.0, "a backward pass that failed takes no value away"


class Work:
    """A collective that comes to its end after so many waits that were too long."""

    def __init__(self, long_waits=0, error=""):
        self._long_waits = long_waits
        self._error = error
        self.waits: list[Any] = []

    def is_completed(self):
        return len(self.waits) > self._long_waits

    def wait(self, limit=None):
        self.waits.append(limit)
        if len(self.waits) <= self._long_waits:
            raise RuntimeError("timed out")
        if self._error:
            raise RuntimeError(self._error)


@pytest.fixture
def looks(monkeypatch):
    """What was called while a collective took long."""
    called = []
    monkeypatch.setattr(module, "on_long_wait", [lambda: called.append("a"), lambda: called.append("b")])
    return called


def test_while_a_message_takes_long_it_is_looked_around(looks, monkeypatch):
    work = Work(long_waits=2)
    TensorFuture(torch.ones(2), work).wait()
    assert work.waits == [module.LOOK_EVERY] * 3
    assert looks == ["a", "b", "a", "b"]
    looks.clear()
    work = Work(error="connection closed by peer")
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        TensorFuture(torch.ones(2), work).wait()
    assert work.waits == [module.LOOK_EVERY, None] and looks == []

    def look():
        raise ValueError("rank 1 has gone")

    monkeypatch.setattr(module, "on_long_wait", [look])
    with pytest.raises(ValueError, match="rank 1 has gone"):
        TensorFuture(torch.ones(2), Work(long_waits=10**9)).wait()


class Mixture(nn.Module):
    """Operators in 16 bits, in float32, in the widest of their inputs, as they come, and mixed inside."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.layer1 = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.recurrent = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, target):
        x = self.embedding(tokens)
        h = self.norm(F.gelu(self.layer1(x)))
        h = torch.cat([h, self.recurrent(self.layer1(h))[0]], 1)
        h = h.softmax(-1) @ h.transpose(1, 2) @ h
        logits = self.head(h.mean(1))
        return F.cross_entropy(logits, target) + F.mse_loss(logits.double().float(), logits * 0.5)


def captured_with_casts(network, inputs, dtype):
    with torch.autocast("cpu", dtype):
        found = captured(network, *inputs)
    apply_autocast(found.graph, found.parameters, "cpu", dtype)
    return found


def run_graph(found, network, inputs, how=fx.Interpreter):
    values = dict(network.named_parameters())
    given = iter(inputs)
    placeholders = [node for node in found.graph.nodes if node.op == "placeholder"]
    arguments = [
        values[found.parameters[n.name]].to(n.meta["val"].dtype) if n.name in found.parameters else next(given)
        for n in placeholders
    ]
    return how(fx.GraphModule(nn.Module(), found.graph)).run(*arguments)[0]


MIXTURE = [torch.arange(20).view(4, 5) % 10, torch.arange(4)]


@functools.cache
def captured_mixture(dtype):
    torch.manual_seed(0)
    network = Mixture()
    return network, captured_with_casts(network, MIXTURE, dtype)


@pytest.mark.parametrize("dtype", one_fast(torch.bfloat16, torch.float16))
def test_casts_in_the_graph_give_bit_by_bit_what_autocast_gives(dtype):
    network, found = captured_mixture(dtype)
    result = run_graph(found, network, MIXTURE)
    with torch.autocast("cpu", dtype):
        right = network(*MIXTURE)
    assert result.dtype == right.dtype
    assert torch.equal(result, right)
    assert not torch.equal(result, network(*MIXTURE))
    narrow, x = nn.Linear(3, 2).double(), [torch.randn(4, 3, dtype=torch.float64)]
    assert torch.equal(run_graph(captured_with_casts(narrow, x, dtype), narrow, x), narrow(*x)), "float64 is left alone"


def test_types_in_the_graph_are_those_of_a_run_and_weights_arrive_in_the_type_that_reads_them():
    network, found = captured_mixture(torch.bfloat16)
    types = {n.name: n.meta["val"].dtype for n in found.graph.nodes if isinstance(n.meta.get("val"), Tensor)}
    seen = {}

    class Watch(fx.Interpreter):
        def run_node(self, n):
            value = super().run_node(n)
            if isinstance(value, Tensor):
                seen[n.name] = value.dtype
            return value

    run_graph(found, network, MIXTURE, Watch)
    assert seen == types
    read = {found.parameters[name]: types[name] for name in found.parameters}
    assert read["layer1.weight"] == torch.bfloat16
    assert read["embedding.weight"] == torch.float32, "the embedding reads it as it is, the head in 16 bits"
    assert read["norm.weight"] == torch.float32


@pytest.mark.parametrize("form", ["module", "step"])
@pytest.mark.parametrize("mode", ["semi_auto", "data_parallel", "stand_alone"])
def test_mixed_precision_alone_is_torchs_autocast_and_gradients_come_without_the_scale(mode, form):
    torch.manual_seed(0)
    network = nn.Linear(6, 3)
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    whole = WithLoss(network, F.cross_entropy)
    gradients_of = value_and_grad(lambda x, y: whole(x, y), None, list(network.parameters()))
    step = AutoParallel(whole if form == "module" else lambda x, y: gradients_of(x, y), mode)
    step.mixed_precision("float16", 1024)
    if form == "module":
        loss = step(x, y)
        loss.backward()
        gradients = [parameter.grad for parameter in network.parameters()]
    else:
        loss, gradients = step(x, y)
    right = nn.Linear(6, 3)
    right.load_state_dict(network.state_dict())
    with torch.autocast("cpu", torch.float16):
        expected = F.cross_entropy(right(x), y)
    (expected * 1024).backward()
    assert torch.equal(loss.detach(), expected.detach())
    for gradient, parameter in zip(gradients, right.parameters(), strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        torch.testing.assert_close(gradient, parameter.grad / 1024, rtol=1e-6, atol=0)


@pytest.mark.parametrize("make", [torch.optim.Adam, optim.Adam])
def test_overflow_makes_an_optimizer_do_nothing_at_all(make):
    network = nn.Linear(2, 1)
    optimizer = make(network.parameters(), lr=0.1, weight_decay=0.1)
    step = AutoParallel(network).mixed_precision("bfloat16", "dynamic")
    step(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    state = {key: value.clone() for key, value in optimizer.state[network.weight].items()}
    step(torch.full((1, 2), math.inf)).sum().backward()
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(network.parameters(), before, strict=True))
    assert all(torch.equal(value, state[key]) for key, value in optimizer.state[network.weight].items())
    assert step.loss_scale == 2.0**15


def test_dynamic_scale_halves_at_once_and_doubles_after_2000_good_steps():
    scale = LossScale(PrecisionSpec("float16", "dynamic"), is_shared=False)
    good, bad = [torch.ones(1)], [torch.tensor([math.nan])]
    assert not scale.accepts(bad)
    assert scale.value == 2.0**15
    for _ in range(1999):
        scale.accepts(good)
    assert scale.value == 2.0**15
    scale.accepts(good)
    assert scale.value == 2.0**16
    assert scale.skipped_steps == 1
    fixed = LossScale(PrecisionSpec("float16", 128.0), is_shared=False)
    assert not fixed.accepts(bad) and fixed.accepts([])
    assert fixed.value == 128.0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("float32",), r"must be bfloat16 or float16"),
        (("bfloat",), r"did you mean bfloat16\?"),
        (("float16", 0), "a number above 0"),
        (("float16", math.inf), "a number above 0"),
        (("float16", "auto"), '"dynamic"'),
        (("float16", True), "a number above 0"),
    ],
)
def test_wrong_words_of_mixed_precision_are_refused(words, text):
    with pytest.raises(StrategyError, match=text):
        AutoParallel(nn.Linear(2, 2)).mixed_precision(*words)


def test_two_scales_for_one_parameter_and_a_scale_with_fsdp_are_refused():
    network = nn.Linear(2, 1)
    AutoParallel(network).mixed_precision("float16", 2)(torch.ones(1, 2))
    with pytest.raises(StrategyError, match="is trained by two AutoParallel with a loss scale"):
        AutoParallel(network).mixed_precision("float16", 4)(torch.ones(1, 2))
    with pytest.raises(StrategyError, match="use bfloat16, which needs none"):
        AutoParallel(network, "data_parallel").hsdp().mixed_precision("float16", 4)
