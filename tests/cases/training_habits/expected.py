"""What is refused, in which mode, by which error and why; and what differs because a rank sees its own rows."""

from typing import NamedTuple

from training_habits.trial import CAPTURED, MODES
from training_habits.trial import OWN_ROWS as ROWS

CAPTURED_ALL = MODES[:5]
ZERO = MODES[1:3]
PARTS_OF_ROWS = MODES[4:]
PIPELINE = ("pipeline",)
PLAIN = ("data_parallel",)
FSDP = ("data_parallel hsdp",)


class Refusal(NamedTuple):
    error: str
    """Its class."""
    text: str
    """A part of what it says."""


REFUSALS = {}
"""(mode, habit) -> by what it is refused."""


def _refused(error, text, modes, *habits):
    for cell in [(mode, habit) for mode in modes for habit in habits]:
        assert cell not in REFUSALS, cell
        REFUSALS[cell] = Refusal(error, text)


# -- by captured steps and pipelines: a graph of one call for all parts of the batch -----------------------------------

_refused("CaptureError", "store detach()", CAPTURED, "state left on the module with its graph")
_refused("CaptureError", "stores tensors in attributes", PIPELINE, "state left on the module with its graph")
# that tensor would get the gradient of one rank
_refused("CaptureError", "register it as nn.Parameter", CAPTURED_ALL, "tensor with a gradient that is no parameter")
# its gradient outside is that of one rank's rows
_refused("StrategyError", "use it inside the network", ("semi_auto",), "parameter used again outside of the call")
# nobody sums what one rank asks for by itself
_HEAD = "gradients of a head outside, by torch.autograd.grad"
_refused("StrategyError", "outside of the step gives that of this rank", (*CAPTURED, *PLAIN), _HEAD)
_refused("StrategyError", "which gathers others for each call", FSDP, _HEAD)
_PENALTY = "backward with create_graph, then a penalty on the gradients"
_refused("CaptureError", "backward(create_graph=True) through a step", CAPTURED_ALL, _PENALTY)
_refused(
    "CaptureError",
    "backward(create_graph=True) through a step",
    (*CAPTURED, *FSDP),
    "gradient penalty outside (WGAN-GP)",
)
_refused(
    "CaptureError",
    "takes gradients inside the forward pass",
    CAPTURED_ALL,
    "inner step inside by functional_call (MAML)",
)
# operators mean something else under vmap, grad and jvp
_refused("CaptureError", "transform of torch.func", CAPTURED_ALL, "vmap over stacked weights")
_refused("CaptureError", "transform of torch.func", ("semi_auto", *ZERO, "pipeline"), "func.grad inside")
_refused("CaptureError", "autograd.Function with fu", ("shard",), "func.grad inside")
# every rank would draw for its own rows, or other numbers than one process
_refused(
    "CaptureError",
    "draws from the random of Python or numpy",
    CAPTURED_ALL,
    "draw: random.random",
    "draw: np.random.rand",
    "draw: default_rng of numpy, made anew",
)
_refused("CaptureError", "a generator of its own", CAPTURED_ALL, "draw: a generator of its own")
_refused(
    "CaptureError",
    "draws random numbers, which would not be those of one process",
    CAPTURED_ALL,
    "draw: multinomial",
    "draw: randperm mixes the rows",
)
_refused(
    "StrategyError",
    "whose rows of the batch are not known",
    PIPELINE,
    "draw: numbers for the whole batch at once",
    "draw: bernoulli_ and normal_",
)
# numbers and sizes of a tensor's values are not known in a graph for all ranks
_refused(
    "CaptureError",
    "depends on a tensor's values",
    CAPTURED_ALL,
    "losses by name: huber, hinge, Poisson, Gaussian",
    "batch norm with momentum None",
)
_refused("CaptureError", "size depends on values", CAPTURED_ALL, "rows of an expert chosen by a mask")
_refused("CaptureError", "sizes depend on the lengths", CAPTURED_ALL, "packed sequences")
_refused("CaptureError", "has a backward hook", CAPTURED_ALL, "hook: full backward", "hook: full backward pre")
_WRITTEN = "write: a parameter in forward (weights kept on the sphere)"
_MOCO = "teacher inside the network, updated in forward (MoCo)"
_refused(
    "CaptureError",
    "writes under no_grad into a tensor that has a gradient",
    CAPTURED_ALL,
    "write: under no_grad",
    _WRITTEN,
)
_refused("CaptureError", "tensor 0 of the call", CAPTURED_ALL, "write: into the batch in forward")
_refused("CaptureError", "_get_data_attr", CAPTURED_ALL, "write: parameter.data in forward")
_refused("CaptureError", "changes parameter", CAPTURED_ALL, _MOCO, "embedding with max_norm")
_refused(
    "CaptureError",
    "changes a part of a tensor",
    CAPTURED_ALL,
    *(f"write: {name}" for name in ("unfold", "as_strided", "diagonal", "write into the gradient-free part")),
)
_VALUE = "the call reads and changes a Python value"
_refused("CaptureError", _VALUE, PIPELINE, "number counted by the call", "list grown by the call")
_refused(
    "CaptureError",
    _VALUE,
    CAPTURED,
    "number counted by the call, in micro batches",
    "number counted by the call, in copies",
)
_refused(
    "CaptureError",
    "the network stores tensors in attributes",
    PIPELINE,
    "results of layers kept by hooks",
    "weight_norm, the old one",
    "spectral_norm, the old one",
    "hidden state kept on the module, detached",
    "attributes that the forward pass sets",
)
_refused("StrategyError", "return it as it is", PIPELINE, "dataclass among the results")
_POSITIONS = "positions as an argument without rows of the batch"
_refused("StrategyError", "cannot be cut into 2 equal micro batches", PIPELINE, _POSITIONS)
_refused("CaptureError", "torch raises RuntimeError", ("semi_auto", *ZERO), _POSITIONS)
# an automatic cut of so small a network leaves a stage empty
_refused(
    "StrategyError",
    "has no operator",
    PIPELINE,
    "module that is assigned",
    "part of the network unused in some steps",
    "embedding grown between steps",
)
_refused("StrategyError", "it is in no stage", PIPELINE, "head chosen by the task")
_refused("StrategyError", "too few for 4 stages", ("pipeline zbv",), "a layer beside the loss")
_refused("StrategyError", "tensor inputs, and it calls", ("shard",), "spectral_norm, the old one")
# a parameter is cut at the first call, and the script holds a graph over the whole one
_HELD = "still held by a backward graph"
_refused("ParallelError", _HELD, ZERO, "weight_norm, the old one")
_refused(
    "ParallelError", "whose memory is not the whole's", (*ZERO, "shard", "pipeline"), "pruning by torch.nn.utils.prune"
)

