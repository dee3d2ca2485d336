"""Operators of networks: products, normalisation, windows over images, losses, random numbers. The table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msrun.mindspore.ops.shapes import dims
from msrun.mindspore.ops.table import define_all, taking
from msrun.mindspore.windows import check_format, convolve, pool_average, pool_largest, sizes_of


def _matmul(input: Tensor, mat2: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    a = input.transpose(-1, -2) if transpose_a else input
    if transpose_b:
        return F.linear(a, mat2) if mat2.dim() == 2 else torch.matmul(a, mat2.transpose(-1, -2))
    return torch.matmul(a, mat2)


def as_classes(target: Tensor) -> Tensor:
    """Return class numbers as torch's losses take them; probabilities as they are."""
    return target if target.is_floating_point() or target.dtype == torch.int64 else target.long()


def _of_classes(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda input, target, **settings: loss(input, as_classes(target), **settings)


def _weighted_nll(
    logits: Tensor, labels: Tensor, weight: Tensor, reduction: str = "mean", ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Return the loss, and the sum of the weights of the labels."""
    used = labels[labels != ignore_index].long()
    loss = F.nll_loss(logits, as_classes(labels), weight, ignore_index=ignore_index, reduction=reduction)
    return loss, weight[used].sum()


def _sparse_softmax_loss(logits: Tensor, labels: Tensor, is_grad: bool = False) -> Tensor:
    if is_grad:
        return (logits.softmax(-1) - F.one_hot(labels.long(), logits.shape[-1])) / len(labels)
    return F.cross_entropy(logits, labels.long())


def _layer_norm(
    input_x: Tensor, gamma: Tensor, beta: Tensor, begin_norm_axis: int, begin_params_axis: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    axes = tuple(range(begin_norm_axis % input_x.dim(), input_x.dim()))
    mean, variance = input_x.mean(axes, True), input_x.var(axes, correction=0, keepdim=True)
    shape = input_x.shape[begin_params_axis % input_x.dim() :]
    normal = (input_x - mean) * torch.rsqrt(variance + epsilon)
    return normal * gamma.reshape(shape) + beta.reshape(shape), mean, variance


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    factor = torch.rsqrt((x * x).mean(-1, True) + epsilon)
    return x * factor * gamma, factor


def _batch_norm(
    input_x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, data_format: str, **settings: Any
) -> tuple[Tensor, ...]:
    images = input_x.movedim(-1, 1) if data_format == "NHWC" else input_x
    result = F.batch_norm(images, mean, variance, scale, bias, **settings)
    return (result.movedim(1, -1) if data_format == "NHWC" else result), mean, variance, mean, variance


def _convolve(x: Tensor, weight: Tensor, data_format: str, **settings: Any) -> Tensor:
    check_format("Conv2D", data_format)
    return convolve(x, weight, **settings)


def _resize(image: Tensor, size: Any, align_corners: bool = False, half_pixel_centers: bool = False) -> Tensor:
    """Resize (n, c, h, w); without align_corners and half_pixel_centers corners are where MindSpore has them."""
    sizes = sizes_of(size, 2)
    if align_corners or half_pixel_centers:
        return F.interpolate(image, sizes, mode="bilinear", align_corners=align_corners or None)
    return _bilinear_from_the_corner(image, sizes)


def _bilinear_from_the_corner(image: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Bilinear in both directions, where point i of the result lies at i * (old size / new size)."""
    for dim, size in zip((2, 3), sizes, strict=True):
        old = image.shape[dim]
        place = torch.arange(size, dtype=torch.float32, device=image.device) * (old / size)
        low = place.floor().long().clamp(max=old - 1)
        high = (low + 1).clamp(max=old - 1)
        share = (place - low).to(image.dtype).reshape([-1 if d == dim else 1 for d in range(image.dim())])
        image = image.index_select(dim, low) * (1 - share) + image.index_select(dim, high) * share
    return image


def _dropout(x: Tensor, keep_prob: float) -> tuple[Tensor, Tensor]:
    mask = (torch.rand_like(x, dtype=torch.float32) < keep_prob).to(x.dtype)
    return x * mask / keep_prob, mask


def _uniform(shape: Any, minval: Any, maxval: Any, dtype: torch.dtype) -> Tensor:
    if not dtype.is_floating_point:
        return torch.randint(int(minval), int(maxval), dims(shape), dtype=dtype)
    return torch.rand(dims(shape), dtype=dtype) * (maxval - minval) + minval


def _sizes(size: Sequence[Any]) -> tuple[int, ...]:
    return dims(size[0]) if len(size) == 1 and not isinstance(size[0], int) else dims(size)


def _area(a: Tensor, b: Tensor, border: int) -> Tensor:
    """Return the area that boxes (x0, y0, x1, y1) share; `border`: 1 where the last row and column belong to them."""
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:4], b[..., 2:4])
    return (high - low + border).clamp(min=0).prod(-1)


