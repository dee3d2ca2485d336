"""Activations: the bytes that one rank keeps between a forward and a backward pass, found without computing.

The segments run once on fake tensors of the local shapes, with autograd; what the operators save is counted, storage
by storage. That is exact for any operator, views and shared storages included. Parameters, buffers, the user's own
batch and what lies on the host beside a device are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.partition.local_values import cross_on_fakes
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.schedule.replay import Replay, SavePolicy
from msrun.runtime.schedule.segments import Crossing, Name, Segment
from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.sharding.operators.rule import fake_given


@dataclass(frozen=True)
class ActivationEstimate:
    """Bytes on one rank, during one micro batch."""

    kept_bytes: int
    """From the forward to the backward pass, per copy."""
    again_bytes: int
    """More for the recomputed region that needs most, while it is run again; per copy."""
    copies: int

    @property
    def peak_bytes(self) -> int:
        """At the most, of all copies."""
        return self.copies * (self.kept_bytes + self.again_bytes)

    def __str__(self) -> str:
        copies = f" for each of {self.copies} copies" if self.copies > 1 else ""
        return (
            f"activations {self.peak_bytes / 2**20:.2f} MB: {self.kept_bytes / 2**20:.2f} MB kept and "
            f"{self.again_bytes / 2**20:.2f} MB computed again{copies}"
        )


class _Storages:
    """A set of storages, counted in bytes."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._kept: list[Tensor] = []
        """So that no storage comes to have another's address."""
        self._bytes: dict[int, int] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._kept.append(tensor)
        self._bytes[storage._cdata] = storage.nbytes()

    def bytes_beside(self, *others: _Storages) -> int:
        """Return the bytes of storages that none of the others holds."""
        return sum(size for key, size in self._bytes.items() if all(key not in other._bytes for other in others))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Add what autograd saves."""

        def pack(tensor: Tensor) -> Tensor:
            self.add(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def estimate_activations(
    captured: CapturedGraph,
    program: LocalProgram,
    segments: Sequence[Segment],
    replays: Sequence[Replay],
    buffers: Mapping[Name, Tensor],
    trainable: frozenset[str],
    copies: int,
) -> ActivationEstimate:
    """Return what a training step keeps.

    Args:
        buffers: placeholder -> value.
        trainable: names of parameters that have a gradient.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.enable_grad():
        values = _given(captured, program, buffers, trainable, mode)
        run = _Run(program.mesh, segments, replays, values)
        return ActivationEstimate(run.forward(), run.again(), copies)


def _given(
    captured: CapturedGraph,
    program: LocalProgram,
    buffers: Mapping[Name, Tensor],
    trainable: frozenset[str],
    mode: FakeTensorMode,
) -> dict[Name, Tensor]:
    """Return placeholder -> a fake tensor of what it holds on a rank."""
    seen = {node.name: node.meta["val"] for node in captured.graph.nodes if node.op == "placeholder"}
    values: dict[Name, Tensor] = {name: mode.from_tensor(value) for name, value in buffers.items()}
    values |= fake_given()
    for name, use in program.parameters.items():
        device = seen[use.node.name].device
        fake = torch.empty(use.layout.local_shape(program.mesh, use.shape), dtype=use.dtype, device=device)
        values[use.node.name] = fake.requires_grad_(name in trainable)
    for node, layout in zip(program.inputs, program.input_layouts, strict=True):
        whole = seen[node.name]
        fake = torch.empty(layout.local_shape(program.mesh, whole.shape), dtype=whole.dtype, device=whole.device)
        values[node.name] = fake.requires_grad_(whole.requires_grad)
    return values


class _Run:
    def __init__(
        self, mesh: Mesh, segments: Sequence[Segment], replays: Sequence[Replay], values: dict[Name, Tensor]
    ) -> None:
        self._mesh = mesh
        self._segments = segments
        self._replays = replays
        self._values = values
        self._given = _Storages(values.values())
        self._on_host = {name for segment in segments if segment.on_host for name in segment.writes}
        self._on_host |= {c.result for s in segments for c in s.crossings if c.collective.kind == "to_host"}
        self._kept = _Storages()

    def forward(self) -> int:
        """Return the bytes that are kept after the forward pass."""
        given = dict(self._values)
        for index, segment in enumerate(self._segments):
            replay = None if segment.region is None else self._replays[segment.region]
            self._segment(segment, self._kept if replay is None and not segment.on_host else _Storages(), replay)
            for crossing in segment.crossings:
                self._values[crossing.result] = self._cross(crossing)
            if replay is not None and index == replay.last:
                for name in replay.dropped:
                    self._values.pop(name, None)
        for name, value in self._values.items():
            if name not in given and name not in self._on_host:
                self._kept.add(value)
        return self._kept.bytes_beside(self._given)

    def again(self) -> int:
        """Return the bytes that the greatest region takes beside those, when it runs again."""
        most = 0
        for replay in self._replays:
            before = dict(self._values)
            found = _Storages()
            for index in replay.steps:
                if index in replay.segments:
                    on_host = self._segments[index].on_host
                    self._segment(self._segments[index], _Storages() if on_host else found, None)
                for crossing in replay.crossings.get(index, []):
                    self._values[crossing.result] = self._cross(crossing)
                    if crossing.result not in self._on_host:
                        found.add(self._values[crossing.result])
            most = max(most, found.bytes_beside(self._given, self._kept))
            self._values = before
        return most

    def _segment(self, segment: Segment, saved: _Storages, replay: Replay | None) -> None:
        if segment.is_empty:
            return
        inputs = [self._values[name] for name in segment.reads]
        with saved.saving():
            if replay is not None and replay.save is not None:
                written = _Keeping(segment.module, replay.save, self._kept).run(*inputs)
            else:
                written = segment.module(*inputs)
        for name, value in zip(segment.writes, written, strict=True):
            saved.add(value)
            self._values.setdefault(name, value.detach().requires_grad_(value.requires_grad))

    def _cross(self, crossing: Crossing) -> Tensor:
        """Return a tensor like the result of a collective."""
        value = self._values[crossing.source]
        if crossing.takes_source:
            return value.detach().requires_grad_(value.requires_grad)
        return cross_on_fakes(value, crossing.collective, self._mesh)


class _Keeping(fx.Interpreter):
    """Runs a segment and notes the results of the operators that the user wants kept."""

    def __init__(self, module: fx.GraphModule, policy: SavePolicy, kept: _Storages) -> None:
        super().__init__(module)
        self._policy = policy
        self._kept_results = kept

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and self._policy(n.target):
            for value in result if isinstance(result, tuple | list) else (result,):
                self._kept_results.add(value)
        return result
