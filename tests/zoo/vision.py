"""Models of torchvision and timm, in small sizes."""

from functools import partial

from torch import nn
from torch.nn.functional import cross_entropy

from msrun.runtime import WithLoss, shard
from zoo.entry import Entry, cut, images, momentum
from zoo.packages import prepare_torchvision

prepare_torchvision()

import timm  # noqa: E402
from torchvision.models import convnext, efficientnet, mobilenetv3, resnet, swin_transformer, vision_transformer  # noqa: E402

CLASSES = 10


def _resnet18():
    return WithLoss(resnet.resnet18(num_classes=CLASSES), cross_entropy)


def _resnet50():
    # Without zero_init_residual rounding grows 10 times a step and more: one process whose rows stand in another order
    # is then 3e-7 away from itself after five steps, in float64.
    network = resnet.resnet50(num_classes=CLASSES, width_per_group=8, zero_init_residual=True)
    return WithLoss(network, cross_entropy)


def _mobilenet():
    return WithLoss(mobilenetv3.mobilenet_v3_small(num_classes=CLASSES, width_mult=0.25), cross_entropy)


def _efficientnet():
    block = partial(efficientnet.MBConvConfig, width_mult=0.25, depth_mult=1.0)
    blocks = [block(1, 3, 1, 32, 16, 1), block(6, 3, 2, 16, 24, 2), block(6, 5, 2, 24, 40, 2)]  # stages 1-3 of b0
    network = efficientnet.EfficientNet(blocks, dropout=0.2, num_classes=CLASSES)
    return WithLoss(network, cross_entropy)


def _convnext():
    blocks = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, 32, 2), convnext.CNBlockConfig(32, None, 1)]
    network = convnext.ConvNeXt(blocks, stochastic_depth_prob=0.1, layer_scale=0.1, num_classes=CLASSES)
    return WithLoss(network, cross_entropy)


def _vit():
    network = vision_transformer.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=CLASSES
    )
    nn.init.trunc_normal_(
        network.heads.head.weight, std=0.02
    )  # zero as shipped: nothing before it would get a gradient
    return WithLoss(network, cross_entropy)


def _swin(drop_path):
    network = swin_transformer.SwinTransformer(
        patch_size=[2, 2],
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=drop_path,
        num_classes=CLASSES,
    )
    return WithLoss(network, cross_entropy)


def _timm_vit():
    network = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        drop_path_rate=0.2,
        num_classes=CLASSES,
    )
    return WithLoss(network, cross_entropy)


def _cut_pointwise(network, rows):
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and layer.groups == 1:
            shard(layer, ((rows, 1, 1, 1), (2, 1, 1, 1)))


_slow = partial(momentum, lr=1e-3)
_conv = partial(Entry, batch=images(CLASSES), source="torchvision", is_float64=True)
_norm = partial(_conv, normalises_batch=True)
_attention = partial(Entry, batch=images(CLASSES), source="torchvision")

_resnet_cut = cut(channels=(".conv1",))
_swin_cut = cut(columns=("mlp.0",), inputs=("mlp.3",), dims=4)

ENTRIES = [
    _norm("resnet18", _resnet18, optimizer=_slow, cut=_resnet_cut),
    _norm("resnet50", _resnet50, cut=_resnet_cut),
    _norm("mobilenet_v3_small", _mobilenet, draws=True, cut=_cut_pointwise),
    _norm("efficientnet_b0", _efficientnet, draws=True, cut=_cut_pointwise),
    _conv("convnext", _convnext, draws=True, cut=cut(columns=("block.3",), inputs=("block.5",), dims=4)),
    _attention("vit", _vit, cut=cut(columns=("mlp.0",), inputs=("mlp.3",))),
    _attention("swin", partial(_swin, 0.0), cut=_swin_cut),
    _attention("swin, drop path", partial(_swin, 0.2), draws=True, cut=_swin_cut),
    _attention(
        "vit, drop path",
        _timm_vit,
        source="timm",
        draws=True,
        cut=cut(columns=("attn.qkv", "mlp.fc1"), inputs=("attn.proj", "mlp.fc2")),
    ),
]
