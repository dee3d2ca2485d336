"""The price of decisions: seconds and bytes of one training step of one rank, summed up from its events.

Compute follows the roofline, messages the alpha-beta model (see `msrun.runtime.cost`); nothing overlaps, so the seconds
are an upper bound of what the same figures give when messages travel while operators compute. Bytes of parameters,
optimizer state and messages are exact; what is kept between the passes is counted from what every operator saves.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields

import torch
from torch import fx

from msrun.runtime.capture.assignment import layout_constraint
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.cost.operators import copy_work, message_seconds
from msrun.runtime.partition.collective_messages import (
    LocalCollective,
    Message,
    Totals,
    gathers_of_parameter,
    sums_of_gradient,
)
from msrun.runtime.partition.events import StepEvents, tell, work_seconds
from msrun.runtime.partition.partition import lower
from msrun.runtime.partition.program import ORIGIN, OWN, Decisions
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.rule import apply_collective, operator_call

RESULTS = "results"


@dataclass(frozen=True)
class GradientFlow:
    """Which values of a captured graph have a gradient, and to which one comes back in a step."""

    differentiable: Set[fx.Node]
    """Nodes that would be given a gradient."""
    reached: Set[fx.Node]
    """Nodes that get one: gradients enter at the loss, see `StepEvents.reached`."""

    @classmethod
    def of(cls, captured: CapturedGraph, events: StepEvents) -> GradientFlow:
        """Return what the events of any way to cut a graph say: all of them say the same."""
        local = {node.name: node for node in events.program.graph.nodes if node.op == "placeholder"}
        local |= {use.node.name: use.node for use in events.program.parameters.values()}
        local |= {name: node for name, (node, _) in events.program.values.items()}
        found: set[fx.Node] = set()
        for node in captured.graph.nodes:
            if layout_constraint(node) is not None:
                has_gradient = node.args[0] in found
            else:
                results = [node, *(user for user in node.users if user.target is operator.getitem)]
                values = [events.values.get(local[each.name]) for each in results if each.name in local]
                has_gradient = any(value is not None and value.requires_grad for value in values)
            if has_gradient:
                found.add(node)
        results = [node for node in captured.outputs if isinstance(node, fx.Node) and node in found]
        waiting = [node for node in results if not node.meta["val"].shape][:1] or results
        reached: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in reached and node in found:
                reached.add(node)
                waiting += node.all_input_nodes
        return cls(found, reached)


@dataclass(frozen=True)
class StepSpec:
    """What of a step the decisions do not say."""

    shard_axes: Mapping[str, Axes] = field(default_factory=dict)
    """parameter -> axes by which optimizer parallel cuts its dimension 0 further"""
    regathers: bool = False
    """Cut parameters are gathered again for the backward pass: level3."""
    optimizer_states: int = 2
    """Tensors of a parameter's size that the optimizer keeps for it: 2 of Adam, 1 of SGD with momentum."""
    sums_wide: bool = True
    """Gradients of 16 bits travel in float32."""
    bucket_bytes: int | None = 25 * 2**20
    """Parameters of at most so many bytes share a message; None: no limit."""
    alone_bytes: int | None = None
    """A parameter of so many bytes shares none; None: all do."""

    def is_alone(self, nbytes: int) -> bool:
        """Return whether a parameter of so many bytes, as a rank stores it, travels alone."""
        return self.alone_bytes is not None and nbytes >= self.alone_bytes

    def summed_bytes(self, nbytes: int, dtype: torch.dtype) -> int:
        """Return the bytes in which gradients of so many bytes travel."""
        is_half = dtype in (torch.float16, torch.bfloat16)
        return 2 * nbytes if is_half and self.sums_wide else nbytes


@dataclass(frozen=True)
class PricedMessage:
    """One message and how long it takes."""

    message: Message
    axes: Axes
    seconds: float


@dataclass
class OperatorPrice:
    """One operator, with the collectives that bring its inputs and those of its own."""

    name: str
    """Of its captured node; "results" for what leaves the graph."""
    module_path: str = ""
    forward_s: float = 0.0
    """Computing."""
    backward_s: float = 0.0
    forward_messages: list[PricedMessage] = field(default_factory=list)
    backward_messages: list[PricedMessage] = field(default_factory=list)


