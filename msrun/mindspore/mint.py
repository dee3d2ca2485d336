"""mindspore.mint: MindSpore's names that are torch's, with torch's arguments; each is torch's own."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor
from torch import nn as torch_nn

from msrun.mindspore.missing import missing_names
from msrun.runtime import optim as runtime_optim

_SAME = """
abs acos acosh add addbmm addcdiv addmm addmv all allclose amax amin any arange arccos arccosh arcsin arcsinh
arctan arctan2 arctanh argmax argmin argsort asin asinh atan atan2 atanh baddbmm bernoulli bincount bitwise_and
bitwise_not bitwise_or bitwise_xor bmm broadcast_to cat cdist ceil chunk clamp clone concat cos cosh
count_nonzero cross cummax cummin cumprod cumsum diag diff div divide dot dstack einsum empty empty_like eq erf
erfc erfinv exp exp2 expm1 eye flatten flip float_power floor floor_divide fmod frac full full_like gather gcd
greater greater_equal gt histc hstack imag index_add index_select inverse isclose isfinite isinf isnan isneginf
kthvalue le lerp less less_equal linspace log log10 log1p log2 log_softmax logaddexp logaddexp2 logical_and
logical_not logical_or logical_xor logsumexp lt masked_select matmul max maximum mean median meshgrid min
minimum mm mul multinomial mv nan_to_num nansum narrow ne neg negative nonzero norm normal not_equal ones
ones_like outer permute polar pow prod qr rand rand_like randint randint_like randn randn_like randperm ravel
real reciprocal relu remainder repeat_interleave reshape roll round rsqrt scatter scatter_add searchsorted
select sigmoid sign sin sinc sinh softmax sort split sqrt square squeeze stack std std_mean sub sum swapaxes t
take tan tanh tile topk trace transpose tril triu unbind unique unique_consecutive unsqueeze var var_mean vdot
where xlogy zeros zeros_like
""".split()
_FUNCTIONAL = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d avg_pool1d
avg_pool2d avg_pool3d batch_norm binary_cross_entropy binary_cross_entropy_with_logits conv1d conv2d conv3d
conv_transpose2d cosine_embedding_loss cross_entropy dropout dropout2d elu elu_ embedding fold gelu glu
grid_sample group_norm hardtanh hardtanh_ interpolate kl_div l1_loss layer_norm leaky_relu linear log_softmax
logsigmoid max_pool2d max_unpool2d mse_loss nll_loss normalize one_hot pad pixel_shuffle prelu relu relu6 relu_
sigmoid silu smooth_l1_loss soft_margin_loss softmax softplus tanh threshold threshold_ unfold upsample
""".split()
_LAYERS = """
AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AvgPool1d AvgPool2d
AvgPool3d BCELoss BCEWithLogitsLoss BatchNorm1d BatchNorm2d BatchNorm3d ConstantPad1d ConstantPad2d
ConstantPad3d Conv1d Conv2d Conv3d ConvTranspose2d CosineEmbeddingLoss CrossEntropyLoss Dropout Dropout2d ELU
Embedding Flatten Fold GELU GLU GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh Identity KLDivLoss L1Loss
LayerNorm Linear LogSigmoid LogSoftmax MSELoss MaxPool2d MaxUnpool2d Mish NLLLoss PReLU PixelShuffle ReLU ReLU6
ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU SiLU
Sigmoid SmoothL1Loss SoftMarginLoss Softmax Softplus Softshrink SyncBatchNorm Tanh Threshold Unfold Upsample
UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d ZeroPad2d ZeroPad3d
""".split()


def _module(path: str, source: Any, words: str | list[str], **more: Any) -> ModuleType:
    """Return a module below this one, with names of another one, that `import` finds too."""
    names = {name: getattr(source, name) for name in (words.split() if isinstance(words, str) else words)} | more
    module = ModuleType(f"{__name__}.{path}", f"mindspore.mint.{path}: torch's own.")
    vars(module).update(names, __all__=list(names), __package__=__name__, __path__=[])
    vars(module)["__getattr__"] = missing_names(f"mint.{path}", names)
    sys.modules[module.__name__] = module
    return module


__path__: list[str] = []  # what is below it is made here
globals().update({name: getattr(torch, name) for name in _SAME})
item = Tensor.item
functional = _module("nn.functional", F, _FUNCTIONAL)
nn = _module("nn", torch_nn, _LAYERS, functional=functional)
optim = _module("optim", runtime_optim, "Adam AdamW SGD", FusedAdamW=runtime_optim.AdamW)
linalg = _module("linalg", torch.linalg, "inv matrix_norm norm qr vector_norm")
special = _module("special", torch.special, "erfc exp2 expm1 log1p log_softmax round sinc")
distributed = torch.distributed

__all__ = [*_SAME, "distributed", "functional", "item", "linalg", "nn", "optim", "special"]
__getattr__ = missing_names("mint", __all__)
