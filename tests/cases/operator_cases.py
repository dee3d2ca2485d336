"""Calls of operators with the strategies that are legal for them, written down apart from the rules under test."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OperatorCase:
    """One call of one operator.

    `labels` is an einsum-like text: one letter per dimension of every input, `.` for a dimension that is broadcast.
    Equal letters are cut alike; letters in `whole` are never cut.
    """

    name: str
    call: Callable[..., Tensor]
    shapes: tuple[Shape, ...]
    labels: str
    whole: str = ""
    parameters: tuple[int, ...] = ()
    """Inputs that are parameters of the network instead of arguments."""
    kinds: str = ""
    """One letter per input: f float (default), c class index, i class index or 255, p probability, b bool, w weight
    without gradient, o offsets of bags among the indices before it."""
    classes: int = 0
    on_eight: bool = False
    """Also run on 8 ranks."""

    @property
    def input_labels(self):
        return self.labels.split(",")

    def kind(self, index):
        return self.kinds[index] if self.kinds else "f"

    def values(self, dtype):
        """Return the whole inputs, the same on every rank."""
        generator = torch.Generator().manual_seed(sum(map(ord, self.name)))
        made = []
        for index, shape in enumerate(self.shapes):
            match self.kind(index):
                case "c" | "i" as kind:
                    target = torch.randint(0, self.classes, shape, generator=generator)
                    made.append(torch.where(target == 1, 255, target) if kind == "i" else target)
                case "o":
                    begins = torch.randint(0, self.shapes[index - 1][0] + 1, shape, generator=generator).sort().values
                    made.append(torch.where(torch.arange(shape[0]) == 0, 0, begins))
                case "b":
                    made.append(torch.rand(shape, generator=generator) > 0.5)
                case "p":
                    made.append(torch.rand(shape, generator=generator, dtype=torch.float64).softmax(1).to(dtype))
                case "w":
                    made.append((torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5).to(dtype))
                case _:
                    made.append(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        return made

    def arguments(self, values):
        """Return those of its inputs that are no parameters."""
        return [value for index, value in enumerate(values) if index not in self.parameters]

    def is_differentiable(self, index):
        return self.kind(index) == "f"

    def candidates(self, parts):
        """Yield every strategy with these numbers, legal or not."""
        dims = [len(shape) for shape in self.shapes]
        for flat in itertools.product(parts, repeat=sum(dims)):
            rest = iter(flat)
            yield tuple(tuple(itertools.islice(rest, count)) for count in dims)

    def why_illegal(self, strategy, world_size):
        """Return what is wrong with a strategy, or an empty string."""
        parts = {}
        reasons = []
        for labels, numbers, shape in zip(self.input_labels, strategy, self.shapes, strict=True):
            for label, number, size in zip(labels, numbers, shape, strict=True):
                if number > 1 and (label == "." or label in self.whole):
                    reasons.append("whole")
                elif size % number:
                    reasons.append("size")
                elif label != "." and parts.setdefault(label, number) != number:
                    reasons.append("unequal")
        if reasons:
            return reasons[0]
        return "" if world_size % math.prod(parts.values()) == 0 else "product"

    def legal(self, world_size):
        """Return every legal strategy."""
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        letters = sorted({c for labels in self.input_labels for c in labels if c != "." and c not in self.whole})
        found = []
        for numbers in itertools.product(divisors, repeat=len(letters)):
            if math.prod(numbers) <= world_size:
                parts = dict(zip(letters, numbers, strict=True))
                strategy = tuple(tuple(parts.get(c, 1) for c in labels) for labels in self.input_labels)
                if not self.why_illegal(strategy, world_size):
                    found.append(strategy)
        return found


class OperatorNetwork(nn.Module):
    """Calls one operator in a module of its own, `op`; some of its inputs are parameters."""

    def __init__(self, case, values):
        super().__init__()
        self.op = _Call(case.call)
        self._names = [f"p{index}" if index in case.parameters else "" for index in range(len(case.shapes))]
        self.count = self._names.count("")
        for index in case.parameters:
            self.register_parameter(f"p{index}", nn.Parameter(values[index].clone()))

    def forward(self, *tensors):
        given = iter(tensors)
        return self.op(*[getattr(self, name) if name else next(given) for name in self._names])


class _Call(nn.Module):
    def __init__(self, call):
        super().__init__()
        self._call = call

    def forward(self, *tensors):
        return self._call(*tensors)


def _cross_entropy(**settings):
    def call(scores, target, weight=None):
        return F.cross_entropy(scores, target, weight, **settings)

    return call


def _bce(**settings):
    return lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **settings)


BINARY = [
    OperatorCase("linear", F.linear, ((4, 8), (4, 8)), "bk,nk", parameters=(1,), on_eight=True),
    OperatorCase("linear-bias", F.linear, ((4, 8), (8, 8), (8,)), "bk,nk,n", parameters=(1, 2), on_eight=True),
    OperatorCase("linear-3d", F.linear, ((4, 2, 8), (4, 8)), "abk,nk", parameters=(1,)),
    OperatorCase("linear-3d-bias", F.linear, ((2, 4, 4), (4, 4), (4,)), "abk,nk,n", parameters=(1, 2)),
    OperatorCase("linear-odd", F.linear, ((6, 4), (2, 4), (2,)), "bk,nk,n", parameters=(1, 2)),
    OperatorCase("linear-of-arguments", F.linear, ((4, 8), (4, 8), (4,)), "bk,nk,n"),
    OperatorCase("matmul-2d", torch.matmul, ((4, 8), (8, 4)), "mk,kn", parameters=(1,), on_eight=True),
    OperatorCase("matmul-3d", torch.matmul, ((4, 4, 8), (4, 8, 2)), "bmk,bkn"),
    OperatorCase("matmul-3d-by-2d", torch.matmul, ((2, 4, 8), (8, 4)), "bmk,kn", parameters=(1,), on_eight=True),
    OperatorCase("matmul-2d-by-3d", torch.matmul, ((4, 8), (2, 8, 4)), "mk,bkn", parameters=(0,)),
    OperatorCase("matmul-broadcast-batch", torch.matmul, ((1, 4, 8), (4, 8, 2)), ".mk,bkn"),
    OperatorCase("matmul-4d", torch.matmul, ((2, 1, 4, 4), (4, 4, 2)), "a.mk,bkn", parameters=(1,)),
    OperatorCase("matmul-vector-right", torch.matmul, ((4, 8), (8,)), "mk,k", parameters=(1,)),
    OperatorCase("matmul-vector-left", torch.matmul, ((8,), (8, 4)), "k,kn", parameters=(0,)),
    OperatorCase("mm", torch.mm, ((4, 8), (8, 4)), "mk,kn", parameters=(0,)),
    OperatorCase("bmm", torch.bmm, ((4, 2, 8), (4, 8, 4)), "bmk,bkn"),
    OperatorCase("addmm", torch.addmm, ((4,), (8, 4), (4, 4)), "n,mk,kn", parameters=(0, 2), on_eight=True),
    OperatorCase("addmm-full", torch.addmm, ((4, 4), (4, 8), (8, 4)), "mn,mk,kn", parameters=(2,)),
    OperatorCase("addmm-row", torch.addmm, ((1, 4), (4, 8), (8, 4)), ".n,mk,kn", parameters=(0, 2)),
    OperatorCase("addmm-column", torch.addmm, ((4, 1), (4, 8), (8, 4)), "m.,mk,kn", parameters=(0, 2)),
    OperatorCase(
        "addmm-scaled",
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
        ((4,), (4, 8), (8, 4)),
        "n,mk,kn",
        whole="k",
        parameters=(0, 2),
    ),
    OperatorCase("add", torch.add, ((4, 8), (4, 8)), "ab,ab", parameters=(1,), on_eight=True),
    OperatorCase("add-scaled", lambda a, b: torch.add(a, b, alpha=-3), ((4, 8), (4, 8)), "ab,ab"),
    OperatorCase("mul-broadcast-right", torch.mul, ((4, 8), (8,)), "ab,b", parameters=(1,), on_eight=True),
    OperatorCase("mul-broadcast-left", torch.mul, ((8,), (4, 8)), "b,ab", parameters=(0,)),
    OperatorCase("sub-broadcast-row", torch.sub, ((4, 8), (1, 8)), "ab,.b", parameters=(1,)),
    OperatorCase("div-broadcast-column", lambda a, b: a / (2 + b.abs()), ((4, 8), (4, 1)), "ab,a."),
    OperatorCase("mul-outer", torch.mul, ((4, 1), (1, 8)), "a.,.b", parameters=(0,), on_eight=True),
    OperatorCase("mul-number", torch.mul, ((4, 8), ()), "ab,", parameters=(1,)),
    OperatorCase("maximum-3d", torch.maximum, ((2, 4, 4), (4, 1)), "abc,b.", parameters=(1,)),
    OperatorCase("where", torch.where, ((4, 8), (4, 8), (8,)), "ab,ab,b", kinds="bff", parameters=(2,)),
    OperatorCase("addcmul", torch.addcmul, ((4, 4), (4, 4), (4,)), "ab,ab,b", parameters=(2,)),
    OperatorCase("lerp", torch.lerp, ((4, 4), (4, 4), (4, 1)), "ab,ab,a."),
    OperatorCase("mse-mean", F.mse_loss, ((4, 8), (4, 8)), "ab,ab", on_eight=True),
    OperatorCase("mse-sum", lambda x, y: F.mse_loss(x, y, reduction="sum"), ((4, 8), (4, 8)), "ab,ab"),
    OperatorCase("mse-none", lambda x, y: F.mse_loss(x, y, reduction="none"), ((4, 8), (4, 8)), "ab,ab"),
    OperatorCase("l1-mean", F.l1_loss, ((4, 2, 8), (4, 2, 8)), "abc,abc"),
    OperatorCase("l1-sum", lambda x, y: F.l1_loss(x, y, reduction="sum"), ((8, 4), (8, 4)), "ab,ab", parameters=(1,)),
    OperatorCase("l1-none", lambda x, y: F.l1_loss(x, y, reduction="none"), ((8, 4), (8, 4)), "ab,ab"),
    OperatorCase("smooth-l1", F.smooth_l1_loss, ((4, 8), (4, 8)), "ab,ab"),
    OperatorCase("huber-sum", lambda x, y: F.huber_loss(x, y, reduction="sum"), ((4, 8), (4, 8)), "ab,ab"),
    OperatorCase(
        "bce-with-logits-weights",
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, weight=w),
        ((4, 8), (4, 8), (8,)),
        "ab,ab,b",
        kinds="fpw",
    ),
    OperatorCase("ce-mean", _cross_entropy(), ((8, 4), (8,)), "bc,b", kinds="fc", classes=4, on_eight=True),
    OperatorCase("ce-sum", _cross_entropy(reduction="sum"), ((8, 4), (8,)), "bc,b", kinds="fc", classes=4),
    OperatorCase("ce-none", _cross_entropy(reduction="none"), ((8, 4), (8,)), "bc,b", kinds="fc", classes=4),
    OperatorCase("ce-ignore", _cross_entropy(ignore_index=1), ((8, 4), (8,)), "bc,b", kinds="fc", classes=4),
    OperatorCase(
        "ce-ignored-index-is-no-class",
        _cross_entropy(ignore_index=255),
        ((8, 4), (8,), (4,)),
        "bc,b,c",
        kinds="fiw",
        classes=4,
    ),
    OperatorCase("ce-smoothing", _cross_entropy(label_smoothing=0.2), ((8, 4), (8,)), "bc,b", "", (), "fc", 4),
    OperatorCase("ce-weights", _cross_entropy(), ((8, 4), (8,), (4,)), "bc,b,c", "", (), "fcw", 4, on_eight=True),
    OperatorCase(
        "ce-weights-ignore-smoothing",
        _cross_entropy(ignore_index=2, label_smoothing=0.1),
        ((8, 4), (8,), (4,)),
        "bc,b,c",
        kinds="fcw",
        classes=4,
    ),
    OperatorCase(
        "ce-probabilities-weights-smoothing",
        _cross_entropy(label_smoothing=0.3),
        ((8, 4), (8, 4), (4,)),
        "bc,bc,c",
        kinds="fpw",
    ),
    OperatorCase("ce-probabilities", _cross_entropy(), ((8, 4), (8, 4)), "bc,bc", kinds="fp"),
    OperatorCase("ce-spatial", _cross_entropy(), ((4, 3, 2, 4), (4, 2, 4)), "bcst,bst", "", (), "fc", 3),
    OperatorCase("ce-spatial-none", _cross_entropy(reduction="none"), ((4, 3, 4), (4, 4)), "bcs,bs", "", (), "fc", 3),
    OperatorCase(
        "ce-spatial-weights-ignore",
        _cross_entropy(ignore_index=0),
        ((4, 3, 4), (4, 4), (3,)),
        "bcs,bs,c",
        kinds="fcw",
        classes=3,
    ),
    OperatorCase("nll", lambda x, y: F.nll_loss(x, y), ((8, 4), (8,)), "bc,b", kinds="fc", classes=4),
    OperatorCase("nll-sum", lambda x, y: F.nll_loss(x, y, reduction="sum"), ((8, 4), (8,)), "bc,b", "", (), "fc", 4),
    OperatorCase("no-rule", torch.cdist, ((4, 8), (4, 8)), "..,..", parameters=(1,)),
    OperatorCase("bilinear-without-rule", F.bilinear, ((4, 8), (4, 2), (3, 8, 2)), "..,..,...", "", (2,)),
]
"""Operators that take a strategy."""

UNARY = [
    OperatorCase("relu", torch.relu, ((4, 8),), "ab"),
    OperatorCase("gelu-of-number", lambda x: F.gelu(x) * 2.5 + 1, ((4, 2, 4),), "abc"),
    OperatorCase("reshape-merge", lambda x: x.reshape(8, 4), ((4, 2, 4),), "a.b"),
    OperatorCase("reshape-split", lambda x: x.reshape(2, 2, 8), ((4, 8),), "ab"),
    OperatorCase("reshape-mixed", lambda x: x.reshape(6, 4), ((4, 6),), "a."),
    OperatorCase("flatten", lambda x: x.flatten(1), ((4, 2, 4),), "ab."),
    OperatorCase("flatten-all", torch.flatten, ((4, 4),), "a."),
    OperatorCase("unsqueeze", lambda x: x.unsqueeze(1), ((4, 8),), "ab"),
    OperatorCase("squeeze", lambda x: x.squeeze(1), ((4, 1, 8),), "a.b"),
    OperatorCase("permute", lambda x: x.permute(2, 0, 1), ((4, 2, 4),), "abc", on_eight=True),
    OperatorCase("transpose", lambda x: x.transpose(-1, 0), ((4, 2, 8),), "abc"),
    OperatorCase("t", torch.t, ((4, 8),), "ab"),
    OperatorCase("expand", lambda x: x.expand(4, -1, 4), ((8, 1),), "a."),
    OperatorCase("softmax", lambda x: x.softmax(-1), ((4, 2, 4),), "abc"),
    OperatorCase("log-softmax", lambda x: F.log_softmax(x, 0), ((4, 8),), "ab"),
    OperatorCase("cumsum", lambda x: x.cumsum(1), ((4, 4),), "ab", "b"),
    OperatorCase("sum-all", torch.sum, ((4, 8),), "ab", on_eight=True),
    OperatorCase("sum-dim", lambda x: x.sum(1), ((4, 2, 4),), "abc"),
    OperatorCase("sum-dims-kept", lambda x: x.sum((0, -1), keepdim=True), ((4, 2, 4),), "abc"),
    OperatorCase("mean-all", torch.mean, ((4, 8),), "ab"),
    OperatorCase("mean-dim", lambda x: x.mean(0), ((4, 8),), "ab"),
    OperatorCase("mean-dims-kept", lambda x: x.mean((1, 2), keepdim=True), ((4, 2, 4),), "abc", on_eight=True),
    OperatorCase("amax", lambda x: x.amax(1), ((4, 8),), "ab", "b"),
    OperatorCase("bce-with-logits-mean", lambda x: _bce()(x, x.detach().flip(1)), ((4, 8),), "ab"),
    OperatorCase("bce-with-logits-sum", lambda x: _bce(reduction="sum")(x, x.detach() * 2), ((4, 8),), "ab"),
    OperatorCase("bce-with-logits-none", lambda x: _bce(reduction="none")(x, x.detach()), ((4, 8),), "ab"),
    OperatorCase("matrix-by-itself", lambda x: x @ x, ((4, 4),), "ab"),
    OperatorCase("matrix-by-its-transpose", lambda x: x.T @ x, ((4, 8),), "ab"),
    OperatorCase("chunks", lambda x: torch.mul(*x.chunk(2, 1)), ((4, 8),), ".."),
    OperatorCase("largest-of-each-row", lambda x: x.max(dim=1).values, ((4, 8),), ".."),
    OperatorCase("flip", lambda x: x.flip(0), ((4, 8),), ".."),
    OperatorCase("written-in-place", lambda x: F.relu_((x * 2).add_(1)), ((4, 8),), "ab"),
]
"""Operators that keep their input's cut: every layout of the input is tried."""
