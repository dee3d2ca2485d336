"""Captures that fail: the user's line, the user's own exceptions, and a process that is as it was before."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint_sequential

from msrun.errors import CaptureError
from msrun.runtime import AutoParallel
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 4)
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def captured(network: nn.Module) -> CapturedGraph:
    x = torch.ones(2, 4)
    return capture(find_target(network), (x,), {}, input_shapes=[(2, 4)], parameter_shapes={})


def _default_dtype(net: Any, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return net.layer(x)


def _branch_under_autocast(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.layer(x) if x.sum() > 0 else x


def _number_in_vmap(net: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: net.layer(row) * float(torch.ones(2)[0].item()))(x)


def _packed(net: Any, x: Tensor) -> Tensor:
    packed = rnn.pack_padded_sequence(net.layer(x)[None], torch.tensor([2]), batch_first=True)
    return packed.data


def _written_beside_its_hook(net: Any, x: Tensor) -> Tensor:
    h = net.layer(x)
    column = h[:, 0]
    h.register_hook(lambda gradient: gradient * 2)
    column.zero_()
    return net.head(h)


_inner = AutoParallel(nn.Linear(4, 8))
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "vmap": (lambda net, x: torch.vmap(lambda row: net.head(net.layer(row)))(x), "torch.vmap"),
    "number in vmap": (_number_in_vmap, ""),
    "func.grad": (lambda net, x: torch.func.grad(lambda z: net.layer(z).sum())(x), "torch.func"),
    "jvp": (lambda net, x: torch.func.jvp(net.layer, (x,), (x,))[1], "torch.func"),
    "jacrev": (lambda net, x: torch.func.jacrev(lambda z: net.layer(z).sum())(x), "torch.func"),
    "autograd.grad": (lambda net, x: torch.autograd.grad(net.layer(x).sum(), x)[0], "takes gradients"),
    "cond": (lambda net, x: torch.cond(x.sum() > 0, net.layer, net.layer, (x,)), "cond"),
    "random.uniform": (lambda net, x: net.layer(x) * random.uniform(0, 1), "the random of Python or numpy"),
    "random.randint": (lambda net, x: net.layer(x) * random.randint(0, 9), "the random of Python or numpy"),
    "random.random": (lambda net, x: net.layer(x) * random.random(), "the random of Python or numpy"),
    "random.choice": (lambda net, x: net.layer(x) * random.choice([1, 2]), "the random of Python or numpy"),
    "default dtype": (_default_dtype, "changes torch's default dtype"),
    "branch under autocast": (_branch_under_autocast, "depends on a tensor's values"),
    "packed sequence": (_packed, "pack_padded_sequence"),
    "AutoParallel inside": (lambda net, x: net.head(_inner(x)), "an AutoParallel inside: call the network itself"),
    "wrong shapes": (lambda net, x: net.head(x), "torch raises RuntimeError: a and b must have same reduction dim"),
    "write beside a hook": (_written_beside_its_hook, "after its register_hook"),
    "max_norm": (
        lambda net, x: F.embedding(torch.tensor([1, 2]), net.layer.weight, max_norm=1.0) + x,
        "embedding_renorm_ changes parameter layer_weight",
    ),
}


def process_state() -> tuple[Any, ...]:
    return (
        random.getstate(),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch._C._functorch.get_interpreter_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refused_habit_is_named_with_its_line_and_leaves_the_process_as_it_was(name: str) -> None:
    call, words = REFUSED[name]
    network, good = Net(call), Net(lambda net, x: net.head(net.layer(x)))
    before = process_state()
    with pytest.raises(CaptureError) as caught:
        captured(network)
    assert words in str(caught.value)
    assert 'parallel_mode="data_parallel"' in str(caught.value)
    assert "\n" not in str(caught.value)
    if name != "default dtype":  # which is seen when the whole call was traced
        assert re.match(re.escape(__file__) + r":\d+: ", str(caught.value)), caught.value
    assert process_state() == before
    operators = [str(node.target) for node in captured(good).graph.nodes]
    assert operators.count("aten.linear.default") == 2


class Odd(Exception):
    pass


def _raises(error: Callable[[Tensor], Exception]) -> Callable[[Any, Tensor], Tensor]:
    def forward(_: Any, x: Tensor) -> Tensor:
        raise error(x)

    return forward


@pytest.mark.parametrize(
    ("forward", "kind", "words"),
    [
        (_raises(lambda x: ValueError(f"{x.shape[1]} columns")), ValueError, "4 columns"),
        (_raises(lambda _: Odd("odd", 3)), Odd, "3"),
        (lambda _, x: {"a": x}["b"], KeyError, "b"),
        (lambda net, _: net.nothing, AttributeError, "nothing"),
    ],
    ids=["ValueError", "own class", "KeyError", "AttributeError"],
)
def test_exception_of_the_network_keeps_its_type_and_tells_its_line(
    forward: Callable[..., Tensor], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        captured(Net(forward))
    assert Path(__file__).name in caught.value.__notes__[0]


def test_arrays_of_numpy_are_followed_like_other_constants() -> None:
    network = Net(lambda net, x: net.layer(x)[:, :4] * torch.from_numpy(net.scale), scale=np.ones(4, np.float32))
    graph = captured(network)
    x = torch.ones(2, 4)
    assert graph.traced.holds(network, (x,), {})
    assert graph.traced.holds(network, (x,), {})
    network.scale = np.ones(4, np.float64)
    assert not graph.traced.holds(network, (x,), {})


def _ctc(net: Any, x: Tensor) -> Tensor:
    rows = net.head(net.layer(x)).log_softmax(-1)[:, None]
    return F.ctc_loss(rows, torch.tensor([[1]]), torch.tensor([2]), torch.tensor([1]))


@pytest.mark.parametrize(
    ("network", "operator"),
    [
        (Net(_ctc), "aten.ctc_loss.Tensor"),
        (
            Net(
                lambda net, x: checkpoint_sequential(
                    nn.Sequential(net.layer, net.head, net.layer), 2, x, use_reentrant=False
                )
            ),
            "aten.linear.default",
        ),
        (Net(lambda net, x: net.last(x), last=parametrizations.spectral_norm(nn.Linear(4, 4))), "aten.div.Tensor"),
    ],
    ids=["ctc", "checkpoint_sequential", "spectral_norm"],
)
def test_functions_that_dynamo_does_not_follow_alone_are_captured(network: nn.Module, operator: str) -> None:
    assert operator in [str(node.target) for node in captured(network).graph.nodes]


@torch.compiler.allow_in_graph
def _allowed(x: Tensor) -> Tensor:
    return x.sigmoid() * 2


@pytest.mark.parametrize(
    "call",
    [
        lambda h: torch.fft.rfft(h).abs(),
        lambda h: h * torch.signal.windows.hann(8),
        lambda h: torch.linalg.vector_norm(h) + torch.special.expit(h),
        lambda h: rnn.pad_sequence(list(h), batch_first=True),
        lambda h: torch.masked.sum(h, mask=torch.ones(2, 8, dtype=torch.bool)),
        lambda h: h + torch.from_numpy(np.ones(8, np.float32) * 2),
        lambda h: torch.Tensor.add(h, h).T.mT,
        _allowed,
    ],
    ids=["fft", "window", "linalg and special", "padding", "masked", "numpy", "methods", "allow_in_graph"],
)
def test_list_of_operators_is_not_too_short(call: Callable[[Tensor], Tensor]) -> None:
    captured(Net(lambda net, x: call(net.layer(x))))


def test_inference_mode_in_forward_records_no_gradients() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            fixed = net.layer(x)
        return net.head(net.layer(x)) + fixed.sum()

    targets = [str(node.target) for node in captured(Net(forward)).graph.nodes]
    assert "aten.detach.default" in targets