def _overlaps(anchor_boxes: Tensor, gt_boxes: Tensor, mode: str = "iou") -> Tensor:
    """Return (gt boxes, anchors): what two boxes (x0, y0, x1, y1) share of both, or with "iof" of the gt box."""
    a, b = anchor_boxes[None], gt_boxes[:, None]
    area_a, area_b, common = _area(a, a, 1), _area(b, b, 1), _area(a, b, 1)
    whole = area_b + 0 * area_a if mode == "iof" else area_a + area_b - common
    return common / whole


def _center_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    return (boxes[..., :2] + boxes[..., 2:]) * 0.5, boxes[..., 2:] - boxes[..., :2] + 1


def _encode_boxes(anchor_box: Tensor, groundtruth_box: Tensor, means: Any, stds: Any) -> Tensor:
    """Return how boxes lie to their anchors: shifts in sizes of the anchor, and logarithms of the sizes' ratios."""
    (center, size), (other, other_size) = map(_center_and_size, (anchor_box, groundtruth_box))
    deltas = torch.cat(((other - center) / size, torch.log(other_size / size)), -1)
    return (deltas - deltas.new_tensor(means)) / deltas.new_tensor(stds)


def _decode_boxes(
    anchor_box: Tensor, deltas: Tensor, max_shape: Sequence[int], means: Any, stds: Any, wh_ratio_clip: float
) -> Tensor:
    """Return the boxes, inside an image of `max_shape` (height, width), whose encoding is `deltas`."""
    center, size = _center_and_size(anchor_box)
    deltas = deltas * deltas.new_tensor(stds) + deltas.new_tensor(means)
    limit = abs(math.log(wh_ratio_clip))
    middle, half = center + size * deltas[..., :2], size * deltas[..., 2:].clamp(-limit, limit).exp() * 0.5
    sides = deltas.new_tensor([max_shape[1] - 1, max_shape[0] - 1])
    return torch.cat([torch.minimum(one.clamp(min=0), sides) for one in (middle - half + 0.5, middle + half - 0.5)], -1)


def _check_boxes(bboxes: Tensor, img_metas: Tensor) -> Tensor:
    """Tell which boxes lie inside an image of (height, width, ratio)."""
    height, width = img_metas[0] * img_metas[2] - 1, img_metas[1] * img_metas[2] - 1
    return (bboxes[:, :2] >= 0).all(1) & (bboxes[:, 2] <= width) & (bboxes[:, 3] <= height)


