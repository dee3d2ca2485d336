"""Operators of transformers with the strategies that are legal for them, written down apart from the rules."""

import dataclasses
import math

import torch
import torch.nn.functional as F  # noqa: N812
from operator_cases import OperatorCase

EVERY_CASE_IN = 2
ON_FOUR = """
embedding-2d embedding-padding gather gather-some index-select index-first index-outer attention attention-bias
attention-causal attention-ring-causal attention-ring-causal-odd attention-ring-mask attention-ring-bias
attention-heads-bias attention-grouped cat einsum einsum-heads baddbmm-scaled outer nll-cut-classes-weights-ignore
ce-none-smoothing-weights-ignore ce-sum-spatial-probabilities ce-of-large-scores split unbind tril triu
repeat-interleave movedim softmax-first softmax-of-masked log-softmax-of-large-values logsumexp-of-two topk
""".split()  # noqa: SIM905 - quotes would hide the names
"""In a world of four run these only: what has collectives or a place of its own in more than one dimension."""


def _attention(**settings):
    def call(query, key, value, mask=None):
        return F.scaled_dot_product_attention(query, key, value, mask, **settings)

    return call


def _composed(query, key, value, mask):
    scores = (query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))).masked_fill(mask, -1e9)
    return scores.softmax(-1) @ value


_ONE_LAYER = (False, 1, 0.0, True, False)
"""No biases, one layer, no dropout, training, one direction."""


def _lstm(*tensors, batch_first=True):
    """One layer: the sequence, two states of width 4, two weights -> the sequence, two states."""
    x, hidden, cell, *weights = tensors
    return torch.lstm(x, (hidden, cell), weights, *_ONE_LAYER, batch_first)


def _states_of_lstm(x):
    """Use the states after the last step, each with another weight."""
    weights = torch.linspace(-1, 1, 16, dtype=x.dtype).view(8, 2)
    _, hidden, cell = _lstm(x, x[None, :, 0], x[None, :, 1], weights, weights.flip(0))
    return (hidden + 2 * cell)[0]


def _gru(x, first, of_inputs, of_states):
    return torch.gru(x, first, (of_inputs, of_states), *(*_ONE_LAYER, True))[0]


def _cross_entropy(**settings):
    return lambda scores, target, weight=None: F.cross_entropy(scores, target, weight, **settings)


def _sum_of(call):
    """Use every result of an operator with several, each with another weight."""
    return lambda x: torch.stack([(i + 1) * part for i, part in enumerate(call(x))]).sum(0)


