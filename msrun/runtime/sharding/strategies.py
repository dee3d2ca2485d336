"""Which strategy an operator gets: the user's, its input's layout, or data parallel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from msrun.errors import StrategyError
from msrun.runtime.sharding.layout import Axes, Mesh, Move, TensorLayout, assign_axes, plan_redistribution
from msrun.runtime.sharding.named_layout import Layout
from msrun.runtime.sharding.operators.dropout import BATCH_DIM
from msrun.runtime.sharding.operators.rule import IS_CAST, Form, Label, Labels, LabelSplit, OperatorCall, Rule

Numbers = tuple[tuple[int, ...], ...]
CHOICES = 5
"""Numbers of parts that are tried for one dimension."""


def nearest_legal(form: Form, mesh: Mesh, wanted: Sequence[Sequence[int]]) -> Numbers:
    """Return the whole legal strategy that is nearest: least sum of |log(legal / wanted)| over the dimensions.

    Args:
        wanted: the user's numbers, one row per input; rows of a wrong length are read as far as they go.
    """
    wishes: dict[str, int] = {}
    for labels, numbers in zip(form.inputs, wanted, strict=False):
        for label, number in zip(labels, numbers, strict=False):
            if label is not None and number > 0:
                wishes[label] = max(wishes.get(label, 1), number)
    best = min(_legal(form, mesh, wishes), key=lambda parts: (_distance(parts, wishes), sorted(parts.items())))
    return tuple(tuple(best.get(label, 1) if label else 1 for label in labels) for labels in form.inputs)


def _legal(form: Form, mesh: Mesh, wishes: dict[str, int]) -> Iterator[dict[str, int]]:
    choices = [_choices(form, mesh, label, wish) for label, wish in wishes.items()]
    for numbers in itertools.product(*choices):
        if mesh.size % math.prod(numbers) == 0:
            yield dict(zip(wishes, numbers, strict=True))


def _choices(form: Form, mesh: Mesh, label: Label, wish: int) -> list[int]:
    """Return 1 and the nearest numbers that divide the ranks and that the dimension can be cut into."""
    divisors = [n for n in range(1, mesh.size + 1) if mesh.size % n == 0 and (n == 1 or form.can_split(label, n))]
    return sorted({1, *sorted(divisors, key=lambda n: abs(math.log(n / wish)))[:CHOICES]})


def _distance(parts: dict[str, int], wishes: dict[str, int]) -> float:
    return round(sum(abs(math.log(parts[label] / wish)) for label, wish in wishes.items()), 9)


Entry = tuple[int, ...] | Layout
"""How one tensor is cut: parts per dimension, or a layout with named axes."""
MAX_TRIED_AXES = 4
"""On meshes with more axes a strategy's numbers take their axes from left to right, whatever that moves."""


@dataclass(frozen=True)
class NamedCut:
    """How one weight is cut, in words that do not depend on the operator that reads it."""

    side: str
    """colwise: by the dimension that the result has, too; rowwise: by the one that is summed over; ring or ulysses: the
    sequence of an attention, in that way."""
    parts: int
    """0 = as many as there are ranks; of an attention into how many its heads are cut, 0 = not at all."""
    weight: tuple[int, ...]
    """Its global shape."""


@dataclass(frozen=True)
class OperatorStrategy:
    """What the user wants for one call, in MindSpore's form."""

    inputs: tuple[Entry | None, ...] = ()
    """One entry per tensor input; None = as it comes."""
    outputs: tuple[Entry | None, ...] = ()
    """One entry per tensor result."""
    parameters: tuple[tuple[nn.Parameter, Entry], ...] = field(default=(), compare=False)
    """How parameters are stored."""
    named: NamedCut | None = None
    """In place of all these."""

    @property
    def layouts(self) -> Iterator[Layout]:
        """The named layouts among all entries."""
        for entry in (*self.inputs, *self.outputs, *(entry for _, entry in self.parameters)):
            if isinstance(entry, Layout):
                yield entry