@dataclass(frozen=True)
class PriceSummary:
    """A price in a few numbers, for plans."""

    seconds: float
    """One training step, with nothing overlapped."""
    compute_s: float
    communication_s: float
    update_s: float
    """The optimizer's step: it reads and writes parameters, gradients and state."""
    parameter_bytes: int
    """At rest."""
    gathered_bytes: int
    """Parameters that are stored cut, while operators read them."""
    gradient_bytes: int
    """As operators make them, before they are cut."""
    optimizer_bytes: int
    activation_bytes: int
    """Kept from the forward to the backward pass."""
    traffic_bytes: dict[str, int]
    """Operation -> bytes of its inputs on one rank; parameters that travel together are counted one by one."""

    @property
    def memory_bytes(self) -> int:
        """What the device must hold at the peak."""
        own = self.parameter_bytes + self.gathered_bytes + self.gradient_bytes + self.optimizer_bytes
        return own + self.activation_bytes

    @property
    def memory_text(self) -> str:
        """What of the memory is which, in MB."""
        kinds = {
            "parameters": self.parameter_bytes + self.gathered_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activation_bytes,
        }
        return ", ".join(f"{name} {size / 2**20:.1f}" for name, size in kinds.items())

    def __str__(self) -> str:
        return (
            f"{self.seconds * 1e3:.3f} ms a step: computing {self.compute_s * 1e3:.3f}, messages "
            f"{self.communication_s * 1e3:.3f}, update {self.update_s * 1e3:.3f}; "
            f"{self.memory_bytes / 2**20:.1f} MB: {self.memory_text}"
        )


@dataclass(frozen=True)
class Price(PriceSummary):
    """Seconds and bytes of one training step on one rank, with what they are made of."""

    forward_s: float
    """The forward pass, with its messages and the gathers of parameters."""
    operators: tuple[OperatorPrice, ...]
    gathers: tuple[PricedMessage, ...]
    """Of parameters that are stored cut."""
    sums: tuple[PricedMessage, ...]
    """Of gradients of parameters."""
    activations: Mapping[str, int]
    """captured operator -> bytes of what it makes, or brings to itself, and is kept between the passes"""

    @property
    def summary(self) -> PriceSummary:
        """The price in a few numbers."""
        return PriceSummary(*(getattr(self, each.name) for each in fields(PriceSummary)))


def price(
    captured: CapturedGraph,
    decisions: Decisions,
    device: DeviceProfile,
    step: StepSpec | None = None,
    *,
    rank: int | None = None,
    events: StepEvents | None = None,
) -> Price:
    """Return the price of one training step of one part of the batch.

    Args:
        rank: only parts of halos differ between ranks; None: the mesh's first.
        events: of these decisions, where they have been told already.
    """
    events = events or tell(lower(captured, decisions))
    rank = decisions.mesh.first_rank if rank is None else rank
    return _Pricing(captured, events, device, step or StepSpec(), rank).run()


