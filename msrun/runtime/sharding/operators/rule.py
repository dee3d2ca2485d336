"""What a rule says about one operator: how its dimensions hang together, and how its local part is computed.

A rule names the dimensions of every input and of the output with labels, as in an einsum. Everything else follows:

- a strategy gives each label a number of parts; a label has one number wherever it stands;
- a label that stands in an input but not in the output is summed over: split, it leaves partial sums to all-reduce;
- an input that lacks a split label is used in full by several parts of the work: its gradient is a partial sum, so it
  passes an `enter` collective first;
- a label in `whole`, and a dimension without a label (None), must not be split.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout

Label = str | None
Labels = tuple[Label, ...]
LabelSplit = Mapping[str, Axes]

STRATEGY = "msrun_strategy"
"""Key of a captured node's meta: the strategy that the user gave the operator."""
CHECKPOINT = "checkpoint"
"""Key of a captured node's meta: number of the block under torch.utils.checkpoint that it stands in."""
IS_CAST = "autocast_cast"
"""Key of a captured node's meta: a cast that autocast makes; it keeps its input's layout."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NOT_THE_USERS = (f"{os.sep}torch{os.sep}", f"{os.sep}msrun{os.sep}runtime{os.sep}", "<")

PLACE = "msrun_place"
DRAW = "msrun_draw"
"""Values of a local graph that come from the executor."""
INSIDE = "msrun_inside"
"""Key of a local operator's meta: the collective that it runs itself, on its first input and while it computes."""


@dataclass(frozen=True)
class Limit:
    """What a label's number of parts must be, beyond dividing its size."""

    allows: Callable[[int], bool]
    text: str
    """The condition in words, for an error."""


@dataclass(frozen=True)
class Form:
    """The dimensions of one operator call."""

    inputs: tuple[Labels, ...]
    """One tuple per tensor input, one label per dimension."""
    output: Labels
    sizes: Mapping[str, int]
    """Global size of every label."""
    whole: frozenset[str] = field(default_factory=frozenset)
    """Labels that must not be split."""
    others: tuple[Labels, ...] = ()
    """Dimensions of the second and further results, of an operator with several."""
    added: frozenset[int] = field(default_factory=frozenset)
    """Inputs that join after partial sums were made whole, such as a bias: summed labels do not concern them."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """Labels that not every divisor of their size may cut."""
    shared_out: Mapping[int, int] = field(default_factory=dict)
    """Input -> its dimension that is cut over all ranks, whatever the split: the operator exchanges what it reads of it
    and the gradient."""
    ways: Mapping[str, str] = field(default_factory=dict)
    """Label of no dimension -> the label whose dimensions it cuts: the operator then computes in another way."""

    @property
    def summed(self) -> tuple[str, ...]:
        """Labels that stand in an input and not in the output, in order of appearance."""
        seen = dict.fromkeys(label for labels in self.inputs for label in labels if label is not None)
        return tuple(label for label in seen if label not in self.output)

    def can_split(self, label: Label, parts: int) -> bool:
        """Return True when `label` may be cut into this many parts."""
        if label is None or label in self.whole or self.sizes[label] % parts:
            return False
        return parts == 1 or label not in self.limits or self.limits[label].allows(parts)

    def entered(self, index: int, split: LabelSplit) -> Axes:
        """Return the axes along which several parts of the work use input `index` in full."""
        if index in self.shared_out:
            return ()
        own = {*self.inputs[index], *(self.summed if index in self.added else ())}
        own |= {way for way, label in self.ways.items() if label in own}
        return tuple(sorted(axis for label, axes in split.items() if label not in own for axis in axes))

    def layout_of_input(self, index: int, split: LabelSplit, mesh: Mesh) -> TensorLayout:
        """Return the layout in which the operator reads input `index`."""
        labels = self.inputs[index]
        if index not in self.shared_out:
            return self.layout(labels, split)
        return TensorLayout(tuple(mesh.axes if dim == self.shared_out[index] else () for dim in range(len(labels))))

    def layout(self, labels: Labels, split: LabelSplit) -> TensorLayout:
        """Return the layout of a tensor with these labels."""
        for way, label in self.ways.items():
            if way in split:
                split = {**split, label: split[way]}
        return TensorLayout(tuple(split.get(label, ()) if label is not None else () for label in labels))


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator in the captured graph."""

    node: fx.Node
    tensors: tuple[fx.Node, ...]
    """Its tensor inputs in order of appearance."""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Global shapes of the tensor inputs."""
        return [tuple(node.meta["val"].shape) for node in self.tensors]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Global shape of the output; of the first one, of an operator with several."""
        return self.output_shapes[0]

    @property
    def output_shapes(self) -> list[tuple[int, ...]]:
        """Global shapes of all results."""
        value = self.node.meta["val"]
        return [tuple(result.shape) for result in ([value] if isinstance(value, torch.Tensor) else value)]

    @property
    def reads_others(self) -> bool:
        """Whether anybody reads the second result or a further one."""
        return any(user.users and user.args[1] != 0 for user in self.node.users)

    @property
    def operator(self) -> str:
        """The operator as the user knows it: that of torch's graph, also where a capture has replaced it."""
        return str(self.node.meta.get("operator", self.node.target))

    @property
    def module_path(self) -> str:
        """Dotted path of the module that called the operator; empty outside any."""
        paths = [path for path, _ in self.node.meta.get("nn_module_stack", {}).values()]
        return paths[-1] if paths else ""

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its schema name, wherever it was given; `default` of an operator without it."""
        schema = self.node.target._schema  # type: ignore[union-attr]
        for index, argument in enumerate(schema.arguments):
            if argument.name == name:
                given = self.node.args[index:]
                return given[0] if given else self.node.kwargs.get(name, argument.default_value)
        return default

    def dimensions(self, name: str = "dim") -> set[int]:
        """Return the dimensions that an argument names, counted from 0; all of them where it names none."""
        count, given = len(self.shapes[0]), self.argument(name)
        return {dim % max(1, count) for dim in ([given] if isinstance(given, int) else given or range(count))}

    def dimension(self, name: str = "dim") -> int:
        """Return the one dimension that an argument names, counted from 0."""
        (dim,) = self.dimensions(name)
        return dim


def operator_call(node: fx.Node) -> OperatorCall:
    """Return the call behind a node of the captured graph."""
    tensors: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: tensors.append(n) or n)  # type: ignore[func-returns-value]
    return OperatorCall(node, tuple(n for n in tensors if isinstance(n.meta.get("val"), torch.Tensor)))


def find_module(path: str, among: Collection[str]) -> str | None:
    """Return the innermost of these modules that `path` is or lies in; None when there is none."""
    parts = path.split(".") if path else []
    return next((prefix for end in range(len(parts), -1, -1) if (prefix := ".".join(parts[:end])) in among), None)


def user_line(node: fx.Node) -> str:
    """Return where the user's code calls a traced operator, FILE:LINE; empty when that is not known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f"{path}:{line}" for path, line in frames if not any(part in path for part in _NOT_THE_USERS)]
    return own[-1] if own else ""


