"""Which habits `make test` runs, and in which mode: some of every kind."""

_BY_MODE = {
    "semi_auto": (
        "loss outside",
        "loss of each row, mean outside",
        "ignored labels, more on one rank",
        "in-batch negatives",
        "results in a NamedTuple, loss outside",
        "hidden state handed on with its graph: two calls, one backward pass",
        "encoder and decoder, loss inside the decoder",
        "adversarial pair (GAN)",
        "inputs that require gradients",
        "write: the head of a detector",
        "draw: dropout",
        "draw: random.uniform",
        "vmap over the rows",
        "codebook that follows the batch (VQ-EMA)",
        "switch of experts with room for four rows",
        "straight-through estimator",
    ),
    "hsdp level1": ("loss outside", "EMA copied before the first call", "clip_grad_norm_"),
    "hsdp level3": (
        "a row set through .data",
        "rows' norms",
        "sharpness-aware minimization (SAM)",
        "optimizer: of the script: by the number of rows",
    ),
    "shard": ("write: a column set", "write: view of blocks", "FFT"),
    "pipeline": ("loss inside", "gradient accumulation by hand"),
    "data_parallel": (
        "loss outside",
        "mask of uneven rows, mean over what is left",
        "two calls, two backward passes in reverse order",
        "torch.autograd.grad of the parameters",
        "three networks in a chain",
        "part of the network unused in some steps",
        "batch norm",
    ),
    "data_parallel hsdp": (
        "losses of two calls added",
        "rows scaled by a slice",
        "deepcopy of what is wrapped, after a step, and both go on",
        "optimizer: Adam, foreach off, amsgrad",
        "embedding with padding_idx",
    ),
}
FAST = [f"{mode}/{name}" for mode, names in _BY_MODE.items() for name in names]
