"""MindSpore's longer import paths, such as `mindspore.train.callback`: each is one of our modules."""

from __future__ import annotations

import sys

ALIASES = {
    "common": "",
    "common.api": "jit",
    "common.dtype": "dtype",
    "common.initializer": "initializer",
    "common.parameter": "tensor",
    "common.seed": "seed",
    "common.tensor": "tensor",
    "communication.comm_func": "ops",
    "communication.management": "communication",
    "dataset.transforms.c_transforms": "dataset.transforms",
    "dataset.transforms.py_transforms": "dataset.transforms",
    "dataset.vision.c_transforms": "dataset.vision",
    "dataset.vision.py_transforms": "dataset.vision",
    "nn.cell": "nn",
    "nn.layer": "nn",
    "nn.loss": "nn",
    "nn.metrics": "train",
    "nn.optim": "nn",
    "nn.utils": "nn",
    "nn.utils.init": "nn",
    "nn.wrap": "nn",
    "ops.composite": "ops",
    "ops.function": "ops",
    "ops.functional": "ops",
    "ops.operations": "ops",
    "parallel.auto_parallel": "parallel",
    "parallel.nn": "parallel",
    "parallel.shard": "parallel",
    "train.callback": "train",
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
