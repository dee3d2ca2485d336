"""Mixed precision in one process: casts in the graph, loss scales."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import one_fast
from torch import Tensor, fx, nn

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, WithLoss, optim, value_and_grad
from msrun.runtime.capture.aten import apply_autocast
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.parallel.precision import LossScale, PrecisionSpec


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
        found = capture(
            find_target(network), inputs, {}, input_shapes=[tuple(x.shape) for x in inputs], parameter_shapes={}
        )
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


@pytest.mark.parametrize("dtype", one_fast(torch.bfloat16, torch.float16))
def test_casts_in_the_graph_give_bit_by_bit_what_autocast_gives(dtype):
    torch.manual_seed(0)
    network = Mixture()
    result = run_graph(captured_with_casts(network, MIXTURE, dtype), network, MIXTURE)
    with torch.autocast("cpu", dtype):
        right = network(*MIXTURE)
    assert result.dtype == right.dtype
    assert torch.equal(result, right)
    assert not torch.equal(result, network(*MIXTURE))
    narrow, x = nn.Linear(3, 2).double(), [torch.randn(4, 3, dtype=torch.float64)]
    assert torch.equal(run_graph(captured_with_casts(narrow, x, dtype), narrow, x), narrow(*x)), "float64 is left alone"


def test_types_in_the_graph_are_those_of_a_run_and_weights_arrive_in_the_type_that_reads_them():
    network = Mixture()
    found = captured_with_casts(network, MIXTURE, torch.bfloat16)
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
