"""Calls of the operators of convolutional networks with the strategies that are legal for them."""

import torch.nn.functional as F  # noqa: N812
from operator_cases import OperatorCase


def _layer_norm(*shape):
    return lambda x, *affine: F.layer_norm(x, shape, *affine)


def _group_norm(groups):
    return lambda x, *affine: F.group_norm(x, groups, *affine, eps=1e-3)


def _batch_norm(x, *affine):
    """Training without running statistics; large means beside small deviations must lose no digits."""
    return F.batch_norm(x + 30, None, None, *affine, training=True)


def _batch_norm_eval(x, w, b, mean, var):
    return F.batch_norm(x, mean, var, w, b, eps=1e-2)


def _instance_norm_eval(x, mean, var):
    return F.instance_norm(x, mean, var, use_input_stats=False)


NORM = [
    OperatorCase("layer-norm", _layer_norm(8), ((4, 8), (8,), (8,)), "bn,n,n", parameters=(1, 2), on_eight=True),
    OperatorCase("layer-norm-2d", _layer_norm(4, 4), ((4, 4, 4), (4, 4)), "bmn,mn", parameters=(1,)),
    OperatorCase("group-norm", _group_norm(4), ((2, 8, 4), (8,), (8,)), "bgs,g,g", parameters=(1, 2)),
    OperatorCase("rms-norm", lambda x, w: F.rms_norm(x, (8,), w), ((2, 4, 8), (8,)), "abn,n", parameters=(1,)),
    OperatorCase("instance-norm", F.instance_norm, ((2, 4, 4, 2),), "bchw"),
    OperatorCase("group-norm-of-one", _group_norm(1), ((2, 4, 4), (4,), (4,)), "bcs,c,c", parameters=(1, 2)),
    OperatorCase("instance-norm-eval", _instance_norm_eval, ((2, 2, 4), (2,), (2,)), "bcs,c,c", kinds="fww"),
    OperatorCase("batch-norm-1d", _batch_norm, ((8, 4), (4,), (4,)), "bc,c,c", parameters=(1, 2)),
    OperatorCase("batch-norm-2d", _batch_norm, ((4, 2, 4, 2), (2,), (2,)), "bchw,c,c", parameters=(1, 2)),
    OperatorCase(
        "batch-norm-eval", _batch_norm_eval, ((4, 4, 4), (4,), (4,), (4,), (4,)), "bcs,c,c,c,c", "", (1, 2), "fffww"
    ),
]


def _conv(**settings):
    return lambda x, w, *bias: (F.conv2d if w.dim() == 4 else F.conv1d)(x, w, *bias, **settings)


def _transposed(**settings):
    return lambda x, w, *bias: (F.conv_transpose2d if w.dim() == 4 else F.conv_transpose1d)(x, w, *bias, **settings)


CONV = [
    OperatorCase("conv2d", _conv(padding=1), ((2, 2, 4, 4), (4, 2, 3, 3), (4,)), "bihw,oi..,o", parameters=(1, 2)),
    OperatorCase("conv2d-strided", _conv(stride=2, padding=1), ((2, 1, 8, 7), (2, 1, 3, 3)), "b.h.,o...", "", (1,)),
    OperatorCase("conv2d-1x1-strided", _conv(stride=2), ((2, 1, 7, 8), (4, 1, 1, 1)), "b..w,o...", "", (1,)),
    OperatorCase("conv2d-7x7-strided", _conv(stride=2, padding=3), ((2, 1, 7, 8), (2, 1, 7, 7)), "b..w,o...", "", (1,)),
    OperatorCase("conv2d-dilated", _conv(dilation=2, padding=2), ((1, 2, 8, 5), (2, 2, 3, 3)), ".ih.,oi..", "", (1,)),
    OperatorCase("conv2d-of-arguments", _conv(padding=(0, 1)), ((2, 2, 5, 4), (2, 2, 3, 3)), "bi.w,oi.."),
    OperatorCase("conv2d-same-even", _conv(padding="same"), ((1, 1, 4, 4), (2, 1, 2, 4)), "..hw,o...", "", (1,)),
    OperatorCase(
        "conv2d-groups", _conv(groups=4, padding=1), ((2, 8, 5, 4), (4, 2, 3, 3), (4,)), "bg.w,g...,g", "", (1, 2)
    ),
    OperatorCase("conv2d-depthwise", _conv(groups=4, padding=1), ((2, 4, 4, 5), (8, 1, 3, 3)), "bgh.,g...", "", (1,)),
    OperatorCase("conv1d", _conv(padding=2), ((4, 4, 8), (4, 4, 5), (4,)), "bis,oi.,o", parameters=(1, 2)),
    OperatorCase("conv1d-valid", _conv(padding="valid"), ((2, 2, 8), (2, 2, 5)), "bis,oi.", parameters=(1,)),
    OperatorCase("conv1d-one-sample", _conv(padding=1), ((4, 8), (4, 4, 3)), "is,oi.", parameters=(1,)),
    OperatorCase(
        "conv-transpose2d",
        _transposed(stride=2, padding=1, output_padding=1),
        ((2, 2, 4, 2), (2, 4, 3, 3), (4,)),
        "bihw,io..,o",
        parameters=(1, 2),
    ),
    OperatorCase(
        "conv-transpose2d-4x4", _transposed(stride=2, padding=1), ((1, 2, 5, 4), (2, 2, 4, 4)), ".i.w,io..", "", (1,)
    ),
    OperatorCase("conv-transpose1d-2", _transposed(stride=2), ((2, 2, 4), (2, 2, 2)), "bis,io.", parameters=(1,)),
    OperatorCase(
        "conv-transpose1d-1", _transposed(stride=2, output_padding=1), ((2, 2, 4), (2, 2, 1)), "bis,io.", "", (1,)
    ),
    OperatorCase("conv-transpose1d-groups", _transposed(groups=4), ((2, 4, 4), (4, 2, 3)), "bg.,g..", parameters=(1,)),
]