_BINARY = [
    OperatorCase(
        "lstm",
        lambda *x: _lstm(*x)[0],
        ((4, 3, 2), (1, 4, 4), (1, 4, 4), (16, 2), (16, 4)),
        "b..,.b.,.b.,..,..",
        "",
        (3, 4),
    ),
    OperatorCase(
        "lstm-steps-first",
        lambda *x: _lstm(*x, batch_first=False)[0],
        ((3, 4, 2), (1, 4, 4), (1, 4, 4), (16, 2), (16, 4)),
        ".b.,.b.,.b.,..,..",
        "",
        (3, 4),
    ),
    OperatorCase("gru", _gru, ((4, 3, 2), (1, 4, 4), (12, 2), (12, 4)), "b..,.b.,..,..", "", (2, 3)),
    OperatorCase("embedding", lambda w, i: F.embedding(i, w), ((8, 4), (4,)), "ve,i", "", (0,), "fc", 8),
    OperatorCase(
        "embedding-padding", lambda w, i: F.embedding(i, w, padding_idx=2), ((4, 2), (8, 2)), "ve,ij", "", (0,), "fc", 4
    ),
    OperatorCase("embedding-2d", lambda w, i: F.embedding(i, w), ((4, 4), (4, 2)), "ve,ij", "", (0,), "fc", 4),
    OperatorCase(
        "embedding-by-frequency",
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
        ((4, 4), (8,)),
        "ve,i",
        "vi",
        (0,),
        "fc",
        4,
    ),
    OperatorCase("gather", lambda x, i: x.gather(1, i), ((4, 4), (4, 2)), "av,ag", "", (), "fc", 4),
    OperatorCase("gather-first", lambda x, i: x.gather(0, i), ((4, 4), (2, 4)), "va,ga", "", (0,), "fc", 4),
    OperatorCase("gather-some", lambda x, i: x.gather(-1, i), ((4, 2, 4), (2, 2, 2)), ".bv,.bg", "", (), "fc", 4),
    OperatorCase("scatter", lambda x, i: x.scatter(1, i, 2.0), ((4, 4), (4, 2)), "a.,a.", "", (), "fc", 4),
    OperatorCase("scatter-some", lambda x, i: x.scatter(0, i, 2.0), ((4, 4, 4), (2, 2, 4)), "..c,..c", "", (), "fc", 4),
    OperatorCase(
        "scatter-add",
        lambda x, i, y: x.scatter_add(-1, i, y),
        ((4, 2, 4), (4, 2, 2), (4, 2, 2)),
        "ab.,ab.,ab.",
        "",
        (),
        "fcf",
        4,
    ),
    OperatorCase("index-select", lambda x, i: x.index_select(1, i), ((4, 4, 2), (4,)), "avc,i", "", (), "fc", 4),
    OperatorCase("index-select-last", lambda x, i: x.index_select(-1, i), ((4, 4), (2,)), "av,i", "", (0,), "fc", 4),
    OperatorCase("index-first", lambda x, i: x[i], ((4, 4), (4, 2)), "va,ij", "", (0,), "fc", 4),
    OperatorCase("index-second", lambda x, i: x[:, i], ((4, 4), (2, 2)), "av,ij", "", (), "fc", 4),
    OperatorCase("index-pair", lambda x, i, j: x[i, j], ((4, 4, 2), (4,), (4,)), "..c,i,i", "", (), "fcc", 4),
    OperatorCase("index-apart", lambda x, i, j: x[i, :, j], ((4, 2, 4), (4,), (4,)), ".b.,i,i", "", (), "fcc", 4),
    OperatorCase("index-outer", lambda x, i, j: x[:, i, j], ((2, 4, 4), (4, 1), (2,)), "a..,i.,j", "", (), "fcc", 4),
    OperatorCase("attention", _attention(), ((2, 4, 4, 4),) * 3, "bhle,bhle,bhlv", "e"),
    OperatorCase("attention-causal", _attention(is_causal=True, scale=0.3), ((2, 2, 4, 4),) * 3, "bhle,bhle,bhlv", "e"),
    OperatorCase("attention-ring", _attention(), ((1, 3, 8, 2),) * 3, "bhle,bhle,bhlv", "e"),
    OperatorCase(
        "attention-ring-causal",
        _attention(is_causal=True, enable_gqa=True),
        ((1, 3, 16, 2), (1, 1, 16, 2), (1, 1, 16, 4)),
        "bhle,b.le,b.lv",
        "e",
    ),
    OperatorCase(
        "attention-ring-causal-odd",
        _attention(is_causal=True, enable_gqa=True),
        ((1, 6, 12, 2), (1, 3, 12, 2), (1, 3, 12, 2)),
        "bhle,bhle,bhlv",
        "e",
    ),
    OperatorCase(
        "attention-ring-mask",
        _attention(),
        ((2, 3, 8, 2), (2, 3, 8, 2), (2, 3, 8, 2), (2, 1, 8, 8)),
        "bhle,bhle,bhlv,b.l.",
        "e",
        kinds="fffb",
    ),
    OperatorCase(
        "attention-ring-bias",
        _attention(enable_gqa=True),
        ((1, 6, 8, 2), (1, 3, 8, 2), (1, 3, 8, 2), (6, 1, 8)),
        "bhle,bhle,bhlv,h..",
        "e",
        parameters=(3,),
    ),
    OperatorCase(
        "attention-heads-bias",
        _attention(enable_gqa=True),
        ((1, 8, 4, 2), (1, 4, 4, 2), (1, 4, 4, 2), (8, 4, 4)),
        "bhle,bhle,bhlv,hl.",
        "e",
        parameters=(3,),
    ),
    OperatorCase(
        "attention-of-other-lengths", _attention(), ((2, 2, 4, 8), (2, 2, 6, 8), (2, 2, 6, 4)), "bhle,bhse,bhsv", "se"
    ),
    OperatorCase("attention-3d", _attention(), ((4, 4, 2),) * 3, "hle,hle,hlv", "e"),
    OperatorCase(
        "attention-mask",
        _attention(),
        ((2, 2, 4, 4), (2, 2, 4, 4), (2, 2, 4, 4), (4, 4)),
        "bhle,bhle,bhlv,l.",
        "e",
        kinds="fffb",
    ),
    OperatorCase(
        "attention-bias",
        _attention(),
        ((2, 2, 2, 4), (2, 2, 4, 4), (2, 2, 4, 2), (2, 1, 4)),
        "bhle,bhse,bhsv,h.s",
        "se",
        parameters=(3,),
    ),
    OperatorCase(
        "attention-mask-of-keys",
        _attention(),
        (*((2, 2, 4, 4),) * 3, (2, 1, 1, 4)),
        "bhle,bhle,bhlv,b...",
        "e",
        kinds="fffb",
    ),
    OperatorCase(
        "attention-grouped",
        _attention(enable_gqa=True),
        ((2, 4, 2, 4), (2, 2, 4, 4), (2, 2, 4, 4)),
        "bhle,bhse,bhsv",
        "se",
    ),
    OperatorCase("cat", lambda x, y: torch.cat([x, y], 1), ((4, 2), (4, 4)), "a.,a.", parameters=(1,)),
    OperatorCase("cat-empty", lambda x, y: torch.cat([x, y], 1), ((0,), (4, 4)), ".,ab"),
    OperatorCase("cat-first", lambda x, y: torch.cat([x, y, x]), ((4, 4), (2, 4)), ".b,.b", parameters=(1,)),
    OperatorCase("stack", lambda x, y: torch.stack([x, y], 1), ((4, 4), (4, 4)), "ab,ab", parameters=(1,)),
    OperatorCase("hstack", lambda x, y: torch.hstack([x, y]), ((4, 2), (4, 4)), "a.,a."),
    OperatorCase("expand-as", lambda x, y: x.expand_as(y), ((4, 1), (4, 8)), "a.,ab", kinds="fw"),
    OperatorCase("einsum", lambda x, y: torch.einsum("bij,kj->bik", x, y), ((2, 4, 4), (4, 4)), "bij,kj", "", (1,)),
    OperatorCase("einsum-heads", lambda x, y: torch.einsum("bqhd,bkhd->bhqk", x, y), ((2, 2, 2, 4),) * 2, "bqhd,bkhd"),
    OperatorCase("einsum-dots", lambda x, y: torch.einsum("...ij,jk", x, y), ((2, 4, 4), (4, 2)), "aij,jk", "", (1,)),
    OperatorCase("einsum-diagonal", lambda x, y: torch.einsum("ii,ij->ij", x, y), ((4, 4), (4, 4)), "..,.j"),
    OperatorCase(
        "baddbmm-of-products-alone",
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0, alpha=2),
        ((2, 4, 4),) * 3,
        "bmn,bmk,bkn",
        kinds="wff",
    ),
    OperatorCase("mv", torch.mv, ((4, 8), (8,)), "mk,k", parameters=(1,)),
    OperatorCase("outer", torch.outer, ((4,), (8,)), "m,n", parameters=(1,)),
    OperatorCase("dot", torch.dot, ((8,), (8,)), "k,k", parameters=(1,)),
    OperatorCase(
        "baddbmm-scaled",
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=3),
        ((4,), (2, 2, 4), (2, 4, 4)),
        "n,bmk,bkn",
        parameters=(0,),
    ),
    OperatorCase(
        "nll-cut-classes-weights-ignore",
        lambda x, y, w: F.nll_loss(x, y, w, ignore_index=1),
        ((8, 4), (8,), (4,)),
        "bc,b,c",
        kinds="fcw",
        classes=4,
    ),
    OperatorCase(
        "ce-none-smoothing-weights-ignore",
        _cross_entropy(reduction="none", label_smoothing=0.2, ignore_index=1),
        ((4, 4), (4,), (4,)),
        "bc,b,c",
        kinds="fcw",
        classes=4,
    ),
    OperatorCase(
        "ce-sum-spatial-probabilities",
        _cross_entropy(reduction="sum", label_smoothing=0.2),
        ((2, 4, 4), (2, 4, 4)),
        "bcs,bcs",
        kinds="fp",
    ),
    OperatorCase(
        "ce-none-probabilities", _cross_entropy(reduction="none"), ((4, 4, 2), (4, 4, 2)), "bcs,bcs", kinds="fp"
    ),
    OperatorCase("ce-one-sample", _cross_entropy(), ((8,), ()), "c,", kinds="fc", classes=8),
    OperatorCase(
        "ce-of-large-scores", lambda x, y: F.cross_entropy(1e3 * x, y), ((4, 4), (4,)), "bc,b", "", (), "fc", 4
    ),
]


