"""Cross-entropy over classes that are cut over ranks, as the output layer of a large vocabulary leaves them.

No rank ever holds a whole row of scores: per row the largest score of every part is gathered and the sum of
exponentials all-reduced, then each rank adds what its own classes contribute (Megatron-LM's vocabulary-parallel
loss). MindSpore's SoftmaxCrossEntropyWithLogits refuses cut classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from msrun.runtime.graph.collectives import Collective
from msrun.runtime.graph.operators.along_split import shifted, sum_of_exponentials
from msrun.runtime.graph.operators.lookup import own_rows
from msrun.runtime.graph.operators.rule import Form, LabelSplit, LocalBuilder, OperatorCall, summed_axes
from msrun.runtime.layout import Axes

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
CLASSES = "c"


def lower_class_parallel(
    call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
) -> fx.Node:
    """Return the loss of scores whose classes are cut; labels and arguments are those of `ClassLoss`."""
    axes = split[CLASSES]
    dim = form.inputs[0].index(CLASSES)
    scores = inputs[0]
    if call.node.target is aten.cross_entropy_loss.default:
        scores, _ = shifted(scores, [dim], axes, build)
        total = build.collective(Collective("enter", axes), sum_of_exponentials(scores, [dim], axes, build))
        scores = build.call(aten.sub.Tensor, scores, build.call(aten.log.default, total))
    reduction = call.argument("reduction", MEAN)
    weight = inputs[2] if len(inputs) > 2 else None
    smoothing = call.argument("label_smoothing", default=0.0) or 0.0
    where = {"dim": dim, "smoothing": smoothing, "classes": form.sizes[CLASSES]}
    if call.tensors[1].meta["val"].is_floating_point():
        losses = build.call(losses_of_probabilities, scores, inputs[1], weight, **where)
        if reduction == NONE:
            return build.sum_over(losses, axes)
        total = build.sum_over(build.call(aten.sum.default, losses), summed_axes(form, split))
        samples = 1
        for label in form.inputs[0]:
            samples *= 1 if label in (CLASSES, None) else form.sizes[str(label)]
        return build.call(aten.div.Scalar, total, samples) if reduction == MEAN else total
    ignored = call.argument("ignore_index", -100)
    both = build.call(
        losses_of_classes,
        scores,
        inputs[1],
        weight,
        build.place(),
        mesh_shape=build.mesh.shape,
        axes=axes,
        ignored=ignored,
        is_summed=reduction != NONE,
        **where,
    )
    if reduction == NONE:
        return build.call(aten.select.int, build.sum_over(both, axes), 0, 0)
    both = build.sum_over(both, summed_axes(form, split))
    loss, count = (build.call(aten.select.int, both, 0, index) for index in (0, 1))
    return build.call(aten.div.Tensor, loss, count) if reduction == MEAN else loss


def losses_of_classes(
    logarithms: Tensor,
    target: Tensor,
    weight: Tensor | None,
    place: Tensor,
    *,
    mesh_shape: tuple[int, ...],
    axes: Axes,
    ignored: int,
    is_summed: bool,
    dim: int,
    smoothing: float,
    classes: int,
) -> Tensor:
    """Return what this rank's classes add to the losses, and to the weights that a mean divides by.

    Shapes: logarithms (b, classes of this rank, ..), target (b, ..) -> (2, b, ..), or (2,) summed.
    """
    counts = target != ignored
    own, is_elsewhere = own_rows(
        target.masked_fill(~counts, 0), place, mesh_shape, axes, logarithms.shape[dim], classes
    )
    mine = counts & ~is_elsewhere
    weights = mine.to(logarithms.dtype) if weight is None else weight[own] * mine
    losses = -logarithms.gather(dim, own.unsqueeze(dim)).squeeze(dim) * weights
    if smoothing:
        shape = [-1 if i == dim else 1 for i in range(logarithms.dim())]
        each = logarithms if weight is None else logarithms * weight.reshape(shape)
        losses = (1 - smoothing) * losses - smoothing / classes * each.sum(dim) * counts
    both = torch.stack([losses, weights.to(losses.dtype)])
    return both.reshape(2, -1).sum(1) if is_summed else both


def losses_of_probabilities(
    logarithms: Tensor, target: Tensor, weight: Tensor | None, *, dim: int, smoothing: float, classes: int
) -> Tensor:
    """Return what this rank's classes add to the losses: (b, classes of this rank, ..) -> (b, ..)."""
    wanted = target * (1 - smoothing) + smoothing / classes
    if weight is not None:
        wanted = wanted * weight.reshape([-1 if i == dim else 1 for i in range(logarithms.dim())])
    return -(logarithms * wanted).sum(dim)