def line_of_use(node: fx.Node) -> str:
    """Return where the user's code first reads a value of a traced graph, FILE:LINE; empty when that is not known."""
    return next(filter(None, map(user_line, node.users)), "")


def numbers_given(value: torch.Tensor) -> list[int]:
    """Return the numbers that the executor gave; zeros while shapes are inferred on fake tensors."""
    return [0] * value.numel() if isinstance(value, FakeTensor) else value.reshape(-1).tolist()


def fake_given() -> dict[str, torch.Tensor]:
    """Return what the executor gives, as tensors of the right shapes, for runs on fake tensors."""
    return {PLACE: torch.empty((), dtype=torch.int64), DRAW: torch.empty(5, dtype=torch.int64)}


class LocalBuilder:
    """Writes the local graph. Rules use it; the partition owns it."""

    def __init__(self, graph: fx.Graph, mesh: Mesh) -> None:
        self.graph = graph
        self.mesh = mesh
        self.packed: dict[fx.Node, dict[int, fx.Node]] = {}
        """first result of an operator -> all of its results, where they are values of their own"""
        self._given: dict[str, fx.Node] = {}
        self.scatter: tuple[int, Axes] | None = None
        """Dimension and axes that the operator being written leaves its sums cut by, instead of whole."""

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add one local operator."""
        return self.graph.call_function(target, args, kwargs)

    def place(self) -> fx.Node:
        """Return what the executor gives: this rank's number in the mesh, as an integer tensor on the host.

        The local graph is the same on every rank; what differs between ranks comes in as this value.
        """
        return self._from_executor(PLACE)

    def draw(self) -> fx.Node:
        """Return what the executor gives: where the random numbers of this step and copy come from."""
        return self._from_executor(DRAW)

    def _from_executor(self, name: str) -> fx.Node:
        if name not in self._given:
            self._given[name] = self.graph.placeholder(name)
        return self._given[name]

    def collective(self, collective: Collective, value: fx.Node) -> fx.Node:
        """Add one collective."""
        return self.graph.call_function(apply_collective, (value,), {"collective": collective})  # type: ignore[dict-item]

    def pack(self, results: Mapping[int, fx.Node]) -> fx.Node:
        """Return the first result; `operator.getitem` of the captured operator will find the others."""
        self.packed[results[0]] = dict(results)
        return results[0]

    def sum_over(self, value: fx.Node, axes: Axes) -> fx.Node:
        """Make partial sums whole, or this rank's part of them where `scatter` says so; nothing without axes."""
        if axes and self.scatter is not None:
            dim, cut = self.scatter
            value = self.collective(Collective("reduce_scatter", cut, dim), value)
            axes = tuple(axis for axis in axes if axis not in cut)
        return self.collective(Collective("all_reduce", axes), value) if axes else value