def _suppress(bboxes: Tensor, iou_threshold: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Return boxes (x0, y0, x1, y1, score) by falling score, numbered, and which of them no better one covers."""
    order = bboxes[:, 4].argsort(descending=True, stable=True)
    boxes = bboxes[order]
    common, areas = _area(boxes[:, None], boxes[None], 0), _area(boxes, boxes, 0)
    covers = common / (areas[:, None] + areas - common) > iou_threshold
    kept = torch.ones(len(boxes), dtype=torch.bool)
    for place in range(len(boxes)):
        if kept[place]:
            kept[place + 1 :] &= ~covers[place, place + 1 :]
    return boxes, torch.arange(len(boxes), dtype=torch.int32), kept


_FOUR = "means=(0.0,0.0,0.0,0.0) stds=(1.0,1.0,1.0,1.0)"
_OF_POOL = "x>images kernel_size=1 strides=1 pad_mode='valid' data_format>='NCHW'"
_REDUCTION = "reduction='mean'"
OPERATORS = define_all((
    ("MatMul BatchMatMul", _matmul, "transpose_a transpose_b"),
    ("einsum", lambda equation, *operands: torch.einsum(equation, *operands)),
    ("dot", lambda input, other: torch.tensordot(input, other, ([-1], [-2])) if other.dim() > 1 else input @ other),
    ("Cross cross", lambda input, other, dim=None: torch.cross(
        input, other, -1 if dim in (None, -65530) else dim), "dim"),
    ("Dense dense", taking("input weight bias=None", F.linear)),
    ("BiasAdd bias_add", lambda input_x, bias, data_format="NCHW": input_x + (
        bias if data_format == "NHWC" else bias.reshape(-1, *[1] * (input_x.dim() - 2))), "data_format"),
    ("MatrixInverse inverse", taking("input>A adjoint>=False", torch.linalg.inv), "adjoint"),
    ("Cholesky cholesky", taking("input_x>input upper=False", torch.linalg.cholesky), "upper"),
    ("cdist Cdist", taking("x1 x2 p=2.0", torch.cdist), "p"),
    # -- softmax and norms -----------------------------------------------------------------------------------------
    ("Softmax", taking("input axis>dim=-1", F.softmax), "axis"),
    ("softmax", taking("input axis>dim=-1 * dtype=None", F.softmax)),
    ("LogSoftmax log_softmax", taking("logits>input axis>dim=-1", F.log_softmax), "axis"),
    ("softmin", taking("x>input axis>dim=-1 * dtype=None", F.softmin)),
    ("LayerNorm", taking("input_x gamma beta begin_norm_axis=1 begin_params_axis=1 epsilon=1e-7", _layer_norm),
     "begin_norm_axis begin_params_axis epsilon"),
    ("RmsNorm rms_norm", _rms_norm, "epsilon"),
    ("BatchNorm", taking("input_x scale bias mean variance is_training>training=False epsilon>eps=1e-5 momentum=0.1 "
                         "data_format='NCHW'", _batch_norm), "is_training epsilon momentum data_format"),
    ("batch_norm", taking("input_x>input running_mean running_var weight bias training=False momentum=0.1 eps=1e-5",
                          F.batch_norm)),
    # -- images ----------------------------------------------------------------------------------------------------
    ("Conv2D Conv3D", taking("x weight out_channel>=0 kernel_size>=None mode>=1 pad_mode='valid' pad>padding=0 "
                             "stride=1 dilation=1 group>groups=1 data_format='NCHW'", _convolve),
     "out_channel kernel_size mode pad_mode pad stride dilation group data_format"),
    ("conv1d conv2d conv3d", convolve),
    ("MaxPool MaxPool3D", taking(_OF_POOL, pool_largest), "kernel_size strides pad_mode data_format"),
    ("AvgPool AvgPool3D", taking(_OF_POOL, pool_average), "kernel_size strides pad_mode data_format"),
    ("max_pool2d", taking("x>input kernel_size stride=None padding=0 dilation=1 return_indices=False ceil_mode=False",
                          F.max_pool2d)),
    ("avg_pool2d", lambda input_x, kernel_size=1, stride=1, padding=0, ceil_mode=False, count_include_pad=True,
        divisor_override=0: F.avg_pool2d(
            input_x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override or None)),
    ("AdaptiveAvgPool2D adaptive_avg_pool2d", taking("input output_size", F.adaptive_avg_pool2d), "output_size"),
    ("AdaptiveMaxPool2D", taking("input output_size", F.adaptive_max_pool2d), "output_size"),
    ("adaptive_max_pool2d", taking("input output_size return_indices=False", F.adaptive_max_pool2d)),
    ("ResizeBilinear", _resize, "size align_corners half_pixel_centers"),
    ("ResizeBilinearV2", _resize, "align_corners half_pixel_centers"),
    ("ResizeNearestNeighbor", lambda input_x, size, align_corners=False, half_pixel_centers=False: F.interpolate(
        input_x, sizes_of(size, 2), mode="nearest"), "size align_corners half_pixel_centers"),
    ("interpolate upsample", taking("input size=None scale_factor=None mode='nearest' align_corners=None "
                                    "recompute_scale_factor>=None", F.interpolate)),
    ("grid_sample GridSampler2D", taking("input grid interpolation_mode>mode='bilinear' padding_mode='zeros' "
                                         "align_corners=False", F.grid_sample),
     "interpolation_mode padding_mode align_corners"),
    # -- boxes ---------------------------------------------------------------------------------------------------
    ("IOU iou", _overlaps, "mode"),
    ("BoundingBoxEncode bounding_box_encode", taking(f"anchor_box groundtruth_box {_FOUR}", _encode_boxes),
     "means stds"),
    ("BoundingBoxDecode bounding_box_decode", taking(
        f"anchor_box deltas max_shape {_FOUR} wh_ratio_clip=0.016", _decode_boxes),
     "max_shape means stds wh_ratio_clip"),
    ("CheckValid check_valid", _check_boxes),
    ("NMSWithMask", _suppress, "iou_threshold"),
    # -- losses ----------------------------------------------------------------------------------------------------
    ("cross_entropy", taking(f"input target weight=None ignore_index=-100 {_REDUCTION} label_smoothing=0.0",
                             _of_classes(F.cross_entropy))),
    ("nll_loss", taking(f"inputs>input target weight=None ignore_index=-100 {_REDUCTION}", _of_classes(F.nll_loss))),
    ("SoftmaxCrossEntropyWithLogits", lambda logits, labels: (
        F.cross_entropy(logits, labels, reduction="none"), (logits.softmax(-1) - labels).detach())),
    ("SparseSoftmaxCrossEntropyWithLogits", _sparse_softmax_loss, "is_grad"),
    ("SigmoidCrossEntropyWithLogits", lambda logits, labels: F.binary_cross_entropy_with_logits(
        logits, labels, reduction="none")),
    ("BinaryCrossEntropy binary_cross_entropy", lambda logits, labels, weight=None, reduction="mean":
        F.binary_cross_entropy(logits, labels.to(logits.dtype), weight, reduction=reduction), "reduction"),
    ("BCEWithLogitsLoss binary_cross_entropy_with_logits", taking(
        f"input target weight=None pos_weight=None {_REDUCTION}", F.binary_cross_entropy_with_logits), "reduction"),
    ("SmoothL1Loss smooth_l1_loss", taking("input target beta=1.0 reduction='none'", F.smooth_l1_loss),
     "beta reduction"),
    ("NLLLoss", _weighted_nll, "reduction ignore_index"),
    ("KLDivLoss kl_div", taking(f"logits>input labels>target {_REDUCTION}", F.kl_div), "reduction"),
    ("ctc_loss", lambda log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean",
        zero_infinity=False: F.ctc_loss(
            log_probs, targets.long(), torch.as_tensor(input_lengths).long(), torch.as_tensor(target_lengths).long(),
            blank, reduction, zero_infinity)),
    # -- random ----------------------------------------------------------------------------------------------------
    ("Dropout", taking("x keep_prob=0.5 Seed0>=0 Seed1>=0", _dropout), "keep_prob Seed0 Seed1"),
    ("Dropout2D", lambda x, keep_prob=0.5: (F.dropout2d(x, 1 - keep_prob), x != 0), "keep_prob"),
    ("StandardNormal", lambda shape, seed=0, seed2=0: torch.randn(dims(shape)), "seed seed2"),
    ("standard_normal", lambda shape, seed=None: torch.randn(dims(shape))),
    ("normal", lambda shape, mean=0.0, stddev=1.0, seed=None: torch.randn(dims(shape)) * stddev + mean),
    ("uniform", taking("shape minval maxval seed>=None dtype=float32", _uniform)),
    ("UniformReal", lambda shape, seed=0, seed2=0: torch.rand(dims(shape)), "seed seed2"),
    ("UniformInt", lambda shape, minval, maxval, seed=0, seed2=0: torch.randint(minval, maxval, dims(shape)).int(),
     "seed seed2"),
    ("TruncatedNormal", lambda shape, seed=0, dtype=torch.float32, seed2=0: torch.nn.init.trunc_normal_(
        torch.empty(dims(shape), dtype=dtype)), "seed dtype seed2"),
    ("rand", lambda *size, dtype=None, seed=None: torch.rand(_sizes(size), dtype=dtype)),
    ("randn", lambda *size, dtype=None, seed=None: torch.randn(_sizes(size), dtype=dtype)),
    ("randint", lambda low, high, size, seed=None, *, dtype=None: torch.randint(
        low, high, dims(size), dtype=dtype or torch.int64)),
    ("randperm", lambda n, seed=0, offset=0, dtype=torch.int64: torch.randperm(n, dtype=dtype)),
    ("bernoulli", lambda input, p=0.5, seed=None: torch.bernoulli(torch.full_like(input, p, dtype=torch.float32))),
    ("RandomShuffle", lambda x, seed=0, seed2=0: x[torch.randperm(len(x))], "seed seed2"),
    ("shuffle", lambda x, seed=None: x[torch.randperm(len(x))]),
))  # fmt: skip