class _Pricing:
    """Sums up the events of a step."""

    def __init__(
        self, captured: CapturedGraph, events: StepEvents, device: DeviceProfile, step: StepSpec, rank: int
    ) -> None:
        self._captured = captured
        self._events = events
        self._mesh: Mesh = events.program.mesh
        self._device = device
        self._step = step
        self._rank = rank
        self._filled: dict[tuple[str, Axes], int] = {}
        """Kind of messages of parameters -> bytes in the one that is open."""
        self._waited: set[bool] = set()
        """Whether gathers (True) and gradients have been waited for."""

    def run(self) -> Price:
        calls = [node for node in self._captured.graph.nodes if node.op == "call_function"]
        prices = {
            node.name: OperatorPrice(node.name, operator_call(node).module_path)
            for node in calls
            if node.target is not operator.getitem
        }
        prices[RESULTS] = OperatorPrice(RESULTS)
        with_messages: set[str] = set()
        for event in self._events.events:
            own = prices[_owner(event.node)]
            own.forward_s += work_seconds([event.forward], self._device)
            if event.node in self._events.reached:
                own.backward_s += work_seconds([event.backward], self._device)
            if event.crossing is not None:
                is_own = OWN in event.node.meta  # ranks come to the first of these from computing
                self._add_messages(own, self._events.crossing(event), waits=not is_own or own.name not in with_messages)
                with_messages |= {own.name} if is_own else set()
        return self._with_parameters(tuple(prices.values()))

    def _kept_bytes(self) -> dict[str, int]:
        """Return for every operator the bytes that are kept between the passes beside what exists before the step."""
        events, kept, found = self._events, set[int](), dict[str, int]()
        for event in events.events:
            if event.node in events.reached or event.node.target is apply_collective:
                kept |= event.saved
        for storage in (events.storages[number] for number in sorted(kept - events.given)):
            name = _owner(storage.maker)
            found[name] = found.get(name, 0) + storage.nbytes
        return found

    # -- messages -----------------------------------------------------------------------------------------------

    def _add_messages(self, owner: OperatorPrice, collective: LocalCollective, *, waits: bool) -> None:
        axes, copies = collective.collective.axes, collective.copies(self._mesh)
        own_s = [sum(copy_work(nbytes).seconds(self._device) for nbytes in each) for each in copies]
        owner.forward_s, owner.backward_s = owner.forward_s + own_s[0], owner.backward_s + own_s[1]
        for message, found in zip(
            collective.messages(self._mesh, self._rank), (owner.forward_messages, owner.backward_messages), strict=True
        ):
            if message is not None:
                found.append(self._priced(message, axes, waits=waits))

    def _priced(self, message: Message, axes: Axes, *, waits: bool) -> PricedMessage:
        seconds = message_seconds(message.operation, message.bytes, self._mesh, axes, self._device, waits=waits)
        return PricedMessage(message, axes, seconds)

    def _fused(self, message: Message, axes: Axes, stored: int) -> PricedMessage:
        """Return a message that travels with others of its kind: the first one of a bucket takes what a start takes.

        They travel while operators compute, so that a step waits for gathers once, and for gradients once.

        Args:
            stored: bytes of the parameter as this rank stores it.
        """
        key, limit = (message.operation, axes), self._step.bucket_bytes
        is_gather = message.operation == "all_gather"
        priced = self._priced(message, axes, waits=is_gather not in self._waited)
        self._waited.add(is_gather)
        if self._step.is_alone(stored):
            return priced
        filled = self._filled.get(key)
        if filled is None or (limit is not None and filled + stored > limit):
            self._filled[key] = stored
            return priced
        self._filled[key] = filled + stored
        empty = message_seconds(message.operation, 0, self._mesh, axes, self._device, waits=False)
        return PricedMessage(message, axes, max(0.0, priced.seconds - empty))

    # -- parameters ---------------------------------------------------------------------------------------------

    def _with_parameters(self, operators: tuple[OperatorPrice, ...]) -> Price:
        gathers: list[PricedMessage] = []
        sums: list[PricedMessage] = []
        stored_bytes = gathered_bytes = gradient_bytes = optimizer_bytes = 0
        for name, use in self._events.program.parameters.items():
            shards = self._step.shard_axes.get(name, ())
            used = self._events.values[use.node].nbytes
            stored = used // self._mesh.extent(shards)
            stored_bytes += stored
            if shards:
                gathered_bytes += used
                times = 2 if self._step.regathers else 1
                gathers += [
                    self._fused(gathers_of_parameter(stored, shards, self._mesh), shards, stored) for _ in range(times)
                ]
            if not self._events.values[use.node].requires_grad:
                continue
            optimizer_bytes += self._step.optimizer_states * stored
            if use.node not in self._events.reached:
                continue
            gradient_bytes += used
            if not use.has_row_gradient:
                size = self._step.summed_bytes(stored, use.dtype)
                for message, axes in sums_of_gradient(size, shards, use.partial_axes, self._mesh):
                    sums.append(self._fused(message, axes, stored))
        kept = self._kept_bytes()
        there = [*(m for each in operators for m in each.forward_messages), *gathers]
        back = [*(m for each in operators for m in each.backward_messages), *sums]
        compute_s = sum(each.forward_s for each in operators), sum(each.backward_s for each in operators)
        messages_s = sum(each.seconds for each in there), sum(each.seconds for each in back)
        touched = 2 * (stored_bytes + optimizer_bytes) + gradient_bytes
        update_s = touched / self._device.memory_bandwidth
        return Price(
            seconds=sum(compute_s) + sum(messages_s) + update_s,
            compute_s=sum(compute_s),
            communication_s=sum(messages_s),
            update_s=update_s,
            parameter_bytes=stored_bytes,
            gathered_bytes=gathered_bytes,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=optimizer_bytes,
            activation_bytes=sum(kept.values()),
            traffic_bytes=Totals.of(each.message for each in (*there, *back)).bytes,
            forward_s=compute_s[0] + messages_s[0],
            operators=operators,
            gathers=tuple(gathers),
            sums=tuple(sums),
            activations=kept,
        )


def _owner(node: fx.Node) -> str:
    """Return the captured operator that a local node was made for."""
    return node.meta[ORIGIN].name if ORIGIN in node.meta else RESULTS