def choose_split(
    call: OperatorCall,
    rule: Rule,
    form: Form,
    mesh: Mesh,
    strategy: OperatorStrategy | None,
    layouts: Sequence[TensorLayout | None],
    *,
    follows: bool = False,
) -> tuple[LabelSplit, str]:
    """Return the axes of every split label, and where that choice came from.

    Args:
        layouts: present layouts of the tensor inputs; None for a parameter that nobody has used yet.
        follows: keep what the inputs bring, and nothing else, whatever the operator: it stands in a region whose
            inputs and parameters the user has laid out.
    """
    if strategy is not None:
        return _from_user(call, form, mesh, strategy, layouts), "user"
    if not form.sizes:
        return {}, "no rule" if not any(form.inputs) else "follows"
    if rule.follows or follows:
        followed = _follow(form, mesh, layouts)
        if followed or follows or IS_CAST in call.node.meta:
            return followed, "follows"
    cut = _data_parallel(call, form, mesh, layouts)
    followed = _follow(form, mesh, layouts)
    # what is cut over more ranks than share the batch stays so; of activations alone, as in attention, over as many
    least = max(2, _parts(mesh, cut) + any(layout is None for layout in layouts))
    may_follow = not any(label in followed for label in (*form.summed, *form.limits))
    if followed != cut and _parts(mesh, followed) >= least and may_follow:
        return followed, "follows"
    return cut, "data parallel"


def _parts(mesh: Mesh, split: LabelSplit) -> int:
    return math.prod(mesh.extent(axes) for axes in split.values())


def entry_numbers(entry: Entry, mesh: Mesh) -> tuple[int, ...]:
    """Return the parts per dimension that an entry means."""
    return entry.resolve(mesh).numbers(mesh) if isinstance(entry, Layout) else entry


def _from_user(
    call: OperatorCall, form: Form, mesh: Mesh, strategy: OperatorStrategy, layouts: Sequence[TensorLayout | None]
) -> dict[str, Axes]:
    name = f"{call.operator} in module {call.module_path or '(top)'}"
    if strategy.named is not None:
        parts = _parts_of_named(name, call, form, mesh, strategy.named)
        return _cheapest_axes(form, mesh, parts, layouts, call, what=f"{name}: {strategy.named.side}")
    if len(strategy.inputs) > len(form.inputs):
        raise StrategyError(
            f"{name}: strategy {strategy.inputs} has {len(strategy.inputs)} tuples for {len(form.inputs)} inputs; "
            "give one tuple for each tensor input"
        )
    rows = [
        entry_numbers(entry, mesh) if entry is not None else (1,) * len(labels)
        for entry, labels in zip(strategy.inputs, form.inputs, strict=False)
    ]
    try:
        parts = _parts_of_labels(name, call, form, rows, strategy.inputs)
        named = [entry for entry in strategy.inputs if isinstance(entry, Layout)]
        if named:
            return _named_axes(name, form, mesh, strategy.inputs)
        if math.prod(parts.values()) > mesh.size:
            raise StrategyError(
                f"{name}: strategy {strategy.inputs} makes {math.prod(parts.values())} parts for {mesh.size} ranks"
            )
        return _cheapest_axes(form, mesh, parts, layouts, call, what=f"{name}: strategy {strategy.inputs}")
    except StrategyError as error:
        raise StrategyError(f"{error}; the nearest legal strategy is {nearest_legal(form, mesh, rows)}") from None


