"""AutoParallel and the wrappers of micro batches in one process: modules of the user, and a batch that is divided."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel, GradAccumulation, MicroBatchInterleaved, Pipeline, WithLoss
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.parallel.batch.divided_batch import find_parts, find_wrappers
from msrun.runtime.parallel.batch.parts import BatchParts, split_batch
from msrun.runtime.parallel.precision import check_compat


def network():
    torch.manual_seed(0)
    return WithLoss(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), F.mse_loss).double()


def batch():
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (4, 2))
    return x.requires_grad_(), y


def outcome(whole, compat="torch", incoming=1.0):
    """Return the loss, the gradient of the input, and those of the parameters."""
    x, y = batch()
    step = AutoParallel(whole, compat=compat)
    loss = (step.pipeline(2) if isinstance(whole, Pipeline) else step)(x, y)
    (loss * incoming).backward()
    found = [loss.detach(), x.grad, *(parameter.grad for parameter in whole.parameters())]
    return [value for value in found if value is not None]


WAYS = {
    "whole": lambda net: GradAccumulation(net, 1),
    "3 micro batches": lambda net: GradAccumulation(net, 3),
    "a row each": lambda net: GradAccumulation(net, 12),
    "4 copies": lambda net: MicroBatchInterleaved(net, 4),
    "copies of micro batches": lambda net: MicroBatchInterleaved(GradAccumulation(net, 2), 3),
    "micro batches of copies": lambda net: GradAccumulation(MicroBatchInterleaved(net, 2), 3),
    "pipeline": lambda net: Pipeline(net, 3),
    "pipeline of copies": lambda net: Pipeline(MicroBatchInterleaved(net, 2), 3),
}


@pytest.mark.parametrize("compat", ["torch", "mindspore"])
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_are_those_of_the_whole_batch(way, compat):
    """MindSpore adds losses up: copies make loss and gradient as many times as large, micro batches the loss alone."""
    parts = find_parts(find_wrappers(WAYS[way](network())))
    more = (parts.total, parts.copies) if compat == "mindspore" else (1, 1)
    right_loss, *right = outcome(network(), incoming=7.0)
    loss, *gradients = outcome(WAYS[way](network()), compat, incoming=7.0)
    torch.testing.assert_close(
        [loss, *gradients], [right_loss * more[0], *(g * more[1] for g in right)], rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("with_gradients", [True, False])
def test_one_micro_batch_is_done_before_the_next_begins(with_gradients):
    whole = network()
    events = []

    def note(_module, _args, loss):
        events.append("forward")
        if loss.requires_grad:
            loss.register_hook(lambda _: events.append("backward"))

    handle = whole.register_forward_hook(note)
    with torch.set_grad_enabled(with_gradients):
        loss = GradAccumulation(whole, 3)(*batch())
    assert events == (["forward", "backward"] if with_gradients else ["forward"]) * 3
    assert loss.requires_grad is with_gradients
    handle.remove()
    torch.testing.assert_close(loss.detach(), whole(*batch()).detach())


def test_hook_of_a_parameter_sees_the_gradient_of_the_batch_once():
    found = []
    for divide in (WAYS["3 micro batches"], lambda net: net):
        net, seen = network(), []
        weight = net.network[0].weight
        weight.register_hook(lambda g, seen=seen: seen.append(g) or g.clamp(-0.01, 0.01) * 0.5)
        for _ in range(2):
            divide(net)(*batch()).backward()
        assert len(seen) == 2
        found.append(weight.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-15)


def test_gradients_are_handed_out_once_or_as_often_as_the_graph_is_kept():
    whole = network()
    loss = GradAccumulation(whole, 2)(*batch())
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in whole.parameters() if parameter.grad is not None]
    loss.backward()
    twice = [parameter.grad for parameter in whole.parameters() if parameter.grad is not None]
    torch.testing.assert_close(twice, [2 * gradient for gradient in once])
    with pytest.raises(CaptureError, match="twice on one loss"):
        loss.backward()


@given(st.lists(st.tuples(st.sampled_from(["copies", "micro batches"]), st.integers(1, 3)), max_size=4))
def test_parts_run_in_the_order_of_the_rows_however_wrappers_are_nested(divisions):
    parts, number = BatchParts(tuple(divisions)), torch.tensor(3.0)
    rows = torch.arange(parts.total * 2)
    found = parts.split((rows, number, "word", None))
    assert [len(micro) for micro in found] == [parts.copies] * parts.micro_batches
    assert torch.equal(torch.cat([copy[0] for micro in found for copy in micro]), rows)
    assert all(copy[1] is number and copy[2:] == ("word", None) for micro in found for copy in micro)
    assert torch.equal(torch.cat(parts.in_order([[copy[0] for copy in micro] for micro in found])), rows)


def trace(function, root):
    """Capture a function as AutoParallel does."""
    wrappers = find_wrappers(root)
    rows = 12 // find_parts(wrappers).total
    shapes = [(rows, 4), (rows, 2)]
    return capture(Target(function, root), batch(), {}, input_shapes=shapes, parameter_shapes={}, wrappers=wrappers)


def test_step_that_hands_its_batch_on_is_captured_as_one_part():
    whole = GradAccumulation(MicroBatchInterleaved(network(), 2), 3)
    graph = trace(lambda x, y: whole(x, y), whole)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names.count("aten.linear.default") == 2
    assert find_parts(find_wrappers(whole)) == BatchParts((("micro batches", 3), ("copies", 2)))


whole = MicroBatchInterleaved(WithLoss(nn.Linear(4, 2), F.mse_loss).double(), 2)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda x, y: whole(x * 2, y), "is called with tensors that the step has computed"),
        (lambda x, y: whole(x, y) * 2, "the step computes with the result"),
        (lambda x, y: whole(x, y) + whole(x, y), "is called twice in one step"),
        (lambda x, y: whole.network(x, y), "is not called by the step that uses its network"),
    ],
)
def test_step_whose_parts_cannot_be_run_apart_is_refused_in_words(step, text):
    with pytest.raises(StrategyError) as caught:
        trace(step, whole)
    assert text in str(caught.value)


def test_outside_auto_parallel_the_mean_is_taken():
    whole = MicroBatchInterleaved(network(), 2)
    AutoParallel(whole, compat="mindspore")(*batch())
    torch.testing.assert_close(whole(*batch()), whole.network(*batch()))


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        *(
            (lambda make=make, number=number: make(nn.Linear(1, 1), number), "must be a whole number above 0")
            for make in (GradAccumulation, MicroBatchInterleaved)
            for number in (0, -1, 1.0, True, "2", None)
        ),
        (
            lambda: GradAccumulation(network(), 5)(*batch()),
            "a batch of 12 rows on this rank cannot be cut into 5 equal m",
        ),
        (lambda: split_batch((torch.ones(4, 1), torch.ones(5, 1)), 2), "of 5 rows on this rank cannot be cut into 2"),
        (
            lambda: GradAccumulation(nn.Linear(4, 8).double(), 2)(batch()[0]),
            "first result is a tensor of shape (6, 8): wrap it with its loss",
        ),
        (
            lambda: find_wrappers(nn.ModuleList([WAYS["4 copies"](network()), WAYS["a row each"](network())])),
            "MicroBatchInterleaved and GradAccumulation stand side by side",
        ),
        (lambda: check_compat("jax"), "must be torch"),
        (lambda: AutoParallel(WithLoss(AutoParallel(Net()), nn.MSELoss())), "wrap the whole network, once"),
    ],
)
def test_what_cannot_be_divided_or_wrapped_is_refused(ask, words):
    with pytest.raises(StrategyError) as caught:
        ask()
    assert words in str(caught.value)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.fc(x))


WRAPPED = {
    "alone": lambda net: net,
    "with two losses": lambda net: WithLoss(WithLoss(net, nn.MSELoss()), nn.MSELoss()),
    "accumulating": lambda net: GradAccumulation(WithLoss(net, nn.MSELoss()), 2),
    "copies of micro batches": lambda net: MicroBatchInterleaved(GradAccumulation(WithLoss(net, nn.MSELoss()), 2), 2),
    "pipeline": lambda net: Pipeline(WithLoss(net, nn.MSELoss()), 2),
}


@pytest.mark.parametrize("way", WRAPPED)
def test_names_are_the_users_own(way):
    net = Net()
    step = AutoParallel(WRAPPED[way](net))
    for list_of in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        mine, right = (dict(getattr(module, list_of)()) for module in (step, net))
        assert list(mine) == list(right)
        assert all(mine[name] is right[name] for name in right)
    assert list(step.state_dict()) == list(net.state_dict())
    assert step.get_parameter("fc.weight") is step.fc.weight is net.fc.weight


def test_everything_a_loop_does_to_a_module_reaches_the_network():
    net = Net()
    step = AutoParallel(WithLoss(net, nn.MSELoss()))
    assert isinstance(step, nn.Module)
    step.eval()
    assert not net.training
    assert not net.norm.training
    net.train()
    assert step.training
    step.apply(lambda module: nn.init.zeros_(module.weight) if type(module) is nn.Linear else None)
    assert not net.fc.weight.any()
    step.double().requires_grad_(requires_grad=False)
    assert net.fc.weight.dtype == net.norm.running_mean.dtype == torch.float64
    assert not any(parameter.requires_grad for parameter in net.parameters())
    step.requires_grad_()
    x = torch.rand(4, 4, dtype=torch.float64)
    step(x, torch.rand(4, 3, dtype=torch.float64)).backward()
    assert net.fc.weight.grad is not None
    step.zero_grad()
    assert net.fc.weight.grad is None


def test_hooks_run_at_every_call():
    step, x, y = AutoParallel(WithLoss(Net(), nn.MSELoss())), torch.rand(4, 4), torch.rand(4, 3)
    seen = []
    step.register_forward_pre_hook(lambda *_: seen.append("before"))
    handle = step.register_forward_hook(lambda *_: seen.append("after"))
    for _ in range(2):
        step(x, y)
    handle.remove()
    step(x, y)
    assert seen == ["before", "after", "before", "after", "before"]


def test_state_of_another_network_loads_and_its_mistakes_are_named():
    step, other = AutoParallel(WithLoss(Net(), nn.MSELoss())), Net()
    assert not any(step.load_state_dict(other.state_dict()))
    assert torch.equal(step.fc.weight, other.fc.weight)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*more"):
        step.load_state_dict({**other.state_dict(), "more": torch.zeros(1)})
    found = step.load_state_dict({}, strict=False)
    assert "fc.weight" in found.missing_keys


def test_loss_with_a_state_is_part_of_the_state():
    step = AutoParallel(WithLoss(Net(), nn.CrossEntropyLoss(weight=torch.arange(3.0))))
    state = step.state_dict()
    assert torch.equal(state["loss_fn.weight"], torch.arange(3.0))
    step.load_state_dict({**state, "loss_fn.weight": torch.ones(3)})
    assert torch.equal(dict(step.named_buffers())["loss_fn.weight"], torch.ones(3))


def test_module_inside_a_module_keeps_its_place():
    outer = nn.ModuleDict({"body": AutoParallel(WithLoss(Net(), nn.MSELoss())), "head": nn.Linear(3, 2)})
    assert list(outer.state_dict()) == [*(f"body.{name}" for name in Net().state_dict()), "head.weight", "head.bias"]
    outer.load_state_dict({name: value * 0 for name, value in outer.state_dict().items()})
    assert not outer["body"].fc.weight.any()
    outer.half()
    assert outer["body"].fc.weight.dtype == torch.float16


def test_copies_have_a_network_of_their_own_and_the_same_settings():
    net = Net()
    net.fc.weight.parallel_optimizer = False
    step = AutoParallel(WithLoss(net, nn.MSELoss()), compat="mindspore").hsdp(threshold=7)
    seen = []
    step.register_forward_hook(lambda *_: seen.append(1))
    copied = copy.deepcopy(step)
    assert copied.settings == step.settings
    assert copied.network is not step.network
    assert copied.fc.weight is not net.fc.weight
    assert copied.fc.weight.parallel_optimizer is False
    copied(torch.rand(4, 4), torch.rand(4, 3))
    assert seen == [1]
    average = AveragedModel(step)
    average.update_parameters(step)
    assert list(average.module.state_dict()) == list(net.state_dict())


def test_no_sync_works_from_the_first_line():
    net, x, y = Net(), torch.rand(4, 4), torch.rand(4, 3)
    right = copy.deepcopy(net)
    for mode in ("semi_auto", "data_parallel", "stand_alone"):
        step = AutoParallel(WithLoss(net, nn.MSELoss()), mode)
        with step.no_sync():
            step(x, y).backward()
        step(x, y).backward()
    for _ in range(6):
        nn.functional.mse_loss(right(x), y).backward()
    torch.testing.assert_close(net.fc.weight.grad, right.fc.weight.grad)


def test_step_function_has_no_tensors_of_its_own():
    step = AutoParallel(lambda x: x)
    for ask in (step.parameters, step.state_dict, step.zero_grad, lambda: step.load_state_dict({}), step.half):
        with pytest.raises(StrategyError, match=r"AutoParallel of a step function has no .* ask the network"):
            list(ask())
