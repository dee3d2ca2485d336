"""The grammar: draws case `number` of a seed. What it draws is meant to be legal, or refused by name."""

import random
from dataclasses import replace

import random_networks.network  # noqa: F401  # brings all blocks
from random_networks.blocks import BLOCKS, WRITES
from random_networks.case import FAMILIES, Case, Piece
from random_networks.habits import WEIGHT_READS, WEIGHT_WRITES
from random_networks.training import MASKED, crosses_rows, draws

SCHEDULERS = (
    "gpipe",
    "1f1b",
    "eager_1f1b",
    "zero_bubble",
    "zbv",
    "dualpipev",
    "1f1b interleaved",
    "zero_bubble interleaved",
)
RETURNS = (
    *["loss"] * 5,
    *("tuple", "dict", "list", "namedtuple", "dataclass", "record", "nested", "unread"),
    *("scores", "scores", "both", "two"),
)
MODULE_HOOKS = ("backward", "backward_pre", "seen_backward")
NEED_A_CAPTURE = ("recompute", "hook", "deferred")
"""Habits that modes without a capture take in another way."""
LEVELS = ("level1", "level2", "level3", "level3")
OPTIMIZERS = {
    "sgd": (
        {"lr": 0.05},
        {"lr": 0.05, "momentum": 0.9},
        {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    # With the usual tiny eps, gradients that are zero but for rounding would move weights.
    "adam": ({"eps": 1e-5}, {"eps": 1e-5, "weight_decay": 0.1}, {"eps": 1e-5, "amsgrad": True}),
    "adamw": ({"lr": 1e-2, "eps": 1e-5}, {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.3}),
    "adagrad": ({"lr": 1e-2, "eps": 1e-5}, {"lr": 1e-2, "eps": 1e-5, "initial_accumulator_value": 0.1}),
    "rmsprop": ({"lr": 1e-3, "eps": 1e-5}, {"lr": 1e-3, "eps": 1e-5, "momentum": 0.9, "centered": True}),
    "adafactor": ({"lr": 1e-2, "eps": (1e-5, 1e-3)},),
    "muon": ({},),
}  # fmt: skip


SETTINGS = (
    ("transformer_opt", {"grad_matmul_communication_overlap": True}),
    ("comm_fusion", None),
    ("recompute", 1.0),
    ("disable_gradient_fp32_sync",),
)
"""Further setters of AutoParallel."""
RARELY = 0.05
"""How often a case keeps what the documentation refuses; scripts have it more seldom than the dice would."""


def draw_case(seed, number, world_sizes=(2, 2, 4)):
    """Return one case, the same in every process."""
    rng = random.Random(f"{seed}/{number}")
    world_size = rng.choice(list(world_sizes))
    family = rng.choice([*FAMILIES, "vectors"])
    is_16_bit = rng.random() < 0.12
    case = Case(
        world_size,
        family,
        draw_pieces(rng, family, is_16_bit=is_16_bit),
        seed=rng.randrange(1, 10**6),
        rows=32 if world_size == 8 else 16,
        is_16_bit=is_16_bit,
    )
    if family == "sequences" and rng.random() < 0.4:
        case = case.changed(from_words=True, has_tied_head=rng.random() < 0.5)
    case = case.changed(
        loss=rng.choice(["mse", "mse", "cross_entropy", "penalty", "by_hand", "masked", "ignored"]),
        returns=rng.choice(RETURNS),
        dataset=rng.choice(["data_parallel", "full_batch"]),
    )
    if case.returns == "scores" and case.loss in MASKED:
        case = case.changed(loss="mse")  # outside, each rank would divide by its own count
    case = draw_division(rng, case)
    if case.pipeline is not None and rng.random() < 0.97:
        case = case.changed(returns="loss")  # a pipeline in training takes nothing else
    if case.wrappers and case.returns not in ("loss", "tuple", "dict", "unread"):
        case = case.changed(returns="loss")  # parts of a batch are joined by a loss that comes first
    if rng.random() < 0.45:
        case = case.changed(hsdp={"optimizer_level": rng.choice(LEVELS), "threshold": 0, "shard_size": -1})
        if case.world_size >= 4 and case.pipeline is None and rng.random() < 0.2:
            case = case.changed(hsdp={**(case.hsdp or {}), "shard_size": 2})
    if rng.random() < 0.45:
        case = case.changed(cuts=draw_cuts(rng, case))
    case = draw_optimizer(rng, case)
    case = case.changed(habits=draw_habits(rng, case))
    if rng.random() < 0.1 and case.pipeline is None and case.returns in ("loss", "tuple", "unread"):
        case = case.changed(form="step")
    if rng.random() < 0.1:
        case = case.changed(settings=(rng.choice(SETTINGS),))
    if rng.random() < 0.2:
        finishes = ["state_dict", "deepcopy", "averaged", "ema", "ema_later", "lookahead"]
        case = case.changed(finish=rng.choice(finishes))
    case = with_few_refusals(rng, draw_script(rng, draw_mode(rng, case)))
    if case.pipeline is not None and case.returns == "both":
        return case.changed(returns="tuple")  # ranks of other stages have no scores to take a loss of
    return case


def with_few_refusals(rng, case):
    """Return the case without most of what the documentation refuses plainly, each thing by itself."""

    def drops():
        return rng.random() >= RARELY

    is_captured = case.mode != "data_parallel"
    names = {habit[0] for habit in case.habits}
    pieces, habits = list(case.pieces), []
    for index, piece in enumerate(pieces):
        # Few scripts checkpoint what has nothing to train before it, with the form that torch has given up, ...
        is_first = not case.from_words and not any(
            _has_parameters(case, i) and ("frozen", i) not in case.habits for i in range(index)
        )
        if is_captured and is_first and piece.options.get("use_reentrant") and drops():
            pieces[index] = replace(piece, options={**piece.options, "use_reentrant": False})
        # ... and few that divide their batch count their calls in Python and compute with the count.
        if is_captured and piece.options.get("how") == "python_count" and case.parts > 1 and drops():
            pieces[index] = replace(piece, options={**piece.options, "how": "count"})
        # Who draws from Python's random, or divides by its count of calls, runs under DDP.
        if is_captured and piece.kind == "UsersNumbers" and drops():
            pieces[index] = replace(piece, kind="Reordered", options={"how": "roll"})
        if is_captured and piece.kind == "BatchNorm2d" and piece.options["momentum"] is None and drops():
            pieces[index] = replace(piece, options={"momentum": 0.1})
    for habit in case.habits:
        # Hooks of modules on gradients are for debugging; those of parameters and activations are in training scripts.
        if is_captured and habit[0] == "hook" and habit[1] in MODULE_HOOKS and drops():
            habit = ("hook", "parameter", habit[2])
        if habit[0] == "hook" and habit[1] == "seen" and case.parts > 1 and drops():
            habit = ("hook", "forward", habit[2])
        # Networks without memory are seldom converted before they have it.
        if habit[0] == "deferred" and "channels_last" in names and drops():
            continue
        habits.append(habit)
    case = case.changed(pieces=tuple(pieces), habits=tuple(habits))
    # FSDP2's networks cannot be copied: who averages them uses checkpoints, or a copy from before the first call.
    if not is_captured and case.hsdp and case.finish in ("deepcopy", "averaged", "ema_later") and drops():
        case = case.changed(finish="state_dict")
    # What a rank of a pipeline keeps depends on its stage: the documentation says to name what is recomputed.
    if case.pipeline is not None and case.settings[:1] == (("recompute", 1.0),) and drops():
        case = case.changed(settings=())
    # A copy of a network without values gets none, ...
    if "deferred" in names and case.finish == "ema" and drops():
        case = case.changed(finish="ema_later")
    # ... and an optimizer with state from its first moment needs weights that are there.
    if "deferred" in names and case.optimizer[0] == "adagrad" and drops():
        case = case.changed(optimizer_made="after")
    return case


def draw_mode(rng, case):
    """Return the case in a mode that searches, or in one without capture where that promises one process' numbers."""
    # Scripts that draw from Python's random run under DDP, and are refused under capture.
    often = 0.9 if any(piece.kind == "UsersNumbers" for piece in case.pieces) else 0.25
    if rng.random() < often and not (draws(case) or crosses_rows(case) or case.is_16_bit or case.form == "step"):
        habits = tuple(habit for habit in case.habits if habit[0] not in NEED_A_CAPTURE)
        case = case.changed(
            mode="data_parallel",
            dataset="data_parallel",
            pipeline=None,
            wrappers=(),
            cuts=(),
            settings=(),
            habits=habits,
        )
        if case.hsdp is not None:
            case = case.changed(hsdp={**case.hsdp, "shard_size": -1})
    elif rng.random() < 0.1 and case.pipeline is None:
        case = case.changed(mode=rng.choice(["dynamic_programming", "recursive_programming", "sharding_propagation"]))
    return case


def draw_script(rng, case):
    """Return the case with what its script does beside one call and one backward pass in each step."""
    if case.pipeline is not None or case.form == "step" or case.is_16_bit:
        return case
    if case.returns == "two":
        case = case.changed(backward=rng.choice(["once", "once", "retain"]))
    elif rng.random() < 0.15:
        case = case.changed(backward=rng.choice(["calls", "reversed"]))
    names = {habit[0] for habit in case.habits}
    if case.family == "vectors" and case.returns == "loss" and not case.wrappers and "smaller" not in names:
        hidden = rng.choice(["", "", "", "detached", "kept"])
        if hidden:
            case = case.changed(hidden=hidden, returns="tuple", backward="calls" if hidden == "kept" else "once")
    can_be_a_chain = not (case.wrappers or case.hidden or case.has_tied_head or draws(case) or len(case.pieces) < 2)
    if can_be_a_chain and not names & {"deferred", "recompute", "tie"} and rng.random() < 0.2:
        case = case.changed(chain=rng.randrange(1, len(case.pieces)))
    return case


def draw_pieces(rng, family, *, is_16_bit):
    """Return two to five blocks; not two kinds that cannot be compared together."""
    kinds = [kind for kind, block in BLOCKS.items() if family in block.families and (block.in_16_bits or not is_16_bit)]
    weights = [BLOCKS[kind].weight for kind in kinds]
    found = []
    for kind in rng.choices(kinds, weights, k=rng.choice([2, 3, 3, 4, 5])):
        wire = rng.choice(["chain", "chain", "chain", "residual", "residual", "skip", "twice"])
        found.append(Piece(kind, BLOCKS[kind].options(rng), wire))
    return tuple(found)


def draw_division(rng, case):
    """Let a pipeline, copies and accumulation divide the batch."""
    if rng.random() < (0.05 if crosses_rows(case) else 0.4):  # stages refuse buffers that forward writes
        stages = rng.choice([2, case.world_size]) if case.world_size > 2 else 2
        word, _, interleaved = rng.choice(SCHEDULERS).partition(" ")
        micro = 2 * stages if word in ("dualpipev", "zbv") else rng.choice([stages, 2 * stages])
        case = case.changed(
            pipeline={"stages": stages, "scheduler": word, "interleave": bool(interleaved), "micro_size": min(micro, 8)}
        )
        stages *= 2 if interleaved or word in ("dualpipev", "zbv") else 1
        if len(case.pieces) < stages and rng.random() >= RARELY:  # who has so many stages has more blocks
            kinds = [kind for kind in ("Custom", "Reordered", "Results", "Hooked") if BLOCKS[kind].in_16_bits or not case.is_16_bit]  # fmt: skip  # noqa: E501
            more = rng.choices(kinds, k=stages - len(case.pieces))
            case = case.changed(pieces=case.pieces + tuple(Piece(kind, BLOCKS[kind].options(rng)) for kind in more))
    if rng.random() < 0.35:
        kinds = rng.choice([("copies",), ("accumulate",), ("copies", "accumulate"), ("accumulate", "copies")])
        if case.pipeline is not None:
            kinds = ("copies",)
        case = case.changed(wrappers=tuple((kind, 2) for kind in kinds))
    if draws(case) and crosses_rows(case):
        case = case.changed(dataset="full_batch")  # masks belong to rows, and so rows may not change places
    while case.rows // case.data_ranks // case.parts < 1:
        case = case.changed(dataset="full_batch") if case.data_ranks > 1 else case.changed(wrappers=())
    return case


def draw_cuts(rng, case):
    """Return strategies of modules."""
    ranks = case.world_size // (case.pipeline["stages"] if case.pipeline else 1)
    found = []
    as_names = rng.random() < 0.25 and ranks > 1
    for index, piece in enumerate(case.pieces):
        for name, kind in BLOCKS[piece.kind].cuts.items():
            if rng.random() < 0.6:
                draw = _draw_names if as_names and kind == "linear" else _draw_numbers
                found.append((f"blocks.{index}.{name}", draw(rng, case, kind, ranks, piece.options)))
    if case.from_words and not case.has_tied_head and rng.random() < 0.5:
        rows, width = _factors(rng, ranks, 2)
        found.append(("embed", {"in_strategy": [[1, 1], [rows if 12 % rows == 0 else 1, width]]}))
    return tuple(found)


def _factors(rng, ranks, count):
    """Return `count` powers of two whose product is at most the number of ranks."""
    found = [1] * count
    while ranks > 1:
        place = rng.randrange(count + 1)
        if place < count:
            found[place] *= 2
        ranks //= 2
    return found


def _draw_numbers(rng, case, kind, ranks, options):
    rows, outputs, inputs = _factors(rng, ranks, 3)
    middle = [1] if case.family == "sequences" else []
    if kind == "conv":
        groups = options["groups"]
        if groups > 1:  # a group's channels of both sides go together
            outputs = min(outputs, groups)
            return {"in_strategy": [[rows, outputs, 1, 1], [outputs, 1, 1, 1]]}
        return {"in_strategy": [[rows, inputs, 1, 1], [outputs, inputs, 1, 1]]}
    if kind == "elementwise":
        shape = {"vectors": 2, "sequences": 3, "images": 4}[case.family]
        split = _factors(rng, ranks, 2)
        return {"in_strategy": [[*split, *[1] * (shape - 2)]]}
    if kind == "layer_norm":
        return {"in_strategy": [[rows, *([outputs] if middle else []), 1], [1], [1]]}
    found = {"in_strategy": [[rows, *middle, inputs], [outputs, inputs]]}
    choice = rng.random()
    if choice < 0.2:
        found["out_strategy"] = [[rows, *middle, outputs]]
    elif choice < 0.35:
        found["out_strategy"] = [[rows * inputs, *middle, outputs]]
    elif choice < 0.5:
        split = _factors(rng, ranks, 2 + len(middle))
        found["out_strategy"] = [split]
    return found


def _draw_names(rng, case, kind, ranks, options):
    matrix = rng.choice([[1, ranks], [ranks, 1], [2, ranks // 2]])
    middle = ["None"] if case.family == "sequences" else []
    if rng.random() < 0.5:
        found = {"in_strategy": [["dp", *middle, "None"], ["mp", "None"]]}
    else:
        found = {"in_strategy": [["dp", *middle, "mp"], ["None", "mp"]]}
        if rng.random() < 0.5:
            found["out_strategy"] = [[["dp", "mp"], *middle, "None"]]
    return {"matrix": matrix, **found}


def draw_optimizer(rng, case):
    """Return the case with an optimizer; in 16 bits SGD, whose step grows with the gradient and not with its sign."""
    kind = rng.choice(["sgd", "sgd", "sgd", "adam", "adamw", "adagrad", "rmsprop", "adafactor", "muon"])
    kind = "sgd" if case.is_16_bit else kind
    return case.changed(
        optimizer=(kind, rng.choice(OPTIMIZERS[kind])),
        optimizer_made=rng.choice(["before", "before", "after"]),
        clip=rng.choice(["none", "none", "none", "none", "torch", "msrun"]),
    )


def draw_habits(rng, case):
    """Return what is done to the network."""
    found = []
    count = len(case.pieces)
    for index, piece in enumerate(case.pieces):
        if hasattr(BLOCKS[piece.kind], "change"):
            found.append(("change", rng.choice([1, 2]), index))
    if rng.random() < 0.12:
        hooks = ["forward", "pre", "backward", "backward_pre", "parameter", "seen", "seen_backward"]
        index, kind = rng.randrange(count), rng.choice(hooks)
        if _has_parameters(case, index) and not (kind.startswith("seen") and case.pipeline):
            found.append(("hook", kind, index))
    if rng.random() < 0.1:
        found.append(("frozen", rng.randrange(count)))
    if rng.random() < 0.08:
        found.append(("recompute", rng.randrange(count)))
    if rng.random() < 0.06:
        found.append(("eval_block", 1, rng.randrange(count)))
    linear = [index for index, piece in enumerate(case.pieces) if piece.kind == "Linear"]
    if len(linear) > 1 and rng.random() < 0.6:
        found.append(("tie", linear[0], linear[-1]))
    if rng.random() < 0.1:
        found.append(("evaluate", rng.choice([0, 1, 2])))
    if rng.random() < 0.08 and case.rows // 2 // case.data_ranks // case.parts >= 1:
        found.append(("smaller", 1))
    if rng.random() < 0.1 and case.form == "module":
        found.append(("factor", rng.choice(["float", "flag", "object"])))
    may_be = [
        (0.06, "backward_twice", True),
        (0.06, "keep_zeros", True),
        (0.06, "rates", True),
        (0.1, "groups", case.optimizer[0] != "muon"),
        (0.15, "channels_last", case.family == "images"),
        (0.1, "deferred", True),
    ]
    found += [(name,) for share, name, can_be in may_be if rng.random() < share and can_be]
    for index, name in _written_modules(case):
        if rng.random() < 0.25:
            found.append(("write", index, name, rng.choice(list(WRITES))))
    places = [index for index in range(count) if _has_parameters(case, index, 2)] + [-1]
    if rng.random() < 0.15 and not case.is_16_bit:
        found.append(("weights", rng.choice([1, 2]), rng.choice(places), rng.choice(list(WEIGHT_WRITES))))
    if rng.random() < 0.1 and case.pipeline is None:
        found.append(("read", rng.choice([0, 1]), rng.choice(places), rng.choice(list(WEIGHT_READS))))
    least = case.world_size * case.parts  # an uneven mean is each rank's own in the modes without capture
    for step in range(1, case.steps):
        if rng.random() < 0.5 and not case.hidden:
            found.append(("sizes", step, least * rng.randint(1, max(1, 20 // least)), rng.choice([2, 3, 4, 5, 6, 7])))
    return tuple(found)


def _written_modules(case):
    """Return (block, module) of those that do not keep what they make for their backward pass."""
    found = [(-1, "head")] + ([(-1, "embed")] if case.from_words else [])
    for index, piece in enumerate(case.pieces):
        kept = "activation" if piece.options.get("how") in ("tanh", "softplus") else ""
        if piece.kind in ("Linear", "Mlp", "Norm", "Fused", "Conv", "Elementwise"):
            found += [(index, name) for name in BLOCKS[piece.kind].cuts if name != kept]
    return found


def _has_parameters(case, index, dims=0):
    """Return whether a block has parameters of so many dimensions."""
    piece = case.pieces[index]
    block = BLOCKS[piece.kind](case.family, **piece.options)
    return any(parameter.dim() >= dims for parameter in block.parameters())
