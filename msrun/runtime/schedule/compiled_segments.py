"""torch.compile of a program's segments, one by one: what lies between them stays in the runtime's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed

from msrun.errors import CaptureError, StrategyError, near_miss
from msrun.runtime.schedule.deferred_weights import count_deferred
from msrun.runtime.schedule.segments import Segment

MODES = ("default", "max-autotune-no-cudagraphs")
"""Those whose results stay: of CUDA graphs the next run writes over them, and copies of a batch are held at once."""


@dataclass(frozen=True)
class CompileSpec:
    """What segments are compiled with.

    Raises:
        StrategyError: a backend or a mode that there is not.
    """

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None

    def __post_init__(self) -> None:
        known = torch.compiler.list_backends(exclude_tags=())
        if not callable(self.backend) and self.backend not in known:
            raise StrategyError(
                f"compile(backend={self.backend!r}){near_miss(str(self.backend), known)}: must be a function or one of "
                f"{', '.join(torch.compiler.list_backends())}, aot_eager, eager"
            )
        if self.mode is not None and (self.mode not in MODES or self.backend != "inductor"):
            raise StrategyError(
                f"compile(mode={self.mode!r}) with backend {self.backend!r}: must be {' or '.join(MODES)}, of "
                "inductor; CUDA graphs would write over the results of earlier segments"
            )


def compile_segments(segments: Sequence[Segment], spec: CompileSpec) -> str:
    """Let segments run compiled, and return a note that says how many.

    Those of the host, of recomputed modules and with deferred weight gradients run as they are; so does, inside the
    others, what is no operator of torch: random numbers follow from step and place, which change with every step.
    """
    mine = [segment for segment in segments if segment.writes]
    chosen = [each for each in mine if each.region is None and not each.on_host and not count_deferred([each])]
    for segment in chosen:
        segment.run = _compiled(segment.module, spec)
    for segment in segments:  # compiled code may keep, and share, other values than its operators: nothing writes there
        segment.crossings = [replace(each, takes_source=False, takes_gradient=False) for each in segment.crossings]
    backend = spec.backend if isinstance(spec.backend, str) else getattr(spec.backend, "__name__", "a function")
    return f"torch.compile ({backend}) of {len(chosen)} of {len(mine)} segments"


def _compiled(module: fx.GraphModule, spec: CompileSpec) -> Callable[..., Any]:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__module__", "").startswith("msrun."):
            node.target = torch.compiler.disable(node.target)
    compiled: Callable[..., Any] = torch.compile(
        fx.GraphModule(module, graph), backend=spec.backend, mode=spec.mode, dynamic=False
    )

    def run(*inputs: Any) -> Any:
        try:
            return compiled(*inputs)
        except BackendCompilerFailed as error:
            reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
            raise CaptureError(f"compile(): {reason[:300]}; leave compile() out, or choose another backend") from error

    return run