def _parts_of_named(name: str, call: OperatorCall, form: Form, mesh: Mesh, cut: NamedCut) -> dict[str, int]:
    """Return the number of parts of the label that a word means, and of the batch's rows over the other ranks."""
    if not cut.weight:
        return _parts_of_sequence(name, form, mesh, cut)
    places = [i for i, shape in enumerate(call.shapes) if tuple(shape) == cut.weight]
    if not places:
        raise StrategyError(f"{name}: {cut.side} of a weight {cut.weight}, which it does not read; name another module")
    is_of_result = cut.side == "colwise"
    labels = [
        label for label in form.inputs[places[-1]] if label is not None and (label in form.output) == is_of_result
    ]
    parts = cut.parts or mesh.size
    label = next((each for each in labels if form.can_split(each, parts)), None)
    if label is None:
        sizes = ", ".join(str(form.sizes[each]) for each in labels) or "none"
        legal = max((n for n in range(1, parts) for each in labels if form.can_split(each, n)), default=1)
        raise StrategyError(
            f"{name}: {cut.side} cuts its weight {cut.weight} into {parts} by a dimension of size {sizes}, which does "
            f"not go; the nearest legal number is {legal}"
        )
    found = {label: parts}
    rest = mesh.size // parts
    rows = [
        labels[max(dim, 0)]
        for tensor, labels in zip(call.tensors, form.inputs, strict=True)
        if labels and (dim := tensor.meta.get(BATCH_DIM, 0)) is not None
    ]
    batch = next((each for each in rows if each is not None and each != label and each in form.output), None)
    if rest > 1 and batch is not None and form.can_split(batch, rest):
        found[batch] = rest
    return found


def _parts_of_sequence(name: str, form: Form, mesh: Mesh, cut: NamedCut) -> dict[str, int]:
    """Return the number of parts of an attention's sequence, and of its heads over the other ranks."""
    if cut.side not in form.ways:
        raise StrategyError(
            f"{name}: {cut.side} is for self attention (as many queries as keys, no dropout) whose mask has rows for "
            f"queries; here {' and '.join(form.ways) or 'only samples and heads can be cut'}"
        )
    head, heads = str(form.output[-3]), max(1, cut.parts)
    parts = mesh.size // heads
    for label, number in ((cut.side, parts), (head, heads)):
        if not form.can_split(label, number):
            limit, size = form.limits.get(label), form.sizes[label]
            why = f" {limit.text}" if limit is not None and size % number == 0 else ""
            legal = max(n for n in range(1, number + 1) if number % n == 0 and form.can_split(label, n))
            raise StrategyError(
                f"{name}: {cut.side} cuts a size of {size}{why} into {number}; the nearest legal number is {legal}"
                f"{', or use ring' if label == 'ulysses' else ''}"
            )
    return {label: number for label, number in ((cut.side, parts), (head, heads)) if number > 1}


def _parts_of_labels(
    name: str, call: OperatorCall, form: Form, rows: Sequence[tuple[int, ...]], entries: Sequence[Entry | None]
) -> dict[str, int]:
    """Return the number of parts of every label that the strategy mentions."""
    parts: dict[str, int] = {}
    for index, (numbers, labels) in enumerate(zip(rows, form.inputs, strict=False)):
        is_short = len(numbers) != len(labels) and not isinstance(entries[index], Layout)
        folded = _folded(numbers, labels) if is_short else numbers if len(numbers) == len(labels) else None
        if folded is None:
            raise StrategyError(
                f"{name}: strategy {numbers} of input {index} has {len(numbers)} numbers "
                f"for {len(labels)} dimensions; give one number for each"
            )
        for dim, (number, label) in enumerate(zip(folded, labels, strict=True)):
            _check_number(name, call, form, index, dim, number, label)
            if label is None or entries[index] is None:
                continue
            if parts.setdefault(label, number) != number:
                raise StrategyError(
                    f"{name}: dimension {dim} of input {index} is cut into {number} but the same dimension of another "
                    f"input into {parts[label]}; give both the same number"
                )
    return parts


def _named_axes(name: str, form: Form, mesh: Mesh, entries: Sequence[Entry | None]) -> dict[str, Axes]:
    """Return the axes that named layouts give to the labels."""
    split: dict[str, Axes] = {}
    for index, (entry, labels) in enumerate(zip(entries, form.inputs, strict=False)):
        if not isinstance(entry, Layout):
            continue
        for dim, (axes, label) in enumerate(zip(entry.resolve(mesh).split, labels, strict=True)):
            if label is not None and split.setdefault(label, axes) != axes:
                raise StrategyError(
                    f"{name}: dimension {dim} of input {index} is cut by other axes than the same dimension of another "
                    f"input in {entries}; name the same axes for both"
                )
    used = list(itertools.chain.from_iterable(split.values()))
    if len(used) != len(set(used)):
        raise StrategyError(
            f"{name}: {entries} cuts two different dimensions of the work by one axis; name another axis for one"
        )
    return {label: axes for label, axes in split.items() if axes}


