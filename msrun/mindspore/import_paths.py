"""MindSpore's longer import paths, such as `mindspore.train.callback`: each is one of our modules."""

from __future__ import annotations

import sys

ALIASES = {
    "common": "",
    "common._utils": "parallel",
    "common.api": "jit",
    "common.dtype": "dtype",
    "common.initializer": "initializer",
    "common.jit_config": "jit",
    "common.lazy_inline": "jit",
    "common.mutable": "jit",
    "common.parameter": "tensor",
    "common.seed": "seed",
    "common.tensor": "tensor",
    "communication._comm_helper": "communication",
    "communication.comm_func": "ops",
    "communication.management": "communication",
    "dataset.engine": "dataset",
    "dataset.engine.datasets": "dataset",
    "dataset.text": "dataset.transforms",
    "dataset.transforms.c_transforms": "dataset.transforms",
    "dataset.transforms.py_transforms": "dataset.transforms",
    "dataset.transforms.transforms": "dataset.transforms",
    "dataset.vision.c_transforms": "dataset.vision",
    "dataset.vision.py_transforms": "dataset.vision",
    "dataset.vision.transforms": "dataset.vision",
    "dataset.vision.utils": "dataset.vision",
    "device_context": "context",
    "hal": "runtime",
    "nn.cell": "nn",
    "nn.dynamic_lr": "nn",
    "nn.grad": "nn",
    "nn.layer": "nn",
    "nn.layer.activation": "nn",
    "nn.layer.basic": "nn",
    "nn.layer.container": "nn",
    "nn.layer.conv": "nn",
    "nn.layer.embedding": "nn",
    "nn.layer.math": "nn",
    "nn.layer.normalization": "nn",
    "nn.layer.padding": "nn",
    "nn.layer.pooling": "nn",
    "nn.layer.rnns": "nn",
    "nn.learning_rate_schedule": "nn",
    "nn.loss": "nn",
    "nn.loss.loss": "nn",
    "nn.metrics": "train",
    "nn.optim": "nn",
    "nn.optim.adam": "nn",
    "nn.optim.lamb": "nn",
    "nn.optim.momentum": "nn",
    "nn.optim.optimizer": "nn",
    "nn.optim.sgd": "nn",
    "nn.parallel": "parallel",
    "nn.utils": "nn",
    "nn.utils.init": "nn",
    "nn.wrap": "nn",
    "nn.wrap.cell_wrapper": "nn",
    "nn.wrap.grad_reducer": "nn",
    "nn.wrap.loss_scale": "nn",
    "ops._primitive_cache": "ops",
    "ops.auto_generate": "ops",
    "ops.communication": "ops",
    "ops.composite": "ops",
    "ops.composite.base": "ops",
    "ops.function": "ops",
    "ops.function.array_func": "ops",
    "ops.function.math_func": "ops",
    "ops.function.nn_func": "ops",
    "ops.functional": "ops",
    "ops.operations": "ops",
    "ops.operations._inner_ops": "ops",
    "ops.operations.array_ops": "ops",
    "ops.operations.comm_ops": "ops",
    "ops.operations.math_ops": "ops",
    "ops.operations.nn_ops": "ops",
    "ops.primitive": "ops",
    "parallel._auto_parallel_context": "parallel",
    "parallel._utils": "parallel",
    "parallel.algo_parameter_config": "parallel",
    "parallel.auto_parallel": "parallel",
    "parallel.distributed": "parallel",
    "parallel.function": "parallel",
    "parallel.nn": "parallel",
    "parallel.shard": "parallel",
    "profiler.profiling": "profiler",
    "train._utils": "train",
    "train.amp": "amp",
    "train.callback": "train",
    "train.callback._callback": "train",
    "train.dataset_helper": "train",
    "train.loss_scale_manager": "amp",
    "train.metrics": "train",
    "train.model": "train",
    "train.serialization": "train",
}
"""Path below `mindspore` -> path of the module that has its names."""


def add_import_paths(package: str) -> None:
    """Let `import PACKAGE.train.callback` and the other longer paths find their modules.

    Args:
        package: an imported package with the modules of `ALIASES`.
    """
    for alias, target in ALIASES.items():
        module = sys.modules[f"{package}.{target}" if target else package]
        sys.modules[f"{package}.{alias}"] = module
        parent, _, name = alias.rpartition(".")
        holder = sys.modules[f"{package}.{parent}" if parent else package]
        if not hasattr(holder, name):
            setattr(holder, name, module)


def pose_as_mindspore(package: str) -> None:
    """Let `import mindspore`, and every path below it, find our modules, in this process.

    Args:
        package: name of the imported package, `msrun.mindspore`.
    """
    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}."):
            sys.modules["mindspore" + name.removeprefix(package)] = sys.modules[name]