# -- by data parallelism -----------------------------------------------------------------------------------------------

_refused("StrategyError", "create_graph=True for gradients of parameters", PLAIN, _PENALTY)
# the hook would be called before the ranks' mean is there
_refused("StrategyError", "register_post_accumulate_grad_hook", PLAIN, "hook: after accumulation")
_refused("StrategyError", "writes into its parameter", ROWS, "embedding with max_norm")
# FSDP2 gathers parameters for a call, and frees what was written
_refused("StrategyError", "writes into its parameter", FSDP, _WRITTEN, "write: parameter.data in forward", _MOCO)
_refused(
    "StrategyError",
    "was put into the network after FSDP2 had cut it",
    FSDP,
    "the head replaced between steps",
    "embedding grown between steps",
    "parameter that is assigned",
    "module that is assigned",
    "pruning by torch.nn.utils.prune",
)
_refused(
    "StrategyError",
    "of parameters that FSDP2 has cut",
    FSDP,
    "torch.autograd.grad of the parameters",
    "backward with inputs=",
    _PENALTY,
)
_refused(
    "StrategyError",
    "copy.deepcopy: FSDP2 has cut this network",
    FSDP,
    "AveragedModel of what is wrapped, made after the first step",
    "deepcopy of what is wrapped, after a step, and both go on",
    "EMA copied after the first step",
)
_refused(
    "StrategyError",
    "has a hook (register_hook), which FSDP2 never calls",
    FSDP,
    "hook: of a parameter",
    "hook: of a parameter, clipping by its norm",
)
_refused(
    "StrategyError", "is a part of another network, too, that FSDP2", FSDP, "two wrapped networks that share a layer"
)
_refused("StrategyError", "as one type", FSDP, "types mixed: float32 part of a float64 network")
_refused("StrategyError", "convert the network before", FSDP, ".to(float32) after the first call")

# -- not refused, and not the numbers of one process -------------------------------------------------------------------

OWN_ROWS = {
    **dict.fromkeys(
        (
            "sum over the rows inside",
            "ignored labels, more on one rank",
            "mask of uneven rows, mean over what is left",
            "in-batch negatives",
            "loss of the hardest rows",
            "a rank without a label that counts",
            "function that looks at the whole batch",
            "language model with padding",
            "each row minus the row before",
            "softmax over the batch",
            "switch of experts with room for four rows",
            "write: row of a buffer, by a counter",
            "batch norm, then evaluation",
            "decoder of images",
            "codebook that follows the batch (VQ-EMA)",
        ),
        PARTS_OF_ROWS,
    ),
    **dict.fromkeys(
        (
            "draw: multinomial",
            "draw: randperm mixes the rows",
            "write: diagonal",
            "inner step inside by functional_call (MAML)",
            "batch norm with momentum None",
        ),
        ROWS,
    ),
    "tensor hook that looks at the whole gradient": PIPELINE,
    **dict.fromkeys(("spectral_norm of parametrizations", "buffers from weights"), PIPELINE),
}
"""Habits whose loss, or whose buffers, depend on the other rows: these modes have the numbers of one process that takes
half of the rows at a time."""

DOCUMENTED = {
    "tensor hook that looks at the whole gradient",
    "hook: of a parameter, clipping by its norm",
    "hook: of an activation, made in forward",
    "attributes that the forward pass sets",
}
"""Habits that differ in the modes without capture, as docs/reference/modes.md says: a hook sees this rank's gradient
before the mean, and a buffer that is written in forward holds what this rank's rows give."""

WARNED = {"trainable head on detached results", "trainable head on results under no_grad (linear probe)"}
"""Habits of which a warning says that every rank trains its own copy, where a rank's results are its own rows: no pass
goes through a step."""
OF_OWN_ROWS = (*MODES[:3], *ROWS)


def expected(mode, name):
    """Return the kinds of verdict that are right for a habit that is not refused."""
    if mode in OWN_ROWS.get(name, ()):
        return ("own rows",)
    if name in WARNED and mode in OF_OWN_ROWS:
        return ("different",)
    if mode in ROWS and name in DOCUMENTED:
        return ("different", "refused")
    return ("equal",)