def collective_of(node: fx.Node) -> Collective | None:
    """Return the collective that a local node is, or runs inside."""
    found = node.kwargs["collective"] if node.target is apply_collective else node.meta.get(INSIDE)
    return cast("Collective | None", found)


def apply_collective(_value: torch.Tensor, *, collective: Collective) -> torch.Tensor:
    """Stand for a collective in a local graph: the executor cuts the graph here and never calls this."""
    raise RuntimeError(f"{collective} stands between two segments and is run by the executor")


class Rule(ABC):
    """One rule for one or more operators."""

    follows = False
    """True for operators that, without a strategy, keep the layout of their first input: those that are cheap beside
    the traffic of a change. The others run data-parallel."""
    scatters = False
    """True for operators whose partial sums have the dimensions of the output: they may be reduce-scattered."""

    @abstractmethod
    def form(self, call: OperatorCall) -> Form:
        """Return the dimensions of a call."""

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Add the local operator and what makes its result whole; returns the result.

        `inputs` are local and laid out as the form and the split say. An operator with several results returns the
        node of all of them; `operator.getitem` takes them out.
        """
        return build.sum_over(self.local_call(call, build, inputs), summed_axes(form, split))

    def local_call(self, call: OperatorCall, build: LocalBuilder, inputs: Sequence[fx.Node]) -> fx.Node:
        """Add the same operator on local inputs."""
        local = iter(inputs)  # not by node: both sides of `x @ x` are one node and two local values
        args, kwargs = fx.node.map_arg((call.node.args, call.node.kwargs), lambda _: next(local))
        assert callable(call.node.target)
        return build.call(call.node.target, *args, **kwargs)


def stand_in(name: str, shape: Callable[..., Any]) -> Any:
    """Return an operator that stands in a captured graph for what only a local one runs.

    Args:
        shape: makes empty tensors as its results are.
    """
    made = torch.library.custom_op(name, shape, mutates_args=())
    made.register_fake(shape)
    made.register_autograd(_no_backward)
    return made._opoverload


def _no_backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG001
    raise RuntimeError("a captured graph is not run")


Rules = list[tuple[Rule, Sequence[Any]]]
"""A rule with its operators."""


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Give an argument of a local operator another value, wherever it was given."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    position = names.index(name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def summed_axes(form: Form, split: LabelSplit) -> Axes:
    """Return the axes along which the result of a call is a partial sum."""
    return tuple(sorted(axis for label in form.summed for axis in split.get(label, ())))


def dimension_labels(prefix: str, count: int) -> tuple[str, ...]:
    """Return `count` labels: d0, d1, ..."""
    return tuple(f"{prefix}{index}" for index in range(count))


def free_labels(count: int, whole: Collection[int]) -> Labels:
    """Return d0, d1, ... and None for dimensions that stay whole."""
    return tuple(None if dim in whole else label for dim, label in enumerate(dimension_labels("d", count)))


def aligned(labels: Sequence[str], shape: Sequence[int], given: Sequence[int]) -> Labels:
    """Return the labels of what is broadcast to a shape, aligned at the right: None where it is repeated."""
    offset = len(shape) - len(given)
    return tuple(labels[offset + dim] if size == shape[offset + dim] else None for dim, size in enumerate(given))


def sizes_of(*pairs: tuple[Labels, Sequence[int]]) -> dict[str, int]:
    """Return the size of every label from (labels, shape) pairs."""
    return {label: size for labels, shape in pairs for label, size in zip(labels, shape, strict=True) if label}
