"""Segments under torch.compile: the numbers of the operators one by one, and what is not compiled."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from placed_parameters import placed
from torch import Tensor, nn

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.parallel.batch.parts import BatchParts
from msrun.runtime.parallel.compilation.build_call import build_compiled_call
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.partition.partition import partition
from msrun.runtime.schedule.compiled_segments import CompileSpec
from msrun.runtime.schedule.replay import RecomputeSpec
from msrun.runtime.sharding.layout import TensorLayout, build_mesh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu())


def results(compiler: CompileSpec | None, copies: int = 1, **words: Any) -> tuple[list[Tensor], list[str]]:
    """Return results, gradients and buffers after two steps, and the notes of the plan."""
    network, mesh, x = Net(), build_mesh(1), torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)
    rows = [8 // copies, 6]
    graph = capture(find_target(network), [x[: rows[0]]], {}, input_shapes=[tuple(rows)], parameter_shapes={})
    layout = TensorLayout.replicated(2)
    program = partition(graph, mesh, input_layouts=[layout], strategies={}, output_batch_axes=())
    stored = {name: placed(name, parameter) for name, parameter in network.named_parameters()}
    words |= {"settings": ParallelSettings(compiler=compiler), "parts": BatchParts((("copies", copies),))}
    buffers = dict(network.named_buffers())
    call = build_compiled_call(graph, program, stored, buffers, mesh=mesh, rank=0, **words)
    found = []
    for _ in range(2):
        found.append(call.run([x])[0])
        found[-1].square().sum().backward()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    return [*(value.detach() for value in found), *gradients, *network.buffers()], program.notes


def assert_equal(found: list[Tensor], expected: list[Tensor], rtol: float = 1e-12) -> None:
    assert len(found) == len(expected) > 6
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("copies", [1, 2])
def test_what_is_compiled_gives_the_same(copies: int) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    found, notes = results(CompileSpec(backend), copies)
    assert_equal(found, results(None, copies)[0])
    assert "torch.compile (backend) of 1 of 1 segments" in notes
    assert torch.ops.aten.linear.default in {node.target for graph in graphs for node in graph.graph.nodes}


def test_backward_pass_is_compiled_too() -> None:
    assert_equal(results(CompileSpec("aot_eager"))[0], results(None)[0])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_code_of_inductor_gives_the_same() -> None:
    assert_equal(results(CompileSpec())[0], results(None)[0], 1e-10)


def test_recomputed_modules_run_as_they_are() -> None:
    again = {"a": RecomputeSpec()}
    found, notes = results(CompileSpec("eager"), recompute=again)
    assert_equal(found, results(None, recompute=again)[0])
    assert "torch.compile (eager) of 2 of 3 segments" in notes


def test_backend_that_fails_is_one_line() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise RuntimeError("no compiler here\nand more")

    with pytest.raises(CaptureError, match=r"compile\(\): .*no compiler here.*; leave compile\(\) out, or choose"):
        results(CompileSpec(backend))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"backend": "inducter"}, r"compile\(backend='inducter'\) \(did you mean inductor\?\): must be a function or"),
        ({"mode": "reduce-overhead"}, r"compile\(mode='reduce-overhead'\).*CUDA graphs would write over"),
        ({"backend": "eager", "mode": "default"}, "of inductor"),
    ],
)
def test_wrong_backends_and_modes_are_refused(words: dict[str, Any], reason: str) -> None:
    with pytest.raises(StrategyError, match=reason):
        AutoParallel(Net()).compile(**words)


def test_modes_without_capture_have_no_segments_to_compile() -> None:
    with pytest.raises(StrategyError, match="needs a captured graph"):
        AutoParallel(Net(), parallel_mode="data_parallel").compile()
