"""MindSpore's import paths and words over `msrun.runtime`: scripts written for MindSpore train on torch.

    import msrun.mindspore as ms
    from msrun.mindspore import nn
    from msrun.mindspore.communication import init

`python -m msrun.mindspore train.py`, or `msrun --worker_num 8 -m msrun.mindspore train.py`, runs a script whose imports
still say `mindspore`. Tensors, parameters and modules are torch's own: everything of torch works on them as well.
"""

from __future__ import annotations

from msrun.mindspore import (
    communication,
    context,
    dataset,
    dtype,
    initializer,
    nn,
    ops,
    parallel,
    seed,
    train,
)
from msrun.mindspore.context import (
    GRAPH_MODE,
    PYNATIVE_MODE,
    ParallelMode,
    get_auto_parallel_context,
    get_context,
    get_ps_context,
    reset_auto_parallel_context,
    reset_ps_context,
    set_auto_parallel_context,
    set_context,
    set_ps_context,
)
from msrun.mindspore.dtype import (
    bfloat16,
    bool_,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
)
from msrun.mindspore.import_paths import add_import_paths
from msrun.mindspore.jit import jit, ms_function
from msrun.mindspore.ops import value_and_grad
from msrun.mindspore.seed import get_seed, set_seed
from msrun.mindspore.tensor import Parameter, ParameterTuple, Tensor
from msrun.mindspore.train import (
    Model,
    export_checkpoint,
    load_checkpoint,
    load_distributed_checkpoint,
    load_param_into_net,
    merge_pipeline_strategys,
    merge_sliced_parameter,
    rank_list_for_transform,
    restore_group_info_list,
    save_checkpoint,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)

__all__ = [
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "Model",
    "ParallelMode",
    "Parameter",
    "ParameterTuple",
    "Tensor",
    "bfloat16",
    "bool_",
    "communication",
    "context",
    "dataset",
    "dtype",
    "export_checkpoint",
    "float16",
    "float32",
    "float64",
    "get_auto_parallel_context",
    "get_context",
    "get_ps_context",
    "get_seed",
    "initializer",
    "int8",
    "int16",
    "int32",
    "int64",
    "jit",
    "load_checkpoint",
    "load_distributed_checkpoint",
    "load_param_into_net",
    "merge_pipeline_strategys",
    "merge_sliced_parameter",
    "ms_function",
    "nn",
    "ops",
    "parallel",
    "rank_list_for_transform",
    "reset_auto_parallel_context",
    "reset_ps_context",
    "restore_group_info_list",
    "save_checkpoint",
    "seed",
    "set_auto_parallel_context",
    "set_context",
    "set_ps_context",
    "set_seed",
    "train",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "uint8",
    "value_and_grad",
]

add_import_paths(__name__)
