"""What is refused, in which mode, by which error and why; and what differs because a rank sees its own rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from training_habits.trial import MODES

CAPTURED = MODES[:4]
CAPTURED_ALL = MODES[:5]
ZERO = MODES[1:3]
CUT = MODES[1:4]
ROWS = MODES[5:]
PARTS_OF_ROWS = MODES[4:]
OF_OWN_ROWS = (*MODES[:3], *ROWS)
"""Modes in which a rank's results are its own rows."""


@dataclass(frozen=True)
class Refusal:
    error: str
    """Its class."""
    text: str
    """A part of what it says."""
    reason: str
    habits: Mapping[str, Collection[str]]
    """name -> modes"""


def refusal_of(mode: str, name: str) -> Refusal | None:
    """Return why a habit is refused in a mode."""
    return next((refusal for refusal in REFUSALS if mode in refusal.habits.get(name, ())), None)


REFUSALS = (
    Refusal(
        "CaptureError",
        "store detach()",
        "a graph of one call cannot hold that of another",
        {"state left on the module with its graph": CAPTURED},
    ),
    Refusal(
        "CaptureError",
        "stores tensors in attributes",
        "the code runs once for all parts of the batch",
        {"state left on the module with its graph": ("pipeline",)},
    ),
    Refusal(
        "CaptureError",
        "register it as nn.Parameter",
        "a tensor that nobody names would get the gradient of one rank",
        {"tensor with a gradient that is no parameter": CAPTURED_ALL},
    ),
    Refusal(
        "StrategyError",
        "use it inside the network",
        "its gradient outside is that of one rank's rows",
        {"parameter used again outside of the call": ("semi_auto",)},
    ),
    Refusal(
        "StrategyError",
        "outside of the step gives that of this rank",
        "nobody sums what one rank asks for by itself",
        {"gradients of a head outside, by torch.autograd.grad": (*CAPTURED, "data_parallel")},
    ),
    Refusal(
        "StrategyError",
        "which gathers others for each call",
        "FSDP2 gathers other parameters for each call",
        {"gradients of a head outside, by torch.autograd.grad": ("data_parallel hsdp",)},
    ),
    Refusal(
        "CaptureError",
        "backward(create_graph=True) through a step",
        "gradients of a captured step have no graph of their own",
        {
            "gradient penalty outside (WGAN-GP)": (*CAPTURED, "data_parallel hsdp"),
            "backward with create_graph, then a penalty on the gradients": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "transform of torch.func",
        "operators mean something else under vmap, grad and jvp",
        {
            "vmap over stacked weights": CAPTURED_ALL,
            "jvp inside": CAPTURED_ALL,
            "vmap over the rows": CAPTURED_ALL,
            "func.grad inside": ("semi_auto", *ZERO, "pipeline"),
        },
    ),
    Refusal(
        "CaptureError",
        "autograd.Function with fu",
        "operators mean something else under vmap, grad and jvp",
        {
            "func.grad inside": ("shard",),
        },
    ),
    Refusal(
        "CaptureError",
        "draws from the random of Python or numpy",
        "every rank would draw for its own rows",
        {
            "draw: random.uniform": CAPTURED_ALL,
            "draw: random.random": CAPTURED_ALL,
            "draw: random.gauss": CAPTURED_ALL,
            "draw: random.choice": CAPTURED_ALL,
            "draw: a branch by random.random": CAPTURED_ALL,
            "draw: random.randint": CAPTURED_ALL,
            "draw: np.random.rand": CAPTURED_ALL,
            "draw: np.random.permutation of columns": CAPTURED_ALL,
            "draw: default_rng of numpy, made anew": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "a generator of its own",
        "numbers of such a generator are not those of one process",
        {
            "draw: a generator of its own": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "draws random numbers, which would not be those of one process",
        "numbers that depend on the layout",
        {
            "draw: multinomial": CAPTURED_ALL,
            "draw: randperm mixes the rows": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "depends on a tensor's values",
        "a Python number of a tensor's values is not known in a graph for all ranks",
        {
            "losses by name: huber, hinge, Poisson, Gaussian": CAPTURED_ALL,
            "batch norm with momentum None": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "size depends on values",
        "sizes that depend on values are not known in a graph for all ranks",
        {
            "rows of an expert chosen by a mask": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "sizes depend on the lengths",
        "sizes that depend on values are not known in a graph for all ranks",
        {
            "packed sequences": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "has a backward hook",
        "a graph calls no hooks of modules in its backward pass",
        {
            "hook: full backward": CAPTURED_ALL,
            "hook: full backward pre": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "writes under no_grad into a tensor that has a gradient",
        "the gradient of the value before would be needed",
        {
            "write: under no_grad": CAPTURED_ALL,
            "write: a parameter in forward (weights kept on the sphere)": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "tensor 0 of the call",
        "a write into an argument is not kept",
        {
            "write: into the batch in forward": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "_get_data_attr",
        "parameters are written between the steps",
        {
            "write: parameter.data in forward": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "changes parameter",
        "parameters are written between the steps",
        {
            "teacher inside the network, updated in forward (MoCo)": CAPTURED_ALL,
            "embedding with max_norm": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "changes a part of a tensor",
        "a view of this kind cannot be written as an operator",
        {
            "write: unfold": CAPTURED_ALL,
            "write: as_strided": CAPTURED_ALL,
            "write: diagonal": CAPTURED_ALL,
            "write: write into the gradient-free part": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "the call reads and changes a Python value",
        "the code runs once for all parts of the batch",
        {
            "number counted by the call": ("pipeline",),
            "flag turned by the call": ("pipeline",),
            "list grown by the call": ("pipeline",),
            "number counted by the call, in micro batches": CAPTURED,
            "number counted by the call, in copies": CAPTURED,
            "flag turned by the call, in micro batches": CAPTURED,
            "flag turned by the call, in copies": CAPTURED,
            "list grown by the call, in micro batches": CAPTURED,
            "list grown by the call, in copies": CAPTURED,
        },
    ),
    Refusal(
        "CaptureError",
        "the network stores tensors in attributes",
        "the code runs once for all parts of the batch",
        {
            "results of layers kept by hooks": ("pipeline",),
            "weight_norm, the old one": ("pipeline",),
            "spectral_norm, the old one": ("pipeline",),
            "hidden state kept on the module, detached": ("pipeline",),
            "pruned before the first call": ("pipeline",),
            "attributes that the forward pass sets": ("pipeline",),
        },
    ),
    Refusal(
        "StrategyError",
        "return it as it is",
        "the results of micro batches are joined where they are seen",
        {
            "dataclass among the results": ("pipeline",),
        },
    ),
    Refusal(
        "StrategyError",
        "whose rows of the batch are not known",
        "micro batches draw the numbers of their rows",
        {
            "draw: numbers for the whole batch at once": ("pipeline",),
            "draw: bernoulli_ and normal_": ("pipeline",),
        },
    ),
    Refusal(
        "StrategyError",
        "create_graph=True for gradients of parameters",
        "the ranks exchange gradients, which have no graph of their own",
        {
            "backward with create_graph, then a penalty on the gradients": ("data_parallel",),
        },
    ),
    Refusal(
        "StrategyError",
        "register_post_accumulate_grad_hook",
        "the hook would be called before the ranks' mean is there",
        {
            "hook: after accumulation": ("data_parallel",),
        },
    ),
    Refusal(
        "StrategyError",
        "which the other stages of a pipeline would not see",
        "a buffer has one stage",
        {
            "write: a counter buffer": ("pipeline",),
            "spectral_norm of parametrizations": ("pipeline",),
            "batch norm": ("pipeline",),
            "batch norm, then evaluation": ("pipeline",),
            "codebook that follows the batch (VQ-EMA)": ("pipeline",),
            "memory bank of the last rows": ("pipeline",),
            "class centres that the loss reads and the call moves": ("pipeline",),
            "write: row of a buffer, by a counter": ("pipeline",),
        },
    ),
    Refusal(
        "StrategyError",
        "cannot be cut into 2 equal micro batches",
        "a tensor among the arguments has no rows of the batch",
        {
            "positions as an argument without rows of the batch": ("pipeline",),
        },
    ),
    Refusal(
        "StrategyError",
        "tensor inputs, and it calls",
        "a strategy names the inputs of one operator",
        {
            "spectral_norm, the old one": ("shard",),
        },
    ),
    Refusal(
        "ParallelError",
        "still held by a backward graph",
        "a parameter is cut at the first call, and the script holds a graph over the whole one",
        {
            "pruned before the first call": ZERO,
            "distance from the first weights outside (EWC)": ("shard", "pipeline", "data_parallel hsdp"),
        },
    ),
    Refusal(
        "ParallelError",
        "whose memory is not the whole's",
        "no answer for a part; whole_parameters(net) gives the whole",
        {
            "pruning by torch.nn.utils.prune": (*CUT, "pipeline"),
        },
    ),
    Refusal(
        "StrategyError",
        "writes into its parameter",
        "FSDP2 gathers parameters for a call, and frees what was written",
        {
            "write: a parameter in forward (weights kept on the sphere)": ("data_parallel hsdp",),
            "write: parameter.data in forward": ("data_parallel hsdp",),
            "teacher inside the network, updated in forward (MoCo)": ("data_parallel hsdp",),
            "embedding with max_norm": ROWS,
        },
    ),
    Refusal(
        "CaptureError",
        "torch raises RuntimeError",
        "a tensor among the arguments has no rows of the batch",
        {
            "positions as an argument without rows of the batch": ("semi_auto",),
        },
    ),
    Refusal(
        "StrategyError",
        "has no operator",
        "an automatic cut of so small a network leaves a stage empty",
        {
            "the head replaced between steps": ("pipeline",),
            "module that is assigned": ("pipeline",),
            "part of the network unused in some steps": ("pipeline",),
            "embedding grown between steps": ("pipeline",),
        },
    ),
    Refusal(
        "StrategyError",
        "was put into the network after FSDP2 had cut it",
        "FSDP2 cuts parameters once",
        {
            "the head replaced between steps": ("data_parallel hsdp",),
            "layer added between steps": ("data_parallel hsdp",),
            "weights tied after the first step": ("data_parallel hsdp",),
            "embedding grown between steps": ("data_parallel hsdp",),
            "parameter that is assigned": ("data_parallel hsdp",),
            "module that is assigned": ("data_parallel hsdp",),
            "pruning by torch.nn.utils.prune": ("data_parallel hsdp",),
        },
    ),
    Refusal(
        "StrategyError",
        "of parameters that FSDP2 has cut",
        "FSDP2 gathers other parameters for each call",
        {
            "torch.autograd.grad of the parameters": ("data_parallel hsdp",),
            "backward with inputs=": ("data_parallel hsdp",),
            "backward with create_graph, then a penalty on the gradients": ("data_parallel hsdp",),
        },
    ),
    Refusal(
        "StrategyError",
        "copy.deepcopy: FSDP2 has cut this network",
        "hooks and groups of FSDP2 belong to one network",
        {
            "AveragedModel of what is wrapped, made after the first step": ("data_parallel hsdp",),
            "deepcopy of what is wrapped, after a step, and both go on": ("data_parallel hsdp",),
            "EMA copied after the first step": ("data_parallel hsdp",),
        },
    ),
    Refusal(
        "StrategyError",
        "has a hook (register_hook), which FSDP2 never calls",
        "FSDP2 calls no hooks of parameters",
        {
            "hook: of a parameter": ("data_parallel hsdp",),
            "hook: of a parameter, clipping by its norm": ("data_parallel hsdp",),
        },
    ),
    Refusal(
        "StrategyError",
        "is a part of another network, too, that FSDP2",
        "FSDP2 cuts a module once",
        {
            "two wrapped networks that share a layer": ("data_parallel hsdp",),
        },
    ),
    Refusal(
        "StrategyError",
        "as one type",
        "FSDP2 sends the parameters of a block as one type",
        {
            "types mixed: float32 part of a float64 network": ("data_parallel hsdp",),
        },
    ),
    Refusal(
        "StrategyError",
        "convert the network before",
        "FSDP2 cuts parameters once",
        {
            ".to(float32) after the first call": ("data_parallel hsdp",),
        },
    ),
    Refusal(
        "CaptureError",
        "takes gradients inside the forward pass",
        "the graph of a forward pass holds no backward pass",
        {
            "gradient penalty inside": CAPTURED_ALL,
            "inner step inside by functional_call (MAML)": CAPTURED_ALL,
        },
    ),
    Refusal(
        "CaptureError",
        "torch raises RuntimeError",
        "a tensor among the arguments has no rows of the batch",
        {
            "positions as an argument without rows of the batch": ZERO,
        },
    ),
    Refusal(
        "StrategyError",
        "it is in no stage",
        "the first call gives each parameter its stage",
        {
            "draw: layer dropped by torch.rand": ("pipeline",),
            "head chosen by the task": ("pipeline",),
        },
    ),
    Refusal(
        "ParallelError",
        "still held by a backward graph",
        "a parameter is cut at the first call, and the script holds a graph over the whole one",
        {
            "distance from the first weights outside (EWC)": ZERO,
            "weight_norm, the old one": ZERO,
        },
    ),
)

OWN_ROWS: Mapping[str, Collection[str]] = {
    "tensor hook that looks at the whole gradient": ("pipeline",),
    "sum over the rows inside": PARTS_OF_ROWS,
    "ignored labels, more on one rank": PARTS_OF_ROWS,
    "ignored labels and weights of classes": PARTS_OF_ROWS,
    "mask of uneven rows, mean over what is left": PARTS_OF_ROWS,
    "rows weighed by their share of the batch": PARTS_OF_ROWS,
    "in-batch negatives": PARTS_OF_ROWS,
    "scores of all pairs with a learnt temperature": PARTS_OF_ROWS,
    "triplets with the hardest of the batch": PARTS_OF_ROWS,
    "loss of the hardest rows": PARTS_OF_ROWS,
    "median of the rows' losses": PARTS_OF_ROWS,
    "variance and covariance over the batch": PARTS_OF_ROWS,
    "a rank without a label that counts": PARTS_OF_ROWS,
    "draw: multinomial": ROWS,
    "draw: randperm mixes the rows": ROWS,
    "write: diagonal": ROWS,
    "write: row of a buffer, by a counter": ROWS,
    "inner step inside by functional_call (MAML)": ROWS,
    "function that looks at the whole batch": PARTS_OF_ROWS,
    "batch norm": ROWS,
    "batch norm with momentum None": ROWS,
    "batch norm without statistics": PARTS_OF_ROWS,
    "batch statistics by hand": PARTS_OF_ROWS,
    "virtual batch norm over the features of all rows": PARTS_OF_ROWS,
    "batch norm, then evaluation": ROWS,
    "language model with padding": PARTS_OF_ROWS,
    "cumulative sum over the batch": PARTS_OF_ROWS,
    "each row minus the row before": PARTS_OF_ROWS,
    "logsumexp over the batch": PARTS_OF_ROWS,
    "softmax over the batch": PARTS_OF_ROWS,
    "switch of experts with room for four rows": PARTS_OF_ROWS,
    "codebook that follows the batch (VQ-EMA)": ROWS,
    "memory bank of the last rows": ROWS,
    "class centres that the loss reads and the call moves": ROWS,
}
"""Habits whose loss, or whose buffers, depend on the other rows: these modes have the numbers of one process that takes
half of the rows at a time."""

DOCUMENTED: Mapping[str, str] = {
    "tensor hook that looks at the whole gradient": "a hook sees this rank's gradient, before the mean",
    "hook: of a parameter, clipping by its norm": "a hook sees this rank's gradient, before the mean",
    "hook: of an activation, made in forward": "a hook sees this rank's gradient, before the mean",
    "attributes that the forward pass sets": "a buffer written in forward holds what this rank's rows give",
}
"""Habits that differ in the modes without capture, as docs/reference/modes.md says, and why."""

WARNED: Mapping[str, Sequence[str]] = {
    "trainable head on detached results": OF_OWN_ROWS,
    "trainable head on results under no_grad (linear probe)": OF_OWN_ROWS,
}
"""Habits of which a warning says that every rank trains its own copy: no pass goes through a step -> modes."""

WRONG: Mapping[tuple[str, str], str] = {}
"""(mode, habit) -> why it has other numbers; its test is expected to fail."""