_UNARY = [
    OperatorCase(
        "composed-attention",
        lambda x: _composed(x, x * 2, x.flip(0), torch.ones(2, 2).triu(1).bool()),
        ((2, 4, 2, 4),),
        "",
    ),
    OperatorCase("split", _sum_of(lambda x: x.split(2, 1)), ((4, 4),), ""),
    OperatorCase("split-sizes", lambda x: x.split([1, 3], -1)[1] * x.split([1, 3], -1)[0], ((4, 4),), ""),
    OperatorCase("chunk", _sum_of(lambda x: x.chunk(2, 0)), ((4, 4, 2),), ""),
    OperatorCase("tensor-split", _sum_of(lambda x: x.tensor_split(2, 1)), ((4, 4),), ""),
    OperatorCase("unbind", _sum_of(lambda x: x.unbind(1)), ((4, 2, 4),), ""),
    OperatorCase("glu", F.glu, ((4, 8),), ""),
    OperatorCase("select", lambda x: x[:, 1] * x[:, -1], ((4, 2, 4),), ""),
    OperatorCase("slice", lambda x: x[1:3, ::2], ((4, 4, 2),), ""),
    OperatorCase("slice-of-all", lambda x: x[0:, :4], ((4, 4),), ""),
    OperatorCase("narrow", lambda x: x.narrow(1, 1, 2), ((4, 4),), ""),
    OperatorCase("none-and-ellipsis", lambda x: x[..., None, -1], ((4, 2, 4),), ""),
    OperatorCase("flip-two", lambda x: x.flip(0, 2), ((4, 2, 4),), ""),
    OperatorCase("roll", lambda x: x.roll(1, 1) * x.roll(3), ((4, 4),), ""),
    OperatorCase("roll-all", lambda x: x.roll(3), ((4, 4),), ""),
    OperatorCase("diff", lambda x: x.diff(dim=1, prepend=x[:, :1] - 1), ((4, 4, 2),), ""),
    OperatorCase("diff-of-diff", lambda x: x.diff(n=2, dim=0), ((4, 4),), ""),
    OperatorCase("states-of-lstm", _states_of_lstm, ((4, 3, 2),), ""),
    OperatorCase("and-of-masks", lambda x: x * ((x > 0) & (x.sum(0) < 1) | (x < -1)), ((4, 4),), ""),
    OperatorCase("pointwise-by-its-tag", lambda x: x.sinh() * torch.copysign(x, x[0]), ((4, 4),), ""),
    OperatorCase("tril", lambda x: x.tril(-1), ((2, 4, 4),), ""),
    OperatorCase("triu", lambda x: x.triu(1), ((4, 8),), ""),
    OperatorCase("repeat", lambda x: x.repeat(2, 1, 3), ((4, 2),), ""),
    OperatorCase("tile", lambda x: x.tile(2), ((4, 4),), ""),
    OperatorCase("repeat-interleave", lambda x: x.repeat_interleave(3, 1), ((4, 4, 2),), ""),
    OperatorCase("repeat-interleave-flat", lambda x: x.repeat_interleave(2), ((4, 4),), ""),
    OperatorCase("movedim", lambda x: x.movedim(0, 2).contiguous().mT, ((4, 2, 4),), ""),
    OperatorCase("swapaxes", lambda x: x.swapaxes(0, -1), ((4, 2, 4),), ""),
    OperatorCase("softmax-first", lambda x: x.softmax(0), ((4, 4, 2),), ""),
    OperatorCase("softmax-of-another-type", lambda x: x.softmax(1, torch.float64).to(x.dtype), ((4, 8),), ""),
    OperatorCase("log-softmax-of-large-values", lambda x: F.log_softmax(1e3 * x, 1), ((4, 8),), ""),
    OperatorCase(
        "softmax-of-masked", lambda x: x.masked_fill(torch.ones(4, 4).triu(1) > 0, -math.inf).softmax(1), ((4, 4),), ""
    ),
    OperatorCase("logsumexp-of-two", lambda x: (1e3 * x).logsumexp((0, 2), keepdim=True), ((4, 2, 4),), ""),
    OperatorCase("logsumexp", lambda x: x.logsumexp(1), ((4, 8),), ""),
    OperatorCase("topk", lambda x: x.topk(2, 1).values, ((4, 4),), ""),
    OperatorCase("topk-places", lambda x: x * x.topk(4).indices, ((4, 4),), ""),
    OperatorCase("sort", lambda x: x.sort(0, descending=True).values, ((4, 4),), ""),
    OperatorCase("argsort", lambda x: x * x.argsort(1), ((4, 4),), ""),
    OperatorCase("argmax", lambda x: x.sum(1) * x.argmax(1), ((4, 4),), ""),
    OperatorCase("argmax-all", lambda x: x * x.argmax() + x.argmax(0), ((4, 4),), ""),
    OperatorCase("max-with-places", lambda x: torch.add(*x.max(1, keepdim=True)), ((4, 4),), ""),
    OperatorCase("max-all", torch.max, ((4, 4),), ""),
    OperatorCase("cumprod", lambda x: x.cumprod(1), ((4, 4),), ""),
    OperatorCase("cummax", lambda x: x.cummax(0).values, ((4, 4),), ""),
    OperatorCase("var", lambda x: x.var(1, correction=1), ((4, 8),), ""),
    OperatorCase("std-all", torch.std, ((4, 8),), ""),
    OperatorCase("std-kept", lambda x: x.std((0, 1), unbiased=False, keepdim=True), ((4, 4, 2),), ""),
    OperatorCase("var-mean", lambda x: torch.mul(*torch.var_mean(x, 1)), ((4, 8),), ""),
    OperatorCase("norm", lambda x: x.norm(dim=1), ((4, 8),), ""),
    OperatorCase("norm-all", torch.norm, ((4, 8),), ""),
    OperatorCase("normalize", lambda x: F.normalize(x, dim=0), ((4, 8),), ""),
    OperatorCase("prod", lambda x: x.prod(1), ((4, 4),), ""),
    OperatorCase("any-and-all", lambda x: x * (x > 0).any(1, keepdim=True) * (x > -9).all(), ((4, 4),), ""),
    OperatorCase("one-hot", lambda x: x.unsqueeze(-1) * F.one_hot((x > 0).long(), 3), ((4, 4),), ""),
    OperatorCase("causal-mask", lambda x: x.masked_fill(torch.ones(4, 4).tril() == 0, -7.0), ((2, 4, 4),), ""),
    OperatorCase("arange", lambda x: x * torch.arange(4) + torch.eye(4), ((4, 4),), ""),
    OperatorCase("new-ones", lambda x: x + x.new_ones(4, 4) * x.new_full((4,), 2.0), ((4, 4),), ""),
    OperatorCase("scalar-constant", lambda x: torch.where(x > 0, x, torch.tensor(1.0, dtype=x.dtype)), ((4, 4),), ""),
]


def _with_worlds(cases):
    return [dataclasses.replace(case, on_eight=case.name in ON_FOUR) for case in cases]


BINARY = _with_worlds(_BINARY)
"""Operators that take a strategy."""
UNARY = _with_worlds(_UNARY)
"""Operators whose every input layout is tried."""
MORE_TYPES = dict.fromkeys(ON_FOUR, ("float32",)) | {"attention-ring-causal": ("float32", "bfloat16")}