def _cheapest_axes(
    form: Form,
    mesh: Mesh,
    parts: dict[str, int],
    layouts: Sequence[TensorLayout | None],
    call: OperatorCall,
    *,
    what: str,
) -> dict[str, Axes]:
    """Return the axes that give these parts and move the inputs least; the leftmost ones where that is equal."""
    best: tuple[int, dict[str, Axes]] | None = None
    orders = itertools.permutations(mesh.axes) if len(mesh.axes) <= MAX_TRIED_AXES else [mesh.axes]
    for order in orders:
        axes = assign_axes(mesh, list(parts.values()), what=what, order=order)
        split = {label: cut for label, cut in zip(parts, axes, strict=True) if cut}
        moved = 0
        for labels, layout, shape in zip(form.inputs, layouts, call.shapes, strict=True):
            if layout is not None and (wanted := form.layout(labels, split)) != layout:
                move = Move(mesh, layout, wanted, shape)
                moved += move.total_elements(plan_redistribution(move))
        if best is None or moved < best[0]:
            best = moved, split
        if not moved:
            break
    assert best is not None
    return best[1]


def _folded(numbers: tuple[int, ...], labels: Labels) -> tuple[int, ...] | None:
    """Let a strategy written for a matrix serve an input with more batch dimensions: the extra ones are not cut."""
    extra = len(labels) - len(numbers)
    if extra > 0 and len(numbers) == 2:
        return (numbers[0], *(1,) * extra, numbers[1])
    return None


def _check_number(name: str, call: OperatorCall, form: Form, index: int, dim: int, number: int, label: Label) -> None:
    if number == 1:
        return
    if label is None or label in form.whole:
        raise StrategyError(
            f"{name}: dimension {dim} of input {index} must stay whole but is cut into {number}; give 1"
        )
    size = call.shapes[index][dim]
    if not form.can_split(label, number):
        legal = max(parts for parts in range(1, number + 1) if form.can_split(label, parts))
        limit = form.limits.get(label)
        why = limit.text if limit and size % number == 0 else f"which {number} does not divide"
        raise StrategyError(
            f"{name}: dimension {dim} of input {index} has size {size}, {why}; the nearest legal number is {legal}"
        )


def _follow(form: Form, mesh: Mesh, layouts: Sequence[TensorLayout | None]) -> dict[str, Axes]:
    """Keep the axes that the inputs bring, first input first, where the operator allows it."""
    split: dict[str, Axes] = {}
    used: set[int] = set()
    for labels, layout in zip(form.inputs, layouts, strict=True):
        if layout is None:
            continue
        for label, axes in zip(labels, layout.split, strict=True):
            if not axes or label is None or label in split or used & set(axes):
                continue
            if form.can_split(label, mesh.extent(axes)):
                split[label] = axes
                used |= set(axes)
    return split


def _data_parallel(
    call: OperatorCall, form: Form, mesh: Mesh, layouts: Sequence[TensorLayout | None]
) -> dict[str, Axes]:
    """Cut the batch dimension of the first input that has one over as many ranks as divide it, beginning with those
    that cut it.

    Where the rows of the batch are lost from sight it is dimension 0; what does not come from the batch stays whole.
    """
    dims = [tensor.meta.get(BATCH_DIM, 0) for tensor in call.tensors]
    batches = [i for i, layout in enumerate(layouts) if layout is not None and dims[i] is not None and form.inputs[i]]
    if not batches:
        return {}
    first = next((i for i in batches if form.inputs[i][max(dims[i], 0)] is not None), batches[0])
    dim, present = max(dims[first], 0), layouts[first]
    label = form.inputs[first][dim]
    own = present.split[dim] if present is not None else ()
    axes = list(own) if form.can_split(label, mesh.extent(own)) else []
    for axis in mesh.axes:
        if axis not in axes and form.can_split(label, mesh.extent((*axes, axis))):
            axes.append(axis)
    return {label: tuple(axes)} if axes and label is not None else {}