def _unpadded_average(x):
    return F.avg_pool1d(x, 3, 1, 1, count_include_pad=False)


def _halved(x):
    return F.interpolate(x, scale_factor=0.5, mode="nearest-exact")


POOL = [
    OperatorCase("avg-pool2d-padded", lambda x: F.avg_pool2d(x, 3, 1, 1), ((1, 2, 4, 4),), ".chw"),
    OperatorCase("max-pool2d-overlapping", lambda x: F.max_pool2d(x, 3, 2, 1), ((2, 1, 8, 8),), "b.hw"),
    OperatorCase("max-pool2d", lambda x: F.max_pool2d(x, 2), ((2, 2, 8, 7),), "bch."),
    OperatorCase("avg-pool1d-ceil", lambda x: F.avg_pool1d(x, 3, 2, ceil_mode=True), ((2, 4, 8),), "bcs", "s"),
    OperatorCase("global-average", lambda x: F.adaptive_avg_pool2d(x, 1), ((2, 2, 4, 4),), "bchw"),
    OperatorCase("nearest", lambda x: F.interpolate(x, scale_factor=2), ((1, 2, 4, 4),), ".chw"),
    OperatorCase("adaptive-average", lambda x: F.adaptive_avg_pool2d(x, (4, 3)), ((1, 2, 8, 4),), ".chw", "w"),
    OperatorCase("pixel-shuffle", lambda x: F.pixel_shuffle(x, 2), ((1, 16, 4, 2),), ".chw"),
]

BINARY = [*NORM, *CONV, *POOL]
"""Operators that take a strategy."""

MORE_TYPES = {
    **dict.fromkeys(["layer-norm", "rms-norm", "group-norm", "batch-norm-2d"], ("float32", "bfloat16")),
    **dict.fromkeys(["conv2d", "conv-transpose2d", "global-average"], ("float32",)),
}
"""Types other than float64 in which cases run."""

UNARY = [
    OperatorCase("layer-norm-without-weight", _layer_norm(8), ((4, 8),), "bn"),
    OperatorCase("rms-norm-eps", lambda x: F.rms_norm(x, (4, 4), eps=0.1), ((2, 4, 4),), "bmn"),
    OperatorCase("batch-norm-without-weight", _batch_norm, ((4, 2, 4),), "bcs"),
    OperatorCase("max-pool1d-valid", lambda x: F.max_pool1d(x, 5, 1), ((2, 12),), "cs"),
    OperatorCase("max-pool3d", lambda x: F.max_pool3d(x, 2), ((2, 2, 4, 4, 2),), "bcdhw"),
    OperatorCase("average-without-padding", _unpadded_average, ((4, 4),), "cs"),
    OperatorCase("nearest-size", lambda x: F.interpolate(x, size=(8, 6)), ((2, 1, 4, 4),), "bchw"),
    OperatorCase("adaptive-max", lambda x: F.adaptive_max_pool2d(x, 2), ((2, 2, 4, 4),), "bchw"),
    OperatorCase("nearest-exact", _halved, ((2, 2, 8),), "bcs"),
    OperatorCase("bilinear", lambda x: F.interpolate(x, size=(6, 4), mode="bilinear"), ((2, 2, 4, 2),), "bchw"),
    OperatorCase("nearest-3d", lambda x: F.interpolate(x, size=(2, 4, 8)), ((4, 1, 2, 2, 4),), "bcdhw"),
    OperatorCase("pad", lambda x: F.pad(x, (1, 0, 0, 0, 0, 1), value=3.0), ((2, 2, 4, 2),), "bchw"),
    OperatorCase("pad-reflected", lambda x: F.pad(x, (0, 0, 1, 2), mode="reflect"), ((2, 2, 4, 2),), "bchw"),
    OperatorCase("nearest-uneven", lambda x: F.interpolate(x, scale_factor=2.1), ((2, 2, 4),), "bcs"),
]
"""Operators that keep their input's cut: every layout of the input is tried."""
