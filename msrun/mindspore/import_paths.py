"""MindSpore's longer import paths, such as `mindspore.train.callback`: each is one of our modules."""

from __future__ import annotations

import sys
from typing import Any

_OF_MODULE = {
    "": "common",
    "parallel": """
    common._utils nn.parallel parallel._auto_parallel_context parallel._utils parallel.algo_parameter_config
    parallel.auto_parallel parallel.distributed parallel.function parallel.nn parallel.shard
    """,
    "ops.higher_order": "common.api common.jit_config common.lazy_inline common.mutable",
    "dtype": "common.dtype",
    "initializer": "common.initializer common.seed seed",
    "tensor": "common.parameter common.tensor",
    "communication": "communication._comm_helper communication.management",
    "ops": """
    communication.comm_func ops._primitive_cache ops.auto_generate ops.communication ops.composite
    ops.composite.base ops.function ops.function.array_func ops.function.math_func ops.function.nn_func
    ops.functional ops.operations ops.operations._inner_ops ops.operations.array_ops ops.operations.comm_ops
    ops.operations.math_ops ops.operations.nn_ops ops.primitive
    """,
    "dataset": "dataset.engine dataset.engine.datasets",
    "dataset.transforms": """
    dataset.text dataset.transforms.c_transforms dataset.transforms.py_transforms dataset.transforms.transforms
    """,
    "dataset.vision": """
    dataset.vision.c_transforms dataset.vision.py_transforms dataset.vision.transforms dataset.vision.utils
    """,
    "context": "device_context",
    "runtime": "hal",
    "nn": """
    nn.cell nn.dynamic_lr nn.grad nn.layer nn.layer.activation nn.layer.basic nn.layer.container nn.layer.conv
    nn.layer.embedding nn.layer.math nn.layer.normalization nn.layer.padding nn.layer.pooling nn.layer.rnns
    nn.learning_rate_schedule nn.loss nn.loss.loss nn.optim nn.optim.adam nn.optim.lamb nn.optim.momentum
    nn.optim.optimizer nn.optim.sgd nn.optim.ada_grad nn.optim.ftrl nn.optim.lazyadam nn.optim.rmsprop nn.utils
    nn.utils.init nn.wrap nn.wrap.cell_wrapper nn.wrap.grad_reducer nn.wrap.loss_scale
    """,
    "train": """
    train._utils train.callback train.callback._callback train.dataset_helper train.model train.serialization
    """,
    "metrics": "nn.metrics nn.metrics.metric train.metrics train.metrics.metric",
    "profiler": "profiler.profiling",
    "amp": "train.amp train.loss_scale_manager",
}
"""Path of a module below this package -> the longer paths that MindSpore has for its names."""
ALIASES = dict(sorted((path, module) for module, paths in _OF_MODULE.items() for path in paths.split()))
"""Path below `mindspore` -> path of the module that has its names."""


def take_names(module: str, source: Any, names: str) -> list[str]:
    """Give a module names of another one, which are its own names too, and return them."""
    taken = {name: getattr(source, name) for name in names.split()}
    vars(sys.modules[module]).update(taken)
    return list(taken)


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
