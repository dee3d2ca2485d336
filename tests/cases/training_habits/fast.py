"""Which habits `make test` runs, and in which mode: some of every kind."""

_BY_MODE = {
    "semi_auto": (
        "ignored labels, more on one rank",
        "hidden state handed on with its graph: two calls, one backward pass",
        "adversarial pair (GAN)",
        "inputs that require gradients",
        "write: the head of a detector",
        "draw: dropout",
        "codebook that follows the batch (VQ-EMA)",
        "backward with create_graph, then a penalty on the gradients",
    ),
    "hsdp level1": ("loss outside", "clip_grad_norm_"),
    "hsdp level3": ("a row set through .data",),
    "shard": ("write: view of blocks",),
    "pipeline": ("gradient accumulation by hand",),
    "data_parallel": (
        "results in a dataclass, loss outside",
        "trainable embedding outside of the step",
        "mask of uneven rows, mean over what is left",
        "trainable head on detached results",
        "part of the network unused in some steps",
        "gradients of a head outside, by torch.autograd.grad",
    ),
    "data_parallel hsdp": (
        "hidden state handed on with its graph: two calls, one backward pass",
        "trainable head outside of the step",
        "deepcopy of what is wrapped, after a step, and both go on",
    ),
}
FAST = [f"{mode}/{name}" for mode, names in _BY_MODE.items() for name in names]
